"""Registering tensors one by one, closing groups, and what the plan and the manager get of it."""

import numpy as np
import pytest
from manager_support import equal, ints

import meshcore as mc
from meshcore.testing import line


def registered() -> mc.TensorRegistry:
    registry = mc.TensorRegistry()
    registry.register_tensor("w", ints((2, 3)), ties=["head"])
    registry.register_tensor("mask", np.array([True, False]), trainable=False)
    registry.register_tensor("norm", ints((3,), 5), group_type="norms")
    return registry


def test_tensors_become_a_plan_and_values_to_load():
    registry = registered()
    assert [spec.name for spec in registry.specs] == ["w", "mask", "norm"]
    assert [spec.dtype for spec in registry.specs] == ["float32", "bool", "float32"]
    plan = registry.plan(shards=3, alignment_nbytes=1)
    assert {chunk.group for chunk in plan.chunks} == {"param", "norms"}
    assert plan.find("head")[1].shape == (2, 3)
    with mc.ChunkManager(mc.create_backend("numpy", line(2, 0, 1).mesh()), plan) as manager:
        manager.load(registry.values)
        with manager.gathered("head", "mask", "norm") as values:
            equal(values["head"], ints((2, 3)))
            equal(values["mask"], [True, False])
            equal(values["norm"], ints((3,), 5))


def test_a_name_is_registered_once():
    registry = registered()
    for name, ties in (("w", ()), ("head", ()), ("new", ("norm",))):
        with pytest.raises(mc.DuplicateNameError, match="'(w|head|norm)' is registered already"):
            registry.register_tensor(name, ints((2,)), ties=ties)
    assert len(registry.specs) == 3


def test_a_name_is_not_its_own_tie():
    with pytest.raises(mc.DuplicateNameError, match="'w'"):
        mc.plan_chunks([mc.ParamSpec("w", (2,), ties=("w",))], shards=1)


def test_a_closed_group_takes_no_more():
    registry = registered()
    registry.close_group("norms")
    registry.close_group("norms")
    with pytest.raises(mc.GroupClosedError, match="'norms' is closed and takes no tensor 'late'"):
        registry.register_tensor("late", ints((2,)), group_type="norms")
    registry.register_tensor("early", ints((2,)))
    registry.close_all_groups()
    registry.close_all_groups()
    with pytest.raises(mc.GroupClosedError, match="'param'"):
        registry.register_tensor("late", ints((2,)))
    assert len(registry.specs) == 4


def test_planning_closes_all_groups():
    registry = registered()
    registry.plan(shards=2)
    with pytest.raises(RuntimeError, match="closed"):
        registry.register_tensor("late", ints((2,)))


def test_values_are_read_only():
    with pytest.raises(TypeError, match="item assignment"):
        registered().values["w"] = None  # type: ignore[index]


def test_dtypes_that_no_plan_holds():
    with pytest.raises(mc.SpecError, match="complex64"):
        mc.TensorRegistry().register_tensor("c", np.zeros(2, np.complex64))
