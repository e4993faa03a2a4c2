"""Sums of squares: counted once, masked first, without overflow, exact where fp32 is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import open_with

from meshcore import BufferSpec, Placement

PLACEMENTS = [Placement.SHARDED, Placement.REPLICATED]


def total_of(backend, content, valid, placement, dtype="float32"):
    spec = BufferSpec(len(content), dtype, placement)
    return backend.total([backend.square_sum(open_with(backend, spec, content), spec, valid)])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_element_counts_once(backend, placement):
    content = np.arange(5 * backend.roles.shards, dtype=np.float32)
    want = float(np.sum(content.astype(np.float64) ** 2))
    assert total_of(backend, content, [(0, len(content))], placement) == want


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_not_valid_is_masked_before_it_is_squared(backend, placement):
    n = 5 * backend.roles.shards
    content = np.arange(n, dtype=np.float32)
    content[[0, 3, n - 1]] = math.nan, math.inf, -math.inf
    want = 1.0 + 4.0 + sum(i * i for i in range(4, n - 1))
    assert total_of(backend, content, [(4, n - 1), (1, 3)], placement) == want


@pytest.mark.parametrize(
    "valid",
    [
        [],
        [(3, 3)],
        [(0, 60)],
        [(0, 10), (10, 20)],
        [(0, 30), (10, 20), (25, 31)],
        [(i, i + 1) for i in range(0, 60, 3)],
        [(i, i + 1) for i in range(0, 60, 2)],
    ],
)
def test_ranges_may_be_many_or_touch_or_overlap(square, valid):
    content = np.arange(60, dtype=np.float32)
    inside = sorted({i for start, stop in valid for i in range(start, stop)})
    for placement in PLACEMENTS:
        assert total_of(square, content, valid, placement) == sum(i * i for i in inside)


@pytest.mark.parametrize("factor", [1e30, 1e15, 1.0, 1e-15, 1e-25])
def test_large_and_small_elements_keep_their_squares(square, factor):
    content = np.float32(factor) * (np.arange(40) % 9 + 1).astype(np.float32)
    want = float(np.sum(content.astype(np.float64) ** 2))
    for placement in PLACEMENTS:
        got = total_of(square, content, [(0, 40)], placement)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_large_element_does_not_hide_the_others_of_the_buffer(square):
    n = 4 * 4096 * 2
    content = np.full(n, 1e-3, np.float32)
    content[0] = 3e38
    got = total_of(square, content, [(1, n)], Placement.SHARDED)
    np.testing.assert_allclose(got, (n - 1) * 1e-6, rtol=1e-5)
    assert math.isfinite(total_of(square, content, [(0, n)], Placement.SHARDED))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(square, bad):
    content = np.ones(8, np.float32)
    content[5] = bad
    for placement in PLACEMENTS:
        assert not math.isfinite(total_of(square, content, [(0, 8)], placement))


def test_a_long_buffer_loses_no_digits(square):
    """Summed one by one in fp32, a million equal squares are off by 1e-4 and more."""
    n = 2**20
    content = np.full(n, 0.1, np.float32)
    want = n * float(np.float32(0.1)) ** 2
    np.testing.assert_allclose(
        total_of(square, content, [(0, n)], Placement.SHARDED), want, rtol=1e-6
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_are_squared_in_float32(square, dtype):
    content = np.full(64, 200.0)  # 40,000 is more than float16 holds when summed
    want = 64 * 40_000.0
    assert total_of(square, content, [(0, 64)], Placement.SHARDED, dtype) == want


def test_parts_add_up_and_the_buffer_is_kept(square):
    spec = BufferSpec(4, "float32", Placement.SHARDED)
    array = open_with(square, spec, [1, 2, 3, 4])
    parts = [square.square_sum(array, spec, [(0, 4)]), square.square_sum(array, spec, [(1, 2)])]
    assert square.total(parts) == 34.0
    assert square.total(parts) == 34.0
    assert square.total([]) == 0.0
    np.testing.assert_array_equal(square.to_numpy(array)[1], [3, 4])
