"""Backends, moves and values for the functions that the tests run on every rank."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from meshcore.backend import BackendOptions, MoveForm, scratch_specs
from meshcore.dtypes import is_floating, numpy_dtype
from meshcore.registry import create_backend
from meshcore.spec import MoveKind, Placement
from meshcore.testing import grid, line
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
