"""Accumulating and reducing gradients."""

from __future__ import annotations

import numpy as np
from manager_support import all_used, by_rank, equal, ints, make, on, over_ranks, peak, raises, used

import meshcore as mc
from meshcore.backend import Backend
from meshcore.testing import grid, line


def ones(*shape: int, value: float = 1.0) -> np.ndarray:
    return np.full(shape, value, np.float32)


@on(line(0, 1), line(1, 0))
def case_two_chunks_that_are_exactly_full(backend: Backend) -> None:
    specs = [mc.ParamSpec("a", (8,)), mc.ParamSpec("b", (8,))]
    with make(backend, specs, capacity=8) as manager:
        assert len(manager.chunks) == 2
        assert manager.plan.waste_nbytes == 0
        manager.load_zeros()
        for name in "ab":
            manager.accumulate_grad(name, by_rank(backend, lambda p: ones(8, value=1 + 2 * p)))
        manager.reduce_grads()
        equal(manager.grad("a"), ones(8, value=2))
        equal(manager.grad("b"), ones(8, value=2))


@on(line(0, 1, 2, 3), line(2, 0, 3, 1), grid((2, 0, 3, 1), 1, 4))
def case_fewer_elements_than_ranks(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (1,))]) as manager:
        layout = manager.plan.chunks[0]
        assert layout.shard_numel == 1
        assert [layout.valid_numel(i) for i in range(4)] == [1, 0, 0, 0]
        manager.load({"w": ints((1,), 7)})
        manager.accumulate_grad("w", by_rank(backend, lambda p: ones(1, value=p + 1)))
        manager.reduce_grads()
        equal(manager.grad("w"), [2.5])
        assert manager.grad_norm() == 2.5
        equal(manager.to_numpy("w"), [7])


@on(line(0, 1))
def case_frozen_tensors_cost_no_gradient_bytes(backend: Backend) -> None:
    specs = [mc.ParamSpec("base", (1000,), "bfloat16", False), mc.ParamSpec("adapter", (10,))]
    with make(backend, specs) as manager:
        manager.load_zeros()
        manager.add_state("exp_avg")
        assert used(manager, "optimizer") == 20
        manager.access("base", "adapter")
        assert used(manager, "grad") == 0
        manager.accumulate_grad("adapter", ones(10))
        assert used(manager, "grad") == 40
        manager.reduce_grads()
        assert peak(manager, "grad") == 60
        assert used(manager, "grad") == 20
        with raises(mc.FrozenTensorError, "'base'", "frozen", builtin=ValueError):
            manager.accumulate_grad("base", np.zeros(1000, np.float32), cast=True)
        manager.zero_grads()
        assert used(manager, "grad") == 0


@on(line(0, 1))
def case_a_tied_tensor_has_one_gradient(backend: Backend) -> None:
    specs = [mc.ParamSpec("a.weight", (5, 2), ties=("b.weight",))]
    with make(backend, specs, capacity=4) as manager:
        assert manager.plan.param_nbytes == 40
        manager.load_zeros()
        manager.accumulate_grad("a.weight", ones(5, 2, value=1))
        assert not manager.can_reduce("a.weight")
        manager.accumulate_grad("b.weight", ones(5, 2, value=2))
        assert manager.can_reduce("b.weight")
        manager.reduce_grads()
        equal(manager.grad("b.weight"), ones(5, 2, value=3))
        assert manager.grad_norm() == 9.486832980505138
        calls = []

        def step(chunk: mc.ChunkUpdate, arrays: dict) -> dict:
            calls.append([slot.name for slot in chunk.used])
            return {}

        manager.update(step)
        assert calls == [["a.weight"]]


@on(line(0), grid((0,), 1, 1))
def case_world_of_one_three_micro_steps(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (2,))]) as manager:
        manager.load_zeros()
        for _ in range(3):
            manager.accumulate_grad("w", ones(2))
        manager.reduce_grads()
        equal(manager.grad("w"), [3, 3])
        manager.zero_grads()
        for _ in range(3):
            manager.accumulate_grad("w", ones(2))
            manager.reduce_grads()
        equal(manager.grad("w"), [3, 3])
        manager.zero_grads()
        for _ in range(3):
            manager.accumulate_grad("w", ones(2))
        manager.reduce_grads(divisor=3)
        equal(manager.grad("w"), [1, 1])


