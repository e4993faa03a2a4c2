"""Foreign memory, reports, audits, limits and lack of memory."""

from __future__ import annotations

from manager_support import all_used, equal, ints, loaded, make, on, raises, used

import meshcore as mc
from meshcore.backend import Backend
from meshcore.testing import FaultyBackend, line

DEVICE, HOST = mc.Memory.DEVICE, mc.Memory.HOST


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
