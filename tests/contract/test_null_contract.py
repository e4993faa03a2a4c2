"""The null backend passes the cases about bytes and errors, at any size."""

from collections.abc import Sequence

import pytest

from meshcore.backend import BackendOptions, MoveForm, Staging, TransferProfile
from meshcore.errors import SpecError, ValueUnavailableError
from meshcore.mesh import DeviceMesh
from meshcore.null import NULL_PROFILE, NullBackend
from meshcore.spec import AxisRoles, BufferSpec, Memory, MoveKind, Placement
from meshcore.testing import CASES, MESH_CASES, BackendContract, BackendHarness, MeshCase, grid

PREDICTED = TransferProfile(
    name="predicted",
    forms={MoveKind.GATHER: (MoveForm("staged", 0, (Staging("peers", "dst"),)),)},
    shells=frozenset({Memory.DEVICE, Memory.HOST}),
)


class NullHarness(BackendHarness):
    backend_name = "null"
    has_data = False

    def mesh_cases(self) -> Sequence[MeshCase]:
        return (*MESH_CASES, grid(range(10_240), 80, 128))


class PredictingHarness(NullHarness):
    def options(self) -> BackendOptions:
        return BackendOptions(profile=PREDICTED)


class TestNull(BackendContract):
    harness = NullHarness()


class TestNullWithAnothersProfile(BackendContract):
    harness = PredictingHarness()


def test_cases_without_data_are_some_but_not_all():
    fitting = TestNull.cases()
    assert 5 < len(fitting) < len(CASES)
    assert not any(case.needs_data for case in fitting)


def roles(size: int) -> AxisRoles:
    return AxisRoles(DeviceMesh(range(3, 3 + size)))


def test_one_rank_stands_for_all():
    backend = NullBackend(roles(10_240))
    spec = BufferSpec(10_240 * 4, "float32", Placement.SHARDED)
    assert backend.local_ranks == (3,)
    assert backend.nbytes(backend.zeros(spec)) == {3: 16}


def test_exchange_says_what_the_first_rank_says():
    backend = NullBackend(roles(4))
    assert dict(backend.exchange(b"x")) == dict.fromkeys((3, 4, 5, 6), b"x")
    assert dict(backend.exchange({3: b"x", 5: b"y"})) == {3: b"x", 4: b"x", 5: b"y", 6: b"x"}
    with pytest.raises(KeyError):
        backend.exchange(b"x")[99]
    with pytest.raises(SpecError, match="names rank 3"):
        backend.exchange({4: b"x"})


def test_exchange_does_not_visit_a_large_mesh():
    said = NullBackend(roles(10_240)).exchange(b"x")
    assert len(said) == 10_240
    assert said[10_242] == b"x"


def test_asking_for_a_value_says_why_there_is_none():
    backend = NullBackend(roles(2))
    spec = BufferSpec(4, "float32", Placement.REPLICATED)
    array = backend.zeros(spec)
    with pytest.raises(ValueUnavailableError, match="bytes and no data"):
        backend.read(array, spec, 0, 2)
    with pytest.raises(ValueUnavailableError, match="bytes and no data"):
        backend.to_numpy(array)
    assert backend.total([backend.square_sum(array, spec, [(0, 4)])]) == 0.0


def test_the_profile_is_the_others_without_data():
    assert NullBackend(roles(2)).profile is NULL_PROFILE
    borrowed = NullBackend(roles(2), PREDICTED).profile
    assert borrowed.forms == PREDICTED.forms
    assert borrowed.shells == PREDICTED.shells
    assert (PREDICTED.has_data, borrowed.has_data) == (True, False)
