"""What the tests run on every rank: module-level functions that return plain values or raise."""

from __future__ import annotations

import inspect
import struct
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from meshcore import errors
from meshcore.backend import BackendOptions, MoveForm, scratch_specs
from meshcore.dtypes import is_floating, numpy_dtype
from meshcore.reference import NumpyBackend
from meshcore.registry import create_backend
from meshcore.spec import BufferSpec, Memory, MoveKind, Placement, move_kind, reduce_path
from meshcore.testing import grid, line
from meshcore_torch import groups
from meshcore_torch.profile import ALL_TO_ALL, GLOO_PROFILE, PEERS

MESHES = {
    "one": line(0),
    "two": line(1, 0),
    "three": line(2, 0, 1),
    "four": line(0, 1, 2, 3),
    "four permuted": line(2, 0, 3, 1),
    "replica x shard": grid((3, 0, 2, 1), 2, 2),
    "shard x replica": grid((2, 0, 1, 3), 2, 2, shard_first=True),
    "replicas": grid((1, 2, 0), 3, 1),
}


def summing_by(form: MoveForm):
    """The gloo profile with one form of sums over shards for all sizes."""
    forms = {**GLOO_PROFILE.forms, MoveKind.REDUCE_SCATTER: (form,)}
    return replace(GLOO_PROFILE, forms=forms)


PROFILES = {
    "default": None,
    "collectives": summing_by(ALL_TO_ALL),
    "messages": summing_by(PEERS),
}


@contextmanager
def backend_on(case, profile=None, timeout_seconds=30.0, extra=None):
    options = BackendOptions(timeout_seconds, profile, "cpu", extra or {})
    backend = create_backend(
        "torch",
        case.mesh(),
        shard_axis=case.shard_axis,
        replica_axis=case.replica_axis,
        options=options,
    )
    try:
        yield backend
    finally:
        backend.close()


def moved(backend, array, src, dst, *, into=None, scale=1.0, add=False):
    """One move, waited for, with its scratch opened and dropped as the pool does."""
    specs = scratch_specs(backend.profile, backend.roles, src, dst, add=add)
    scratch = [backend.empty(spec) for spec in specs]
    into = backend.empty(dst) if into is None else into
    out = backend.redistribute(array, src, dst, into=into, scratch=scratch, scale=scale, add=add)
    backend.wait(out)
    for piece in scratch:
        backend.free(piece)
    return out


def filled(backend, spec, value):
    """A buffer that holds this rank's part of a whole value, or its addend."""
    if spec.placement is Placement.PARTIAL or spec.placement is Placement.REPLICATED:
        return backend.write(backend.zeros(spec), spec, 0, value)
    whole = replace(spec, placement=Placement.REPLICATED)
    array = backend.write(backend.empty(whole), whole, 0, value)
    split = replace(whole, placement=Placement.SHARDED)
    return moved(backend, array, whole, split)


def here(backend, array):
    (out,) = backend.to_numpy(array).values()
    return out


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def value_of(numel, dtype, seed=0):
    """Values of every size that survive a round trip through the dtype."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, numel).astype(bool)
    if is_floating(dtype):
        return random.standard_normal(numel).astype(numpy_dtype(dtype))
    info = np.iinfo(dtype)
    return random.integers(info.min, info.max, numel, dtype=dtype, endpoint=True)


def own_shard(backend, value):
    index = backend.roles.shard_index(backend.local_ranks[0])
    return np.split(value, backend.roles.shards)[index]


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
    """Versions of torch that cannot be told the order of ranks: the mesh order counts all the same."""

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


# --- groups -----------------------------------------------------------------------------------


def group_counts(case):
    with backend_on(case) as backend:
        before = backend.group_count
        backend.close()
        backend.close()
        return before, backend.group_count


def make_and_destroy(times):
    """Case B11: registered groups stay the same, and the caller's own group stays alive."""
    case = grid((0, 1, 2), 1, 3)
    counts, files = [], []
    for _ in range(times):
        with backend_on(case) as backend:
            if backend.local_ranks:
                src = BufferSpec(3, "float32", Placement.PARTIAL)
                dst = BufferSpec(3, "float32", Placement.REPLICATED)
                out = moved(backend, filled(backend, src, np.ones(3, np.float32)), src, dst)
                np.testing.assert_array_equal(here(backend, out), [3, 3, 3])
        counts.append(len(dist.distributed_c10d._world.pg_map))
        files.append(_open_files())
    ones = torch.ones(())
    dist.all_reduce(ones)
    return counts, files, float(ones)


def _open_files():
    from pathlib import Path

    return len(list(Path("/proc/self/fd").iterdir()))


