"""A mesh bound to the devices of jax: which rank is where, and the two grids.

[Note: global and local grid] Moves run on the *global* grid: all devices of the mesh, which every
process names in the same program. All other verbs touch only what a process holds, and one process
may call them when another does not (a gradient that only some ranks have). They run on the *local*
grid: this process's devices in one row. A buffer has the same block on a device in both, so one
function serves both; where one process holds every device the two grids are one object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshcore import AxisRoles, BackendError, BufferSpec, MeshError
from meshcore_jax.grid import Grid, auto_mesh, blocks_of


@dataclass(frozen=True)
class Binding:
    """Ranks and devices of one mesh, as this process sees them.

    Attributes:
        roles: the mesh and its axis roles.
        devices: rank -> device of all ranks, in mesh order.
        local_ranks: ranks on devices of this process, in mesh order; () outside the mesh.
        rank_of: device -> rank.
        whole: the global grid.
        local: the local grid.
    """

    roles: AxisRoles
    devices: Mapping[int, Any]
    local_ranks: tuple[int, ...]
    rank_of: Mapping[Any, int]
    whole: Grid
    local: Grid

    @property
    def platform(self) -> str:
        """The platform of the devices."""
        return str(self.whole.devices[0].platform)

    @property
    def row_ranks(self) -> tuple[int, ...]:
        """Ranks in the order of the local grid's devices."""
        return tuple(self.rank_of[device] for device in self.local.devices)

    @property
    def owners(self) -> dict[int, tuple[int, ...]]:
        """Process index -> its ranks in mesh order."""
        out: dict[int, tuple[int, ...]] = {}
        for rank, device in self.devices.items():
            out[device.process_index] = (*out.get(device.process_index, ()), rank)
        return out

    def to_local(self, array: Any, spec: BufferSpec) -> Any:
        """The same storage as an array of the local grid."""
        return array if self.local is self.whole else self.local.assemble(spec, blocks_of(array))

    def to_global(self, array: Any, spec: BufferSpec) -> Any:
        """The same storage as an array of the global grid."""
        return array if self.local is self.whole else self.whole.assemble(spec, blocks_of(array))

    def by_rank(self, array: Any) -> dict[int, Any]:
        """The local ranks' blocks of an array of either grid; they share its storage."""
        return {self.rank_of[block.device]: block for block in blocks_of(array)}


def bind(roles: AxisRoles, platform: str | None) -> Binding:
    """Find the devices of a mesh; a rank is a position in ``jax.devices()``.

    Raises:
        MeshError: ids beyond the devices that there are.
        BackendError: jax has no such platform.
    """
    devices = _devices(roles, platform)
    process = jax.process_index()
    own = {rank: d for rank, d in devices.items() if d.process_index == process}
    kinds = _memory_kinds(next(iter(own.values()))) if own else ()
    cells = np.empty((roles.replicas, roles.shards), object)
    for rank, device in devices.items():
        cells[roles.replica_index(rank), roles.shard_index(rank)] = device
    whole = local = Grid(auto_mesh(cells), roles.shards, kinds)
    if own and len(own) < len(devices):
        row = np.empty((1, len(own)), object)
        row[0, :] = list(own.values())
        local = Grid(auto_mesh(row), roles.shards, kinds)
    rank_of = {device: rank for rank, device in devices.items()}
    return Binding(roles, devices, tuple(own), rank_of, whole, local)


def _devices(roles: AxisRoles, platform: str | None) -> dict[int, Any]:
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise BackendError(
            f"jax has no devices of platform {platform!r}: {error}; leave the option device out "
            "for jax's default"
        ) from error
    ids, kind = roles.mesh.ids, devices[0].platform
    beyond = sorted(id_ for id_ in ids if id_ >= len(devices))
    if not beyond:
        return {id_: devices[id_] for id_ in ids}
    hint = "take ids of devices that exist"
    if kind == "cpu":
        hint += (
            ", or emulate more CPU devices before jax starts: "
            f"meshcore_jax.launch.emulate_cpu({max(ids) + 1})"
        )
    raise MeshError(
        f"mesh ids {beyond} have no device: ids are positions in jax.devices(), and there are "
        f"{len(devices)} (0 to {len(devices) - 1}) on platform {kind!r}; {hint}"
    )


def _memory_kinds(device: Any) -> tuple[str, ...]:
    """Memory kinds of one of this process's devices, its default first."""
    default = device.default_memory().kind
    return (default, *sorted({memory.kind for memory in device.addressable_memories()} - {default}))
