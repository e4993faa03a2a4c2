"""The bytes of a run, before it: the same calls on the ``null`` backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import meshcore as mc
from gpt.run import train
from gpt.settings import Model, Training, Unit
from gpt.step import Weights
from gpt.text import Batch, Text
from meshcore.backend import Backend


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one rank is going to hold in device memory.

    Attributes:
        peak: category (and "total") -> peak bytes.
        timeline: bytes by category after each buffer that comes or goes, over one training step.
    """

    peak: dict[str, int]
    timeline: list[dict[str, int]]


def forecast(
    like: Backend, plan: mc.ChunkPlan, *, model: Model, training: Training, text: Text
) -> Forecast:
    """Predict a run on the ``null`` backend, which counts bytes and has no data.

    It makes the very calls of the run, with the moves of the backend ``like``. Two steps do: what
    is alive at a point of the second step is alive there in every later one.
    """
    backend = mc.create_backend(
        "null", like.mesh, shard_axis="shard", options=mc.BackendOptions(profile=like.profile)
    )
    manager = mc.ChunkManager(backend, plan)
    samples = _watch(manager.ledger)
    timeline: list[dict[str, int]] = []

    def on_step(step: int, loss: float, nbytes: int) -> None:
        timeline[:] = samples
        samples.clear()

    short = replace(training, steps=2, heldout_batches=1)
    outcome = train(manager, _NoCompute(), model=model, training=short, text=text, on_step=on_step)
    manager.close()
    backend.close()
    return Forecast(peak=outcome.ledger, timeline=timeline)


def _watch(ledger: mc.Ledger) -> list[dict[str, int]]:
    """Bytes by category after every buffer that comes or goes: a list that grows."""
    samples: list[dict[str, int]] = []

    def noting(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*entry: Any) -> None:
            change(*entry)
            samples.append(dict(ledger.report().used["device"]))

        return changed

    ledger.open, ledger.close = noting(ledger.open), noting(ledger.close)  # type: ignore[method-assign]
    return samples


class _NoCompute:
    """Has gradients of the right shape, and no numbers."""

    def place(self, batch: Batch) -> tuple[Any, Any]:
        return None, None

    def forward(self, unit: Unit, weights: Weights, x: Any) -> Any:
        return None

    def backward(self, unit: Unit, weights: Weights, x: Any, dy: Any) -> tuple[dict[str, Any], Any]:
        zero = np.float32(0.0)
        zeros = {local: np.broadcast_to(zero, shape) for local, shape in unit.shapes.items()}
        return unit.full(zeros), None

    def loss(self, unit: Unit, weights: Weights, x: Any, targets: Any) -> Any:
        return 0.0

    def loss_and_backward(
        self, unit: Unit, weights: Weights, x: Any, targets: Any
    ) -> tuple[Any, dict[str, Any], Any]:
        return 0.0, *self.backward(unit, weights, x, None)

    def mean(self, losses: Sequence[Any]) -> float:
        return 0.0

    def update(self, manager: mc.ChunkManager, step: int) -> None:
        manager.update(lambda chunk, buffers: {})
