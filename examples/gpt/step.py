"""One training step over chunks, unit by unit; the same code drives torch, JAX and the dry run.

At any moment the weights of one unit are gathered, and the gradient of one unit is whole. All else
(weights, reduced gradients, both AdamW moments) is a shard on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import meshcore as mc
from gpt.settings import Unit
from gpt.text import Batch

Weights = Mapping[str, Any]
"""Gathered weights by full name, each read when it is asked for, valid while they are gathered."""


class Compute(Protocol):
    """What a framework does between the calls of the manager.

    Arrays are the framework's own and opaque here.
    """

    def place(self, batch: Batch) -> tuple[Any, Any]:
        """Inputs and targets of the ranks that this process holds."""
        ...

    def forward(self, unit: Unit, weights: Weights, x: Any) -> Any:
        """The unit's output."""
        ...

    def backward(self, unit: Unit, weights: Weights, x: Any, dy: Any) -> tuple[dict[str, Any], Any]:
        """Gradients of the weights by full name and of the input (None where it is tokens), from
        the unit's input and its output's gradient.
        """
        ...

    def loss(self, unit: Unit, weights: Weights, x: Any, targets: Any) -> Any:
        """Each rank's loss, from the head's input."""
        ...

    def loss_and_backward(
        self, unit: Unit, weights: Weights, x: Any, targets: Any
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
        with manager.gathered(*unit.names) as weights:
            x = compute.forward(unit, weights, x)
    with manager.gathered(*head.names) as weights:
        loss, grads, dx = compute.loss_and_backward(head, weights, x, targets)
    reduce(manager, head, grads)
    for unit in reversed(body):
        x = inputs.pop()
        with manager.gathered(*unit.names) as weights:  # again: it was released after forward
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
            with manager.gathered(*unit.names) as weights:
                x = compute.forward(unit, weights, x)
        with manager.gathered(*head.names) as weights:
            losses.append(compute.loss(head, weights, x, targets))
    return compute.mean(losses)


def reduce(manager: mc.ChunkManager, unit: Unit, grads: dict[str, Any]) -> None:
    """Turn a unit's gradients into the shard of their mean over all ranks."""
    for name, grad in grads.items():
        manager.accumulate_grad(name, grad)
    manager.reduce_grads(names=unit.names)
