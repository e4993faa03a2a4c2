"""Every case of the chunk manager in four gloo processes, and what a rank outside a mesh may do."""

import pytest
from cases import ManagerCases

import meshcore as mc
from meshcore.testing import grid, line

pytest.importorskip("torch")
pytest.importorskip("meshcore_torch")

from meshcore_torch.testing import TorchHarness

pytestmark = pytest.mark.torch


class TestTorch(ManagerCases):
    harness = TorchHarness()
    meshes = (grid((3, 0, 2, 1), 2, 2),)
    own = 1

    def test_a_rank_outside_the_mesh(self) -> None:
        outside = "NotInMeshError with 0 local ranks"
        answers = self.harness.workers.run(reduce_over_two_of_four)
        assert answers == [2.0, outside, 2.0, outside]


@pytest.mark.slow
class TestTorchOnMoreMeshes(ManagerCases):
    harness = TorchHarness()
    meshes = (line(0), line(2, 0, 1), grid((2, 0, 1, 3), 2, 2, shard_first=True))


def reduce_over_two_of_four() -> float | str:
    """Sum over ranks 0 and 2; the other ranks are told that they are outside."""
    mesh = mc.DeviceMesh([0, 2])
    backend = mc.create_backend("torch", mesh)
    plan = mc.plan_chunks([mc.ParamSpec("w", (1,))], shards=2)
    try:
        with mc.ChunkManager(backend, plan) as manager:
            manager.accumulate_grad("w", [1.0])
            manager.reduce_grads(divisor=1)
            return float(manager.grad("w")[0])
    except mc.NotInMeshError as error:
        return f"{type(error).__name__} with {len(backend.local_ranks)} local ranks"
    finally:
        backend.close()
