"""The contract as a third party meets it: a class to subclass, cases that travel, kept backends."""

import pickle

import pytest

from meshcore.reference import NumpyBackend
from meshcore.testing import CASES, MESH_CASES, BackendHarness, MeshCase, grid, line
from meshcore.testing.contract import life, moves

pytest_plugins = ("pytester",)

THIRD_PARTY = """
from meshcore.reference import NumpyBackend
from meshcore.testing import BackendContract, BackendHarness, line


class Wrong(NumpyBackend):
    def exchange(self, payload):
        return dict(list(super().exchange(payload).items())[:1])


class Harness(BackendHarness):
    def __init__(self, backend_class):
        super().__init__()
        self.backend_class = backend_class

    def mesh_cases(self):
        return (line(1, 0),)

    def create(self, mesh_case):
        return self.backend_class(mesh_case.roles())


class TestRight(BackendContract):
    harness = Harness(NumpyBackend)


class TestWrong(BackendContract):
    harness = Harness(Wrong)
"""


def test_plain_pytest_collects_and_runs_a_subclass(pytester):
    pytester.makepyfile(test_third_party=THIRD_PARTY)
    result = pytester.runpytest_inprocess("-q", "-p", "no:randomly")
    counts = result.parseoutcomes()
    assert counts["passed"] + counts["failed"] == 2 * len(CASES)
    assert 0 < counts["failed"] < 12
    failed = [line for line in result.outlines if line.startswith("FAILED")]
    assert failed
    assert all("TestWrong" in line for line in failed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_travel_by_name(case):
    assert pickle.loads(pickle.dumps(case)) == case


def test_names_of_cases_are_distinct():
    assert len({case.name for case in CASES}) == len(CASES) > 50


def test_mesh_cases_travel_and_cover_what_they_should():
    assert pickle.loads(pickle.dumps(MESH_CASES)) == MESH_CASES
    assert {case.world_size for case in MESH_CASES} == {1, 2, 3, 4}
    shapes = {(case.roles().replicas, case.roles().shards) for case in MESH_CASES}
    assert {(1, 4), (2, 2), (4, 1), (1, 3)} <= shapes
    assert any(case.ids != tuple(sorted(case.ids)) for case in MESH_CASES)
    assert len({str(case) for case in MESH_CASES}) == len(MESH_CASES)


def test_a_grid_has_its_axes_in_the_order_asked_for():
    first = grid((0, 1, 2, 3, 4, 5), 2, 3, shard_first=True)
    assert first.mesh().shape == (3, 2)
    assert first.roles().shard_group(0) == (0, 2, 4)
    assert grid((0, 1, 2, 3, 4, 5), 2, 3).roles().shard_group(0) == (0, 1, 2)
    assert line(3, 1).world_size == 4


class RecordingHarness(BackendHarness):
    def __init__(self):
        super().__init__()
        self.made = []

    def create(self, mesh_case: MeshCase) -> NumpyBackend:
        self.made.append(NumpyBackend(mesh_case.roles()))
        return self.made[-1]


def case_named(theme, name):
    return next(case for case in theme.CASES if case.function.__name__ == name)


def test_backends_are_kept_between_cases_and_closed_at_the_end():
    harness = RecordingHarness()
    for _ in range(3):
        harness.run(case_named(moves, "gather_follows_mesh_order"), line(0, 1))
    (kept,) = harness.made
    assert kept.group_count == 1
    harness.close()
    assert kept.group_count == 0
    harness.run(case_named(moves, "gather_follows_mesh_order"), line(0, 1))
    assert len(harness.made) == 2
    harness.close()


def test_a_case_that_closes_its_backend_gets_its_own():
    harness = RecordingHarness()
    harness.run(case_named(moves, "gather_follows_mesh_order"), line(0, 1))
    harness.run(case_named(life, "close_is_final_and_idempotent"), line(0, 1))
    kept, own = harness.made
    assert (kept.group_count, own.group_count) == (1, 0)
    harness.close()


def test_processes_outside_the_mesh_make_the_backend_and_skip_the_case():
    class Outside(NumpyBackend):
        def __init__(self, roles):
            super().__init__(roles)
            self.local_ranks = ()

    class OutsideHarness(RecordingHarness):
        def create(self, mesh_case):
            self.made.append(Outside(mesh_case.roles()))
            return self.made[-1]

    harness = OutsideHarness()
    harness.run(case_named(life, "ranks_are_mesh_ids"), line(0, 1))
    assert len(harness.made) == 1
    harness.close()
