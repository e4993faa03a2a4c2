"""Registering tensors one by one, before there is a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from meshcore.dtypes import dtype_name
from meshcore.errors import DuplicateNameError, GroupClosedError
from meshcore.layout import ChunkPlan, ParamSpec
from meshcore.plan import plan_chunks


class TensorRegistry:
    """Collects tensors by group; closing the groups gives the plan and the values to load.

    >>> import numpy as np
    >>> registry = TensorRegistry()
    >>> registry.register_tensor("w", np.ones((2, 2), np.float32))
    >>> registry.register_tensor("scale", np.ones((), np.float32), trainable=False)
    >>> registry.close_all_groups()
    >>> plan = registry.plan(shards=2)
    >>> plan.names, sorted(registry.values)
    (('w', 'scale'), ['scale', 'w'])
    """

    def __init__(self) -> None:
        self._specs: dict[str, ParamSpec] = {}
        self._values: dict[str, Any] = {}
        self._closed: set[str] = set()
        self._all_closed = False

    def register_tensor(
        self,
        name: str,
        value: Any,
        *,
        group_type: str = "param",
        trainable: bool = True,
        ties: Sequence[str] = (),
    ) -> None:
        """Add a tensor by its value (any array with shape and dtype), which is kept by reference.

        Raises:
            GroupClosedError: the group takes no more tensors.
            DuplicateNameError: the name, or a tie, is registered already.
        """
        if self._all_closed or group_type in self._closed:
            raise GroupClosedError(
                f"group {group_type!r} is closed and takes no tensor {name!r}; register all "
                "tensors before close_group"
            )
        shape = tuple(int(dim) for dim in value.shape)
        spec = ParamSpec(name, shape, dtype_name(value), trainable, group_type, ties)
        taken = {known for s in self._specs.values() for known in s.names}
        twice = [n for n in spec.names if n in taken]
        if twice:
            raise DuplicateNameError(f"tensor name {twice[0]!r} is registered already")
        self._specs[name] = spec
        self._values[name] = value

    def close_group(self, group_type: str) -> None:
        """Take no more tensors in a group; idempotent."""
        self._closed.add(group_type)

    def close_all_groups(self) -> None:
        """Take no more tensors; idempotent."""
        self._all_closed = True

    @property
    def specs(self) -> tuple[ParamSpec, ...]:
        """All tensors, in the order in which they were registered."""
        return tuple(self._specs.values())

    @property
    def values(self) -> Mapping[str, Any]:
        """Name -> value, as ``ChunkManager.load`` takes it."""
        return MappingProxyType(self._values)

    def plan(
        self,
        *,
        shards: int,
        capacity_numel: int | None = None,
        alignment_nbytes: int = 64,
        mode: str = "variable",
    ) -> ChunkPlan:
        """Close all groups and plan the chunks (see ``plan_chunks``)."""
        self.close_all_groups()
        return plan_chunks(
            self.specs,
            shards=shards,
            capacity_numel=capacity_numel,
            alignment_nbytes=alignment_nbytes,
            mode=mode,
        )
