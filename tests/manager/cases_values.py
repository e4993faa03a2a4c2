"""Loading, reading and writing tensors of every kind."""

from __future__ import annotations

import numpy as np
from manager_support import (
    all_used,
    equal,
    ints,
    make,
    on,
    raises,
    random_values,
    used,
)

import meshcore as mc
from meshcore.backend import Backend
from meshcore.dtypes import numpy_dtype
from meshcore.testing import line

KINDS = (
    mc.ParamSpec("matrix", (5, 3)),
    mc.ParamSpec("scalar", ()),
    mc.ParamSpec("empty", (0, 4)),
    mc.ParamSpec("single", (1,)),
    mc.ParamSpec("exactly_a_chunk", (4, 4)),
    mc.ParamSpec("larger_than_a_chunk", (9, 5)),
    mc.ParamSpec("low", (3, 3), "bfloat16"),
    mc.ParamSpec("half", (7,), "float16"),
    mc.ParamSpec("step", (), "int32"),
    mc.ParamSpec("mask", (6,), "bool"),
    mc.ParamSpec("frozen", (4, 3), trainable=False),
    mc.ParamSpec("tied", (2, 5), ties=("tied.too", "tied.again")),
)


def kinds_of(backend: Backend) -> list[mc.ParamSpec]:
    return [spec for spec in KINDS if spec.dtype in backend.profile.dtypes]


@on(line(0, 1, 2), line(2, 0, 1))
def case_odd_world(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (8,))], capacity=8) as manager:
        layout = manager.plan.chunks[0]
        assert (layout.shard_numel, layout.numel) == (3, 9)
        assert [layout.valid_numel(i) for i in range(3)] == [3, 3, 2]
        assert layout.waste_nbytes == 4
        manager.load({"w": np.arange(8, dtype=np.float32)})
        assert used(manager, "param") == 12
        with manager.gathered("w") as values:
            equal(values["w"], np.arange(8))
        assert used(manager, "param") == 12


@on(line(0, 1))
def case_empty_and_scalar_among_others(backend: Backend) -> None:
    shapes = {"a": (3,), "z": (0, 4), "s": (), "b": (2,)}
    values = {name: ints(shape, 7) for name, shape in shapes.items()}
    with make(backend, [mc.ParamSpec(n, s) for n, s in shapes.items()]) as manager:
        assert [(s.start, s.stop) for s in manager.plan.chunks[0].slots][-1] == (4, 6)
        manager.load(values)
        with manager.gathered(*shapes) as read:
            for name, shape in shapes.items():
                assert tuple(read[name].shape) == shape
                equal(read[name], values[name])
        for name in ("a", "s"):
            manager.accumulate_grad(name, values[name])
            assert not manager.can_reduce("z")
        manager.accumulate_grad("b", values["b"])
        assert manager.can_reduce("z")
        manager.mark_unused("z")
        assert manager.can_reduce("a")
        manager.reduce_grads(unused="error")
        equal(manager.to_numpy("s", of="grad"), np.float32(7))


def case_transposed_and_strided(backend: Backend) -> None:
    transposed = np.arange(6, dtype=np.float32).reshape(2, 3).T
    strided = np.arange(40, dtype=np.float32).reshape(4, 10)[::2, 1::3]
    assert not transposed.flags.c_contiguous
    specs = [mc.ParamSpec("t", (3, 2)), mc.ParamSpec("s", strided.shape)]
    with make(backend, specs) as manager:
        manager.load({"t": transposed, "s": strided})
        with manager.gathered("t", "s") as values:
            equal(values["t"], [[0, 3], [1, 4], [2, 5]])
            equal(values["t"].reshape(-1), [0, 3, 1, 4, 2, 5])
            equal(values["s"], strided)
        manager.accumulate_grad("t", 12 * transposed)
        manager.accumulate_grad("s", np.asfortranarray(12 * strided))
        manager.reduce_grads()
        equal(manager.grad("t"), 12 * transposed)
        equal(manager.grad("s"), 12 * strided)


def case_every_kind_of_tensor(backend: Backend) -> None:
    specs = kinds_of(backend)
    values = {spec.name: random_values(spec, 3) for spec in specs}
    for capacity in (16, None):
        with make(backend, specs, capacity=capacity, alignment=4) as manager:
            manager.load(values)
            manager.access(*values)
            for spec in specs:
                read = manager.read(spec.name)
                assert tuple(read.shape) == spec.shape
                equal(read, values[spec.name])
            manager.release(*values)
            for spec in specs:
                back = manager.to_numpy(spec.name)
                assert back.dtype == numpy_dtype(spec.dtype)
                assert back.flags.owndata
                assert back.flags.writeable
                equal(back, values[spec.name])
            manager.audit()
        assert all(nbytes == 0 for row in manager.memory().used.values() for nbytes in row.values())


