"""Values of moves over real processes, against numpy: all forms, dtypes, meshes and sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch_ranks
import torch_support
from torch_support import MESHES, PROFILES

from meshcore.dtypes import ALL_DTYPES
from meshcore.spec import Placement

# Sizes: nothing; less than a block; more than a block and not a multiple; a form's threshold.
SMALL, BLOCKS, LARGE = 5, 70_001, 200_000


@pytest.mark.parametrize("mesh", MESHES)
def test_every_dtype_moves_bit_for_bit(workers, mesh):
    args = (MESHES[mesh], ALL_DTYPES, None, SMALL)
    workers.run(torch_ranks.local_moves_and_gathers, *args)


@pytest.mark.parametrize("numel", [0, LARGE])
def test_gather_of_nothing_and_of_much(workers, numel):
    args = (MESHES["four permuted"], ("float32", "bfloat16"), None, numel)
    workers.run(torch_ranks.local_moves_and_gathers, *args)


@pytest.mark.parametrize("mesh", ["one", "two", "four permuted", "shard x replica"])
def test_gather_casts_at_the_source(workers, mesh):
    workers.run(torch_ranks.casting_gathers, MESHES[mesh], None, SMALL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("mesh", MESHES)
def test_sums_are_those_of_the_reference(workers, mesh, profile, dtype):
    args = (MESHES[mesh], PROFILES[profile], SMALL, dtype)
    workers.run(torch_ranks.sums_equal_mesh_order, *args)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("mesh", ["three", "replica x shard"])
def test_sums_cross_block_borders(workers, mesh, profile):
    args = (MESHES[mesh], PROFILES[profile], BLOCKS, "bfloat16")
    workers.run(torch_ranks.sums_equal_mesh_order, *args)


def test_default_form_changes_with_the_size(workers):
    args = (MESHES["two"], None, LARGE, "float32")
    workers.run(torch_ranks.sums_equal_mesh_order, *args)


@pytest.mark.parametrize("mesh", ["four permuted", "replica x shard"])
def test_all_reduce_has_the_same_bits_on_all_ranks(workers, mesh):
    got = workers.run(torch_ranks.whole_sum_bits, MESHES[mesh], 100_000)
    assert len(set(got)) == 1


@pytest.mark.parametrize("mesh", ["four", "replica x shard"])
def test_many_moves_in_flight(workers, mesh):
    workers.run(torch_ranks.overlapping_moves, MESHES[mesh])


def test_free_waits_for_what_is_in_flight(workers):
    workers.run(torch_ranks.freed_in_flight, MESHES["four"])


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("mesh", ["four permuted", "replica x shard"])
def test_mesh_order_counts_where_torch_sorts_ranks(workers, mesh, profile):
    args = (MESHES[mesh], PROFILES[profile])
    assert False in workers.run(torch_ranks.where_torch_sorts_ranks, *args)


@pytest.mark.parametrize("profile", PROFILES)
def test_everything_works_in_inference_mode(workers, profile):
    workers.run(torch_ranks.all_in_inference_mode, MESHES["four permuted"], PROFILES[profile])


@pytest.mark.parametrize("placement", [Placement.SHARDED, Placement.REPLICATED])
@pytest.mark.parametrize("mesh", MESHES)
def test_total_counts_valid_elements_once_and_is_equal_everywhere(workers, mesh, placement):
    shards = MESHES[mesh].roles().shards
    shard_numel = 70_000
    n = shards * shard_numel
    valid = [(0, 3), (3, 3), (10, n // 2), (n // 2 + 1, n - 7)]
    values = torch_support.value_of(n, "float32")
    args = (MESHES[mesh], values, valid, placement, shard_numel)
    got = [answer for answer in workers.run(torch_ranks.norm_of, *args) if answer is not None]
    assert len(got) == len(MESHES[mesh].ids)
    assert len(set(got)) == 1
    expected = sum(np.sum(np.square(values[a:b].astype(np.float64))) for a, b in valid)
    np.testing.assert_allclose(np.frombuffer(got[0], "<f8")[0], expected, rtol=1e-12)


def test_total_of_large_finite_values_is_finite(workers):
    values = np.full(8, 3e38, np.float32)
    args = (MESHES["four"], values, [(0, 8)], Placement.SHARDED, 2)
    got = workers.run(torch_ranks.norm_of, *args)
    np.testing.assert_allclose(np.frombuffer(got[0], "<f8")[0], 8 * 3e38**2, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_total_of_a_bad_value_is_not_finite(workers, bad):
    values = np.ones(8, np.float32)
    values[5] = bad
    args = (MESHES["four permuted"], values, [(0, 8)], Placement.SHARDED, 2)
    got = [np.frombuffer(b, "<f8")[0] for b in workers.run(torch_ranks.norm_of, *args)]
    assert not np.isfinite(got).any()
