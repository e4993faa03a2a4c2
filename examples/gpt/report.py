"""What the demo shows at the end: one table, two pictures, one file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from rich.table import Table

mpl.use("Agg")  # files only, no display
from matplotlib import pyplot as plt

MIB = 2.0**20
COLOURS = {"param": "#4477aa", "grad": "#ee6677", "optimizer": "#228833", "staging": "#ccbb44"}
WITNESSES = ("planned", "ledger", "measured")


@dataclass(frozen=True)
class Run:
    """One run as the demo saw it; ``planned`` and what follows are empty without chunks.

    Attributes:
        name: its key in ``result.json``.
        title: what people read.
        outcome: train_loss, heldout_loss, tokens_per_second, ledger, measured.
        planned: peak and timeline, forecast before the run.
        sample: text that the model wrote, if it was asked to.
    """

    name: str
    title: str
    outcome: Mapping[str, Any]
    planned: Mapping[str, Any]
    sample: str = ""

    @property
    def peaks(self) -> dict[str, dict[str, int]]:
        """Witness -> category -> peak bytes of one rank; {} without chunks."""
        if not self.planned:
            return {}
        rows = (self.planned["peak"], self.outcome["ledger"], self.outcome["measured"])
        return {name: dict(row) for name, row in zip(WITNESSES, rows, strict=True)}


def loss_difference(runs: Sequence[Run]) -> float:
    """The largest distance between any two loss curves at any step."""
    curves = np.array([run.outcome["train_loss"] for run in runs])
    return float((curves.max(0) - curves.min(0)).max())


def problems(runs: Sequence[Run], *, tolerance: float) -> list[str]:
    """What should hold and does not."""
    found = []
    for run in runs:
        peaks = run.peaks
        if peaks and not peaks["planned"] == peaks["ledger"] == peaks["measured"]:
            found.append(f"{run.title}: planned, counted and measured bytes differ: {peaks}")
        if peaks and not all(peaks["planned"][c] for c in ("param", "grad", "optimizer")):
            found.append(f"{run.title}: a peak is 0 that cannot be: {peaks['planned']}")
    difference = loss_difference(runs)
    if not difference <= tolerance:  # NaN is a problem too
        found.append(f"the loss curves differ by {difference:.2e}, more than {tolerance:.0e}")
    return found


def result(runs: Sequence[Run]) -> dict[str, Any]:
    """What goes into ``result.json``."""
    rows = {}
    for run in runs:
        keys = ("train_loss", "heldout_loss", "tokens_per_second")
        rows[run.name] = {key: run.outcome[key] for key in keys}
        if run.peaks:
            rows[run.name]["bytes"] = run.peaks
    return {"runs": rows, "max_loss_difference": loss_difference(runs)}


def loss_table(runs: Sequence[Run]) -> Table:
    """Losses and speed, one row a run."""
    table = Table(title="Three runs, the same weights and batches", title_justify="left")
    table.add_column("run")
    for head in ("last train loss", "held-out loss", "off the first run by", "tokens/s"):
        table.add_column(head, justify="right")
    for run in runs:
        outcome = run.outcome
        off = "" if run is runs[0] else f"{loss_difference([runs[0], run]):.1e}"
        table.add_row(
            run.title,
            f"{outcome['train_loss'][-1]:.4f}",
            f"{outcome['heldout_loss']:.4f}",
            off,
            f"{outcome['tokens_per_second']:,.0f}",
        )
    return table


def bytes_table(runs: Sequence[Run]) -> Table:
    """Peak bytes of one rank by category, from three witnesses."""
    table = Table(title="Peak bytes of one rank", title_justify="left")
    for head in ("run", "category"):
        table.add_column(head)
    for head in (*WITNESSES, "equal"):
        table.add_column(head, justify="right")
    for run in runs:
        peaks = run.peaks
        shown = [c for c in peaks.get("planned", {}) if any(peaks[w][c] for w in WITNESSES)]
        for category in shown:
            row = [peaks[witness][category] for witness in WITNESSES]
            equal = "yes" if len(set(row)) == 1 else "NO"
            title = run.title if category == shown[0] else ""
            last = category == shown[-1]
            table.add_row(title, category, *(f"{n:,}" for n in row), equal, end_section=last)
    return table


def draw_losses(runs: Sequence[Run], path: Path) -> None:
    """The loss curves, and below them how far each is off the first."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7.5, 5.5), sharex=True, height_ratios=(3, 1.2), layout="constrained"
    )
    styles = [("#222222", 3.0, "-"), ("#ee6677", 1.6, "-"), ("#4477aa", 1.6, (0, (3, 2)))]
    first = np.array(runs[0].outcome["train_loss"])
    steps = np.arange(1, len(first) + 1)
    for run, (colour, width, dash) in zip(runs, styles, strict=False):
        losses = np.array(run.outcome["train_loss"])
        label = f"{run.title}: held-out {run.outcome['heldout_loss']:.4f}"
        above.plot(steps, losses, color=colour, lw=width, ls=dash, label=label)
        if run is not runs[0]:
            off = np.abs(losses - first)
            below.semilogy(steps[off > 0], off[off > 0], ".", color=colour, ms=4)
    above.set_ylabel("training loss, nats a byte")
    above.legend(frameon=False)
    below.set_ylabel("off the first run")
    below.set_xlabel("step")
    for axes in (above, below):
        _plain(axes)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_memory(runs: Sequence[Run], path: Path, *, whole_nbytes: int) -> None:
    """One training step of each chunked run, by what the bytes are for; and the peaks.

    Args:
        runs: those without chunks are left out.
        path: a PNG.
        whole_nbytes: weights, gradients and both moments of the whole model.
    """
    chunked = [run for run in runs if run.planned]
    figure, rows = plt.subplots(
        len(chunked), 2, figsize=(10, 3.1 * len(chunked)), width_ratios=(2.4, 1), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for (left, right), run in zip(rows, chunked, strict=True):
        _draw_step(left, run, whole_nbytes)
        _draw_peaks(right, run)
    patches = [mpl.patches.Patch(color=colour, label=c) for c, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False)
    rows[0][1].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_step(axes: Any, run: Run, whole_nbytes: int) -> None:
    timeline = run.planned["timeline"]
    order = ("optimizer", "param", "grad", "staging")  # what hardly changes lies below
    stacks = [[sample[c] / MIB for sample in timeline] for c in order]
    colours = [COLOURS[c] for c in order]
    axes.stackplot(range(len(timeline)), stacks, colors=colours, step="post", lw=0)
    top = whole_nbytes / MIB
    axes.axhline(top, color="#222222", ls="--", lw=1)
    backward = next(i for i, sample in enumerate(timeline) if sample["grad"])
    axes.vlines(backward, 0, 0.95 * top, color="#222222", ls=":", lw=1)
    note = {"textcoords": "offset points", "fontsize": 8.5}
    axes.annotate("unsharded: weights, gradients, both moments", (0, top), (3, 4), **note)
    axes.annotate("forward", (0, 0.87 * top), (3, 0), **note)
    axes.annotate("backward, update", (backward, 0.87 * top), (4, 0), **note)
    axes.set_ylim(0, 1.15 * top)
    axes.set_xlim(0, len(timeline) - 1)
    axes.set_title(f"{run.title}: one rank during one step", loc="left", fontsize=10)
    axes.set_ylabel("MiB")
    axes.set_xlabel("buffers that open and close", fontsize=9)
    _plain(axes)


def _draw_peaks(axes: Any, run: Run) -> None:
    peaks = run.peaks
    shown = [c for c in (*COLOURS, "total") if any(peaks[w].get(c) for w in WITNESSES)]
    for place, (witness, shade) in enumerate(zip(WITNESSES, (1.0, 0.65, 0.35), strict=True)):
        heights = [peaks[witness][c] / MIB for c in shown]
        at = np.arange(len(shown)) + 0.27 * (place - 1)
        axes.bar(at, heights, width=0.25, color="#333333", alpha=shade, label=witness)
    axes.set_xticks(range(len(shown)), shown, fontsize=7)
    axes.set_title("its peaks, by three witnesses", loc="left", fontsize=10)
    axes.set_ylabel("MiB")
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", lw=0.4, alpha=0.5)


def write_result(runs: Sequence[Run], folder: Path) -> None:
    """Write ``result.json``."""
    text = json.dumps(result(runs), indent=2)
    (folder / "result.json").write_text(text + "\n")
