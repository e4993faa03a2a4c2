"""Look-ups, names, repr, and what a manager refuses to be made of."""

from __future__ import annotations

from manager_support import make, on, raises, three

import meshcore as mc
from meshcore.backend import Backend
from meshcore.testing import line

COMPUTE, HOLD, FREE = mc.TensorState.COMPUTE, mc.TensorState.HOLD, mc.TensorState.FREE
READY, AFTER_BWD = mc.TensorState.READY_FOR_REDUCE, mc.TensorState.HOLD_AFTER_BWD


def case_unknown_names_are_named(backend: Backend) -> None:
    specs = [mc.ParamSpec("layer.weight", (3,)), mc.ParamSpec("layer.bias", (2,))]
    with make(backend, specs) as manager:
        manager.load_zeros()
        verbs = (
            manager.access,
            manager.access_async,
            manager.release,
            manager.read,
            manager.state,
            manager.grad,
            manager.mark_unused,
            manager.to_numpy,
            manager.chunk_of,
            manager.can_reduce,
        )
        words = ("'layer.weigth'", "'layer.weight'", "did you mean")
        for verb in verbs:
            with raises(mc.UnknownTensorError, *words, builtin=LookupError):
                verb("layer.weigth")
        with raises(mc.UnknownTensorError, *words):
            manager.access("layer.bias", "layer.weigth")
        assert not manager.is_gathered("layer.bias")
        with raises(mc.UnknownTensorError, *words):
            manager.move("layer.weigth", mc.Memory.HOST)
        with raises(mc.UnknownTensorError, *words):
            manager.reduce_grads(names=["layer.weigth"])


def case_look_ups(backend: Backend) -> None:
    with three(backend) as manager:
        first, second = manager.chunks
        assert manager.chunk_of("b") is first
        assert manager.chunks_of("c", "a", "b") == (first, second)
        assert first.layout is manager.plan.chunks[0]
        assert (first.name, first.is_loaded, first.memory) == ("param.0", True, mc.Memory.DEVICE)
        assert first.states == {"a": HOLD, "b": HOLD}
        assert manager.plan.names == ("a", "b", "c")


def case_repr_is_for_people(backend: Backend) -> None:
    with three(backend) as manager:
        manager.access("c")
        text = repr(manager)
        roles = backend.roles
        wanted = f"2 chunks, {roles.shards} shards x {roles.replicas} replicas"
        for word in (backend.name, wanted, "param.0", "param.1", "gathered", "float32", "total"):
            assert word in text, f"{word!r} is not in {text}"
        assert max(map(len, text.splitlines())) <= 100
    assert repr(manager) == "ChunkManager(closed)"


@on(line(0, 1))
def case_a_long_repr_is_cut(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec(f"t{i}", (2,)) for i in range(25)], capacity=2) as manager:
        assert "not loaded" in repr(manager)
        assert "and 5 more" in repr(manager)


def case_a_plan_for_other_shards(backend: Backend) -> None:
    shards = backend.roles.shards
    plan = mc.plan_chunks([mc.ParamSpec("w", (3,))], shards=shards + 1)
    words = (f"{shards + 1} shards", f"has {shards}", f"shards={shards}")
    with raises(mc.PlanMismatchError, *words, builtin=RuntimeError):
        mc.ChunkManager(backend, plan)


def case_dtypes_that_a_backend_lacks(backend: Backend) -> None:
    plan = mc.plan_chunks([mc.ParamSpec("w", (3,))], shards=backend.roles.shards)
    with raises(mc.SpecError, "float33", builtin=ValueError):
        mc.ParamSpec("w", (3,), "float33")
    for option in ("compute_dtype", "grad_dtype"):
        with raises(mc.SpecError, "int32", "floating"):
            mc.ChunkManager(backend, plan, **{option: "int32"})
        with raises(mc.UnsupportedDtypeError, backend.name, "float33", builtin=TypeError):
            mc.ChunkManager(backend, plan, **{option: "float33"})
