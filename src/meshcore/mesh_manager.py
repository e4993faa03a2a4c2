"""Named meshes and the backends that are bound to them: made once, shared, destroyed once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from meshcore.backend import Backend, BackendOptions
from meshcore.errors import BackendError, MeshError, MeshNameError
from meshcore.links import Link
from meshcore.mesh import DeviceMesh
from meshcore.registry import Registry, default_registry, default_shard_axis
from meshcore.spec import AxisRoles

_T = TypeVar("_T")

_AXIS_NAMES: Mapping[int, tuple[str, ...]] = {1: ("shard",), 2: ("replica", "shard")}


@dataclass(frozen=True)
class DeviceMeshInfo:
    """Describes a mesh that is to be made; checked as a whole when it is made.

    Args:
        physical_ids: distinct ids of the devices, in row-major order of the mesh.
        mesh_shape: devices along each axis. None asks for a shape chosen from measured links, and
            ``DeviceMeshManager.create_device_mesh`` says that this is not available yet.
        axis_names: one name an axis; the default is ("shard",), ("replica", "shard") in two
            dimensions, and ("axis0", "axis1", ...) in more.

    Raises:
        MeshError: naming the bad value and what is allowed.

    >>> DeviceMeshInfo([0, 1, 2, 3], mesh_shape=(2, 2)).axis_names
    ('replica', 'shard')
    """

    physical_ids: Sequence[int]  # a tuple after construction
    mesh_shape: Sequence[int] | None = None
    axis_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        ids = _as_tuple(self.physical_ids, "physical_ids")
        set_once = object.__setattr__
        if self.mesh_shape is None:
            set_once(self, "physical_ids", DeviceMesh(ids).ids)
            if self.axis_names is not None:
                names = _as_tuple(self.axis_names, "axis_names")
                # A mesh of one device with as many axes checks the names by themselves.
                set_once(self, "axis_names", DeviceMesh([0], [1] * len(names), names).axis_names)
            return
        shape = _as_tuple(self.mesh_shape, "mesh_shape")
        names = (
            _AXIS_NAMES.get(len(shape), tuple(f"axis{i}" for i in range(len(shape))))
            if self.axis_names is None
            else _as_tuple(self.axis_names, "axis_names")
        )
        mesh = DeviceMesh(ids, shape, names)
        set_once(self, "physical_ids", mesh.ids)
        set_once(self, "mesh_shape", mesh.shape)
        set_once(self, "axis_names", mesh.axis_names)


class DeviceMeshManager:
    """Keeps meshes by name, and at most one backend for each mesh and pair of axis roles.

    A backend makes communicators; equal meshes with equal roles share one, whatever their names,
    and it is closed when the last of these names is destroyed. Communicators of the caller are
    never touched. Every process of a distributed world makes the same calls in the same order.

    Args:
        backend: name of the backend that is bound to the meshes; None is for planning, where there
            are meshes only.
        options: what every one of these backends is made with.
        registry: where backends are looked up; the default is the process's own.

    >>> with DeviceMeshManager() as meshes:
    ...     mesh = meshes.create_device_mesh("data", DeviceMeshInfo([0, 1, 2, 3], (2, 2)))
    ...     meshes.get("data").shape
    (2, 2)
    """

    def __init__(
        self,
        backend: str | None = None,
        *,
        options: BackendOptions | None = None,
        registry: Registry | None = None,
    ) -> None:
        self._backend_name = backend
        self._options = options
        self._registry = registry
        self._meshes: dict[str, DeviceMesh] = {}
        self._backends: dict[AxisRoles, Backend] = {}
        self._users: dict[AxisRoles, set[str]] = {}  # names that asked for the backend

    @property
    def names(self) -> tuple[str, ...]:
        """Names that are taken, oldest first."""
        return tuple(self._meshes)

    @property
    def group_count(self) -> int:
        """Communicators that are alive in the backends made here."""
        return sum(backend.group_count for backend in self._backends.values())

    def create_device_mesh(
        self, name: str, info: DeviceMeshInfo, *, links: Mapping[str, Link] | None = None
    ) -> DeviceMesh:
        """Make a mesh and keep it under a name; makes no communicator yet.

        Args:
            name: a non-empty name that is not taken.
            info: devices, shape and axis names.
            links: what is known of the link along an axis, by axis name.

        Raises:
            MeshNameError: the name is taken, or is none.
            MeshError: the mesh cannot be, or has no shape; the name stays free.
        """
        if not isinstance(name, str) or not name:
            raise MeshNameError(f"a mesh name is a non-empty string, not {name!r}")
        if name in self._meshes:
            raise MeshNameError(
                f"mesh name {name!r} is taken by {self._meshes[name]!r}; destroy that mesh first, "
                "or choose another name"
            )
        if info.mesh_shape is None:
            raise MeshError(
                f"mesh {name!r} has no mesh_shape; choosing a shape from measured links is not "
                f"available yet, so give one whose product is {len(info.physical_ids)}"
            )
        mesh = DeviceMesh(info.physical_ids, info.mesh_shape, info.axis_names, links=links)
        self._meshes[name] = mesh
        return mesh

    def get(self, name: str) -> DeviceMesh:
        """The mesh of this name.

        Raises:
            MeshNameError: there is none.
        """
        try:
            return self._meshes[name]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, self._meshes)) or "none"
            raise MeshNameError(
                f"no mesh is called {name!r}; there are: {known}; make it with create_device_mesh"
            ) from None

    def backend(
        self,
        name: str,
        *,
        shard_axis: str | int | None = None,
        replica_axis: str | int | None = None,
    ) -> Backend:
        """The backend bound to a mesh in these roles: made at the first call, shared after it.

        It belongs to this manager: destroy the mesh to close it. The default of ``shard_axis`` is
        that of ``create_backend``.

        Raises:
            MeshNameError: no mesh has this name.
            MeshError: the axes do not fit, or this manager was made without a backend.
            MeshcoreError: what ``create_backend`` raises; nothing is kept then.
        """
        mesh = self.get(name)
        if self._backend_name is None:
            raise MeshError(
                f"no backend can be bound to mesh {name!r}: this manager was made for planning; "
                "make it with the name of a backend, as in DeviceMeshManager('numpy')"
            )
        if shard_axis is None:
            shard_axis = default_shard_axis(mesh, replica_axis)
        roles = AxisRoles(mesh, shard_axis, replica_axis)
        if roles not in self._backends:
            registry = self._registry or default_registry()
            self._backends[roles] = registry.create(
                self._backend_name,
                mesh,
                shard_axis=shard_axis,
                replica_axis=replica_axis,
                options=self._options,
            )
            self._users[roles] = set()
        self._users[roles].add(name)
        return self._backends[roles]

    def destroy(self, name: str) -> None:
        """Forget a mesh and close the backends that only it used; the name is free again.

        Raises:
            MeshNameError: there is no mesh of this name.
            BackendError: a backend did not close; the mesh is gone all the same, and the others
                are closed.
        """
        self.get(name)
        self._destroy([name])

    def destroy_all(self) -> None:
        """Forget every mesh and close every backend made here; nothing to do is fine.

        Raises:
            BackendError: a backend did not close; all are gone all the same.
        """
        self._destroy(list(self._meshes))

    def __enter__(self) -> DeviceMeshManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy_all()

    def __repr__(self) -> str:
        meshes = ", ".join(f"{name!r}: {mesh!r}" for name, mesh in self._meshes.items())
        return f"DeviceMeshManager(backend={self._backend_name!r}, {{{meshes}}})"

    def _destroy(self, names: Iterable[str]) -> None:
        for name in names:
            del self._meshes[name]
            for users in self._users.values():
                users.discard(name)
        # The last made is closed first, on every process alike.
        unused = [roles for roles in reversed(self._backends) if not self._users[roles]]
        failures = []
        for roles in unused:
            backend = self._backends.pop(roles)
            del self._users[roles]
            try:
                backend.close()
            except Exception as error:
                failures.append((roles, error))
        if failures:
            where = "; ".join(f"{roles.mesh!r}: {error!r}" for roles, error in failures)
            raise BackendError(
                f"{len(failures)} of {len(unused)} backends did not close: {where}; their meshes "
                "are forgotten all the same"
            ) from failures[0][1]


def _as_tuple(values: Iterable[_T] | None, what: str) -> tuple[_T, ...]:
    try:
        return tuple(values)  # type: ignore[arg-type]  # what is no iterable is the case below
    except TypeError:
        raise MeshError(f"{what} must be a sequence, not {values!r}") from None
