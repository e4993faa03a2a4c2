"""Cases about the control plane."""

from __future__ import annotations

from meshcore.backend import Backend
from meshcore.testing.contract.model import Case, require


def _say(rank: int, length: int) -> bytes:
    return bytes((rank * 31 + i * 7) % 251 for i in range(length))


def _expect_said(backend: Backend, lengths: dict[int, int]) -> None:
    mine = {rank: _say(rank, lengths[rank]) for rank in backend.local_ranks}
    payload = mine if len(mine) > 1 else next(iter(mine.values()))
    said = backend.exchange(payload)
    require(
        set(said) == set(backend.mesh.ids),
        f"exchange speaks for ranks {sorted(said)}, and the mesh is {backend.mesh.ids}",
    )
    for rank in backend.mesh.ids:
        want = _say(rank, lengths[rank])
        require(
            bytes(said[rank]) == want,
            f"rank {rank} said {len(want)} bytes, and {len(said[rank])} other bytes arrived",
        )


def every_rank_hears_every_rank(backend: Backend) -> None:
    """Short payloads of different lengths and none, by rank."""
    _expect_said(backend, {rank: 5 + rank for rank in backend.mesh.ids})
    _expect_said(backend, {rank: 3 * (i % 2) for i, rank in enumerate(backend.mesh.ids)})
    _expect_said(backend, dict.fromkeys(backend.mesh.ids, 0))


def long_payloads_arrive_whole(backend: Backend) -> None:
    """Payloads beyond any inline size, beside short and empty ones."""
    lengths = {rank: (70_000, 0, 12, 4_097)[i % 4] for i, rank in enumerate(backend.mesh.ids)}
    _expect_said(backend, lengths)
    _expect_said(backend, {rank: 1 + i for i, rank in enumerate(backend.mesh.ids)})


def rounds_do_not_mix(backend: Backend) -> None:
    """Many rounds, each with its own words."""
    for step in range(12):
        said = backend.exchange(b"step %d" % step)
        require(
            dict(said) == dict.fromkeys(backend.mesh.ids, b"step %d" % step),
            f"round {step} heard {dict(said)}",
        )


def a_mapping_speaks_for_each_rank(backend: Backend) -> None:
    """A payload by rank is taken as such, with a single local rank too."""
    said = backend.exchange({rank: b"rank %d" % rank for rank in backend.local_ranks})
    require(
        dict(said) == {rank: b"rank %d" % rank for rank in backend.mesh.ids},
        f"payloads by rank arrived as {dict(said)}",
    )


CASES = (
    Case(every_rank_hears_every_rank),
    Case(long_payloads_arrive_whole),
    Case(rounds_do_not_mix, needs_data=False),
    Case(a_mapping_speaks_for_each_rank),
)
