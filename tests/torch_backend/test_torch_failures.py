"""Peers that die or are late, workers that hang: named errors, and soon."""

from __future__ import annotations

import os
import time

import pytest
import torch_world

from meshcore.errors import PeerError
from meshcore.testing import Case, line
from meshcore_torch.groups import failure
from meshcore_torch.testing import GlooWorkers, TorchHarness, WorkerError

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_dead_peer_is_a_peer_error_for_the_others():
    with GlooWorkers(3) as own:
        outcomes = own.outcomes(torch_world.peer_that_dies, 1)
        assert isinstance(outcomes[1].error, WorkerError)
        assert "exit code -9" in str(outcomes[1].error)
        for rank in (0, 2):
            assert outcomes[rank].error is None, outcomes[rank].traceback
            (gather, exchange), no_shell = outcomes[rank].value
            assert "gather" in gather[0]
            assert "over ranks [0, 1, 2]" in gather[0]
            assert "close the backend" in gather[0]
            assert "exchange" in exchange[0]
            assert gather[2]
            assert no_shell
        # The workers were killed; the next call starts new ones.
        assert len(set(own.run(os.getpid))) == 3


@pytest.mark.slow
def test_late_peer_is_a_peer_error_at_the_time_out():
    with GlooWorkers(2) as own:
        outcomes = own.outcomes(torch_world.peer_that_is_late, 1, 2.0, 8.0)
        (gather, _), _ = outcomes[0].value
        assert "2 s" in gather[0]
        assert gather[1] < 6.0


def test_other_failures_are_not_blamed_on_peers():
    assert (
        type(failure("gather", (0, 1), 5.0, RuntimeError("Connection reset by peer"))) is PeerError
    )
    named = failure("gather", (0, 1), 5.0, RuntimeError("Invalid scalar type"))
    assert not isinstance(named, PeerError)
    assert "gather over ranks [0, 1]" in str(named)
    assert "Invalid scalar type" in str(named)


def fail_on(rank):
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise KeyError(f"from rank {rank}")
    return dist.get_rank()


def sleep_on(rank, seconds):
    import torch.distributed as dist

    if dist.get_rank() == rank:
        time.sleep(seconds)
    return dist.get_rank()


def test_worker_errors_are_raised_here_with_rank_and_traceback(workers):
    with pytest.raises(KeyError, match="from rank 2") as caught:
        workers.run(fail_on, 2)
    (note,) = caught.value.__notes__
    assert "on rank 2 of 4" in note
    assert "in fail_on" in note
    assert workers.run(fail_on, 9) == [0, 1, 2, 3]


def fails_and_closes(backend):
    backend.close()
    raise ZeroDivisionError(f"rank {backend.local_ranks[0]}")


def exchanges(backend):
    assert len(backend.exchange(b"here")) == 3


def test_harness_starts_afresh_after_a_failed_case(workers):
    harness, mesh = TorchHarness(workers), line(2, 0, 1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="rank 0"):
            harness.run(Case(fails_and_closes), mesh)
        harness.run(Case(exchanges), mesh)
    harness.close()


@pytest.mark.slow
def test_hanging_worker_is_killed_and_named():
    with GlooWorkers(2, timeout_seconds=25.0, grace_seconds=1.0) as own:
        own.run(os.getpid)
        own.timeout_seconds = 2.0
        with pytest.raises(WorkerError, match=r"rank\(s\) \[1\] of 2 gave no answer"):
            own.run(sleep_on, 1, 30.0)
