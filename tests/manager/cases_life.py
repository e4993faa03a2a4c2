"""Access and release, scopes, states, look-ups, and the end."""

from __future__ import annotations

from manager_support import all_used, equal, ints, make, raises, three, used

import meshcore as mc
from meshcore.backend import Backend

COMPUTE, HOLD, FREE = mc.TensorState.COMPUTE, mc.TensorState.HOLD, mc.TensorState.FREE
READY, AFTER_BWD = mc.TensorState.READY_FOR_REDUCE, mc.TensorState.HOLD_AFTER_BWD


def case_reading_while_sharded(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("x", (4,))]) as manager:
        with raises(mc.NotGatheredError, "param.0", "load"):
            manager.access("x")
        manager.load({"x": ints((4,), 1)})
        words = ("'x'", "not gathered", "access('x')")
        with raises(mc.NotGatheredError, *words, builtin=RuntimeError):
            manager.read("x")
        manager.access("x")
        equal(manager.read("x"), ints((4,), 1))
        manager.release("x")
        with raises(mc.NotGatheredError, *words):
            manager.read("x")
        spec = manager.plan.find("x")[1].spec
        assert (spec.shape, spec.dtype) == ((4,), "float32")


def case_accesses_are_not_counted(backend: Backend) -> None:
    with three(backend) as manager:
        before = all_used(manager)
        for _ in range(3):
            manager.access("a", "b", "a")
        assert manager.is_gathered("b")
        assert not manager.is_gathered("c")
        manager.release("b")
        assert not manager.is_gathered("a")
        assert all_used(manager) == before
        manager.release("a", "c")
        assert all_used(manager) == before
        assert {manager.state(name) for name in "abc"} == {HOLD}


def case_gathering_counts_source_and_destination(backend: Backend) -> None:
    with three(backend) as manager:
        layouts = manager.plan.chunks
        resident = used(manager, "param")
        assert resident == sum(4 * layout.shard_numel for layout in layouts)
        shards = backend.roles.shards
        manager.access("c")
        whole = 4 * layouts[1].numel if shards > 1 else 0
        assert used(manager, "param") == resident + whole
        manager.ledger.reset_peak()
        manager.release("c")
        assert manager.memory().peak["device"]["param"] == resident + whole


def case_async_access_is_complete_when_read(backend: Backend) -> None:
    with three(backend) as manager:
        first = manager.access_async("a", "c")
        second = manager.access_async("c")
        equal(manager.read("c"), ints((7,), 20))
        first.wait()
        first.wait()
        second.wait()
        equal(manager.read("b"), ints((2, 2), 10))
        manager.release("a", "c")
        before = all_used(manager)
        manager.access_async("a", "c")
        manager.release("a", "c")
        assert all_used(manager) == before
        manager.access_async("a")
        manager.write({"a": ints((3,), 30)})
        equal(manager.read("a"), ints((3,), 30))
        manager.access_async("c")
        manager.audit()


def case_scopes_nest(backend: Backend) -> None:
    with three(backend) as manager:
        with manager.gathered("a", "c") as outer:
            with manager.gathered("b", "a") as inner:
                assert list(inner) == ["b", "a"]
                equal(inner["a"], ints((3,), 1))
            equal(manager.read("b"), ints((2, 2), 10))
            equal(outer["c"], ints((7,), 20))
        assert not manager.is_gathered("a")
        assert not manager.is_gathered("c")
        manager.access("a")
        with manager.gathered("a"):
            pass
        equal(manager.read("a"), ints((3,), 1))


def case_release_inside_a_scope_waits_for_its_end(backend: Backend) -> None:
    with three(backend) as manager:
        before = all_used(manager)
        manager.access("a")
        with manager.gathered("a") as values:
            manager.release("a")
            equal(values["a"], ints((3,), 1))
            equal(manager.read("b"), ints((2, 2), 10))
        assert not manager.is_gathered("a")
        with manager.gathered("a"):
            manager.access("a")
        equal(manager.read("a"), ints((3,), 1))
        manager.release("a")
        assert all_used(manager) == before


def case_compute_inside_a_scope_outlives_it(backend: Backend) -> None:
    with three(backend) as manager:
        with manager.gathered("a"):
            manager.set_state("a", COMPUTE)
        equal(manager.read("a"), ints((3,), 1))
        with raises(mc.ChunkBusyError, "'a'"):
            manager.release("a")
        manager.set_state("a", HOLD)
        manager.release("a")
        assert not manager.is_gathered("a")


