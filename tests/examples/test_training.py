"""A run over chunks is the run of the whole model, and its forecast is what happens."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

import numpy as np
import pytest
from numpy.testing import assert_allclose

import meshcore as mc

pytestmark = [pytest.mark.torch, pytest.mark.jax]


@pytest.fixture
def reference(small):
    """Losses and held-out loss of the unsharded run."""
    import train_gpt_unsharded

    model, training = small
    with redirect_stdout(io.StringIO()):
        return train_gpt_unsharded.main(training, model, events=True)


def run_in_chunks(name, ranks, compute, small):
    from gpt.forecast import forecast
    from gpt.run import train
    from gpt.settings import param_specs
    from gpt.text import language_reference

    model, training = small
    text = language_reference()
    backend = mc.create_backend(name, mc.DeviceMesh(range(ranks)))
    plan = mc.plan_chunks(param_specs(model), shards=ranks)
    steps = []
    try:
        planned = forecast(backend, plan, model=model, training=training, text=text)
        with mc.ChunkManager(backend, plan, check=True) as manager:
            outcome = train(
                manager,
                compute,
                model=model,
                training=training,
                text=text,
                on_step=lambda *told: steps.append(told),
            )
    finally:
        backend.close()
    return planned, outcome, steps


def check(planned, outcome, steps, reference):
    assert len(outcome.train_loss) == 3
    assert outcome.train_loss[0] > outcome.train_loss[-1] > 1.0
    assert_allclose(outcome.train_loss, reference.train_loss, atol=1e-4)
    assert outcome.heldout_loss == pytest.approx(reference.heldout_loss, abs=1e-4)
    assert planned.peak == outcome.ledger == outcome.measured
    assert [(step, loss) for step, loss, _ in steps] == list(enumerate(outcome.train_loss, 1))
    assert planned.timeline[-1]["grad"] == 0 == steps[-1][2] - sum(planned.timeline[-1].values())


def test_four_jax_devices_match_the_whole_model(small, reference):
    import jax
    from train_gpt_jax import JaxCompute

    compute = JaxCompute(*small, jax.devices()[:4])
    planned, outcome, steps = run_in_chunks("jax", 4, compute, small)
    check(planned, outcome, steps, reference)
    # Weights and moments are shards, so they are less than half of what the whole model takes.
    held = planned.timeline[-1]
    assert held["optimizer"] == 2 * held["param"]
    assert planned.peak["total"] > sum(held.values())


def test_one_torch_rank_matches_the_whole_model(small, reference):
    from train_gpt_torch import TorchCompute

    compute = TorchCompute(*small, rank=0, ranks=1)
    check(*run_in_chunks("torch", 1, compute, small), reference)


def test_events_are_one_object_a_line(small, capsys):
    import train_gpt_unsharded

    model, training = small
    outcome = train_gpt_unsharded.main(training, model, events=True)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["step", "step", "step", "outcome"]
    assert [event["loss"] for event in events[:3]] == outcome.train_loss
    assert events[-1]["heldout_loss"] == outcome.heldout_loss


def test_people_hear_the_same_in_words(small, capsys):
    import train_gpt_unsharded

    model, training = small
    outcome = train_gpt_unsharded.main(training, model, events=False)
    text = capsys.readouterr().out
    assert f"step    3/3  loss {outcome.train_loss[-1]:.4f}" in text
    assert f"held-out loss {outcome.heldout_loss:.4f} nats a byte" in text


def test_the_gradient_norm_is_clipped_in_every_run(small):
    """With a bound far below the norm the clipped step differs from the free one."""
    from dataclasses import replace

    import train_gpt_unsharded
    from train_gpt_torch import TorchCompute

    model, training = small
    # AdamW hides a constant factor, but not one that changes from step to step near its eps.
    tight = replace(training, max_norm=1e-7, steps=3)
    with redirect_stdout(io.StringIO()):
        clipped = train_gpt_unsharded.main(tight, model, events=True)
        free = train_gpt_unsharded.main(training, model, events=True)
    _, outcome, _ = run_in_chunks(
        "torch", 1, TorchCompute(model, tight, rank=0, ranks=1), (model, tight)
    )
    assert_allclose(outcome.train_loss, clipped.train_loss, atol=1e-4)
    assert np.abs(np.subtract(clipped.train_loss, free.train_loss)).max() > 1e-2
