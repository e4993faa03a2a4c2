"""Optimizer states, and updates that consume arrays and give back their successors."""

from __future__ import annotations

from typing import Any

import numpy as np
from manager_support import all_used, by_rank, elementwise, equal, ints, make, raises, sgd, used

import meshcore as mc
from meshcore.backend import Backend


def two_groups(backend: Backend, **options: Any) -> mc.ChunkManager:
    specs = [
        mc.ParamSpec("a", (5,)),
        mc.ParamSpec("b", (2, 2)),
        mc.ParamSpec("c", (3,), group="other"),
        mc.ParamSpec("frozen", (4,), trainable=False),
    ]
    manager = make(backend, specs, **options)
    manager.load({spec.name: ints(spec.shape, 1) for spec in specs})
    return manager


def case_states_are_sharded_like_home(backend: Backend) -> None:
    with two_groups(backend) as manager:
        trainable = [layout for layout in manager.plan.chunks if layout.takes_grad]
        manager.add_state("exp_avg")
        numel = sum(layout.shard_numel for layout in trainable)
        assert used(manager, "optimizer") == 4 * numel
        manager.add_state("low", dtype="bfloat16", memory=mc.Memory.HOST)
        assert used(manager, "optimizer", "host") == 2 * numel
        assert used(manager, "optimizer") == 4 * numel
        before = all_used(manager)
        for taken in ("exp_avg", "param", "grad"):
            with raises(mc.DuplicateNameError, f"'{taken}'", "taken", builtin=ValueError):
                manager.add_state(taken)
        with raises(mc.UnsupportedDtypeError, backend.name, "float33"):
            manager.add_state("other", dtype="float33")
        assert all_used(manager) == before
        equal(manager.to_numpy("a", of="exp_avg"), np.zeros(5))
        manager.load({"b": ints((2, 2), 3)}, state="exp_avg")
        equal(manager.to_numpy("b", of="exp_avg"), ints((2, 2), 3))
        equal(manager.to_numpy("a", of="exp_avg"), np.zeros(5))
        equal(manager.to_numpy("b"), ints((2, 2), 1))
        for name, state in (("a", "nope"), ("frozen", "exp_avg")):
            with raises(mc.NotGatheredError, state):
                manager.load({name: ints(manager.plan.find(name)[1].shape)}, state=state)
            with raises(mc.NotGatheredError, state):
                manager.to_numpy(name, of=state)
        manager.audit()


def case_a_step_of_momentum(backend: Backend) -> None:
    def step(chunk: mc.ChunkUpdate, arrays: dict[str, Any]) -> dict[str, Any]:
        assert set(arrays) == {"param", "grad", "momentum"}
        momentum = elementwise(lambda m, g: 0.5 * m + g, arrays["momentum"], arrays["grad"])
        param = elementwise(lambda p, m: p - 2 * m, arrays["param"], momentum)
        return {"param": param, "momentum": momentum}

    with two_groups(backend) as manager:
        manager.add_state("momentum")
        momentum, param = np.zeros(5), ints((5,), 1).astype(np.float64)
        for turn in range(3):
            gradient = ints((5,), turn)
            manager.accumulate_grad("a", gradient)
            manager.reduce_grads()
            manager.update(step)
            manager.zero_grads()
            momentum = 0.5 * momentum + gradient
            param = param - 2 * momentum
        equal(manager.to_numpy("a"), param)
        equal(manager.to_numpy("a", of="momentum"), momentum)
        equal(manager.to_numpy("b"), ints((2, 2), 1))  # its gradient is zero
        equal(manager.to_numpy("c"), ints((3,), 1))
        equal(manager.to_numpy("frozen"), ints((4,), 1))
        manager.audit()


def case_what_is_gathered_follows_an_update(backend: Backend) -> None:
    for options in ({}, {"compute_dtype": "bfloat16"}, {"keep_gathered": ["param"]}):
        with two_groups(backend, **options) as manager:
            manager.access("a")
            with manager.gathered("b"):
                manager.accumulate_grad("a", np.ones(5, np.float32))
                manager.reduce_grads()
                manager.update(sgd(4.0))
                equal(manager.read("a"), ints((5,), 1) - 4)
                equal(manager.read("b"), ints((2, 2), 1))
            manager.release("a")
            equal(manager.to_numpy("a"), ints((5,), 1) - 4)
            manager.audit()


