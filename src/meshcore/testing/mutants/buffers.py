"""Mutants of the verbs that open, fill, show and free a buffer."""

# ruff: noqa: D102 - a class docstring says what is wrong with the one verb that it changes

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshcore.backend import Array, TransferProfile
from meshcore.reference import NumpyBackend, Piece, Pieces, RankArrays
from meshcore.spec import AxisRoles, BufferSpec


class ZerosTakeMore(NumpyBackend):
    """Storage is rounded up to 64 elements."""

    def zeros(self, spec: BufferSpec, into: Pieces | None = None) -> RankArrays:
        out = super().zeros(spec, into)
        padded = (np.zeros(-(-piece.size // 64) * 64, piece.dtype) for piece in out)
        return RankArrays(padded, spec.memory)


class ZerosKeepOldData(NumpyBackend):
    """A shell is taken for zeros as it is."""

    def zeros(self, spec: BufferSpec, into: Pieces | None = None) -> RankArrays:
        return super().zeros(spec) if into is None else self.empty(spec, into)

    def free(self, array: Pieces) -> RankArrays | None:
        pieces = tuple(piece.copy() for piece in array)
        super().free(array)
        return RankArrays(pieces, getattr(array, "memory"))  # noqa: B009


class ZerosAreShared(NumpyBackend):
    """All buffers of zeros of one spec are one storage."""

    def __init__(self, roles: AxisRoles, profile: TransferProfile | None = None) -> None:
        super().__init__(roles, profile)
        self._shared: dict[BufferSpec, Pieces] = {}

    def zeros(self, spec: BufferSpec, into: Pieces | None = None) -> RankArrays:
        out = super().zeros(spec, into)
        return RankArrays(self._shared.setdefault(spec, tuple(out)), spec.memory)


class LackOfMemoryHasNoName(NumpyBackend):
    """What should be a ``MemoryError`` is some other error."""

    def empty(self, spec: BufferSpec, into: Pieces | None = None) -> RankArrays:
        try:
            return super().empty(spec, into)
        except MemoryError as error:
            raise RuntimeError(str(error)) from error


class FreeLeaks(NumpyBackend):
    """Freed storage stays."""

    def free(self, array: Pieces) -> RankArrays | None:
        return None


class FreeLeavesUnannouncedShells(NumpyBackend):
    """Storage is kept for reuse though the profile does not say so."""

    def free(self, array: Pieces) -> RankArrays | None:
        super().free(array)
        return RankArrays(tuple(array), getattr(array, "memory"))  # noqa: B009


class ToNumpyGivesViews(NumpyBackend):
    """What should be copies is the storage itself."""

    def to_numpy(self, array: Pieces) -> dict[int, Piece]:
        return dict(zip(self.local_ranks, array, strict=True))


class WriteLosesRanks(NumpyBackend):
    """Of values by rank only the first are written."""

    def write(
        self,
        array: Pieces,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> RankArrays:
        if isinstance(values, Mapping):
            values = dict(list(values.items())[:1])
        return super().write(array, spec, start, values, add=add)


class WriteClearsAbsentRanks(NumpyBackend):
    """Ranks that are not named get zeros."""

    def write(
        self,
        array: Pieces,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> RankArrays:
        if isinstance(values, Mapping) and not add:
            for rank, piece in zip(self.local_ranks, array, strict=True):
                piece[...] = 0 if rank not in values else piece
        return super().write(array, spec, start, values, add=add)


class WriteIsOffByOne(NumpyBackend):
    """Values land one element early, except at the start."""

    def write(
        self,
        array: Pieces,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> RankArrays:
        return super().write(array, spec, max(start - 1, 0), values, add=add)


class AddOverwrites(NumpyBackend):
    """Adding to a slot replaces what it held."""

    def write(
        self,
        array: Pieces,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> RankArrays:
        return super().write(array, spec, start, values)


class WriteKeepsItsValues(NumpyBackend):
    """A whole write takes the caller's array as its storage."""

    def write(
        self,
        array: Pieces,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> RankArrays:
        out = super().write(array, spec, start, values, add=add)
        whole = isinstance(values, np.ndarray) and values.shape == out[0].shape
        if isinstance(values, Mapping) or add or not whole or values.dtype != out[0].dtype:
            return out
        return RankArrays((values, *out[1:]), spec.memory)


class ScaleReachesOneRank(NumpyBackend):
    """Only the first local rank's elements are multiplied."""

    def scale(self, array: Pieces, spec: BufferSpec, factor: float) -> RankArrays:
        others = [piece.copy() for piece in array[1:]]
        out = super().scale(array, spec, factor)
        return RankArrays((out[0], *others), spec.memory)


class WriteCutsBits(NumpyBackend):
    """float32 values are cut off to bfloat16, not rounded."""

    def write(
        self,
        array: Pieces,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> RankArrays:
        if spec.dtype == "bfloat16" and not isinstance(values, Mapping):
            bits = np.asarray(values, np.float32).view(np.uint32)
            values = (bits & np.uint32(0xFFFF0000)).view(np.float32)
        return super().write(array, spec, start, values, add=add)


class WriteTakesMore(NumpyBackend):
    """A buffer grows when it is written to."""

    def write(
        self,
        array: Pieces,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> RankArrays:
        out = super().write(array, spec, start, values, add=add)
        return RankArrays((np.append(piece, piece[:1]) for piece in out), spec.memory)


class ReadRunsToTheEnd(NumpyBackend):
    """The end of the range is ignored."""

    def read(
        self, array: Pieces, spec: BufferSpec, start: int, stop: int, *, copy: bool = False
    ) -> Piece:
        return super().read(array, spec, start, spec.numel, copy=copy)


class CopiedReadIsAView(NumpyBackend):
    """``copy`` is ignored."""

    def read(
        self, array: Pieces, spec: BufferSpec, start: int, stop: int, *, copy: bool = False
    ) -> Piece:
        return super().read(array, spec, start, stop)
