"""Sizes, schedule and initial weights: everything that all runs must have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import meshcore as mc


@dataclass(frozen=True, kw_only=True)
class Model:
    """A byte-level GPT: learned positions, pre-norm blocks without biases, an untied head."""

    vocab: int = 256
    context: int = 96
    width: int = 160
    blocks: int = 3
    heads: int = 4


@dataclass(frozen=True, kw_only=True)
class Training:
    """AdamW with linear warm-up and cosine decay; ``batch`` counts windows over all ranks."""

    steps: int = 200
    batch: int = 8
    peak_rate: float = 2e-3
    warmup_steps: int = 20
    last_rate: float = 2e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_norm: float = 1.0
    heldout_batches: int = 60
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of a step; steps count from 1.

        >>> Training(steps=100, warmup_steps=10, peak_rate=1.0, last_rate=0.0).rate(5)
        0.5
        """
        if step <= self.warmup_steps:
            return self.peak_rate * step / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return self.last_rate + (self.peak_rate - self.last_rate) * cosine


@dataclass(frozen=True)
class Unit:
    """What is gathered together: the embedding, one block, or the head.

    Attributes:
        name: also the group of its chunks, so that no chunk serves two units.
        kind: which function computes it: "embed", "block" or "head".
        shapes: local name -> shape; the tensor is called "<unit>.<local name>" everywhere.
    """

    name: str
    kind: str
    shapes: dict[str, tuple[int, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of its tensors."""
        return tuple(f"{self.name}.{local}" for local in self.shapes)

    def local(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of this unit by local name, from values by full name."""
        return {local: values[f"{self.name}.{local}"] for local in self.shapes}

    def full(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The other way round."""
        return {f"{self.name}.{local}": value for local, value in values.items()}


def units(model: Model) -> tuple[Unit, ...]:
    """The units in the order of the forward pass; matrices are (in, out)."""
    d = model.width
    block = {
        "norm1": (d,),
        "qkv": (d, 3 * d),
        "mix": (d, d),
        "norm2": (d,),
        "up": (d, 4 * d),
        "down": (4 * d, d),
    }
    return (
        Unit("embed", "embed", {"token": (model.vocab, d), "position": (model.context, d)}),
        *(Unit(f"block{i}", "block", block) for i in range(model.blocks)),
        Unit("head", "head", {"norm": (d,), "logits": (d, model.vocab)}),
    )


def param_specs(model: Model) -> list[mc.ParamSpec]:
    """Every tensor of the model, for ``plan_chunks``."""
    return [
        mc.ParamSpec(f"{unit.name}.{local}", shape, "float32", group=unit.name)
        for unit in units(model)
        for local, shape in unit.shapes.items()
    ]


def initial_weights(model: Model, seed: int) -> dict[str, np.ndarray]:
    """Full tensor name -> float32 array: ones for norms, else normal with deviation 0.02, smaller
    for the two matrices of a block that add to the residual stream.
    """
    random = np.random.default_rng(seed)
    weights = {}
    for unit in units(model):
        for local, shape in unit.shapes.items():
            if local.startswith("norm"):
                value = np.ones(shape, np.float32)
            else:
                residual = local in ("mix", "down")
                deviation = 0.02 / math.sqrt(2 * model.blocks) if residual else 0.02
                value = deviation * random.standard_normal(shape, dtype=np.float32)
            weights[f"{unit.name}.{local}"] = value.astype(np.float32)
    return weights
