"""The seam: what a backend is, what it may be asked, and the data that describes its moves.

A backend author's whole world is this module, two hooks (``meshcore.hookspecs``) and one test class
(``meshcore.testing.BackendContract``).

[Note: consume and return] Every verb that changes an array takes it and gives back its successor;
the caller rebinds and never touches the old one again. A mutable framework returns the same object,
an immutable one a new object, and the code above the seam is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from meshcore.dtypes import ALL_DTYPES as ALL_DTYPES
from meshcore.dtypes import dtype_name as dtype_name
from meshcore.dtypes import is_floating as is_floating
from meshcore.dtypes import itemsize as itemsize
from meshcore.dtypes import numpy_dtype as numpy_dtype
from meshcore.dtypes import sum_dtype as sum_dtype
from meshcore.errors import MeshcoreError, SpecError
from meshcore.mesh import DeviceMesh
from meshcore.spec import AxisRoles as AxisRoles
from meshcore.spec import BufferSpec as BufferSpec
from meshcore.spec import Memory as Memory
from meshcore.spec import MoveKind as MoveKind
from meshcore.spec import Placement as Placement
from meshcore.spec import check_move as check_move
from meshcore.spec import move_kind as move_kind
from meshcore.spec import reduce_path as reduce_path

BACKEND_API: tuple[int, int] = (1, 0)
"""Version of the seam: a plugin fits if its major is equal and its minor is not above ours."""

Array: TypeAlias = Any
"""A backend's own array: opaque to the core, except that ``read`` results can ``reshape``."""


@dataclass(frozen=True, slots=True)
class Staging:
    """One scratch buffer that a form of a move needs.

    Attributes:
        numel: "full" (the whole buffer), "shard" (one shard), "peers" (the shards of all peers:
            (N - 1) shards, N the number of shards).
        dtype: "src" or "dst": whose dtype it has.
        only_add: needed only where the move adds into a live destination.
    """

    numel: str
    dtype: str
    only_add: bool = False


@dataclass(frozen=True, slots=True)
class MoveForm:
    """One way to make a move, taken from ``from_nbytes`` on.

    ``from_nbytes`` is compared with the bytes of the full buffer in the dtype that travels (the
    destination's for a gather, the source's for everything else).
    """

    name: str
    from_nbytes: int = 0
    staging: tuple[Staging, ...] = ()


