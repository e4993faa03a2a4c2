"""Train one small GPT three ways, and show that memory and losses come out as they should.

Usage: ``python examples/demo.py [--out demo-out]``

Unsharded in one torch process; in chunks over 2 torch ranks; in chunks over 4 emulated JAX devices.
All start from the same weights and see the same batches. Each chunked run forecasts its bytes on
the ``null`` backend before it allocates any. Exits with 1 if planned, counted and measured bytes
are not equal, or if the loss curves are not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt.report import (
    Run,
    bytes_table,
    draw_losses,
    draw_memory,
    loss_difference,
    loss_table,
    problems,
    write_result,
)
from gpt.settings import Model, Training, param_specs
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

HERE = Path(__file__).resolve().parent
TOLERANCE = 2e-3
SCRIPTS = (
    ("torch_unsharded", "torch, unsharded", "train_gpt_unsharded.py"),
    ("torch_chunked", "torch, chunks on 2 ranks", "train_gpt_torch.py"),
    ("jax_chunked", "JAX, chunks on 4 devices", "train_gpt_jax.py"),
)


def main(steps: int, folder: Path, console: Console) -> int:
    """Run all three, report, and return the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Model()
    count = sum(spec.numel for spec in param_specs(model))
    console.print(
        f"A byte-level GPT of {count / 1e6:.2f} M parameters ({model.blocks} blocks of width "
        f"{model.width}, context {model.context}) learns Python's language reference in "
        f"{steps} steps of AdamW in fp32, three times."
    )
    with Progress(
        TextColumn("{task.description:<26}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]:<34}"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        runs = [watch_run(progress, *script, steps=steps) for script in SCRIPTS]
    write_result(runs, folder)
    draw_losses(runs, folder / "loss.png")
    draw_memory(runs, folder / "memory.png", whole_nbytes=4 * 4 * count)
    show(runs, folder, console)
    found = problems(runs, tolerance=TOLERANCE)
    for problem in found:
        console.print(f"[bold red]FAILED[/] {problem}")
    return 1 if found else 0


def watch_run(progress: Progress, name: str, title: str, script: str, *, steps: int) -> Run:
    """One run in processes of its own, with a bar that follows its events."""
    task = progress.add_task(title, total=steps, note="starting")
    planned: dict[str, Any] = {}
    outcome: dict[str, Any] = {}
    sample = ""
    for event in events_of(script, steps=steps):
        kind = event.pop("event")
        if kind == "planned":
            planned = event
            note = f"planned: {event['peak']['total'] / 2**20:.2f} MiB a rank"
            progress.update(task, note=note)
        elif kind == "step":
            held = f"  {event['nbytes'] / 2**20:.2f} MiB held" if event["nbytes"] else ""
            progress.update(task, completed=event["step"], note=f"loss {event['loss']:.3f}{held}")
        elif kind == "outcome":
            outcome = event
            progress.update(task, note=f"held-out loss {event['heldout_loss']:.4f}")
        elif kind == "sample":
            sample = event["text"]
    if not outcome:
        raise SystemExit(f"{script} ended without a result")
    return Run(name, title, outcome, planned, sample)


def events_of(script: str, *, steps: int) -> Iterator[dict[str, Any]]:
    """What a script says, line by line, while it runs."""
    command = [sys.executable, str(HERE / script), "--steps", str(steps), "--events"]
    with process(command) as running:
        for line in running.stdout or ():
            yield json.loads(line)
        status = running.wait()
    if status:
        raise SystemExit(f"{script} failed with exit status {status}; its output is above")


@contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, so that its ranks end with it whatever happens here."""
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield running
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGTERM)
            running.wait()
        if running.stdout:
            running.stdout.close()


def show(runs: list[Run], folder: Path, console: Console) -> None:
    """Tables, a sample, and where the files are."""
    console.print(loss_table(runs))
    console.print(f"largest difference of the loss curves: {loss_difference(runs):.1e}\n")
    console.print(bytes_table(runs))
    for run in runs:
        if run.sample:
            title = f"written by: {run.title}"
            console.print(Panel(Text(run.sample), title=title, title_align="left"))
    names = ("result.json", "loss.png", "memory.png")
    console.print("written: " + ", ".join(str(folder / name) for name in names))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train one small GPT three ways and compare.")
    parser.add_argument("--steps", type=int, default=Training.steps)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    arguments = parser.parse_args()
    width = None if sys.stdout.isatty() else 100
    sys.exit(main(arguments.steps, arguments.out, Console(width=width)))
