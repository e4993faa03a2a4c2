"""English that every Python has on disk, cut into windows: the same batches for every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """Windows of bytes and, shifted by one, the bytes to predict.

    Attributes:
        inputs: int64 [windows, context].
        targets: int64 [windows, context].
    """

    inputs: np.ndarray
    targets: np.ndarray

    def part(self, index: int, parts: int) -> Batch:
        """The windows of one rank: part ``index`` of ``parts`` equal ones."""
        if len(self.inputs) % parts:
            raise ValueError(f"{len(self.inputs)} windows do not divide over {parts} ranks")
        rows = len(self.inputs) // parts
        own = slice(index * rows, (index + 1) * rows)
        return Batch(self.inputs[own], self.targets[own])


@dataclass(frozen=True)
class Text:
    """Training text and held-out text, uint8; ``heldout`` is the last tenth."""

    train: np.ndarray
    heldout: np.ndarray


def language_reference() -> Text:
    """The topics of Python's own ``help()``, about 0.46 MB, joined in sorted order."""
    from pydoc_data.topics import topics

    data = "\n".join(topics[name] for name in sorted(topics)).encode()
    flat = np.frombuffer(data, np.uint8)
    cut = len(flat) - len(flat) // 10
    return Text(flat[:cut], flat[cut:])


def training_batches(
    train: np.ndarray, *, steps: int, windows: int, context: int, seed: int
) -> Iterator[Batch]:
    """Batches of windows at random places: a pure function of the arguments."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        starts = random.integers(0, len(train) - context, windows)
        yield _cut(train, starts, context)


def heldout_batches(
    heldout: np.ndarray, *, batches: int, windows: int, context: int
) -> Iterator[Batch]:
    """Windows one after the other from the start; at most ``batches`` whole batches."""
    starts = np.arange((len(heldout) - 1) // context) * context
    for index in range(min(batches, len(starts) // windows)):
        yield _cut(heldout, starts[index * windows : (index + 1) * windows], context)


def _cut(flat: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    window = flat[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return Batch(window[:, :-1], window[:, 1:])