def case_updates_say_what_is_used_and_where(backend: Backend) -> None:
    seen: list[mc.ChunkUpdate] = []

    def look(chunk: mc.ChunkUpdate, arrays: dict[str, Any]) -> dict[str, Any]:
        seen.append(chunk)
        return {}

    with two_groups(backend) as manager:
        manager.update(look)
        assert seen == []
        manager.accumulate_grad("b", np.ones((2, 2), np.float32))
        manager.reduce_grads()
        manager.update(look)
        manager.update(look, names=["c"])
        with raises(mc.FrozenTensorError, "'frozen'"):
            manager.update(look, names=["frozen"])
        assert len(seen) == 1
        update = seen[0]
        assert update.layout is manager.plan.find("b")[0]
        assert [slot.name for slot in update.used] == ["b"]
        covered = set()
        for rank in backend.mesh.ids:
            offset = 0
            if update.placement is mc.Placement.SHARDED:
                offset = backend.roles.shard_index(rank) * update.layout.shard_numel
            for start, stop in update.ranges(rank):
                covered |= set(range(offset + start, offset + stop))
        slot = manager.plan.find("b")[1]
        assert covered == set(range(slot.start, slot.stop))


def case_an_update_that_fails_is_named(backend: Backend) -> None:
    def fail(chunk: mc.ChunkUpdate, arrays: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("by the optimizer")

    with two_groups(backend) as manager:
        manager.add_state("momentum")
        manager.accumulate_grad("a", np.ones(5, np.float32))
        manager.reduce_grads()
        with raises(ZeroDivisionError, "by the optimizer", builtin=ZeroDivisionError):
            manager.update(fail)
        manager.audit()
        words = ("param.0", "ZeroDivisionError", "by the optimizer")
        with raises(mc.BrokenBufferError, *words, "load", builtin=RuntimeError):
            manager.to_numpy("a")
        with raises(mc.BrokenBufferError, *words):
            manager.load({"a": ints((5,), 9)})  # b would be lost
        with raises(mc.BrokenBufferError, *words, "zero_grads"):
            manager.grad("a")
        with raises(mc.BrokenBufferError, *words, "zero_grads"):
            manager.accumulate_grad("a", np.ones(5, np.float32))
            manager.reduce_grads()
        with raises(mc.BrokenBufferError, "momentum", *words):
            manager.to_numpy("b", of="momentum")
        equal(manager.to_numpy("c"), ints((3,), 1))
        values = {"a": ints((5,), 9), "b": ints((2, 2), 8)}
        manager.load(values)
        manager.load(values, state="momentum")
        manager.zero_grads()
        manager.accumulate_grad("a", np.ones(5, np.float32))
        manager.reduce_grads()
        manager.update(sgd(1.0))
        equal(manager.to_numpy("a"), ints((5,), 8))
        equal(manager.to_numpy("b", of="momentum"), ints((2, 2), 8))
        manager.audit()


def case_a_lost_state_comes_back_as_it_was(backend: Backend) -> None:
    def fail(chunk: mc.ChunkUpdate, arrays: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("by the optimizer")

    with make(backend, [mc.ParamSpec("w", (4,), "bfloat16")]) as manager:
        manager.load_zeros()
        manager.add_state("master", dtype="float32", memory=mc.Memory.HOST)
        before = all_used(manager)
        manager.accumulate_grad("w", np.ones(4, np.float32))
        manager.reduce_grads()
        with raises(ZeroDivisionError, "by the optimizer", builtin=ZeroDivisionError):
            manager.update(fail)
        manager.zero_grads()
        manager.load({"w": np.full(4, 0.5)}, cast=True)
        manager.load({"w": np.full(4, 0.5, np.float32)}, state="master")
        assert all_used(manager) == before
        assert manager.to_numpy("w", of="master").dtype == np.float32


def case_wrong_successors_are_refused(backend: Backend) -> None:
    with two_groups(backend) as manager:
        manager.accumulate_grad("c", np.ones(3, np.float32))
        manager.reduce_grads()
        with raises(mc.SpecError, "'weights'", "'param'", "'grad'", builtin=ValueError):
            manager.update(lambda chunk, arrays: {"weights": arrays["param"]})
        manager.audit()
        manager.load({"c": ints((3,), 5)})
        manager.zero_grads()
        equal(manager.to_numpy("c"), ints((3,), 5))


def case_unused_tensors_are_left_alone(backend: Backend) -> None:
    def decay(chunk: mc.ChunkUpdate, arrays: dict[str, Any]) -> dict[str, Any]:
        halved = elementwise(lambda p: p * 0.5, arrays["param"])
        return {"param": halved} if len(chunk.used) == len(chunk.layout.slots) else {}

    with two_groups(backend) as manager:
        manager.accumulate_grad("a", by_rank(backend, lambda p: np.ones(5, np.float32)))
        manager.accumulate_grad("c", np.ones(3, np.float32))
        manager.mark_unused("b")
        manager.reduce_grads(unused="error")
        manager.update(decay, names=["c"])
        equal(manager.to_numpy("c"), ints((3,), 1) / 2)
        equal(manager.to_numpy("b"), ints((2, 2), 1))
