"""The contract as one test class, for pytest."""

from __future__ import annotations

from typing import Any, ClassVar

from meshcore.testing.contract import CASES, Case
from meshcore.testing.harness import BackendHarness, MeshCase


class BackendContract:
    """Every case on every mesh of a harness; a backend that passes can be trusted by the core.

    Subclass it in a test file, with a name that pytest collects:

        class TestFoo(BackendContract):
            harness = FooHarness()
    """

    harness: ClassVar[BackendHarness]

    @classmethod
    def cases(cls) -> tuple[Case, ...]:
        """The cases that fit the harness: all, or without data those about bytes and errors."""
        return tuple(case for case in CASES if cls.harness.has_data or not case.needs_data)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make a test of every pair of case and mesh."""
        if "contract_case" in metafunc.fixturenames:
            pairs = [(case, mesh) for mesh in self.harness.mesh_cases() for case in self.cases()]
            ids = [f"{case.name}-{mesh}" for case, mesh in pairs]
            metafunc.parametrize(("contract_case", "mesh_case"), pairs, ids=ids)

    def test_contract(self, contract_case: Case, mesh_case: MeshCase) -> None:
        """Run one case on one mesh."""
        self.harness.run(contract_case, mesh_case)

    @classmethod
    def teardown_class(cls) -> None:
        """Close the backends that were kept open between cases."""
        cls.harness.close()