@dataclass(frozen=True)
class TransferProfile:
    """How a backend moves data; pure data, so that ``null`` can predict another backend's bytes.

    Attributes:
        name: whose it is.
        dtypes: dtype names that it can hold and move.
        forms: move kind -> forms, by rising ``from_nbytes``; a kind that is missing needs no
            scratch and has one form, named "default".
        shells: memories where a freed buffer leaves its storage behind for reuse.
        preallocates: whether destinations of moves are opened with ``empty`` before the move; where
            they are not, ``into`` is None, the backend makes the destination itself, and forms have
            no staging. Moves that add always get a live ``into``.
        has_data: False where the backend keeps bytes only.
    """

    name: str
    dtypes: tuple[str, ...] = ALL_DTYPES
    forms: Mapping[MoveKind, tuple[MoveForm, ...]] = field(default_factory=dict)
    shells: frozenset[Memory] = frozenset()
    preallocates: bool = True
    has_data: bool = True

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            itemsize(dtype)
        for kind, forms in self.forms.items():
            starts = [form.from_nbytes for form in forms]
            if not forms or starts[0] != 0 or starts != sorted(set(starts)):
                raise SpecError(
                    f"forms of {kind.value} start at 0 bytes and rise strictly, not {starts}"
                )
            if not self.preallocates and any(form.staging for form in forms):
                raise SpecError(
                    f"forms of {kind.value} ask for scratch, and a backend that makes its "
                    "destinations itself (preallocates=False) gets none: leave staging out"
                )

    def form(self, src: BufferSpec, dst: BufferSpec, roles: AxisRoles) -> MoveForm:
        """The form that this move takes: a pure function of specs, equal on all ranks."""
        kind = move_kind(src, dst, roles)
        forms = self.forms.get(kind, _DEFAULT_FORMS)
        nbytes = src.numel * itemsize(dst.dtype if kind is MoveKind.GATHER else src.dtype)
        return [form for form in forms if form.from_nbytes <= nbytes][-1]

    def to_json(self) -> str:
        """The profile as JSON, to be stored and given back as an option."""
        return json.dumps(
            {
                "name": self.name,
                "dtypes": list(self.dtypes),
                "forms": {
                    kind.value: [
                        {
                            "name": form.name,
                            "from_nbytes": form.from_nbytes,
                            "staging": [[s.numel, s.dtype, s.only_add] for s in form.staging],
                        }
                        for form in forms
                    ]
                    for kind, forms in self.forms.items()
                },
                "shells": sorted(memory.value for memory in self.shells),
                "preallocates": self.preallocates,
                "has_data": self.has_data,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> TransferProfile:
        """The inverse of ``to_json``.

        Raises:
            SpecError: the text is no profile.
        """
        try:
            raw = json.loads(text)
            forms = {
                MoveKind(kind): tuple(
                    MoveForm(
                        form["name"],
                        form["from_nbytes"],
                        tuple(Staging(*staging) for staging in form["staging"]),
                    )
                    for form in rows
                )
                for kind, rows in raw["forms"].items()
            }
            return cls(
                name=raw["name"],
                dtypes=tuple(raw["dtypes"]),
                forms=forms,
                shells=frozenset(Memory(memory) for memory in raw["shells"]),
                preallocates=raw["preallocates"],
                has_data=raw["has_data"],
            )
        except MeshcoreError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(f"this is no transfer profile: {error!r}") from error


_DEFAULT_FORMS = (MoveForm("default"),)


def scratch_specs(
    profile: TransferProfile,
    roles: AxisRoles,
    src: BufferSpec,
    dst: BufferSpec,
    *,
    add: bool = False,
) -> tuple[BufferSpec, ...]:
    """Scratch buffers that a move needs, in the order in which the backend gets them.

    A move over a group of one rank is a local copy and needs none.
    """
    kind = check_move(src, dst, roles, add=add)
    if src.numel == 0 or roles.group_size(kind) == 1:
        return ()
    out = []
    for staging in profile.form(src, dst, roles).staging:
        if staging.only_add and not add:
            continue
        shard = src.numel // roles.shards
        numel = {"full": src.numel, "shard": shard, "peers": src.numel - shard}.get(staging.numel)
        if numel is None or staging.dtype not in ("src", "dst"):
            raise SpecError(f"profile {profile.name!r} has an unknown staging: {staging}")
        dtype = src.dtype if staging.dtype == "src" else dst.dtype
        # REPLICATED here means: this many elements on every rank.
        out.append(BufferSpec(numel, dtype, Placement.REPLICATED, dst.memory))
    return tuple(out)


class Backend(Protocol):
    """Collectives and storage of one framework, bound to one mesh with its axis roles.

    General rules (see ``docs/writing-a-backend.md``):

    - All checks of specs, moves, bounds, shapes and dtypes happen in the core, before the call.
    - Verbs may return before their effect is complete; ``wait`` completes them. Until then the core
      keeps source, destination and scratch alive and touches none of them.
    - Every process of a mesh issues the same collectives in the same order.
    - A buffer with 0 elements is legal everywhere and moves nothing.
    - An axis of size 1 makes no group and no traffic.
    - A failing verb raises; ``empty``, ``zeros``, ``redistribute`` without ``add``, and ``free``
      leave everything as it was. Lack of memory is a ``MemoryError``.
    - float32 is the one dtype that every backend has.
    - Outside the mesh ``local_ranks`` is () and every verb raises ``NotInMeshError``.
    """

    name: str
    mesh: DeviceMesh
    roles: AxisRoles
    local_ranks: tuple[int, ...]  # mesh ids held by this process, in mesh order
    profile: TransferProfile

    @property
    def group_count(self) -> int:
        """Communicators that this backend made and has not destroyed."""
        ...

    def empty(self, spec: BufferSpec, into: Array | None = None) -> Array:
        """Storage with any content. ``into`` is a shell of the same spec to reuse (consumed)."""
        ...

    def zeros(self, spec: BufferSpec, into: Array | None = None) -> Array:
        """Storage filled with zeros; padding counts on it. ``into`` as for ``empty``."""
        ...

    def redistribute(
        self,
        array: Array,
        src: BufferSpec,
        dst: BufferSpec,
        *,
        into: Array | None,
        scratch: Sequence[Array] = (),
        scale: float = 1.0,
        add: bool = False,
    ) -> Array:
        """One collective or one transfer (see ``MoveKind``); returns ``into``'s successor.

        The source is neither changed nor freed, and the result never aliases it. A gather casts on
        the source side, before the transport. A sum casts its addends to the destination's dtype
        (float32 or wider) before adding, then multiplies the sum by ``scale``, then stores it, or
        with ``add`` adds it to what ``into`` holds. ``scratch`` is what ``scratch_specs`` asks for.
        """
        ...

    def write(
        self,
        array: Array,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> Array:
        """Write (or add) values from element ``start`` on; consumes ``array``.

        The placement is REPLICATED or PARTIAL. ``values`` is one-dimensional: a numpy array or an
        array of the framework, the same for all local ranks, or for PARTIAL a mapping of local
        ranks to such (ranks that are absent are left alone). Values are cast to ``spec.dtype``.
        Addition happens in ``spec.dtype``.
        """
        ...

    def read(
        self, array: Array, spec: BufferSpec, start: int, stop: int, *, copy: bool = False
    ) -> Array:
        """Elements [start, stop) of a REPLICATED buffer as one 1-D array of the framework.

        May alias the buffer unless ``copy``; a view is valid until the buffer is consumed or freed.
        """
        ...

    def scale(self, array: Array, spec: BufferSpec, factor: float) -> Array:
        """Multiply every element by ``factor``, on any placement; consumes ``array``."""
        ...

    def square_sum(self, array: Array, spec: BufferSpec, valid: Sequence[tuple[int, int]]) -> Any:
        """This process's share of the sum of squares over the valid ranges; lazy and unreduced.

        ``valid`` holds ranges of the whole buffer, in elements. The placement is SHARDED or
        REPLICATED, in device memory. Elements outside the ranges are masked *before* they are
        squared (they may be NaN). Every element counts once over the whole mesh: a rank counts
        only what its shard index owns (on REPLICATED too), and only at replica index 0. Finite
        elements must not overflow: square in float64, or scale by the largest magnitude.
        """
        ...

    def total(self, parts: Sequence[Any]) -> float:
        """Sum of shares over parts and the whole mesh: one scalar collective, the same float on
        every rank; not finite if any valid element is not."""
        ...

    def wait(self, array: Array) -> None:
        """Complete what is in flight for this array; may raise what the operation failed with.

        Waiting twice, or for an array with nothing in flight, is fine.
        """
        ...

    def free(self, array: Array) -> Array | None:
        """Give the buffer up; returns a shell whose storage is kept for reuse exactly where
        ``profile.shells`` names the buffer's memory. Works after ``close`` too."""
        ...

    def drop(self, shell: Array) -> None:
        """Give a shell's storage up."""
        ...

    def nbytes(self, array: Array) -> Mapping[int, int]:
        """Measured storage bytes of an array or shell by local rank; 0 or absent once freed."""
        ...

    def to_numpy(self, array: Array) -> Mapping[int, Any]:
        """Copies of what each local rank holds, as 1-D ``numpy.ndarray``."""
        ...

    def exchange(self, payload: bytes | Mapping[int, bytes]) -> Mapping[int, bytes]:
        """All-gather small payloads over the whole mesh (control plane): rank -> bytes.

        One ``bytes`` speaks for all local ranks, a mapping for each of them.
        """
        ...

    def close(self) -> None:
        """Destroy the groups that this backend made, never the caller's; idempotent.

        Afterwards ``free``, ``drop`` and ``nbytes`` still work, the other verbs raise
        ``ClosedError``.
        """
        ...


@runtime_checkable
class SupportsLiveBytes(Protocol):
    """Optional: a backend that knows all storage alive on its devices, ours or not."""

    def live_nbytes(self) -> Mapping[int, Mapping[Memory, int]]:
        """Bytes alive by local rank and memory, of arrays that this backend handed out."""
        ...


@dataclass(frozen=True)
class BackendOptions:
    """What a user may say when a backend is made; a backend ignores what it has no use for.

    Attributes:
        timeout_seconds: how long a collective may wait for a peer.
        profile: a stored transfer profile, instead of the backend's own.
        device: a device type, where a backend has several ("cpu", "cuda").
        extra: a backend's own options by name; it must refuse the names that it does not know.
    """

    timeout_seconds: float = 600.0
    profile: TransferProfile | None = None
    device: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BackendInfo:
    """What a plugin says of itself, without starting anything.

    Attributes:
        name: the backend's name, equal to its entry point's.
        api: the ``BACKEND_API`` that it was written for.
        summary: one line for people.
        probe: optional check whether it can run here: returns None, or why not.
    """

    name: str
    api: tuple[int, int]
    summary: str = ""
    probe: Any = None
