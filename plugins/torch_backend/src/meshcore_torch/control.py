"""The control plane: small payloads of all ranks to all ranks, through one gloo group."""

from __future__ import annotations

import struct

import torch

from meshcore_torch.collectives import gather_rows
from meshcore_torch.groups import Group

INLINE_NBYTES = 248
"""Payloads up to this travel beside their length, 256 bytes in all: one collective, not two."""


def exchange_payloads(group: Group, own: bytes) -> dict[int, bytes]:
    """All-gather payloads of any length over a group: rank -> bytes, in mesh order.

    Raises:
        PeerError: a peer is gone or late.
    """
    # Rows made in inference mode could not be received into.
    with group.blame("exchange"), torch.inference_mode(False):
        head = struct.pack("<q", len(own)) + own[:INLINE_NBYTES]
        heads = _gather(group, head, 8 + INLINE_NBYTES)
        lengths = {rank: int(struct.unpack_from("<q", row)[0]) for rank, row in heads.items()}
        out = {rank: row[8 : 8 + lengths[rank]] for rank, row in heads.items()}
        longest = max(lengths.values())
        if longest > INLINE_NBYTES:
            rests = _gather(group, own[INLINE_NBYTES:], longest - INLINE_NBYTES)
            for rank, row in rests.items():
                out[rank] += row[: max(0, lengths[rank] - INLINE_NBYTES)]
    return {rank: out[rank] for rank in group.ranks}


def _gather(group: Group, data: bytes, length: int) -> dict[int, bytes]:
    row = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    return {rank: got.numpy().tobytes() for rank, got in gather_rows(group, row).items()}
