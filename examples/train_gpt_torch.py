"""Train a small GPT with all its state in chunks, over torch ranks.

Usage: ``python examples/train_gpt_torch.py`` starts two ranks itself; or bring your own ranks:
``torchrun --nproc-per-node 2 examples/train_gpt_torch.py``.

Weights, gradients and AdamW's moments live in chunks, a shard on every rank. A unit (the embedding,
a block, the head) is gathered when it computes and released after it; backward computes a block's
forward again from its input, and reduces the block's gradient at once. The step itself is
``gpt.step.train_step``, which knows no framework; this file is what torch does in it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import torch_model
from gpt.forecast import forecast
from gpt.reporter import Reporter
from gpt.run import train
from gpt.settings import Model, Training, Unit, param_specs, units
from gpt.step import Weights
from gpt.text import Batch, language_reference
from torch.optim.adamw import adamw

import meshcore as mc

RANKS = 2


class TorchCompute:
    """The model and AdamW on this rank. Every rank has its part of each batch."""

    def __init__(self, model: Model, training: Training, *, rank: int, ranks: int) -> None:
        self._model = model
        self._training = training
        self._rank = rank
        self._ranks = ranks

    def place(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's windows."""
        own = batch.part(self._rank, self._ranks)
        return torch.from_numpy(own.inputs), torch.from_numpy(own.targets)

    @torch.no_grad()
    def forward(self, unit: Unit, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        """Compute and keep no graph: what backward needs is computed again."""
        return torch_model.forward(unit.kind, self._model, unit.local(weights), x)

    def backward(
        self, unit: Unit, weights: Weights, x: torch.Tensor, dy: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Forward again, now with a graph, and back through it."""
        leaves, x = _leaves(unit, weights, x)
        y = torch_model.forward(unit.kind, self._model, leaves, x)
        return _gradients(unit, y, leaves, x, dy)

    def loss(
        self, unit: Unit, weights: Weights, x: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """This rank's loss."""
        return torch_model.loss(self.forward(unit, weights, x), targets)

    def loss_and_backward(
        self, unit: Unit, weights: Weights, x: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]:
        """This rank's loss and its gradients."""
        leaves, x = _leaves(unit, weights, x)
        loss = torch_model.loss(torch_model.forward(unit.kind, self._model, leaves, x), targets)
        return loss.detach(), *_gradients(unit, loss, leaves, x, None)

    def mean(self, losses: Sequence[torch.Tensor]) -> float:
        """Over all losses of all ranks."""
        total = torch.stack(list(losses)).mean()
        if self._ranks > 1:
            dist.all_reduce(total)
        return total.item() / self._ranks

    def update(self, manager: mc.ChunkManager, step: int) -> None:
        """torch's own fused AdamW, in place on flat shards: it never sees a tensor's shape."""
        settings = self._training

        def step_chunk(
            chunk: mc.ChunkUpdate, buffers: dict[str, torch.Tensor]
        ) -> dict[str, torch.Tensor]:
            adamw(
                [buffers["param"]],
                [buffers["grad"]],
                [buffers["exp_avg"]],
                [buffers["exp_avg_sq"]],
                [],
                [torch.tensor(step - 1.0)],  # adamw counts on from here
                fused=True,
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=settings.rate(step),
                weight_decay=settings.weight_decay,
                eps=settings.eps,
                maximize=False,
            )
            return buffers

        with torch.no_grad():
            manager.update(step_chunk)


def _leaves(
    unit: Unit, weights: Weights, x: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Weights by local name, and the input, as leaves of a new graph: views, not copies."""
    leaves = {name: w.detach().requires_grad_() for name, w in unit.local(weights).items()}
    return leaves, x.detach().requires_grad_(x.is_floating_point())


def _gradients(
    unit: Unit,
    y: torch.Tensor,
    leaves: dict[str, torch.Tensor],
    x: torch.Tensor,
    dy: torch.Tensor | None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Gradients of weights by full name, and of the input; tokens have none."""
    wanted = [*leaves.values(), x] if x.requires_grad else list(leaves.values())
    grads = torch.autograd.grad(y, wanted, dy)
    dx = grads[-1] if x.requires_grad else None
    return unit.full(dict(zip(leaves, grads, strict=False))), dx


def write_sample(manager: mc.ChunkManager, model: Model, *, length: int, seed: int) -> str:
    """Let the trained model continue a line of text; a collective."""
    whole = {name: torch.from_numpy(manager.to_numpy(name)) for name in manager.plan.names}
    random = torch.Generator().manual_seed(seed)
    text = list(b"The class statement ")
    with torch.no_grad():
        for _ in range(length):
            x = torch.tensor([text[-model.context :]])
            for unit in units(model):
                x = torch_model.forward(unit.kind, model, unit.local(whole), x)
            chances = torch.softmax(x[0, -1] / 0.7, dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=random)))
    return bytes(text).decode(errors="replace")


def run_rank(rank: int, ranks: int, model: Model, training: Training, *, events: bool) -> None:
    """One rank's whole run; the process group is there."""
    text = language_reference()
    reporter = Reporter(events=events, steps=training.steps, quiet=rank != 0)
    backend = mc.create_backend("torch", mc.DeviceMesh(range(ranks)), shard_axis="shard")
    plan = mc.plan_chunks(param_specs(model), shards=ranks)
    reporter.planned(forecast(backend, plan, model=model, training=training, text=text))
    with mc.ChunkManager(backend, plan, check=True) as manager:
        compute = TorchCompute(model, training, rank=rank, ranks=ranks)
        outcome = train(
            manager, compute, model=model, training=training, text=text, on_step=reporter.step
        )
        reporter.outcome(outcome)
        reporter.sample(write_sample(manager, model, length=200, seed=training.seed))
    backend.close()


def main(rank: int, init_method: str, ranks: int, training: Training, events: bool) -> None:
    """Join the process group, run, and leave it."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=ranks)
    try:
        run_rank(rank, ranks, Model(), training, events=events)
    finally:
        dist.destroy_process_group()


def launch(training: Training, *, events: bool) -> None:
    """Run as one rank of torchrun, or else start the ranks here."""
    if "RANK" in os.environ:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        main(rank, "env://", ranks, training, events)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "rendezvous").as_uri()
        torch.multiprocessing.spawn(main, (meeting, RANKS, training, events), nprocs=RANKS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT in chunks over torch ranks.")
    parser.add_argument("--steps", type=int, default=Training.steps)
    parser.add_argument("--events", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    launch(Training(steps=arguments.steps), events=arguments.events)
