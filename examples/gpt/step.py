"""One training step over chunks, unit by unit; the same code drives torch, JAX and the dry run.

At any moment the weights of one unit are gathered, and the gradient of one unit is whole. All else
(weights, reduced gradients, both AdamW moments) is a shard on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import meshcore as mc
from gpt.settings import Unit
from gpt.text import Batch


class Compute(Protocol):
    """What a framework does between the calls of the manager.

    Arrays are the framework's own and opaque here. Weights and gradients go by local name.
    """

    def place(self, batch: Batch) -> tuple[Any, Any]:
        """Inputs and targets of the ranks that this process holds."""
        ...

    def weights(self, manager: mc.ChunkManager, unit: Unit) -> dict[str, Any]:
        """The weights of a gathered unit."""
        ...

    def forward(self, unit: Unit, weights: dict[str, Any], x: Any) -> Any:
        """The unit's output."""
        ...

    def backward(
        self, unit: Unit, weights: dict[str, Any], x: Any, dy: Any
    ) -> tuple[dict[str, Any], Any]:
        """Gradients of weights and input, from the unit's input and its output's gradient."""
        ...

    def loss(self, unit: Unit, weights: dict[str, Any], x: Any, targets: Any) -> Any:
        """Each rank's loss, from the head's input."""
        ...

    def loss_and_backward(
        self, unit: Unit, weights: dict[str, Any], x: Any, targets: Any
    ) -> tuple[Any, dict[str, Any], Any]:
        """Each rank's loss, and the gradients of the head's weights and input."""
        ...

    def mean(self, losses: Sequence[Any]) -> float:
        """The mean of some losses over all ranks; the same on every rank."""
        ...

    def update(self, manager: mc.ChunkManager, step: int) -> None:
        """AdamW on every chunk, shard by shard."""
        ...


def train_step(
    manager: mc.ChunkManager,
    compute: Compute,
    units: Sequence[Unit],
    batch: Batch,
    *,
    step: int,
    max_norm: float,
) -> float:
    """Forward, backward, clip, update; returns the loss over all ranks. Steps count from 1."""
    *body, head = units
    x, targets = compute.place(batch)
    inputs = []
    for unit in body:
        inputs.append(x)
        with gathered(manager, compute, unit) as weights:
            x = compute.forward(unit, weights, x)
    with gathered(manager, compute, head) as weights:
        loss, grads, dx = compute.loss_and_backward(head, weights, x, targets)
    reduce(manager, head, grads)
    for unit in reversed(body):
        x = inputs.pop()
        with gathered(manager, compute, unit) as weights:  # again: it was released after forward
            grads, dx = compute.backward(unit, weights, x, dx)
        reduce(manager, unit, grads)
    manager.clip_grad_norm(max_norm)
    compute.update(manager, step)
    manager.zero_grads()
    return compute.mean([loss])


def evaluate(
    manager: mc.ChunkManager, compute: Compute, units: Sequence[Unit], batches: Iterable[Batch]
) -> float:
    """Mean loss over batches, with every unit gathered in its turn."""
    *body, head = units
    losses = []
    for batch in batches:
        x, targets = compute.place(batch)
        for unit in body:
            with gathered(manager, compute, unit) as weights:
                x = compute.forward(unit, weights, x)
        with gathered(manager, compute, head) as weights:
            losses.append(compute.loss(head, weights, x, targets))
    return compute.mean(losses)


@contextmanager
def gathered(manager: mc.ChunkManager, compute: Compute, unit: Unit) -> Iterator[dict[str, Any]]:
    """Gather a unit's chunks for a scope; yields its weights, which are gone after it."""
    manager.access(*unit.names)
    try:
        yield compute.weights(manager, unit)
    finally:
        manager.release(*unit.names)


def reduce(manager: mc.ChunkManager, unit: Unit, grads: dict[str, Any]) -> None:
    """Turn a unit's gradients into the shard of their mean over all ranks."""
    for local, grad in grads.items():
        manager.accumulate_grad(f"{unit.name}.{local}", grad)
    manager.reduce_grads(names=unit.names)
