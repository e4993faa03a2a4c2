"""Moves between memories, limits, foreign memory, and the books."""

from __future__ import annotations

import numpy as np
from manager_support import all_used, equal, ints, loaded, make, raises, sgd, used

import meshcore as mc
from meshcore.backend import Backend
from meshcore.testing import FaultyBackend

DEVICE, HOST = mc.Memory.DEVICE, mc.Memory.HOST


def case_all_kinds_move(backend: Backend) -> None:
    with loaded(backend) as manager:
        manager.add_state("exp_avg")
        manager.add_state("exp_avg_sq", dtype="bfloat16")
        manager.accumulate_grad("a", ints((5,), 2))
        manager.reduce_grads()
        shard = manager.plan.chunks[0].shard_numel
        want = {"param": 4 * shard, "grad": 4 * shard, "optimizer": 6 * shard}
        everything = tuple(want)
        for kinds in (("param",), ("grad",), ("optimizer",), everything):
            for memory, other in ((HOST, DEVICE), (HOST, DEVICE), (DEVICE, HOST)):
                manager.move("b", memory, kinds=kinds)
                for kind in kinds:
                    assert used(manager, kind, memory.value) == want[kind]
                    assert used(manager, kind, other.value) == 0
                assert used(manager, "staging") == 0
        equal(manager.to_numpy("a"), ints((5,), 1))
        equal(manager.grad("a"), ints((5,), 2))
        equal(manager.to_numpy("b", of="exp_avg_sq"), np.zeros((2, 2)))
        manager.audit()


def case_every_verb_works_from_host(backend: Backend) -> None:
    with loaded(backend) as manager:
        manager.add_state("momentum", memory=HOST)
        assert used(manager, "optimizer") == 0
        manager.move("a", HOST)
        assert manager.chunk_of("a").memory is HOST
        manager.access_async("a").wait()
        equal(manager.read("a"), ints((5,), 1))
        manager.write({"a": ints((5,), 3)})
        manager.add({"b": ints((2, 2), 1)})
        equal(manager.read("a"), ints((5,), 3))
        equal(manager.read("b"), 2 * ints((2, 2)) + 11)
        manager.release("a")
        assert used(manager, "param") == 0
        with manager.gathered("b") as values:
            equal(values["b"], 2 * ints((2, 2)) + 11)
        equal(manager.to_numpy("a"), ints((5,), 3))
        manager.load({"a": ints((5,), 6), "b": ints((2, 2), 7)})
        assert manager.chunk_of("a").memory is HOST
        manager.load({"a": ints((5,), 8), "b": ints((2, 2), 9)}, state="momentum")
        assert used(manager, "optimizer") == 0
        equal(manager.to_numpy("b", of="momentum"), ints((2, 2), 9))
        equal(manager.to_numpy("b"), ints((2, 2), 7))
        manager.audit()


def case_gradients_on_host_are_reduced_into(backend: Backend) -> None:
    with loaded(backend) as manager:
        for step in (1, 2):
            manager.accumulate_grad("a", ints((5,), step))
            manager.reduce_grads()
            manager.move("a", HOST, kinds=("grad",))
            assert used(manager, "grad") == 0
        manager.accumulate_grad("a", ints((5,), 3))
        manager.reduce_grads()
        assert used(manager, "grad") == 0, "a reduced gradient stays where it was moved to"
        manager.scale_grads(2.0)
        want = 2.0 * (3 * ints((5,)) + 6)
        equal(manager.grad("a"), want)
        equal(manager.to_numpy("a", of="grad"), want)
        np.testing.assert_allclose(manager.grad_norm(), np.linalg.norm(want.astype(np.float64)))
        assert used(manager, "grad") == 0
        manager.audit()


def case_moving_while_gathered(backend: Backend) -> None:
    with loaded(backend) as manager:
        manager.access("a")
        manager.move("a", HOST)
        equal(manager.read("a"), ints((5,), 1))
        manager.write({"a": ints((5,), 4)})
        equal(manager.read("a"), ints((5,), 4))
        manager.move("a", DEVICE)
        equal(manager.read("a"), ints((5,), 4))
        manager.release("a")
        equal(manager.to_numpy("a"), ints((5,), 4))
        assert used(manager, "param") == 4 * manager.plan.chunks[0].shard_numel
        manager.audit()


def case_kept_gathered_chunks_move_too(backend: Backend) -> None:
    for compute_dtype in (None, "bfloat16"):
        options = {"keep_gathered": ["param"], "compute_dtype": compute_dtype}
        with loaded(backend, **options) as manager:
            whole = used(manager, "param")
            for gathered in (False, True):
                if gathered:
                    manager.access("a")
                manager.move("a", HOST)
                assert used(manager, "param", "host") == whole
                with manager.gathered("a") as values:
                    equal(values["a"], ints((5,), 1))
                manager.add({"a": np.zeros(5, np.float32)})
                manager.move("a", DEVICE)
                assert used(manager, "param", "host") == 0
                if gathered:
                    equal(manager.read("a"), ints((5,), 1))
                    manager.release("a")
                equal(manager.to_numpy("a"), ints((5,), 1))
                assert used(manager, "param") == whole
                manager.audit()


def case_a_valid_host_copy_is_not_copied_again(backend: Backend) -> None:
    with loaded(FaultyBackend(backend, verbs=("redistribute",))) as manager:
        counter = manager.backend
        shard = 4 * manager.plan.chunks[0].shard_numel
        manager.move("a", HOST)
        manager.move("a", DEVICE, keep_host_copy=True)
        assert (used(manager, "param"), used(manager, "param", "host")) == (shard, shard)
        before = counter.calls
        manager.move("a", HOST)
        assert counter.calls == before
        assert (used(manager, "param"), used(manager, "param", "host")) == (0, shard)
        equal(manager.to_numpy("a"), ints((5,), 1))
        manager.audit()


def case_a_stale_host_copy_is_not_used(backend: Backend) -> None:
    def by_write(manager: mc.ChunkManager) -> None:
        manager.write({"a": ints((5,), 4)})

    def by_update(manager: mc.ChunkManager) -> None:
        manager.accumulate_grad("a", np.full(5, -3, np.float32))
        manager.reduce_grads()
        manager.update(sgd(1.0))

    for change in (by_write, by_update):
        for keep in ((), ("param",)):
            with loaded(backend, keep_gathered=keep) as manager:
                manager.move("a", HOST)
                manager.move("a", DEVICE, keep_host_copy=True)
                change(manager)
                manager.move("a", HOST)
                equal(manager.to_numpy("a"), ints((5,), 4))
                equal(manager.to_numpy("b"), ints((2, 2), 10))
                assert used(manager, "param") == 0
                manager.audit()


def case_arguments_of_a_move(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("a", (5,))]) as manager:
        with raises(mc.NotGatheredError, "param.0", "load"):
            manager.move("a", HOST)
        manager.load_zeros()
        before = all_used(manager)
        for kinds in (("params",), "param", ("param", "activations")):
            with raises(mc.SpecError, "'param', 'grad', 'optimizer'", builtin=ValueError):
                manager.move("a", HOST, kinds=kinds)
        manager.move("a", HOST, kinds=("grad", "optimizer"))
        assert all_used(manager) == before
