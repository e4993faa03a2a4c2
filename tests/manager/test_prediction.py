"""Given a profile, the null backend knows the bytes of a run beforehand: to the byte, always."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases_prediction import OPTIONS, SPECS, compare, walk
from manager_profiles import JAX_LIKE, STAGED, TORCH_LIKE
from manager_support import MESHES, make

import meshcore as mc
from meshcore.backend import Backend, BackendOptions, TransferProfile
from meshcore.reference import NUMPY_PROFILE
from meshcore.testing import MeshCase

PROFILES = (NUMPY_PROFILE, TORCH_LIKE, JAX_LIKE, STAGED)


def on(name: str, mesh_case: MeshCase, profile: TransferProfile | None = None) -> Backend:
    return mc.create_backend(
        name,
        mesh_case.mesh(),
        shard_axis=mesh_case.shard_axis,
        replica_axis=mesh_case.replica_axis,
        options=BackendOptions(profile=profile),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "mixed"])
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
@pytest.mark.parametrize("mesh_case", MESHES, ids=str)
def test_null_predicts_numpy(
    mesh_case: MeshCase, profile: TransferProfile, options: dict[str, Any]
):
    compare(on("numpy", mesh_case, profile), options)


def test_profiles_differ_where_they_should():
    peaks = set()
    for profile in PROFILES:
        manager = make(on("null", MESHES[3], profile), SPECS, capacity=40)
        for _ in walk(manager):
            pass
        report = manager.memory()
        peaks.add((report.peak["device"]["total"], sum(report.reserved["device"].values())))
    assert len(peaks) == 3  # numpy's and jax's moves both need no scratch and leave no shells


def test_a_dry_run_of_ten_thousand_ranks():
    mesh = mc.DeviceMesh(range(10_240), (80, 128), ("replica", "shard"))
    backend = mc.create_backend("null", mesh, shard_axis="shard", replica_axis="replica")
    with make(backend, [mc.ParamSpec("w", (1024, 1024))]) as manager:
        manager.load_zeros()
        manager.access("w")
        manager.accumulate_grad("w", np.broadcast_to(np.float32(0), (1024, 1024)))
        manager.reduce_grads()
        used, peak = manager.memory().used["device"], manager.memory().peak["device"]
        assert used["param"] == (4 << 20) + (4 << 20) // 128
        assert used["grad"] == (4 << 20) // 128
        # The addend, what is scattered over the shards, and what is summed over the replicas.
        assert peak["grad"] == (4 << 20) + 2 * (4 << 20) // 128
        with pytest.raises(mc.ValueUnavailableError, match="no data"):
            manager.read("w")
        with pytest.raises(mc.ValueUnavailableError, match="no data"):
            manager.grad("w")
        with pytest.raises(mc.ValueUnavailableError, match="no data"):
            manager.to_numpy("w")
        assert manager.grad_norm() == 0.0
        manager.audit()