@on(grid((0, 1), 1, 2), grid((1, 0), 2, 1))
def case_an_axis_of_one_changes_nothing(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (3,))]) as manager:
        manager.load_zeros()
        for _ in range(3):
            manager.accumulate_grad("w", by_rank(backend, lambda p: ones(3, value=p + 1)))
            manager.reduce_grads()
        equal(manager.grad("w"), ones(3, value=4.5))


def case_the_mean_is_over_all_ranks(backend: Backend) -> None:
    size = backend.mesh.size
    with make(backend, [mc.ParamSpec("w", (7,)), mc.ParamSpec("s", ())]) as manager:
        manager.load_zeros()

        def gradient(position: int) -> np.ndarray:
            return size * (ints((7,)) + 10 * position)

        manager.accumulate_grad("w", by_rank(backend, gradient))
        manager.accumulate_grad("s", np.float32(5))
        manager.reduce_grads()
        equal(manager.grad("w"), over_ranks(backend, gradient) / size)
        equal(manager.grad("s"), np.float32(5))
        equal(manager.to_numpy("w", of="grad"), over_ranks(backend, gradient) / size)
        manager.audit()


def case_micro_batches_equal_one_big_step(backend: Backend) -> None:
    specs = [mc.ParamSpec("a", (5,)), mc.ParamSpec("b", (2, 3), "bfloat16")]

    def gradient(step: int) -> dict[int, np.ndarray]:
        return by_rank(backend, lambda p: ints((5,), 3 * p + step))

    with make(backend, specs) as manager:
        manager.load_zeros()
        results = []
        for reduce_each in (False, True):
            for step in range(4):
                manager.accumulate_grad("a", gradient(step))
                manager.accumulate_grad("b", ones(2, 3, value=step))
                if reduce_each:
                    manager.reduce_grads(divisor=2)
            if not reduce_each:
                manager.reduce_grads(divisor=2)
            results.append([manager.to_numpy(name, of="grad") for name in "ab"])
            manager.zero_grads()
        whole = sum(over_ranks(backend, lambda p, s=s: ints((5,), 3 * p + s)) for s in range(4))
        equal(results[0][0], whole / 2)
        equal(results[1][0], whole / 2)
        for a_result in results:
            assert a_result[1].dtype == np.float32
            equal(a_result[1], ones(2, 3, value=3 * backend.mesh.size))


def case_low_precision_gradients_add_up_in_float32(backend: Backend) -> None:
    import ml_dtypes

    with make(backend, [mc.ParamSpec("w", (3,), "bfloat16")]) as manager:
        manager.load_zeros()
        manager.accumulate_grad("w", np.full(3, 256, ml_dtypes.bfloat16))
        manager.accumulate_grad("w", np.full(3, 1, ml_dtypes.bfloat16))
        manager.accumulate_grad("w", ones(3, value=0.5))
        manager.reduce_grads(divisor=1)
        equal(manager.grad("w"), ones(3, value=257.5 * backend.mesh.size))


def case_gradients_may_be_kept_in_low_precision(backend: Backend) -> None:
    import ml_dtypes

    with make(backend, [mc.ParamSpec("w", (8,))], grad_dtype="bfloat16") as manager:
        manager.load_zeros()
        manager.accumulate_grad("w", ints((8,), 1))
        layout = manager.plan.chunks[0]
        assert used(manager, "grad") == 2 * layout.numel
        with raises(mc.DtypeMismatchError, "'w'", "bfloat16"):
            manager.accumulate_grad("w", ints((8,)).astype(ml_dtypes.bfloat16))
        manager.reduce_grads(divisor=1)
        equal(manager.grad("w"), backend.mesh.size * ints((8,), 1))
        assert used(manager, "grad") == 4 * layout.numel // backend.roles.shards
    with make(backend, [mc.ParamSpec("w", (8,))], compute_dtype="bfloat16") as manager:
        manager.load_zeros()
        manager.accumulate_grad("w", ints((8,)).astype(ml_dtypes.bfloat16))
        manager.reduce_grads(divisor=1)
        equal(manager.grad("w"), backend.mesh.size * ints((8,)))


