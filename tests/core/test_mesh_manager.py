"""Named meshes, and the backends that are bound to them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshcore.backend import BackendOptions
from meshcore.errors import BackendError, BackendNotFoundError, MeshError, MeshNameError
from meshcore.links import Link
from meshcore.mesh import DeviceMesh
from meshcore.mesh_manager import DeviceMeshInfo, DeviceMeshManager


class CountingBackend:
    """Two groups while open; says when it is closed, and can fail at it."""

    def __init__(self, roles, log, fail):
        self.roles, self.log, self.fail = roles, log, fail
        self.group_count = 2

    def close(self):
        self.log.append(self.roles.mesh.ids)
        self.group_count = 0
        if self.fail:
            raise RuntimeError(f"cannot close {self.roles.mesh.ids}")


class CountingRegistry:
    """Takes the place of a registry: makes counting backends and keeps what it made."""

    def __init__(self):
        self.made, self.closed, self.asked = [], [], []
        self.fail_create = self.fail_close = False

    def create(self, name, mesh, *, shard_axis, replica_axis, options):
        from meshcore.spec import AxisRoles

        self.asked.append((name, shard_axis, replica_axis, options))
        if self.fail_create:
            raise BackendError("no network")
        roles = AxisRoles(mesh, shard_axis, replica_axis)
        self.made.append(CountingBackend(roles, self.closed, self.fail_close))
        return self.made[-1]


@pytest.fixture
def registry():
    return CountingRegistry()


@pytest.fixture
def meshes(registry):
    return DeviceMeshManager("counting", registry=registry)


PAIR = DeviceMeshInfo([1, 0], (2,))
SQUARE = DeviceMeshInfo(range(4), (2, 2))


# --- info ---------------------------------------------------------------------------------------


def test_info_is_frozen_and_normalized():
    info = DeviceMeshInfo(np.array([3, 1]), [np.int64(2)], ["data"])
    assert (info.physical_ids, info.mesh_shape, info.axis_names) == ((3, 1), (2,), ("data",))
    assert type(info.physical_ids[0]) is int
    assert info == DeviceMeshInfo((3, 1), (2,), ("data",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.mesh_shape = (1, 2)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((8,), ("shard",)),
        ((2, 4), ("replica", "shard")),
        ((2, 2, 2), ("axis0", "axis1", "axis2")),
    ],
)
def test_axis_names_are_optional(shape, names):
    assert DeviceMeshInfo(range(8), shape).axis_names == names


def test_info_without_a_shape_keeps_what_it_was_given():
    info = DeviceMeshInfo([2, 0], axis_names=("a", "b"))
    assert (info.physical_ids, info.mesh_shape, info.axis_names) == ((2, 0), None, ("a", "b"))
    assert DeviceMeshInfo([2, 0]).axis_names is None


@pytest.mark.parametrize(
    ("ids", "shape", "names", "match"),
    [
        ([0, 0, 1, 2], None, None, r"\[0\] occur more than once"),
        ([0, 0, 1, 2], (2, 2), None, r"\[0\] occur more than once"),
        ([0, 1, 2], (2, 2), None, r"\(2, 2\) holds 4.*must be 3"),
        ([0, 1, 2, 3], (2, 2), ("a", "a"), "distinct.*'a'"),
        ([0, 1], None, ("a", "a"), "distinct.*'a'"),
        ([0, 1], (2, 0), None, r"1 or more.*\(2, 0\)"),
        ([0, 1], (), None, "one at least"),
        ([0, -1], None, None, "-1"),
        ([], None, None, "at least one id"),
        ([0, "1"], None, None, "'1'"),
        (3, None, None, "physical_ids must be a sequence, not 3"),
        (None, None, None, "physical_ids must be a sequence"),
        ([0, 1], 2, None, "mesh_shape must be a sequence, not 2"),
        ([0, 1], (2,), 5, "axis_names must be a sequence, not 5"),
        ([0, 1], (1, 2), ("a",), "1 names"),
    ],
)
def test_bad_info_raises_when_it_is_made(ids, shape, names, match):
    with pytest.raises(MeshError, match=match) as caught:
        DeviceMeshInfo(ids, shape, names)
    assert isinstance(caught.value, ValueError)


# --- names --------------------------------------------------------------------------------------


def test_create_and_get(meshes, registry):
    links = {"shard": Link(1e-5, 1e-9)}
    made = meshes.create_device_mesh("a", SQUARE, links=links)
    assert made == DeviceMesh(range(4), (2, 2), ("replica", "shard"), links=links)
    assert meshes.get("a") is made
    meshes.create_device_mesh("b", PAIR)
    assert meshes.names == ("a", "b")
    assert meshes.get("b").ids == (1, 0)
    assert (registry.made, meshes.group_count) == ([], 0)


def test_a_taken_name_raises_and_changes_nothing(meshes):
    made = meshes.create_device_mesh("a", SQUARE)
    with pytest.raises(MeshNameError, match=r"'a' is taken.*destroy") as caught:
        meshes.create_device_mesh("a", PAIR)
    assert isinstance(caught.value, LookupError)
    assert meshes.get("a") is made


@pytest.mark.parametrize("verb", ["get", "destroy", "backend"])
@pytest.mark.parametrize("name", ["nobody", None, ["x"]])
def test_an_unknown_name_raises_and_is_named(meshes, verb, name):
    meshes.create_device_mesh("a", PAIR)
    with pytest.raises(MeshNameError) as caught:
        getattr(meshes, verb)(name)
    assert repr(name) in str(caught.value)
    assert "'a'" in str(caught.value)
    assert meshes.names == ("a",)


@pytest.mark.parametrize("name", ["", 3, None])
def test_a_name_is_a_non_empty_string(meshes, name):
    with pytest.raises(MeshNameError, match="non-empty string"):
        meshes.create_device_mesh(name, PAIR)


def test_a_shape_is_not_chosen_silently(meshes):
    with pytest.raises(
        MeshError, match=r"'a' has no mesh_shape.*not available yet.*is 3"
    ) as caught:
        meshes.create_device_mesh("a", DeviceMeshInfo([0, 1, 2]))
    assert isinstance(caught.value, ValueError)
    assert meshes.names == ()


def test_a_failed_creation_leaves_the_name_free(meshes):
    with pytest.raises(MeshError, match="'q'"):
        meshes.create_device_mesh("a", PAIR, links={"q": Link(0.0, 0.0)})
    assert meshes.names == ()
    meshes.create_device_mesh("a", PAIR)


def test_destroying_frees_the_name_once(meshes):
    meshes.create_device_mesh("a", PAIR)
    meshes.destroy("a")
    assert meshes.names == ()
    with pytest.raises(MeshNameError):
        meshes.destroy("a")
    assert meshes.create_device_mesh("a", SQUARE).size == 4


# --- backends -----------------------------------------------------------------------------------


def test_a_backend_is_made_once_for_name_and_roles(registry):
    options = BackendOptions(timeout_seconds=2.0)
    meshes = DeviceMeshManager("counting", options=options, registry=registry)
    meshes.create_device_mesh("a", SQUARE)
    first = meshes.backend("a", shard_axis="shard", replica_axis="replica")
    assert meshes.backend("a", replica_axis="replica") is first
    assert meshes.backend("a", shard_axis=1, replica_axis=0) is first
    assert registry.asked == [("counting", "shard", "replica", options)]
    swapped = meshes.backend("a", shard_axis="replica", replica_axis="shard")
    assert swapped is not first
    assert meshes.group_count == 4


def test_equal_meshes_share_a_backend_until_the_last_is_destroyed(meshes, registry):
    for name in ("a", "b"):
        meshes.create_device_mesh(name, PAIR)
    assert meshes.backend("a") is meshes.backend("b")
    assert meshes.group_count == 2
    meshes.destroy("a")
    assert (registry.closed, meshes.group_count) == ([], 2)
    assert meshes.backend("b") is registry.made[0]
    meshes.destroy("b")
    assert (registry.closed, meshes.group_count) == ([(1, 0)], 0)


def test_a_mesh_that_never_asked_for_the_backend_does_not_keep_it(meshes, registry):
    for name in ("a", "b"):
        meshes.create_device_mesh(name, PAIR)
    meshes.backend("a")
    meshes.destroy("a")
    assert registry.closed == [(1, 0)]
    assert meshes.backend("b") is registry.made[1]


def test_destroy_closes_exactly_what_the_mesh_made(meshes, registry):
    meshes.create_device_mesh("a", SQUARE)
    meshes.create_device_mesh("b", PAIR)
    meshes.backend("a", replica_axis="replica")
    meshes.backend("a", shard_axis="replica", replica_axis="shard")
    meshes.backend("b")
    meshes.destroy("a")
    assert registry.closed == [(0, 1, 2, 3)] * 2
    assert meshes.group_count == 2


def test_destroy_all_closes_the_last_made_first_and_may_be_repeated(meshes, registry):
    meshes.create_device_mesh("a", PAIR)
    meshes.create_device_mesh("b", DeviceMeshInfo([5, 6], (2,)))
    meshes.backend("a")
    meshes.backend("b")
    meshes.destroy_all()
    meshes.destroy_all()
    assert registry.closed == [(5, 6), (1, 0)]
    assert (meshes.names, meshes.group_count) == ((), 0)


def test_a_context_destroys_all_on_an_error_too(registry):
    class TroubleError(Exception):
        pass

    def use():
        with DeviceMeshManager("counting", registry=registry) as meshes:
            meshes.create_device_mesh("a", PAIR)
            meshes.backend("a")
            raise TroubleError

    with pytest.raises(TroubleError):
        use()
    assert registry.closed == [(1, 0)]


def test_a_backend_that_does_not_close_is_named_and_the_others_are_closed(meshes, registry):
    registry.fail_close = True
    meshes.create_device_mesh("a", PAIR)
    meshes.create_device_mesh("b", DeviceMeshInfo([5, 6], (2,)))
    meshes.backend("a")
    meshes.backend("b")
    with pytest.raises(BackendError, match=r"2 of 2 backends.*\[5, 6\].*\[1, 0\]") as caught:
        meshes.destroy_all()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (meshes.names, meshes.group_count) == ((), 0)
    meshes.destroy_all()
    assert len(registry.closed) == 2


def test_a_backend_that_cannot_be_made_leaves_nothing(meshes, registry):
    meshes.create_device_mesh("a", PAIR)
    registry.fail_create = True
    with pytest.raises(BackendError, match="no network"):
        meshes.backend("a")
    assert meshes.group_count == 0
    registry.fail_create = False
    assert meshes.backend("a") is registry.made[0]
    meshes.destroy("a")
    assert registry.closed == [(1, 0)]


def test_axes_of_a_backend_are_checked(meshes, registry):
    meshes.create_device_mesh("a", SQUARE)
    with pytest.raises(MeshError, match="neither the shard axis"):
        meshes.backend("a")
    with pytest.raises(MeshError, match="'q'"):
        meshes.backend("a", shard_axis="q")
    assert registry.made == []


def test_a_manager_for_planning_has_meshes_and_no_backends():
    meshes = DeviceMeshManager()
    meshes.create_device_mesh("a", PAIR)
    with pytest.raises(MeshError, match="made for planning"):
        meshes.backend("a")
    meshes.destroy("a")


def test_real_backends_are_bound_and_closed():
    with DeviceMeshManager("numpy") as meshes:
        meshes.create_device_mesh("a", SQUARE)
        backend = meshes.backend("a", replica_axis="replica")
        assert backend.roles.replicas == 2
        assert meshes.group_count == backend.group_count == 4
        assert sorted(backend.exchange(b"x")) == [0, 1, 2, 3]
    assert (backend.group_count, meshes.group_count) == (0, 0)


def test_an_unknown_backend_is_told_when_it_is_needed():
    meshes = DeviceMeshManager("nunpy")
    meshes.create_device_mesh("a", PAIR)
    with pytest.raises(BackendNotFoundError, match="'numpy'"):
        meshes.backend("a")
    assert meshes.group_count == 0


def test_repr_shows_names_and_meshes(meshes):
    meshes.create_device_mesh("a", PAIR)
    assert repr(meshes) == (
        "DeviceMeshManager(backend='counting', {'a': DeviceMesh(shard=2; ids=[1, 0])})"
    )
