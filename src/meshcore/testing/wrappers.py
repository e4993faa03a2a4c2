"""Backends around a backend: one that forwards everything, and one that poisons storage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshcore.backend import Array, Backend
from meshcore.dtypes import is_floating
from meshcore.spec import BufferSpec


class ForwardingBackend:
    """Does what the inner backend does; subclass it to change single verbs."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.mesh = inner.mesh
        self.roles = inner.roles
        self.local_ranks = inner.local_ranks
        self.profile = inner.profile

    @property
    def group_count(self) -> int:
        """The inner backend's."""
        return self.inner.group_count

    def empty(self, spec: BufferSpec, into: Array | None = None) -> Array:
        """Forward."""
        return self.inner.empty(spec, into)

    def zeros(self, spec: BufferSpec, into: Array | None = None) -> Array:
        """Forward."""
        return self.inner.zeros(spec, into)

    def redistribute(
        self,
        array: Array,
        src: BufferSpec,
        dst: BufferSpec,
        *,
        into: Array | None,
        scratch: Sequence[Array] = (),
        scale: float = 1.0,
        add: bool = False,
    ) -> Array:
        """Forward."""
        return self.inner.redistribute(
            array, src, dst, into=into, scratch=scratch, scale=scale, add=add
        )

    def write(
        self,
        array: Array,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> Array:
        """Forward."""
        return self.inner.write(array, spec, start, values, add=add)

    def read(
        self, array: Array, spec: BufferSpec, start: int, stop: int, *, copy: bool = False
    ) -> Array:
        """Forward."""
        return self.inner.read(array, spec, start, stop, copy=copy)

    def scale(self, array: Array, spec: BufferSpec, factor: float) -> Array:
        """Forward."""
        return self.inner.scale(array, spec, factor)

    def square_sum(self, array: Array, spec: BufferSpec, valid: Sequence[tuple[int, int]]) -> Any:
        """Forward."""
        return self.inner.square_sum(array, spec, valid)

    def total(self, parts: Sequence[Any]) -> float:
        """Forward."""
        return self.inner.total(parts)

    def wait(self, array: Array) -> None:
        """Forward."""
        self.inner.wait(array)

    def free(self, array: Array) -> Array | None:
        """Forward."""
        return self.inner.free(array)

    def drop(self, shell: Array) -> None:
        """Forward."""
        self.inner.drop(shell)

    def nbytes(self, array: Array) -> Mapping[int, int]:
        """Forward."""
        return self.inner.nbytes(array)

    def to_numpy(self, array: Array) -> Mapping[int, Any]:
        """Forward."""
        return self.inner.to_numpy(array)

    def exchange(self, payload: bytes | Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Forward."""
        return self.inner.exchange(payload)

    def close(self) -> None:
        """Forward."""
        self.inner.close()


class PoisonBackend(ForwardingBackend):
    """Fills what ``empty`` gives, and what ``free`` takes, with NaN.

    A destination that still holds the right data from its last use hides a move that does nothing;
    a view that outlives its buffer hides a use after free. Integer storage has no NaN and is left
    alone. Inside a ``FaultyBackend`` only, never around one: poison is no effect to roll back.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        # By id and with the array itself, so that an id is never another array's.
        self._specs: dict[int, tuple[Array, BufferSpec]] = {}

    def empty(self, spec: BufferSpec, into: Array | None = None) -> Array:
        """NaN where the inner backend promises nothing."""
        return self._known(self._poisoned(self.inner.empty(spec, into), spec), spec)

    def zeros(self, spec: BufferSpec, into: Array | None = None) -> Array:
        """Forward."""
        return self._known(self.inner.zeros(spec, into), spec)

    def redistribute(
        self,
        array: Array,
        src: BufferSpec,
        dst: BufferSpec,
        *,
        into: Array | None,
        scratch: Sequence[Array] = (),
        scale: float = 1.0,
        add: bool = False,
    ) -> Array:
        """Forward."""
        out = self.inner.redistribute(
            array, src, dst, into=into, scratch=scratch, scale=scale, add=add
        )
        self._forget(into)
        return self._known(out, dst)

    def write(
        self,
        array: Array,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> Array:
        """Forward."""
        out = self.inner.write(array, spec, start, values, add=add)
        self._forget(array)
        return self._known(out, spec)

    def scale(self, array: Array, spec: BufferSpec, factor: float) -> Array:
        """Forward."""
        out = self.inner.scale(array, spec, factor)
        self._forget(array)
        return self._known(out, spec)

    def free(self, array: Array) -> Array | None:
        """Poison, then free."""
        known = self._forget(array)
        if known is None:  # made by someone else, as the successors of an update are
            return self.inner.free(array)
        return self.inner.free(self._poisoned(array, known[1]))

    def close(self) -> None:
        """Forward; what is freed from now on is no longer poisoned."""
        self.inner.close()
        self._specs.clear()

    def _poisoned(self, array: Array, spec: BufferSpec) -> Array:
        if not is_floating(spec.dtype):
            return array
        # Scaling works on every placement and memory, and 0 * NaN is NaN.
        array = self.inner.scale(array, spec, math.nan)
        self.inner.wait(array)
        return array

    def _known(self, array: Array, spec: BufferSpec) -> Array:
        self._specs[id(array)] = (array, spec)
        return array

    def _forget(self, array: Array | None) -> tuple[Array, BufferSpec] | None:
        return self._specs.pop(id(array), None)