def every_verb_outside(case):
    """Names of verbs that let a rank outside the mesh in, and how long they took to refuse."""
    with backend_on(case) as backend:
        if backend.local_ranks:
            src = BufferSpec(2, "float32", Placement.PARTIAL)
            dst = BufferSpec(2, "float32", Placement.REPLICATED)
            out = moved(backend, filled(backend, src, np.ones(2, np.float32)), src, dst)
            return here(backend, out).tolist()
        spec = BufferSpec(2, "float32", Placement.REPLICATED)
        split = replace(spec, placement=Placement.SHARDED)
        array = torch.zeros(2)
        verbs = {
            "empty": lambda: backend.empty(spec),
            "zeros": lambda: backend.zeros(spec),
            "redistribute": lambda: backend.redistribute(array, split, spec, into=array),
            "write": lambda: backend.write(array, spec, 0, array),
            "read": lambda: backend.read(array, spec, 0, 1),
            "scale": lambda: backend.scale(array, spec, 2.0),
            "square_sum": lambda: backend.square_sum(array, spec, [(0, 1)]),
            "total": lambda: backend.total([]),
            "wait": lambda: backend.wait(array),
            "free": lambda: backend.free(array),
            "drop": lambda: backend.drop(array),
            "nbytes": lambda: backend.nbytes(array),
            "to_numpy": lambda: backend.to_numpy(array),
            "exchange": lambda: backend.exchange(b""),
        }
        began, wrong = time.monotonic(), []
        for name, verb in verbs.items():
            try:
                verb()
            except errors.NotInMeshError:
                continue
            wrong.append(name)
        return (
            backend.group_count,
            case.mesh().coordinate(dist.get_rank()),
            wrong,
            (time.monotonic() - began < 1.0),
        )


def closed_after_default_group():
    """A backend outlives the default group by accident: closing it is still no error."""
    case = line(*range(dist.get_world_size()))
    with backend_on(case) as backend:
        dist.destroy_process_group()
        backend.close()
        return backend.group_count


def measured(case):
    with backend_on(case, extra={"profile": "measure"}) as backend:
        if not backend.local_ranks:
            return None
        n = 1024 * backend.roles.shards
        src = BufferSpec(n, "float32", Placement.SHARDED)
        dst = BufferSpec(n, "float32", Placement.REPLICATED)
        value = value_of(n, "float32")
        out = moved(backend, filled(backend, src, value), src, dst)
        np.testing.assert_array_equal(here(backend, out), value)
        return backend.profile.to_json()


# --- failures ---------------------------------------------------------------------------------


def raised_by_create(case, profile=None):
    try:
        with backend_on(case, profile):
            return None
    except errors.MeshcoreError as error:
        return type(error).__name__, str(error)


def peer_that_dies(victim):
    """What the survivors get from a gather and from an exchange when a peer is killed."""
    import os
    import signal

    case = line(*range(dist.get_world_size()))
    with backend_on(case, timeout_seconds=10.0) as backend:
        backend.exchange(b"all here")
        if backend.local_ranks == (victim,):
            os.kill(os.getpid(), signal.SIGKILL)
        return _two_failures(backend)


def peer_that_is_late(late, timeout_seconds, sleep_seconds):
    """What the others get when a peer does not come in time."""
    case = line(*range(dist.get_world_size()))
    with backend_on(case, timeout_seconds=timeout_seconds) as backend:
        backend.exchange(b"all here")
        if backend.local_ranks == (late,):
            time.sleep(sleep_seconds)
            return None
        return _two_failures(backend)


def _two_failures(backend):
    n = 4096 * backend.roles.shards
    src = BufferSpec(n, "float32", Placement.SHARDED)
    dst = BufferSpec(n, "float32", Placement.REPLICATED)
    source, into = backend.zeros(src), backend.empty(dst)
    out = []
    for verb in (lambda: _gather(backend, source, src, dst, into), lambda: backend.exchange(b"x")):
        began = time.monotonic()
        try:
            verb()
        except errors.PeerError as error:
            out.append((str(error), time.monotonic() - began, error.__cause__ is not None))
        else:
            out.append(None)
    return out, backend.free(into) is None


def _gather(backend, source, src, dst, into):
    backend.wait(backend.redistribute(source, src, dst, into=into))


# --- memory -----------------------------------------------------------------------------------


def largest_allocations(case, profile, shard_numel):
    """Largest allocation of one operator, in bytes, in each move; destinations are made before."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    out = {}
    with backend_on(case, profile) as backend:
        n = shard_numel * backend.roles.shards
        for src, dst, add in _large_moves(n):
            scratch = [
                backend.zeros(spec)
                for spec in scratch_specs(backend.profile, backend.roles, src, dst, add=add)
            ]
            source, into = backend.zeros(src), backend.zeros(dst)
            with profiler(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                backend.redistribute(
                    source, src, dst, into=into, scratch=scratch, scale=0.5 if add else 1.0, add=add
                )
                backend.wait(into)
                if dst.placement is Placement.SHARDED:
                    backend.square_sum(into, dst, [(0, n)])
                    backend.scale(into, dst, 2.0)
            largest = max(event.cpu_memory_usage for event in seen.events())
            out[f"{src} -> {dst} {'add' if add else ''}"] = largest
    with profiler(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        torch.zeros(shard_numel).add_(torch.ones(shard_numel, dtype=torch.bfloat16), alpha=0.5)
    control = max(event.cpu_memory_usage for event in seen.events())
    return out, control


def _large_moves(n):
    split = BufferSpec(n, "float32", Placement.SHARDED)
    whole = BufferSpec(n, "float32", Placement.REPLICATED)
    low = BufferSpec(n, "bfloat16", Placement.PARTIAL)
    return (
        (split, replace(whole, dtype="bfloat16"), False),
        (low, split, False),
        (low, split, True),
        (replace(low, dtype="float32"), split, True),
        (low, whole, True),
        (replace(split, placement=Placement.SHARDED), replace(split, dtype="bfloat16"), False),
    )
