"""Rows of one ndarray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshcore import (
    AxisRoles,
    BufferSpec,
    ClosedError,
    DeviceMesh,
    Placement,
    TransferProfile,
)

DTYPES = ("float64", "float32", "float16", "int64", "int32", "uint8", "bool")


class Rows:
    """One buffer: (ranks, elements of one rank), rows in mesh order; None once freed."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values: Any = values


class ToyBackend:
    """Makes the destination of a move itself, and keeps no storage of what is freed."""

    name = "toy"

    def __init__(self, roles: AxisRoles) -> None:
        self.roles = roles
        self.mesh: DeviceMesh = roles.mesh
        self.local_ranks: tuple[int, ...] = roles.mesh.ids
        self.profile = TransferProfile("toy", dtypes=DTYPES, preallocates=False)
        self._open = True
        ids = self.local_ranks
        # Of each row: its index along the replica axis, and along the shard axis.
        self._replica = np.array([roles.replica_index(rank) for rank in ids])
        self._shard = np.array([roles.shard_index(rank) for rank in ids])

    @property
    def group_count(self) -> int:
        """One for the whole mesh, where there is somebody to talk to."""
        return int(self._open and self.mesh.size > 1)

    def empty(self, spec: BufferSpec, into: Rows | None = None) -> Rows:
        """Zeros are as good as anything."""
        return self.zeros(spec, into)

    def zeros(self, spec: BufferSpec, into: Rows | None = None) -> Rows:
        """New storage; there are no shells to reuse."""
        self._require_open()
        shape = (self.mesh.size, spec.local_numel(self.roles.shards))
        return Rows(np.zeros(shape, spec.dtype))

    def redistribute(
        self,
        array: Rows,
        src: BufferSpec,
        dst: BufferSpec,
        *,
        into: Rows | None,
        scratch: Sequence[Rows] = (),
        scale: float = 1.0,
        add: bool = False,
    ) -> Rows:
        """Any move is a change of rows."""
        self._require_open()
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.values.astype(dst.dtype)  # a copy, so nothing aliases the source
            moved = self._moved(cast, src.placement, dst.placement)
            if src.placement.is_addend:
                moved = moved * moved.dtype.type(scale)
        if into is None:
            return Rows(np.ascontiguousarray(moved))
        into.values[...] = into.values + moved if add else moved
        return into

    def _moved(self, rows: Any, src: Placement, dst: Placement) -> Any:
        if src is dst:
            return rows
        if src is Placement.SHARDED:
            return self._grid(rows).reshape(self.roles.replicas, -1)[self._replica]
        if dst is Placement.REPLICATED:
            return np.broadcast_to(rows.sum(axis=0), rows.shape)
        if src is Placement.SHARDED_PARTIAL:
            return self._grid(rows).sum(axis=0)[self._shard]
        if src is Placement.PARTIAL:
            rows = self._grid(rows).sum(axis=1)[self._replica]
        parts = rows.reshape(len(rows), self.roles.shards, -1)
        return parts[np.arange(len(rows)), self._shard]

    def _grid(self, rows: Any) -> Any:
        """The rows as (replicas, shards, elements)."""
        grid = np.empty((self.roles.replicas, self.roles.shards, rows.shape[1]), rows.dtype)
        grid[self._replica, self._shard] = rows
        return grid

    def write(
        self,
        array: Rows,
        spec: BufferSpec,
        start: int,
        values: Any | Mapping[int, Any],
        *,
        add: bool = False,
    ) -> Rows:
        """Write into the rows of the ranks that are named, or into all."""
        self._require_open()
        by_rank = values if isinstance(values, Mapping) else dict.fromkeys(self.local_ranks, values)
        for rank, value in by_rank.items():
            with np.errstate(over="ignore", invalid="ignore"):
                cast = np.asarray(value).astype(spec.dtype)
            part = array.values[self.mesh.position(rank), start : start + cast.size]
            part[...] = part + cast if add else cast
        return array

    def read(
        self, array: Rows, spec: BufferSpec, start: int, stop: int, *, copy: bool = False
    ) -> Any:
        """From the first row; all are equal."""
        part = array.values[0, start:stop]
        return part.copy() if copy else part

    def scale(self, array: Rows, spec: BufferSpec, factor: float) -> Rows:
        """In double precision, then rounded."""
        with np.errstate(over="ignore", invalid="ignore"):
            array.values[...] = (array.values.astype("float64") * factor).astype(spec.dtype)
        return array

    def square_sum(self, array: Rows, spec: BufferSpec, valid: Sequence[tuple[int, int]]) -> float:
        """In double precision over the whole buffer, put together from replica 0."""
        first = array.values[self._replica == 0]
        whole = first[0]
        if spec.placement is Placement.SHARDED:
            whole = np.concatenate(first[np.argsort(self._shard[self._replica == 0])])
        parts = [whole[start:stop].astype("float64") for start, stop in valid]
        return float(sum(np.square(part).sum() for part in parts))

    def total(self, parts: Sequence[float]) -> float:
        """The sum; every rank is here."""
        self._require_open()
        return float(sum(parts))

    def wait(self, array: Rows) -> None:
        """Nothing is in flight."""

    def free(self, array: Rows) -> None:
        """Let go of the storage."""
        array.values = None

    def drop(self, shell: Rows) -> None:
        """Let go of the storage."""
        shell.values = None

    def nbytes(self, array: Rows) -> Mapping[int, int]:
        """Bytes of a row."""
        if array.values is None:
            return dict.fromkeys(self.local_ranks, 0)
        return dict.fromkeys(self.local_ranks, array.values.nbytes // self.mesh.size)

    def to_numpy(self, array: Rows) -> Mapping[int, Any]:
        """Copies of the rows."""
        return {rank: row.copy() for rank, row in zip(self.local_ranks, array.values, strict=True)}

    def exchange(self, payload: bytes | Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Every rank is here."""
        self._require_open()
        if isinstance(payload, bytes):
            return dict.fromkeys(self.local_ranks, payload)
        return {rank: payload[rank] for rank in self.local_ranks}

    def close(self) -> None:
        """Refuse further traffic."""
        self._open = False

    def _require_open(self) -> None:
        if not self._open:
            raise ClosedError("this toy backend is closed; make a new one")
