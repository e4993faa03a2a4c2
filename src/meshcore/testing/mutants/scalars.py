"""Mutants of norms, the control plane and closing."""

# ruff: noqa: D102 - a class docstring says what is wrong with the one verb that it changes

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshcore.reference import NumpyBackend, Pieces
from meshcore.spec import BufferSpec, Placement


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
