"""The GPT in PyTorch: one function a kind of unit, from weights by local name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812

from gpt.settings import Model

Weights = Mapping[str, torch.Tensor]


def forward(kind: str, model: Model, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Compute one unit: "embed" tokens [B, T] -> [B, T, D], "block" [B, T, D] -> the same, "head"
    [B, T, D] -> logits [B, T, V].
    """
    if kind == "embed":
        return weights["token"][x] + weights["position"][: x.shape[1]]
    if kind == "block":
        x = x + _attention(model, weights, _norm(x, weights["norm1"]))
        hidden = F.gelu(_norm(x, weights["norm2"]) @ weights["up"], approximate="tanh")
        return x + hidden @ weights["down"]
    return _norm(x, weights["norm"]) @ weights["logits"]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, eps=1e-5)


def _attention(model: Model, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    batch, length, width = x.shape
    parts = (x @ weights["qkv"]).view(batch, length, 3, model.heads, width // model.heads)
    query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [B, heads, T, D / heads]
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, length, width) @ weights["mix"]
