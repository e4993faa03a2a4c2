"""All cases of the chunk manager, and the pairs of case and mesh that a backend is tried with."""

from __future__ import annotations

import cases_gradients
import cases_life
import cases_memory
import cases_norms
import cases_optimizer
import cases_values
import pytest
from manager_support import cases_in, meshes_of

from meshcore.testing import BackendHarness, Case, MeshCase

THEMES = (
    cases_values,
    cases_life,
    cases_gradients,
    cases_norms,
    cases_optimizer,
    cases_memory,
)

CASES: tuple[Case, ...] = tuple(case for theme in THEMES for case in cases_in(theme))


def pairs() -> list[object]:
    """Every case on the meshes that it is made for, to parametrise a test with."""
    return [
        pytest.param(case, mesh, id=f"{case.name}-{mesh}")
        for case in CASES
        for mesh in meshes_of(case)
    ]


class ManagerCases:
    """Runs every case on every mesh that it is made for; subclass it with a harness."""

    harness: BackendHarness

    @pytest.mark.parametrize(("case", "mesh_case"), pairs())
    def test_case(self, case: Case, mesh_case: MeshCase) -> None:
        self.harness.run(case, mesh_case)

    @classmethod
    def teardown_class(cls) -> None:
        cls.harness.close()
