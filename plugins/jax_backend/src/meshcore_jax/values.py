"""Values that callers write, as arguments of a write program: blocks on this process's devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshcore import BackendError, BufferSpec, Memory, Placement, SpecError
from meshcore_jax.binding import Binding
from meshcore_jax.grid import Grid, blocks_of, per_rank_sharding


def written(
    binding: Binding, spec: BufferSpec, given: Any | Mapping[int, Any]
) -> tuple[tuple[Any, ...], bool]:
    """Arguments of a write program, and whether they are by rank.

    Raises:
        SpecError: values by rank for a buffer that is not PARTIAL, or of ranks that are not local.
        BackendError: a jax array of which this process cannot see all elements.
    """
    if not isinstance(given, Mapping):
        return (_replicated(binding.local, given, spec.dtype),), False
    if spec.placement is not Placement.PARTIAL or not set(given) <= set(binding.local_ranks):
        raise SpecError(
            f"values of ranks {sorted(given)} for {spec}: values by rank belong to partial "
            f"buffers and to the local ranks {list(binding.local_ranks)}"
        )
    return _by_rank(binding, given, spec.dtype), True


def host_copy(values: Any, dtype: str) -> Any:
    """A fresh numpy array with ``dtype``; takes numpy arrays, torch tensors, and what converts.

    [Note: aliased host memory] On the CPU platform jax takes over aligned numpy memory without a
    copy, and a later change by the caller would show in an "immutable" array. So host values are
    always copied first, and cast on the host: that is also what makes float64 input safe where jax
    holds no float64.
    """
    if hasattr(values, "detach"):  # a torch tensor, which may require a gradient
        values = values.detach().cpu()
        if str(values.dtype).startswith(("torch.bfloat16", "torch.float8")):
            values = values.float()  # exact, and numpy takes it
        values = values.numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(values, dtype=jnp.dtype(dtype), order="C", copy=True)


def _replicated(grid: Grid, values: Any, dtype: str) -> Any:
    """The values with ``dtype`` on all devices of a local grid; device arrays stay on devices."""
    sharding = grid.sharding(Placement.REPLICATED)
    if not isinstance(values, jax.Array):
        return jax.device_put(host_copy(values, dtype), sharding)
    values = _near(grid, values)
    if values.is_fully_replicated:
        held = {block.device: block for block in blocks_of(values)}
        if all(device in held for device in grid.devices):
            blocks = [held[device] for device in grid.devices]
            whole = jax.make_array_from_single_device_arrays(values.shape, sharding, blocks)
            return whole.astype(jnp.dtype(dtype))
    return jax.device_put(_visible(values), sharding).astype(jnp.dtype(dtype))


def _by_rank(binding: Binding, given: Mapping[int, Any], dtype: str) -> tuple[Any, Any]:
    """Pieces of all local devices one behind the other, and flags of those that were given."""
    grid, ranks = binding.local, binding.row_ranks
    numel = next((math.prod(values.shape) for values in given.values()), 0)
    absent = np.zeros(numel, jnp.dtype(dtype))
    pieces = [
        _on_device(grid, given.get(rank, absent), device, dtype)
        for rank, device in zip(ranks, grid.devices, strict=True)
    ]
    sharding = per_rank_sharding(grid)
    shape = (len(ranks) * numel,)
    chosen = np.array([rank in given for rank in ranks])
    return (
        jax.make_array_from_single_device_arrays(shape, sharding, pieces),
        jax.device_put(chosen, sharding),
    )


def _on_device(grid: Grid, values: Any, device: Any, dtype: str) -> Any:
    if not isinstance(values, jax.Array):
        return jax.device_put(host_copy(values, dtype), device)
    values = _near(grid, values)
    if values.is_fully_replicated:
        for block in blocks_of(values):
            if block.device == device:
                return block.astype(jnp.dtype(dtype))
    return jax.device_put(_visible(values), device).astype(jnp.dtype(dtype))


def _near(grid: Grid, values: Any) -> Any:
    """Programs take device memory only."""
    if grid.memory_of(values) is Memory.DEVICE:
        return values
    return jax.device_put(values, values.sharding.with_memory_kind(grid.kinds[0]))


def _visible(values: Any) -> Any:
    if values.is_fully_addressable:
        return values
    raise BackendError(
        f"values with sharding {values.sharding} lie partly on devices of other processes; give a "
        "replicated array, or for each local rank its own"
    )
