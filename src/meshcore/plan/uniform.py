"""The chunk size that wastes least where all chunks must be equal: exact, over all integers.

[Note: optimum of equal chunks] Next-fit cuts the sequence of tensors into consecutive chunks. A
part of a chunk that fits, fits as well; so next-fit makes the fewest chunks that any cut can make,
and their number never rises with the capacity. Hence only one capacity matters for each number of
chunks: the least that makes this number do. And if a capacity that is small enough for k chunks to
beat the best so far needs m > k chunks, then k, k + 1, ..., m - 1 chunks cannot beat it either:
they would have to do so with a capacity that is smaller still, and that needs m or more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from meshcore.errors import SpecError


def best_capacity(
    numels: Sequence[int], *, align_numel: int = 1, shards: int = 1, max_capacity_numel: int
) -> int:
    """The capacity at which equal chunks hold these tensors, in this order, with the least waste.

    Every capacity from the largest tensor up to ``max_capacity_numel`` (or the largest tensor, if
    that is more) is a candidate. A chunk of capacity c takes c elements, rounded up to a multiple
    of ``shards * align_numel``. Of capacities with equal waste the smallest wins. Without tensors,
    or with empty ones only, it is 0.

    Args:
        numels: elements of each tensor.
        align_numel: slots start at multiples of this many elements.
        shards: number of equal shards of a chunk.
        max_capacity_numel: largest candidate, in elements.

    Raises:
        SpecError: a number is out of range.

    >>> best_capacity([4, 3, 2, 5, 1], max_capacity_numel=100)  # one chunk, nothing wasted
    15
    >>> best_capacity([4, 3, 2, 5, 1], max_capacity_numel=10)  # [4 3] [2 5 1]
    8
    """
    if align_numel < 1 or shards < 1 or min(numels, default=0) < 0:
        raise SpecError(
            "align_numel and shards are 1 or more and numels 0 or more, "
            f"not {align_numel}, {shards} and {min(numels, default=0)}"
        )
    if not numels:
        return 0
    line = _Line(numels, align_numel)
    unit = shards * align_numel
    least = max(numels)
    largest = max(max_capacity_numel, least)
    chunks = line.count(largest)
    most_chunks = line.count(least)
    best = line.least_capacity(chunks, least, largest)
    taken = chunks * round_up(best, unit)
    # See [Note: optimum of equal chunks]. Equal waste counts as better: the capacities fall.
    while (chunks := chunks + 1) <= most_chunks:
        affordable = min(taken // chunks // unit * unit, largest)
        if affordable < least:
            break
        needed = line.count(affordable)
        if needed > chunks:
            chunks = needed - 1
            continue
        best = line.least_capacity(chunks, least, affordable)
        taken = chunks * round_up(best, unit)
    return best


class _Line:
    """Tensors laid end to end in one endless chunk; a chunk that starts at tensor i is a window."""

    def __init__(self, numels: Sequence[int], align_numel: int) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._numel = sum(numels)
        stop = 0
        for numel in numels:
            start = round_up(stop, align_numel)
            stop = start + numel
            self._starts.append(start)
            self._stops.append(stop)

    def count(self, capacity: int) -> int:
        """Chunks that next-fit makes; no tensor may be larger than the capacity."""
        starts, stops = self._starts, self._stops
        first = chunks = 0
        while first < len(stops):
            first = bisect_right(stops, starts[first] + capacity, first)
            chunks += 1
        return chunks

    def least_capacity(self, chunks: int, low: int, high: int) -> int:
        """The least capacity in [low, high] that makes ``chunks`` do; the highest does."""
        low = max(low, -(-self._numel // chunks))
        while low < high:
            middle = (low + high) // 2
            if self.count(middle) <= chunks:
                high = middle
            else:
                low = middle + 1
        return high


def round_up(value: int, multiple: int) -> int:
    """The next multiple of ``multiple``, in integers."""
    return -(-value // multiple) * multiple
