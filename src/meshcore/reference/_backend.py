"""Every verb over explicit virtual ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshcore.backend import Array, TransferProfile
from meshcore.dtypes import is_floating, numpy_dtype, sum_dtype
from meshcore.errors import ClosedError, SpecError
from meshcore.reference._pieces import Piece, Pieces, RankArrays, cast, scaled_sum
from meshcore.spec import AxisRoles, BufferSpec, Memory, MoveKind, move_kind

NUMPY_PROFILE = TransferProfile(name="numpy")


class NumpyBackend:
    """R x S virtual ranks; arrays are tuples of ndarrays, one per rank in mesh order.

    Every move is complete when it returns. ``manager.update`` may hand back plain tuples of
    ndarrays; they count as device memory.
    """

    name = "numpy"

    def __init__(self, roles: AxisRoles, profile: TransferProfile | None = None) -> None:
        self.roles = roles
        self.mesh = roles.mesh
        self.local_ranks: tuple[int, ...] = roles.mesh.ids
        self.profile = NUMPY_PROFILE if profile is None else replace(profile, has_data=True)
        self._closed = False

    @property
    def group_count(self) -> int:
        """Rank sets larger than 1 along the two axes while open; no communicator is behind them."""
        sizes = (self.roles.shards, self.roles.replicas)
        return 0 if self._closed else sum(self.mesh.size // n for n in sizes if n > 1)

    # --- storage --------------------------------------------------------------------------

    def empty(self, spec: BufferSpec, into: Pieces | None = None) -> RankArrays:
        """Storage with any content, the shell's if one is given."""
        self._require_open()
        if into is not None:
            return self._successor(into, spec)
        shape, dtype = self._local_numel(spec), numpy_dtype(spec.dtype)
        return RankArrays((np.empty(shape, dtype) for _ in self.local_ranks), spec.memory)

    def zeros(self, spec: BufferSpec, into: Pieces | None = None) -> RankArrays:
        """Storage filled with zeros, the shell's if one is given."""
        array = self.empty(spec, into)
        for piece in array:
            piece[...] = 0
        return array

    def free(self, array: Pieces) -> RankArrays | None:
        """Give the buffer up; a shell is left where the profile keeps shells."""
        memory = array.memory if isinstance(array, RankArrays) else Memory.DEVICE
        pieces = self._consume(array)
        return RankArrays(pieces, memory) if memory in self.profile.shells else None

    def drop(self, shell: Pieces) -> None:
        """Give a shell up."""
        self._consume(shell)

    def nbytes(self, array: Pieces) -> dict[int, int]:
        """Bytes by rank; 0 once the array is gone."""
        gone = isinstance(array, RankArrays) and array.gone
        return {
            rank: 0 if gone else piece.nbytes
            for rank, piece in zip(self.local_ranks, array, strict=True)
        }

    # --- moves ----------------------------------------------------------------------------

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
        """One move. Needs no scratch of its own, and ignores what another's profile asked for."""
        pieces = self._pieces(array, src)
        moved = [
            self._moved(pieces, rank, move_kind(src, dst, self.roles), dst, scale)
            for rank in self.local_ranks
        ]
        out = self.empty(dst, into)
        for piece, value in zip(out, moved, strict=True):
            piece[...] = np.add(piece, value) if add else value
        return out

    def _moved(
        self, pieces: Mapping[int, Piece], rank: int, kind: MoveKind, dst: BufferSpec, scale: float
    ) -> Piece:
        """What one rank gets; may alias a source."""
        roles = self.roles
        if kind is MoveKind.GATHER:
            return np.concatenate([cast(pieces[r], dst.dtype) for r in roles.shard_group(rank)])
        if kind is MoveKind.SCATTER:
            return cast(pieces[rank][self._owned(rank, dst)], dst.dtype)
        if kind is MoveKind.REDUCE_SCATTER:
            owned = self._owned(rank, dst)
            addends = [pieces[r][owned] for r in roles.shard_group(rank)]
        elif kind is MoveKind.REPLICA_SUM:
            addends = [pieces[r] for r in roles.replica_group(rank)]
        elif kind is MoveKind.ALL_REDUCE:
            addends = [pieces[r] for r in roles.mesh.ids]
        else:
            return cast(pieces[rank], dst.dtype)
        return scaled_sum(addends, dst.dtype, scale)

    def _owned(self, rank: int, spec: BufferSpec) -> slice:
        """Elements of the whole buffer that a rank's shard index owns."""
        shard = spec.numel // self.roles.shards
        start = self.roles.shard_index(rank) * shard
        return slice(start, start + shard)

    # --- content --------------------------------------------------------------------------

    def write(
        self,
        array: Pieces,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> RankArrays:
        """Write or add; ranks that a mapping leaves out keep what they hold."""
        pieces = self._pieces(array, spec)
        by_rank = values if isinstance(values, Mapping) else dict.fromkeys(pieces, values)
        for rank, value in by_rank.items():
            self.mesh.position(rank)
            new = cast(np.asarray(value), spec.dtype)
            part = pieces[rank][start : start + new.size]
            part[...] = np.add(part, new) if add else new
        return self._successor(array, spec)

    def read(
        self, array: Pieces, spec: BufferSpec, start: int, stop: int, *, copy: bool = False
    ) -> Piece:
        """The first rank's elements; read-only unless copied, for the other ranks hold copies."""
        self._require_open()
        part = self._pieces(array, spec)[self.local_ranks[0]][start:stop]
        if copy:
            return part.copy()
        part.flags.writeable = False
        return part

    def scale(self, array: Pieces, spec: BufferSpec, factor: float) -> RankArrays:
        """Multiply in float32 or wider, then round to the buffer's dtype."""
        wide = numpy_dtype(sum_dtype(spec.dtype) if is_floating(spec.dtype) else "float64")
        with np.errstate(over="ignore", invalid="ignore"):
            for piece in self._pieces(array, spec).values():
                piece[...] = (piece.astype(wide) * wide.type(factor)).astype(piece.dtype)
        return self._successor(array, spec)

    def to_numpy(self, array: Pieces) -> dict[int, Piece]:
        """Copies by rank."""
        self._require_live(array)
        return {r: piece.copy() for r, piece in zip(self.local_ranks, array, strict=True)}

    # --- scalars and control --------------------------------------------------------------

    def square_sum(
        self, array: Pieces, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> float:
        """Sum over all ranks, in float64: each element where its shard index owns it, once."""
        out = 0.0
        for rank, piece in self._pieces(array, spec).items():
            if self.roles.replica_index(rank) != 0:
                continue
            owned = self._owned(rank, spec)
            offset = owned.start if spec.placement.is_split else 0
            for start, stop in valid:
                low, high = max(start, owned.start), min(stop, owned.stop)
                if low < high:
                    part = piece[low - offset : high - offset].astype(np.float64)
                    out += float(np.sum(np.square(part)))
        return out

    def total(self, parts: Sequence[float]) -> float:
        """All ranks are here: the sum of the parts."""
        self._require_open()
        return float(sum(parts))

    def wait(self, array: Pieces) -> None:
        """Nothing is ever in flight."""
        self._require_live(array)

    def exchange(self, payload: bytes | Mapping[int, bytes]) -> dict[int, bytes]:
        """Every rank's payload by rank."""
        self._require_open()
        if isinstance(payload, bytes):
            return dict.fromkeys(self.local_ranks, payload)
        if set(payload) != set(self.local_ranks):
            raise SpecError(
                f"a payload by rank names exactly the local ranks {self.local_ranks}; it names "
                f"{sorted(payload)}"
            )
        return {rank: payload[rank] for rank in self.local_ranks}

    def close(self) -> None:
        """Refuse further verbs, except those that give memory up; idempotent."""
        self._closed = True

    # --- guards ---------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this numpy backend is closed; create a new one")

    def _require_live(self, array: Pieces) -> None:
        if isinstance(array, RankArrays) and array.gone:
            raise ClosedError(
                "an array was used after a verb consumed or freed it; rebind to what each verb "
                "returned"
            )

    def _pieces(self, array: Pieces, spec: BufferSpec) -> dict[int, Piece]:
        """Pieces by rank, after a check that they are what the spec says."""
        self._require_open()
        self._require_live(array)
        want = (self._local_numel(spec),), numpy_dtype(spec.dtype)
        for piece in array:
            if (piece.shape, piece.dtype) != want:
                raise SpecError(f"an array of {piece.shape} x {piece.dtype} was passed as {spec}")
        return dict(zip(self.local_ranks, array, strict=True))

    def _local_numel(self, spec: BufferSpec) -> int:
        return spec.local_numel(self.roles.shards)

    def _consume(self, array: Pieces) -> Pieces:
        self._require_live(array)
        if isinstance(array, RankArrays):
            array.gone = True
        return tuple(array)

    def _successor(self, array: Pieces, spec: BufferSpec) -> RankArrays:
        """The same storage under a new name; the old one is gone."""
        self._pieces(array, spec)
        return RankArrays(self._consume(array), spec.memory)
