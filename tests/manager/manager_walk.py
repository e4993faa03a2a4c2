"""What a manager should do, in plain numpy: values, gradients, states and bytes, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import meshcore as mc
from meshcore.backend import Backend
from meshcore.dtypes import is_floating, itemsize, numpy_dtype

DEVICE, HOST = mc.Memory.DEVICE, mc.Memory.HOST


@dataclass
class ChunkModel:
    """Where the bytes of one chunk are."""

    layout: mc.ChunkLayout
    home_numel: int  # elements of home on one rank
    compute_dtype: str
    loaded: bool = False
    accessed: bool = False
    memory: mc.Memory = DEVICE
    host_copy: bool = False
    pending: bool = False
    reduced: mc.Memory | None = None
    moments: dict[str, tuple[str, mc.Memory]] = field(default_factory=dict)


class PlainModel:
    """Tensors by name; ``None`` is a value that was never loaded."""

    def __init__(self, plan: mc.ChunkPlan, backend: Backend, compute_dtype: str | None) -> None:
        self.plan = plan
        self.shards = backend.roles.shards
        self.values: dict[str, Any] = {}
        self.grads: dict[str, Any] = {}
        self.pending: dict[str, Any] = {}
        self.states = dict.fromkeys(plan.names, mc.TensorState.FREE)
        self.chunks = []
        for layout in plan.chunks:
            whole = self.shards == 1 or layout.group == "kept"
            lowered = compute_dtype if compute_dtype and is_floating(layout.dtype) else layout.dtype
            self.chunks.append(
                ChunkModel(layout, layout.numel if whole else layout.shard_numel, lowered)
            )

    def chunk(self, name: str) -> ChunkModel:
        return self.chunks[self.plan.find(name)[0].index]

    def chunk_loaded(self, name: str) -> bool:
        return self.chunk(name).loaded

    def busy(self, name: str) -> bool:
        slots = self.chunk(name).layout.slots
        return any(self.states[slot.name] is mc.TensorState.COMPUTE for slot in slots)

    def readable(self, name: str) -> bool:
        return self.chunk(name).accessed and self.states[name] is not mc.TensorState.FREE

    def seen(self, name: str) -> Any:
        """What a computation reads."""
        return self.values[name].astype(numpy_dtype(self.chunk(name).compute_dtype))

    # --- verbs ----------------------------------------------------------------------------

    def load(self, name: str, value: Any) -> None:
        chunk = self.chunk(name)
        for slot in chunk.layout.slots:
            if not chunk.loaded:
                self.values[slot.name] = np.zeros(slot.shape, numpy_dtype(slot.spec.dtype))
        chunk.loaded = True
        self.values[name] = np.asarray(value, numpy_dtype(chunk.layout.dtype))
        if self.states[name] is mc.TensorState.FREE:
            self.states[name] = mc.TensorState.HOLD

    def accumulate(self, name: str, value: Any) -> None:
        self.chunk(name).pending = True
        self.pending[name] = self.pending.get(name, 0) + value

    def reduce(self, divisor: float) -> None:
        for name, value in self.pending.items():
            self.grads[name] = self.grads.get(name, 0) + value * np.float32(1.0 / divisor)
        self.pending.clear()
        for chunk in self.chunks:
            if chunk.pending:
                chunk.pending = False
                chunk.reduced = chunk.reduced or DEVICE

    def zero(self) -> None:
        self.grads.clear()
        self.pending.clear()
        for chunk in self.chunks:
            chunk.pending, chunk.reduced = False, None

    def add_state(self, name: str, dtype: str, memory: mc.Memory) -> None:
        for chunk in self.chunks:
            if chunk.layout.takes_grad:
                chunk.moments[name] = (dtype, memory)

    def can_update(self) -> bool:
        """Whether all that has a gradient has a value."""
        return all(chunk.loaded for chunk in self.chunks if chunk.reduced is not None)

    def update(self) -> None:
        for chunk in self.chunks:
            if chunk.reduced is None:
                continue
            for slot in chunk.layout.slots:
                value = self.values[slot.name]
                changed = value - self.grads.get(slot.name, np.float32(0))
                self.values[slot.name] = np.asarray(changed, value.dtype)

    def move(self, name: str, memory: mc.Memory, kinds: set[str], *, keep: bool) -> None:
        chunk = self.chunk(name)
        if "param" in kinds and chunk.memory is not memory:
            chunk.host_copy = keep and memory is DEVICE
            chunk.memory = memory
        if "grad" in kinds and chunk.reduced is not None:
            chunk.reduced = memory
        if "optimizer" in kinds:
            chunk.moments = {state: (dtype, memory) for state, (dtype, _) in chunk.moments.items()}

    # --- bytes ----------------------------------------------------------------------------

    def nbytes(self, memory: mc.Memory, category: str) -> int:
        """Bytes of one rank."""
        count = {"param": self._param, "grad": self._grad, "optimizer": self._optimizer}[category]
        return sum(count(chunk, memory) for chunk in self.chunks)

    def _param(self, chunk: ChunkModel, memory: mc.Memory) -> int:
        layout = chunk.layout
        home = chunk.home_numel * itemsize(layout.dtype)
        out = home if chunk.loaded and chunk.memory is memory else 0
        out += home if chunk.host_copy and memory is HOST else 0
        is_home = (
            chunk.home_numel == layout.numel
            and chunk.memory is DEVICE
            and chunk.compute_dtype == layout.dtype
        )
        if chunk.accessed and memory is DEVICE and not is_home:
            out += layout.numel * itemsize(chunk.compute_dtype)
        return out

    def _grad(self, chunk: ChunkModel, memory: mc.Memory) -> int:
        out = 4 * chunk.layout.numel if chunk.pending and memory is DEVICE else 0
        return out + (4 * chunk.home_numel if chunk.reduced is memory else 0)

    def _optimizer(self, chunk: ChunkModel, memory: mc.Memory) -> int:
        return sum(
            chunk.home_numel * itemsize(dtype)
            for dtype, where in chunk.moments.values()
            if where is memory
        )
