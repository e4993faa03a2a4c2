"""The chunk manager: tensors by name, on any backend."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from meshcore.backend import Array, Backend
from meshcore.chunk import PARAM, Chunk
from meshcore.dtypes import is_floating
from meshcore.errors import (
    AuditError,
    ClosedError,
    DuplicateNameError,
    NotInMeshError,
    PlanMismatchError,
    SpecError,
    UnsupportedDtypeError,
)
from meshcore.gradient_set import GradientSet
from meshcore.grads import ChunkGradient, allowed_grad_dtypes
from meshcore.layout import ChunkLayout, ChunkPlan, Slot, format_nbytes
from meshcore.ledger import Ledger, MemoryReport, Table
from meshcore.pool import Pool
from meshcore.spec import AxisRoles, Memory, Placement
from meshcore.state import TensorState
from meshcore.values import checked_flat

KINDS = ("param", "grad", "optimizer")


@dataclass(frozen=True)
class AuditReport:
    """What the backend measured: memory kind -> category -> bytes of one rank.

    Attributes:
        measured: now.
        measured_peak: highest so far, also "total"; complete only in a manager with ``check=True``.
    """

    measured: Table
    measured_peak: Table


@dataclass(frozen=True)
class ChunkUpdate:
    """What ``update`` tells an optimizer about a chunk.

    Attributes:
        layout: slots, sizes and dtype of the chunk.
        used: slots that have a gradient; the others must be left alone.
        roles: shard and replica axis of the mesh.
        placement: SHARDED (a rank's array is its shard) or REPLICATED.
    """

    layout: ChunkLayout
    used: tuple[Slot, ...]
    roles: AxisRoles
    placement: Placement

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Ranges of used tensors within one rank's local array, in elements."""
        if self.placement is Placement.REPLICATED:
            return tuple((s.start, s.stop) for s in self.used if s.spec.numel)
        return self.layout.shard_ranges(self.roles.shard_index(rank), self.used)


class Access:
    """A gather that may be in flight; ``wait`` completes it and may be called any number of times.

    Reading the tensor waits too.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks

    def wait(self) -> None:
        """Complete the gather; if it failed, raise, and the chunk is released as before."""
        for chunk in self._chunks:
            chunk.wait()


class GatheredValues(Mapping[str, Array]):
    """Full values of the tensors of a ``gathered`` scope, by name; each is read when asked for."""

    def __init__(self, manager: ChunkManager, names: Sequence[str]) -> None:
        self._manager = manager
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self._manager.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ChunkManager:
    """Keeps the tensors of a plan in chunks on one backend.

    In a process group all ranks make the same calls in the same order; ``accumulate_grad`` and
    ``mark_unused`` are local, everything else may communicate.

    Args:
        backend: from ``create_backend``; it stays open when the manager is closed.
        plan: from ``plan_chunks``, for as many shards as the backend has; compared over all ranks.
        compute_dtype: dtype of gathered floating-point tensors; the values that are kept (the
            master copy) have the plan's dtype, and are cast before the transport.
        grad_dtype: dtype in which a rank's gradients add up before they are reduced. Default:
            float32 or wider. The reduced gradient is always float32 or wider.
        keep_gathered: groups whose chunks are kept whole on every rank.
        check: measure at every open (see ``AuditReport``) and, where the backend knows all that
            is alive in it, that nothing else is; for that it wants a backend of its own.
        limits: bytes that one rank may hold, by memory; beyond them ``DeviceMemoryError``.

    Raises:
        NotInMeshError: this process holds no rank of the mesh.
        PlanMismatchError: on all ranks, if their plans or options differ.
        UnsupportedDtypeError: the backend cannot hold a dtype of the plan.
    """

    def __init__(
        self,
        backend: Backend,
        plan: ChunkPlan,
        *,
        compute_dtype: str | None = None,
        grad_dtype: str | None = None,
        keep_gathered: Collection[str] = (),
        check: bool = False,
        limits: Mapping[Memory, int] | None = None,
    ) -> None:
        roles = backend.roles
        roles.require_member(backend.local_ranks)
        if plan.shards != roles.shards:
            raise PlanMismatchError(
                f"the plan is for {plan.shards} shards and the backend's shard axis "
                f"{roles.shard_axis!r} has {roles.shards}; plan with shards={roles.shards}"
            )
        self.backend = backend
        self.plan = plan
        self._compute_dtype = compute_dtype
        self._check_dtypes(grad_dtype)
        unknown = set(keep_gathered) - {chunk.group for chunk in plan.chunks}
        if unknown:
            raise SpecError(f"keep_gathered names {sorted(unknown)}, which the plan does not have")
        _require_equal(
            backend,
            f"{plan.digest()} {compute_dtype} {grad_dtype} {sorted(keep_gathered)} {limits}",
        )
        self.pool = Pool(backend, check=check, limits=limits)
        homes = [
            Placement.REPLICATED
            if roles.shards == 1 or layout.group in keep_gathered
            else Placement.SHARDED
            for layout in plan.chunks
        ]
        self._chunks = [
            Chunk(self.pool, layout, placement=home, compute_dtype=self._dtype_of_compute(layout))
            for layout, home in zip(plan.chunks, homes, strict=True)
        ]
        self._gradients = GradientSet(
            self.pool,
            [
                ChunkGradient(self.pool, layout, placement=home, dtype=grad_dtype)
                for layout, home in zip(plan.chunks, homes, strict=True)
                if layout.takes_grad
            ],
        )
        self._closed = False

    def _check_dtypes(self, grad_dtype: str | None) -> None:
        known = self.backend.profile.dtypes
        wanted = {chunk.dtype for chunk in self.plan.chunks}
        wanted.update(d for d in (self._compute_dtype, grad_dtype) if d is not None)
        bad = sorted(wanted - set(known))
        if bad:
            raise UnsupportedDtypeError(
                f"backend {self.backend.name!r} cannot hold or gather {', '.join(bad)}; it can "
                f"{', '.join(known)}; give these tensors another dtype"
            )
        for option, dtype in (("compute_dtype", self._compute_dtype), ("grad_dtype", grad_dtype)):
            if dtype is not None and not is_floating(dtype):
                raise SpecError(f"{option} is a floating-point dtype, not {dtype}")

    def _dtype_of_compute(self, layout: ChunkLayout) -> str:
        floating = is_floating(layout.dtype)
        return self._compute_dtype if self._compute_dtype and floating else layout.dtype

    # --- look-ups -------------------------------------------------------------------------

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, in the plan's order."""
        return tuple(self._chunks)

    @property
    def ledger(self) -> Ledger:
        """Who counts."""
        return self.pool.ledger

    def chunk_of(self, name: str) -> Chunk:
        """The chunk of a tensor, by name or tie."""
        return self._chunks[self.plan.find(name)[0].index]

    def chunks_of(self, *names: str) -> tuple[Chunk, ...]:
        """The distinct chunks of some tensors, in the plan's order."""
        if len(names) == 1:
            return (self._chunks[self._index(names[0])],)
        return tuple(self._chunks[i] for i in sorted({self._index(name) for name in names}))

    def releasable_chunks(self) -> tuple[Chunk, ...]:
        """Gathered chunks that could be released now, in the plan's order."""
        return tuple(chunk for chunk in self._chunks if chunk.is_releasable)

    def is_gathered(self, name: str) -> bool:
        """Whether ``read`` would give the tensor's value now."""
        return self.chunk_of(name).is_gathered

    def can_reduce(self, name: str) -> bool:
        """Whether all names of the tensor's chunk have a gradient here, or are marked unused."""
        return self._grad_of(name).is_ready(self.backend.local_ranks)

    def _index(self, name: str) -> int:
        return self.plan.find(name)[0].index

    def _find(self, name: str) -> tuple[Chunk, Slot]:
        self._require_open()
        layout, slot = self.plan.find(name)
        return self._chunks[layout.index], slot

    # --- values ---------------------------------------------------------------------------

    def load(self, values: Mapping[str, Any], *, cast: bool = False, state: str = PARAM) -> None:
        """Load full arrays, equal on all ranks: all tensors, or some.

        Local where whole chunks are loaded; loading a part of a chunk that has values gathers it.
        Tensors that were FREE become HOLD. Nothing is changed if any value does not fit.

        Args:
            values: name or tie -> array of numpy or the framework, full shape, the tensor's dtype.
            cast: allow other dtypes.
            state: an optimizer state to load instead of the tensors themselves.

        Raises:
            ShapeMismatchError, DtypeMismatchError, UnknownTensorError: before anything is changed.
        """
        self._store(values, cast=cast, add=False, role=state)

    def load_zeros(self) -> None:
        """Give every tensor that is not loaded zeros; for dry runs and tests."""
        self._require_open()
        for chunk in self._chunks:
            free = [s for s in chunk.layout.slots if chunk.state(s) is TensorState.FREE]
            if free:
                chunk.store(PARAM, [(slot, _zeros(slot)) for slot in free])

    def write(self, values: Mapping[str, Any], *, cast: bool = False) -> None:
        """Overwrite tensors that are loaded; home and what is gathered both change."""
        self._require_loaded(values)
        self._store(values, cast=cast, add=False, role=PARAM)

    def add(self, values: Mapping[str, Any], *, cast: bool = False) -> None:
        """Add to tensors that are loaded, in the dtype in which they are kept.

        If gathering the new value for an open ``access`` fails, the addition has taken effect: do
        not repeat it, only the access.
        """
        self._require_loaded(values)
        self._store(values, cast=cast, add=True, role=PARAM)

    def _require_loaded(self, values: Mapping[str, Any]) -> None:
        for name in values:
            self._find(name)[0].home()

    def _store(self, values: Mapping[str, Any], *, cast: bool, add: bool, role: str) -> None:
        has_data = self.backend.profile.has_data
        by_chunk: dict[int, dict[str, tuple[Slot, Any]]] = {}
        seen: dict[str, Any] = {}
        for name, value in values.items():
            chunk, slot = self._find(name)
            if slot.name in seen and seen[slot.name] is not value:
                raise DuplicateNameError(
                    f"{name!r} and another name of tensor {slot.name!r} have different values; "
                    "give one of them"
                )
            seen[slot.name] = value
            dtypes = (chunk.dtype_of(role),)
            flat = checked_flat(slot.spec, value, dtypes=dtypes, cast=cast, has_data=has_data)
            by_chunk.setdefault(chunk.layout.index, {})[slot.name] = (slot, flat)
        for index in sorted(by_chunk):
            self._chunks[index].store(role, list(by_chunk[index].values()), add=add)

    def read(self, name: str) -> Array:
        """The full value of a gathered tensor as the backend's own array; it may alias the chunk
        and is valid until the chunk is released.

        Raises:
            NotGatheredError: the tensor is not gathered.
        """
        chunk, slot = self._find(name)
        full = chunk.require_gathered(name)
        return self.pool.read(full, slot.start, slot.stop).reshape(slot.shape)

    def to_numpy(self, name: str, *, of: str = PARAM) -> Any:
        """The full value as a numpy array that owns its memory, in any state; a collective.

        Args:
            name: the tensor.
            of: "param", "grad" (the reduced gradient), or the name of an optimizer state.
        """
        chunk, slot = self._find(name)
        if of == "grad":
            return self._grad_of(name).to_numpy([slot])[0]
        return chunk.gathered_numpy(of, [slot])[0]

    # --- gather and release ---------------------------------------------------------------

    def access(self, *names: str) -> None:
        """Gather the chunks of tensors; calls are not counted: one release undoes them.

        Raises:
            DeviceMemoryError: naming the chunk; this call changed nothing.
        """
        for chunk in self._gather(names, wait=True):
            chunk.accessed = True

    def access_async(self, *names: str) -> Access:
        """Start to gather; ``wait`` on the result, or any use of a tensor, completes it."""
        chunks = self._gather(names, wait=False)
        for chunk in chunks:
            chunk.accessed = True
        return Access(chunks)

    def _gather(self, names: Sequence[str], *, wait: bool) -> list[Chunk]:
        self._require_open()
        chunks = [self._chunks[i] for i in dict.fromkeys(self._index(name) for name in names)]
        done: list[Chunk] = []
        try:
            for chunk in chunks:
                if not chunk.is_gathered:
                    done.append(chunk)
                    chunk.gather(wait=wait)
        except BaseException:
            for chunk in done:
                if not (chunk.accessed or chunk.scopes):
                    chunk.drop_full()
            raise
        return chunks

    def release(self, *names: str) -> None:
        """Release the chunks of tensors; a no-op where nothing is gathered.

        An open ``gathered`` scope keeps the bytes until it ends.

        Raises:
            ChunkBusyError: a tensor of a chunk is in COMPUTE; no chunk was released.
        """
        self._require_open()
        chunks = self.chunks_of(*names)
        for chunk in chunks:
            chunk.require_releasable()
        for chunk in chunks:
            chunk.release()

    @contextmanager
    def gathered(self, *names: str) -> Iterator[Mapping[str, Array]]:
        """Gather tensors for a scope; yields name -> full value, read when it is asked for and
        valid inside the scope.
        """
        self._require_open()
        with ExitStack() as scopes:
            for chunk in self.chunks_of(*names):
                chunk.enter_scope()
                scopes.callback(chunk.leave_scope)
            yield GatheredValues(self, names)

    # --- states ---------------------------------------------------------------------------

    def state(self, name: str) -> TensorState:
        """How a tensor is used."""
        chunk, slot = self._find(name)
        return chunk.state(slot)

    def set_state(self, name: str, state: TensorState) -> None:
        """Move a tensor through the table of states.

        Raises:
            StateTransitionError: naming tensor, state and allowed ones; nothing was changed.
        """
        chunk, slot = self._find(name)
        chunk.set_state(slot, state)

    # --- gradients ------------------------------------------------------------------------

    def accumulate_grad(self, name: str, value: Any, *, cast: bool = False) -> None:
        """Add this process's gradient of a tensor; local, no communication.

        Args:
            name: the tensor or a tie; all names of a tensor add into one gradient.
            value: full shape; one array for all local ranks, or {rank: array}, where ranks that
                are absent have no gradient. 16-bit tensors take 16-bit or float32 gradients.
            cast: allow other dtypes.

        Raises:
            FrozenTensorError: the tensor takes no gradient.
        """
        _, slot = self._find(name)
        grads = self._grad_of(name)
        ranks = self.backend.local_ranks
        dtypes = allowed_grad_dtypes([slot.spec.dtype, self._dtype_of_compute(grads.layout)])
        has_data = self.backend.profile.has_data
        if isinstance(value, Mapping):
            ranks = self._check_ranks(value)
            flat: Any = {
                rank: checked_flat(slot.spec, v, dtypes=dtypes, cast=cast, has_data=has_data)
                for rank, v in value.items()
            }
        else:
            flat = checked_flat(slot.spec, value, dtypes=dtypes, cast=cast, has_data=has_data)
        if ranks:
            grads.accumulate(name, slot, flat, ranks)

    def mark_unused(self, name: str, ranks: Collection[int] | None = None) -> None:
        """Declare that a tensor (or tie) has no gradient before the next reduce; local.

        Args:
            name: the tensor or a tie.
            ranks: local ranks for which this holds; default all.
        """
        self._find(name)
        local = self.backend.local_ranks
        self._grad_of(name).mark(name, local if ranks is None else self._check_ranks(ranks))

    def _check_ranks(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The local ranks among those that a caller names; all must be local.

        Without data one local rank stands for all, so that the same calls make a dry run.
        """
        has_data = self.backend.profile.has_data
        local = self.backend.local_ranks if has_data else self.backend.mesh.ids
        bad = [rank for rank in ranks if rank not in local]
        if bad:
            raise NotInMeshError(
                f"rank {bad[0]!r} is not held by this process; it holds {list(local[:16])}"
            )
        return tuple(ranks) if has_data or not ranks else self.backend.local_ranks

    def reduce_grads(
        self,
        divisor: float | None = None,
        unused: str = "zero",
        names: Collection[str] | None = None,
    ) -> None:
        """Add (sum over ranks and micro-batches since the last reduce) / divisor to the reduced
        gradient of every trainable chunk; a collective.

        Args:
            divisor: default: the number of data-parallel ranks (all of the mesh), for a mean. For
                weights, pre-multiply the values and give the total weight.
            unused: "zero": what a rank lacks counts as zero. "error": a name that a rank neither
                accumulated nor marked raises on all ranks.
            names: only the chunks of these tensors.

        Raises:
            UnusedGradientError: on all ranks, listing names and ranks; nothing was reduced.
            PlanMismatchError: on all ranks, if their arguments differ.
        """
        self._require_open()
        divisor = float(self.backend.mesh.size if divisor is None else divisor)
        self._gradients.reduce(self._trainable(names), divisor, unused)

    def grad(self, name: str) -> Array | None:
        """The full reduced gradient as an array of the backend that is yours; a collective.

        None if no rank used the tensor since ``zero_grads``.

        Raises:
            NoGradientError: gradients were accumulated here and not reduced.
        """
        return self.grads(name)[name]

    def grads(self, *names: str) -> dict[str, Array | None]:
        """Like ``grad`` for many tensors, with one gather a chunk."""
        self._require_open()
        wanted = {name: (self._grad_of(name), self.plan.find(name)[1]) for name in names}
        return self._gradients.read(wanted)

    def grad_norm(self) -> float:
        """The 2-norm of the whole reduced gradient, as unsharded: replicas and ties count once,
        padding never. The same float on every rank; one scalar collective, cached until the
        gradient changes.
        """
        self._require_open()
        return self._gradients.norm()

    def found_nonfinite(self) -> bool:
        """Whether any element of the reduced gradient is infinite or NaN; agreed by all ranks."""
        return not math.isfinite(self.grad_norm())

    def scale_grads(self, factor: float) -> None:
        """Multiply the reduced gradient, for example by 1 / loss scale."""
        self._require_open()
        self._gradients.scale(factor)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the reduced gradient so that its norm is at most ``max_norm``; returns the norm
        before. A gradient that is not finite is left alone (see ``found_nonfinite``).
        """
        norm = self.grad_norm()
        if math.isfinite(norm) and norm > max_norm:
            self.scale_grads(max_norm / norm)
        return norm

    def zero_grads(self) -> None:
        """Free all gradients and forget what was used."""
        self._require_open()
        self._gradients.zero()

    def _grad_of(self, name: str) -> ChunkGradient:
        layout, slot = self.plan.find(name)
        return self._gradients.of(layout, slot, name)

    def _trainable(self, names: Collection[str] | None) -> list[int]:
        """Indices of the trainable chunks, or of those of some tensors, in the plan's order."""
        if names is None:
            return list(self._gradients.indices)
        return sorted({self._grad_of(name).layout.index for name in names})

    # --- optimizer ------------------------------------------------------------------------

    def add_state(self, name: str, dtype: str = "float32", memory: Memory = Memory.DEVICE) -> None:
        """Open an optimizer state of zeros beside every trainable chunk, sharded like it.

        Raises:
            DuplicateNameError: the name is taken.
        """
        self._require_open()
        trainable = [self._chunks[index] for index in self._gradients.indices]
        taken = {PARAM, "grad"} | {state for chunk in trainable for state in chunk.state_names}
        if name in taken:
            raise DuplicateNameError(f"state {name!r} is taken; there are {sorted(taken)}")
        if dtype not in self.backend.profile.dtypes:
            raise UnsupportedDtypeError(f"backend {self.backend.name!r} cannot hold {dtype}")
        done: list[Chunk] = []
        try:
            for chunk in trainable:
                chunk.add_state(name, dtype, memory)
                done.append(chunk)
        except BaseException:
            for chunk in done:
                chunk.remove_state(name)
            raise

    def update(
        self,
        fn: Callable[[ChunkUpdate, dict[str, Array]], Mapping[str, Array]],
        names: Collection[str] | None = None,
    ) -> None:
        """Let an optimizer change the chunks that have a gradient.

        ``fn(chunk, buffers)`` gets the backend's arrays by role ("param", "grad", and the names of
        optimizer states), all sharded like home, may consume them, and returns the successors of
        those that it changed (a mutable array changed in place is its own successor). If it raises,
        the arrays that it was given are lost: their buffers are broken. If gathering the new value
        for an open ``access`` fails, the update has taken effect.

        Args:
            fn: the optimizer step of one chunk.
            names: only the chunks of these tensors.
        """
        self._require_open()
        for index in self._trainable(names):
            chunk, grads = self._chunks[index], self._gradients.get(index)
            reduced = None if grads is None else grads.reduced
            if grads is None or reduced is None or not grads.used:
                continue
            view = ChunkUpdate(
                chunk.layout, grads.used_slots(), self.backend.roles, chunk.placement
            )
            buffers = {PARAM: chunk.home(), "grad": reduced}
            buffers.update({role: chunk.home(role) for role in chunk.state_names})
            self._gradients.touch()
            self.pool.update(buffers, functools.partial(fn, view))
            chunk.changed()

    # --- memory ---------------------------------------------------------------------------

    def move(
        self,
        name: str,
        memory: Memory,
        kinds: Collection[str] = ("param",),
        *,
        keep_host_copy: bool = False,
    ) -> None:
        """Move the chunk of a tensor to device or host; a no-op for what is there already.

        Args:
            name: the tensor.
            memory: where to.
            kinds: of "param", "grad" (the reduced gradient) and "optimizer" (all states).
            keep_host_copy: keep the host buffer when moving values to the device, so that moving
                back costs nothing as long as they did not change.
        """
        chunk, _ = self._find(name)
        bad = sorted(set(kinds) - set(KINDS))
        if isinstance(kinds, str) or bad:
            raise SpecError(f"kinds are of {KINDS}, not {kinds!r}")
        if "param" in kinds:
            chunk.move_home(PARAM, memory, keep_host_copy=keep_host_copy)
        grads = self._gradients.get(chunk.layout.index)
        if "grad" in kinds and grads is not None:
            grads.move(memory)
        if "optimizer" in kinds:
            for role in chunk.state_names:
                chunk.move_home(role, memory)

    def memory(self) -> MemoryReport:
        """Bytes of one rank, the lowest local one; all ranks are equal."""
        return self.ledger.report()

    def external(
        self, name: str, nbytes: int, memory: Memory = Memory.DEVICE
    ) -> AbstractContextManager[None]:
        """Count memory that is not ours while the scope is open."""
        return self.ledger.external(name, nbytes, memory)

    def audit(self) -> AuditReport:
        """Compare ledger, chunks and backend.

        Raises:
            AuditError: they disagree.
        """
        self._require_open()
        measured = self.pool.audit()
        known = {b.key for chunk in self._chunks for b in chunk.buffers()}
        known |= {b.key for grads in self._gradients for b in grads.buffers()}
        known |= {b.key for b in self.pool.leftovers if b.live}
        known |= {b.key for b in self.pool.scratch_in_flight()}
        live = {key for key in self.ledger.live() if key >= 0}
        if known != live:
            entries = self.ledger.live()
            names = [entries[key].name if key in entries else key for key in known ^ live]
            raise AuditError(f"chunks and ledger disagree about {names}")
        return AuditReport(measured, self.pool.measured_peak())

    def close(self) -> None:
        """Free everything; idempotent. The backend stays open."""
        if not self._closed:
            self.pool.close()
            self._closed = True

    def __enter__(self) -> ChunkManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this manager is closed; make a new one")

    def __repr__(self) -> str:
        if self._closed:
            return "ChunkManager(closed)"
        roles = self.backend.roles
        head = (
            f"ChunkManager on {self.backend.name!r}: {len(self._chunks)} chunks, "
            f"{roles.shards} shards x {roles.replicas} replicas"
        )
        rows = [_chunk_row(chunk) for chunk in self._chunks[:20]]
        if len(self._chunks) > 20:
            rows.append(f"  ... and {len(self._chunks) - 20} more")
        return "\n".join([head, *rows, str(self.memory())])


def _chunk_row(chunk: Chunk) -> str:
    layout = chunk.layout
    held = sum(slot.spec.numel for slot in layout.slots)
    utilisation = held / layout.numel if layout.numel else 1.0
    residency = "gathered" if chunk.is_gathered else chunk.placement.value
    return (
        f"  {chunk.name:24}{layout.dtype:10}{len(layout.slots):5} tensors"
        f"{utilisation:>7.1%} full{format_nbytes(_chunk_nbytes(chunk)):>12} a rank  "
        f"{residency:10} {chunk.memory.value if chunk.is_loaded else 'not loaded'}"
    )


def _chunk_nbytes(chunk: Chunk) -> int:
    return sum(buffer.spec.local_nbytes(chunk.layout.shards) for buffer in chunk.buffers())


def _zeros(slot: Slot) -> Any:
    import numpy as np

    from meshcore.dtypes import numpy_dtype

    return np.zeros(slot.spec.numel, numpy_dtype(slot.spec.dtype))


def _require_equal(backend: Backend, text: str) -> None:
    """Raise on all ranks if any rank has another text; the whole mesh must call this."""
    own = hashlib.sha256(text.encode()).digest()
    answers = backend.exchange(own)
    odd = sorted(rank for rank, digest in answers.items() if digest != own)
    if odd:
        raise PlanMismatchError(
            f"rank(s) {odd} have another plan or other options than this rank; build the plan "
            "from the same specs, in the same order, on every rank"
        )
