"""Cases about content: write, add, scale, read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from meshcore.backend import Backend
from meshcore.dtypes import numpy_dtype
from meshcore.spec import BufferSpec, Memory, Placement
from meshcore.testing.contract.model import (
    Case,
    addend,
    dtypes_of,
    expect,
    give_up,
    numel_of,
    open_addends,
    open_with,
    partial,
    replicated,
    require,
    sharded,
    values,
)


def write_fills_a_range(backend: Backend) -> None:
    """Ranges of one, some and all elements; what lies outside keeps its value."""
    n = numel_of(backend)
    ranges = [("float32", a, b) for a, b in ((0, n), (0, 1), (n - 1, n), (n - 3, n), (2, 2))]
    ranges += [(dtype, 1, 4) for dtype in dtypes_of(backend)]
    for dtype, start, stop in ranges:
        spec = replicated(n, dtype)
        array = open_with(backend, spec, np.ones(n))
        array = backend.write(array, spec, start, values(stop - start, dtype, 2))
        want = np.ones(n).astype(numpy_dtype(dtype))
        want[start:stop] = values(stop - start, dtype, 2)
        expect(backend, array, spec, want)
        give_up(backend, array)


def write_by_rank_leaves_absent_ranks_alone(backend: Backend) -> None:
    """A mapping writes to the ranks that it names, and to no other."""
    n = numel_of(backend)
    spec = partial(n)
    array = open_addends(backend, n)
    named = {rank for i, rank in enumerate(backend.mesh.ids) if i % 2 == 0}
    mine = {r: addend(backend, r, 3, "float32", 9) for r in backend.local_ranks if r in named}
    array = backend.write(array, spec, 1, mine)

    def wanted(rank: int) -> Any:
        want = addend(backend, rank, n, "float32")
        if rank in named:
            want[1:4] = addend(backend, rank, 3, "float32", 9)
        return want

    expect(backend, array, spec, wanted)
    array = backend.write(array, spec, 0, {})
    expect(backend, array, spec, wanted)
    give_up(backend, array)


def write_alike_reaches_every_local_rank(backend: Backend) -> None:
    """One array means the same on all local ranks, on PARTIAL too."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend, floating=True):
        spec = partial(n, dtype)
        array = backend.write(backend.zeros(spec), spec, 2, values(4, dtype))
        want = np.zeros(n)
        want[2:6] = values(4, dtype)
        expect(backend, array, spec, want)
        give_up(backend, array)


