"""Collectives of one group: started here, in flight until they are waited for.

Every function starts one collective and returns works to wait for. Tensors are 1-D, contiguous, and
stay as they are until then. What a gather or an exchange of shards moves are bytes: any dtype
arrives exactly, also those that a transport does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from meshcore_torch.groups import Group
from meshcore_torch.profile import ALL_GATHER, ALL_TO_ALL

Works: TypeAlias = list[Any]
"""``torch.distributed`` work handles."""


def shards_of(tensor: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """Views of the equal shards of a whole buffer."""
    return tensor.view(count, -1).unbind()


def start_gather(form: str, group: Group, whole: torch.Tensor, index: int) -> Works:
    """Fill a whole buffer whose own shard (number ``index``) is in its place already."""
    shards = shards_of(_bytes(whole), len(group.ranks))
    if form == ALL_GATHER.name and whole.is_cuda and group.in_mesh_order:
        return [_all_gather(_bytes(whole), shards[index], group)]
    return [
        dist.broadcast(shard, src=rank, group=group.process_group, async_op=True)
        for rank, shard in zip(group.ranks, shards, strict=True)
    ]


def start_exchange_shards(
    form: str, group: Group, addend: torch.Tensor, scratch: torch.Tensor, index: int
) -> tuple[Works, list[torch.Tensor]]:
    """Send every rank its shard of a whole addend, and get the addends of the own shard.

    Args:
        form: a form of the profile, whose scratch is passed.
        addend: the whole buffer; is not changed.
        scratch: as the form says, in the dtype of the addend.
        index: number of the own shard.

    Returns:
        Works, and the addends of the own shard in mesh order; one of them aliases ``addend``, or
        all of them ``scratch``.
    """
    count = len(group.ranks)
    mine = shards_of(addend, count)
    if form == ALL_TO_ALL.name and group.in_mesh_order:
        work = dist.all_to_all_single(
            _bytes(scratch), _bytes(addend), group=group.process_group, async_op=True
        )
        return [work], list(shards_of(scratch, count))
    numel = mine[index].shape[0]
    places = iter(scratch[: numel * (count - 1)].view(count - 1, -1).unbind())
    parts = [mine[index] if i == index else next(places) for i in range(count)]
    operations = []
    # Start with the next rank, so that not all ranks send to the same one first.
    for step in range(1, count):
        to, source = (index + step) % count, (index - step) % count
        operations += [
            _p2p(dist.isend, mine[to], group.ranks[to], group),
            _p2p(dist.irecv, parts[source], group.ranks[source], group),
        ]
    return dist.batch_isend_irecv(operations), parts


def start_all_reduce(group: Group, tensor: torch.Tensor) -> Works:
    """Sum in place over the group; the same bits on every rank."""
    return [dist.all_reduce(tensor, group=group.process_group, async_op=True)]


def gather_rows(group: Group, row: torch.Tensor) -> dict[int, torch.Tensor]:
    """All-gather one small uint8 row of a length that is equal on all ranks, and wait for it."""
    rows = torch.empty(len(group.ranks) * row.shape[0], dtype=torch.uint8)
    _all_gather(rows, row, group).wait()
    return dict(zip(group.order, shards_of(rows, len(group.ranks)), strict=True))


def _all_gather(whole: torch.Tensor, shard: torch.Tensor, group: Group) -> Any:
    # torch 2.13 deprecates the old name with a warning; older versions know only that one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, shard, group=group.process_group, async_op=True)


def _p2p(operation: Any, tensor: torch.Tensor, peer: int, group: Group) -> Any:
    return dist.P2POp(operation, _bytes(tensor), peer, group.process_group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
