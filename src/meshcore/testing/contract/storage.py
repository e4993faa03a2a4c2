"""Cases about storage: what is opened, what it holds, what is left of it once it is freed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshcore.backend import Backend
from meshcore.errors import SpecError
from meshcore.spec import BufferSpec, Memory, Placement
from meshcore.testing.contract.model import (
    Case,
    assorted_specs,
    dtypes_of,
    expect,
    give_up,
    move,
    numel_of,
    open_with,
    replicated,
    require,
    sharded,
    values,
)


def zeros_are_zero(backend: Backend) -> None:
    """On every placement, in both memories, of every dtype; padding counts on it."""
    n = numel_of(backend)
    for spec in assorted_specs(backend, n):
        array = backend.zeros(spec)
        expect(backend, array, spec, np.zeros(n))
        give_up(backend, array)


def buffers_are_independent(backend: Backend) -> None:
    """Writing to one of two buffers of a spec leaves the other one alone."""
    spec = replicated(numel_of(backend))
    first, second = backend.zeros(spec), backend.zeros(spec)
    first = backend.write(first, spec, 0, values(spec.numel, "float32"))
    expect(backend, second, spec, np.zeros(spec.numel))
    expect(backend, first, spec, values(spec.numel, "float32"))
    give_up(backend, first, second)


def to_numpy_gives_copies(backend: Backend) -> None:
    """A copy neither follows the buffer nor changes it."""
    n = numel_of(backend)
    for spec in (replicated(n), sharded(n)):
        array = open_with(backend, spec, values(n, "float32"))
        copies = backend.to_numpy(array)
        array = backend.scale(array, spec, 2.0)
        expected = open_with(backend, spec, values(n, "float32"))
        for rank, piece in backend.to_numpy(expected).items():
            np.testing.assert_array_equal(copies[rank], piece, f"rank {rank}: copy changed")
            require(bool(copies[rank].flags.writeable), "a copy belongs to the caller: writable")
            copies[rank][...] = 77
        expect(backend, array, spec, 2 * values(n, "float32"))
        give_up(backend, array, expected)


def reused_shell_is_zeroed(backend: Backend) -> None:
    """``zeros`` clears what the last user of a shell left behind."""
    n = numel_of(backend)
    specs = [replicated(n, dtype) for dtype in dtypes_of(backend)]
    for spec in (*specs, replace(sharded(n), memory=Memory.HOST)):
        array = open_with(backend, spec, np.ones(n))
        array = backend.zeros(spec, backend.free(array))
        expect(backend, array, spec, np.zeros(n))
        give_up(backend, array)


def reused_shell_is_overwritten(backend: Backend) -> None:
    """A move into a shell that held other data gives the move's result, wherever it lands."""
    n = numel_of(backend)
    src, dst = sharded(n), replicated(n)
    stale = open_with(backend, dst, values(n, "float32", 3))
    shell = backend.free(stale)
    source = open_with(backend, src, values(n, "float32"))
    into = backend.empty(dst, shell)
    if not backend.profile.preallocates:
        give_up(backend, into)
        into = None
    out = move(backend, source, src, dst, into=into)
    expect(backend, out, dst, values(n, "float32"))
    give_up(backend, source, out)


def nothing_is_legal(backend: Backend) -> None:
    """A buffer with no element goes through every verb."""
    for dtype in dtypes_of(backend, floating=True)[:2]:
        whole, split, addends = (
            BufferSpec(0, dtype, p)
            for p in (Placement.REPLICATED, Placement.SHARDED, Placement.PARTIAL)
        )
        array = backend.zeros(whole)
        array = backend.write(array, whole, 0, np.zeros(0, np.float32))
        require(tuple(backend.read(array, whole, 0, 0).shape) == (0,), "read gave elements")
        shard = move(backend, array, whole, split)
        back = move(backend, shard, split, whole)
        back = backend.scale(back, whole, 2.0)
        expect(backend, back, whole, np.zeros(0))
        total = backend.total([backend.square_sum(shard, split, [])])
        require(total == 0.0, f"the norm of nothing is 0, not {total}")
        parts = backend.zeros(addends)
        summed = BufferSpec(0, "float32", Placement.REPLICATED)
        result = move(backend, parts, addends, summed)
        expect(backend, result, summed, np.zeros(0))
        give_up(backend, array, shard, back, parts, result)


def too_much_is_refused(backend: Backend) -> None:
    """More bytes than an address space holds: an error that the core can name, and no harm done."""
    n = numel_of(backend)
    spec = replicated(backend.roles.shards << 47)
    for make in (backend.empty, backend.zeros):
        try:
            make(spec)
        except Exception as error:
            named = isinstance(error, MemoryError | SpecError)
            require(named, f"a lack of memory is a MemoryError, not {error!r}")
        else:
            raise AssertionError(f"{spec.local_nbytes(backend.roles.shards)} bytes were opened")
    array = open_with(backend, replicated(n), np.ones(n))
    expect(backend, array, replicated(n), np.ones(n))
    give_up(backend, array)


CASES = (
    Case(zeros_are_zero),
    Case(buffers_are_independent),
    Case(to_numpy_gives_copies),
    Case(reused_shell_is_zeroed),
    Case(reused_shell_is_overwritten),
    Case(nothing_is_legal),
    Case(too_much_is_refused),
)
