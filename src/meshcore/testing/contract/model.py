"""What the cases share: values that are exact in every dtype, and the steps that a pool makes.

Expected values come from plain numpy over explicit ranks, written apart from every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshcore.backend import Array, Backend, scratch_specs
from meshcore.dtypes import is_floating, numpy_dtype
from meshcore.spec import AxisRoles, BufferSpec, Memory, MoveKind, Placement

SHARD_NUMEL = 6
"""Elements of a shard in most cases: few specs, so that a compiling backend compiles little."""

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "bool")
"""What the cases try, where a backend's profile lists it."""


@dataclass(frozen=True)
class Case:
    """One case: a module-level function of a backend that raises if the backend is wrong.

    Attributes:
        function: what to run; found again by name in another process.
        needs_data: False if it looks at bytes and errors alone, and holds for ``null`` too.
        fresh: it closes its backend, and so needs one of its own.
    """

    function: Callable[[Backend], None]
    needs_data: bool = True
    fresh: bool = False

    @property
    def name(self) -> str:
        """Theme and function."""
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"

    def __call__(self, backend: Backend) -> None:
        """Run it."""
        self.function(backend)


def require(condition: bool, message: str) -> None:
    """Raise ``AssertionError`` unless the condition holds."""
    if not condition:
        raise AssertionError(message)


# --- values -----------------------------------------------------------------------------------


def numel_of(backend: Backend) -> int:
    """Elements of the usual buffer."""
    return SHARD_NUMEL * backend.roles.shards


def dtypes_of(backend: Backend, *, floating: bool = False) -> tuple[str, ...]:
    """The tried dtypes that this backend has."""
    return tuple(
        d for d in DTYPES if d in backend.profile.dtypes and (is_floating(d) or not floating)
    )


def values(numel: int, dtype: str, seed: int = 0) -> Any:
    """Small integers, 1-D, exact in every dtype; another seed gives others in most places."""
    raw = (np.arange(numel) * 5 + seed * 3) % 23
    if dtype == "bool":
        return raw % 2 == 0
    return (raw - (0 if dtype.startswith("uint") else 11)).astype(numpy_dtype(dtype))


def addend(backend: Backend, rank: int, numel: int, dtype: str, seed: int = 0) -> Any:
    """What one rank adds: another one on every rank."""
    return values(numel, dtype, seed + backend.mesh.position(rank) + 1)


def shard_of(roles: AxisRoles, rank: int, whole: Any) -> Any:
    """The part of a whole array that a rank's shard index owns."""
    shard = len(whole) // roles.shards
    start = roles.shard_index(rank) * shard
    return whole[start : start + shard]


def sum_of(backend: Backend, ranks: Sequence[int], numel: int, dtype: str, seed: int = 0) -> Any:
    """The exact sum of some ranks' addends, in float64."""
    return sum(addend(backend, rank, numel, dtype, seed).astype(np.float64) for rank in ranks)


# --- specs ------------------------------------------------------------------------------------


def sharded(numel: int, dtype: str = "float32") -> BufferSpec:
    """A SHARDED spec in device memory."""
    return BufferSpec(numel, dtype, Placement.SHARDED)


def replicated(numel: int, dtype: str = "float32") -> BufferSpec:
    """A REPLICATED spec in device memory."""
    return BufferSpec(numel, dtype, Placement.REPLICATED)


def partial(numel: int, dtype: str = "float32") -> BufferSpec:
    """A PARTIAL spec in device memory."""
    return BufferSpec(numel, dtype, Placement.PARTIAL)


def scattered_sum(backend: Backend, numel: int, dtype: str = "float32") -> BufferSpec:
    """Where a reduce-scatter ends: SHARDED, or SHARDED_PARTIAL if there are replicas."""
    split = Placement.SHARDED_PARTIAL if backend.roles.replicas > 1 else Placement.SHARDED
    return BufferSpec(numel, dtype, split)


