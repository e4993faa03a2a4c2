"""A whole run over chunks: forecast its bytes, load, train, evaluate, and say what happened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

import meshcore as mc
from gpt.settings import Model, Training, Unit, initial_weights, units
from gpt.step import Compute, evaluate, train_step
from gpt.text import Batch, Text, heldout_batches, training_batches
from meshcore.backend import Backend

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


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one rank is going to hold in device memory.

    Attributes:
        peak: category (and "total") -> peak bytes.
        timeline: bytes by category after each buffer that comes or goes, over one training step.
    """

    peak: dict[str, int]
    timeline: list[dict[str, int]]


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
            train_step(
                manager, compute, units(model), batch, step=step, max_norm=training.max_norm
            )
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
    outcome = train(
        manager, _NoCompute(), model=model, training=short, text=text, on_step=on_step
    )
    manager.close()
    backend.close()
    return Forecast(peak=outcome.ledger, timeline=timeline)


def _watch(ledger: mc.Ledger) -> list[dict[str, int]]:
    """Note the bytes by category after every buffer that comes or goes; returns the growing list."""
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

    def weights(self, manager: mc.ChunkManager, unit: Unit) -> dict[str, Any]:
        return {}

    def forward(self, unit: Unit, weights: dict[str, Any], x: Any) -> Any:
        return None

    def backward(
        self, unit: Unit, weights: dict[str, Any], x: Any, dy: Any
    ) -> tuple[dict[str, Any], Any]:
        zero = np.float32(0.0)
        return {local: np.broadcast_to(zero, shape) for local, shape in unit.shapes.items()}, None

    def loss(self, unit: Unit, weights: dict[str, Any], x: Any, targets: Any) -> Any:
        return 0.0

    def loss_and_backward(
        self, unit: Unit, weights: dict[str, Any], x: Any, targets: Any
    ) -> tuple[Any, dict[str, Any], Any]:
        return 0.0, *self.backward(unit, weights, x, None)

    def mean(self, losses: Sequence[Any]) -> float:
        return 0.0

    def update(self, manager: mc.ChunkManager, step: int) -> None:
        manager.update(lambda chunk, buffers: {})


class Reporter:
    """Tells people, or with ``events`` a program that reads one JSON object a line.

    Args:
        events: whether a program is reading.
        steps: how many steps there will be.
        quiet: say nothing at all (every rank but one).
    """

    def __init__(self, *, events: bool, steps: int, quiet: bool = False) -> None:
        self._events = events
        self._steps = steps
        self._quiet = quiet

    def planned(self, forecast: Forecast) -> None:
        """The forecast, before anything is allocated."""
        peak = forecast.peak
        self._say("planned", asdict(forecast), f"planned peak: {_table(peak)}")

    def step(self, step: int, loss: float, nbytes: int = 0) -> None:
        """A step is over; people hear of every twentieth."""
        data = {"step": step, "loss": loss, "nbytes": nbytes}
        text = f"step {step:4}/{self._steps}  loss {loss:.4f}  {nbytes / 2**20:.2f} MiB in chunks"
        if self._events or step == 1 or step % 20 == 0 or step == self._steps:
            self._say("step", data, text if nbytes else text.rpartition("  ")[0])

    def outcome(self, outcome: Outcome) -> None:
        """The end."""
        lines = [
            f"held-out loss {outcome.heldout_loss:.4f} nats a byte, "
            f"{outcome.tokens_per_second:,.0f} tokens/s"
        ]
        if outcome.ledger:
            lines.append(f"ledger peak:   {_table(outcome.ledger)}")
            lines.append(f"measured peak: {_table(outcome.measured)}")
        self._say("outcome", asdict(outcome), "\n".join(lines))

    def sample(self, text: str) -> None:
        """Text that the trained model wrote."""
        self._say("sample", {"text": text}, text)

    def _say(self, kind: str, data: dict[str, Any], text: str) -> None:
        if self._quiet:
            return
        print(json.dumps({"event": kind, **data}) if self._events else text, flush=True)


def _table(row: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes / 2**20:.3f} MiB" for name, nbytes in row.items() if nbytes)
