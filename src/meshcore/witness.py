"""The second witness: the backend's own measure of memory, to check the ledger with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshcore.backend import Array, Backend, SupportsLiveBytes
from meshcore.buffers import Buffer, Shell
from meshcore.errors import AuditError
from meshcore.ledger import Ledger, Table, empty_table
from meshcore.spec import BufferSpec, Memory


class Witness:
    """Measures what is alive and remembers the peaks that it saw.

    ``exclusive``: nobody else uses the backend, so nothing else may be alive in it.
    """

    def __init__(self, backend: Backend, ledger: Ledger, *, exclusive: bool) -> None:
        self._exclusive = exclusive
        self._backend = backend
        self._ledger = ledger
        self._peak: Table = empty_table()
        self._peak_total = {memory.value: 0 for memory in Memory}

    def audit(self, buffers: Mapping[int, Buffer], shells: Iterable[Shell]) -> Table:
        """Compare ledger and backend; returns measured bytes, memory kind -> category.

        Raises:
            AuditError: naming the buffer and both figures.
        """
        self._ledger.check()
        if set(buffers) != {key for key in self._ledger.live() if key >= 0}:
            raise AuditError("the ledger's live buffers are not the pool's")
        measured = empty_table()
        for buffer in buffers.values():
            nbytes = self._measure(buffer.name, buffer.spec, buffer.array)
            measured[buffer.spec.memory.value][buffer.category.value] += nbytes
        reserved = dict.fromkeys(Memory, 0)
        for shell in shells:
            nbytes = self._measure(f"shell of {shell.entry.name}", shell.spec, shell.array)
            reserved[shell.spec.memory] += nbytes
        self._audit_alive(measured, reserved)
        self._remember(measured)
        return measured

    def peak(self) -> Table:
        """Highest bytes measured so far, with "total"; complete only if every open is audited."""
        return {
            memory: {**row, "total": self._peak_total[memory]} for memory, row in self._peak.items()
        }

    def _remember(self, measured: Table) -> None:
        for memory, row in measured.items():
            self._peak_total[memory] = max(self._peak_total[memory], sum(row.values()))
            for category, nbytes in row.items():
                self._peak[memory][category] = max(self._peak[memory][category], nbytes)

    def _measure(self, name: str, spec: BufferSpec, array: Array) -> int:
        """Bytes on the lowest local rank, after all local ranks were compared with the spec."""
        backend = self._backend
        want = spec.local_nbytes(backend.roles.shards)
        measured = backend.nbytes(array)
        for rank in backend.local_ranks:
            if measured.get(rank, 0) != want:
                raise AuditError(
                    f"{name} ({spec}) takes {measured.get(rank, 0)} bytes on rank {rank}; the "
                    f"ledger says {want}"
                )
        return measured.get(min(backend.local_ranks), 0)

    def _audit_alive(self, measured: Table, reserved: Mapping[Memory, int]) -> None:
        """Where the backend can say what is alive at all, a leak shows."""
        if not (self._exclusive and isinstance(self._backend, SupportsLiveBytes)):
            return
        for rank, row in self._backend.live_nbytes().items():
            for memory, alive in row.items():
                known = sum(measured[memory.value].values()) + reserved[memory]
                if alive != known:
                    raise AuditError(
                        f"{alive} bytes are alive in {memory.value} memory on rank {rank}; the "
                        f"ledger knows {known}"
                    )
