"""Mutants of norms, the control plane and closing."""

# ruff: noqa: D102 - a class docstring says what is wrong with the one verb that it changes

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshcore.backend import TransferProfile
from meshcore.reference import NumpyBackend, Pieces
from meshcore.spec import AxisRoles, BufferSpec, Placement


class NormCountsPadding(NumpyBackend):
    """Valid ranges are ignored."""

    def square_sum(
        self, array: Pieces, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> float:
        return super().square_sum(array, spec, [(0, spec.numel)])


class NormMasksTooLate(NumpyBackend):
    """Elements are squared first and multiplied by 0 then, which keeps NaN."""

    def square_sum(
        self, array: Pieces, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> float:
        everything = super().square_sum(array, spec, [(0, spec.numel)])
        return super().square_sum(array, spec, valid) + 0.0 * everything


class NormCountsReplicas(NumpyBackend):
    """Every replica counts its elements."""

    def square_sum(
        self, array: Pieces, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> float:
        return self.roles.replicas * super().square_sum(array, spec, valid)


class NormCountsCopies(NumpyBackend):
    """A REPLICATED buffer counts on every rank of the shard axis."""

    def square_sum(
        self, array: Pieces, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> float:
        copies = self.roles.shards if spec.placement is Placement.REPLICATED else 1
        return copies * super().square_sum(array, spec, valid)


class NormSquaresInFloat32(NumpyBackend):
    """Squares of large elements overflow."""

    def square_sum(
        self, array: Pieces, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> float:
        with np.errstate(over="ignore"):
            return float(np.float32(super().square_sum(array, spec, valid)))


class NormSkipsNonfinite(NumpyBackend):
    """An overflow is not seen."""

    def square_sum(
        self, array: Pieces, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> float:
        finite = (np.where(np.isfinite(piece), piece, piece.dtype.type(0)) for piece in array)
        return super().square_sum(tuple(finite), spec, valid)


class NormSquaresInPlace(NumpyBackend):
    """The buffer holds squares afterwards."""

    def square_sum(
        self, array: Pieces, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> float:
        out = super().square_sum(array, spec, valid)
        with np.errstate(over="ignore", invalid="ignore"):
            for piece in array:
                piece[...] = np.square(piece)
        return out


class NormOfNothingIsNaN(NumpyBackend):
    """A buffer without elements spoils the total."""

    def square_sum(
        self, array: Pieces, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> float:
        return super().square_sum(array, spec, valid) if spec.numel else math.nan


class ExchangeDropsARank(NumpyBackend):
    """The last rank is not heard."""

    def exchange(self, payload: bytes | Mapping[int, bytes]) -> dict[int, bytes]:
        said = super().exchange(payload)
        return {rank: said[rank] for rank in self.local_ranks[:-1]}


class ExchangeCutsPayloads(NumpyBackend):
    """Only what fits into one message arrives."""

    def exchange(self, payload: bytes | Mapping[int, bytes]) -> dict[int, bytes]:
        return {rank: said[:4096] for rank, said in super().exchange(payload).items()}


class GroupsOutliveClose(NumpyBackend):
    """Closing forgets the groups that were made."""

    @property
    def group_count(self) -> int:
        return sum(self.mesh.size // n for n in (self.roles.shards, self.roles.replicas) if n > 1)


class OneRankMakesAGroup(NumpyBackend):
    """A communicator is made for the whole mesh, even if there is nobody to talk to."""

    @property
    def group_count(self) -> int:
        return 0 if self._closed else super().group_count + 1


class LocalRanksAreSorted(NumpyBackend):
    """Local ranks come by number, not in mesh order."""

    def __init__(self, roles: AxisRoles, profile: TransferProfile | None = None) -> None:
        super().__init__(roles, profile)
        self.local_ranks = tuple(sorted(self.local_ranks))


class ProfileIsNoPureData(NumpyBackend):
    """The profile does not come back from JSON as it was."""

    def __init__(self, roles: AxisRoles, profile: TransferProfile | None = None) -> None:
        super().__init__(roles, profile)
        self.profile = replace(self.profile, name=_Name("numpy"))


class _Name(str):
    """A name that equals nothing but itself."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)
