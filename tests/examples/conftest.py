"""The examples are scripts: their folder is on the path only while these tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def small():
    """A model that computes in no time, and settings for it."""
    from gpt.settings import Model, Training

    return (
        Model(vocab=256, context=16, width=32, blocks=2, heads=2),
        Training(steps=3, batch=8, warmup_steps=2, heldout_batches=2),
    )
