"""Cases about a backend's own life: what it says of itself, and closing."""

from __future__ import annotations

from meshcore.backend import Backend
from meshcore.errors import ClosedError
from meshcore.testing.contract.model import Case, numel_of, require, sharded


def ranks_are_mesh_ids(backend: Backend) -> None:
    """``local_ranks`` are ids of the mesh, in mesh order; mesh and roles agree."""
    local = backend.local_ranks
    require(len(local) > 0, "a process inside the mesh holds a rank")
    in_order = tuple(rank for rank in backend.mesh.ids if rank in local)
    require(local == in_order, f"local ranks {local} are not in mesh order {in_order}")
    require(backend.roles.mesh == backend.mesh, "roles and backend have different meshes")
    require(bool(backend.name), "a backend has a name")


def groups_are_made_for_axes_alone(backend: Backend) -> None:
    """One rank makes no communicator; more ranks make one at least for what they share."""
    count = backend.group_count
    if backend.mesh.size == 1:
        require(count == 0, f"a mesh of one rank has {count} groups")
    else:
        require(count > 0, f"a mesh of {backend.mesh.size} ranks has {count} groups")


def close_is_final_and_idempotent(backend: Backend) -> None:
    """Closing destroys the groups, once; later traffic is refused with ``ClosedError``."""
    array = backend.zeros(sharded(numel_of(backend)))
    backend.close()
    require(backend.group_count == 0, f"{backend.group_count} groups are left after close")
    backend.close()
    require(backend.group_count == 0, "closing twice brought groups back")
    try:
        backend.exchange(b"after close")
    except ClosedError:
        pass
    else:
        raise AssertionError("exchange works on a closed backend")
    shell = backend.free(array)  # memory can still be given up
    if shell is not None:
        backend.drop(shell)


CASES = (
    Case(ranks_are_mesh_ids, needs_data=False),
    Case(groups_are_made_for_axes_alone, needs_data=False),
    Case(close_is_final_and_idempotent, needs_data=False, fresh=True),
)
