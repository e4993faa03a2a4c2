"""What the ranks hold, and the arithmetic on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from meshcore.dtypes import numpy_dtype
from meshcore.spec import Memory

Piece: TypeAlias = npt.NDArray[Any]
"""What one rank holds: 1-D."""


class RankArrays(tuple[Piece, ...]):
    """One 1-D ``numpy.ndarray`` for each rank, in mesh order, all of one length and dtype.

    Attributes:
        memory: where it is said to be; to numpy, host and device are names only.
        gone: True once a verb consumed or freed it: its successor has the storage now.
    """

    memory: Memory
    gone: bool

    def __new__(cls, pieces: Iterable[Piece], memory: Memory) -> Self:
        """Take the pieces as they are."""
        self = super().__new__(cls, pieces)
        self.memory = memory
        self.gone = False
        return self


Pieces: TypeAlias = tuple[Piece, ...]
"""What verbs take: ``RankArrays``, or a plain tuple that an update made."""


def cast(piece: Piece, dtype: str) -> Piece:
    """Round to a dtype; what is out of range becomes inf or wraps, as it does on any device."""
    with np.errstate(over="ignore", invalid="ignore"):
        return piece.astype(numpy_dtype(dtype), copy=False)


def scaled_sum(addends: Sequence[Piece], dtype: str, scale: float) -> Piece:
    """Sum in order, each addend cast to the destination's dtype first, then times scale."""
    with np.errstate(over="ignore", invalid="ignore"):
        out = cast(addends[0], dtype).copy()
        for addend in addends[1:]:
            out += cast(addend, dtype)
        if scale != 1.0:
            out *= out.dtype.type(scale)
    return out
