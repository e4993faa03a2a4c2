"""Every case of the chunk manager in four gloo processes."""

import pytest
from cases import ManagerCases

from meshcore.testing import grid, line

pytest.importorskip("torch")
pytest.importorskip("meshcore_torch")

from meshcore_torch.testing import TorchHarness  # noqa: E402  # after the skip

pytestmark = pytest.mark.torch


class TestTorch(ManagerCases):
    harness = TorchHarness()
    meshes = (line(2, 0, 1), grid((3, 0, 2, 1), 2, 2))
