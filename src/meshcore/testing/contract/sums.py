"""Cases about moves that sum addends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshcore.backend import Array, Backend
from meshcore.dtypes import itemsize
from meshcore.spec import BufferSpec, MoveKind, Placement, reduce_path
from meshcore.testing.contract.model import (
    Case,
    addend,
    dtypes_of,
    expect,
    form_sizes,
    give_up,
    move,
    numel_of,
    open_addends,
    open_with,
    partial,
    replicated,
    scattered_sum,
    shard_of,
    sharded,
    sum_of,
    values,
)


def reduce_scatter_sums_the_shard_axis(backend: Backend) -> None:
    """Each rank gets its shard of the sum over its shard group, and only over that."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend, floating=True):
        source, dst = open_addends(backend, n, dtype), scattered_sum(backend, n)
        out = move(backend, source, partial(n, dtype), dst)
        expect(backend, out, dst, _group_sum(backend, n, dtype))
        give_up(backend, source, out)


def _group_sum(
    backend: Backend, numel: int, dtype: str, factor: float = 1.0
) -> Callable[[int], Any]:
    """Rank -> its shard of its shard group's sum, times a factor."""
    roles = backend.roles

    def wanted(rank: int) -> Any:
        group = roles.shard_group(rank)
        return factor * shard_of(roles, rank, sum_of(backend, group, numel, dtype))

    return wanted


def reduce_path_sums_the_whole_mesh(backend: Backend) -> None:
    """Along ``reduce_path`` every home ends with the sum over all ranks, replicas included."""
    n = numel_of(backend)
    for home in (Placement.SHARDED, Placement.REPLICATED):
        for dtype in dtypes_of(backend, floating=True):
            array, spec = open_addends(backend, n, dtype), partial(n, dtype)
            for placement in reduce_path(backend.roles, home)[1:]:
                dst = BufferSpec(n, "float32", placement)
                out = move(backend, array, spec, dst)
                give_up(backend, array)
                array, spec = out, dst
            expect(backend, array, spec, sum_of(backend, backend.mesh.ids, n, dtype))
            give_up(backend, array)


def every_form_of_a_sum(backend: Backend) -> None:
    """Buffers just large enough for each form that the profile lists, fresh and adding."""
    ends = {
        MoveKind.REDUCE_SCATTER: scattered_sum(backend, 0).placement,
        MoveKind.ALL_REDUCE: Placement.REPLICATED,
    }
    for kind, placement in ends.items():
        for n in form_sizes(backend, kind, itemsize("float32")):
            source, dst = open_addends(backend, n), BufferSpec(n, "float32", placement)
            ranks = backend.mesh.ids
            out = move(backend, source, partial(n), dst)
            out = move(backend, source, partial(n), dst, into=out, scale=0.5, add=True)
            if placement is Placement.SHARDED_PARTIAL:
                expect(backend, out, dst, _group_sum(backend, n, "float32", 1.5))
            else:
                expect(backend, out, dst, 1.5 * sum_of(backend, ranks, n, "float32"))
            give_up(backend, source, out)


def replica_sum_adds_equal_shards(backend: Backend) -> None:
    """SHARDED_PARTIAL -> SHARDED sums over the replica axis, and shards stay apart."""
    n = numel_of(backend)
    src, dst = BufferSpec(n, "float32", Placement.SHARDED_PARTIAL), sharded(n)
    source = open_with(backend, src, _addends(backend, n))
    expect(backend, source, src, _group_sum(backend, n, "float32"))
    out = move(backend, source, src, dst, scale=0.5)
    expect(backend, out, dst, 0.5 * sum_of(backend, backend.mesh.ids, n, "float32"))
    out = move(backend, source, src, dst, into=out, scale=0.25, add=True)
    expect(backend, out, dst, 0.75 * sum_of(backend, backend.mesh.ids, n, "float32"))
    expect(backend, source, src, _group_sum(backend, n, "float32"))
    give_up(backend, source, out)


def _addends(backend: Backend, n: int) -> dict[int, Any]:
    return {rank: addend(backend, rank, n, "float32") for rank in backend.local_ranks}


def scale_multiplies_the_sum(backend: Backend) -> None:
    """A mean is a sum with a scale; powers of two keep it exact."""
    n = numel_of(backend)
    for dst in (scattered_sum(backend, n), replicated(n)):
        for dtype in dtypes_of(backend, floating=True):
            source = open_addends(backend, n, dtype)
            out = move(backend, source, partial(n, dtype), dst, scale=0.25)
            _expect_scaled(backend, out, dst, dtype, 0.25)
            give_up(backend, source, out)


