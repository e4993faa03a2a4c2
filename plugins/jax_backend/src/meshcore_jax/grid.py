"""Devices as a grid of replicas and shards, and how a buffer lies on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshcore import BufferSpec, Memory, Placement, SpecError

REPLICA, SHARD = "replica", "shard"

PARTITIONS = {
    Placement.SHARDED: PartitionSpec(SHARD),
    Placement.REPLICATED: PartitionSpec(),
    Placement.PARTIAL: PartitionSpec((REPLICA, SHARD), None),
    Placement.SHARDED_PARTIAL: PartitionSpec(REPLICA, SHARD),
}
"""How each placement's global array is cut into the blocks that devices hold."""

_HOST_KIND = "pinned_host"


@dataclass(frozen=True)
class Grid:
    """Devices in rows (replica axis) and columns (shard axis) of a jax mesh.

    Attributes:
        mesh: axes ``("replica", "shard")``, both always there, of size 1 where nothing is split.
        shards: into how many shards a buffer is split (the columns, or fewer than them or more
            where the grid is a process's own row of devices).
        kinds: memory kinds of the devices, the default one first.
    """

    mesh: Mesh
    shards: int
    kinds: tuple[str, ...]

    @property
    def devices(self) -> tuple[Any, ...]:
        """Devices row by row: the order of the rows of a PARTIAL array."""
        return tuple(self.mesh.devices.flat)

    def shape(self, spec: BufferSpec) -> tuple[int, ...]:
        """Shape of the array that holds a buffer on this grid."""
        rows, columns = self.mesh.devices.shape
        block = spec.local_numel(self.shards)
        return {
            Placement.SHARDED: (block * columns,),
            Placement.REPLICATED: (block,),
            Placement.PARTIAL: (rows * columns, block),
            Placement.SHARDED_PARTIAL: (rows, block * columns),
        }[spec.placement]

    def kind(self, memory: Memory) -> str:
        """The memory kind of this platform for a memory.

        Raises:
            SpecError: the platform has no pinned host memory.
        """
        if memory is Memory.DEVICE:
            return self.kinds[0]
        if _HOST_KIND not in self.kinds:
            raise SpecError(
                f"Memory.HOST needs the memory kind {_HOST_KIND!r}; the devices of platform "
                f"{self.devices[0].platform!r} have {list(self.kinds)}; keep buffers in "
                "Memory.DEVICE here"
            )
        return _HOST_KIND

    def sharding(self, placement: Placement, memory: Memory = Memory.DEVICE) -> NamedSharding:
        """The sharding of a buffer with this placement."""
        return NamedSharding(self.mesh, PARTITIONS[placement], memory_kind=self.kind(memory))

    def memory_of(self, array: Any) -> Memory:
        """The memory that an array is in."""
        kind = array.sharding.memory_kind
        return Memory.DEVICE if kind in (None, self.kinds[0]) else Memory.HOST

    def assemble(self, spec: BufferSpec, blocks: Sequence[Any]) -> Any:
        """One array from the blocks of this process's devices, without a copy."""
        return jax.make_array_from_single_device_arrays(
            self.shape(spec),
            self.sharding(spec.placement, spec.memory),
            list(blocks),
            dtype=jnp.dtype(spec.dtype),
        )


def blocks_of(array: Any) -> list[Any]:
    """The single-device arrays of this process's devices; they share the array's storage."""
    return [shard.data for shard in array.addressable_shards]


def per_rank_sharding(grid: Grid) -> NamedSharding:
    """One row, or one piece, for each device of a grid."""
    partition = PartitionSpec((REPLICA, SHARD))
    return NamedSharding(grid.mesh, partition, memory_kind=grid.kinds[0])


def auto_mesh(cells: Any) -> Mesh:
    """A jax mesh of a 2-D array of devices, rows along the replica axis."""
    return Mesh(cells, (REPLICA, SHARD), axis_types=(AxisType.Auto, AxisType.Auto))
