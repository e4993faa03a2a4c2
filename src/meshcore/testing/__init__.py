"""Tests for backends, for anybody who writes one: the contract, faults and mutants.

from meshcore.testing import BackendContract, BackendHarness

class FooHarness(BackendHarness):
    backend_name = "foo"

class TestFoo(BackendContract):
    harness = FooHarness()
"""

from meshcore.testing.contract import CASES as CASES
from meshcore.testing.contract import Case as Case
from meshcore.testing.faults import FaultyBackend as FaultyBackend
from meshcore.testing.faults import InjectedFaultError as InjectedFaultError
from meshcore.testing.harness import MESH_CASES as MESH_CASES
from meshcore.testing.harness import BackendHarness as BackendHarness
from meshcore.testing.harness import MeshCase as MeshCase
from meshcore.testing.harness import grid as grid
from meshcore.testing.harness import line as line
from meshcore.testing.harness import run_case as run_case
from meshcore.testing.suite import BackendContract as BackendContract
from meshcore.testing.wrappers import ForwardingBackend as ForwardingBackend
from meshcore.testing.wrappers import PoisonBackend as PoisonBackend
