"""The contract catches every mutant, and says so with a comparison, not with a crash."""

import inspect
from collections.abc import Iterator

import pytest

from meshcore.backend import Backend, TransferProfile
from meshcore.reference import NumpyBackend
from meshcore.spec import Memory
from meshcore.testing import CASES, MESH_CASES, MeshCase, grid, run_case
from meshcore.testing.contract import THEMES
from meshcore.testing.mutants import MUTANTS, buffers, moves, scalars

SHELLS = TransferProfile(name="shells", shells=frozenset(Memory))
PROFILES = {buffers.ZerosKeepOldData: SHELLS}

# Some show only where there are replicas, or where the axes stand the other way round: meshes are
# tried from the most telling to the plainest until a case fails.
TELLING_FIRST = sorted(MESH_CASES, key=lambda case: -len(case.ids) * len(case.shape))


def failures(
    backend_class: type[NumpyBackend], profile: TransferProfile | None, mesh_case: MeshCase
) -> Iterator[Exception]:
    kept: dict[MeshCase, Backend] = {}
    for case in CASES:
        try:
            run_case(case, mesh_case, lambda asked: backend_class(asked.roles(), profile), kept)
        except Exception as error:
            yield error


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_contract_catches(mutant):
    profile = PROFILES.get(mutant)
    for mesh_case in TELLING_FIRST:
        if any(isinstance(e, AssertionError) for e in failures(mutant, profile, mesh_case)):
            return
    pytest.fail(f"no case on any mesh noticed: {mutant.__doc__}")


@pytest.mark.parametrize("profile", [None, SHELLS], ids=["own profile", "shells"])
def test_the_unmutated_backend_passes_what_catches_them(profile):
    assert list(failures(NumpyBackend, profile, grid((3, 0, 2, 1), 2, 2))) == []


def test_all_mutants_are_listed_and_differ():
    written = [
        value
        for module in (moves, buffers, scalars)
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, NumpyBackend)
        and value is not NumpyBackend
        and not name.startswith("_")
    ]
    assert set(written) == set(MUTANTS)
    assert len(MUTANTS) == len({mutant.__doc__ for mutant in MUTANTS})


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.__name__.rpartition(".")[2])
def test_every_case_of_a_theme_is_listed(theme):
    written = {
        value
        for name, value in vars(theme).items()
        if inspect.isfunction(value)
        and value.__module__ == theme.__name__
        and not name.startswith("_")
    }
    assert {case.function for case in theme.CASES} == written
