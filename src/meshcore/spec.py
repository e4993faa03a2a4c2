"""Placements, memory kinds, buffer specs, axis roles, and the moves that a backend may be asked."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import lru_cache

from meshcore.dtypes import is_floating, itemsize
from meshcore.errors import MeshError, NotInMeshError, SpecError
from meshcore.mesh import DeviceMesh


class Placement(enum.Enum):
    """How the elements of one buffer lie over the ranks of the mesh.

    SHARDED: index i along the shard axis holds elements [i*n/N, (i+1)*n/N): n/N elements a rank.
    REPLICATED: every rank holds all n elements.
    PARTIAL: every rank holds an addend of n elements; the value is their sum over the mesh.
    SHARDED_PARTIAL: reduced and scattered over the shard axis, still an addend over the replica
        axis: n/N elements a rank.
    """

    SHARDED = "sharded"
    REPLICATED = "replicated"
    PARTIAL = "partial"
    SHARDED_PARTIAL = "sharded_partial"

    @property
    def is_split(self) -> bool:
        """Whether a rank holds n/N elements, and not n."""
        return self in (Placement.SHARDED, Placement.SHARDED_PARTIAL)

    @property
    def is_addend(self) -> bool:
        """Whether the value is a sum over ranks that is still to be made."""
        return self in (Placement.PARTIAL, Placement.SHARDED_PARTIAL)


class Memory(enum.Enum):
    """Where a buffer's bytes are: on the accelerator, or in host memory beside it."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Everything a backend is told about a buffer: no names, no shapes, no tensors.

    ``numel`` is the number of elements of the whole buffer, padding included, on any placement.
    """

    numel: int
    dtype: str
    placement: Placement
    memory: Memory = Memory.DEVICE
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        itemsize(self.dtype)
        if type(self.numel) is not int or self.numel < 0:
            raise SpecError(f"a buffer has 0 or more elements, not {self.numel!r}")
        # Specs are keys of the pool's tables on every call: hash once.
        key = (self.numel, self.dtype, self.placement.value, self.memory.value)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Hashes of strings differ from process to process: never ship one.
        return (BufferSpec, (self.numel, self.dtype, self.placement, self.memory))

    def local_numel(self, shards: int) -> int:
        """Elements that one rank holds."""
        return self.numel // shards if self.placement.is_split else self.numel

    def local_nbytes(self, shards: int) -> int:
        """Bytes that one rank holds, padding included: *the* byte rule.

        >>> BufferSpec(8, "float32", Placement.SHARDED).local_nbytes(4)
        8
        """
        return self.local_numel(shards) * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.numel} x {self.dtype} {self.placement.value} on {self.memory.value}"


@lru_cache(maxsize=4096)
def buffer_spec(
    numel: int, dtype: str, placement: Placement, memory: Memory = Memory.DEVICE
) -> BufferSpec:
    """A shared ``BufferSpec``: the tables that it is a key of find it by identity."""
    return BufferSpec(numel, dtype, placement, memory)


@dataclass(frozen=True)
class AxisRoles:
    """Which axis of a mesh shards and which, if any, replicates.

    Raises:
        MeshError: an unknown axis, one axis in both roles, or an axis larger than 1 in no role.

    >>> mesh = DeviceMesh(range(4), (2, 2), ("replica", "shard"))
    >>> roles = AxisRoles(mesh, "shard", "replica")
    >>> roles.shards, roles.replicas, roles.shard_group(2), roles.replica_group(2)
    (2, 2, (2, 3), (0, 2))
    """

    mesh: DeviceMesh
    shard_axis: str | int = "shard"
    replica_axis: str | int | None = None
    shards: int = field(init=False)
    replicas: int = field(init=False)

    def __post_init__(self) -> None:
        mesh = self.mesh
        shard = mesh.axis(self.shard_axis)
        replica = None if self.replica_axis is None else mesh.axis(self.replica_axis)
        if shard == replica:
            raise MeshError(f"axis {self.shard_axis!r} cannot be shard axis and replica axis")
        for position, extent in enumerate(mesh.shape):
            if extent > 1 and position not in (shard, replica):
                raise MeshError(
                    f"axis {mesh.axis_names[position]!r} of size {extent} is neither the shard "
                    f"axis ({mesh.axis_names[shard]!r}) nor the replica axis; name it as "
                    "replica_axis, or take a slice of the mesh with DeviceMesh.submesh"
                )
        set_once = object.__setattr__
        set_once(self, "shard_axis", mesh.axis_names[shard])
        set_once(self, "replica_axis", None if replica is None else mesh.axis_names[replica])
        set_once(self, "shards", mesh.shape[shard])
        set_once(self, "replicas", 1 if replica is None else mesh.shape[replica])

    def shard_index(self, rank: int) -> int:
        """Index of a rank along the shard axis."""
        return self.mesh.index(rank, self.shard_axis)

    def replica_index(self, rank: int) -> int:
        """Index of a rank along the replica axis; 0 without one."""
        return 0 if self.replica_axis is None else self.mesh.index(rank, self.replica_axis)

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the shards of one replica, in mesh order."""
        return self.mesh.group_of(rank, self.shard_axis)

    def replica_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same shard, in mesh order."""
        if self.replica_axis is None:
            self.mesh.position(rank)
            return (rank,)
        return self.mesh.group_of(rank, self.replica_axis)

    def group_size(self, kind: MoveKind) -> int:
        """Number of ranks that a move of this kind runs over."""
        if kind in (MoveKind.GATHER, MoveKind.REDUCE_SCATTER):
            return self.shards
        if kind is MoveKind.REPLICA_SUM:
            return self.replicas
        if kind is MoveKind.ALL_REDUCE:
            return self.shards * self.replicas
        return 1

    def require_member(self, local_ranks: tuple[int, ...]) -> None:
        """Raise ``NotInMeshError`` where this process holds no rank of the mesh."""
        if not local_ranks:
            raise NotInMeshError(
                f"this process holds no rank of {self.mesh!r}; only its ranks may call this"
            )


class MoveKind(enum.Enum):
    """What ``redistribute`` is asked to do: one collective, or one local move."""

    GATHER = "gather"  # SHARDED -> REPLICATED
    SCATTER = "scatter"  # REPLICATED -> SHARDED, no communication
    REDUCE_SCATTER = "reduce_scatter"  # PARTIAL -> SHARDED_PARTIAL, or SHARDED without replicas
    REPLICA_SUM = "replica_sum"  # SHARDED_PARTIAL -> SHARDED
    ALL_REDUCE = "all_reduce"  # PARTIAL -> REPLICATED
    CAST = "cast"  # dtype alone
    TRANSFER = "transfer"  # memory alone

    @property
    def is_sum(self) -> bool:
        """Whether addends are summed."""
        return self in (MoveKind.REDUCE_SCATTER, MoveKind.REPLICA_SUM, MoveKind.ALL_REDUCE)


_P = Placement
_PLACEMENT_MOVES = {
    (_P.SHARDED, _P.REPLICATED): MoveKind.GATHER,
    (_P.REPLICATED, _P.SHARDED): MoveKind.SCATTER,
    (_P.PARTIAL, _P.SHARDED_PARTIAL): MoveKind.REDUCE_SCATTER,
    (_P.PARTIAL, _P.SHARDED): MoveKind.REDUCE_SCATTER,
    (_P.SHARDED_PARTIAL, _P.SHARDED): MoveKind.REPLICA_SUM,
    (_P.PARTIAL, _P.REPLICATED): MoveKind.ALL_REDUCE,
}


def move_kind(src: BufferSpec, dst: BufferSpec, roles: AxisRoles) -> MoveKind:
    """Classify a move from one spec to another.

    Raises:
        SpecError: the move changes too much, or nothing, or goes a way that does not exist.
    """
    if src.numel != dst.numel:
        raise SpecError(f"a move keeps the number of elements: {src} -> {dst}")
    if src.memory is not dst.memory:
        if src.placement is not dst.placement or src.dtype != dst.dtype:
            raise SpecError(f"a move between memories changes nothing else: {src} -> {dst}")
        return MoveKind.TRANSFER
    if src.placement is dst.placement:
        if src.dtype == dst.dtype:
            raise SpecError(f"nothing to move: {src} -> {dst}")
        return MoveKind.CAST
    kind = _PLACEMENT_MOVES.get((src.placement, dst.placement))
    if kind is None:
        raise SpecError(
            f"{src.placement.name} -> {dst.placement.name} is no move; there are "
            + ", ".join(f"{a.name} -> {b.name}" for a, b in _PLACEMENT_MOVES)
        )
    if (src.placement, dst.placement) == (_P.PARTIAL, _P.SHARDED) and roles.replicas > 1:
        raise SpecError(
            "PARTIAL -> SHARDED sums over the shard axis only, and there is a replica axis of "
            f"{roles.replicas}; go through SHARDED_PARTIAL (see reduce_path)"
        )
    return kind


def check_move(
    src: BufferSpec,
    dst: BufferSpec,
    roles: AxisRoles,
    *,
    scale: float = 1.0,
    add: bool = False,
) -> MoveKind:
    """Check a whole ``redistribute`` request, for all backends alike, and classify it.

    Raises:
        SpecError: naming both specs and the rule.
    """
    kind = move_kind(src, dst, roles)
    for spec in (src, dst):
        if spec.numel % roles.shards:
            raise SpecError(f"{spec} does not divide over {roles.shards} shards; pad it")
    if kind.is_sum:
        if not (is_floating(dst.dtype) and itemsize(dst.dtype) >= 4):
            raise SpecError(f"a sum is stored in float32 or wider, not in {dst.dtype}")
        if not is_floating(src.dtype):
            raise SpecError(f"addends are floating point, not {src.dtype}")
    elif add or scale != 1.0:
        raise SpecError(f"scale and add belong to moves that sum, not to {kind.value}")
    return kind


def reduce_path(roles: AxisRoles, home: Placement) -> tuple[Placement, ...]:
    """Placements that a gradient passes from PARTIAL to its home, both included.

    Raises:
        SpecError: the home is an addend.

    >>> roles = AxisRoles(DeviceMesh(range(4), (2, 2), ("replica", "shard")), "shard", "replica")
    >>> [p.name for p in reduce_path(roles, Placement.SHARDED)]
    ['PARTIAL', 'SHARDED_PARTIAL', 'SHARDED']
    """
    if home.is_addend:
        raise SpecError(f"the home of a gradient is SHARDED or REPLICATED, not {home.name}")
    if home is Placement.SHARDED and roles.replicas > 1:
        return (Placement.PARTIAL, Placement.SHARDED_PARTIAL, Placement.SHARDED)
    return (Placement.PARTIAL, home)
