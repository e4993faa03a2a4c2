"""Mutants of ``redistribute``."""

# ruff: noqa: D102 - a class docstring says what is wrong with the one verb that it changes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshcore.dtypes import numpy_dtype
from meshcore.reference import NumpyBackend, Piece, Pieces, RankArrays
from meshcore.spec import BufferSpec, MoveKind, move_kind


@dataclass(frozen=True)
class _Move:
    """One request to ``redistribute``."""

    src: BufferSpec
    dst: BufferSpec
    kind: MoveKind
    scale: float
    add: bool


class _MutantOfMoves(NumpyBackend):
    """Base: what a move gives may be changed before, in and after it."""

    def redistribute(
        self,
        array: Pieces,
        src: BufferSpec,
        dst: BufferSpec,
        *,
        into: Pieces | None,
        scratch: Sequence[Pieces] = (),
        scale: float = 1.0,
        add: bool = False,
    ) -> RankArrays:
        """The right move, changed by the hooks."""
        move = self.before(_Move(src, dst, move_kind(src, dst, self.roles), scale, add))
        out = super().redistribute(array, src, dst, into=into, scale=move.scale, add=move.add)
        return self.after(out, array, move)

    def before(self, move: _Move) -> _Move:
        """Change scale or add."""
        return move

    def after(self, out: RankArrays, source: Pieces, move: _Move) -> RankArrays:
        """Change the result."""
        return out


class ScatterGivesViews(_MutantOfMoves):
    """A shard is a view of the whole that it was cut from."""

    def after(self, out: RankArrays, source: Pieces, move: _Move) -> RankArrays:
        if move.kind is not MoveKind.SCATTER or move.src.dtype != move.dst.dtype:
            return out
        ranked = zip(self.local_ranks, source, strict=True)
        return RankArrays((piece[self._owned(r, move.dst)] for r, piece in ranked), out.memory)


class GatherOfOneGivesItsSource(_MutantOfMoves):
    """Where there is nothing to gather, the result is the source itself."""

    def after(self, out: RankArrays, source: Pieces, move: _Move) -> RankArrays:
        plain = move.kind is MoveKind.GATHER and move.src.dtype == move.dst.dtype
        return RankArrays(source, out.memory) if plain and self.roles.shards == 1 else out


class TransferGivesItsSource(_MutantOfMoves):
    """Host and device share their storage."""

    def after(self, out: RankArrays, source: Pieces, move: _Move) -> RankArrays:
        return RankArrays(source, out.memory) if move.kind is MoveKind.TRANSFER else out


class MovesTakeMore(_MutantOfMoves):
    """A destination has an element more than its spec."""

    def after(self, out: RankArrays, source: Pieces, move: _Move) -> RankArrays:
        return RankArrays((np.append(piece, piece[:1]) for piece in out), out.memory)


class SumSpoilsItsSource(_MutantOfMoves):
    """The first addend is used as the accumulator."""

    def after(self, out: RankArrays, source: Pieces, move: _Move) -> RankArrays:
        if move.kind.is_sum:
            source[0][: out[0].size] = out[0]
        return out


class ScaleIsIgnored(_MutantOfMoves):
    """A mean stays a sum."""

    def before(self, move: _Move) -> _Move:
        return replace(move, scale=1.0)


class AddIsIgnored(_MutantOfMoves):
    """The last micro-batch replaces the earlier ones."""

    def before(self, move: _Move) -> _Move:
        return replace(move, add=False)


class TotalIsScaled(_MutantOfMoves):
    """What the destination held is scaled again with every addition."""

    def redistribute(
        self,
        array: Pieces,
        src: BufferSpec,
        dst: BufferSpec,
        *,
        into: Pieces | None,
        scratch: Sequence[Pieces] = (),
        scale: float = 1.0,
        add: bool = False,
    ) -> RankArrays:
        if add and into is not None:
            into = self.scale(into, dst, scale)
        return super().redistribute(array, src, dst, into=into, scale=scale, add=add)


