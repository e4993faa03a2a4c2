"""Tests over real torch processes: worker processes that stay, and a harness for the contract."""

from meshcore_torch.testing.harness import TorchHarness as TorchHarness
from meshcore_torch.testing.workers import GlooWorkers as GlooWorkers
from meshcore_torch.testing.workers import Outcome as Outcome
from meshcore_torch.testing.workers import WorkerError as WorkerError
