"""Tensors that some or all ranks have no gradient for."""

from __future__ import annotations

import numpy as np
from manager_support import all_used, equal, make, on, raises

import meshcore as mc
from meshcore.backend import Backend
from meshcore.testing import grid, line


def ones(*shape: int, value: float = 1.0) -> np.ndarray:
    return np.full(shape, value, np.float32)


def case_tensors_without_gradients(backend: Backend) -> None:
    specs = [mc.ParamSpec("count", (3,), "int32"), mc.ParamSpec("w", (2,), trainable=False)]
    with make(backend, specs) as manager:
        manager.load_zeros()
        before = all_used(manager)
        for call in (manager.grad, manager.mark_unused, manager.can_reduce):
            with raises(mc.FrozenTensorError, "'count'", "int32"):
                call("count")
            with raises(mc.FrozenTensorError, "'w'", "frozen"):
                call("w")
        with raises(mc.FrozenTensorError, "'count'"):
            manager.accumulate_grad("count", np.ones(3, np.int32))
        with raises(mc.FrozenTensorError, "'w'"):
            manager.reduce_grads(names=["w"])
        manager.reduce_grads(unused="error")
        manager.zero_grads()
        assert manager.grad_norm() == 0.0
        assert all_used(manager) == before


def case_a_tie_that_has_no_gradient_is_missed(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (2,), ties=("v",))]) as manager:
        manager.load_zeros()
        manager.accumulate_grad("w", ones(2))
        with raises(mc.UnusedGradientError, "'v'"):
            manager.reduce_grads(unused="error")
        manager.mark_unused("v")
        manager.reduce_grads(unused="error")
        equal(manager.grad("v"), ones(2))


@on(line(0, 1), line(1, 0), grid((1, 0), 2, 1))
def case_unused_on_some_ranks(backend: Backend) -> None:
    first, second = backend.mesh.ids
    specs = [mc.ParamSpec("A", (3,)), mc.ParamSpec("B", (2,))]
    with make(backend, specs) as manager:
        manager.load_zeros()
        for rank in backend.local_ranks:
            if rank == first:
                manager.accumulate_grad("A", {rank: ones(3)})
            else:
                manager.accumulate_grad("B", {rank: ones(2)})
        words = (f"'A' on rank(s) [{second}]", f"'B' on rank(s) [{first}]", "mark_unused")
        with raises(mc.UnusedGradientError, *words, builtin=RuntimeError):
            manager.reduce_grads(unused="error")
        with raises(mc.NoGradientError, "'A'", "reduce_grads", builtin=RuntimeError):
            manager.grad("A")
        manager.reduce_grads(unused="zero")
        equal(manager.grad("A"), ones(3, value=0.5))
        equal(manager.grad("B"), ones(2, value=0.5))


def case_a_rank_without_any_gradient_adds_zeros(backend: Backend) -> None:
    last = backend.mesh.ids[-1]
    with make(backend, [mc.ParamSpec("w", (3,))]) as manager:
        manager.load_zeros()
        if last in backend.local_ranks:
            manager.accumulate_grad("w", {last: ones(3, value=6)})
        manager.mark_unused("w", ranks=[r for r in backend.local_ranks if r != last])
        manager.reduce_grads(divisor=2, unused="error")
        equal(manager.grad("w"), ones(3, value=3))
        manager.audit()


def case_what_nobody_used_has_no_gradient(backend: Backend) -> None:
    specs = [mc.ParamSpec("a", (3,)), mc.ParamSpec("b", (2,)), mc.ParamSpec("c", (4,), group="c")]
    with make(backend, specs) as manager:
        manager.load_zeros()
        assert manager.grads("a", "b", "c") == {"a": None, "b": None, "c": None}
        manager.accumulate_grad("a", ones(3))
        manager.mark_unused("b")
        with raises(mc.UnusedGradientError, "'c'"):
            manager.reduce_grads(unused="error")
        manager.mark_unused("c")
        manager.reduce_grads(unused="error")
        read = manager.grads("c", "a", "b")
        assert list(read) == ["c", "a", "b"]
        assert (read["b"], read["c"]) == (None, None)
        equal(read["a"], ones(3))
        with raises(mc.UnusedGradientError, "'a'", "'b'", "'c'"):
            manager.reduce_grads(unused="error")  # marks are used up
        equal(manager.grad("a"), ones(3))
        manager.zero_grads()
        assert manager.grad("a") is None


def case_a_gradient_that_is_not_reduced(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("a", (3,)), mc.ParamSpec("b", (3,))]) as manager:
        manager.load_zeros()
        manager.accumulate_grad("a", ones(3))
        for name in "ab":
            with raises(mc.NoGradientError, f"'{name}'", "reduce_grads"):
                manager.grad(name)
            with raises(mc.NoGradientError, "param.0"):
                manager.to_numpy(name, of="grad")
        assert manager.grad_norm() == 0.0
        manager.reduce_grads()
        manager.accumulate_grad("a", ones(3, value=8))
        equal(manager.grad("a"), ones(3))


def case_marks_do_not_take_back_a_gradient(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (3,))]) as manager:
        manager.load_zeros()
        manager.accumulate_grad("w", ones(3))
        manager.mark_unused("w")
        manager.reduce_grads()
        equal(manager.grad("w"), ones(3))
        manager.mark_unused("w")
        manager.accumulate_grad("w", ones(3))
        manager.reduce_grads()
        equal(manager.grad("w"), ones(3, value=2))


def case_gradients_need_no_values(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (3,))]) as manager:
        manager.accumulate_grad("w", {})
        assert all(n == 0 for row in manager.memory().used.values() for n in row.values())
        manager.accumulate_grad("w", ones(3))
        manager.reduce_grads()
        equal(manager.grad("w"), ones(3))
