"""Communicators and the control plane: how many, whose, for whom, and that none is left behind."""

from __future__ import annotations

import json

import pytest
import torch_ranks
import torch_world
from torch_support import MESHES

from meshcore.backend import TransferProfile
from meshcore.errors import SpecError
from meshcore.spec import MoveKind
from meshcore.testing import grid, line
from meshcore_torch.profile import KNOWN_FORMS
from meshcore_torch.testing import GlooWorkers

# Gathers, sums and control of a line; a grid has one more for replicas and one for the whole mesh.
COUNTS = {
    "one": 0,
    "two": 3,
    "four": 3,
    "four permuted": 3,
    "replicas": 2,
    "replica x shard": 5,
    "shard x replica": 5,
}


@pytest.mark.parametrize(("mesh", "count"), COUNTS.items())
def test_each_rank_is_in_one_group_per_purpose(workers, mesh, count):
    answers = workers.run(torch_world.group_counts, MESHES[mesh])
    ids = MESHES[mesh].ids
    assert [a for rank, a in enumerate(answers) if rank in ids] == [(count, 0)] * len(ids)
    assert all(a == (0, 0) for rank, a in enumerate(answers) if rank not in ids)


@pytest.mark.timeout(60)
def test_fifty_meshes_leave_nothing_behind(workers):
    for counts, files, total in workers.run(torch_world.make_and_destroy, 50):
        assert len(set(counts)) == 1
        assert files[-1] <= files[4] + 2
        assert total == 4.0


def test_ranks_outside_are_refused_at_once(workers):
    answers = workers.run(torch_world.every_verb_outside, line(0, 2))
    assert answers[0] == answers[2] == [2.0, 2.0]
    assert answers[1] == answers[3] == (0, None, [], True)


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize(
    "lengths", [[0, 0, 0, 0], [1, 0, 5, 3], [248, 1, 0, 2], [249, 248, 0, 1], [0, 10, 99_999, 7]]
)
@pytest.mark.parametrize("mesh", ["one", "three", "four permuted", "replica x shard"])
def test_exchange_gives_every_payload_to_every_rank(workers, mesh, lengths, by_rank):
    ids = MESHES[mesh].ids
    answers = workers.run(torch_ranks.exchanged, MESHES[mesh], lengths, by_rank)
    expected = {rank: bytes([rank + 1]) * lengths[rank] for rank in ids}
    assert [answers[rank] for rank in ids] == [expected] * len(ids)


@pytest.mark.parametrize("mesh", ["one", "two", "four permuted", "replicas", "replica x shard"])
def test_measured_profile_is_one_for_all_ranks(workers, mesh):
    answers = workers.run(torch_world.measured, MESHES[mesh])
    texts = {text for text in answers if text is not None}
    assert len(texts) == 1
    profile = TransferProfile.from_json(texts.pop())
    for kind, known in KNOWN_FORMS.items():
        assert {form.name for form in profile.forms[kind]} <= {form.name for form in known}
    measured = MESHES[mesh].roles().shards > 1
    assert profile.name == ("torch-gloo-measured" if measured else "torch-gloo")
    assert MoveKind.GATHER in profile.forms


def test_mesh_beyond_the_world_is_named_on_every_rank(workers):
    for name, text in workers.run(torch_world.raised_by_create, line(0, 7)):
        assert name == "MeshError"
        assert "rank 7" in text
        assert "4 ranks" in text


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_worlds_of_their_own():
    """A mesh over the whole world never touches the default group, at any world size."""
    for size in (1, 2, 3):
        with GlooWorkers(size) as own:
            case = grid(tuple(reversed(range(size))), 1, size)
            own.run(torch_ranks.sums_equal_mesh_order, case, None, 7, "bfloat16")
            assert own.run(torch_world.group_counts, case) == [(3 if size > 1 else 0, 0)] * size
            if size == 2:
                assert own.run(torch_world.closed_after_default_group) == [0, 0]


def test_all_gather_is_for_cuda_alone():
    from meshcore_torch.profile import NCCL_PROFILE, check_profile

    assert check_profile(NCCL_PROFILE, on_cpu=False) is NCCL_PROFILE
    with pytest.raises(SpecError, match="gather by 'all_gather'"):
        check_profile(NCCL_PROFILE, on_cpu=True)


def test_profile_survives_json():
    from meshcore_torch import GLOO_PROFILE, NCCL_PROFILE

    for profile in (GLOO_PROFILE, NCCL_PROFILE):
        assert TransferProfile.from_json(profile.to_json()) == profile
        assert json.loads(profile.to_json())["name"] == profile.name
