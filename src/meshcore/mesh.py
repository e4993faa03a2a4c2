"""A logical mesh of device ids: named axes, coordinates, groups. Ints only, no framework."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from meshcore.errors import MeshError, NotInMeshError
from meshcore.links import Link

_DEFAULT_AXIS = "shard"


class DeviceMesh:
    """Devices in a rectangle with named axes; immutable, hashable, the single truth about order.

    Args:
        ids: mesh ids in row-major order. On torch an id is a global rank, on JAX a position in
            ``jax.devices()``, on the built-in backends just a number.
        shape: devices along each axis; the default is one axis over all ids.
        axis_names: one name an axis; may be left out in one dimension, where it is "shard".
        links: what is known of the link along an axis, by name; axes may be missing.

    Raises:
        MeshError: naming the bad value and what is allowed.

    >>> mesh = DeviceMesh([0, 1, 2, 3, 4, 5], shape=(2, 3), axis_names=("replica", "shard"))
    >>> mesh.coordinate(4), mesh.index(4, "replica"), mesh.groups("replica")
    ((1, 1), 1, ((0, 3), (1, 4), (2, 5)))
    """

    __slots__ = ("_positions", "axis_names", "ids", "links", "shape")

    ids: tuple[int, ...]
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    links: Mapping[str, Link]
    _positions: dict[int, int]

    def __init__(
        self,
        ids: Sequence[int],
        shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        *,
        links: Mapping[str, Link] | None = None,
    ) -> None:
        checked_ids = _check_ids(ids)
        checked_shape = _check_shape(shape, len(checked_ids))
        names = _check_axis_names(axis_names, len(checked_shape))
        unknown = sorted(set(links or {}) - set(names), key=str)
        if unknown:
            raise MeshError(f"links name the axes {unknown}; the mesh has {list(names)}")
        set_once = object.__setattr__
        set_once(self, "ids", checked_ids)
        set_once(self, "shape", checked_shape)
        set_once(self, "axis_names", names)
        set_once(self, "links", MappingProxyType(dict(links or {})))
        set_once(self, "_positions", {id_: i for i, id_ in enumerate(checked_ids)})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"DeviceMesh is immutable; make a new one to change {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"DeviceMesh is immutable; {name!r} cannot be deleted")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.ids, self.shape, self.axis_names, dict(self.links)))

    # --- what it is -----------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.ids)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def axis(self, axis: str | int) -> int:
        """Position of an axis given by name or position.

        Raises:
            MeshError: there is no such axis.
        """
        if isinstance(axis, str) and axis in self.axis_names:
            return self.axis_names.index(axis)
        if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < self.ndim:
            return axis
        raise MeshError(
            f"axis {axis!r} is not in the mesh; it has the axes {list(self.axis_names)} "
            f"(positions 0 to {self.ndim - 1})"
        )

    def axis_size(self, axis: str | int) -> int:
        """Number of devices along an axis."""
        return self.shape[self.axis(axis)]

    # --- where a device is ----------------------------------------------------------------

    def contains(self, id_: int) -> bool:
        """Whether a device belongs to the mesh."""
        return id_ in self._positions

    def position(self, id_: int) -> int:
        """Place of a device in row-major mesh order.

        Raises:
            NotInMeshError: the device is outside.
        """
        try:
            return self._positions[id_]
        except (KeyError, TypeError):
            raise NotInMeshError(
                f"rank {id_!r} is not in the mesh; it holds {_shown(self.ids)}"
            ) from None

    def coordinate(self, id_: int) -> tuple[int, ...] | None:
        """Coordinate of a device along all axes, or None outside the mesh."""
        if not self.contains(id_):
            return None
        rest = self._positions[id_]
        out = []
        for extent in reversed(self.shape):
            rest, index = divmod(rest, extent)
            out.append(index)
        return tuple(reversed(out))

    def index(self, id_: int, axis: str | int) -> int:
        """Index of a device along one axis, given by name or position.

        Raises:
            NotInMeshError: the device is outside.
            MeshError: there is no such axis.
        """
        position = self.axis(axis)
        rest = self.position(id_)
        for extent in self.shape[position + 1 :]:
            rest //= extent
        return rest % self.shape[position]

    # --- groups and parts -----------------------------------------------------------------

    def groups(self, axis: str | int) -> tuple[tuple[int, ...], ...]:
        """Groups of ids that differ only along this axis, each in mesh order.

        A size-1 axis gives singletons.
        """
        position = self.axis(axis)
        inner = math.prod(self.shape[position + 1 :])
        extent = self.shape[position]
        block = inner * extent
        return tuple(
            tuple(self.ids[outer * block + step * inner + offset] for step in range(extent))
            for outer in range(self.size // block)
            for offset in range(inner)
        )

    def group_of(self, id_: int, axis: str | int) -> tuple[int, ...]:
        """The group along this axis that a device belongs to."""
        self.position(id_)
        return next(group for group in self.groups(axis) if id_ in group)

    def submesh(self, axes: Sequence[str | int], *, of: int) -> DeviceMesh:
        """The slice through device ``of`` along some axes, in the given order of axes.

        >>> mesh = DeviceMesh(range(8), (2, 2, 2), ("rack", "node", "device"))
        >>> mesh.submesh(["rack", "device"], of=2).ids
        (2, 3, 6, 7)
        """
        positions = [self.axis(axis) for axis in axes]
        if not positions or len(set(positions)) != len(positions):
            raise MeshError(f"a slice needs distinct axes, not {list(axes)}")
        self.position(of)
        here = self.coordinate(of) or ()
        ids = []
        for inside in itertools.product(*(range(self.shape[p]) for p in positions)):
            coordinate = list(here)
            for p, index in zip(positions, inside, strict=True):
                coordinate[p] = index
            ids.append(self.ids[_ravel(coordinate, self.shape)])
        names = [self.axis_names[p] for p in positions]
        links = {name: self.links[name] for name in names if name in self.links}
        return DeviceMesh(ids, [self.shape[p] for p in positions], names, links=links)

    def flatten(self) -> DeviceMesh:
        """The same devices as one axis, named "flat".

        Its link is the slowest of the axes' links (the bottleneck), known only if all are.
        """
        links: dict[str, Link] = {}
        if len(self.links) == self.ndim:
            known = self.links.values()
            links["flat"] = Link(
                max(link.alpha_seconds for link in known),
                max(link.beta_seconds_per_byte for link in known),
            )
        return DeviceMesh(self.ids, (self.size,), ("flat",), links=links)

    # --- value semantics ------------------------------------------------------------------

    def _key(self) -> tuple[object, ...]:
        return self.ids, self.shape, self.axis_names, tuple(sorted(self.links.items(), key=str))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.ids, self.shape, self.axis_names))

    def __repr__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))
        return f"DeviceMesh({axes}; ids={_shown(self.ids)})"


def _rebuild(
    ids: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...], links: dict[str, Link]
) -> DeviceMesh:
    return DeviceMesh(ids, shape, names, links=links)


def _ravel(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for index, extent in zip(coordinate, shape, strict=True):
        position = position * extent + index
    return position


def _shown(ids: Sequence[int], most: int = 16) -> str:
    text = ", ".join(map(str, ids[:most]))
    return f"[{text}, ... {len(ids)} in all]" if len(ids) > most else f"[{text}]"


def _as_int(value: object, what: str) -> int:
    try:
        number = value.__index__()  # type: ignore[attr-defined]  # what index() would do, without bool
    except (AttributeError, TypeError):
        raise MeshError(f"{what} must be an int, not {value!r}") from None
    if isinstance(value, bool):
        raise MeshError(f"{what} must be an int, not {value!r}")
    return int(number)


def _as_tuple(values: object, what: str) -> tuple[object, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise MeshError(f"{what} of a mesh is a sequence, such as a list, not {values!r}")
    return tuple(values)


def _check_ids(ids: Sequence[int]) -> tuple[int, ...]:
    checked = tuple(_as_int(id_, "a mesh id") for id_ in _as_tuple(ids, "ids"))
    if not checked:
        raise MeshError("a mesh needs at least one id, and got none")
    negative = [id_ for id_ in checked if id_ < 0]
    if negative:
        raise MeshError(f"mesh ids are 0 or more; got {negative[0]} in {_shown(checked)}")
    if len(set(checked)) != len(checked):
        twice = sorted({id_ for id_ in checked if checked.count(id_) > 1})
        raise MeshError(f"mesh ids must be distinct; {_shown(twice)} occur more than once")
    return checked


def _check_shape(shape: Sequence[int] | None, size: int) -> tuple[int, ...]:
    if shape is None:
        return (size,)
    checked = tuple(_as_int(extent, "an axis size") for extent in _as_tuple(shape, "shape"))
    if not checked or min(checked) < 1:
        raise MeshError(f"axis sizes are 1 or more, and there is one at least; got shape {checked}")
    if math.prod(checked) != size:
        raise MeshError(
            f"shape {checked} holds {math.prod(checked)} devices and there are {size} ids; "
            f"the product of the shape must be {size}"
        )
    return checked


def _check_axis_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...]:
    if names is None:
        if ndim == 1:
            return (_DEFAULT_AXIS,)
        raise MeshError(f"a mesh with {ndim} axes needs axis_names, one name an axis")
    given = (names,) if isinstance(names, str) else _as_tuple(names, "axis_names")
    bad = [name for name in given if not isinstance(name, str) or not name]
    if bad:
        raise MeshError(f"axis names are non-empty strings; got {bad[0]!r} in {given}")
    checked = tuple(str(name) for name in given)
    if len(checked) != ndim:
        raise MeshError(f"axis_names {checked} has {len(checked)} names and the mesh {ndim} axes")
    if len(set(checked)) != len(checked):
        raise MeshError(f"axis names must be distinct; got {checked}")
    return checked
