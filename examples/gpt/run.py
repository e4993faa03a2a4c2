"""A whole run over chunks: load, train, evaluate, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import meshcore as mc
from gpt.settings import Model, Training, initial_weights, units
from gpt.step import Compute, evaluate, train_step
from gpt.text import Text, heldout_batches, training_batches

OnStep = Callable[[int, float, int], None]
"""Gets the step, its loss, and the bytes that this rank holds in chunks after it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run was.

    Attributes:
        train_loss: one a step, over all ranks.
        heldout_loss: at the end, on the same held-out text for every run.
        tokens_per_second: over all ranks, without the first step (it compiles).
        ledger: category (and "total") -> peak bytes of one rank by the ledger's count.
        measured: the same, as measured from the backend's own arrays.
    """

    train_loss: list[float]
    heldout_loss: float
    tokens_per_second: float
    ledger: dict[str, int] = field(default_factory=dict)
    measured: dict[str, int] = field(default_factory=dict)


def train(
    manager: mc.ChunkManager,
    compute: Compute,
    *,
    model: Model,
    training: Training,
    text: Text,
    on_step: OnStep,
) -> Outcome:
    """Load the initial weights, train, and evaluate on held-out text."""
    manager.load(initial_weights(model, training.seed))
    manager.add_state("exp_avg")
    manager.add_state("exp_avg_sq")
    batches = training_batches(
        text.train,
        steps=training.steps,
        windows=training.batch,
        context=model.context,
        seed=training.seed,
    )
    losses: list[float] = []
    clock = StepClock()
    for step, batch in enumerate(batches, start=1):
        losses.append(
            train_step(manager, compute, units(model), batch, step=step, max_norm=training.max_norm)
        )
        clock.tick()
        on_step(step, losses[-1], sum(manager.memory().used["device"].values()))
    heldout = heldout_batches(
        text.heldout,
        batches=training.heldout_batches,
        windows=training.batch,
        context=model.context,
    )
    return Outcome(
        train_loss=losses,
        heldout_loss=evaluate(manager, compute, units(model), heldout),
        tokens_per_second=clock.steps_per_second * training.batch * model.context,
        ledger=dict(manager.memory().peak["device"]),
        measured=dict(manager.audit().measured_peak["device"]),
    )


class StepClock:
    """Steps a second from the end of the first step on."""

    def __init__(self) -> None:
        self._ticks: list[float] = []

    def tick(self) -> None:
        """A step is over."""
        self._ticks.append(time.perf_counter())

    @property
    def steps_per_second(self) -> float:
        """0 before the second step is over."""
        if len(self._ticks) < 2:
            return 0.0
        return (len(self._ticks) - 1) / (self._ticks[-1] - self._ticks[0])
