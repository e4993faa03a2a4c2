"""What a training script says while it runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from gpt.forecast import Forecast
from gpt.run import Outcome


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
