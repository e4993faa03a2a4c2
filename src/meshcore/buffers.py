"""Buffers, and the shells that freed ones leave behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshcore.backend import Array, Backend
from meshcore.ledger import Category, Entry, Ledger
from meshcore.spec import BufferSpec, Memory, Placement

SHELL_BUDGET_BUFFERS = 4
"""Shells are kept up to this many times the largest buffer that was freed (see ShellStore)."""


@dataclass(eq=False, slots=True)
class Buffer:
    """One live buffer of one rank: where its array is rebound, and what it is for.

    Attributes:
        version: grows with every change of the content; a copy is valid while versions agree.
        broken: why the content is lost, or None.
        flights: moves that it takes part in and that may not be complete.
    """

    key: int
    name: str
    spec: BufferSpec
    category: Category
    array: Array
    version: int = 0
    broken: str | None = None
    live: bool = True
    flights: list[Flight] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Flight:
    """A move that may not be complete: its buffers stay as they are until it is waited for."""

    src: Buffer
    dst: Buffer
    scratch: list[Buffer]


@dataclass(eq=False, slots=True)
class Shell:
    """Storage of a freed buffer, to be used again for the same spec."""

    key: int
    spec: BufferSpec
    array: Array
    entry: Entry


class ShellStore:
    """Shells by spec, counted as reserved.

    [Note: equal shells] Which moves need fresh memory, and so an agreement, must be equal on all
    ranks: what is kept depends on specs and calls alone. Addends (PARTIAL) are opened by each rank
    for itself, when it has a gradient, so they have a budget of their own and never push out a
    shell of the others.
    """

    def __init__(self, backend: Backend, ledger: Ledger) -> None:
        self._backend = backend
        self._ledger = ledger
        self._by_spec: dict[BufferSpec, list[Shell]] = {}
        self._largest_freed: dict[tuple[Memory, bool], int] = {}

    def __iter__(self) -> Iterator[Shell]:
        for rows in self._by_spec.values():
            yield from rows

    def count(self, spec: BufferSpec) -> int:
        """How many shells there are for a spec."""
        return len(self._by_spec.get(spec, ()))

    def take(self, spec: BufferSpec) -> Shell | None:
        """A shell to reuse, the last one freed; it is not reserved any more."""
        shells = self._by_spec.get(spec)
        if not shells:
            return None
        shell = shells.pop()
        self._ledger.unreserve(shell.key)
        return shell

    def put_back(self, shell: Shell) -> None:
        """Undo ``take``."""
        self._by_spec.setdefault(shell.spec, []).append(shell)
        self._ledger.reserve(shell.key, shell.entry)

    def keep(self, buffer: Buffer, array: Array, nbytes: int) -> None:
        """Keep what a freed buffer left; the oldest ones go beyond the budget."""
        kind = _budget_of(buffer.spec)
        largest = max(self._largest_freed.get(kind, 0), nbytes)
        self._largest_freed[kind] = largest
        entry = Entry(buffer.name, buffer.category, buffer.spec.memory, nbytes)
        self.put_back(Shell(buffer.key, buffer.spec, array, entry))
        shells = sorted(
            (shell for shell in self if _budget_of(shell.spec) == kind), key=lambda shell: shell.key
        )
        held = sum(shell.entry.nbytes for shell in shells)
        for shell in shells:
            if held <= SHELL_BUDGET_BUFFERS * largest:
                break
            self._drop(shell)
            held -= shell.entry.nbytes

    def shrink(self, memory: Memory, keep_nbytes: int = 0) -> None:
        """Drop the oldest shells of a memory until at most ``keep_nbytes`` are left."""
        if self._ledger.reserved_nbytes(memory) <= keep_nbytes:
            return
        shells = [shell for shell in self if shell.spec.memory is memory]
        for shell in sorted(shells, key=lambda shell: shell.key):
            if self._ledger.reserved_nbytes(memory) <= keep_nbytes:
                return
            self._drop(shell)

    def drop_specs(self, specs: Sequence[BufferSpec]) -> None:
        """Drop all shells of these specs."""
        for spec in specs:
            for shell in list(self._by_spec.get(spec, ())):
                self._drop(shell)

    def drop_all(self) -> None:
        """Drop everything."""
        for memory in Memory:
            self.shrink(memory)

    def _drop(self, shell: Shell) -> None:
        gone = False
        try:
            self._backend.drop(shell.array)
            gone = True
        finally:
            # A drop that failed after its effect has dropped: the backend's own measure decides.
            if gone or not any(self._backend.nbytes(shell.array).values()):
                self._by_spec[shell.spec].remove(shell)
                self._ledger.unreserve(shell.key)


def _budget_of(spec: BufferSpec) -> tuple[Memory, bool]:
    """See [Note: equal shells]."""
    return spec.memory, spec.placement is Placement.PARTIAL
