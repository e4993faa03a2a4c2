"""Every case of the chunk manager on the numpy backend, as it is and as it accounts for others."""

import cases
from cases import CASES, ManagerCases
from manager_profiles import JAX_LIKE, TORCH_LIKE

from meshcore.backend import BackendOptions, TransferProfile
from meshcore.testing import BackendHarness, grid


class NumpyHarness(BackendHarness):
    backend_name = "numpy"

    def __init__(self, profile: TransferProfile | None = None) -> None:
        super().__init__()
        self.profile = profile

    def options(self) -> BackendOptions:
        return BackendOptions(profile=self.profile)


class TestNumpy(ManagerCases):
    harness = NumpyHarness()


class TestNumpyAsTorch(ManagerCases):
    harness = NumpyHarness(TORCH_LIKE)
    meshes = (grid((2, 0, 1, 3), 2, 2, shard_first=True),)


class TestNumpyAsJax(ManagerCases):
    harness = NumpyHarness(JAX_LIKE)
    meshes = (grid((3, 0, 2, 1), 2, 2),)


def test_every_theme_has_cases():
    modules = {case.function.__module__ for case in CASES}
    assert modules == {theme.__name__ for theme in cases.THEMES}
    assert len({case.function.__name__ for case in CASES}) == len(CASES)
