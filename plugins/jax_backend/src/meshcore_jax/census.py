"""What is alive of the arrays that a backend handed out, as the storage itself tells."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from meshcore import Memory
from meshcore_jax.binding import Binding


class Census:
    """Remembers arrays weakly, and measures them."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, array: Any) -> Any:
        """Count an array from now on, until it is deleted or collected; returns it."""
        key, known = id(array), self._known
        if key not in known:
            known[key] = weakref.ref(array, lambda _: known.pop(key, None))
        return array

    def nbytes(self, array: Any) -> dict[int, int]:
        """Bytes of an array by local rank; {} once deleted."""
        if array.is_deleted():
            return {}
        return {rank: int(block.nbytes) for rank, block in self._binding.by_rank(array).items()}

    def alive(self) -> Mapping[int, Mapping[Memory, int]]:
        """Bytes alive by local rank and memory; storage is counted once, by its address."""
        binding = self._binding
        out = {rank: dict.fromkeys(Memory, 0) for rank in binding.local_ranks}
        seen: set[tuple[int, int]] = set()
        for reference in list(self._known.values()):
            array = reference()
            if array is None or array.is_deleted():
                continue
            memory = binding.local.memory_of(array)
            for rank, block in binding.by_rank(array).items():
                storage = (rank, block.unsafe_buffer_pointer() if block.nbytes else 0)
                if block.nbytes and storage not in seen:
                    seen.add(storage)
                    out[rank][memory] += int(block.nbytes)
        return out
