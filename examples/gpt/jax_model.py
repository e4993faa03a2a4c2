"""The GPT in JAX: one function a kind of unit, from weights by local name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from gpt.settings import Model

Weights = Mapping[str, jax.Array]


def forward(kind: str, model: Model, weights: Weights, x: jax.Array) -> jax.Array:
    """Compute one unit: "embed" tokens [B, T] -> [B, T, D], "block" [B, T, D] -> the same, "head"
    [B, T, D] -> logits [B, T, V].
    """
    if kind == "embed":
        return weights["token"][x] + weights["position"][: x.shape[1]]
    if kind == "block":
        x = x + _attention(model, weights, _norm(x, weights["norm1"]))
        hidden = jax.nn.gelu(_norm(x, weights["norm2"]) @ weights["up"], approximate=True)
        return x + hidden @ weights["down"]
    return _norm(x, weights["norm"]) @ weights["logits"]


def loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats."""
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, targets[..., None], axis=-1).mean()


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weight


def _attention(model: Model, weights: Weights, x: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    parts = (x @ weights["qkv"]).reshape(batch, length, 3, model.heads, width // model.heads)
    query, key, value = parts.transpose(2, 0, 3, 1, 4)  # each [B, heads, T, D / heads]
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(width // model.heads)
    causal = jnp.tril(jnp.ones((length, length), bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ value
    return mixed.transpose(0, 2, 1, 3).reshape(batch, length, width) @ weights["mix"]