def _expect_scaled(
    backend: Backend, out: Array, dst: BufferSpec, dtype: str, factor: float
) -> None:
    ranks, n = backend.mesh.ids, dst.numel
    if dst.placement is Placement.SHARDED_PARTIAL:
        expect(backend, out, dst, _group_sum(backend, n, dtype, factor))
    else:
        expect(backend, out, dst, factor * sum_of(backend, ranks, n, dtype))


def scale_is_not_rounded_to_the_addends(backend: Backend) -> None:
    """1/3 as the scale of 16-bit addends is a float32 third, and multiplies once, after the sum."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend, floating=True):
        source, dst = open_addends(backend, n, dtype), replicated(n)
        out = move(backend, source, partial(n, dtype), dst, scale=1 / 3)
        exact = sum_of(backend, backend.mesh.ids, n, dtype)
        for rank, piece in backend.to_numpy(out).items():
            # Two roundings of float32 are right, one of 16 bits would show.
            np.testing.assert_allclose(piece, exact / 3, rtol=3e-7, err_msg=f"rank {rank}")
        give_up(backend, source, out)


def add_accumulates_micro_batches(backend: Backend) -> None:
    """Two scaled sums into one live buffer, which is not scaled itself."""
    n = numel_of(backend)
    for dst in (scattered_sum(backend, n), replicated(n)):
        for dtype in dtypes_of(backend, floating=True):
            source = open_addends(backend, n, dtype)
            total = backend.zeros(dst)
            total = move(backend, source, partial(n, dtype), dst, into=total, scale=0.5, add=True)
            _expect_scaled(backend, total, dst, dtype, 0.5)
            total = move(backend, source, partial(n, dtype), dst, into=total, scale=0.25, add=True)
            _expect_scaled(backend, total, dst, dtype, 0.75)
            give_up(backend, source, total)


def sums_are_kept_in_float32(backend: Backend) -> None:
    """16-bit addends that a 16-bit sum would lose: 256 or 2048 and ones."""
    n = numel_of(backend)
    first = backend.mesh.ids[0]
    for dtype, large in (("bfloat16", 256.0), ("float16", 2048.0)):
        if dtype not in backend.profile.dtypes:
            continue
        src = partial(n, dtype)
        content = {r: np.full(n, large if r == first else 1.0) for r in backend.local_ranks}
        source = open_with(backend, src, content)
        whole = replicated(n)
        out = move(backend, source, src, whole)
        expect(backend, out, whole, np.full(n, large + backend.mesh.size - 1))
        dst = scattered_sum(backend, n)
        out_shard = move(backend, source, src, dst)
        in_group = backend.roles.shards - 1

        def wanted(rank: int, large: float = large, ones: int = in_group) -> Any:
            with_first = first in backend.roles.shard_group(rank)
            return np.full(n // backend.roles.shards, large + ones if with_first else ones + 1.0)

        expect(backend, out_shard, dst, wanted)
        give_up(backend, source, out, out_shard)


def addends_are_unchanged_and_apart(backend: Backend) -> None:
    """A sum neither uses its addends as scratch nor hands one of them out as its result."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend, floating=True):
        for dst in (scattered_sum(backend, n), replicated(n)):
            src = partial(n, dtype)
            source = open_addends(backend, n, dtype)
            given = backend.to_numpy(source).__getitem__
            out = move(backend, source, src, dst)
            expect(backend, source, src, given)
            out = backend.scale(out, dst, 0.0)
            expect(backend, source, src, given)
            source = backend.scale(source, src, 2.0)
            expect(backend, out, dst, np.zeros(n))
            give_up(backend, source, out)


def zero_addends_change_nothing(backend: Backend) -> None:
    """A rank that offers nothing counts as zero, and adding zeros keeps a total."""
    n = numel_of(backend)
    total = open_with(backend, replicated(n), values(n, "float32"))
    nothing = backend.zeros(partial(n))
    total = move(backend, nothing, partial(n), replicated(n), into=total, scale=3.0, add=True)
    expect(backend, total, replicated(n), values(n, "float32"))
    give_up(backend, nothing, total)


CASES = (
    Case(reduce_scatter_sums_the_shard_axis),
    Case(reduce_path_sums_the_whole_mesh),
    Case(every_form_of_a_sum),
    Case(replica_sum_adds_equal_shards),
    Case(scale_multiplies_the_sum),
    Case(scale_is_not_rounded_to_the_addends),
    Case(add_accumulates_micro_batches),
    Case(sums_are_kept_in_float32),
    Case(addends_are_unchanged_and_apart),
    Case(zero_addends_change_nothing),
)
