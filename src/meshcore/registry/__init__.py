"""Find, load and make backends: list without importing, load exactly the one that is asked for."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from meshcore.backend import Backend, BackendOptions
from meshcore.errors import BackendError, BackendLoadError, MeshcoreError, MeshError
from meshcore.mesh import DeviceMesh
from meshcore.registry import discovery, loading
from meshcore.registry.discovery import BackendDescription
from meshcore.spec import AxisRoles

__all__ = [
    "BackendDescription",
    "Registry",
    "available_backends",
    "create_backend",
    "default_registry",
    "default_shard_axis",
]


class Registry:
    """The backends of this process: what is installed, what was loaded, and what came of it.

    Args:
        entry_points: gives the entry points to choose from, each time they are needed; the default
            reads the metadata of what is installed.
        strict: ``load_all`` raises at the first backend that does not load.

    A backend that failed to load is tried again when it is asked for again.
    """

    def __init__(
        self,
        entry_points: Callable[[], Iterable[importlib.metadata.EntryPoint]] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self._entry_points = entry_points or discovery.installed_entry_points
        self._strict = strict
        self._plugins: dict[str, loading.Plugin] = {}
        self._outcomes: dict[str, BackendDescription] = {}  # the last one of each load

    def describe(self, *, allowed_only: bool = True) -> Mapping[str, BackendDescription]:
        """Name -> description of the installed backends, sorted by name; imports nothing.

        ``MESHCORE_BACKENDS`` hides what it does not list, unless ``allowed_only`` is False.
        """
        return MappingProxyType(
            {
                name: self._description(offers)
                for name, offers in self._offers().items()
                if not allowed_only or discovery.is_allowed(name)
            }
        )

    def load(self, name: str) -> BackendDescription:
        """Import one backend, check it, and describe it; does nothing where it is loaded.

        Raises:
            BackendNotFoundError: nothing that is installed and allowed has this name.
            BackendConflictError: two distributions have it.
            BackendLoadError: it does not import, or its hooks do not fit; the cause is chained.
            BackendIncompatibleError: it was built for another version of the backend API.
        """
        return self._plugin(name).description

    def load_all(self, *, strict: bool | None = None) -> Mapping[str, BackendDescription]:
        """Load every allowed backend, and describe what came of it.

        Raises:
            MeshcoreError: what ``load`` raises, only where ``strict`` is True (of this call, or by
                default of the registry).
        """
        for name in self.describe():
            try:
                self.load(name)
            except MeshcoreError:
                if self._strict if strict is None else strict:
                    raise
        return self.describe()

    def probe(self, name: str) -> str | None:
        """Load a backend and ask it whether it can run here: None, or why not.

        Raises:
            MeshcoreError: what ``load`` raises.
        """
        probe = self._plugin(name).info.probe
        if probe is None:
            return None
        try:
            answer = probe()
        except Exception as error:  # a probe that fails is an answer too: it cannot run here
            return f"its probe failed: {loading.shown(error)}"
        return None if answer is None else str(answer)

    def create(
        self,
        name: str,
        mesh: DeviceMesh,
        *,
        shard_axis: str | int | None = None,
        replica_axis: str | int | None = None,
        options: BackendOptions | None = None,
    ) -> Backend:
        """Make a backend for a mesh; see ``create_backend``."""
        if shard_axis is None:
            shard_axis = default_shard_axis(mesh, replica_axis)
        roles = AxisRoles(mesh, shard_axis, replica_axis)
        plugin = self._plugin(name)
        try:
            backend: Backend | None = plugin.manager.hook.meshcore_create_backend(
                name=name, roles=roles, options=options or BackendOptions()
            )
        except (MeshcoreError, MemoryError):
            raise
        except Exception as error:
            # Backends import their framework here, so that loading the plugin stays cheap.
            kind = BackendLoadError if isinstance(error, ImportError) else BackendError
            raise kind(
                f"{plugin.description} could not be made: {loading.shown(error)}; "
                "`meshcore doctor` shows what is installed"
            ) from error
        if backend is None:
            raise BackendLoadError(
                f"{plugin.description} made nothing: its meshcore_create_backend gave None for its "
                "own name; report this to its authors"
            )
        return backend

    def _offers(self) -> Mapping[str, Sequence[discovery.Offer]]:
        return discovery.collect(self._entry_points())

    def _description(self, offers: Sequence[discovery.Offer]) -> BackendDescription:
        found = offers[0].describe()
        if len(offers) > 1:
            return replace(
                found,
                distribution=", ".join(sorted({offer.distribution for offer in offers})),
                version=", ".join(offer.version for offer in offers),
                entry_point=", ".join(offer.value for offer in offers),
                status="rejected",
                reason=str(discovery.conflict(offers)),
            )
        known = self._outcomes.get(found.name)
        if known is None or (known.distribution, known.version, known.entry_point) != (
            found.distribution,
            found.version,
            found.entry_point,
        ):
            return found
        return known

    def _plugin(self, name: str) -> loading.Plugin:
        if name in self._plugins and discovery.is_allowed(name):
            return self._plugins[name]
        offers = self._offers()
        if name not in offers or not discovery.is_allowed(name):
            raise discovery.not_found(name, offers)
        if len(offers[name]) > 1:
            raise discovery.conflict(offers[name])
        found = offers[name][0].describe()
        try:
            plugin = loading.load(offers[name][0])
        except loading.RefusedError as refused:
            self._outcomes[name] = replace(found, status=refused.status, reason=refused.reason)
            # The cause is the plugin's own error: the refusal is only how we pass it on.
            raise refused.error(f"{found} is not usable: {refused.reason}") from refused.__cause__
        self._outcomes[name] = plugin.description
        self._plugins[name] = plugin
        return plugin


@functools.cache
def default_registry() -> Registry:
    """The registry that ``create_backend`` and ``available_backends`` share; made on first use."""
    return Registry()


def available_backends() -> Mapping[str, BackendDescription]:
    """Name -> description of the installed backends; reads metadata and imports none of them.

    Environment:
        MESHCORE_BACKENDS: names, separated by commas; only these are listed and loaded, and the
            built-in ones ("numpy", "null") always are. Unset or empty means all.

    >>> available_backends()["numpy"].distribution
    'meshcore-train'
    """
    return default_registry().describe()


def create_backend(
    name: str,
    mesh: DeviceMesh,
    *,
    shard_axis: str | int | None = None,
    replica_axis: str | int | None = None,
    options: BackendOptions | None = None,
) -> Backend:
    """Load a backend and bind it to a mesh; the caller closes it.

    Every process of a distributed world makes the same calls in the same order, those outside the
    mesh too.

    Args:
        name: one of ``available_backends()``.
        mesh: the devices, in the order that counts.
        shard_axis: name or position of the axis over which buffers are split; the default is the
            axis "shard", or the only axis that is not the replica axis.
        replica_axis: name or position of the axis over which the shards are repeated, if any.
        options: time-outs, a stored profile, a device type, and what else the backend understands.

    Raises:
        MeshError: the axes do not fit the mesh.
        BackendNotFoundError: no such backend is installed; says what to install.
        BackendConflictError: two distributions offer it.
        BackendLoadError: it is installed and does not load; the cause is chained.
        BackendIncompatibleError: it was built for another version of the backend API.
        BackendError: it loads and cannot be made here; the cause is chained.
    """
    return default_registry().create(
        name, mesh, shard_axis=shard_axis, replica_axis=replica_axis, options=options
    )


def default_shard_axis(mesh: DeviceMesh, replica_axis: str | int | None = None) -> str:
    """The axis "shard", or the only one left beside the replica axis.

    Raises:
        MeshError: there are several, and none is called "shard".

    >>> default_shard_axis(DeviceMesh([0, 1], axis_names=("data",)))
    'data'
    """
    replica = None if replica_axis is None else mesh.axis_names[mesh.axis(replica_axis)]
    axes = [axis for axis in mesh.axis_names if axis != replica]
    if "shard" in axes:
        return "shard"
    if len(axes) == 1:
        return axes[0]
    raise MeshError(
        f"shard_axis is not given, and of the axes {axes} none is called 'shard'; name one of them"
    )
