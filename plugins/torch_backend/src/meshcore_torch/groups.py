"""Communicators: one per (rank set, purpose), made in one order by the whole world, destroyed once.

[Note: order of ranks] The mesh says in which order the ranks of a group count, and torch sorts them
unless it is told not to. Where a version cannot be told, ``Group.in_mesh_order`` is False and the
collectives take forms that do not depend on the order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from meshcore import BackendError, MeshcoreError, PeerError
from meshcore.backend import AxisRoles

_PEER_WORDS = re.compile(
    r"timed? ?out|timeout|connect|closed by peer|reset by peer|broken pipe|socket|no route"
    r"|gloo/transport|recv|nccl|store",
    re.IGNORECASE,
)


@dataclass(frozen=True, eq=False)
class Group:
    """One communicator that this process takes part in.

    Attributes:
        ranks: global ranks in mesh order.
        order: the same as torch counts them. See [Note: order of ranks].
    """

    ranks: tuple[int, ...]
    order: tuple[int, ...]
    process_group: dist.ProcessGroup
    timeout_seconds: float

    @property
    def in_mesh_order(self) -> bool:
        """Whether torch counts the ranks in mesh order."""
        return self.ranks == self.order

    @contextmanager
    def blame(self, operation: object) -> Iterator[None]:
        """Turn what torch raises into our errors; ``operation`` names itself by ``str``."""
        try:
            yield
        except MeshcoreError:
            raise
        except RuntimeError as error:
            raise failure(operation, self.ranks, self.timeout_seconds, error) from error


def failure(
    operation: object, ranks: tuple[int, ...], timeout_seconds: float, error: Exception
) -> BackendError:
    """The error to raise for what torch raised: ``PeerError`` if a peer is to blame."""
    reason = " ".join(str(error).split())
    if _PEER_WORDS.search(reason):
        return PeerError(
            f"{operation} over ranks {list(ranks)} failed: a peer is gone, or did not take part "
            f"within {timeout_seconds:g} s; the group cannot be used any more: close the backend, "
            f"look at the logs of these ranks, and start again; torch says: {reason}"
        )
    return BackendError(f"{operation} over ranks {list(ranks)} failed: {reason}")


class GroupSet:
    """All communicators of one backend.

    Purposes: "gather" and "reduce" over the shard axis, "replica" over the replica axis, "whole"
    for sums over the whole mesh, "control" for small payloads. Gathers and sums have groups of
    their own, so that the order among gathers does not depend on when sums are started. Where
    "whole" has the ranks of "reduce" or "replica", it is the same communicator.

    Args:
        roles: the axes; every process of the world passes equal ones.
        rank: this process.
        transport: torch's name of the backend for data ("gloo", or "cpu:gloo,cuda:nccl"); control
            is always gloo.
        timeout_seconds: how long a collective waits for peers.

    Raises:
        PeerError: a process of the world did not make the same groups in time.
    """

    def __init__(
        self, roles: AxisRoles, rank: int, *, transport: str, timeout_seconds: float
    ) -> None:
        self._mine: dict[str, Group] = {}
        for purpose, ranks in _wanted(roles):
            gloo_only = purpose == "control"
            try:
                made = _new_group(
                    ranks, purpose, "gloo" if gloo_only else transport, timeout_seconds
                )
            except RuntimeError as error:
                self.close()
                raise failure("making a group", ranks, timeout_seconds, error) from error
            if rank in ranks:
                order = tuple(dist.get_process_group_ranks(made))
                self._mine[purpose] = Group(ranks, order, made, timeout_seconds)
        sums = self._mine.get("reduce") or self._mine.get("replica")
        if sums is not None:
            self._mine.setdefault("whole", sums)

    def __len__(self) -> int:
        return len(set(self._mine.values()))

    def get(self, purpose: str) -> Group:
        """The group of this process for a purpose; a purpose of size 1 has none (KeyError)."""
        return self._mine[purpose]

    def close(self) -> None:
        """Destroy these groups and no others; idempotent."""
        mine, self._mine = self._mine, {}
        for group in set(mine.values()):
            _destroy(group.process_group)


def _wanted(roles: AxisRoles) -> list[tuple[str, tuple[int, ...]]]:
    """Purposes and rank sets, in the order in which the whole world makes them."""
    mesh = roles.mesh
    out: list[tuple[str, tuple[int, ...]]] = []
    if roles.shards > 1:
        for purpose in ("gather", "reduce"):
            out += [(purpose, ranks) for ranks in mesh.groups(roles.shard_axis)]
    if roles.replica_axis is not None and roles.replicas > 1:
        out += [("replica", ranks) for ranks in mesh.groups(roles.replica_axis)]
    if roles.shards > 1 and roles.replicas > 1:
        out.append(("whole", mesh.ids))
    if mesh.size > 1:
        out.append(("control", mesh.ids))
    return out


def _new_group(
    ranks: tuple[int, ...], purpose: str, transport: str, timeout_seconds: float
) -> dist.ProcessGroup:
    timeout = timedelta(seconds=timeout_seconds)
    description = f"meshcore {purpose}"
    unsorted = list(ranks) != sorted(ranks)
    if unsorted and "sort_ranks" in inspect.signature(dist.new_group).parameters:
        made = dist.new_group(
            list(ranks), timeout, transport, group_desc=description, sort_ranks=False
        )
    else:
        made = dist.new_group(list(ranks), timeout, transport, group_desc=description)
    # Outside the group torch gives a marker object, which is never used.
    return made  # type: ignore[no-any-return]  # torch annotates nothing here


def _destroy(process_group: dist.ProcessGroup) -> None:
    if not dist.is_initialized():
        return  # whoever destroyed the default group destroyed all groups with it
    try:
        dist.destroy_process_group(process_group)
    except ValueError:
        return  # the same, and then the world was started again: torch does not know it any more
