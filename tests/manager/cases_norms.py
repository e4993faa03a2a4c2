"""The global norm, overflow, clipping and scaling."""

from __future__ import annotations

import math

import numpy as np
from manager_support import by_rank, elementwise, equal, ints, make, on, raises

import meshcore as mc
from meshcore.backend import Backend
from meshcore.testing import line


@on(line(0, 1), line(1, 0))
def case_norm_and_clip(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("a", (2,)), mc.ParamSpec("b", (2,))], capacity=4) as manager:
        manager.load_zeros()
        for memory in (mc.Memory.DEVICE, mc.Memory.HOST):
            manager.zero_grads()
            manager.accumulate_grad("a", np.array([3, 0], np.float32))
            manager.accumulate_grad("b", np.array([0, 4], np.float32))
            manager.reduce_grads()
            manager.move("a", memory, kinds=("grad",))
            assert manager.grad_norm() == 5.0
            assert manager.grad_norm() == 5.0
            assert manager.clip_grad_norm(2.5) == 5.0
            np.testing.assert_allclose(manager.to_numpy("a", of="grad"), [1.5, 0], atol=1e-6)
            np.testing.assert_allclose(manager.to_numpy("b", of="grad"), [0, 2], atol=1e-6)
            assert abs(manager.grad_norm() - 2.5) < 1e-6
            assert manager.memory().used[memory.value]["grad"] == 8


def case_padding_gaps_and_replicas_do_not_count(backend: Backend) -> None:
    specs = [mc.ParamSpec("a", (3,)), mc.ParamSpec("b", (5,)), mc.ParamSpec("t", (2,), ties=("u",))]
    with make(backend, specs, alignment=16) as manager:
        assert manager.plan.waste_nbytes > 0
        manager.load_zeros()
        for name, numel in (("a", 3), ("b", 5), ("t", 2), ("u", 2)):
            manager.accumulate_grad(name, by_rank(backend, lambda p, n=numel: ints((n,), 2)))
        manager.reduce_grads()
        spoil_the_rest(manager)
        squares = [np.sum(ints((n,), 2).astype(np.float64) ** 2) for n in (3, 5)]
        squares.append(np.sum((2 * ints((2,), 2)).astype(np.float64) ** 2))
        wanted = math.sqrt(sum(squares))
        assert abs(manager.grad_norm() - wanted) < 1e-9
        assert not manager.found_nonfinite()


def spoil_the_rest(manager: mc.ChunkManager) -> None:
    """Fill padding and gaps of the reduced gradient with NaN."""

    def step(chunk: mc.ChunkUpdate, arrays: dict) -> dict:
        layout = chunk.layout
        used = np.zeros(layout.numel, bool)
        for slot in layout.slots:
            used[slot.start : slot.stop] = True
        return {"grad": nan_where(arrays["grad"], ~used, manager.backend, chunk)}

    manager.update(step)


def nan_where(array: object, where: np.ndarray, backend: Backend, chunk: mc.ChunkUpdate) -> object:
    parts = []
    for rank in backend.local_ranks:
        start = 0
        stop = len(where)
        if chunk.placement is mc.Placement.SHARDED:
            start = chunk.roles.shard_index(rank) * chunk.layout.shard_numel
            stop = start + chunk.layout.shard_numel
        parts.append(where[start:stop])
    if isinstance(array, tuple):
        for piece, part in zip(array, parts, strict=True):
            piece[part] = np.nan
        return array
    if hasattr(array, "copy_"):
        for index in np.flatnonzero(parts[0]):
            array[int(index)] = math.nan
        return array
    return array.at[np.flatnonzero(where)].set(math.nan)


def case_norm_of_unused_tensors(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("a", (3,)), mc.ParamSpec("b", (3,))]) as manager:
        manager.load_zeros()
        assert manager.grad_norm() == 0.0
        assert not manager.found_nonfinite()
        manager.accumulate_grad("a", np.full(3, 2, np.float32))
        manager.reduce_grads()
        assert abs(manager.grad_norm() - math.sqrt(12)) < 1e-12


def case_norm_over_mixed_dtypes(backend: Backend) -> None:
    specs = [mc.ParamSpec("a", (3,)), mc.ParamSpec("b", (2,), "bfloat16"), mc.ParamSpec("c", (1,))]
    with make(backend, specs, capacity=3) as manager:
        manager.load_zeros()
        manager.accumulate_grad("a", np.full(3, 2, np.float32))
        manager.accumulate_grad("b", np.full(2, 3, np.float32))
        manager.move("b", mc.Memory.HOST, kinds=("grad",))  # nothing is there yet
        manager.reduce_grads()
        manager.move("b", mc.Memory.HOST, kinds=("grad",))
        assert abs(manager.grad_norm() - math.sqrt(30)) < 1e-12
        assert manager.memory().used["device"]["staging"] == 0
        manager.audit()


def case_one_overflow_is_seen_by_all(backend: Backend) -> None:
    last = backend.mesh.ids[-1]
    for bad in (math.inf, -math.inf, math.nan):
        with make(backend, [mc.ParamSpec("a", (4,)), mc.ParamSpec("b", (4,))]) as manager:
            manager.load_zeros()
            for rank in backend.local_ranks:
                manager.accumulate_grad("a", {rank: np.ones(4, np.float32)})
            if last in backend.local_ranks:
                value = np.ones(4, np.float32)
                value[2] = bad
                manager.accumulate_grad("b", {last: value})
            manager.reduce_grads()
            assert manager.found_nonfinite()
            assert not math.isfinite(manager.clip_grad_norm(1.0))
            equal(manager.grad("a"), np.ones(4))  # clipping left it alone
            manager.zero_grads()
            assert not manager.found_nonfinite()


def case_large_gradients_do_not_overflow_the_norm(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("a", (4,))]) as manager:
        manager.load_zeros()
        manager.accumulate_grad("a", np.full(4, 2.0**100, np.float32))
        manager.reduce_grads()
        assert not manager.found_nonfinite()
        np.testing.assert_allclose(manager.grad_norm(), 2.0**101, rtol=1e-6)


def case_scaling_changes_gradient_and_norm(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("a", (4,)), mc.ParamSpec("b", (2,), group="b")]) as manager:
        manager.load_zeros()
        manager.scale_grads(3.0)  # nothing to scale
        manager.accumulate_grad("a", np.full(4, 8, np.float32))
        manager.reduce_grads()
        assert manager.grad_norm() == 16.0
        manager.scale_grads(0.25)
        assert manager.grad_norm() == 4.0
        equal(manager.grad("a"), np.full(4, 2))
        assert manager.clip_grad_norm(4.0) == 4.0
        equal(manager.grad("a"), np.full(4, 2))
        manager.accumulate_grad("a", np.full(4, 1, np.float32))
        manager.reduce_grads()
        assert manager.grad_norm() == 6.0


def case_the_norm_follows_every_change(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("a", (4,))]) as manager:
        manager.load_zeros()
        manager.accumulate_grad("a", np.ones(4, np.float32))
        manager.reduce_grads()
        assert manager.grad_norm() == 2.0
        manager.zero_grads()
        assert manager.grad_norm() == 0.0
        manager.accumulate_grad("a", np.full(4, 2, np.float32))
        manager.reduce_grads()
        assert manager.grad_norm() == 4.0
        with raises(mc.SpecError, "'zero'"):
            manager.reduce_grads(unused="")
        assert manager.grad_norm() == 4.0
        manager.update(lambda chunk, arrays: {"grad": elementwise(lambda g: 2 * g, arrays["grad"])})
        assert manager.grad_norm() == 8.0
