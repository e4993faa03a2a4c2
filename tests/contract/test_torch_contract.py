"""The torch backend passes the contract in 1, 2, 3 and 4 real processes."""

import pytest

pytest.importorskip("torch")

from meshcore.testing import BackendContract
from meshcore_torch.testing import TorchHarness

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


class TestTorch(BackendContract):
    harness = TorchHarness()
