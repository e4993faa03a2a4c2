"""What the tests run on every rank about groups, failures and memory."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch_support import backend_on, filled, here, moved, value_of

from meshcore import errors
from meshcore.backend import scratch_specs
from meshcore.spec import BufferSpec, Placement
from meshcore.testing import grid, line

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
