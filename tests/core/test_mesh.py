"""Meshes are arithmetic over ids: coordinates, groups, slices, value semantics, errors."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcore.errors import MeshError, NotInMeshError
from meshcore.links import Link
from meshcore.mesh import DeviceMesh

NAMES = ("pod", "rack", "node", "device")


@st.composite
def meshes(draw, max_ndim=4, max_extent=4):
    shape = draw(st.lists(st.integers(1, max_extent), min_size=1, max_size=max_ndim))
    size = math.prod(shape)
    ids = draw(st.permutations(range(size)))
    offset = draw(st.integers(0, 50))
    names = NAMES[: len(shape)]
    linked = draw(st.sets(st.sampled_from(names)))
    links = {name: Link(1e-6 * (i + 1), 1e-9 / (i + 1)) for i, name in enumerate(sorted(linked))}
    return DeviceMesh([offset + id_ for id_ in ids], shape, names, links=links)


# Coordinates and groups


@settings(max_examples=50)
@given(meshes())
def test_coordinates_round_trip_and_follow_row_major_order(mesh):
    everywhere = list(itertools.product(*(range(extent) for extent in mesh.shape)))
    assert [mesh.coordinate(id_) for id_ in mesh.ids] == everywhere
    assert [mesh.position(id_) for id_ in mesh.ids] == list(range(mesh.size))
    for id_ in mesh.ids:
        by_name = tuple(mesh.index(id_, name) for name in mesh.axis_names)
        by_position = tuple(mesh.index(id_, axis) for axis in range(mesh.ndim))
        assert by_name == by_position == mesh.coordinate(id_)
        assert all(type(i) is int for i in by_name)


@settings(max_examples=50)
@given(meshes())
def test_groups_partition_the_ids_and_differ_along_their_axis_only(mesh):
    for axis, name in enumerate(mesh.axis_names):
        groups = mesh.groups(axis)
        assert mesh.groups(name) == groups
        assert sorted(itertools.chain(*groups)) == sorted(mesh.ids)
        for group in groups:
            assert len(group) == mesh.axis_size(name) == mesh.shape[axis]
            assert [mesh.index(id_, axis) for id_ in group] == list(range(len(group)))
            rest = {mesh.coordinate(id_)[:axis] + mesh.coordinate(id_)[axis + 1 :] for id_ in group}
            assert len(rest) == 1
            assert all(mesh.group_of(id_, axis) == group for id_ in group)


@pytest.mark.parametrize(
    ("shape", "sets"), [((2, 3), 5), ((2, 2), 4), ((2, 2, 2), 12), ((1, 2), 3), ((4,), 1)]
)
def test_number_of_distinct_groups(shape, sets):
    mesh = DeviceMesh(range(math.prod(shape)), shape, NAMES[: len(shape)])
    groups = [group for axis in range(mesh.ndim) for group in mesh.groups(axis)]
    assert len(set(groups)) == len(groups) == sets


def test_groups_and_axis_zero():
    mesh = DeviceMesh(range(6), (2, 3), ("replica", "shard"))
    assert mesh.groups(0) == ((0, 3), (1, 4), (2, 5))
    assert mesh.groups(1) == ((0, 1, 2), (3, 4, 5))
    assert mesh.coordinate(4) == (1, 1)
    index = mesh.index(4, 0)
    assert index == 1
    assert type(index) is int


def test_groups_keep_mesh_order():
    mesh = DeviceMesh([3, 0, 2, 1], (2, 2), ("replica", "shard"))
    assert mesh.groups("shard") == ((3, 0), (2, 1))
    assert mesh.groups("replica") == ((3, 2), (0, 1))
    assert mesh.group_of(1, "shard") == (2, 1)


def test_groups_of_an_axis_of_size_one_are_singletons():
    mesh = DeviceMesh([5, 4], (1, 2), ("replica", "shard"))
    assert mesh.groups("replica") == ((5,), (4,))
    assert mesh.groups("shard") == ((5, 4),)


def test_defaults_in_one_dimension():
    mesh = DeviceMesh([2, 0, 1])
    assert (mesh.shape, mesh.axis_names, mesh.size, mesh.ndim) == ((3,), ("shard",), 3, 1)
    assert mesh.groups("shard") == ((2, 0, 1),)
    assert mesh.contains(1)
    assert not mesh.contains(3)
    assert dict(mesh.links) == {}


def test_a_rank_outside_has_no_coordinate_and_no_index():
    mesh = DeviceMesh([0, 2])
    assert mesh.coordinate(1) is None
    for call in (
        lambda: mesh.index(1, "shard"),
        lambda: mesh.position(1),
        lambda: mesh.group_of(1, "shard"),
        lambda: mesh.submesh(["shard"], of=1),
        lambda: mesh.position([1]),
    ):
        with pytest.raises(NotInMeshError, match=r"1\]? is not in the mesh; it holds \[0, 2\]"):
            call()


# Slices


@settings(max_examples=50)
@given(meshes(), st.data())
def test_a_slice_goes_through_its_device_and_keeps_coordinates_names_and_links(mesh, data):
    of = data.draw(st.sampled_from(mesh.ids))
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True))
    part = mesh.submesh(axes, of=of)
    assert part.contains(of)
    assert part.axis_names == tuple(axes)
    assert part.shape == tuple(mesh.axis_size(axis) for axis in axes)
    assert dict(part.links) == {axis: mesh.links[axis] for axis in axes if axis in mesh.links}
    for id_ in part.ids:
        assert part.coordinate(id_) == tuple(mesh.index(id_, axis) for axis in axes)
        for axis in set(mesh.axis_names) - set(axes):
            assert mesh.index(id_, axis) == mesh.index(of, axis)
    if len(axes) == 1:
        assert part.ids == mesh.group_of(of, axes[0])


def test_a_slice_follows_the_order_of_axes_that_was_asked():
    mesh = DeviceMesh(range(6), (2, 3), ("replica", "shard"))
    turned = mesh.submesh(["shard", "replica"], of=0)
    assert (turned.shape, turned.ids) == ((3, 2), (0, 3, 1, 4, 2, 5))
    assert mesh.submesh([1], of=4).ids == (3, 4, 5)


@pytest.mark.parametrize("axes", [[], ["shard", "shard"], ["shard", 1]])
def test_a_slice_needs_distinct_axes(axes):
    mesh = DeviceMesh(range(4), (2, 2), ("replica", "shard"))
    with pytest.raises(MeshError, match=re.escape(f"distinct axes, not {axes}")):
        mesh.submesh(axes, of=0)


def test_flatten_keeps_order_and_the_slowest_link():
    links = {"node": Link(2e-5, 1e-9), "device": Link(1e-6, 4e-9)}
    flat = DeviceMesh([3, 1, 2, 0], (2, 2), ("node", "device"), links=links).flatten()
    assert (flat.ids, flat.shape, flat.axis_names) == ((3, 1, 2, 0), (4,), ("flat",))
    assert dict(flat.links) == {"flat": Link(2e-5, 4e-9)}


def test_flatten_knows_no_link_unless_all_axes_have_one():
    mesh = DeviceMesh(range(4), (2, 2), ("node", "device"), links={"node": Link(1.0, 1.0)})
    assert dict(mesh.flatten().links) == {}


def test_the_time_of_a_message_is_latency_and_bytes():
    assert Link(alpha_seconds=2.0, beta_seconds_per_byte=0.5).seconds(10) == 7.0


# Value semantics


@settings(max_examples=50)
@given(meshes())
def test_pickle_and_copies_give_an_equal_mesh(mesh):
    for twin in (pickle.loads(pickle.dumps(mesh)), copy.copy(mesh), copy.deepcopy(mesh)):
        assert twin == mesh
        assert hash(twin) == hash(mesh)
        assert dict(twin.links) == dict(mesh.links)
        assert [twin.coordinate(id_) for id_ in mesh.ids] == [
            mesh.coordinate(id_) for id_ in mesh.ids
        ]


def test_equal_means_equal_in_everything():
    def make(ids=(0, 1, 2, 3), shape=(2, 2), names=("a", "b"), links=None):
        return DeviceMesh(ids, shape, names, links=links)

    mesh = make()
    link = {"a": Link(1.0, 1.0)}
    others = [
        make(ids=(1, 0, 2, 3)),
        make(shape=(1, 4)),
        make(shape=(4, 1)),
        make(names=("a", "c")),
        make(links=link),
    ]
    assert mesh == make()
    assert len({mesh, make(), *others}) == 1 + len(others)
    assert all(mesh != other for other in others)
    assert make(links={"a": Link(1.0, 1.0), "b": Link(2.0, 2.0)}) == make(
        links={"b": Link(2.0, 2.0), "a": Link(1.0, 1.0)}
    )
    assert mesh != (0, 1, 2, 3)


def test_a_mesh_does_not_change():
    ids, shape, links = [0, 1], [2], {"shard": Link(1.0, 1.0)}
    mesh = DeviceMesh(ids, shape, ["shard"], links=links)
    ids[0], shape[0] = 9, 9
    links.clear()
    assert (mesh.ids, mesh.shape, dict(mesh.links)) == ((0, 1), (2,), {"shard": Link(1.0, 1.0)})
    with pytest.raises(AttributeError, match="'ids'"):
        mesh.ids = (1, 0)
    with pytest.raises(AttributeError, match="'ids'"):
        del mesh.ids
    with pytest.raises(TypeError):
        mesh.links["shard"] = Link(2.0, 2.0)
    assert mesh.ids == (0, 1)


def test_repr_names_axes_and_shortens_ids():
    small, large = DeviceMesh([3, 0, 2, 1], (2, 2), ("a", "b")), DeviceMesh(range(20))
    assert repr(small) == "DeviceMesh(a=2, b=2; ids=[3, 0, 2, 1])"
    assert repr(large).endswith("14, 15, ... 20 in all])")


def test_numpy_integers_become_ints():
    mesh = DeviceMesh(np.arange(4), np.array([2, 2]), ("a", "b"))
    assert all(type(number) is int for number in mesh.ids + mesh.shape)
    assert mesh == DeviceMesh(range(4), (2, 2), ("a", "b"))


# Bad input: the message holds the offending value and what is allowed

BAD = {
    "no ids": ({"ids": []}, "at least one id"),
    "an id twice": ({"ids": [0, 0, 1, 2]}, r"distinct; \[0\] occur more than once"),
    "a negative id": ({"ids": [0, -1]}, r"0 or more; got -1 in \[0, -1\]"),
    "an id that is no int": ({"ids": [0, 1.5]}, r"must be an int, not 1\.5"),
    "an id that is a bool": ({"ids": [0, True]}, "must be an int, not True"),
    "a shape that does not fit": (
        {"ids": [0, 1, 2], "shape": (2, 2), "axis_names": ("a", "b")},
        r"shape \(2, 2\) holds 4 devices and there are 3 ids; .* must be 3",
    ),
    "ids that are a number": ({"ids": 3}, "ids of a mesh is a sequence, such as a list, not 3"),
    "ids that are a string": (
        {"ids": "01"},
        "ids of a mesh is a sequence, such as a list, not '01'",
    ),
    "a shape that is a number": (
        {"ids": [0, 1], "shape": 2},
        "shape of a mesh is a sequence.*not 2",
    ),
    "names that are a number": ({"ids": [0, 1], "axis_names": 2}, "axis_names of .* not 2"),
    "an id that is numpy's bool": ({"ids": [0, np.True_]}, "must be an int, not .*True"),
    "an empty shape": ({"ids": [0], "shape": ()}, r"one at least; got shape \(\)"),
    "a size of 0": (
        {"ids": [0, 1], "shape": (2, 0), "axis_names": ("a", "b")},
        r"1 or more, .* got shape \(2, 0\)",
    ),
    "a size that is no int": ({"ids": [0, 1], "shape": ("2",)}, "must be an int, not '2'"),
    "no names in two dimensions": (
        {"ids": range(4), "shape": (2, 2)},
        "2 axes needs axis_names, one name an axis",
    ),
    "too few names": (
        {"ids": range(4), "shape": (2, 2), "axis_names": "a"},
        r"\('a',\) has 1 names and the mesh 2 axes",
    ),
    "one name twice": (
        {"ids": range(4), "shape": (2, 2), "axis_names": ("a", "a")},
        r"distinct; got \('a', 'a'\)",
    ),
    "an empty name": ({"ids": [0], "axis_names": ("",)}, "non-empty strings; got ''"),
    "a name that is no string": ({"ids": [0], "axis_names": (3,)}, "non-empty strings; got 3"),
    "a link of an unknown axis": (
        {"ids": [0, 1], "links": {"q": Link(1.0, 1.0)}},
        r"\['q'\]; the mesh has \['shard'\]",
    ),
    "links of unknown axes of any kind": (
        {"ids": [0, 1], "links": {"q": Link(1.0, 1.0), 3: Link(1.0, 1.0)}},
        r"\[3, 'q'\]; the mesh has",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_value(case):
    arguments, message = BAD[case]
    with pytest.raises(MeshError, match=message) as caught:
        DeviceMesh(**arguments)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("axis", ["q", 2, -1, True, None, 0.0])
def test_an_unknown_axis_is_refused_with_the_known_ones(axis):
    mesh = DeviceMesh(range(4), (2, 2), ("a", "b"))
    for call in (mesh.axis, mesh.axis_size, mesh.groups, lambda axis: mesh.index(0, axis)):
        message = re.escape(f"axis {axis!r} is not in the mesh; it has the axes ['a', 'b']")
        with pytest.raises(MeshError, match=message):
            call(axis)


@pytest.mark.parametrize(
    ("arguments", "bad"),
    [((4,), "4"), (("ab",), "'ab'"), (([0, 1], 2), "2"), (([0, 1], (2,), 5), "5")],
)
def test_what_is_no_sequence_is_a_mesh_error(arguments, bad):
    with pytest.raises(MeshError, match=f"is a sequence, such as a list, not {bad}"):
        DeviceMesh(*arguments)
