"""Moves give the right values in mesh order, bit by bit, and never a part of their source."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import MESHES, addresses, open_with, shard_of

from meshcore import BufferSpec, Memory, Placement
from meshcore.backend import TransferProfile

SHARDED, REPLICATED = Placement.SHARDED, Placement.REPLICATED
PARTIAL, SHARDED_PARTIAL = Placement.PARTIAL, Placement.SHARDED_PARTIAL


def all_bit_patterns(dtype):
    width = np.dtype(dtype).itemsize
    count = 256**width
    return np.arange(count, dtype=f"uint{8 * width}").view(dtype)


def test_scatter_and_gather_follow_mesh_order(backend):
    n = 5 * backend.roles.shards
    whole, split = BufferSpec(n, "float32", REPLICATED), BufferSpec(n, "float32", SHARDED)
    content = np.arange(n, dtype=np.float32)
    source = open_with(backend, whole, content)
    shards = backend.redistribute(source, whole, split, into=None)
    held = backend.to_numpy(shards)
    assert list(held) == list(backend.mesh.ids)
    for rank, shard in held.items():
        np.testing.assert_array_equal(shard, shard_of(backend, rank, content))
    back = backend.redistribute(shards, split, whole, into=None)
    for full in backend.to_numpy(back).values():
        np.testing.assert_array_equal(full, content, strict=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_a_gather_keeps_all_bits(square, dtype):
    name = dtype
    numpy_dtype = square.to_numpy(square.zeros(BufferSpec(2, name, REPLICATED)))[0].dtype
    patterns = all_bit_patterns(numpy_dtype)
    n = len(patterns)
    whole, split = BufferSpec(n, name, REPLICATED), BufferSpec(n, name, SHARDED)
    shards = open_with(square, split, patterns)
    full = square.redistribute(shards, split, whole, into=None)
    bits = f"uint{8 * numpy_dtype.itemsize}"
    for held in square.to_numpy(full).values():
        np.testing.assert_array_equal(held.view(bits), patterns.view(bits))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint32", "bool"])
def test_integers_are_moved_exactly(square, dtype):
    n = 8
    whole, split = BufferSpec(n, dtype, REPLICATED), BufferSpec(n, dtype, SHARDED)
    content = np.array([0, 1, 0, 1, 1, 1, 0, 0]).astype(dtype)
    if dtype != "bool":
        content[:2] = np.iinfo(dtype).max, np.iinfo(dtype).min
    full = square.redistribute(open_with(square, split, content), split, whole, into=None)
    for held in square.to_numpy(full).values():
        np.testing.assert_array_equal(held, content, strict=True)


def test_a_gather_casts_on_the_way(square):
    src, dst = BufferSpec(4, "float32", SHARDED), BufferSpec(4, "bfloat16", REPLICATED)
    full = square.redistribute(open_with(square, src, [1, 257, 3, -0.5]), src, dst, into=None)
    for held in square.to_numpy(full).values():  # 257 has too many bits for bfloat16
        np.testing.assert_array_equal(held.astype(np.float32), [1, 256, 3, -0.5])


def moves_of(backend):
    n = 4 * backend.roles.shards
    split = SHARDED_PARTIAL if backend.roles.replicas > 1 else SHARDED
    host = Memory.HOST
    return [
        (BufferSpec(n, "float32", SHARDED), BufferSpec(n, "float32", REPLICATED)),
        (BufferSpec(n, "float32", REPLICATED), BufferSpec(n, "float32", SHARDED)),
        (BufferSpec(n, "float32", REPLICATED), BufferSpec(n, "bfloat16", REPLICATED)),
        (BufferSpec(n, "float32", PARTIAL), BufferSpec(n, "float32", split)),
        (BufferSpec(n, "float32", SHARDED_PARTIAL), BufferSpec(n, "float32", SHARDED)),
        (BufferSpec(n, "float32", PARTIAL), BufferSpec(n, "float32", REPLICATED)),
        (BufferSpec(n, "float32", SHARDED), BufferSpec(n, "float32", SHARDED, host)),
        (BufferSpec(n, "float32", SHARDED, host), BufferSpec(n, "float32", SHARDED)),
        (BufferSpec(n, "float32", SHARDED, host), BufferSpec(n, "float32", REPLICATED, host)),
    ]


def test_no_result_shares_storage_with_its_source(backend):
    for src, dst in moves_of(backend):
        source = backend.zeros(src)
        result = backend.redistribute(source, src, dst, into=None)
        assert not set(addresses(source)) & set(addresses(result)), f"{src} -> {dst}"
        assert not source.is_deleted()
        backend.free(source)
        assert set(backend.to_numpy(result)) == set(backend.local_ranks)


def test_a_destination_that_was_opened_first_is_taken_back(make):
    profile = TransferProfile(name="opened", preallocates=True)
    backend = make(MESHES["2x2"], profile=profile)
    src, dst = BufferSpec(4, "float32", SHARDED), BufferSpec(4, "float32", REPLICATED)
    source, into = open_with(backend, src, [1, 2, 3, 4]), backend.empty(dst)
    result = backend.redistribute(source, src, dst, into=into)
    assert into.is_deleted()
    np.testing.assert_array_equal(backend.to_numpy(result)[0], [1, 2, 3, 4])


# --- sums -------------------------------------------------------------------------------------


def addends_of(backend, n):
    return {
        rank: (np.arange(n) % 7 + 256 * (i % 2) + i).astype(np.float32)
        for i, rank in enumerate(backend.mesh.ids)
    }


def as_bfloat16(values):
    import ml_dtypes

    return np.asarray(values).astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_addends_of_any_dtype_are_summed_in_float32(backend, dtype):
    roles, n = backend.roles, 3 * backend.roles.shards
    given = addends_of(backend, n)
    exact = as_bfloat16 if dtype == "bfloat16" else np.asarray
    want = sum(exact(values) for values in given.values())
    src = BufferSpec(n, dtype, PARTIAL)
    source = open_with(backend, src, given)
    whole = BufferSpec(n, "float32", REPLICATED)
    total = backend.redistribute(source, src, whole, into=None)
    for held in backend.to_numpy(total).values():
        np.testing.assert_array_equal(held, want)
    split = SHARDED_PARTIAL if roles.replicas > 1 else SHARDED
    scattered = BufferSpec(n, "float32", split)
    shards = backend.redistribute(source, src, scattered, into=None)
    if split is SHARDED_PARTIAL:
        for rank, held in backend.to_numpy(shards).items():
            row = sum(exact(given[peer]) for peer in roles.shard_group(rank))
            np.testing.assert_array_equal(held, shard_of(backend, rank, row))
        home = BufferSpec(n, "float32", SHARDED)
        shards = backend.redistribute(shards, scattered, home, into=None)
    for rank, held in backend.to_numpy(shards).items():
        np.testing.assert_array_equal(held, shard_of(backend, rank, want))


def test_scale_and_add_go_into_the_live_buffer(backend):
    n = 3 * backend.roles.shards
    given = addends_of(backend, n)
    want = sum(values.astype(np.float64) for values in given.values())
    src, dst = BufferSpec(n, "float32", PARTIAL), BufferSpec(n, "float32", REPLICATED)
    source, into = open_with(backend, src, given), open_with(backend, dst, np.full(n, 8.0))
    for step in (1, 2):
        before, old = addresses(into), into
        into = backend.redistribute(source, src, dst, into=into, scale=0.25, add=True)
        assert addresses(into) == before
        assert old.is_deleted()
        for held in backend.to_numpy(into).values():
            np.testing.assert_array_equal(held, 8 + step * want / 4)
    for rank, held in backend.to_numpy(source).items():
        np.testing.assert_array_equal(held, given[rank])


def test_the_scale_is_applied_to_the_sum_in_float32(square):
    src, dst = BufferSpec(2, "bfloat16", PARTIAL), BufferSpec(2, "float32", REPLICATED)
    source = open_with(square, src, np.array([1.0, 3.0]))
    total = square.redistribute(source, src, dst, into=None, scale=1 / 3)
    want = np.array([4.0, 12.0], np.float32) * np.float32(1 / 3)
    np.testing.assert_array_equal(square.to_numpy(total)[0], want)


def test_nothing_is_moved_for_empty_buffers(backend):
    for src, dst in moves_of(backend):
        empty_src = BufferSpec(0, src.dtype, src.placement, src.memory)
        empty_dst = BufferSpec(0, dst.dtype, dst.placement, dst.memory)
        result = backend.redistribute(backend.zeros(empty_src), empty_src, empty_dst, into=None)
        assert set(backend.nbytes(result).values()) == {0}


def test_many_moves_in_a_row_end(square):
    """Collectives that run ahead of each other block for ever on emulated devices."""
    src, dst = BufferSpec(64, "float32", SHARDED), BufferSpec(64, "float32", REPLICATED)
    source = open_with(square, src, np.arange(64.0))
    for _ in range(200):
        full = square.redistribute(source, src, dst, into=None)
        square.free(full)
    last = square.redistribute(source, src, dst, into=None)
    np.testing.assert_array_equal(square.to_numpy(last)[1], np.arange(64.0))


def test_moves_may_be_left_in_flight(make):
    backend = make(MESHES["2x2"], extra={"sync": False})
    src, dst = BufferSpec(4096, "float32", SHARDED), BufferSpec(4096, "float32", REPLICATED)
    source = open_with(backend, src, np.arange(4096.0))
    full = backend.redistribute(source, src, dst, into=None)
    backend.free(source)  # the operation in flight keeps what it reads
    backend.wait(full)
    backend.wait(full)
    np.testing.assert_array_equal(backend.to_numpy(full)[3], np.arange(4096.0))


# --- host memory ------------------------------------------------------------------------------


def test_every_verb_works_in_host_memory(backend):
    n = 2 * backend.roles.shards
    near = BufferSpec(n, "float32", REPLICATED)
    far = BufferSpec(n, "float32", REPLICATED, Memory.HOST)
    array = backend.redistribute(open_with(backend, near, np.arange(n)), near, far, into=None)
    array = backend.write(array, far, 1, np.array([7.0]), add=True)
    array = backend.scale(array, far, 2.0)
    want = 2.0 * np.arange(n) + np.where(np.arange(n) == 1, 14.0, 0.0)
    assert array.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(backend.read(array, far, 0, n)), want)
    split = BufferSpec(n, "float32", SHARDED, Memory.HOST)
    shards = backend.redistribute(array, far, split, into=None)
    again = backend.redistribute(shards, split, far, into=None)
    assert {shards.sharding.memory_kind, again.sharding.memory_kind} == {"pinned_host"}
    addends = BufferSpec(n, "float32", PARTIAL, Memory.HOST)
    parts = backend.write(backend.zeros(addends), addends, 0, np.ones(n, np.float32))
    again = backend.redistribute(parts, addends, far, into=again, add=True)
    for held in backend.to_numpy(again).values():
        np.testing.assert_array_equal(held, want + backend.mesh.size)
