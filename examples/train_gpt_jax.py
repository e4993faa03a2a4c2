"""Train a small GPT with all its state in chunks, over JAX devices: one process for all of them.

Usage: ``python examples/train_gpt_jax.py`` emulates four CPU devices.

Weights, gradients and AdamW's moments live in chunks, a shard on every device. A unit (the
embedding, a block, the head) is gathered when it computes and released after it; backward computes
a block's forward again from its input, and reduces the block's gradient at once. The step itself is
``gpt.step.train_step``, which knows no framework; this file is what JAX does in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpt import jax_model
from gpt.forecast import forecast
from gpt.reporter import Reporter
from gpt.run import train
from gpt.settings import Model, Training, Unit, param_specs
from gpt.step import Weights
from gpt.text import Batch, language_reference
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshcore as mc
from meshcore_jax import launch

DEVICES = 4
WHOLE, ROWS = P(), P("rank")


class JaxCompute:
    """The model and AdamW on all devices. Every device has its rows of each batch.

    What a device computes of its own (its rows, its loss, its gradient of a weight) is a block of
    one array that is split by its first dim; see ``_on_every_device``.
    """

    def __init__(self, model: Model, training: Training, devices: Sequence[Any]) -> None:
        self._training = training
        self._rank_of = {device: rank for rank, device in enumerate(devices)}
        self._mesh = Mesh(np.asarray(devices), ("rank",))
        self._adamw = _adamw_program(training)

        def loss(weights: Any, x: Any, targets: Any) -> Any:
            return jax_model.loss(jax_model.forward("head", model, weights, x), targets)

        def loss_and_backward(weights: Any, x: Any, targets: Any) -> Any:
            value, grads = jax.value_and_grad(loss, (0, 1))(weights, x, targets)
            return value[None], *grads

        self._loss = self._on_every_device(lambda *args: loss(*args)[None])
        self._loss_and_backward = self._on_every_device(loss_and_backward)
        self._forward, self._backward = {}, {}
        for kind in ("embed", "block"):
            function = partial(jax_model.forward, kind, model)
            self._forward[kind] = self._on_every_device(function)
            self._backward[kind] = self._on_every_device(partial(_pull_back, function))

    def _on_every_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """One program: each device calls ``function(whole weights, its rows, ...)`` and gives back
        its block of the results. Nothing is communicated: that is the manager's part.
        """

        def program(weights: Any, *rows: Any) -> Any:
            specs = (WHOLE, *(ROWS for _ in rows))
            return jax.shard_map(
                function, mesh=self._mesh, in_specs=specs, out_specs=ROWS, check_vma=False
            )(weights, *rows)

        return jax.jit(program)

    def place(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Each device's windows on that device."""
        rows = NamedSharding(self._mesh, ROWS)
        inputs, targets = batch.inputs.astype(np.int32), batch.targets.astype(np.int32)
        return jax.device_put(inputs, rows), jax.device_put(targets, rows)

    def forward(self, unit: Unit, weights: Weights, x: jax.Array) -> jax.Array:
        """Compute and keep nothing: what backward needs is computed again.

        The weights are arrays of their own, cut out of the gathered chunk: jax has no views.
        """
        return self._forward[unit.kind](unit.local(weights), x)

    def backward(
        self, unit: Unit, weights: Weights, x: jax.Array, dy: jax.Array
    ) -> tuple[dict[str, Any], jax.Array | None]:
        """Forward again, and back through it."""
        grads, dx = self._backward[unit.kind](unit.local(weights), x, dy)
        return unit.full(self._by_rank(grads)), dx

    def loss(self, unit: Unit, weights: Weights, x: jax.Array, targets: jax.Array) -> jax.Array:
        """One loss a device."""
        return self._loss(unit.local(weights), x, targets)

    def loss_and_backward(
        self, unit: Unit, weights: Weights, x: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, dict[str, Any], jax.Array | None]:
        """One loss a device, and its gradients."""
        losses, grads, dx = self._loss_and_backward(unit.local(weights), x, targets)
        return losses, unit.full(self._by_rank(grads)), dx

    def _by_rank(self, grads: dict[str, jax.Array]) -> dict[str, dict[int, jax.Array]]:
        """Local name -> rank -> that device's own gradient, where it lies."""
        return {
            local: {self._rank_of[block.device]: block.data for block in grad.addressable_shards}
            for local, grad in grads.items()
        }

    def mean(self, losses: Sequence[jax.Array]) -> float:
        """Over all losses of all devices."""
        return float(np.mean([np.asarray(loss) for loss in losses]))

    def update(self, manager: mc.ChunkManager, step: int) -> None:
        """AdamW on flat arrays, split over the devices: it never sees a tensor's shape."""
        settings = self._training
        schedule = (
            np.float32(settings.rate(step)),
            np.float32(1.0 - settings.beta1**step),
            np.float32(1.0 - settings.beta2**step),
        )

        def step_chunk(
            chunk: mc.ChunkUpdate, buffers: dict[str, jax.Array]
        ) -> dict[str, jax.Array]:
            state = {role: buffers[role] for role in ("param", "exp_avg", "exp_avg_sq")}
            return self._adamw(state, buffers["grad"], *schedule)

        manager.update(step_chunk)


def _pull_back(function: Callable[..., Any], weights: Any, x: Any, dy: Any) -> tuple[Any, Any]:
    """Gradients of weights and input; tokens have none."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        _, pull = jax.vjp(lambda weights: function(weights, x), weights)
        return *pull(dy), None
    _, pull = jax.vjp(function, weights, x)
    return pull(dy)


def _adamw_program(settings: Training) -> Callable[..., dict[str, jax.Array]]:
    """AdamW in place: the arrays of ``state`` are donated and must not be used again."""

    @partial(jax.jit, donate_argnums=0)
    def adamw(
        state: dict[str, jax.Array],
        grad: jax.Array,
        rate: jax.Array,
        correction1: jax.Array,
        correction2: jax.Array,
    ) -> dict[str, jax.Array]:
        exp_avg = settings.beta1 * state["exp_avg"] + (1.0 - settings.beta1) * grad
        squared = settings.beta2 * state["exp_avg_sq"] + (1.0 - settings.beta2) * grad * grad
        denominator = jnp.sqrt(squared / correction2) + settings.eps
        decayed = state["param"] * (1.0 - rate * settings.weight_decay)
        param = decayed - rate * (exp_avg / correction1) / denominator
        return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": squared}

    return adamw


def main(training: Training, model: Model, *, events: bool) -> None:
    """Plan, train, evaluate, and report."""
    text = language_reference()
    reporter = Reporter(events=events, steps=training.steps)
    backend = mc.create_backend("jax", mc.DeviceMesh(range(DEVICES)), shard_axis="shard")
    plan = mc.plan_chunks(param_specs(model), shards=DEVICES)
    reporter.planned(forecast(backend, plan, model=model, training=training, text=text))
    with mc.ChunkManager(backend, plan, check=True) as manager:
        compute = JaxCompute(model, training, jax.devices()[:DEVICES])
        outcome = train(
            manager, compute, model=model, training=training, text=text, on_step=reporter.step
        )
        reporter.outcome(outcome)
    backend.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT in chunks over JAX devices.")
    parser.add_argument("--steps", type=int, default=Training.steps)
    parser.add_argument("--events", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    launch.emulate_cpu(DEVICES)  # where there are no accelerators; before jax is first used
    main(Training(steps=arguments.steps), Model(), events=arguments.events)
