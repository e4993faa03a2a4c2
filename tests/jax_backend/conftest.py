"""Backends over emulated CPU devices, and the small tools that all tests here share."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

import meshcore as mc
from meshcore.testing import MeshCase, grid, line
from meshcore_jax.backend import JaxBackend
from meshcore_jax.launch import emulate_cpu

emulate_cpu(8)

MESHES = {
    "1x4": grid((0, 1, 2, 3), 1, 4),
    "2x2": grid((2, 0, 3, 1), 2, 2),
    "shard_first": grid((2, 0, 1, 3), 2, 2, shard_first=True),
    "4x1": grid((0, 2, 1, 3), 4, 1),
    "three_of_them": line(6, 0, 2),
    "one": line(1),
}


def pytest_collection_modifyitems(items):
    here = __file__.rpartition("/")[0]
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.jax)


@pytest.fixture
def make():
    """Make backends for mesh cases; all are closed at the end."""
    made = []

    def make_backend(case: MeshCase, **options):
        backend = JaxBackend(case.roles(), mc.BackendOptions(**options))
        made.append(backend)
        return backend

    yield make_backend
    for backend in made:
        backend.close()


@pytest.fixture(params=MESHES)
def backend(request, make):
    """A backend on each of the meshes in turn."""
    return make(MESHES[request.param])


@pytest.fixture
def square(make):
    """A backend with two replicas of two shards, ids out of order."""
    return make(MESHES["2x2"])


def addresses(array):
    """Where the blocks of an array lie."""
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def open_with(backend, spec, content):
    """A REPLICATED or PARTIAL buffer with a content, or a SHARDED one by way of a scatter."""
    if spec.placement is mc.Placement.SHARDED:
        whole = mc.BufferSpec(spec.numel, spec.dtype, mc.Placement.REPLICATED)
        array = open_with(backend, whole, content)
        out = backend.redistribute(array, whole, spec, into=None)
        backend.free(array)
        return out
    return backend.write(backend.zeros(spec), spec, 0, content)


def shard_of(backend, rank, whole):
    """What a rank owns of a whole array."""
    size = len(whole) // backend.roles.shards
    start = backend.roles.shard_index(rank) * size
    return np.asarray(whole)[start : start + size]


@pytest.fixture
def compilations():
    """One entry for everything that XLA compiles from now on."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
