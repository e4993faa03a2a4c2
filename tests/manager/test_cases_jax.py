"""Every case of the chunk manager on emulated JAX devices."""

import pytest
from cases import ManagerCases

from meshcore.testing import MESH_CASES, grid, line

pytest.importorskip("jax")
pytest.importorskip("meshcore_jax")

from meshcore_jax.testing import JaxHarness

pytestmark = pytest.mark.jax


class TestJax(ManagerCases):
    """Few meshes: each one compiles every program anew."""

    harness = JaxHarness(MESH_CASES)
    meshes = (grid((3, 0, 2, 1), 2, 2),)
    own = 1


@pytest.mark.slow
class TestJaxOnMoreMeshes(ManagerCases):
    harness = JaxHarness(MESH_CASES)
    meshes = (line(0), line(2, 0, 1), grid((2, 0, 1, 3), 2, 2, shard_first=True))
