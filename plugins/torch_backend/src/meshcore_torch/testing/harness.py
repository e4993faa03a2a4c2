"""The contract's harness for torch: every case runs in all processes of a gloo world."""

from __future__ import annotations

import functools
from collections.abc import Callable

from meshcore import create_backend
from meshcore.backend import Backend, BackendOptions
from meshcore.testing import BackendHarness, Case, MeshCase, run_case
from meshcore_torch.testing.workers import GlooWorkers

_TIMEOUT_SECONDS = 30.0


class TorchHarness(BackendHarness):
    """Ships cases to worker processes; on smaller meshes the other ranks are outside.

    Args:
        workers: processes to use, at least as many as the largest mesh case needs. They stay open
            when the harness closes; without them it starts four of its own.
        poison: whether fresh and freed storage is filled with NaN.
    """

    backend_name = "torch"

    def __init__(self, workers: GlooWorkers | None = None, *, poison: bool = True) -> None:
        super().__init__()
        self.poison = poison
        self.workers = workers or GlooWorkers(4)
        self._owns_workers = workers is None

    def options(self) -> BackendOptions:
        """A short time-out, so that a rank that fails alone does not keep the others long."""
        return BackendOptions(timeout_seconds=_TIMEOUT_SECONDS, device="cpu")

    def run(self, case: Callable[[Backend], None], mesh_case: MeshCase) -> None:
        """Run one case on all ranks; raises what it raised on the first of them that failed."""
        try:
            self.workers.run(_run, case, mesh_case, self.poison, self.options())
        except BaseException:
            # Ranks that failed alone left the others' groups unusable: all start afresh.
            self.workers.run(_forget, mesh_case)
            raise

    def close(self) -> None:
        """Close the backends in the workers, and the workers if they are our own."""
        if self._owns_workers:
            self.workers.close()
        else:
            self.workers.run(_close)


@functools.cache
def _kept() -> dict[MeshCase, Backend]:
    """Backends of this worker process that cases share; making communicators is slow."""
    return {}


def _run(case: Case, mesh_case: MeshCase, poison: bool, options: BackendOptions) -> None:
    def create(mesh_case: MeshCase) -> Backend:
        return create_backend(
            "torch",
            mesh_case.mesh(),
            shard_axis=mesh_case.shard_axis,
            replica_axis=mesh_case.replica_axis,
            options=options,
        )

    run_case(case, mesh_case, create, _kept(), poison=poison)


def _forget(mesh_case: MeshCase) -> None:
    backend = _kept().pop(mesh_case, None)
    if backend is not None:
        backend.close()


def _close() -> None:
    kept = _kept()
    while kept:
        kept.popitem()[1].close()
