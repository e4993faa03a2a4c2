"""Every call of a backend fails once, before its effect and after it: nothing is lost unsaid."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
from manager_profiles import JAX_LIKE, STAGED
from manager_scenario import Model, Step, manager_on, placement, start_values, training
from manager_support import all_used
from manager_witness import CountingBackend, FaultyCountingBackend

import meshcore as mc
from meshcore.backend import Backend, TransferProfile
from meshcore.reference import NUMPY_PROFILE
from meshcore.testing import InjectedFaultError, grid

FAULTS = (
    pytest.param(STAGED, "before", id="staged-before"),
    pytest.param(STAGED, "after", id="staged-after"),
    pytest.param(JAX_LIKE, "after", id="jax-like-after"),
    # What is left over: these calls are among those above, and fail in the other way.
    pytest.param(JAX_LIKE, "before", id="jax-like-before", marks=pytest.mark.slow),
    pytest.param(NUMPY_PROFILE, "before", id="numpy-before", marks=pytest.mark.slow),
    pytest.param(NUMPY_PROFILE, "after", id="numpy-after", marks=pytest.mark.slow),
)
MESH = grid((3, 0, 2, 1), 2, 2)

STEPS_AFTER = 2
"""Steps that are made after a failure was recovered from, before all values are compared again."""

Scenario: TypeAlias = Callable[[Backend], list[Step]]

MAY_LOSE = ("write", "scale", "redistribute", "wait", "nbytes")
"""Verbs that may have consumed what they were given: a move does so where it adds, and after an
update the bytes of the successors are measured."""


@pytest.fixture(autouse=True)
def quick_collection() -> Iterator[None]:
    """Collecting garbage after a failure need not look at what is older than the test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Loop:
    """Runs the scenario with one call failing, and recovers."""

    def __init__(self, scenario: Scenario, profile: TransferProfile, k: int, **fault: Any) -> None:
        counting = CountingBackend(MESH.roles(), profile)
        self.backend = FaultyCountingBackend(counting, **fault)
        self.scenario = scenario
        self.k = k
        self.lost = False
        self.errors: list[str] = []

    def run(self) -> bool:
        """Whether call k exists."""
        backend = self.backend
        manager = manager_on(backend)
        backend.fail_at = backend.calls + self.k
        model = Model()
        plan = self.scenario(backend)
        at, left = 0, len(plan)
        while at < len(plan) and left:
            step = plan[at]
            before = all_used(manager)
            try:
                step.run(manager)
            except (InjectedFaultError, mc.DeviceMemoryError) as error:
                failed = True
                self.errors.append(str(error))
            else:
                failed = False
            left = STEPS_AFTER if failed else left - 1
            if failed and self.recover(manager, model, step, before):
                model, at = Model(), 0
                continue
            step.model(model)
            at += 1
            if failed:
                model.check(manager)
        if backend.fired:
            model.check(manager)
        self.close(manager)
        return backend.fired is not None

    def recover(
        self, manager: mc.ChunkManager, model: Model, step: Step, before: dict[str, dict[str, int]]
    ) -> bool:
        """Complete the failed step, or say that something was lost and start again."""
        where = f"{step.name}: {self.backend.fired} at {self.backend.fail_at}"
        self.require_nothing_hidden(manager, where)
        if step.atomic and self.backend.fired not in ("free", "drop"):
            assert all_used(manager) == before, where
        try:
            if step.changes is None or not self.took_effect(manager, model, step):
                step.run(manager)
        except mc.BrokenBufferError as error:
            message = str(error)
            self.lost = True
        if self.lost:
            assert self.backend.fired in MAY_LOSE, where
            assert "injected" in message, where
            assert any(chunk.name in message for chunk in manager.chunks), where
            manager.zero_grads()
            manager.load(start_values())
        return self.lost

    def took_effect(self, manager: mc.ChunkManager, model: Model, step: Step) -> bool:
        after = Model(dict(model.params), dict(model.grads), dict(model.pending))
        step.model(after)
        name = step.changes
        assert name is not None
        value = manager.to_numpy(name)
        if np.array_equal(value, model.params[name]):
            return False
        np.testing.assert_array_equal(value, after.params[name])
        return True

    def require_nothing_hidden(self, manager: mc.ChunkManager, where: str) -> None:
        """The ledger is what is alive: not a byte more, not a byte less."""
        manager.audit()
        report = manager.memory()
        known = {
            memory: sum(report.used[memory.value].values())
            + sum(report.reserved[memory.value].values())
            for memory in mc.Memory
        }
        everywhere = dict.fromkeys(self.backend.local_ranks, known)
        if self.backend.live_nbytes() != everywhere:
            gc.collect()  # errors hold frames, and frames hold arrays
        assert self.backend.live_nbytes() == everywhere, where

    def close(self, manager: mc.ChunkManager) -> None:
        with contextlib.suppress(InjectedFaultError):
            manager.close()
        manager.close()
        for table in (manager.memory().used, manager.memory().reserved):
            assert not any(nbytes for row in table.values() for nbytes in row.values())
        self.require_nothing_alive()

    def require_nothing_alive(self) -> None:
        nothing = dict.fromkeys(self.backend.local_ranks, dict.fromkeys(mc.Memory, 0))
        if self.backend.live_nbytes() != nothing:
            gc.collect()
        assert self.backend.live_nbytes() == nothing


