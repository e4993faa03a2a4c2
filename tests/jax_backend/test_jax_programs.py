"""What XLA makes of the programs: collectives, temporaries, compilations."""

from __future__ import annotations

import re

import numpy as np
import pytest
from conftest import MESHES, addresses, open_with

from meshcore import BufferSpec, Memory, Placement
from meshcore.backend import move_kind
from meshcore_jax import programs

SHARDED, REPLICATED = Placement.SHARDED, Placement.REPLICATED
PARTIAL, SHARDED_PARTIAL = Placement.PARTIAL, Placement.SHARDED_PARTIAL
SHARD_NUMEL = 4096


def compiled_move(backend, src, dst, *, add=False):
    kind, whole, factor = move_kind(src, dst, backend.roles), backend._binding.whole, np.float32(1)
    source = backend.zeros(src)
    if not kind.is_sum:
        return programs.move_program(whole, kind, src, dst).lower(source).compile()
    program = programs.sum_program(whole, kind, src, dst, add=add)
    into = (backend.zeros(dst),) if add else ()
    return program.lower(*into, source, factor).compile()


def collectives(compiled):
    """(name, shape of the result) of every collective in a compiled program."""
    found = re.findall(
        r"= (\w+\[[\d,]*\])\S* "
        r"(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\(",
        compiled.as_text(),
    )
    return [(name, shape) for shape, name in found]


def specs(backend, dtype="float32"):
    n = SHARD_NUMEL * backend.roles.shards
    return {placement: BufferSpec(n, dtype, placement) for placement in Placement}


@pytest.mark.parametrize(
    ("mesh", "source", "target", "want"),
    [
        ("1x4", SHARDED, REPLICATED, [("all-gather", "f32[16384]")]),
        ("1x4", REPLICATED, SHARDED, []),
        ("1x4", PARTIAL, SHARDED, [("reduce-scatter", "f32[4096]")]),
        ("1x4", PARTIAL, REPLICATED, [("all-reduce", "f32[16384]")]),
        ("2x2", SHARDED, REPLICATED, [("all-gather", "f32[8192]")]),
        ("2x2", PARTIAL, SHARDED_PARTIAL, [("reduce-scatter", "f32[4096]")]),
        ("2x2", SHARDED_PARTIAL, SHARDED, [("all-reduce", "f32[4096]")]),
        ("2x2", PARTIAL, REPLICATED, [("all-reduce", "f32[8192]")]),
        ("4x1", SHARDED, REPLICATED, []),
        ("4x1", PARTIAL, SHARDED_PARTIAL, []),
        ("4x1", SHARDED_PARTIAL, SHARDED, [("all-reduce", "f32[4096]")]),
        ("one", PARTIAL, REPLICATED, []),
    ],
)
def test_a_move_is_one_collective_over_its_axis(make, mesh, source, target, want):
    backend = make(MESHES[mesh])
    by_placement = specs(backend)
    compiled = compiled_move(backend, by_placement[source], by_placement[target])
    assert collectives(compiled) == want


def test_a_narrowing_gather_moves_narrow_bits(square):
    src = BufferSpec(8192, "float32", SHARDED)
    compiled = compiled_move(square, src, BufferSpec(8192, "bfloat16", REPLICATED))
    assert collectives(compiled) == [("all-gather", "u16[8192]")]


def test_bfloat16_addends_are_summed_as_float32(square):
    src = BufferSpec(8192, "bfloat16", PARTIAL)
    compiled = compiled_move(square, src, BufferSpec(8192, "float32", SHARDED_PARTIAL))
    assert collectives(compiled) == [("reduce-scatter", "f32[4096]")]


def test_moves_of_float32_need_no_full_temporary(make):
    backend = make(MESHES["1x4"])
    by_placement = specs(backend)
    shard_nbytes = 4 * SHARD_NUMEL
    for source, target, add, most in [
        (SHARDED, REPLICATED, False, 0),
        (PARTIAL, SHARDED, False, 0),
        (PARTIAL, SHARDED, True, shard_nbytes),
    ]:
        compiled = compiled_move(backend, by_placement[source], by_placement[target], add=add)
        assert compiled.memory_analysis().temp_size_in_bytes <= most, (source, target, add)


