"""The compiled programs: one jitted function per (operation, mesh, specs), made once and cached.

[Note: shard_map everywhere] Each program is a function of a device's own block, mapped over the
grid: where a cast happens and which collective runs is then written down, not inferred. Offsets,
scales and ranges are arguments of fixed dtypes, so that chunks of one size share one compilation.
``check_vma`` is off: nothing here is differentiated, and replication is known by construction.

[Note: host memory] Buffers in host memory are brought to the device inside the program, and results
are put back by its output sharding; nothing but XLA's own temporaries is on the device meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshcore import BufferSpec, Memory
from meshcore.backend import MoveKind
from meshcore_jax.grid import PARTITIONS, REPLICA, SHARD, Grid

Program: TypeAlias = Callable[..., Any]
Body: TypeAlias = Callable[..., Any]

EVERYWHERE = PartitionSpec()
PER_RANK = PartitionSpec((REPLICA, SHARD))


def build(
    grid: Grid,
    body: Body,
    sources: Sequence[tuple[PartitionSpec, Memory]],
    result: tuple[PartitionSpec, Memory],
    donate: tuple[int, ...] = (),
) -> Program:
    """Map a function of a device's own blocks over a grid, and jit it.

    Args:
        grid: where it runs.
        body: blocks of the arguments -> block of the result.
        sources: how each argument lies on the grid, and in which memory.
        result: the same of the result.
        donate: arguments whose storage the result may take over.
    """
    mesh = grid.mesh
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(partition for partition, _ in sources),
        out_specs=result[0],
        check_vma=False,
    )

    def run(*arrays: Any) -> Any:
        on_device = [
            jax.device_put(array, NamedSharding(mesh, partition, memory_kind=grid.kinds[0]))
            if memory is Memory.HOST
            else array
            for array, (partition, memory) in zip(arrays, sources, strict=True)
        ]
        return mapped(*on_device)

    sharding = NamedSharding(mesh, result[0], memory_kind=grid.kind(result[1]))
    return jax.jit(run, out_shardings=sharding, donate_argnums=donate)


def donated(memory: Memory) -> tuple[int, ...]:
    """Argument 0 is reused in place on the device; host memory is copied, then deleted."""
    return (0,) if memory is Memory.DEVICE else ()


# --- storage ----------------------------------------------------------------------------------


@cache
def zeros_program(grid: Grid, spec: BufferSpec) -> Program:
    """() -> zeros."""
    shape, dtype = grid.shape(spec), jnp.dtype(spec.dtype)
    sharding = grid.sharding(spec.placement, spec.memory)
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


# --- moves ------------------------------------------------------------------------------------


@cache
def move_program(grid: Grid, kind: MoveKind, src: BufferSpec, dst: BufferSpec) -> Program:
    """(array) -> array, for the moves that do not sum."""
    dtype = jnp.dtype(dst.dtype)
    columns = grid.mesh.devices.shape[1]

    def body(block: Any) -> Any:
        if kind is MoveKind.SCATTER and columns > 1:
            numel = block.shape[0] // columns
            start = lax.axis_index(SHARD) * numel
            block = lax.dynamic_slice(block, (start,), (numel,))
        # The cast comes before the gather, so that the narrow dtype travels.
        block = block.astype(dtype)
        if kind is MoveKind.GATHER and columns > 1:
            return _gathered(block)
        return jnp.array(block, copy=True)  # never the source's own storage

    source = (PARTITIONS[src.placement], src.memory)
    return build(grid, body, [source], (PARTITIONS[dst.placement], dst.memory))


def _gathered(block: Any) -> Any:
    """All blocks along the shard axis. Floats that XLA may convert on the way travel as bits."""
    dtype = block.dtype
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize) if _is_narrow_float(dtype) else None
    if bits is not None:
        block = lax.bitcast_convert_type(block, bits)
    block = lax.all_gather(block, SHARD, tiled=True)
    return block if bits is None else lax.bitcast_convert_type(block, dtype)


def _is_narrow_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype != jnp.float16


@cache
def sum_program(
    grid: Grid, kind: MoveKind, src: BufferSpec, dst: BufferSpec, *, add: bool
) -> Program:
    """(array, scale) -> array, or with add (into, array, scale) -> into's successor, in place."""
    dtype = jnp.dtype(dst.dtype)
    rows, columns = grid.mesh.devices.shape

    def reduced(block: Any, scale: Any) -> Any:
        addend = block[0].astype(dtype)
        if kind is MoveKind.REDUCE_SCATTER:
            if columns > 1:
                addend = lax.psum_scatter(addend, SHARD, tiled=True)
        else:
            over = {REPLICA: rows, SHARD: columns if kind is MoveKind.ALL_REDUCE else 1}
            axes = tuple(axis for axis, size in over.items() if size > 1)
            if axes:
                addend = lax.psum(addend, axes)
        value = addend * scale
        return value[None] if dst.placement.is_addend else value

    def added(into: Any, block: Any, scale: Any) -> Any:
        return into + reduced(block, scale)

    source = (PARTITIONS[src.placement], src.memory)
    result = (PARTITIONS[dst.placement], dst.memory)
    factor = (EVERYWHERE, Memory.DEVICE)
    if add:
        return build(grid, added, [result, source, factor], result, donated(dst.memory))
    return build(grid, reduced, [source, factor], result)