class SumIsAMean(NumpyBackend):
    """Sums are divided by the number of addends."""

    def _moved(
        self, pieces: Mapping[int, Piece], rank: int, kind: MoveKind, dst: BufferSpec, scale: float
    ) -> Piece:
        factor = scale / self.roles.group_size(kind) if kind.is_sum else scale
        return super()._moved(pieces, rank, kind, dst, factor)


class GatherReversesShards(NumpyBackend):
    """Shards come in the wrong order."""

    def _moved(
        self, pieces: Mapping[int, Piece], rank: int, kind: MoveKind, dst: BufferSpec, scale: float
    ) -> Piece:
        if kind is MoveKind.GATHER:
            group = self.roles.shard_group(rank)
            swapped = {r: pieces[other] for r, other in zip(group, reversed(group), strict=True)}
            pieces = {**pieces, **swapped}
        return super()._moved(pieces, rank, kind, dst, scale)


class GatherSortsRanks(NumpyBackend):
    """Shards come in the order of rank numbers, not of the mesh."""

    def _moved(
        self, pieces: Mapping[int, Piece], rank: int, kind: MoveKind, dst: BufferSpec, scale: float
    ) -> Piece:
        if kind is MoveKind.GATHER:
            group = self.roles.shard_group(rank)
            by_number = {r: pieces[other] for r, other in zip(group, sorted(group), strict=True)}
            pieces = {**pieces, **by_number}
        return super()._moved(pieces, rank, kind, dst, scale)


class AllReduceForgetsReplicas(NumpyBackend):
    """A sum over the mesh stops at the shard axis."""

    def _moved(
        self, pieces: Mapping[int, Piece], rank: int, kind: MoveKind, dst: BufferSpec, scale: float
    ) -> Piece:
        if kind is MoveKind.ALL_REDUCE:
            group = self.roles.shard_group(rank)
            pieces = {r: p if r in group else np.zeros_like(p) for r, p in pieces.items()}
        return super()._moved(pieces, rank, kind, dst, scale)


class SumsInSixteenBits(NumpyBackend):
    """Addends are summed in their own dtype."""

    def _moved(
        self, pieces: Mapping[int, Piece], rank: int, kind: MoveKind, dst: BufferSpec, scale: float
    ) -> Piece:
        if not kind.is_sum:
            return super()._moved(pieces, rank, kind, dst, scale)
        narrow = replace(dst, dtype=str(next(iter(pieces.values())).dtype))
        out: Piece = super()._moved(pieces, rank, kind, narrow, 1.0)
        out = out.astype(numpy_dtype(dst.dtype))
        out *= out.dtype.type(scale)
        return out


class GatherCutsBits(NumpyBackend):
    """bfloat16 is made by cutting float32 off, not by rounding it."""

    def _moved(
        self, pieces: Mapping[int, Piece], rank: int, kind: MoveKind, dst: BufferSpec, scale: float
    ) -> Piece:
        if kind is MoveKind.GATHER and dst.dtype == "bfloat16":
            cut = np.uint32(0xFFFF0000)
            pieces = {
                r: (p.view(np.uint32) & cut).view(np.float32) if p.dtype == np.float32 else p
                for r, p in pieces.items()
            }
        return super()._moved(pieces, rank, kind, dst, scale)


class GatherFlushesSubnormals(NumpyBackend):
    """Elements too small to be normal arrive as zero."""

    def _moved(
        self, pieces: Mapping[int, Piece], rank: int, kind: MoveKind, dst: BufferSpec, scale: float
    ) -> Piece:
        out = super()._moved(pieces, rank, kind, dst, scale)
        if kind is MoveKind.GATHER and dst.dtype == "float32":
            out = np.where(np.abs(out) < np.finfo(np.float32).tiny, np.float32(0), out)
        return out


class ShardsGoByPosition(NumpyBackend):
    """A rank's shard is taken from its place in the mesh, whatever the order of the axes."""

    def _owned(self, rank: int, spec: BufferSpec) -> slice:
        shard = spec.numel // self.roles.shards
        start = self.mesh.position(rank) % self.roles.shards * shard
        return slice(start, start + shard)
