"""The null backend, given a profile, knows the bytes of a run beforehand: to the byte, at every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from manager_profiles import JAX_LIKE, STAGED, TORCH_LIKE
from manager_support import MESHES, ints, make

import meshcore as mc
from meshcore.backend import Backend, BackendOptions, TransferProfile
from meshcore.reference import NUMPY_PROFILE
from meshcore.testing import MeshCase

DEVICE, HOST = mc.Memory.DEVICE, mc.Memory.HOST
PROFILES = (NUMPY_PROFILE, TORCH_LIKE, JAX_LIKE, STAGED)

SPECS = (
    mc.ParamSpec("embedding", (11, 3), ties=("head",)),
    mc.ParamSpec("weight", (5, 5)),
    mc.ParamSpec("bias", (5,)),
    mc.ParamSpec("low", (9,), "bfloat16"),
    mc.ParamSpec("norm", (4,), group="norms"),
    mc.ParamSpec("frozen", (7,), trainable=False),
    mc.ParamSpec("nothing", (0, 2)),
)


def on(name: str, mesh_case: MeshCase, profile: TransferProfile | None = None) -> Backend:
    return mc.create_backend(
        name,
        mesh_case.mesh(),
        shard_axis=mesh_case.shard_axis,
        replica_axis=mesh_case.replica_axis,
        options=BackendOptions(profile=profile),
    )


def walk(manager: mc.ChunkManager) -> Iterator[str]:
    """A run with everything that takes memory; yields after each step."""
    names = manager.plan.names
    rng = np.random.default_rng(5)
    manager.load({spec.name: ints(spec.shape, dtype=spec.dtype) for spec in SPECS})
    yield "load"
    manager.add_state("exp_avg")
    manager.add_state("exp_avg_sq", "bfloat16", HOST)
    yield "states"
    for step in range(3):
        for name in names:
            manager.access_async(name)
            yield f"access {name}"
            if rng.random() < 0.6:
                manager.release(name)
        for micro in range(2):
            for spec in SPECS:
                if spec.takes_grad and (step + micro + spec.numel) % 3:
                    manager.accumulate_grad(spec.name, ints(spec.shape, dtype="float32"))
                    yield f"accumulate {spec.name}"
            manager.reduce_grads()
            yield "reduce"
        manager.grad_norm()
        manager.scale_grads(0.5)
        manager.update(lambda chunk, arrays: dict(arrays))
        yield "update"
        moved = names[step]
        manager.move(moved, HOST, ("param", "grad", "optimizer"))
        yield f"move {moved}"
        with manager.gathered(moved, "weight"):
            yield "gathered"
        manager.write({"bias": ints((5,), step)})
        manager.add({"weight": ints((5, 5), step)})
        yield "write"
        manager.move(moved, DEVICE, ("param", "optimizer"), keep_host_copy=step == 1)
        yield "move back"
        manager.release(*names)
        yield "release"
        if step != 1:
            manager.zero_grads()
            yield "zero"


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"compute_dtype": "bfloat16", "grad_dtype": "bfloat16", "keep_gathered": ["norms"]},
)


def books(manager: mc.ChunkManager) -> dict[str, Any]:
    report = manager.memory()
    return {"used": report.used, "reserved": report.reserved, "peak": report.peak}


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "mixed"])
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
@pytest.mark.parametrize("mesh_case", MESHES, ids=str)
def test_null_predicts_numpy(
    mesh_case: MeshCase, profile: TransferProfile, options: dict[str, Any]
):
    make_options = {"capacity": 40, "alignment": 8, **options}
    real = make(on("numpy", mesh_case, profile), SPECS, check=True, **make_options)
    dry = make(on("null", mesh_case, profile), SPECS, **make_options)
    steps = 0
    for did, foresaw in zip(walk(real), walk(dry), strict=True):
        assert did == foresaw
        assert books(real) == books(dry), did
        steps += 1
    assert steps > 50
    audit = real.audit()
    assert audit.measured_peak == dry.memory().peak
    assert audit.measured == dry.memory().used
    real.close()
    dry.close()
    assert books(real) == books(dry)


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
