"""Every case of the chunk manager in four gloo processes, and what a rank outside a mesh may do."""

import pytest
from cases import ManagerCases
from manager_support import equal, ints, make, raises

import meshcore as mc
from meshcore.testing import FaultyBackend, grid, line

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

    def test_one_rank_without_memory_is_known_to_all(self) -> None:
        answers = self.harness.workers.run(gather_where_one_rank_has_no_memory)
        assert all("no memory for param.0.full" in text for text in answers)
        assert all("rank(s) [2]" in text for rank, text in enumerate(answers) if rank != 2)
        assert "64 bytes" in answers[2]
        assert all("injected" in text for text in answers)

    def test_one_rank_without_memory_for_zeros_is_known_to_all(self) -> None:
        answers = self.harness.workers.run(reduce_where_one_rank_has_no_memory)
        assert all("no memory for param.0.grad_full" in text for text in answers)
        assert all("injected" in text for text in answers)

    def test_ranks_with_other_arguments_are_told(self) -> None:
        answers = self.harness.workers.run(reduce_with_other_divisors)
        assert ["[1]" in text for text in answers] == [True, False, True, True]
        assert "[0, 2, 3]" in answers[1]

    def test_ranks_with_other_plans_are_told(self) -> None:
        answers = self.harness.workers.run(make_other_plans)
        assert ["[3]" in text for text in answers] == [True, True, True, False]
        assert "[0, 1, 2]" in answers[3]


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


def backend_where(rank: int, verb: str) -> FaultyBackend:
    """A torch backend over four ranks, to fail for lack of memory on one of them."""
    backend = mc.create_backend("torch", mc.DeviceMesh(range(4)))
    verbs = (verb,) if rank in backend.local_ranks else ()
    return FaultyBackend(backend, verbs=verbs, error=MemoryError)


def gather_where_one_rank_has_no_memory() -> str:
    backend = backend_where(2, "empty")
    with make(backend, [mc.ParamSpec("w", (16,))]) as manager:
        manager.load({"w": ints((16,))})
        taken = manager.pool.zeros("taken", mc.Category.STAGING, whole(16))  # the shell of loading
        before = str(manager.memory().used)
        backend.fail_at = backend.calls
        expected = raises(mc.DeviceMemoryError, builtin=MemoryError)
        with expected:
            manager.access("w")
        assert str(manager.memory().used) == before
        backend.fail_at = None
        manager.pool.free(taken)
        manager.access("w")
        equal(manager.read("w"), ints((16,)))
    backend.close()
    return str(expected.caught)


def whole(numel: int) -> mc.BufferSpec:
    return mc.BufferSpec(numel, "float32", mc.Placement.REPLICATED)


def reduce_where_one_rank_has_no_memory() -> str:
    backend = backend_where(1, "zeros")
    with make(backend, [mc.ParamSpec("w", (16,))]) as manager:
        if 0 in backend.local_ranks:
            manager.accumulate_grad("w", ints((16,)))
        backend.fail_at = backend.calls
        expected = raises(mc.DeviceMemoryError, builtin=MemoryError)
        with expected:
            manager.reduce_grads()
        manager.audit()
        manager.reduce_grads(divisor=1)
        equal(manager.grad("w"), ints((16,)))
    backend.close()
    return str(expected.caught)


def reduce_with_other_divisors() -> str:
    backend = mc.create_backend("torch", mc.DeviceMesh(range(4)))
    with make(backend, [mc.ParamSpec("w", (16,))]) as manager:
        manager.accumulate_grad("w", ints((16,)))
        expected = raises(mc.PlanMismatchError, "divisor", builtin=RuntimeError)
        with expected:
            manager.reduce_grads(divisor=3 if 1 in backend.local_ranks else 4)
        manager.reduce_grads()
        equal(manager.grad("w"), ints((16,)))
    backend.close()
    return str(expected.caught)


def make_other_plans() -> str:
    backend = mc.create_backend("torch", mc.DeviceMesh(range(4)))
    name = "v" if 3 in backend.local_ranks else "w"
    expected = raises(mc.PlanMismatchError, "plan", builtin=RuntimeError)
    with expected:
        make(backend, [mc.ParamSpec(name, (16,))])
    backend.close()
    return str(expected.caught)