# --- content ----------------------------------------------------------------------------------


@cache
def write_program(grid: Grid, spec: BufferSpec, *, add: bool, by_rank: bool) -> Program:
    """(array, start, values[, chosen]) -> array, in place.

    ``values`` is the same on all ranks, or with ``by_rank`` one piece a rank behind another, of
    which those of ranks with ``chosen`` are taken.
    """

    def body(block: Any, start: Any, values: Any, *chosen: Any) -> Any:
        flat = block.reshape(-1)
        old = lax.dynamic_slice(flat, (start,), values.shape)
        new = old + values if add else values
        for flag in chosen:
            new = jnp.where(flag[0], new, old)
        return lax.dynamic_update_slice(flat, new, (start,)).reshape(block.shape)

    own = (PARTITIONS[spec.placement], spec.memory)
    offset = (EVERYWHERE, Memory.DEVICE)
    each = (PER_RANK, Memory.DEVICE)
    values = [each, each] if by_rank else [(EVERYWHERE, Memory.DEVICE)]
    return build(grid, body, [own, offset, *values], own, donated(spec.memory))


@cache
def read_program(grid: Grid, memory: Memory, numel: int) -> Program:
    """(replicated array, start) -> a fresh array of ``numel`` elements, in device memory."""

    def body(block: Any, start: Any) -> Any:
        return jnp.array(lax.dynamic_slice(block, (start,), (numel,)), copy=True)

    sources = [(EVERYWHERE, memory), (EVERYWHERE, Memory.DEVICE)]
    return build(grid, body, sources, (EVERYWHERE, Memory.DEVICE))


@cache
def scale_program(grid: Grid, spec: BufferSpec) -> Program:
    """(array, factor) -> array, in place; multiplied in fp32 or wider."""
    wide = jnp.dtype(wide_dtype(spec.dtype))

    def body(block: Any, factor: Any) -> Any:
        return (block.astype(wide) * factor).astype(block.dtype)

    own = (PARTITIONS[spec.placement], spec.memory)
    return build(grid, body, [own, (EVERYWHERE, Memory.DEVICE)], own, donated(spec.memory))


def wide_dtype(dtype: str) -> str:
    """The floating dtype in which a dtype is multiplied and squared."""
    return "float64" if dtype == "float64" else "float32"


def factor_for(spec: BufferSpec, factor: float) -> Any:
    """A scale factor in the dtype in which ``scale_program`` multiplies."""
    return jnp.dtype(wide_dtype(spec.dtype)).type(factor)


def needs_x64(dtype: str) -> bool:
    """Whether jax holds this dtype only with ``jax_enable_x64``."""
    return jnp.dtype(dtype).itemsize == 8
