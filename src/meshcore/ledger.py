"""Memory is counted once: use *is* the sum over live buffers, of one rank (all ranks are equal)."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from meshcore.errors import AuditError, LedgerError
from meshcore.layout import format_nbytes
from meshcore.spec import Memory


class Category(enum.StrEnum):
    """What a buffer is for."""

    PARAM = "param"
    GRAD = "grad"
    OPTIMIZER = "optimizer"
    STAGING = "staging"
    EXTERNAL = "external"


Table = dict[str, dict[str, int]]
"""Memory kind -> category -> bytes of one rank."""


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one rank: memory kind ("device", "host") -> category -> int; all keys are there.

    Attributes:
        used: live buffers.
        reserved: freed storage that is kept for reuse; not part of ``used``.
        peak: highest ``used`` so far, per category and of all together ("total"). The categories
            have their peaks at different moments, so they may add up to more than the total.
    """

    used: Mapping[str, Mapping[str, int]]
    reserved: Mapping[str, Mapping[str, int]]
    peak: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        lines = [f"{'memory':8}{'category':12}{'used':>14}{'reserved':>14}{'peak':>14}"]
        for memory, row in self.used.items():
            for category, used in row.items():
                reserved, peak = self.reserved[memory][category], self.peak[memory][category]
                if used or reserved or peak:
                    cells = "".join(f"{format_nbytes(n):>14}" for n in (used, reserved, peak))
                    lines.append(f"{memory:8}{category:12}{cells}")
            cells = "".join(
                f"{format_nbytes(n):>14}"
                for n in (
                    sum(row.values()),
                    sum(self.reserved[memory].values()),
                    self.peak[memory]["total"],
                )
            )
            lines.append(f"{memory:8}{'total':12}{cells}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the ledger knows of one live buffer."""

    name: str
    category: Category
    memory: Memory
    nbytes: int


class Ledger:
    """The set of live buffers, and of reserved shells; nothing else holds a byte count.

    Only the pool opens and closes buffers. Running totals are a cache that ``check`` verifies.
    """

    def __init__(self) -> None:
        self._live: dict[int, Entry] = {}
        self._reserved: dict[int, Entry] = {}
        self._next_external = -1
        self._used = empty_table()
        self._peak = empty_table()
        self._peak_total = {memory.value: 0 for memory in Memory}
        self._reserved_nbytes = dict.fromkeys(Memory, 0)

    def open(self, key: int, entry: Entry) -> None:
        """A buffer came to life; peaks are taken here."""
        self._add(self._live, key, entry)
        memory, category = entry.memory.value, entry.category.value
        row, peak = self._used[memory], self._peak[memory]
        row[category] += entry.nbytes
        if row[category] > peak[category]:
            peak[category] = row[category]
        total = sum(row.values())
        if total > self._peak_total[memory]:
            self._peak_total[memory] = total

    def close(self, key: int) -> None:
        """A buffer is gone."""
        entry = self._remove(self._live, key)
        self._used[entry.memory.value][entry.category.value] -= entry.nbytes

    def reserve(self, key: int, entry: Entry) -> None:
        """A freed buffer left a shell behind."""
        self._add(self._reserved, key, entry)
        self._reserved_nbytes[entry.memory] += entry.nbytes

    def unreserve(self, key: int) -> None:
        """A shell was reused or dropped."""
        entry = self._remove(self._reserved, key)
        self._reserved_nbytes[entry.memory] -= entry.nbytes

    @contextmanager
    def external(self, name: str, nbytes: int, memory: Memory = Memory.DEVICE) -> Iterator[None]:
        """Count memory that is not ours (activations, a CUDA context) while the scope is open."""
        if nbytes < 0:
            raise LedgerError(f"external memory {name!r} has 0 or more bytes, not {nbytes}")
        key, self._next_external = self._next_external, self._next_external - 1
        self.open(key, Entry(name, Category.EXTERNAL, memory, nbytes))
        try:
            yield
        finally:
            self.close(key)

    def live(self) -> Mapping[int, Entry]:
        """All live buffers by key; a copy."""
        return dict(self._live)

    def used_nbytes(self, memory: Memory) -> int:
        """Bytes of one rank in live buffers of one memory."""
        return sum(self._used[memory.value].values())

    def reserved_nbytes(self, memory: Memory) -> int:
        """Bytes of one rank in shells of one memory."""
        return self._reserved_nbytes[memory]

    def report(self) -> MemoryReport:
        """A snapshot."""
        peak = {
            memory: {**row, "total": self._peak_total[memory]} for memory, row in self._peak.items()
        }
        used = {memory: dict(row) for memory, row in self._used.items()}
        return MemoryReport(used, tabulate(self._reserved.values()), peak)

    def reset_peak(self) -> None:
        """Start the peaks afresh from what is live now."""
        self._peak = {memory: dict(row) for memory, row in self._used.items()}
        self._peak_total = {memory: sum(row.values()) for memory, row in self._used.items()}

    def check(self) -> None:
        """Compare the cached totals with the live set.

        Raises:
            AuditError: they differ.
        """
        truth = tabulate(self._live.values())
        if truth != self._used:
            raise AuditError(f"ledger totals {self._used} differ from the live set {truth}")
        shells = tabulate(self._reserved.values())
        for memory, nbytes in self._reserved_nbytes.items():
            if sum(shells[memory.value].values()) != nbytes:
                raise AuditError(f"{nbytes} reserved bytes in {memory.value} differ from {shells}")

    @staticmethod
    def _add(table: dict[int, Entry], key: int, entry: Entry) -> None:
        if key in table:
            raise LedgerError(f"buffer {entry.name!r} (key {key}) is open already")
        table[key] = entry

    @staticmethod
    def _remove(table: dict[int, Entry], key: int) -> Entry:
        try:
            return table.pop(key)
        except KeyError:
            raise LedgerError(f"buffer with key {key} is not open") from None


def empty_table() -> Table:
    """All memory kinds and categories, at 0 bytes."""
    return {memory.value: {category.value: 0 for category in Category} for memory in Memory}


def tabulate(entries: Iterable[Entry]) -> Table:
    """Sum entries by memory kind and category."""
    table = empty_table()
    for entry in entries:
        table[entry.memory.value][entry.category.value] += entry.nbytes
    return table
