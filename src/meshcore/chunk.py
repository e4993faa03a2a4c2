"""One chunk: its layout, how its tensors are used, and its buffers by role.

[Note: residency] ``home`` is where the values live: SHARDED over the shard axis, or REPLICATED
where there is one shard or the chunk is kept gathered. ``full`` is what a computation reads: a
REPLICATED device buffer in the compute dtype. Where home is that already, ``full`` *is* home and
costs nothing: "keep gathered" is no special case. Writes go through to home at once, so nothing is
ever dirty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshcore.backend import Array
from meshcore.buffers import Buffer
from meshcore.errors import BrokenBufferError, ChunkBusyError, NotGatheredError
from meshcore.layout import ChunkLayout, Slot
from meshcore.ledger import Category
from meshcore.pool import Pool
from meshcore.spec import BufferSpec, Memory, Placement, buffer_spec
from meshcore.state import TensorState, next_state

PARAM = "param"
"""The role of the values themselves, beside the names of optimizer states."""


@dataclass(frozen=True, slots=True)
class _HostCopy:
    """A host buffer that equals a version of home."""

    buffer: Buffer
    of_key: int
    of_version: int


class Chunk:
    """Tensors of one layout and their buffers.

    Attributes:
        layout: what is where.
        accessed: whether ``access`` was called and not undone.
        scopes: open ``gathered`` scopes.
    """

    def __init__(
        self, pool: Pool, layout: ChunkLayout, *, placement: Placement, compute_dtype: str
    ) -> None:
        self.layout = layout
        self.accessed = False
        self.scopes = 0
        self._pool = pool
        self._placement = placement
        self._compute_spec = self._spec(compute_dtype, Placement.REPLICATED)  # of ``full``
        self._states = {slot.name: TensorState.FREE for slot in layout.slots}
        self._homes: dict[str, Buffer] = {}
        self._full: Buffer | None = None
        self._host_copy: _HostCopy | None = None

    # --- what it is -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The layout's name."""
        return self.layout.name

    @property
    def placement(self) -> Placement:
        """Placement of home, and of everything that is sharded like it."""
        return self._placement

    @property
    def is_loaded(self) -> bool:
        """Whether it has values."""
        home = self._homes.get(PARAM)
        return home is not None and home.live

    @property
    def is_gathered(self) -> bool:
        """Whether a computation may read it now."""
        return (self.accessed or self.scopes > 0) and self._full is not None and self._full.live

    @property
    def memory(self) -> Memory:
        """Where home is."""
        home = self._homes.get(PARAM)
        return Memory.DEVICE if home is None else home.spec.memory

    @property
    def is_releasable(self) -> bool:
        """Whether it is gathered and no tensor of it is being computed with."""
        return self.is_gathered and not self.is_busy

    @property
    def states(self) -> Mapping[str, TensorState]:
        """State of every tensor, by name."""
        return dict(self._states)

    def state(self, slot: Slot) -> TensorState:
        """State of one tensor."""
        return self._states[slot.name]

    def set_state(self, slot: Slot, asked: TensorState) -> None:
        """Move one tensor through the table of states."""
        self._states[slot.name] = next_state(slot.name, self._states[slot.name], asked)

    @property
    def is_busy(self) -> bool:
        """Whether a tensor is being computed with."""
        return TensorState.COMPUTE in self._states.values()

    def require_releasable(self) -> None:
        """Refuse a release while a tensor is being computed with.

        Raises:
            ChunkBusyError: naming the tensors.
        """
        if not self.is_busy:
            return
        busy = [name for name, state in self._states.items() if state is TensorState.COMPUTE]
        raise ChunkBusyError(
            f"chunk {self.name} cannot be released: {', '.join(map(repr, busy))} "
            f"{'is' if len(busy) == 1 else 'are'} in COMPUTE; set HOLD or HOLD_AFTER_BWD first"
        )

    def buffers(self) -> list[Buffer]:
        """All live buffers."""
        held = [*self._homes.values(), self._full]
        if self._host_copy is not None:
            held.append(self._host_copy.buffer)
        unique = {b.key: b for b in held if b is not None and b.live}
        return list(unique.values())

    def home(self, role: str = PARAM) -> Buffer:
        """Home of the values, or of an optimizer state.

        Raises:
            NotGatheredError: nothing was loaded.
            BrokenBufferError: it was lost.
        """
        buffer = self._homes.get(role)
        if buffer is None:
            raise NotGatheredError(
                f"chunk {self.name} has no {role}; load its tensors "
                f"({', '.join(slot.name for slot in self.layout.slots[:4])}, ...) first"
            )
        if buffer.broken is not None:
            raise BrokenBufferError(
                f"{role} of chunk {self.name} is lost: {buffer.broken}; load it again"
            )
        return buffer

    def dtype_of(self, role: str) -> str:
        """The dtype in which values or an optimizer state are kept, lost or not.

        Raises:
            NotGatheredError: there is no such state.
        """
        if role == PARAM:
            return self.layout.dtype
        known = self._homes.get(role)
        return self.home(role).spec.dtype if known is None else known.spec.dtype

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of optimizer states."""
        return tuple(role for role in self._homes if role != PARAM)

    # --- gather and release ---------------------------------------------------------------

    def gather(self, *, wait: bool = True) -> None:
        """Make ``full``; a failure leaves everything as it was."""
        if self._full is not None and self._full.live:
            return
        home = self.home()
        target = self._compute_spec
        if home.spec == target:
            self._full = home
            return
        source, name, category = self._to_device(home), f"{self.name}.full", Category.PARAM
        if source.spec == target:
            self._full = source
        elif source is home:
            self._full = self._pool.move(home, target, name=name, category=category, wait=wait)
        else:
            self._full = self._pool.forward(source, target, name=name, category=category)

    def wait(self) -> None:
        """Complete a gather that is in flight; on failure the chunk is as before it."""
        if self._full is None:
            return
        try:
            self._pool.wait(self._full)
        except BaseException:
            full, self._full = self._full, None
            self.accessed = False
            with contextlib.suppress(Exception):
                self._pool.discard(full)  # it is gone, unless only scratch could not be freed
            raise

    def release(self) -> None:
        """Undo ``access``; while a ``gathered`` scope is open the bytes stay until it ends.

        Raises:
            ChunkBusyError: a tensor is being computed with.
        """
        self.require_releasable()
        if self.scopes == 0:
            self.drop_full()
        self.accessed = False

    def enter_scope(self) -> None:
        """Gather for a scope."""
        self.gather()
        self.scopes += 1

    def leave_scope(self) -> None:
        """End a scope; the last one releases, unless the chunk is accessed or being used."""
        self.scopes -= 1
        if self.scopes == 0 and not self.accessed:
            if self.is_busy:
                self.accessed = True  # the user holds it in COMPUTE: it is theirs to release
            else:
                self.drop_full()

    def drop_full(self) -> None:
        """Give the gathered buffer up."""
        full = self._full
        if full is not None and full is not self._homes.get(PARAM):
            self._pool.free(full)
        self._full = None

    def require_gathered(self, name: str) -> Buffer:
        """The buffer to read from.

        Raises:
            NotGatheredError: naming the tensor.
        """
        full = self._full
        if full is None or not full.live or not self.is_gathered:
            raise NotGatheredError(
                f"tensor {name!r} of chunk {self.name} is not gathered; call access({name!r}) or "
                f"use gathered({name!r})"
            )
        if self._states[self._slot_name(name)] is TensorState.FREE:
            raise NotGatheredError(f"tensor {name!r} is FREE: it was never loaded")
        return full

    def _slot_name(self, name: str) -> str:
        return next(slot.name for slot in self.layout.slots if name in slot.spec.names)

    # --- content --------------------------------------------------------------------------

    def store(self, role: str, values: Sequence[tuple[Slot, Array]], *, add: bool = False) -> None:
        """Write or add flat values into slots of home, through ``full``; collective where home is
        sharded and not all slots are written. A failure before the swap leaves home as it was.
        """
        old = self._homes.get(role)
        old = old if old is not None and old.live else None
        written = {slot.name for slot, _ in values}
        complete = not add and written.issuperset(slot.name for slot in self.layout.slots)
        if role in self._homes and not complete:
            self.home(role)  # what is not written must not be lost
        if old is not None and old.spec == self._spec(old.spec.dtype, Placement.REPLICATED):
            self._write_slots(old, values, add=add)
        else:
            self._store_through(role, old, values, add=add, complete=complete)
        if role == PARAM:
            self.changed()
            for slot, _ in values:
                if self._states[slot.name] is TensorState.FREE:
                    self.set_state(slot, TensorState.HOLD)

    def _store_through(
        self,
        role: str,
        old: Buffer | None,
        values: Sequence[tuple[Slot, Array]],
        *,
        add: bool,
        complete: bool,
    ) -> None:
        category = Category.PARAM if role == PARAM else Category.OPTIMIZER
        known = self._homes.get(role)  # a lost buffer comes back as it was
        dtype = self.layout.dtype if known is None else known.spec.dtype
        memory = Memory.DEVICE if known is None else known.spec.memory
        name = f"{self.name}.{role}"
        if old is None or complete:
            whole = self._pool.zeros(name, category, self._spec(dtype, Placement.REPLICATED))
        else:
            whole = self._gathered_copy(old, category)
        new = whole
        try:
            self._write_slots(whole, values, add=add)
            for spec in (
                self._spec(dtype, self._placement),
                self._spec(dtype, self._placement, memory),
            ):
                if spec != new.spec:
                    previous, new = new, self._pool.move(new, spec, name=name, category=category)
                    self._pool.discard(previous)
        except BaseException:
            self._pool.discard(new)
            raise
        self._homes[role] = new
        stale = [old]
        if role == PARAM:  # given up together: if that fails, nobody reads what is stale
            stale.append(self._full)
            self._full = None
        self._pool.discard(*(buffer for buffer in stale if buffer is not None))

    def _write_slots(
        self, buffer: Buffer, values: Sequence[tuple[Slot, Array]], *, add: bool
    ) -> None:
        for slot, value in values:
            if slot.spec.numel:
                self._pool.write(buffer, slot.start, value, add=add)

    def changed(self) -> None:
        """After home changed: what was gathered is given up, and gathered anew where it is used."""
        stale, self._full = self._full, None
        if stale is not None and stale is not self._homes.get(PARAM):
            self._pool.discard(stale)
        if self.accessed or self.scopes:
            self.gather()

    def gathered_numpy(self, role: str, slots: Sequence[Slot]) -> list[Any]:
        """Full values of slots as numpy arrays; collective where the role is sharded."""
        home = self.home(role)
        whole = self._gathered_copy(home, Category.STAGING, may_alias=True)
        try:
            return self._pool.numpy_slots(whole, slots)
        finally:
            if whole is not home:
                self._pool.discard(whole)

    def _gathered_copy(
        self, home: Buffer, category: Category, *, may_alias: bool = False
    ) -> Buffer:
        """A REPLICATED device buffer in home's dtype."""
        target = self._spec(home.spec.dtype, Placement.REPLICATED)
        if may_alias and home.spec == target:
            return home
        source, name = self._to_device(home), f"{self.name}.whole"
        if source.spec == target:
            return source
        if source is home:
            return self._pool.move(home, target, name=name, category=category)
        return self._pool.forward(source, target, name=name, category=category)

    def _to_device(self, buffer: Buffer) -> Buffer:
        """The buffer itself, or a copy of it in device memory."""
        if buffer.spec.memory is Memory.DEVICE:
            return buffer
        spec = buffer.spec
        target = buffer_spec(spec.numel, spec.dtype, spec.placement, Memory.DEVICE)
        category = buffer.category if target == self._compute_spec else Category.STAGING
        return self._pool.move(buffer, target, name=f"{buffer.name}.upload", category=category)

    # --- memory ---------------------------------------------------------------------------

    def add_state(self, role: str, dtype: str, memory: Memory) -> None:
        """Open an optimizer state of zeros, sharded like home."""
        spec = self._spec(dtype, self._placement)
        name = f"{self.name}.{role}"
        buffer = self._pool.zeros(name, Category.OPTIMIZER, spec)
        self._homes[role] = buffer
        if memory is not Memory.DEVICE:
            try:
                self.move_home(role, memory)
            except BaseException:
                self.remove_state(role)
                raise

    def remove_state(self, role: str) -> None:
        """Free an optimizer state."""
        self._pool.discard(self._homes.pop(role))

    def move_home(self, role: str, memory: Memory, *, keep_host_copy: bool = False) -> None:
        """Move home to a memory; a no-op where it is there already.

        A host copy that was kept and is still valid (same version) is used and not copied again.
        """
        home = self.home(role)
        if home.spec.memory is memory:
            return
        target = self._spec(home.spec.dtype, self._placement, memory)
        if self._valid_host_copy(role, home, memory):
            new = self._take_host_copy()
        elif role == PARAM and self._full is not None and self._is_live(self._full, target):
            new = self._full  # see [Note: residency]
        else:
            new = self._pool.move(home, target, name=home.name, category=home.category)
        self._homes[role] = new
        if role == PARAM and keep_host_copy and home.spec.memory is Memory.HOST:
            self._host_copy = _HostCopy(home, new.key, new.version)
        elif home is not self._full:
            self._pool.discard(home)

    def _valid_host_copy(self, role: str, home: Buffer, memory: Memory) -> bool:
        if role != PARAM or memory is not Memory.HOST or self._host_copy is None:
            return False
        copy = self._host_copy
        if (copy.of_key, copy.of_version) == (home.key, home.version) and copy.buffer.live:
            return True
        self._pool.discard(self._take_host_copy())
        return False

    @staticmethod
    def _is_live(buffer: Buffer, spec: BufferSpec) -> bool:
        return buffer.live and buffer.spec == spec

    def _take_host_copy(self) -> Buffer:
        if self._host_copy is None:
            raise BrokenBufferError(f"chunk {self.name} has no host copy")
        buffer, self._host_copy = self._host_copy.buffer, None
        return buffer

    def _spec(self, dtype: str, placement: Placement, memory: Memory = Memory.DEVICE) -> BufferSpec:
        return buffer_spec(self.layout.numel, dtype, placement, memory)
