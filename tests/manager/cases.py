"""All cases of the chunk manager, and the pairs of case and mesh that a backend is tried with."""

from __future__ import annotations

from typing import ClassVar

import cases_gradients
import cases_life
import cases_memory
import cases_norms
import cases_optimizer
import cases_prediction
import cases_values
import pytest
from manager_support import MESHES, cases_in, meshes_of

from meshcore.testing import BackendHarness, Case, MeshCase

THEMES = (
    cases_values,
    cases_life,
    cases_gradients,
    cases_norms,
    cases_optimizer,
    cases_memory,
    cases_prediction,
)

CASES: tuple[Case, ...] = tuple(case for theme in THEMES for case in cases_in(theme))


class ManagerCases:
    """Runs every case on every mesh that it is made for; subclass it with a harness.

    Attributes:
        meshes: where the cases run that name no meshes of their own.
    """

    harness: ClassVar[BackendHarness]
    meshes: ClassVar[tuple[MeshCase, ...]] = MESHES

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "mesh_case" in metafunc.fixturenames:
            pairs = [(case, mesh) for case in CASES for mesh in meshes_of(case, self.meshes)]
            ids = [f"{case.name}-{mesh}" for case, mesh in pairs]
            metafunc.parametrize(("case", "mesh_case"), pairs, ids=ids)

    def test_case(self, case: Case, mesh_case: MeshCase) -> None:
        self.harness.run(case, mesh_case)

    @classmethod
    def teardown_class(cls) -> None:
        cls.harness.close()
