"""The moves themselves: which collective a kind of move starts, and what is left to do after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from meshcore.backend import BufferSpec, MoveKind
from meshcore_torch import tensors
from meshcore_torch.collectives import (
    Works,
    shards_of,
    start_all_reduce,
    start_exchange_shards,
    start_gather,
)
from meshcore_torch.groups import Group

PURPOSES = {
    MoveKind.GATHER: "gather",
    MoveKind.REDUCE_SCATTER: "reduce",
    MoveKind.REPLICA_SUM: "replica",
    MoveKind.ALL_REDUCE: "whole",
}
"""Kind of move -> purpose of the group that it runs over; the other kinds are local."""

Started: TypeAlias = tuple[Works, Callable[[], None] | None]
"""What to wait for, and what is left to do then."""


@dataclass(frozen=True, eq=False, slots=True)
class Move:
    """One request to move local tensors; all of them 1-D and with elements.

    Attributes:
        kind: what it is.
        src: spec of ``source``.
        dst: spec of ``target``.
        form: which form of the profile it takes, if it is over a group.
        shards: number of shards of a whole buffer.
        index: number of this rank's shard.
        scratch: what the form needs.
        scale: factor of a sum.
        add: whether a sum is added to what ``target`` holds.
    """

    kind: MoveKind
    src: BufferSpec
    dst: BufferSpec
    form: str
    shards: int
    index: int
    source: torch.Tensor
    target: torch.Tensor
    scratch: Sequence[torch.Tensor]
    scale: float
    add: bool

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.src} -> {self.dst})"

    def start(self, group: Group | None) -> Started:
        """Start it over its group, or do it here and now if it is local.

        Raises:
            PeerError: a peer is gone.
        """
        if group is None:
            self._do_locally()
            return [], None
        with group.blame(self):
            return self._start_over(group)

    def _start_over(self, group: Group) -> Started:
        if self.kind is MoveKind.GATHER:
            # The cast comes before the transport, straight into the own place.
            shards_of(self.target, self.shards)[self.index].copy_(self.source)
            return start_gather(self.form, group, self.target, self.index), None
        if self.kind is MoveKind.REDUCE_SCATTER:
            works, parts = start_exchange_shards(
                self.form, group, self.source, self.scratch[0], self.index
            )
            return works, lambda: self._sum(parts)
        sums = self.scratch[0] if self.add else self.target
        sums.copy_(self.source)
        return start_all_reduce(group, sums), lambda: self._finish_all_reduce(sums)

    def _do_locally(self) -> None:
        if self.kind.is_sum:
            self._sum([self.source])
        elif self.kind is MoveKind.SCATTER:
            self.target.copy_(shards_of(self.source, self.shards)[self.index])
        else:
            self.target.copy_(self.source, non_blocking=True)

    def _sum(self, parts: Sequence[torch.Tensor]) -> None:
        tensors.sum_parts(parts, self.target, scale=self.scale, add=self.add)

    def _finish_all_reduce(self, sums: torch.Tensor) -> None:
        if self.scale != 1.0:
            sums.mul_(self.scale)
        if self.add:
            self.target.add_(sums)
