"""What a plan says: tensors, their slots, chunks. Pure data, in elements unless it says bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index

from meshcore.dtypes import is_floating, itemsize
from meshcore.errors import DuplicateNameError, SpecError, UnknownTensorError


@dataclass(frozen=True)
class ParamSpec:
    """One tensor to be kept in chunks.

    Args:
        name: how it is called everywhere.
        shape: its dims; () is a scalar, a dim of 0 makes it empty.
        dtype: name of the dtype in which it is kept.
        trainable: False for a frozen tensor: it never costs gradient or optimizer bytes.
        group: tensors of different groups never share a chunk.
        ties: other names of the same tensor; they have no spec of their own.
    """

    name: str
    shape: Sequence[int]
    dtype: str = "float32"
    trainable: bool = True
    group: str = "param"
    ties: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SpecError(f"a tensor's name is a non-empty string, not {self.name!r}")
        itemsize(self.dtype)
        if isinstance(self.ties, str):
            raise SpecError(f"ties of {self.name!r} is a sequence of names, not the string itself")
        ties = tuple(self.ties)
        if not all(isinstance(tie, str) and tie for tie in ties):
            raise SpecError(f"ties of {self.name!r} are non-empty strings, not {ties}")
        object.__setattr__(self, "shape", self._checked_shape())
        object.__setattr__(self, "ties", ties)

    def _checked_shape(self) -> tuple[int, ...]:
        try:
            shape = tuple(index(dim) for dim in self.shape)
        except TypeError:
            shape = (-1,)
        if any(dim < 0 for dim in shape):
            raise SpecError(
                f"tensor {self.name!r} has the shape {self.shape!r}; a shape is a sequence of ints "
                "that are 0 or more"
            )
        return shape

    @property
    def numel(self) -> int:
        """Number of elements: 1 for a scalar, 0 for an empty tensor."""
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The name and all ties."""
        return (self.name, *self.ties)

    @property
    def takes_grad(self) -> bool:
        """Whether a gradient can be accumulated for it: trainable and floating point."""
        return self.trainable and is_floating(self.dtype)


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements [start, stop) of a chunk, where one tensor lives in C order."""

    spec: ParamSpec
    start: int

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's dims."""
        return tuple(self.spec.shape)

    @property
    def stop(self) -> int:
        """First element behind it."""
        return self.start + self.spec.numel


@dataclass(frozen=True)
class ChunkLayout:
    """One chunk: slots in order, padded so that every shard has ``shard_numel`` elements."""

    index: int
    group: str
    dtype: str
    trainable: bool
    slots: tuple[Slot, ...]
    shards: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Elements of the whole chunk, padding included."""
        return self.shards * self.shard_numel

    @property
    def used(self) -> int:
        """The last slot's stop."""
        return self.slots[-1].stop if self.slots else 0

    @property
    def name(self) -> str:
        """A readable name, unique in the plan."""
        return f"{self.group}.{self.index}"

    @property
    def takes_grad(self) -> bool:
        """Whether its tensors have gradients."""
        return self.trainable and is_floating(self.dtype)

    @property
    def waste_nbytes(self) -> int:
        """Bytes of slot gaps and padding, over all shards of one replica."""
        held = sum(slot.spec.numel for slot in self.slots)
        return (self.numel - held) * itemsize(self.dtype)

    def valid_numel(self, shard_index: int) -> int:
        """Elements of one shard that belong to a tensor: neither gap nor padding."""
        return sum(stop - start for start, stop in self.shard_ranges(shard_index))

    def shard_ranges(
        self, shard_index: int, slots: Iterable[Slot] | None = None
    ) -> tuple[tuple[int, int], ...]:
        """Ranges *within* one shard that belong to the given slots (default: all)."""
        low = shard_index * self.shard_numel
        high = low + self.shard_numel
        out = []
        for slot in self.slots if slots is None else slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                out.append((start - low, stop - low))
        return tuple(out)


@dataclass(frozen=True)
class ChunkPlan:
    """All chunks of a set of tensors; what every rank must agree on before the first byte.

    Iterating gives the chunks. ``find`` maps any name or alias to its chunk and slot.
    """

    chunks: tuple[ChunkLayout, ...]
    shards: int
    alignment_nbytes: int
    mode: str
    _where: Mapping[str, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where: dict[str, tuple[int, int]] = {}
        for chunk in self.chunks:
            for position, slot in enumerate(chunk.slots):
                for name in slot.spec.names:
                    if name in where:
                        raise DuplicateNameError(
                            f"tensor name {name!r} occurs twice in the plan; names and ties "
                            "must be distinct"
                        )
                    where[name] = (chunk.index, position)
        object.__setattr__(self, "_where", where)  # no proxy: plans are pickled

    def __iter__(self) -> Iterator[ChunkLayout]:
        return iter(self.chunks)

    @property
    def specs(self) -> tuple[ParamSpec, ...]:
        """All tensors, chunk by chunk."""
        return tuple(slot.spec for chunk in self.chunks for slot in chunk.slots)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, without ties, chunk by chunk."""
        return tuple(spec.name for spec in self.specs)

    def find(self, name: str) -> tuple[ChunkLayout, Slot]:
        """Chunk and slot of a tensor, by its name or a tie.

        Raises:
            UnknownTensorError: naming it, with close matches.
        """
        try:
            chunk, position = self._where[name]
        except (KeyError, TypeError):
            import difflib

            close = difflib.get_close_matches(str(name), list(self._where), n=3)
            hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
            raise UnknownTensorError(
                f"no tensor named {name!r} in a plan of {len(self._where)} names{hint}"
            ) from None
        return self.chunks[chunk], self.chunks[chunk].slots[position]

    @property
    def param_nbytes(self) -> int:
        """Bytes of all tensors, without gaps and padding."""
        return sum(spec.numel * itemsize(spec.dtype) for spec in self.specs)

    @property
    def waste_nbytes(self) -> int:
        """Bytes of slot gaps and padding over all ranks of one replica."""
        return sum(chunk.waste_nbytes for chunk in self.chunks)

    def digest(self) -> str:
        """Hash of everything in the plan; equal on all ranks, or nothing may run."""
        text = repr((self.chunks, self.shards, self.alignment_nbytes, self.mode))
        return hashlib.sha256(text.encode()).hexdigest()

    def report(self) -> str:
        """The plan as a text table of at most 100 columns."""
        rows = [("chunk", "group", "dtype", "train", "tensors", "elements", "a rank", "waste")]
        for chunk in self.chunks:
            size = itemsize(chunk.dtype)
            rows.append(
                (
                    str(chunk.index),
                    chunk.group[:20],
                    chunk.dtype,
                    "yes" if chunk.trainable else "no",
                    str(len(chunk.slots)),
                    f"{chunk.numel:,}",
                    format_nbytes(chunk.shard_numel * size),
                    format_nbytes(chunk.waste_nbytes),
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        left = {1, 2, 3}
        lines = [
            "  ".join(
                cell.ljust(width) if i in left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        held = self.param_nbytes
        share = 100.0 * self.waste_nbytes / held if held else 0.0
        lines.append(
            f"{len(self.chunks)} chunks ({self.mode}) over {self.shards} shards: "
            f"{format_nbytes(held)} of tensors, {format_nbytes(self.waste_nbytes)} waste "
            f"({share:.2f} %)"
        )
        return "\n".join(lines)


def format_nbytes(nbytes: int) -> str:
    """Bytes for people.

    >>> format_nbytes(12), format_nbytes(4 << 20)
    ('12 B', '4.00 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} TiB"
