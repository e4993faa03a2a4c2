"""Every case of the chunk manager on emulated JAX devices."""

import pytest
from cases import CASES, ManagerCases
from manager_support import meshes_of

from meshcore.testing import grid, line

pytest.importorskip("jax")
pytest.importorskip("meshcore_jax")

from meshcore_jax.testing import JaxHarness  # noqa: E402  # after the skip

pytestmark = pytest.mark.jax

MESHES = (line(2, 0, 1), grid((3, 0, 2, 1), 2, 2))


class TestJax(ManagerCases):
    harness = JaxHarness(sorted({m for c in CASES for m in meshes_of(c, MESHES)}, key=str))
    meshes = MESHES
