"""The gradient of one chunk: addends, what was used, and the reduced value.

[Note: gradients] ``grad_full`` is this process's addend (PARTIAL: the value is the sum over all
ranks and over micro-batches), ``grad_shard`` the reduced gradient, sharded like home and in float32
or wider. A reduce adds sum / divisor to ``grad_shard``; nothing is ever multiplied back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshcore.backend import Array
from meshcore.buffers import Buffer
from meshcore.dtypes import itemsize, sum_dtype
from meshcore.errors import BrokenBufferError, NoGradientError
from meshcore.layout import ChunkLayout, Slot
from meshcore.ledger import Category
from meshcore.pool import Pool
from meshcore.spec import BufferSpec, Memory, Placement, buffer_spec, reduce_path

NOTHING, DONE, UNUSED = 0, 1, 2
"""What a rank says of a name at a reduce: no gradient and no word, a gradient, marked unused."""


class ChunkGradient:
    """Gradient buffers of one trainable chunk, and which names have had one on which rank."""

    def __init__(
        self, pool: Pool, layout: ChunkLayout, *, placement: Placement, dtype: str | None
    ) -> None:
        self.layout = layout
        self.used: set[str] = set()  # tensors that any rank used since zero_grads, agreed by all
        self._pool = pool
        self._placement = placement
        self._dtype = dtype or sum_dtype(layout.dtype)
        self._full: Buffer | None = None
        self._shard: Buffer | None = None
        self._said: dict[str, dict[int, int]] = {}  # name or tie -> rank -> DONE or UNUSED

    # --- this process's part --------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """All names and ties that take a gradient."""
        return tuple(n for slot in self.layout.slots for n in slot.spec.names)

    @property
    def reduced(self) -> Buffer | None:
        """The reduced gradient, if there is one.

        Raises:
            BrokenBufferError: it was lost.
        """
        if self._shard is not None and self._shard.broken is not None:
            raise BrokenBufferError(
                f"the gradient of chunk {self.layout.name} is lost: {self._shard.broken}; "
                "call zero_grads and repeat the step"
            )
        return self._shard

    @property
    def is_accumulating(self) -> bool:
        """Whether this process holds an addend that is not reduced."""
        return self._full is not None

    def buffers(self) -> list[Buffer]:
        """All live buffers."""
        return [b for b in (self._full, self._shard) if b is not None and b.live]

    def accumulate(self, name: str, slot: Slot, value: Any, ranks: Sequence[int]) -> None:
        """Add a flat value (or {rank: flat value}) to this process's addend."""
        if self._full is None:
            self._full = self._open_full()
        self._require_full(self._full)
        if slot.spec.numel:
            self._pool.write(self._full, slot.start, value, add=True)
        self._say(name, ranks, DONE)

    def mark(self, name: str, ranks: Sequence[int]) -> None:
        """Declare that a name has no gradient in this step on these ranks."""
        self._say(name, ranks, UNUSED)

    def _say(self, name: str, ranks: Sequence[int], word: int) -> None:
        row = self._said.setdefault(name, {})
        for rank in ranks:
            if row.get(rank) != DONE:
                row[rank] = word

    def is_ready(self, ranks: Sequence[int]) -> bool:
        """Whether all names have a gradient or are marked unused, on some local ranks."""
        return all(NOTHING not in self.words(rank) for rank in ranks)

    @property
    def loss(self) -> str | None:
        """Why a buffer of this gradient is lost, or None."""
        for buffer in (self._full, self._shard):
            if buffer is not None and buffer.broken is not None:
                return f"{buffer.name}: {buffer.broken}"
        return None

    def words(self, rank: int) -> bytes:
        """One byte a name: what a local rank says. Empty tensors need no gradient."""
        said = self._said
        out = bytearray()
        for slot in self.layout.slots:
            default = NOTHING if slot.spec.numel else UNUSED
            out.extend(said.get(name, {}).get(rank, default) for name in slot.spec.names)
        return bytes(out)

    def _open_full(self) -> Buffer:
        return self._pool.zeros(
            f"{self.layout.name}.grad_full", Category.GRAD, self._spec(Placement.PARTIAL)
        )

    def _require_full(self, full: Buffer) -> Buffer:
        if full.broken is not None:
            raise BrokenBufferError(
                f"the gradient of chunk {self.layout.name} is lost: {full.broken}; call "
                "zero_grads and repeat the step"
            )
        return full

    # --- the reduce -----------------------------------------------------------------------

    def used_by(self, words: Mapping[int, bytes]) -> set[str]:
        """Tensors that any rank has a gradient for, by what all ranks said."""
        return {
            self._tensor(name)
            for position, name in enumerate(self.names)
            if any(row[position] == DONE for row in words.values())
        }

    def reduce(self, divisor: float, used: Collection[str], *, all_have: bool) -> None:
        """Sum over all ranks, divide, and add to the reduced gradient; a collective.

        Args:
            divisor: what the sum is divided by.
            used: tensors that any rank has a gradient for.
            all_have: whether every process holds an addend; where one does not, it adds zeros, and
                the processes agree that there was memory for them.
        """
        if not all_have:
            self._complete_full()
        if self._full is None:
            raise BrokenBufferError(f"chunk {self.layout.name} has no gradient to reduce")
        full = self._require_full(self._full)
        memory = None if self.reduced is None else self.reduced.spec.memory
        self.move(Memory.DEVICE)
        *middle, last = reduce_path(self._pool.roles, self._placement)[1:]
        passed = [full]
        try:
            for placement in middle:
                passed.append(self._move_partial(passed[-1], placement))
            self._reduce_last(passed[-1], last, 1.0 / divisor, used)
        except BaseException:
            done = passed[1:] if self.is_accumulating else passed
            with contextlib.suppress(Exception):
                self._pool.discard(*done)
            raise
        self._pool.discard(*passed)
        if memory is not None:
            self.move(memory)

    def _move_partial(self, source: Buffer, placement: Placement) -> Buffer:
        return self._pool.move(
            source,
            self._spec(placement, reduced=True),
            name=f"{self.layout.name}.grad_partial",
            category=Category.GRAD,
        )

    def _reduce_last(
        self, source: Buffer, placement: Placement, scale: float, used: Collection[str]
    ) -> None:
        shard = self.reduced
        if shard is not None:
            version = shard.version
            try:
                self._pool.add_into(source, shard, scale=scale)
            finally:  # it may have added and failed to free scratch
                if shard.version != version:
                    self._count(used)
            return
        self._shard = self._pool.move(
            source,
            self._spec(placement, reduced=True),
            name=f"{self.layout.name}.grad",
            category=Category.GRAD,
            scale=scale,
        )
        self._count(used)

    def _count(self, used: Collection[str]) -> None:
        """The addend is in the reduced gradient: a retry must not add it again."""
        self.used.update(used)
        self._full = None
        self._said.clear()

    def _complete_full(self) -> None:
        """A process without an addend adds zeros; all agree that each could."""
        problem: BaseException | None = None
        if self._full is None:
            try:
                self._full = self._open_full()
            except MemoryError as error:
                problem = error
        failures = self._pool.agree(problem)
        if problem is not None:
            raise problem
        if failures:
            raise self._pool.peer_out_of_memory(
                f"{self.layout.name}.grad_full", self._spec(Placement.PARTIAL), failures
            )

    def forget_words(self) -> None:
        """Start a new micro-batch without a gradient: marks are used up."""
        self._said.clear()

    # --- the reduced value ----------------------------------------------------------------

    def valid_ranges(self) -> list[tuple[int, int]]:
        """Ranges of the whole chunk that hold a gradient: used tensors, no gaps, no padding."""
        return [(s.start, s.stop) for s in self.used_slots() if s.spec.numel]

    def used_slots(self) -> tuple[Slot, ...]:
        """Slots with a gradient."""
        return tuple(slot for slot in self.layout.slots if slot.name in self.used)

    def square_sum(self) -> Any:
        """This process's share of the sum of squares of the reduced gradient."""
        shard = self.reduced
        if shard is None:
            return None
        source = self._on_device(shard)
        try:
            return self._pool.square_sum(source, self.valid_ranges())
        finally:
            if source is not shard:
                self._pool.discard(source)

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradient."""
        shard = self.reduced
        if shard is not None:
            self._pool.scale(shard, factor)

    def gathered(self) -> tuple[Buffer, bool]:
        """A whole copy of the reduced gradient on the device, and whether it must be freed."""
        shard = self.reduced
        if shard is None:
            raise NoGradientError(
                f"chunk {self.layout.name} has no reduced gradient; accumulate one and call "
                "reduce_grads"
            )
        source = self._on_device(shard)
        if source.spec.placement is Placement.REPLICATED:
            return source, source is not shard
        move = self._pool.move if source is shard else self._pool.forward
        whole = move(
            source,
            self._spec(Placement.REPLICATED, reduced=True),
            name=f"{self.layout.name}.grad_whole",
            category=Category.STAGING,
        )
        return whole, True

    def read(self, slots: Sequence[Slot]) -> list[Array]:
        """Full gradients of slots as independent arrays of the backend; a collective."""
        whole, temporary = self.gathered()
        try:
            return [
                self._pool.read(whole, slot.start, slot.stop, copy=True).reshape(slot.shape)
                for slot in slots
            ]
        finally:
            if temporary:
                self._pool.discard(whole)

    def to_numpy(self, slots: Sequence[Slot]) -> list[Any]:
        """Full gradients of slots as numpy arrays; a collective."""
        whole, temporary = self.gathered()
        try:
            return self._pool.numpy_slots(whole, slots)
        finally:
            if temporary:
                self._pool.discard(whole)

    def move(self, memory: Memory) -> None:
        """Move the reduced gradient to a memory; a no-op where it is there, or there is none."""
        shard = self.reduced
        if shard is None or shard.spec.memory is memory:
            return
        spec = shard.spec
        self._shard = self._pool.move(
            shard,
            buffer_spec(spec.numel, spec.dtype, spec.placement, memory),
            name=shard.name,
            category=Category.GRAD,
        )
        self._pool.discard(shard)

    def zero(self) -> None:
        """Free all gradient buffers and forget what was used."""
        for buffer in (self._full, self._shard):
            if buffer is not None:
                self._pool.free(buffer)
        self._full = self._shard = None
        self.used.clear()
        self._said.clear()

    def _on_device(self, shard: Buffer) -> Buffer:
        spec = shard.spec
        if spec.memory is Memory.DEVICE:
            return shard
        target = buffer_spec(spec.numel, spec.dtype, spec.placement, Memory.DEVICE)
        return self._pool.move(
            shard, target, name=f"{shard.name}.upload", category=Category.STAGING
        )

    def _spec(self, placement: Placement, *, reduced: bool = False) -> BufferSpec:
        dtype = sum_dtype(self._dtype) if reduced else self._dtype
        return buffer_spec(self.layout.numel, dtype, placement)

    def _tensor(self, name: str) -> str:
        return next(slot.name for slot in self.layout.slots if name in slot.spec.names)


def allowed_grad_dtypes(dtypes: Collection[str]) -> tuple[str, ...]:
    """Dtypes that a gradient may have, by the dtypes its tensor is kept and computed in.

    >>> allowed_grad_dtypes(["bfloat16"]), allowed_grad_dtypes(["float32"])
    (('bfloat16', 'float32'), ('float32',))
    """
    out = list(dict.fromkeys(dtypes))
    if any(itemsize(dtype) <= 2 for dtype in out) and "float32" not in out:
        out.append("float32")
    return tuple(out)
