"""Sums of squares over a whole mesh, without overflow and in the same bits everywhere.

Each device gives, for every block of a few thousand of its elements, a sum in fp32 and the power of
two that the elements were divided by; these few numbers are put together on the host in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshcore import BufferSpec, Memory, Placement
from meshcore_jax.binding import Binding
from meshcore_jax.grid import PARTITIONS, REPLICA, SHARD, Grid, per_rank_sharding
from meshcore_jax.programs import EVERYWHERE, PER_RANK, Program, build, wide_dtype

_BLOCK_NUMEL = 4096


class Norms:
    """Shares of this process, and their total over the mesh of a binding."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    @cached_property
    def _owned(self) -> tuple[Any, Any]:
        """The shard index of each local device, and whether its replica index is 0."""
        roles, ranks = self._binding.roles, self._binding.row_ranks
        sharding = per_rank_sharding(self._binding.local)
        index = np.array([roles.shard_index(rank) for rank in ranks], np.int32)
        counts = np.array([roles.replica_index(rank) == 0 for rank in ranks])
        return jax.device_put(index, sharding), jax.device_put(counts, sharding)

    def share(self, array: Any, spec: BufferSpec, valid: Sequence[tuple[int, int]]) -> Any:
        """A lazy (local ranks, 2, blocks) array: sums of squares, and the units they are in."""
        binding = self._binding
        program = _square_sum_program(binding.local, spec)
        bounds = _range_bounds(valid, spec.numel)
        return program(binding.to_local(array, spec), bounds, *self._owned)

    def total(self, parts: Sequence[Any]) -> float:
        """The sum of all shares of all processes, in float64 and in mesh order."""
        binding = self._binding
        own = {rank: np.float64(0.0) for rank in binding.local_ranks}
        with np.errstate(all="ignore"):  # what is not finite is an answer here
            for part in parts:
                for rank, share in binding.by_rank(part).items():
                    sums, units = np.asarray(share, np.float64)[0]
                    own[rank] += np.sum(sums * units * units)
            everywhere = own if binding.local is binding.whole else self._shared(own)
            return float(sum(everywhere[rank] for rank in binding.roles.mesh.ids))

    def _shared(self, own: Mapping[int, Any]) -> dict[int, Any]:
        """Rank -> float64 of the whole mesh, in one small collective.

        The numbers travel as bytes: without x64 jax would round them to fp32.
        """
        binding = self._binding
        rows = [
            jax.device_put(np.frombuffer(own[rank].tobytes(), np.uint8)[None], device)
            for rank, device in zip(binding.row_ranks, binding.local.devices, strict=True)
        ]
        grid = binding.whole
        shape = (len(grid.devices), rows[0].shape[1])
        held = jax.make_array_from_single_device_arrays(shape, per_rank_sharding(grid), rows)
        gathered = _gather_rows_program(grid)(held)
        data = np.asarray(gathered.addressable_shards[0].data)
        ranks = (binding.rank_of[device] for device in grid.devices)
        return dict(zip(ranks, np.frombuffer(data.tobytes(), np.float64), strict=True))


@cache
def _square_sum_program(grid: Grid, spec: BufferSpec) -> Program:
    """(array, bounds, shard index, counts) -> (ranks, 2, blocks): sums and the units they are in.

    ``bounds`` are the ends of disjoint rising ranges. The sum of squares of a block of elements is
    ``sum * unit**2``; the unit is a power of two that keeps all squares in range.
    """
    wide = jnp.dtype(wide_dtype(spec.dtype))

    def body(block: Any, bounds: Any, shard_index: Any, counts: Any) -> Any:
        own = block
        numel = block.shape[0]
        if spec.placement is Placement.REPLICATED:
            numel //= grid.shards
            own = lax.dynamic_slice(block, (shard_index[0] * numel,), (numel,))
        index = shard_index[0] * numel + lax.iota(jnp.int32, numel)
        method = "compare_all" if bounds.shape[0] <= 32 else "scan"
        inside = jnp.searchsorted(bounds, index, side="right", method=method) % 2 == 1
        masked = jnp.where(inside & counts[0], own.astype(wide), 0)
        rows = jnp.pad(masked, (0, -numel % _BLOCK_NUMEL)).reshape(-1, _BLOCK_NUMEL)
        top = jnp.max(jnp.abs(rows), axis=1)
        unit = jnp.where(top >= 2.0**48, 2.0**80, jnp.where(top < 2.0**-48, 2.0**-64, 1.0))
        unit = unit.astype(wide)
        sums = jnp.sum(jnp.square(rows / unit[:, None]), axis=1)
        return jnp.stack([sums, unit])[None]

    sources = [
        (PARTITIONS[spec.placement], spec.memory),
        (EVERYWHERE, Memory.DEVICE),
        (PER_RANK, Memory.DEVICE),
        (PER_RANK, Memory.DEVICE),
    ]
    return build(grid, body, sources, (PER_RANK, Memory.DEVICE))


def _range_bounds(valid: Sequence[tuple[int, int]], numel: int) -> Any:
    """Ends of the ranges, merged and rising, as int32; padded to a power of two of ranges, so that
    few lengths are compiled."""
    merged: list[list[int]] = []
    for start, stop in sorted(valid):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    count = 1 << max(0, len(merged) - 1).bit_length()
    bounds = np.full(2 * count, numel, np.int32)  # beyond every index: an empty range
    bounds[: 2 * len(merged)] = [bound for pair in merged for bound in pair]
    return bounds


@cache
def _gather_rows_program(grid: Grid) -> Program:
    """(rows of all ranks) -> all rows on every rank; the small collective of ``total``."""

    def body(rows: Any) -> Any:
        return lax.all_gather(rows, (REPLICA, SHARD), tiled=True)

    return build(grid, body, [(PER_RANK, Memory.DEVICE)], (EVERYWHERE, Memory.DEVICE))