def add_accumulates_in_place(backend: Backend) -> None:
    """``add`` adds to a range, for one array and for arrays by rank, any number of times."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend, floating=True):
        spec = partial(n, dtype)
        array = open_addends(backend, n, dtype)
        array = backend.write(array, spec, 1, np.full(3, 2, numpy_dtype(dtype)), add=True)
        ours = {rank: np.full(3, rank + 1, np.float32) for rank in backend.local_ranks}
        array = backend.write(array, spec, 1, ours, add=True)

        def wanted(rank: int, dtype: str = dtype) -> Any:
            want = addend(backend, rank, n, dtype).astype(np.float64)
            want[1:4] += 2 + rank + 1
            return want

        expect(backend, array, spec, wanted)
        give_up(backend, array)
    whole = replicated(n, "int32")
    if "int32" in backend.profile.dtypes:
        array = open_with(backend, whole, values(n, "int32"))
        array = backend.write(array, whole, 0, np.full(n, 3, np.int32), add=True)
        expect(backend, array, whole, values(n, "int32") + 3)
        give_up(backend, array)


def write_casts_to_the_buffer(backend: Backend) -> None:
    """float32 values are rounded to a 16-bit buffer, 16-bit values widen exactly."""
    n = numel_of(backend)
    fine = np.resize(np.array([257, 259, 1 / 3], np.float32), n)
    for dtype in dtypes_of(backend, floating=True):
        array = open_with(backend, replicated(n, dtype), fine)
        expect(backend, array, replicated(n, dtype), fine)
        wide = open_with(backend, replicated(n), fine.astype(numpy_dtype(dtype)))
        expect(backend, wide, replicated(n), fine.astype(numpy_dtype(dtype)))
        give_up(backend, array, wide)


def write_copies_its_values(backend: Backend) -> None:
    """Values may be views of any stride; they are neither kept nor changed."""
    n = numel_of(backend)
    spec = replicated(n)
    backing = values(2 * n, "float32")
    before = backing.copy()
    strided, reversed_ = backing[::2], backing[n - 1 :: -1]
    first = backend.write(backend.zeros(spec), spec, 0, strided)
    second = backend.write(backend.zeros(spec), spec, 0, reversed_)
    backend.wait(first)
    backend.wait(second)
    first = backend.scale(first, spec, 2.0)
    np.testing.assert_array_equal(backing, before, "write changed its values")
    backing[...] = 99
    expect(backend, first, spec, 2 * before[::2])
    expect(backend, second, spec, before[n - 1 :: -1])
    give_up(backend, first, second)


def read_values_can_be_written(backend: Backend) -> None:
    """An array of the framework, as ``read`` gives it, is as good a value as a numpy array."""
    n = numel_of(backend)
    spec = replicated(n)
    first = open_with(backend, spec, values(n, "float32"))
    second = backend.zeros(spec)
    second = backend.write(second, spec, 1, backend.read(first, spec, 0, n - 1))
    second = backend.write(second, spec, 0, backend.read(first, spec, 0, n), add=True)
    want = values(n, "float32")
    want[1:] += values(n, "float32")[:-1]
    expect(backend, second, spec, want)
    expect(backend, first, spec, values(n, "float32"))
    give_up(backend, first, second)


def read_gives_a_range(backend: Backend) -> None:
    """One 1-D array of the asked elements that can be given a shape."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend, floating=True)[:1] + dtypes_of(backend)[-1:]:
        spec = replicated(n, dtype)
        array = open_with(backend, spec, values(n, dtype))
        for start, stop in ((0, n), (1, 5), (n - 1, n), (3, 3)):
            got = backend.read(array, spec, start, stop)
            require(tuple(got.shape) == (stop - start,), f"read has shape {tuple(got.shape)}")
            np.testing.assert_array_equal(np.asarray(got), values(n, dtype)[start:stop])
        grid = np.asarray(backend.read(array, spec, 0, 4).reshape(2, 2))
        np.testing.assert_array_equal(grid, values(n, dtype)[:4].reshape(2, 2))
        give_up(backend, array)


def a_copied_read_outlives_its_buffer(backend: Backend) -> None:
    """With ``copy`` the result is the caller's, whatever happens to the buffer."""
    n = numel_of(backend)
    spec = replicated(n)
    array = open_with(backend, spec, values(n, "float32"))
    kept = backend.read(array, spec, 1, n, copy=True)
    array = backend.scale(array, spec, 2.0)
    np.testing.assert_array_equal(np.asarray(kept), values(n, "float32")[1:])
    give_up(backend, array)
    again = backend.zeros(spec)
    np.testing.assert_array_equal(np.asarray(kept), values(n, "float32")[1:])
    give_up(backend, again)


def scale_multiplies_any_placement(backend: Backend) -> None:
    """Every element of every rank, in both memories, padding included."""
    n = numel_of(backend)
    for dtype in dtypes_of(backend, floating=True):
        specs = [replicated(n, dtype), sharded(n, dtype)]
        specs.append(replace(sharded(n, dtype), memory=Memory.HOST))
        for spec in specs:
            array = open_with(backend, spec, values(n, dtype))
            array = backend.scale(array, spec, 0.5)
            expect(backend, array, spec, values(n, dtype).astype(np.float64) * 0.5)
            give_up(backend, array)
    spec = partial(n)
    array = backend.scale(open_addends(backend, n), spec, 2.0)
    expect(backend, array, spec, lambda rank: 2 * addend(backend, rank, n, "float32"))
    give_up(backend, array)
    spec = BufferSpec(n, "float32", Placement.SHARDED_PARTIAL)
    array = backend.scale(backend.zeros(spec), spec, 2.0)
    expect(backend, array, spec, np.zeros(n))
    give_up(backend, array)


CASES = (
    Case(write_fills_a_range),
    Case(write_by_rank_leaves_absent_ranks_alone),
    Case(write_alike_reaches_every_local_rank),
    Case(add_accumulates_in_place),
    Case(write_casts_to_the_buffer),
    Case(write_copies_its_values),
    Case(read_values_can_be_written),
    Case(read_gives_a_range),
    Case(a_copied_read_outlives_its_buffer),
    Case(scale_multiplies_any_placement),
)