def test_chunks_of_one_size_share_one_compilation(make, compilations):
    n = 4 * 1013  # a size that no other test uses
    for _ in range(2):  # a second backend on the same mesh adds nothing either
        backend = make(MESHES["1x4"])
        whole, split = BufferSpec(n, "float32", REPLICATED), BufferSpec(n, "float32", SHARDED)
        parts = BufferSpec(n, "float32", PARTIAL)
        for i in range(4):
            array = backend.write(backend.zeros(whole), whole, 10 * i, np.ones(7, np.float32))
            shards = backend.redistribute(array, whole, split, into=None)
            full = backend.redistribute(shards, split, whole, into=None)
            given = {rank: np.ones(7, np.float32) for rank in (0, i)}
            addends = backend.write(backend.zeros(parts), parts, i, given, add=True)
            grad = backend.redistribute(addends, parts, split, into=None, scale=1 / (i + 1))
            grad = backend.redistribute(addends, parts, split, into=grad, scale=0.5, add=True)
            backend.read(full, whole, i, i + 9)
            backend.total([backend.square_sum(grad, split, [(i, n - i), (0, 1)])])
            grad = backend.scale(grad, split, 0.1 * i)
    kinds = (
        "zeros whole",
        "zeros parts",
        "write",
        "write by rank",
        "scatter",
        "gather",
        "reduce",
        "reduce and add",
        "read",
        "square sum, of one range",
        "square sum, of two ranges",
        "scale",
    )
    assert len(compilations) == len(kinds)


@pytest.mark.parametrize("placement", [REPLICATED, PARTIAL])
@pytest.mark.parametrize("add", [False, True])
def test_writes_are_in_place(backend, placement, add):
    spec = BufferSpec(6 * backend.roles.shards, "float32", placement)
    array = backend.zeros(spec)
    before, old = addresses(array), array
    array = backend.write(array, spec, 2, np.ones(3, np.float32), add=add)
    assert addresses(array) == before
    assert old.is_deleted()
    if placement is PARTIAL:
        rank = backend.local_ranks[-1]
        array = backend.write(array, spec, 1, {rank: np.ones(3, np.float32)}, add=add)
        assert addresses(array) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaling_is_in_place(square, dtype):
    spec = BufferSpec(8, dtype, SHARDED)
    array = open_with(square, spec, np.arange(8))
    before, old = addresses(array), array
    array = square.scale(array, spec, 0.5)
    assert addresses(array) == before
    assert old.is_deleted()
    np.testing.assert_array_equal(square.to_numpy(array)[0].astype(float), [2.0, 2.5, 3.0, 3.5])


def test_a_copy_for_numpy_leaves_later_writes_in_place(square):
    """A numpy view of a device block would make jax skip the donation without a word."""
    spec = BufferSpec(4096, "float32", REPLICATED)
    array = open_with(square, spec, np.arange(4096))
    copies = square.to_numpy(array)
    before = addresses(array)
    array = square.write(array, spec, 0, np.full(4096, -1.0))
    assert addresses(array) == before
    for copy in copies.values():
        np.testing.assert_array_equal(copy, np.arange(4096))


def test_a_view_held_by_others_does_not_keep_the_old_buffer_alive(square):
    spec = BufferSpec(4096, "float32", REPLICATED)
    array = open_with(square, spec, np.arange(4096))
    view = np.asarray(array.addressable_shards[0].data)
    result = square.write(array, spec, 0, np.full(8, -1.0))
    assert array.is_deleted()
    np.testing.assert_array_equal(view, np.arange(4096))
    np.testing.assert_array_equal(square.to_numpy(result)[0][:9], [-1] * 8 + [8])


def test_host_memory_is_reached_inside_the_program(square):
    src = BufferSpec(8192, "float32", SHARDED, Memory.HOST)
    dst = BufferSpec(8192, "float32", REPLICATED, Memory.HOST)
    whole = square._binding.whole
    program = programs.move_program(whole, move_kind(src, dst, square.roles), src, dst)
    lowered = program.trace(square.zeros(src)).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall("annotate_device_placement", lowered)) >= 2  # there, and back
