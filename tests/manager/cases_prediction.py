"""What a dry run foresees: a run with everything that takes memory, on a backend and on null."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from manager_support import ints, make

import meshcore as mc
from meshcore.backend import Backend, BackendOptions

DEVICE, HOST = mc.Memory.DEVICE, mc.Memory.HOST

SPECS = (
    mc.ParamSpec("embedding", (11, 3), ties=("head",)),
    mc.ParamSpec("weight", (5, 5)),
    mc.ParamSpec("bias", (5,)),
    mc.ParamSpec("low", (9,), "bfloat16"),
    mc.ParamSpec("norm", (4,), group="norms"),
    mc.ParamSpec("frozen", (7,), trainable=False),
    mc.ParamSpec("nothing", (0, 2)),
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


def null_like(backend: Backend) -> Backend:
    """A null backend for the same mesh that foresees the bytes of another backend."""
    roles = backend.roles
    return mc.create_backend(
        "null",
        roles.mesh,
        shard_axis=roles.shard_axis,
        replica_axis=roles.replica_axis,
        options=BackendOptions(profile=backend.profile),
    )


def compare(backend: Backend, options: dict[str, Any]) -> None:
    """Every step's books, to the byte, and the measured bytes at the end."""
    options = {"capacity": 40, "alignment": 8, **options}
    real = make(backend, SPECS, check=True, **options)
    dry = make(null_like(backend), SPECS, **options)
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


def case_null_foresees_plain_chunks(backend: Backend) -> None:
    compare(backend, OPTIONS[0])


def case_null_foresees_mixed_precision(backend: Backend) -> None:
    compare(backend, OPTIONS[1])