def form_sizes(backend: Backend, kind: MoveKind, itemsize: int, most_nbytes: int = 1 << 23) -> Any:
    """A number of elements for every form that a kind of move takes, up to some bytes."""
    forms = backend.profile.forms.get(kind, ())
    starts = [form.from_nbytes for form in forms if 0 < form.from_nbytes <= most_nbytes]
    unit = numel_of(backend)
    return [unit, *(unit * -(-start // (unit * itemsize)) for start in starts)]


def assorted_specs(backend: Backend, numel: int) -> list[BufferSpec]:
    """Every placement in both memories, and every dtype; not their product, for compilers' sake."""
    specs = [BufferSpec(numel, "float32", p, memory) for p in Placement for memory in Memory]
    return specs + [sharded(numel, dtype) for dtype in dtypes_of(backend) if dtype != "float32"]


# --- steps ------------------------------------------------------------------------------------


def open_with(backend: Backend, spec: BufferSpec, content: Any) -> Array:
    """A buffer with a content: a whole array, or by rank for PARTIAL.

    Made with the seam's verbs alone: written whole, then scattered or transferred.
    """
    if spec.memory is Memory.HOST:
        near = replace(spec, memory=Memory.DEVICE)
        return _moved_on(backend, open_with(backend, near, content), near, spec)
    if spec.placement is Placement.SHARDED:
        whole = replace(spec, placement=Placement.REPLICATED)
        return _moved_on(backend, open_with(backend, whole, content), whole, spec)
    if spec.placement is Placement.SHARDED_PARTIAL:
        whole = replace(spec, placement=Placement.PARTIAL)
        return _moved_on(backend, open_with(backend, whole, content), whole, spec)
    array = backend.zeros(spec)
    array = backend.write(array, spec, 0, content)
    backend.wait(array)
    expect_nbytes(backend, array, spec)
    return array


def open_addends(backend: Backend, numel: int, dtype: str = "float32", seed: int = 0) -> Array:
    """A PARTIAL buffer that holds every local rank's addend."""
    content = {rank: addend(backend, rank, numel, dtype, seed) for rank in backend.local_ranks}
    return open_with(backend, partial(numel, dtype), content)


def start_move(
    backend: Backend,
    array: Array,
    src: BufferSpec,
    dst: BufferSpec,
    *,
    into: Array | None = None,
    scale: float = 1.0,
    add: bool = False,
) -> tuple[Array, list[Array]]:
    """Issue a move as a pool does: destination and scratch are opened first."""
    scratch_of = scratch_specs(backend.profile, backend.roles, src, dst, add=add)
    scratch = [backend.empty(spec) for spec in scratch_of]
    for buffer, spec in zip(scratch, scratch_of, strict=True):
        expect_nbytes(backend, buffer, spec)
    if into is None and backend.profile.preallocates:
        into = backend.empty(dst)
    out = backend.redistribute(array, src, dst, into=into, scratch=scratch, scale=scale, add=add)
    return out, scratch


def move(
    backend: Backend,
    array: Array,
    src: BufferSpec,
    dst: BufferSpec,
    *,
    into: Array | None = None,
    scale: float = 1.0,
    add: bool = False,
) -> Array:
    """A complete move; the source stays open, and all bytes are checked."""
    out, scratch = start_move(backend, array, src, dst, into=into, scale=scale, add=add)
    backend.wait(out)
    give_up(backend, *scratch)
    expect_nbytes(backend, array, src)
    expect_nbytes(backend, out, dst)
    return out


def _moved_on(backend: Backend, array: Array, src: BufferSpec, dst: BufferSpec) -> Array:
    out = move(backend, array, src, dst)
    give_up(backend, array)
    return out


def give_up(backend: Backend, *arrays: Array) -> None:
    """Free arrays, and drop the shells that they leave."""
    for array in arrays:
        shell = backend.free(array)
        if shell is not None:
            backend.drop(shell)


# --- comparisons, all of which raise ----------------------------------------------------------


def expect(
    backend: Backend, array: Array, spec: BufferSpec, want: Any | Callable[[int], Any]
) -> None:
    """Compare what every local rank holds with a whole array, or with a function of the rank.

    A whole array stands for its shards if the placement is split.
    """
    expect_nbytes(backend, array, spec)
    held = backend.to_numpy(array)
    require(
        set(held) == set(backend.local_ranks),
        f"to_numpy covers ranks {sorted(held)}, not the local ranks {backend.local_ranks}",
    )
    dtype = numpy_dtype(spec.dtype)
    for rank in backend.local_ranks:
        if callable(want):
            wanted = want(rank)
        else:
            wanted = shard_of(backend.roles, rank, want) if spec.placement.is_split else want
        got = held[rank]
        where = f"rank {rank} of {backend.mesh!r}, {spec}"
        require(got.dtype == dtype, f"{where}: dtype {got.dtype}")
        np.testing.assert_array_equal(got, np.asarray(wanted).astype(dtype), where, strict=True)


def expect_nbytes(backend: Backend, array: Array, spec: BufferSpec) -> None:
    """Compare measured bytes with the spec's, on every local rank."""
    want = spec.local_nbytes(backend.roles.shards)
    expect_counts(backend.nbytes(array), dict.fromkeys(backend.local_ranks, want), str(spec))


def expect_counts(got: Mapping[int, int], want: Mapping[int, int], what: str) -> None:
    """Compare bytes by rank; a rank that is absent has none."""
    filled = {rank: got.get(rank, 0) for rank in want}
    require(
        filled == dict(want) and set(got) <= set(want),
        f"{what}: measured bytes are {dict(got)}, and should be {dict(want)}",
    )
