"""Every call of a backend fails once, before its effect and after it, and nothing is lost unsaid."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TypeAlias

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

PROFILES = (NUMPY_PROFILE, STAGED, JAX_LIKE)
MESH = grid((3, 0, 2, 1), 2, 2)

Scenario: TypeAlias = Callable[[Backend], list[Step]]

MAY_LOSE = ("write", "scale", "redistribute", "wait", "nbytes")
"""Verbs that may have consumed what they were given: a move does so where it adds, and after an
update the bytes of the successors are measured."""


@pytest.fixture(autouse=True)
def quick_collection() -> Iterator[None]:
    """Errors hold frames, and frames hold arrays: collect after each failure, but nothing old."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Loop:
    """Runs the scenario with one call failing, and recovers."""

    def __init__(
        self, scenario: Scenario, profile: TransferProfile, k: int, when: str, *, check: bool
    ) -> None:
        counting = CountingBackend(MESH.roles(), profile)
        self.backend = FaultyCountingBackend(counting, when=when)
        self.scenario = scenario
        self.check = check
        self.k = k
        self.lost = False

    def run(self) -> bool:
        """Whether call k exists."""
        backend = self.backend
        manager = manager_on(backend, check=self.check)
        backend.fail_at = backend.calls + self.k
        model = Model()
        plan = self.scenario(backend)
        at = 0
        while at < len(plan):
            step = plan[at]
            before = all_used(manager)
            try:
                step.run(manager)
            except InjectedFaultError:
                failed = True
            else:
                failed = False
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
            assert self.backend.fired in MAY_LOSE, where
            assert "InjectedFaultError" in str(error), where
            assert any(chunk.name in str(error) for chunk in manager.chunks), where
            self.lost = True
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
        gc.collect()
        manager.audit()
        report = manager.memory()
        for rank, row in self.backend.live_nbytes().items():
            for memory, alive in row.items():
                known = sum(report.used[memory.value].values())
                known += sum(report.reserved[memory.value].values())
                assert alive == known, f"{where}: rank {rank} {memory.value}"

    def close(self, manager: mc.ChunkManager) -> None:
        with contextlib.suppress(InjectedFaultError):
            manager.close()
        manager.close()
        gc.collect()
        for table in (manager.memory().used, manager.memory().reserved):
            assert not any(nbytes for row in table.values() for nbytes in row.values())
        for row in self.backend.live_nbytes().values():
            assert not any(row.values())


def loop(
    scenario: Scenario, profile: TransferProfile, when: str, *, check: bool = False
) -> set[str]:
    """Fail every call; returns the verbs that failed."""
    fired: set[str] = set()
    lost = 0
    k = 0
    while (one := Loop(scenario, profile, k, when, check=check)).run():
        fired.add(str(one.backend.fired))
        lost += one.lost
        k += 1
    assert 0 < lost < k / 2
    assert k > 80
    return fired


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_call_of_a_training_step_fails_once(profile: TransferProfile, when: str):
    fired = loop(training, profile, when)
    assert fired >= {"zeros", "redistribute", "write", "read", "scale", "square_sum", "total"}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_every_call_of_moves_between_memories_fails_once(profile: TransferProfile, when: str):
    fired = loop(placement, profile, when)
    assert fired >= {"zeros", "redistribute", "write", "wait", "free", "to_numpy"}
    assert ("drop" in fired) is (profile is STAGED)
