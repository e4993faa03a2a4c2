"""The reference: the same GPT, weights and batches in plain PyTorch, in one process, no chunks.

Usage: ``python examples/train_gpt_unsharded.py [--steps N]``
"""

from __future__ import annotations

import argparse

import torch
from gpt import torch_model
from gpt.reporter import Reporter
from gpt.run import Outcome, StepClock
from gpt.settings import Model, Training, initial_weights, units
from gpt.text import Batch, heldout_batches, language_reference, training_batches


def whole_loss(model: Model, weights: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
    """Loss of the whole model on one batch."""
    x = torch.from_numpy(batch.inputs)
    for unit in units(model):
        x = torch_model.forward(unit.kind, model, unit.local(weights), x)
    return torch_model.loss(x, torch.from_numpy(batch.targets))


def main(training: Training, model: Model, *, events: bool) -> Outcome:
    """Train, evaluate, and report."""
    text = language_reference()
    reporter = Reporter(events=events, steps=training.steps)
    weights = {
        name: torch.from_numpy(value).requires_grad_()
        for name, value in initial_weights(model, training.seed).items()
    }
    optimizer = torch.optim.AdamW(
        weights.values(),
        betas=(training.beta1, training.beta2),
        eps=training.eps,
        weight_decay=training.weight_decay,
        fused=True,
    )
    batches = training_batches(
        text.train,
        steps=training.steps,
        windows=training.batch,
        context=model.context,
        seed=training.seed,
    )
    losses, clock = [], StepClock()
    for step, batch in enumerate(batches, start=1):
        loss = whole_loss(model, weights, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clock.tick()
        reporter.step(step, losses[-1])
    heldout = heldout_batches(
        text.heldout,
        batches=training.heldout_batches,
        windows=training.batch,
        context=model.context,
    )
    with torch.no_grad():
        heldout_losses = [whole_loss(model, weights, batch).item() for batch in heldout]
    outcome = Outcome(
        train_loss=losses,
        heldout_loss=sum(heldout_losses) / len(heldout_losses),
        tokens_per_second=clock.steps_per_second * training.batch * model.context,
    )
    reporter.outcome(outcome)
    return outcome


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT in plain PyTorch.")
    parser.add_argument("--steps", type=int, default=Training.steps)
    parser.add_argument("--events", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as each rank of the chunked run has on two cores
    main(Training(steps=arguments.steps), Model(), events=arguments.events)
