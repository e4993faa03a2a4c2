"""The demo fails when it should, and its files say what they must."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

PEAK = {"param": 30, "grad": 20, "optimizer": 40, "staging": 0, "external": 0, "total": 80}
MIDDLE = {"param": 25, "grad": 10, "optimizer": 40, "staging": 0, "external": 0}


@pytest.fixture
def runs():
    from gpt.report import Run

    def outcome(*losses, chunked=True):
        bytes_ = {"ledger": PEAK, "measured": PEAK} if chunked else {"ledger": {}, "measured": {}}
        return {"train_loss": list(losses), "heldout_loss": 2.0, "tokens_per_second": 9.5, **bytes_}

    planned = {"peak": PEAK, "timeline": [MIDDLE, MIDDLE | {"param": 30}, MIDDLE]}
    return [
        Run("torch_unsharded", "whole", outcome(3.0, 2.0, chunked=False), {}),
        Run("torch_chunked", "torch", outcome(3.0, 2.001), planned, sample="a [b] c"),
        Run("jax_chunked", "JAX", outcome(3.0, 1.9995), planned),
    ]


def test_equal_runs_have_no_problems(runs):
    from gpt.report import loss_difference, problems

    assert loss_difference(runs) == pytest.approx(1.5e-3)
    assert problems(runs, tolerance=2e-3) == []


def test_curves_that_part_are_a_problem(runs):
    from gpt.report import problems

    (problem,) = problems(runs, tolerance=1e-3)
    assert "differ by 1.50e-03" in problem


def test_a_loss_that_is_no_number_is_a_problem(runs):
    from gpt.report import problems

    broken = runs[2].outcome | {"train_loss": [3.0, float("nan")]}
    assert problems([*runs[:2], replace(runs[2], outcome=broken)], tolerance=2e-3)


@pytest.mark.parametrize("witness", ["planned", "ledger", "measured"])
@pytest.mark.parametrize("category", ["param", "total"])
def test_one_witness_off_by_one_byte_is_a_problem(runs, witness, category):
    from gpt.report import problems

    row = PEAK | {category: PEAK[category] + 1}
    if witness == "planned":
        changed = replace(runs[1], planned=runs[1].planned | {"peak": row})
    else:
        changed = replace(runs[1], outcome=runs[1].outcome | {witness: row})
    (problem,) = problems([runs[0], changed, runs[2]], tolerance=2e-3)
    assert problem.startswith("torch: planned, counted and measured bytes differ")


def test_equal_but_empty_witnesses_are_a_problem(runs):
    from gpt.report import problems

    row = PEAK | {"grad": 0}
    changed = replace(
        runs[1],
        planned=runs[1].planned | {"peak": row},
        outcome=runs[1].outcome | {"ledger": row, "measured": row},
    )
    (problem,) = problems([runs[0], changed, runs[2]], tolerance=2e-3)
    assert "a peak is 0 that cannot be" in problem


def test_the_tables_fit_and_show_every_figure(runs):
    from gpt.report import bytes_table, loss_table

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(loss_table(runs), bytes_table(runs))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    for word in ("2.0010", "1.0e-03", "5.0e-04", "optimizer", "40", "total", "80", "yes"):
        assert word in text
    assert "NO" not in text


def test_the_pictures_are_drawn(runs, tmp_path):
    from gpt.report import draw_losses, draw_memory

    draw_losses(runs, tmp_path / "loss.png")
    draw_memory(runs, tmp_path / "memory.png", whole_nbytes=160)
    for name in ("loss.png", "memory.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.timeout(600)
def test_a_short_demo_writes_its_result(tmp_path):
    import demo

    command = [sys.executable, demo.__file__, "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) == {"runs", "max_loss_difference"}
    assert 0 <= result["max_loss_difference"] < 2e-3
    assert set(result["runs"]) == {"torch_unsharded", "torch_chunked", "jax_chunked"}
    for name, run in result["runs"].items():
        assert set(run) == {"train_loss", "heldout_loss", "tokens_per_second"} | (
            {"bytes"} if name != "torch_unsharded" else set()
        )
        assert len(run["train_loss"]) == 3
        if "bytes" in run:
            assert set(run["bytes"]) == {"planned", "ledger", "measured"}
            assert run["bytes"]["planned"] == run["bytes"]["ledger"] == run["bytes"]["measured"]
            assert min(run["bytes"]["ledger"][c] for c in ("param", "grad", "optimizer")) > 0
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "loss.png", "memory.png"}


@pytest.mark.slow
@pytest.mark.torch
def test_a_script_that_fails_fails_the_demo(tmp_path):
    import demo

    with pytest.raises(SystemExit, match="failed with exit status 2"):
        list(demo.events_of("train_gpt_unsharded.py", steps="many"))
