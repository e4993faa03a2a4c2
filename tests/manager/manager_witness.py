"""A numpy backend that knows which of its arrays are alive, and one of its calls can fail."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshcore.backend import TransferProfile
from meshcore.reference import NumpyBackend, RankArrays
from meshcore.spec import AxisRoles, BufferSpec, Memory
from meshcore.testing import FaultyBackend


class CountingBackend(NumpyBackend):
    """Remembers every array that it hands out, without keeping it alive.

    What somebody still holds shows in ``live_nbytes``, known to a ledger or not.
    """

    def __init__(self, roles: AxisRoles, profile: TransferProfile | None = None) -> None:
        super().__init__(roles, profile)
        self._alive: dict[int, tuple[weakref.ref[Any], int, Memory]] = {}

    def empty(self, spec: BufferSpec, into: Any = None) -> RankArrays:
        array = super().empty(spec, into)
        if into is None:
            for rank, piece in zip(self.local_ranks, array, strict=True):
                self._alive[id(piece)] = (weakref.ref(piece), rank, spec.memory)
                piece[...] = np.asarray(7777, np.float32).astype(piece.dtype)  # any content
        return array

    def live_nbytes(self) -> Mapping[int, Mapping[Memory, int]]:
        out = {rank: dict.fromkeys(Memory, 0) for rank in self.local_ranks}
        for key, (reference, rank, memory) in list(self._alive.items()):
            piece = reference()
            if piece is None:
                del self._alive[key]
            else:
                out[rank][memory] += piece.nbytes
        return out


class FaultyCountingBackend(FaultyBackend):
    """``FaultyBackend`` over ``CountingBackend``."""

    inner: CountingBackend

    def live_nbytes(self) -> Mapping[int, Mapping[Memory, int]]:
        return self.inner.live_nbytes()
