"""Cases about moves that carry values as they are: gather, scatter, cast, transfer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from meshcore.backend import Backend
from meshcore.dtypes import is_floating, itemsize, numpy_dtype
from meshcore.spec import BufferSpec, Memory, MoveKind, Placement
from meshcore.testing.contract.model import (
    Case,
    dtypes_of,
    expect,
    form_sizes,
    give_up,
    move,
    numel_of,
    open_addends,
    open_with,
    replicated,
    sharded,
    start_move,
    sum_of,
    values,
)


def gather_follows_mesh_order(backend: Backend) -> None:
    """The whole is the shards in the order of the mesh, on every rank."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend):
        src, dst = sharded(n, dtype), replicated(n, dtype)
        source = open_with(backend, src, values(n, dtype))
        out = move(backend, source, src, dst)
        expect(backend, out, dst, values(n, dtype))
        give_up(backend, source, out)


def scatter_keeps_the_own_shard(backend: Backend) -> None:
    """Index i along the shard axis keeps the i-th part, whatever its replica index."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend):
        src, dst = replicated(n, dtype), sharded(n, dtype)
        source = open_with(backend, src, values(n, dtype))
        out = move(backend, source, src, dst)
        expect(backend, out, dst, values(n, dtype))
        give_up(backend, source, out)


def every_form_of_gather(backend: Backend) -> None:
    """Buffers just large enough for each form that the profile lists."""
    for n in form_sizes(backend, MoveKind.GATHER, itemsize("float32")):
        src, dst = sharded(n), replicated(n)
        source = open_with(backend, src, values(n, "float32"))
        out = move(backend, source, src, dst)
        expect(backend, out, dst, values(n, "float32"))
        give_up(backend, source, out)


def gather_keeps_every_bit(backend: Backend) -> None:
    """Signed zeros, subnormals and extremes arrive as they left, in 8-bit and wide dtypes too."""
    n = numel_of(backend)
    rare = ("float8_e4m3fn", "float8_e5m2", "float64", "int64", "uint16")
    listed = [dtype for dtype in rare if dtype in backend.profile.dtypes]
    for dtype in (*dtypes_of(backend), *listed):
        src, dst = sharded(n, dtype), replicated(n, dtype)
        whole = np.resize(_extremes(dtype), n)
        source = open_with(backend, src, whole)
        out = move(backend, source, src, dst)
        for rank, piece in backend.to_numpy(out).items():
            np.testing.assert_array_equal(
                piece.view(np.uint8), whole.view(np.uint8), f"rank {rank}, {dtype}: bits changed"
            )
        give_up(backend, source, out)


def _extremes(dtype: str) -> Any:
    numpy_type = numpy_dtype(dtype)
    if dtype == "bool":
        return np.array([True, False, False, True, True])
    if not is_floating(dtype):
        limits = np.iinfo(numpy_type)
        return np.array([limits.max, limits.min, 1, 0, 5], numpy_type)
    # By bit pattern, one and zero of both signs, the smallest subnormal, and a large finite number.
    bits = np.dtype(f"uint{8 * itemsize(dtype)}")
    one = int(np.ones(1, numpy_type).view(bits)[0])
    sign = 1 << (8 * itemsize(dtype) - 1)
    large = one + (one >> 1)
    return np.array([0, sign, 1, one, one | sign, large, 1 | sign], bits).view(numpy_type)


def gather_rounds_before_it_travels(backend: Backend) -> None:
    """A float32 shard gathered as 16 bits is rounded to nearest, ties to even."""
    n = numel_of(backend)
    whole = np.resize(np.array([257, 259, 1.00390625, -2.0117188, 1 / 3, 4097], np.float32), n)
    for dtype in dtypes_of(backend, floating=True):
        if dtype == "float32":
            continue
        src, dst = sharded(n), replicated(n, dtype)
        source = open_with(backend, src, whole)
        out = move(backend, source, src, dst)
        expect(backend, out, dst, whole)
        expect(backend, source, src, whole)
        give_up(backend, source, out)


def scatter_and_cast_at_once(backend: Backend) -> None:
    """A 16-bit whole becomes a float32 shard, and a float32 whole a 16-bit shard."""
    n = numel_of(backend)
    for wide, narrow in (("float32", d) for d in dtypes_of(backend, floating=True)[1:]):
        for src_dtype, dst_dtype in ((wide, narrow), (narrow, wide)):
            src, dst = replicated(n, src_dtype), sharded(n, dst_dtype)
            source = open_with(backend, src, values(n, src_dtype))
            out = move(backend, source, src, dst)
            expect(backend, out, dst, values(n, dst_dtype))
            give_up(backend, source, out)


def cast_alone(backend: Backend) -> None:
    """The dtype changes and nothing else, on whole and split placements."""
    n = numel_of(backend)
    for placement in (Placement.SHARDED, Placement.REPLICATED):
        for dtype in dtypes_of(backend, floating=True)[1:]:
            wide = BufferSpec(n, "float32", placement)
            narrow = replace(wide, dtype=dtype)
            source = open_with(backend, wide, values(n, "float32") + np.float32(1 / 3))
            out = move(backend, source, wide, narrow)
            rounded = (values(n, "float32") + np.float32(1 / 3)).astype(numpy_dtype(dtype))
            expect(backend, out, narrow, rounded)
            back = move(backend, out, narrow, wide)
            expect(backend, back, wide, rounded.astype(np.float32))
            give_up(backend, source, out, back)


def transfer_to_host_and_back(backend: Backend) -> None:
    """Memory changes and nothing else, for every dtype and placement; the source stays."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend):
        for near in (sharded(n, dtype), replicated(n, dtype)):
            far = replace(near, memory=Memory.HOST)
            source = open_with(backend, near, values(n, dtype))
            out = move(backend, source, near, far)
            expect(backend, out, far, values(n, dtype))
            expect(backend, source, near, values(n, dtype))
            give_up(backend, source)
            back = move(backend, out, far, near)
            give_up(backend, out)
            expect(backend, back, near, values(n, dtype))
            give_up(backend, back)


