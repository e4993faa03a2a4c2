"""Cases about the sum of squares over the whole mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshcore.backend import Backend
from meshcore.spec import BufferSpec, Placement
from meshcore.testing.contract.model import (
    Case,
    dtypes_of,
    expect,
    give_up,
    numel_of,
    open_with,
    replicated,
    require,
    sharded,
    values,
)

_TOLERANCE = 1e-6
"""Relative: a share may be summed in float32, scaled by its largest magnitude."""


def _norm_of(backend: Backend, specs: Sequence[BufferSpec], whole: Any, valid: Any) -> float:
    """The total over buffers of some specs that all hold ``whole``; equal on all ranks."""
    parts, arrays = [], []
    for spec in specs:
        array = open_with(backend, spec, whole)
        parts.append(backend.square_sum(array, spec, valid))
        arrays.append(array)
    total = backend.total(parts)
    require(isinstance(total, float), f"a total is a float, not {type(total)}")
    said = backend.exchange(float(total).hex().encode())
    require(len(set(said.values())) == 1, f"ranks have different totals: {dict(said)}")
    give_up(backend, *arrays)
    return total


def _close(got: float, want: float) -> None:
    np.testing.assert_allclose(got, want, rtol=_TOLERANCE, atol=0)


def every_element_counts_once(backend: Backend) -> None:
    """Sharded or not, with replicas or not, in every dtype."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend, floating=True):
        want = float(np.sum(values(n, dtype).astype(np.float64) ** 2))
        for spec in (sharded(n, dtype), replicated(n, dtype)):
            _close(_norm_of(backend, [spec], values(n, dtype), [(0, n)]), want)


def only_valid_ranges_count(backend: Backend) -> None:
    """Ranges are of the whole buffer, in any number, within a shard or across shards."""
    n = numel_of(backend)
    squares = values(n, "float32").astype(np.float64) ** 2
    for valid in ([(1, 2)], [(0, 2), (3, n - 1)], [(n - 2, n)], [(2, 2), (4, 5)], []):
        want = float(sum(squares[start:stop].sum() for start, stop in valid))
        for spec in (sharded(n), replicated(n)):
            _close(_norm_of(backend, [spec], values(n, "float32"), valid), want)


def nan_outside_the_ranges_is_no_matter(backend: Backend) -> None:
    """Gaps and padding are masked before they are squared."""
    n = numel_of(backend)
    whole = values(n, "float32")
    whole[0], whole[3], whole[n - 1] = math.nan, math.inf, math.nan
    valid = [(1, 3), (4, n - 1)]
    want = float(sum((whole[a:b].astype(np.float64) ** 2).sum() for a, b in valid))
    for spec in (sharded(n), replicated(n)):
        _close(_norm_of(backend, [spec], whole, valid), want)


def parts_add_up(backend: Backend) -> None:
    """Several buffers, of both placements, in one scalar collective; none gives 0."""
    n = numel_of(backend)
    want = float(np.sum(values(n, "float32").astype(np.float64) ** 2))
    specs = [sharded(n), replicated(n), sharded(n)]
    _close(_norm_of(backend, specs, values(n, "float32"), [(0, n)]), 3 * want)
    nothing = backend.total([])
    require(nothing == 0.0, f"the total of no parts is 0.0, not {nothing}")


def large_elements_do_not_overflow(backend: Backend) -> None:
    """Squares beyond float32, of elements within it."""
    n = numel_of(backend)
    whole = values(n, "float32") * np.float32(1e30)
    want = float(np.sum(whole.astype(np.float64) ** 2))
    for spec in (sharded(n), replicated(n)):
        _close(_norm_of(backend, [spec], whole, [(0, n)]), want)


def a_nonfinite_element_shows(backend: Backend) -> None:
    """One NaN or inf on one rank makes the total non-finite on all."""
    n = numel_of(backend)
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, n - 1):
            whole = values(n, "float32")
            whole[place] = bad
            for spec in (sharded(n), replicated(n)):
                total = _norm_of(backend, [spec], whole, [(0, n)])
                require(not math.isfinite(total), f"{bad} at {place} gave the total {total}")


def the_norm_changes_nothing(backend: Backend) -> None:
    """Asking twice gives the same float, and the buffer keeps its value."""
    n = numel_of(backend)
    for placement in (Placement.SHARDED, Placement.REPLICATED):
        spec = BufferSpec(n, "float32", placement)
        array = open_with(backend, spec, values(n, "float32"))
        totals = {backend.total([backend.square_sum(array, spec, [(1, n)])]) for _ in range(2)}
        require(len(totals) == 1, f"two totals of one buffer differ: {totals}")
        expect(backend, array, spec, values(n, "float32"))
        give_up(backend, array)


CASES = (
    Case(every_element_counts_once),
    Case(only_valid_ranges_count),
    Case(nan_outside_the_ranges_is_no_matter),
    Case(parts_add_up),
    Case(large_elements_do_not_overflow),
    Case(a_nonfinite_element_shows),
    Case(the_norm_changes_nothing),
)