def case_a_tie_is_the_tensor(backend: Backend) -> None:
    value = ints((2, 5), 1)
    with make(backend, kinds_of(backend)) as manager:
        manager.load({"tied.too": value})
        manager.access("tied.again")
        for name in ("tied", "tied.too", "tied.again"):
            equal(manager.read(name), value)
            equal(manager.to_numpy(name), value)
            assert manager.is_gathered(name)
            assert manager.chunk_of(name) is manager.chunk_of("tied")
        manager.set_state("tied.too", mc.TensorState.COMPUTE)
        assert manager.state("tied") is mc.TensorState.COMPUTE
        manager.set_state("tied", mc.TensorState.HOLD)
        manager.write({"tied.again": value + 1})
        equal(manager.read("tied"), value + 1)
        with raises(mc.DuplicateNameError, "'tied.too'", "'tied'", builtin=ValueError):
            manager.load({"tied": value, "tied.too": value + 2})
        manager.load({"tied": value, "tied.too": value})
        equal(manager.read("tied"), value)


def case_loading_a_part_keeps_the_rest(backend: Backend) -> None:
    specs = [mc.ParamSpec(name, (3,)) for name in "abc"]
    with make(backend, specs) as manager:
        manager.load({"a": ints((3,), 1)})
        states = [manager.state(name) for name in "abc"]
        assert states == [mc.TensorState.HOLD, mc.TensorState.FREE, mc.TensorState.FREE]
        manager.access("a")
        with raises(mc.NotGatheredError, "'b'", "never loaded", builtin=RuntimeError):
            manager.read("b")
        manager.load({"c": ints((3,), 7)})
        for name, start in (("a", 1), ("c", 7)):
            equal(manager.read(name), ints((3,), start))
        manager.load_zeros()
        equal(manager.read("a"), ints((3,), 1))
        equal(manager.read("b"), np.zeros(3))
        manager.load({name: ints((3,), 20) for name in "abc"})
        equal(manager.read("b"), ints((3,), 20))
        manager.audit()


def case_dtypes_are_not_changed_silently(backend: Backend) -> None:
    value = np.full((2,), 256.5, np.float32)
    with make(backend, [mc.ParamSpec("w", (2,), "bfloat16"), mc.ParamSpec("v", (2,))]) as manager:
        words = ("'w'", "bfloat16", "float32", "cast=True")
        with raises(mc.DtypeMismatchError, *words, builtin=TypeError):
            manager.load({"v": value, "w": value})
        assert manager.state("v") is mc.TensorState.FREE
        manager.load({"w": value, "v": value.astype(np.float64)}, cast=True)
        equal(manager.to_numpy("w"), [256.0, 256.0])
        equal(manager.to_numpy("v"), [256.5, 256.5])
        with raises(mc.DtypeMismatchError, "'v'", "float64"):
            manager.write({"v": value.astype(np.float64)})
        with raises(mc.DtypeMismatchError, "'v'", "int32"):
            manager.add({"v": np.ones(2, np.int32)})


def case_bad_values_change_nothing(backend: Backend) -> None:
    specs = [mc.ParamSpec("a", (2,)), mc.ParamSpec("b", (2, 3), group="other")]
    with make(backend, specs) as manager:
        manager.load({"a": ints((2,)), "b": ints((2, 3))})
        before = all_used(manager)
        with raises(mc.ShapeMismatchError, "'b'", "(2, 3)", "(3, 2)", builtin=ValueError):
            manager.load({"a": ints((2,), 50), "b": ints((3, 2))})
        with raises(mc.UnknownTensorError, "'bb'", "'b'", builtin=LookupError):
            manager.load({"a": ints((2,), 50), "bb": ints((2, 3))})
        with raises(mc.ShapeMismatchError, "'a'", "()"):
            manager.add({"b": ints((2, 3)), "a": 1.0})
        equal(manager.to_numpy("a"), ints((2,)))
        equal(manager.to_numpy("b"), ints((2, 3)))
        assert all_used(manager) == before


def case_lists_and_numbers_are_values_too(backend: Backend) -> None:
    with make(backend, [mc.ParamSpec("w", (2, 2)), mc.ParamSpec("s", ())]) as manager:
        manager.load({"w": [[0, 1], [2, 3]], "s": 4})
        equal(manager.to_numpy("w"), [[0, 1], [2, 3]])
        equal(manager.to_numpy("s"), 4)


def case_loading_copies(backend: Backend) -> None:
    value = ints((4,), 1)
    with make(backend, [mc.ParamSpec("w", (4,))]) as manager:
        manager.load({"w": value})
        value += 100
        copy = manager.to_numpy("w")
        equal(copy, ints((4,), 1))
        copy += 100
        manager.write({"w": ints((4,), 5)})
        equal(copy, ints((4,), 101))
        equal(manager.to_numpy("w"), ints((4,), 5))


def case_write_and_add_reach_home_and_what_is_gathered(backend: Backend) -> None:
    specs = [mc.ParamSpec("a", (5,)), mc.ParamSpec("b", (2, 2))]
    with make(backend, specs) as manager:
        with raises(mc.NotGatheredError, "param.0", "load"):
            manager.write({"a": ints((5,))})
        manager.load({"a": ints((5,)), "b": ints((2, 2))})
        manager.access("a")
        manager.write({"a": ints((5,), 3)})
        manager.add({"a": ints((5,), 1), "b": ints((2, 2), 10)})
        equal(manager.read("a"), 2 * ints((5,)) + 4)
        manager.release("a")
        manager.add({"b": ints((2, 2), 0)})
        equal(manager.to_numpy("a"), 2 * ints((5,)) + 4)
        equal(manager.to_numpy("b"), 3 * ints((2, 2)) + 10)
        manager.audit()
