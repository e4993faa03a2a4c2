"""What the tests run on every rank about values: functions that return plain values or raise."""

from __future__ import annotations

import inspect
import struct
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch_support import backend_on, bits, filled, here, moved, own_shard, value_of

from meshcore.backend import scratch_specs
from meshcore.dtypes import numpy_dtype
from meshcore.reference import NumpyBackend
from meshcore.spec import BufferSpec, Memory, MoveKind, Placement, move_kind, reduce_path
from meshcore_torch import groups

# --- values -----------------------------------------------------------------------------------


def local_moves_and_gathers(case, dtypes, profile, shard_numel):
    """Scatter, gather and transfer of every dtype, bit for bit."""
    with backend_on(case, profile) as backend:
        if not backend.local_ranks:
            return
        n = shard_numel * backend.roles.shards
        for dtype in dtypes:
            value = value_of(n, dtype)
            whole = BufferSpec(n, dtype, Placement.REPLICATED)
            split = BufferSpec(n, dtype, Placement.SHARDED)
            held = replace(split, memory=Memory.HOST)
            source = filled(backend, whole, value)
            shard = moved(backend, source, whole, split)
            np.testing.assert_array_equal(
                bits(here(backend, shard)), bits(own_shard(backend, value))
            )
            parked = moved(backend, shard, split, held)
            backend.free(shard)
            back = moved(backend, parked, held, split)
            gathered = moved(backend, back, split, whole)
            np.testing.assert_array_equal(bits(here(backend, gathered)), bits(value), dtype)
            np.testing.assert_array_equal(
                bits(here(backend, back)), bits(own_shard(backend, value))
            )
            if n:
                backend.scale(gathered, whole, 0.0)
                np.testing.assert_array_equal(bits(here(backend, source)), bits(value), "alias")


def casting_gathers(case, profile, shard_numel):
    """A gather casts on the source side exactly as the reference casts."""
    with backend_on(case, profile) as backend:
        if not backend.local_ranks:
            return
        n = shard_numel * backend.roles.shards
        value = value_of(n, "float32")
        split = BufferSpec(n, "float32", Placement.SHARDED)
        for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64"):
            whole = BufferSpec(n, dtype, Placement.REPLICATED)
            source = filled(backend, split, value)
            out = moved(backend, source, split, whole)
            expected = value.astype(numpy_dtype(dtype))
            np.testing.assert_array_equal(bits(here(backend, out)), bits(expected), dtype)


def sums_equal_mesh_order(case, profile, shard_numel, dtype):
    """All sums of random values: what the reference gets; bit for bit where the order is ours."""
    reference = NumpyBackend(case.roles())
    with backend_on(case, profile) as backend:
        if not backend.local_ranks:
            return
        rank, n = backend.local_ranks[0], shard_numel * backend.roles.shards
        addends = {r: value_of(n, dtype, seed=r + 1) for r in case.ids}
        src = BufferSpec(n, dtype, Placement.PARTIAL)
        split = Placement.SHARDED if backend.roles.replicas == 1 else Placement.SHARDED_PARTIAL
        paths = [[split], [Placement.REPLICATED]]
        if split is Placement.SHARDED_PARTIAL:
            paths[0].append(Placement.SHARDED)
        for path in paths:
            for scale, add in ((1.0, False), (0.3, False), (0.7, True)):
                got = filled(backend, src, addends[rank])
                source, untouched = got, here(backend, got)
                want = reference.write(reference.zeros(src), src, 0, addends)
                spec, exact = src, True
                for placement in path:
                    dst = BufferSpec(n, "float32", placement)
                    last = placement is path[-1]
                    factor, adds = (scale, add) if last else (1.0, False)
                    exact &= move_kind(spec, dst, backend.roles) is MoveKind.REDUCE_SCATTER
                    exact |= backend.mesh.size == 1
                    got_into, want_into = backend.zeros(dst), reference.zeros(dst)
                    if adds:
                        got_into = backend.scale(_ones(backend, dst), dst, 5.0)
                        want_into = tuple(piece + np.float32(5) for piece in want_into)
                    got = moved(backend, got, spec, dst, into=got_into, scale=factor, add=adds)
                    want = reference.redistribute(
                        want, spec, dst, into=want_into, scale=factor, add=adds
                    )
                    spec = dst
                expected = reference.to_numpy(want)[rank]
                if exact:
                    np.testing.assert_array_equal(here(backend, got), expected)
                else:
                    np.testing.assert_allclose(here(backend, got), expected, rtol=1e-5, atol=1e-5)
                np.testing.assert_array_equal(
                    bits(here(backend, source)), bits(untouched), "the source was changed"
                )


def _ones(backend, spec):
    array = backend.empty(spec)
    array.fill_(1.0)
    return array


