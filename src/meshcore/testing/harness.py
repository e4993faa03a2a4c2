"""How the contract reaches a backend: meshes to try, and a place to run a case.

A harness for a backend that holds all ranks in one process needs only its name:

    class FooHarness(BackendHarness):
        backend_name = "foo"

One for a backend with one rank a process overrides ``run`` to ship the case (it pickles by name)
and the mesh case to every process, where ``run_case`` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshcore.backend import Backend, BackendOptions
from meshcore.mesh import DeviceMesh
from meshcore.registry import create_backend
from meshcore.spec import AxisRoles
from meshcore.testing.wrappers import PoisonBackend


@dataclass(frozen=True)
class MeshCase:
    """A mesh and its axis roles as plain data, so that it can be sent to another process."""

    ids: tuple[int, ...]
    shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ("shard",)
    shard_axis: str = "shard"
    replica_axis: str | None = None

    @property
    def world_size(self) -> int:
        """Processes that an SPMD backend needs for it: all ids from 0 to the highest."""
        return max(self.ids) + 1

    def mesh(self) -> DeviceMesh:
        """The mesh."""
        return DeviceMesh(self.ids, self.shape, self.axis_names)

    def roles(self) -> AxisRoles:
        """The mesh with its axis roles."""
        return AxisRoles(self.mesh(), self.shard_axis, self.replica_axis)

    def __str__(self) -> str:
        axes = "-".join(f"{n}{s}" for n, s in zip(self.axis_names, self.shape, strict=True))
        shown = ".".join(map(str, self.ids[:8])) + (".." if len(self.ids) > 8 else "")
        return f"{axes}-ids{shown}"


def line(*ids: int) -> MeshCase:
    """A mesh with a shard axis alone."""
    return MeshCase(ids, (len(ids),))


def grid(ids: Sequence[int], replicas: int, shards: int, *, shard_first: bool = False) -> MeshCase:
    """A mesh with a replica axis and a shard axis, in the order asked for."""
    if shard_first:
        return MeshCase(
            tuple(ids), (shards, replicas), ("shard", "replica"), replica_axis="replica"
        )
    return MeshCase(tuple(ids), (replicas, shards), ("replica", "shard"), replica_axis="replica")


MESH_CASES: tuple[MeshCase, ...] = (
    line(0),
    line(0, 1),
    line(2, 0, 1),
    line(0, 1, 2, 3),
    line(2, 0, 3, 1),
    grid((0,), 1, 1),
    grid((1, 0, 3, 2), 1, 4),
    grid((3, 0, 2, 1), 2, 2),
    grid((2, 0, 1, 3), 2, 2, shard_first=True),
    grid((1, 2, 0), 3, 1),
    grid((0, 2, 1, 3), 4, 1),
)
"""World sizes 1 to 4, both axis orders, ids in and out of order: what a backend should pass."""


class RunnableCase(Protocol):
    """One case of the contract: callable, and picklable by name."""

    @property
    def fresh(self) -> bool:
        """It wants a backend of its own, because it closes it."""
        ...

    @property
    def needs_data(self) -> bool:
        """It looks at values; a case about bytes alone is never poisoned."""
        ...

    def __call__(self, backend: Backend) -> None:
        """Raise if the backend is wrong."""
        ...


class BackendHarness:
    """Makes backends by name in this process, and keeps one open for each mesh case.

    Attributes:
        backend_name: the name that ``meshcore.create_backend`` knows.
        has_data: False runs the cases about bytes and errors alone.
        poison: whether fresh and freed storage is filled with NaN (see ``PoisonBackend``).
    """

    backend_name: str = ""
    has_data: bool = True
    poison: bool = True

    def __init__(self) -> None:
        self._open: dict[MeshCase, Backend] = {}

    def mesh_cases(self) -> Sequence[MeshCase]:
        """Meshes to run every case on."""
        return MESH_CASES

    def options(self) -> BackendOptions:
        """Options for every backend that is made."""
        return BackendOptions()

    def create(self, mesh_case: MeshCase) -> Backend:
        """A new backend, as a user would make it."""
        return create_backend(
            self.backend_name,
            mesh_case.mesh(),
            shard_axis=mesh_case.shard_axis,
            replica_axis=mesh_case.replica_axis,
            options=self.options(),
        )

    def run(self, case: RunnableCase, mesh_case: MeshCase) -> None:
        """Run one case on one mesh; raises what the case raises."""
        run_case(case, mesh_case, self.create, self._open, poison=self.poison)

    def close(self) -> None:
        """Close what is still open; the harness can be used again."""
        while self._open:
            self._open.popitem()[1].close()


def run_case(
    case: RunnableCase,
    mesh_case: MeshCase,
    create: Callable[[MeshCase], Backend],
    kept: dict[MeshCase, Backend],
    *,
    poison: bool = True,
) -> None:
    """Run a case in this process; ``kept`` holds the backends that are shared between cases.

    In an SPMD world every process calls this, those outside the mesh too: making a backend is
    collective. Outside the mesh the case itself is skipped.
    """
    own = case.fresh or mesh_case not in kept
    backend = create(mesh_case) if own else kept[mesh_case]
    if not case.fresh:
        kept[mesh_case] = backend
    try:
        if backend.local_ranks:
            case(PoisonBackend(backend) if poison and case.needs_data else backend)
    finally:
        if case.fresh:
            backend.close()
