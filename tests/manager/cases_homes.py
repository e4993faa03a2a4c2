"""Where values live: one shard, groups kept gathered, compute copies, chunks of nothing."""

from __future__ import annotations

import numpy as np
from manager_support import (
    all_used,
    equal,
    ints,
    make,
    on,
    raises,
    used,
)

import meshcore as mc
from meshcore.backend import Backend
from meshcore.testing import grid, line


def case_adding_keeps_the_master_exact(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (3,))], compute_dtype="bfloat16") as manager:
        manager.load({"w": np.full(3, 256.0, np.float32)})
        manager.access("w")
        manager.add({"w": np.full(3, 0.5, np.float32)})
        assert str(manager.read("w").dtype).endswith("bfloat16")
        equal(manager.read("w"), np.full(3, 256.0))
        equal(manager.to_numpy("w"), np.full(3, 256.5))
        manager.add({"w": np.full(3, 1.5, np.float32)})
        equal(manager.read("w"), np.full(3, 258.0))


def case_the_compute_copy_has_another_dtype(backend: Backend) -> None:
    specs = [mc.ParamSpec("w", (4,)), mc.ParamSpec("n", (4,), "int32")]
    with make(backend, specs, compute_dtype="bfloat16") as manager:
        shards = backend.roles.shards
        manager.load({"w": ints((4,)), "n": ints((4,), dtype="int32")})
        layout = manager.plan.find("w")[0]
        resident = used(manager, "param")
        manager.access("w", "n")
        whole = 2 * layout.numel + (4 * layout.numel if shards > 1 else 0)
        assert used(manager, "param") == resident + whole
        assert str(manager.read("w").dtype).endswith("bfloat16")
        assert str(manager.read("n").dtype).endswith("int32")
        equal(manager.read("w"), ints((4,)))
        manager.release("w", "n")
        assert used(manager, "param") == resident


@on(line(0), grid((0,), 1, 1), grid((1, 0), 2, 1))
def case_with_one_shard_home_is_whole(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (6,))]) as manager:
        manager.load({"w": ints((6,))})
        before = all_used(manager)
        assert before["device"]["param"] == 24
        with raises(mc.NotGatheredError, "'w'"):
            manager.read("w")
        manager.access("w")
        assert all_used(manager) == before
        assert peak_of_param(manager) == 24
        equal(manager.read("w"), ints((6,)))
        manager.release("w")
        assert all_used(manager) == before


def peak_of_param(manager: mc.ChunkManager) -> int:
    return manager.memory().peak["device"]["param"]


def case_kept_gathered_groups_are_no_special_case(backend: Backend) -> None:
    specs = [mc.ParamSpec("w", (6,)), mc.ParamSpec("n", (5,), group="norms")]
    with make(backend, specs, keep_gathered=["norms"]) as manager:
        manager.load({"w": ints((6,)), "n": ints((5,))})
        layout = manager.plan.find("n")[0]
        assert manager.chunk_of("n").placement is mc.Placement.REPLICATED
        before = used(manager, "param")
        with raises(mc.NotGatheredError, "'n'"):
            manager.read("n")
        manager.access("n")
        assert used(manager, "param") == before
        equal(manager.read("n"), ints((5,)))
        manager.write({"n": ints((5,), 4)})
        equal(manager.read("n"), ints((5,), 4))
        manager.accumulate_grad("n", np.full(5, 2.0, np.float32))
        manager.reduce_grads(divisor=1)
        equal(manager.grad("n"), np.full(5, 2.0 * backend.mesh.size))
        assert used(manager, "grad") == 4 * layout.numel
        assert abs(manager.grad_norm() - (20.0**0.5) * backend.mesh.size) < 1e-9
        manager.release("n")
        manager.audit()
        with raises(mc.SpecError, "keep_gathered", "'nope'", builtin=ValueError):
            mc.ChunkManager(backend, manager.plan, keep_gathered=["nope"])


def case_a_plan_of_nothing(backend: Backend) -> None:
    with make(backend, []) as manager:
        manager.load({})
        manager.access()
        manager.reduce_grads()
        assert manager.grad_norm() == 0.0
        assert "0 chunks" in repr(manager)
        manager.audit()


def case_a_chunk_of_empty_tensors(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("z", (0, 3))]) as manager:
        manager.load({"z": np.zeros((0, 3), np.float32)})
        with manager.gathered("z") as values:
            assert tuple(values["z"].shape) == (0, 3)
        manager.accumulate_grad("z", np.zeros((0, 3), np.float32))
        manager.reduce_grads(unused="error")
        assert tuple(manager.grad("z").shape) == (0, 3)
        assert manager.grad_norm() == 0.0
        manager.move("z", mc.Memory.HOST, kinds=("param", "grad"))
        equal(manager.to_numpy("z"), np.zeros((0, 3)))
        manager.audit()