def loop(scenario: Scenario, profile: TransferProfile, when: str) -> set[str]:
    """Fail every call; returns the verbs that failed."""
    fired: set[str] = set()
    lost = 0
    k = 0
    while (one := Loop(scenario, profile, k, when=when)).run():
        fired.add(str(one.backend.fired))
        lost += one.lost
        k += 1
    assert 0 < lost < k / 2
    assert k > 80
    return fired


@pytest.mark.parametrize(("profile", "when"), FAULTS)
def test_every_call_of_a_training_step_fails_once(profile: TransferProfile, when: str):
    fired = loop(training, profile, when)
    assert fired >= {"zeros", "redistribute", "write", "read", "scale", "square_sum", "total"}


@pytest.mark.parametrize(("profile", "when"), FAULTS)
def test_every_call_of_moves_between_memories_fails_once(profile: TransferProfile, when: str):
    fired = loop(placement, profile, when)
    assert fired >= {"zeros", "redistribute", "write", "wait", "free", "to_numpy"}
    assert ("drop" in fired) is (profile is STAGED)


@pytest.mark.parametrize(
    ("scenario", "profile"),
    [
        pytest.param(training, STAGED, id="training-staged"),
        pytest.param(placement, JAX_LIKE, id="placement-jax-like"),
        pytest.param(training, JAX_LIKE, id="training-jax-like", marks=pytest.mark.slow),
        pytest.param(placement, STAGED, id="placement-staged", marks=pytest.mark.slow),
    ],
)
def test_every_lack_of_memory_is_named(scenario: Scenario, profile: TransferProfile):
    fault = {"verbs": ("empty", "zeros", "redistribute"), "error": MemoryError}
    messages = []
    k = 0
    while (one := Loop(scenario, profile, k, **fault)).run():
        messages += one.errors
        k += 1
    assert k > 20
    assert messages
    for message in messages:
        assert "injected" in message
        for word in (
            "no memory for",
            "bytes a rank",
            "in use: ",
            "reserved: ",
            "move some to host",
        ):
            assert word in message
        assert any(name in message for name in ("param.0", "param.1", "kept.2", "param.3"))


@pytest.mark.parametrize("profile", [NUMPY_PROFILE, STAGED, JAX_LIKE], ids=lambda p: p.name)
def test_a_thousand_cycles_leave_the_ledger_the_same(profile: TransferProfile):
    backend = CountingBackend(MESH.roles(), profile)
    with manager_on(backend) as manager:
        manager.load(start_values())
        manager.access("a")
        manager.release("a")
        before = str(manager.memory())
        for _ in range(1000):
            manager.access("b")
            manager.release("a")
        assert str(manager.memory()) == before
        manager.audit()


def test_a_failing_measure_leaves_no_buffer_behind():
    backend = FaultyCountingBackend(CountingBackend(MESH.roles(), STAGED), verbs=("nbytes",))
    with manager_on(backend, check=True) as manager:
        manager.load(start_values())
        before = all_used(manager)
        for k in itertools.count():
            backend.fail_at = backend.calls + k
            try:
                manager.access("a", "c")
            except InjectedFaultError:
                backend.fail_at = None
                assert all_used(manager) == before
                manager.audit()
            else:
                break
        assert k > 10


def test_a_state_that_cannot_be_opened_everywhere_is_opened_nowhere():
    for k in itertools.count():
        backend = FaultyCountingBackend(CountingBackend(MESH.roles(), JAX_LIKE))
        with manager_on(backend) as manager:
            manager.load(start_values())
            before = all_used(manager)
            backend.fail_at = backend.calls + k
            try:
                manager.add_state("momentum", memory=mc.Memory.HOST)
            except InjectedFaultError:
                assert all(not chunk.state_names for chunk in manager.chunks)
                if backend.fired != "free":
                    assert all_used(manager) == before
                manager.add_state("momentum", memory=mc.Memory.HOST)
            backend.fail_at = None
            manager.audit()
        if backend.fired is None:
            break
    assert k > 8