def case_an_error_inside_a_scope_ends_it(backend: Backend) -> None:
    with three(backend) as manager:
        before = all_used(manager)
        with raises(KeyError, "stop", builtin=KeyError), manager.gathered("a", "c"):
            raise KeyError("stop")
        assert all_used(manager) == before
        with raises(mc.UnknownTensorError, "'nope'"), manager.gathered("a", "nope"):
            raise RuntimeError("not reached")
        assert all_used(manager) == before


def case_a_busy_chunk_is_not_released(backend: Backend) -> None:
    with three(backend) as manager:
        manager.access("a", "c")
        manager.set_state("b", COMPUTE)
        held = all_used(manager)
        words = ("param.0", "'b'", "COMPUTE", "HOLD")
        with raises(mc.ChunkBusyError, *words, builtin=RuntimeError):
            manager.release("c", "a")
        assert all_used(manager) == held
        assert manager.is_gathered("c")
        assert [chunk.name for chunk in manager.releasable_chunks()] == ["param.1"]
        manager.set_state("b", AFTER_BWD)
        assert [chunk.name for chunk in manager.releasable_chunks()] == ["param.0", "param.1"]
        manager.release("c", "a")
        assert manager.releasable_chunks() == ()
        manager.access("a", "c")
        manager.set_state("c", COMPUTE)
        with raises(mc.ChunkBusyError, "param.1", "'c'"):
            manager.release("a", "c")
        assert manager.is_gathered("a")


def case_illegal_moves_change_nothing(backend: Backend) -> None:
    with three(backend) as manager:
        held = all_used(manager)
        words = ("'a'", "HOLD", "READY_FOR_REDUCE", "FREE, COMPUTE")
        with raises(mc.StateTransitionError, *words, builtin=RuntimeError):
            manager.set_state("a", READY)
        assert manager.state("a") is HOLD
        assert all_used(manager) == held
        for state in (COMPUTE, AFTER_BWD, READY, HOLD, FREE, COMPUTE, AFTER_BWD, COMPUTE, HOLD):
            manager.set_state("a", state)
            assert manager.state("a") is state
            assert manager.state("b") is HOLD
        with raises(mc.StateTransitionError, "'b'", "HOLD_AFTER_BWD"):
            manager.set_state("b", AFTER_BWD)


def case_a_tensor_given_up_is_not_read(backend: Backend) -> None:
    with three(backend) as manager:
        manager.access("a")
        manager.set_state("a", FREE)
        with raises(mc.NotGatheredError, "'a'", "FREE"):
            manager.read("a")
        equal(manager.read("b"), ints((2, 2), 10))
        manager.load({"a": ints((3,), 5)})
        assert manager.state("a") is HOLD
        equal(manager.read("a"), ints((3,), 5))


def case_closing_frees_everything_once(backend: Backend) -> None:
    manager = three(backend)
    manager.add_state("exp_avg")
    manager.accumulate_grad("a", ints((3,)))
    manager.access_async("c")
    manager.close()
    for table in (manager.memory().used, manager.memory().reserved):
        assert not any(nbytes for row in table.values() for nbytes in row.values())
    manager.close()
    calls = (
        lambda: manager.access("a"),
        lambda: manager.read("a"),
        lambda: manager.release("a"),
        lambda: manager.load({"a": ints((3,))}),
        lambda: manager.accumulate_grad("a", ints((3,))),
        lambda: manager.mark_unused("a"),
        lambda: manager.reduce_grads(),
        lambda: manager.grad_norm(),
        lambda: manager.zero_grads(),
        lambda: manager.scale_grads(2.0),
        lambda: manager.grads("a"),
        lambda: manager.state("a"),
        lambda: manager.move("a", mc.Memory.HOST),
        lambda: manager.add_state("exp_avg_sq"),
        lambda: manager.to_numpy("a"),
        lambda: manager.audit(),
        lambda: manager.load_zeros(),
    )
    for call in calls:
        with raises(mc.ClosedError, "closed", builtin=RuntimeError):
            call()
    with three(backend) as another:  # the backend stays open
        another.access("a")


def case_closing_inside_a_scope(backend: Backend) -> None:
    manager = three(backend)
    with manager.gathered("a"):
        manager.close()
    assert repr(manager) == "ChunkManager(closed)"


def case_two_managers_share_a_backend(backend: Backend) -> None:
    with three(backend) as one, three(backend) as other:
        one.access("a")
        other.write({"a": ints((3,), 40)})
        equal(one.read("a"), ints((3,), 1))
        equal(other.to_numpy("a"), ints((3,), 40))
        assert used(one, "param") >= used(other, "param")
        one.audit()
        other.audit()
