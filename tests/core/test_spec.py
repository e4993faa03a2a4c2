"""Placements, buffer specs, axis roles, and which moves exist."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcore.dtypes import ALL_DTYPES, is_floating, itemsize
from meshcore.errors import MeshError, NotInMeshError, SpecError
from meshcore.mesh import DeviceMesh
from meshcore.spec import (
    AxisRoles,
    BufferSpec,
    Memory,
    MoveKind,
    Placement,
    check_move,
    move_kind,
    reduce_path,
)

P = Placement
K = MoveKind

# The whole table; a pair that is missing is no move.
MOVES = {
    (P.SHARDED, P.REPLICATED): K.GATHER,
    (P.REPLICATED, P.SHARDED): K.SCATTER,
    (P.PARTIAL, P.SHARDED_PARTIAL): K.REDUCE_SCATTER,
    (P.PARTIAL, P.SHARDED): K.REDUCE_SCATTER,
    (P.SHARDED_PARTIAL, P.SHARDED): K.REPLICA_SUM,
    (P.PARTIAL, P.REPLICATED): K.ALL_REDUCE,
}
SUMS = {K.REDUCE_SCATTER, K.REPLICA_SUM, K.ALL_REDUCE}


def roles_of(replicas, shards):
    mesh = DeviceMesh(range(replicas * shards), (replicas, shards), ("replica", "shard"))
    return AxisRoles(mesh, "shard", "replica")


def spec(placement, dtype="float32", memory=Memory.DEVICE, numel=8):
    return BufferSpec(numel, dtype, placement, memory)


# Buffer specs


@given(
    shards=st.integers(1, 9),
    shard_numel=st.integers(0, 1000),
    dtype=st.sampled_from(ALL_DTYPES),
    placement=st.sampled_from(Placement),
)
def test_the_byte_rule(shards, shard_numel, dtype, placement):
    whole = BufferSpec(shards * shard_numel, dtype, placement)
    held = shard_numel if placement in (P.SHARDED, P.SHARDED_PARTIAL) else shards * shard_numel
    assert whole.local_numel(shards) == held
    assert whole.local_nbytes(shards) == held * itemsize(dtype)


def test_placements_say_what_a_rank_holds():
    assert {p for p in P if p.is_split} == {P.SHARDED, P.SHARDED_PARTIAL}
    assert {p for p in P if p.is_addend} == {P.PARTIAL, P.SHARDED_PARTIAL}


def test_bad_buffer_specs_are_refused():
    for numel in (-1, 2.0, True, "8"):
        with pytest.raises(SpecError, match=f"0 or more elements, not {numel!r}"):
            spec(P.SHARDED, numel=numel)
    with pytest.raises(SpecError, match="'float31' is not known"):
        spec(P.SHARDED, "float31")


def test_equal_buffer_specs_are_one_key():
    specs = [spec(p, d, m, n) for p in P for d in ALL_DTYPES for m in Memory for n in (4, 8)]
    again = [spec(p, d, m, n) for p in P for d in ALL_DTYPES for m in Memory for n in (4, 8)]
    assert len({*specs, *again}) == len(specs)


def test_a_buffer_spec_from_another_process_is_the_same_key():
    # Hashes of strings differ between processes, so a hash must not travel with a pickled spec.
    program = (
        "import sys, pickle; from meshcore.spec import BufferSpec, Placement;"
        "spec = BufferSpec(8, 'float32', Placement.SHARDED);"
        "sys.stdout.buffer.write(pickle.dumps(spec))"
    )
    here = spec(P.SHARDED)
    for seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
        twin = pickle.loads(answer.stdout)
        assert twin == here
        assert hash(twin) == hash(here)
    assert copy.deepcopy(here) == here


def test_a_buffer_spec_reads_as_a_phrase():
    text = str(spec(P.SHARDED_PARTIAL, "bfloat16", Memory.HOST))
    assert text == "8 x bfloat16 sharded_partial on host"


# Axis roles


def test_roles_of_a_hybrid_mesh():
    mesh = DeviceMesh([5, 4, 3, 2, 1, 0], (2, 3), ("replica", "shard"))
    roles = AxisRoles(mesh, "shard", "replica")
    assert (roles.shards, roles.replicas) == (3, 2)
    assert [roles.shard_index(rank) for rank in mesh.ids] == [0, 1, 2, 0, 1, 2]
    assert [roles.replica_index(rank) for rank in mesh.ids] == [0, 0, 0, 1, 1, 1]
    assert roles.shard_group(1) == (2, 1, 0)
    assert roles.replica_group(1) == (4, 1)
    sizes = {kind: roles.group_size(kind) for kind in MoveKind}
    assert sizes == {
        K.GATHER: 3,
        K.REDUCE_SCATTER: 3,
        K.REPLICA_SUM: 2,
        K.ALL_REDUCE: 6,
        K.SCATTER: 1,
        K.CAST: 1,
        K.TRANSFER: 1,
    }


def test_roles_by_position_and_by_name_are_equal_and_pickle():
    mesh = DeviceMesh(range(4), (2, 2), ("replica", "shard"))
    by_name, by_position = AxisRoles(mesh, "shard", "replica"), AxisRoles(mesh, 1, 0)
    assert by_name == by_position
    assert hash(by_name) == hash(by_position)
    assert (by_position.shard_axis, by_position.replica_axis) == ("shard", "replica")
    assert pickle.loads(pickle.dumps(by_name)) == by_name


def test_without_a_replica_axis_every_rank_is_its_only_replica():
    roles = AxisRoles(DeviceMesh([2, 0, 1]))
    assert (roles.shards, roles.replicas, roles.replica_axis) == (3, 1, None)
    assert roles.replica_index(0) == 0
    assert roles.replica_group(0) == (0,)
    assert roles.shard_group(0) == (2, 0, 1)
    with pytest.raises(NotInMeshError, match="rank 7"):
        roles.replica_group(7)


def test_an_axis_of_size_one_needs_no_role():
    mesh = DeviceMesh(range(3), (1, 3, 1), ("a", "b", "c"))
    assert AxisRoles(mesh, "b").shards == 3
    assert AxisRoles(mesh, "b", "c").replicas == 1


@pytest.mark.parametrize(
    ("shard", "replica", "message"),
    [
        ("q", None, "axis 'q' is not in the mesh"),
        ("shard", "q", "axis 'q' is not in the mesh"),
        ("shard", "shard", "'shard' cannot be shard axis and replica axis"),
        ("shard", 1, "'shard' cannot be shard axis and replica axis"),
        ("shard", None, r"axis 'replica' of size 2 is neither .*\('shard'\) .*submesh"),
        ("replica", None, r"axis 'shard' of size 3 is neither .*\('replica'\)"),
    ],
)
def test_bad_roles_are_refused(shard, replica, message):
    mesh = DeviceMesh(range(6), (2, 3), ("replica", "shard"))
    with pytest.raises(MeshError, match=message):
        AxisRoles(mesh, shard, replica)


def test_a_process_without_ranks_is_outside():
    roles = AxisRoles(DeviceMesh([0, 2]))
    roles.require_member((2,))
    with pytest.raises(NotInMeshError, match=r"no rank of DeviceMesh\(shard=2; ids=\[0, 2\]\)"):
        roles.require_member(())


# Moves: the whole product of placements, memories and dtypes on both sides


def expected_kind(src, dst, replicas):
    """The rules in words of their own: one change at a time; None where there is no move."""
    changes = {
        "placement": src.placement is not dst.placement,
        "memory": src.memory is not dst.memory,
        "dtype": src.dtype != dst.dtype,
    }
    changed = {what for what, is_changed in changes.items() if is_changed}
    if changed == {"memory"}:
        return K.TRANSFER
    if changed == {"dtype"}:
        return K.CAST
    if changed in ({"placement"}, {"placement", "dtype"}):
        pair = (src.placement, dst.placement)
        if pair == (P.PARTIAL, P.SHARDED) and replicas > 1:
            return None
        return MOVES.get(pair)
    return None


ALL_SPECS = [spec(p, d, m) for p in P for d in ("float32", "bfloat16", "int32") for m in Memory]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("src", ALL_SPECS, ids=str)
def test_the_table_of_moves(src, replicas):
    roles = roles_of(replicas, 4)
    for dst in ALL_SPECS:
        expected = expected_kind(src, dst, replicas)
        if expected is None:
            for ask in (move_kind, check_move):
                with pytest.raises(SpecError):
                    ask(src, dst, roles)
            continue
        assert move_kind(src, dst, roles) is expected
        assert expected.is_sum == (expected in SUMS)
        # A sum needs floating addends and a wide enough floating destination.
        if expected in SUMS and not (is_floating(src.dtype) and dst.dtype == "float32"):
            with pytest.raises(SpecError):
                check_move(src, dst, roles)
        else:
            assert check_move(src, dst, roles) is expected


@pytest.mark.parametrize("pair", MOVES, ids=lambda pair: "-".join(p.value for p in pair))
def test_scale_and_add_belong_to_sums(pair):
    roles, src, dst = roles_of(1, 4), spec(pair[0]), spec(pair[1])
    kind = MOVES[pair]
    for scale, add in ((0.5, False), (1.0, True), (0.5, True)):
        if kind in SUMS:
            assert check_move(src, dst, roles, scale=scale, add=add) is kind
        else:
            with pytest.raises(SpecError, match=f"belong to moves that sum, not to {kind.value}"):
                check_move(src, dst, roles, scale=scale, add=add)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (spec(P.SHARDED), spec(P.REPLICATED, numel=4), "keeps the number of elements: 8 x .* 4 x"),
        (spec(P.SHARDED), spec(P.SHARDED), "nothing to move: 8 x float32 sharded on device"),
        (
            spec(P.SHARDED),
            spec(P.SHARDED, "bfloat16", Memory.HOST),
            "between memories changes nothing else",
        ),
        (spec(P.SHARDED), spec(P.REPLICATED, memory=Memory.HOST), "changes nothing else"),
        (spec(P.SHARDED), spec(P.PARTIAL), "SHARDED -> PARTIAL is no move; there are SHARDED -> R"),
        (spec(P.PARTIAL), spec(P.SHARDED), r"replica axis of 2; go through SHARDED_PARTIAL"),
        (spec(P.PARTIAL), spec(P.REPLICATED, "bfloat16"), "float32 or wider, not in bfloat16"),
        (spec(P.PARTIAL), spec(P.REPLICATED, "int64"), "float32 or wider, not in int64"),
        (spec(P.PARTIAL, "int32"), spec(P.REPLICATED), "addends are floating point, not int32"),
        (
            spec(P.SHARDED, numel=7),
            spec(P.REPLICATED, numel=7),
            "7 x float32 .* does not divide over 4 shards; pad it",
        ),
    ],
)
def test_a_refused_move_says_why(src, dst, message):
    with pytest.raises(SpecError, match=message):
        check_move(src, dst, roles_of(2, 4))


def test_sums_may_be_stored_wider_than_float32():
    roles = roles_of(1, 4)
    src, dst = spec(P.PARTIAL, "bfloat16"), spec(P.SHARDED, "float64")
    assert check_move(src, dst, roles) is K.REDUCE_SCATTER


# The way of a gradient


@pytest.mark.parametrize(
    ("replicas", "home", "expected"),
    [
        (1, P.SHARDED, (P.PARTIAL, P.SHARDED)),
        (2, P.SHARDED, (P.PARTIAL, P.SHARDED_PARTIAL, P.SHARDED)),
        (1, P.REPLICATED, (P.PARTIAL, P.REPLICATED)),
        (2, P.REPLICATED, (P.PARTIAL, P.REPLICATED)),
    ],
)
def test_reduce_path(replicas, home, expected):
    assert reduce_path(roles_of(replicas, 4), home) == expected


@pytest.mark.parametrize("home", [P.PARTIAL, P.SHARDED_PARTIAL])
def test_the_home_of_a_gradient_is_no_addend(home):
    with pytest.raises(SpecError, match=f"SHARDED or REPLICATED, not {home.name}"):
        reduce_path(roles_of(1, 2), home)


@pytest.mark.parametrize(
    ("replicas", "shards", "home"),
    list(itertools.product((1, 2, 3), (1, 2, 4), (P.SHARDED, P.REPLICATED))),
)
def test_every_step_of_a_reduce_path_sums_over_each_rank_once(replicas, shards, home):
    roles = roles_of(replicas, shards)
    path = reduce_path(roles, home)
    assert path[0] is P.PARTIAL
    assert path[-1] is home
    summed = 1
    for before, after in itertools.pairwise(path):
        kind = check_move(spec(before, numel=24), spec(after, numel=24), roles, add=True)
        summed *= roles.group_size(kind)
    assert summed == replicas * shards
