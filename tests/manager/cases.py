"""All cases of the chunk manager, and the pairs of case and mesh that a backend is tried with."""

from __future__ import annotations

from typing import ClassVar

import cases_books
import cases_gradients
import cases_homes
import cases_life
import cases_lookups
import cases_memory
import cases_norms
import cases_optimizer
import cases_prediction
import cases_unused
import cases_values
import pytest
from manager_support import MESHES, cases_in, meshes_of

from meshcore.testing import BackendHarness, Case, MeshCase

THEMES = (
    cases_values,
    cases_homes,
    cases_life,
    cases_lookups,
    cases_gradients,
    cases_unused,
    cases_norms,
    cases_optimizer,
    cases_memory,
    cases_books,
    cases_prediction,
)

CASES: tuple[Case, ...] = tuple(case for theme in THEMES for case in cases_in(theme))


class ManagerCases:
    """Runs every case on every mesh that it is made for; subclass it with a harness.

    Attributes:
        meshes: where the cases run that name no meshes of their own.
        own: of the meshes that a case names, how many it runs on.
    """

    harness: ClassVar[BackendHarness]
    meshes: ClassVar[tuple[MeshCase, ...]] = MESHES
    own: ClassVar[int | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "mesh_case" in metafunc.fixturenames:
            pairs = self.pairs()
            ids = [f"{case.name}-{mesh}" for case, mesh in pairs]
            metafunc.parametrize(("case", "mesh_case"), pairs, ids=ids)

    @classmethod
    def pairs(cls) -> list[tuple[Case, MeshCase]]:
        """What is run where."""
        return [(c, m) for c in CASES for m in meshes_of(c, default=cls.meshes, own=cls.own)]

    def test_case(self, case: Case, mesh_case: MeshCase) -> None:
        self.harness.run(case, mesh_case)

    @classmethod
    def teardown_class(cls) -> None:
        cls.harness.close()