def addends_survive_a_transfer(backend: Backend) -> None:
    """What is still to be summed can wait in host memory, rank by rank."""
    n = numel_of(backend)
    near = BufferSpec(n, "float32", Placement.PARTIAL)
    far = replace(near, memory=Memory.HOST)
    source = open_addends(backend, n)
    out = move(backend, source, near, far)
    back = move(backend, out, far, near)
    whole = replicated(n)
    total = move(backend, back, near, whole)
    expect(backend, total, whole, sum_of(backend, backend.mesh.ids, n, "float32"))
    give_up(backend, source, out, back, total)


def source_and_result_are_apart(backend: Backend) -> None:
    """Neither follows the other, even where a move is a local copy."""
    n = numel_of(backend)
    whole, split = replicated(n), sharded(n)
    moves = [
        (split, whole),
        (whole, split),
        (whole, replace(whole, memory=Memory.HOST)),
        *((whole, replicated(n, dtype)) for dtype in dtypes_of(backend, floating=True)[1:2]),
    ]
    for src, dst in moves:
        source = open_with(backend, src, values(n, "float32"))
        out = move(backend, source, src, dst)
        expect(backend, source, src, values(n, "float32"))
        source = backend.scale(source, src, 2.0)
        expect(backend, out, dst, values(n, dst.dtype))
        out = backend.scale(out, dst, 0.0)
        expect(backend, source, src, 2 * values(n, "float32"))
        give_up(backend, source)
        expect(backend, out, dst, np.zeros(n))
        give_up(backend, out)


def moves_in_flight_end_apart(backend: Backend) -> None:
    """Two gathers issued one after the other may be waited for in any order, and twice."""
    n = numel_of(backend)
    src, dst = sharded(n), replicated(n)
    sources = [open_with(backend, src, values(n, "float32", seed)) for seed in (0, 5)]
    flights = [start_move(backend, source, src, dst) for source in sources]
    for out, scratch in reversed(flights):
        backend.wait(out)
        backend.wait(out)
        give_up(backend, *scratch)
    for (out, _), seed in zip(flights, (0, 5), strict=True):
        expect(backend, out, dst, values(n, "float32", seed))
        give_up(backend, out)
    for source in sources:
        backend.wait(source)
    give_up(backend, *sources)


def a_gather_can_be_repeated(backend: Backend) -> None:
    """Many rounds on changing shards never give an old value."""
    n = numel_of(backend)
    src, dst = sharded(n), replicated(n)
    source = open_with(backend, src, np.ones(n))
    shell = None
    for step in range(1, 6):
        into = backend.empty(dst, shell) if backend.profile.preallocates else None
        out = move(backend, source, src, dst, into=into)
        expect(backend, out, dst, np.full(n, 2.0 ** (step - 1)))
        shell = backend.free(out)
        source = backend.scale(source, src, 2.0)
    if shell is not None:
        backend.drop(shell)
    give_up(backend, source)


CASES = (
    Case(gather_follows_mesh_order),
    Case(scatter_keeps_the_own_shard),
    Case(every_form_of_gather),
    Case(gather_keeps_every_bit),
    Case(gather_rounds_before_it_travels),
    Case(scatter_and_cast_at_once),
    Case(cast_alone),
    Case(transfer_to_host_and_back),
    Case(addends_survive_a_transfer),
    Case(source_and_result_are_apart),
    Case(moves_in_flight_end_apart),
    Case(a_gather_can_be_repeated),
)