def case_bad_gradients_change_nothing(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (2, 3))]) as manager:
        manager.load_zeros()
        before = all_used(manager)
        with raises(mc.ShapeMismatchError, "'w'", "(2, 3)", "(3, 2)"):
            manager.accumulate_grad("w", ones(3, 2))
        with raises(mc.DtypeMismatchError, "'w'", "float64"):
            manager.accumulate_grad("w", np.ones((2, 3)))
        with raises(mc.ShapeMismatchError, "'w'", "(2, 3)", "(6,)"):
            manager.accumulate_grad("w", by_rank(backend, lambda p: ones(6)))
        with raises(mc.NotInMeshError, "99", str(list(backend.local_ranks)), builtin=RuntimeError):
            manager.accumulate_grad("w", {99: ones(2, 3)})
        with raises(mc.NotInMeshError, "99"):
            manager.mark_unused("w", ranks=[99])
        assert all_used(manager) == before
        assert not manager.can_reduce("w")
        manager.accumulate_grad("w", np.ones((2, 3)), cast=True)
        manager.reduce_grads()
        equal(manager.grad("w"), ones(2, 3))


@on(line(0, 1), grid((1, 0), 2, 1))
def case_means_of_unequal_batches(backend: Backend) -> None:
    tokens, means = (3, 1), (1.0, 5.0)
    with make(backend, [mc.ParamSpec("w", (2,))]) as manager:
        manager.load_zeros()
        manager.accumulate_grad("w", by_rank(backend, lambda p: ones(2, value=means[p])))
        manager.reduce_grads()
        equal(manager.grad("w"), ones(2, value=3))
        manager.zero_grads()
        weighted = by_rank(backend, lambda p: ones(2, value=means[p] * tokens[p]))
        manager.accumulate_grad("w", weighted)
        manager.reduce_grads(divisor=sum(tokens))
        equal(manager.grad("w"), ones(2, value=2))


def case_reducing_unit_by_unit(backend: Backend) -> None:
    specs = [mc.ParamSpec(name, (3,), group=name) for name in "abc"]
    with make(backend, specs) as manager:
        manager.load_zeros()
        for name in "cba":
            manager.accumulate_grad(name, ones(3))
            manager.reduce_grads(names=[name], unused="error")
            equal(manager.grad(name), ones(3))
        manager.accumulate_grad("a", ones(3))
        manager.reduce_grads(names=["b", "b"])
        equal(manager.grad("b"), ones(3))
        equal(manager.grad("a"), ones(3))
        manager.reduce_grads()
        equal(manager.grad("a"), ones(3, value=2))


def case_arguments_of_a_reduce(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (3,))]) as manager:
        manager.load_zeros()
        manager.accumulate_grad("w", ones(3, value=backend.mesh.size))
        with raises(mc.SpecError, "'zero'", "'error'", "'ignore'", builtin=ValueError):
            manager.reduce_grads(unused="ignore")
        for divisor in (0, float("nan"), float("inf")):
            with raises(mc.SpecError, "divisor", str(float(divisor))):
                manager.reduce_grads(divisor=divisor)
        manager.reduce_grads(divisor=-2 * backend.mesh.size)
        equal(manager.grad("w"), ones(3, value=-0.5 * backend.mesh.size))


def case_gradients_given_out_are_copies(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (3,))]) as manager:
        manager.load_zeros()
        manager.accumulate_grad("w", ones(3))
        manager.reduce_grads()
        kept = manager.grad("w")
        manager.scale_grads(4.0)
        manager.zero_grads()
        equal(kept, ones(3))