def whole_sum_bits(case, numel):
    """The bits of an all-reduce of random values on this rank."""
    with backend_on(case) as backend:
        rank = backend.local_ranks[0]
        src = BufferSpec(numel, "float32", Placement.PARTIAL)
        dst = BufferSpec(numel, "float32", Placement.REPLICATED)
        source = filled(backend, src, value_of(numel, "float32", rank))
        return here(backend, moved(backend, source, src, dst, scale=0.1)).tobytes()


def overlapping_moves(case):
    """Several gathers and sums in flight at once, waited for in another order."""
    with backend_on(case) as backend:
        rank, n = backend.local_ranks[0], 96 * 1024 * backend.roles.shards
        split = BufferSpec(n, "float32", Placement.SHARDED)
        whole = BufferSpec(n, "float32", Placement.REPLICATED)
        partial = BufferSpec(n, "float32", Placement.PARTIAL)
        summed = replace(split, placement=reduce_path(backend.roles, Placement.SHARDED)[1])
        values = [value_of(n, "float32", seed) for seed in range(4)]
        sources = [filled(backend, split, value) for value in values]
        parts = [filled(backend, partial, value * (rank + 1)) for value in values]
        flying = []
        for source, part in zip(sources, parts, strict=True):
            out = backend.redistribute(source, split, whole, into=backend.empty(whole))
            scratch = [
                backend.empty(s)
                for s in scratch_specs(backend.profile, backend.roles, partial, summed)
            ]
            total = backend.redistribute(
                part, partial, summed, into=backend.empty(summed), scratch=scratch
            )
            flying.append((out, total))
        factor = sum(r + 1 for r in backend.roles.shard_group(rank))
        for value, (out, total) in reversed(list(zip(values, flying, strict=True))):
            backend.wait(total)
            np.testing.assert_allclose(
                here(backend, total), own_shard(backend, value) * factor, rtol=1e-5, atol=1e-5
            )
            # Reading fences by itself.
            np.testing.assert_array_equal(backend.read(out, whole, 0, n).numpy(), value)
            backend.wait(out)


def freed_in_flight(case):
    """Freeing a destination lets its move land first, so that the shell can be used at once."""
    with backend_on(case) as backend:
        n = 1 << 18
        split = BufferSpec(n, "float32", Placement.SHARDED)
        whole = BufferSpec(n, "float32", Placement.REPLICATED)
        source = filled(backend, split, np.ones(n, np.float32))
        shell = None
        for _ in range(5):
            out = backend.empty(whole, shell)
            out = backend.redistribute(source, split, whole, into=out)
            shell = backend.free(out)
            out = backend.zeros(whole, shell)
            dist.barrier()
            np.testing.assert_array_equal(here(backend, out), np.zeros(n, np.float32))
            shell = backend.free(out)
            dist.barrier()


def where_torch_sorts_ranks(case, profile):
    """A torch that cannot be told the order of ranks: mesh order counts all the same."""

    def without_order(function):
        full = inspect.signature(function)
        known = [p for name, p in full.parameters.items() if name != "sort_ranks"]
        return full.replace(parameters=known)

    with mock.patch.object(groups, "inspect", mock.Mock(signature=without_order)):
        with backend_on(case, profile) as backend:
            in_order = backend._groups.get("reduce").in_mesh_order
        local_moves_and_gathers(case, ("float32", "bfloat16"), profile, 5)
        sums_equal_mesh_order(case, profile, 5, "bfloat16")
        exchanged(case, [3, 300, 0, 1], True)
        return in_order


def all_in_inference_mode(case, profile):
    """Moves, sums and control work inside inference mode, on buffers that were made outside."""
    with torch.inference_mode():
        local_moves_and_gathers(case, ("float32", "bfloat16"), profile, 5)
        sums_equal_mesh_order(case, profile, 5, "bfloat16")
        norm_of(case, np.ones(20, np.float32), [(0, 20)], Placement.SHARDED, 5)


# --- norms and control ------------------------------------------------------------------------


def norm_of(case, values, valid, placement, shard_numel):
    """The total as bytes of a float64, from a buffer whose other elements are NaN."""
    with backend_on(case) as backend:
        if not backend.local_ranks:
            return None
        n = shard_numel * backend.roles.shards
        whole = np.full(n, np.nan, np.float32)
        for start, stop in valid:
            whole[start:stop] = values[start:stop]
        spec = BufferSpec(n, "float32", placement)
        array = filled(backend, spec, whole)
        share = backend.square_sum(array, spec, valid)
        assert isinstance(share, torch.Tensor), type(share)
        assert share.shape == (), share.shape
        return struct.pack("<d", backend.total([share, backend.square_sum(array, spec, [])]))


def exchanged(case, lengths, by_rank):
    with backend_on(case) as backend:
        if not backend.local_ranks:
            return None
        rank = backend.local_ranks[0]
        own = bytes([rank + 1]) * lengths[rank]
        got = backend.exchange({rank: own} if by_rank else own)
        assert list(got) == list(case.ids), "not in mesh order"
        return got
