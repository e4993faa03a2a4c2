"""The gradients of all trainable chunks: what all ranks agree on, the reduce, the norm."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshcore.backend import Array
from meshcore.errors import (
    BrokenBufferError,
    FrozenTensorError,
    NoGradientError,
    PlanMismatchError,
    SpecError,
    UnusedGradientError,
)
from meshcore.grads import DONE, NOTHING, ChunkGradient
from meshcore.layout import ChunkLayout, Slot
from meshcore.pool import Pool

_FINGERPRINT_NBYTES = 8
_LOST = b"lost gradient: "  # longer than a fingerprint, so never mistaken for one


class GradientSet:
    """Gradients by chunk index, and the verbs that run over many of them."""

    def __init__(self, pool: Pool, gradients: Iterable[ChunkGradient]) -> None:
        self._pool = pool
        self._by_index = {gradient.layout.index: gradient for gradient in gradients}
        self._norm: float | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the trainable chunks."""
        return tuple(self._by_index)

    def __iter__(self) -> Iterator[ChunkGradient]:
        return iter(self._by_index.values())

    def get(self, index: int) -> ChunkGradient | None:
        """The gradient of a chunk, or None if it takes none."""
        return self._by_index.get(index)

    def of(self, layout: ChunkLayout, slot: Slot, name: str) -> ChunkGradient:
        """The gradient of a tensor's chunk.

        Raises:
            FrozenTensorError: the tensor takes none.
        """
        gradient = self._by_index.get(layout.index)
        if gradient is None:
            why = "frozen" if not slot.spec.trainable else f"of dtype {slot.spec.dtype}"
            raise FrozenTensorError(f"tensor {name!r} is {why} and takes no gradient")
        return gradient

    # --- reduce ---------------------------------------------------------------------------

    def reduce(self, indices: Sequence[int], divisor: float, unused: str) -> None:
        """Reduce some chunks; see ``ChunkManager.reduce_grads``."""
        if unused not in ("zero", "error"):
            raise SpecError(f"unused is 'zero' or 'error', not {unused!r}")
        if not math.isfinite(divisor) or divisor == 0.0:
            raise SpecError(f"the divisor is a finite number other than 0, not {divisor}")
        words = self._exchange_words(indices, f"{list(indices)} {divisor!r} {unused}")
        if unused == "error":
            self._require_used(indices, words)
        self._norm = None
        for position, index in enumerate(indices):
            rows = {rank: row[position] for rank, row in words.items()}
            gradient = self._by_index[index]
            used = gradient.used_by(rows)
            if used:
                all_have = all(DONE in row for row in rows.values())
                gradient.reduce(divisor, used, all_have=all_have)
            else:
                gradient.forget_words()

    def _exchange_words(self, indices: Sequence[int], call: str) -> dict[int, list[bytes]]:
        """What every rank says of every name, by rank and chunk; and that all make this call."""
        fingerprint = hashlib.sha256(call.encode()).digest()[:_FINGERPRINT_NBYTES]
        losses = [loss for i in indices if (loss := self._by_index[i].loss) is not None]
        answers = self._pool.exchange(
            {
                rank: _LOST + losses[0].encode()
                if losses
                else fingerprint + b"".join(self._by_index[i].words(rank) for i in indices)
                for rank in self._pool.backend.local_ranks
            }
        )
        lost = {r: text[len(_LOST) :] for r, text in answers.items() if text.startswith(_LOST)}
        if lost:
            rank, text = next(iter(lost.items()))
            raise BrokenBufferError(
                f"a gradient is lost on rank(s) {sorted(lost)}; rank {rank} says: {text.decode()}; "
                "call zero_grads on all ranks and repeat the step"
            )
        odd = sorted(r for r, text in answers.items() if not text.startswith(fingerprint))
        if odd:
            raise PlanMismatchError(
                f"rank(s) {odd} call reduce_grads with other chunks, divisor or unused than this "
                f"rank ({call}); all ranks must make the same call"
            )
        return {rank: self._split(indices, text) for rank, text in answers.items()}

    def _split(self, indices: Sequence[int], text: bytes) -> list[bytes]:
        start, rows = _FINGERPRINT_NBYTES, []
        for index in indices:
            stop = start + len(self._by_index[index].names)
            rows.append(text[start:stop])
            start = stop
        return rows

    def _require_used(self, indices: Sequence[int], words: Mapping[int, list[bytes]]) -> None:
        missing: dict[str, list[int]] = {}
        for position, index in enumerate(indices):
            for at, name in enumerate(self._by_index[index].names):
                ranks = [r for r, rows in sorted(words.items()) if rows[position][at] == NOTHING]
                if ranks:
                    missing[name] = ranks
        if missing:
            listed = "; ".join(f"{name!r} on rank(s) {ranks}" for name, ranks in missing.items())
            raise UnusedGradientError(
                f"no gradient and not marked unused: {listed}; call accumulate_grad or "
                "mark_unused, or reduce with unused='zero'"
            )

    # --- reduced values -------------------------------------------------------------------

    def read(self, wanted: Mapping[str, tuple[ChunkGradient, Slot]]) -> dict[str, Array | None]:
        """Full gradients by name, with one gather a chunk; None for what no rank used.

        Raises:
            NoGradientError: a gradient is accumulated here and not reduced.
        """
        out: dict[str, Array | None] = dict.fromkeys(wanted)
        by_chunk: dict[int, list[str]] = {}
        for name, (gradient, slot) in wanted.items():
            if slot.name in gradient.used:
                by_chunk.setdefault(gradient.layout.index, []).append(name)
            elif gradient.is_accumulating:
                raise NoGradientError(
                    f"the gradient of {name!r} is accumulated and not reduced; call reduce_grads"
                )
        for index, names in by_chunk.items():
            arrays = self._by_index[index].read([wanted[name][1] for name in names])
            out.update(zip(names, arrays, strict=True))
        return out

    def norm(self) -> float:
        """The 2-norm over all reduced gradients; cached until ``touch``."""
        if self._norm is None:
            shares = [gradient.square_sum() for gradient in self if gradient.used]
            parts = [share for share in shares if share is not None]
            self._norm = math.sqrt(self._pool.total(parts)) if parts else 0.0
        return self._norm

    def touch(self) -> None:
        """The gradients may have changed from outside."""
        self._norm = None

    def scale(self, factor: float) -> None:
        """Multiply all reduced gradients."""
        self._norm = None
        for gradient in self:
            gradient.scale(factor)

    def zero(self) -> None:
        """Free all gradients."""
        self._norm = None
        for gradient in self:
            gradient.zero()
