"""Moves between memories, limits, foreign memory, and the books."""

from __future__ import annotations

import numpy as np
from manager_support import all_used, equal, ints, make, on, raises, sgd, used

import meshcore as mc
from meshcore.backend import Backend
from meshcore.testing import FaultyBackend, line

DEVICE, HOST = mc.Memory.DEVICE, mc.Memory.HOST


def loaded(backend: Backend, **options: object) -> mc.ChunkManager:
    manager = make(backend, [mc.ParamSpec("a", (5,)), mc.ParamSpec("b", (2, 2))], **options)
    manager.load({"a": ints((5,), 1), "b": ints((2, 2), 10)})
    return manager


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


def case_foreign_memory(backend: Backend) -> None:
    with loaded(backend) as manager:
        with manager.external("activations", 1000), manager.external("pages", 7, HOST):
            assert used(manager, "external") == 1000
            assert used(manager, "external", "host") == 7
            manager.audit()
        assert used(manager, "external") == 0
        assert manager.memory().peak["device"]["external"] == 1000
        with raises(KeyError, "stop", builtin=KeyError), manager.external("activations", 1):
            raise KeyError("stop")
        assert used(manager, "external") == 0
        with (
            raises(mc.LedgerError, "'activations'", "-1", builtin=RuntimeError),
            manager.external("activations", -1),
        ):
            raise RuntimeError("not reached")


def case_the_report_has_all_keys(backend: Backend) -> None:
    with loaded(backend) as manager:
        report = manager.memory()
        categories = {"param", "grad", "optimizer", "staging", "external"}
        for table in (report.used, report.reserved):
            assert set(table) == {"device", "host"}
            assert all(set(row) == categories for row in table.values())
        assert all(set(row) == categories | {"total"} for row in report.peak.values())
        assert all(type(n) is int for row in report.used.values() for n in row.values())
        for word in ("device", "param", "used", "reserved", "peak", "total"):
            assert word in str(report)
        manager.access("a")
        assert report.used["device"]["param"] == 4 * manager.plan.chunks[0].shard_numel


def case_audit_measures_what_the_ledger_says(backend: Backend) -> None:
    with loaded(backend, check=True) as manager:
        manager.add_state("exp_avg")
        manager.access("a")
        manager.accumulate_grad("a", ints((5,)))
        manager.reduce_grads()
        manager.move("a", HOST, kinds=("grad",))
        manager.release("a")
        audit, report = manager.audit(), manager.memory()
        external = {memory: row["external"] for memory, row in report.used.items()}
        assert external == {"device": 0, "host": 0}
        assert audit.measured == report.used
        assert audit.measured_peak == report.peak


def case_lost_books_are_found(backend: Backend) -> None:
    with loaded(backend) as manager:
        key, entry = next(iter(manager.ledger.live().items()))
        manager.ledger.close(key)
        with raises(mc.AuditError, builtin=AssertionError):
            manager.audit()
        with raises(mc.LedgerError, str(key), "not open"):
            manager.ledger.close(key)
        manager.ledger.open(key, entry)
        with raises(mc.LedgerError, entry.name, "open already"):
            manager.ledger.open(key, entry)
        manager.audit()
        stray = manager.pool.zeros(
            "stray", mc.Category.PARAM, mc.BufferSpec(8 * 3, "float32", mc.Placement.REPLICATED)
        )
        with raises(mc.AuditError, "stray"):
            manager.audit()
        manager.pool.free(stray)
        manager.audit()


def case_limits_are_kept(backend: Backend) -> None:
    specs = [mc.ParamSpec(name, (12,), group=name) for name in "abc"]
    shard = 4 * 12 // backend.roles.shards
    full = 48 if backend.roles.shards > 1 else 0
    limit = 3 * shard + 2 * full + 47
    with make(backend, specs, limits={DEVICE: limit}) as manager:
        manager.load({name: ints((12,)) for name in "abc"})
        manager.access("a", "b")
        before = all_used(manager)
        if full:
            with raises(mc.DeviceMemoryError, "c.2.full", "48 bytes", "limit", builtin=MemoryError):
                manager.access("c")
            assert not manager.is_gathered("c")
        with raises(mc.DeviceMemoryError, "c.2.grad_full", "limit", "param"):
            manager.accumulate_grad("c", ints((12,)))
        assert all_used(manager) == before
        total = manager.memory()
        held = sum(total.used["device"].values()) + sum(total.reserved["device"].values())
        assert held <= limit
        manager.release("a")
        manager.access("c")
        equal(manager.read("c"), ints((12,)))
        manager.audit()


@on(line(0, 1), line(1, 2, 0))
def case_the_second_of_three_gathers_fails(backend: Backend) -> None:
    specs = [mc.ParamSpec(name, (6,)) for name in "abc"]
    values = {name: ints((6,), 10 * i) for i, name in enumerate("abc")}
    stub = FaultyBackend(backend, verbs=("redistribute",), error=MemoryError)
    with make(stub, specs, capacity=6) as manager:
        manager.load(values)
        before = all_used(manager)
        stub.fail_at = stub.calls + 1
        words = ("param.1.full", "24 bytes", "in use", "device param", "injected")
        expected = raises(mc.DeviceMemoryError, *words, builtin=MemoryError)
        with expected:
            manager.access("a", "b", "c")
        error = expected.caught
        assert (error.buffer, error.nbytes) == ("param.1.full", 24)
        assert error.report["device"]["param"] > before["device"]["param"]  # the first was gathered
        assert all_used(manager) == before
        assert not any(manager.is_gathered(name) for name in "abc")
        manager.audit()
        manager.access("a", "b", "c")
        for name, value in values.items():
            equal(manager.read(name), value)


def case_many_cycles_leave_the_ledger_the_same(backend: Backend) -> None:
    with loaded(backend) as manager:
        manager.access("a")
        manager.release("a")
        before = all_used(manager), manager.memory().reserved, manager.memory().peak
        for _ in range(50):
            manager.access("a")
            manager.release("b")
        assert (all_used(manager), manager.memory().reserved, manager.memory().peak) == before
        manager.audit()
