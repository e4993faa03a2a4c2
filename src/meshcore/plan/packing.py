"""Which tensor lies where: next-fit into chunks, for one set of shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TypeAlias

from meshcore.dtypes import itemsize
from meshcore.errors import SpecError
from meshcore.layout import ChunkLayout, ChunkPlan, ParamSpec, Slot
from meshcore.plan.uniform import best_capacity, round_up

DEFAULT_CAPACITY_NUMEL = 16 << 20
"""Where nothing else is said: elements of a variable chunk, and the largest capacity that the
search for uniform ones tries."""

MODES: tuple[str, ...] = ("variable", "uniform")
"""variable: a chunk is as large as what it holds. uniform: all chunks of a kind are equal."""

_Key: TypeAlias = tuple[str, str, bool]  # group, dtype, trainable


def plan_chunks(
    specs: Sequence[ParamSpec],
    *,
    shards: int,
    capacity_numel: int | None = None,
    alignment_nbytes: int = 64,
    mode: str = "variable",
    max_capacity_numel: int | None = None,
) -> ChunkPlan:
    """Lay tensors into chunks, in the given order.

    Next-fit: one chunk is open for each (group, dtype, trainable). A tensor goes behind the last
    one of the open chunk, at the next multiple of the alignment; if it would end beyond the
    capacity, it opens the next chunk, and the chunk before is never opened again. Chunks are
    numbered as they are opened, and padded so that all shards are equal and aligned.

    Args:
        specs: the tensors, best in the order in which they are used; none is a legal plan too.
        shards: ranks along the shard axis.
        capacity_numel: elements of a chunk, gaps between slots included, padding not. In
            "variable" mode the default is ``DEFAULT_CAPACITY_NUMEL``; in "uniform" mode it is the
            exact optimum of each (group, dtype, trainable), see ``best_capacity``.
        alignment_nbytes: where slots and shards start, in bytes; 1 makes no gaps. A dtype whose
            size does not divide it takes the next common multiple.
        mode: one of ``MODES``. In "uniform" mode every chunk has the size of a full one, and only
            a tensor larger than the capacity has a larger one, of its own.
        max_capacity_numel: largest capacity that the search of "uniform" mode tries, in elements;
            the default is twice the largest tensor of the group, dtype and trainability, and
            ``DEFAULT_CAPACITY_NUMEL`` at least. The largest tensor fits in any case.

    Raises:
        SpecError: an argument is out of range; it is named, with what is allowed.
        DuplicateNameError: two tensors have a name or a tie in common.

    >>> plan = plan_chunks([ParamSpec("w", (4, 2)), ParamSpec("b", (3,))], shards=3)
    >>> [(slot.name, slot.start, slot.stop) for slot in plan.chunks[0].slots]
    [('w', 0, 8), ('b', 16, 19)]
    >>> plan.chunks[0].shard_numel, plan.chunks[0].numel, plan.waste_nbytes
    (16, 48, 148)
    """
    shards = _at_least_one("shards", shards)
    alignment = _at_least_one("alignment_nbytes", alignment_nbytes)
    if mode not in MODES:
        raise SpecError(f"mode {mode!r} is not known; it is one of {', '.join(MODES)}")
    specs = _checked_specs(specs)
    fixed = _fixed_capacity(mode, capacity_numel, max_capacity_numel)
    if fixed is None:
        capacities = _best_capacities(specs, shards, alignment, max_capacity_numel)
    else:
        capacities = {_key(spec): fixed for spec in specs}
    chunks = tuple(
        draft.close(number, shards, capacities[draft.key] if mode == "uniform" else 0)
        for number, draft in enumerate(_next_fit(specs, capacities, alignment))
    )
    return ChunkPlan(chunks, shards, alignment, mode)


@dataclass
class _Draft:
    """A chunk that takes tensors."""

    key: _Key
    align_numel: int
    slots: list[Slot] = field(default_factory=list)
    used: int = 0

    def next_start(self) -> int:
        return round_up(self.used, self.align_numel)

    def append(self, spec: ParamSpec) -> None:
        self.slots.append(Slot(spec, self.next_start()))
        self.used = self.slots[-1].stop

    def close(self, number: int, shards: int, at_least: int) -> ChunkLayout:
        """The finished chunk, for ``at_least`` so many elements."""
        per_shard = round_up(-(-max(self.used, at_least) // shards), self.align_numel)
        return ChunkLayout(number, *self.key, tuple(self.slots), shards, per_shard)


def _next_fit(
    specs: Sequence[ParamSpec], capacities: Mapping[_Key, int], alignment_nbytes: int
) -> list[_Draft]:
    drafts: list[_Draft] = []
    open_drafts: dict[_Key, _Draft] = {}
    for spec in specs:
        key = _key(spec)
        draft = open_drafts.get(key)
        if draft is None or draft.next_start() + spec.numel > capacities[key]:
            draft = _Draft(key, _align_numel(spec.dtype, alignment_nbytes))
            drafts.append(draft)
            open_drafts[key] = draft
        draft.append(spec)
    return drafts


def _best_capacities(
    specs: Sequence[ParamSpec], shards: int, alignment_nbytes: int, limit: int | None
) -> dict[_Key, int]:
    numels: dict[_Key, list[int]] = {}
    for spec in specs:
        numels.setdefault(_key(spec), []).append(spec.numel)
    return {
        key: best_capacity(
            sizes,
            align_numel=_align_numel(key[1], alignment_nbytes),
            shards=shards,
            max_capacity_numel=limit or max(DEFAULT_CAPACITY_NUMEL, 2 * max(sizes)),
        )
        for key, sizes in numels.items()
    }


def _key(spec: ParamSpec) -> _Key:
    return spec.group, spec.dtype, spec.trainable


def _align_numel(dtype: str, alignment_nbytes: int) -> int:
    """Elements between two places where a slot may start."""
    return math.lcm(alignment_nbytes, itemsize(dtype)) // itemsize(dtype)


def _checked_specs(specs: Sequence[ParamSpec]) -> tuple[ParamSpec, ...]:
    for spec in specs:
        if not isinstance(spec, ParamSpec):
            raise SpecError(f"a plan is made of ParamSpecs, not of {type(spec).__name__}: {spec!r}")
    return tuple(specs)


def _fixed_capacity(
    mode: str, capacity_numel: int | None, max_capacity_numel: int | None
) -> int | None:
    """The capacity of all chunks, or None where it is to be searched for."""
    if max_capacity_numel is not None:
        _at_least_one("max_capacity_numel", max_capacity_numel)
        if mode != "uniform" or capacity_numel is not None:
            raise SpecError(
                f"max_capacity_numel={max_capacity_numel} bounds the search for a capacity, which "
                "only mode 'uniform' without capacity_numel makes; leave it out"
            )
    if capacity_numel is not None:
        return _at_least_one("capacity_numel", capacity_numel)
    return None if mode == "uniform" else DEFAULT_CAPACITY_NUMEL


def _at_least_one(what: str, value: int) -> int:
    try:
        number = index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise SpecError(f"{what} is an int of 1 or more, not {value!r}")
    return number
