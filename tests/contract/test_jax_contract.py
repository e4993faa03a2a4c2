"""The jax backend passes the contract over emulated devices of one controller."""

import pytest

pytest.importorskip("jax")

from meshcore.testing import BackendContract, grid, line
from meshcore_jax.testing import JaxHarness

pytestmark = pytest.mark.jax

MESHES = (
    line(2, 0, 1),
    grid((0, 1, 2, 3), 1, 4),
    grid((3, 0, 2, 1), 2, 2),
    grid((0, 2, 1, 3), 4, 1),
)
MORE_MESHES = (line(0), line(2, 0, 3, 1), grid((2, 0, 1, 3), 2, 2, shard_first=True))


class TestJax(BackendContract):
    harness = JaxHarness(MESHES)


@pytest.mark.slow  # nearly all of it is compiling
class TestJaxOnMoreMeshes(BackendContract):
    harness = JaxHarness(MORE_MESHES)
