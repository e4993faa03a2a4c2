"""The null backend: every byte and no data, for dry runs of a mesh of any size in one process.

Given another backend's transfer profile it opens and frees what that backend would, so the same
manager code predicts the bytes of a run without importing the framework that will make it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshcore.backend import (
    BACKEND_API,
    Array,
    Backend,
    BackendInfo,
    BackendOptions,
    TransferProfile,
)
from meshcore.errors import ClosedError, SpecError, ValueUnavailableError
from meshcore.hookspecs import hookimpl
from meshcore.mesh import DeviceMesh
from meshcore.spec import AxisRoles, BufferSpec, Memory

NULL_PROFILE = TransferProfile(name="null", has_data=False)


class NullArray:
    """The bytes that one rank would hold; ``local_nbytes`` is 0 once they are given up."""

    __slots__ = ("freed", "local_nbytes", "memory")

    def __init__(self, local_nbytes: int, memory: Memory) -> None:
        self.local_nbytes = local_nbytes
        self.memory = memory
        self.freed = False

    def __repr__(self) -> str:
        state = "freed" if self.freed else f"{self.local_nbytes} bytes"
        return f"NullArray({state}, {self.memory.value})"


class NullBackend:
    """Keeps byte counts of one rank, which stands for all: ranks never differ in bytes.

    ``local_ranks`` is the mesh's first id alone, whatever the size of the mesh, so that a mesh of
    10,240 ranks costs what a mesh of one does. Values are accepted and forgotten; asking for one
    raises ``ValueUnavailableError``, except for ``total``, which is 0.0.
    """

    name = "null"

    def __init__(self, roles: AxisRoles, profile: TransferProfile | None = None) -> None:
        self.roles = roles
        self.mesh = roles.mesh
        self.local_ranks: tuple[int, ...] = (roles.mesh.ids[0],)
        self.profile = NULL_PROFILE if profile is None else replace(profile, has_data=False)
        self._shards = roles.shards
        self._closed = False

    @property
    def group_count(self) -> int:
        """Rank sets larger than 1 along the two axes while open; no communicator is behind them."""
        sizes = (self.roles.shards, self.roles.replicas)
        return 0 if self._closed else sum(self.mesh.size // n for n in sizes if n > 1)

    def empty(self, spec: BufferSpec, into: NullArray | None = None) -> NullArray:
        """The bytes of a buffer, those of a shell if one is given."""
        if self._closed:
            raise _closed_error()
        if into is None:
            return NullArray(spec.local_nbytes(self._shards), spec.memory)
        return self._live(into)

    def zeros(self, spec: BufferSpec, into: NullArray | None = None) -> NullArray:
        """The same as ``empty``."""
        return self.empty(spec, into)

    def redistribute(
        self,
        array: NullArray,
        src: BufferSpec,
        dst: BufferSpec,
        *,
        into: NullArray | None,
        scratch: Sequence[NullArray] = (),
        scale: float = 1.0,
        add: bool = False,
    ) -> NullArray:
        """The bytes of the destination."""
        self._live(array)
        for buffer in scratch:
            self._live(buffer)
        return self.empty(dst, into)

    def write(
        self,
        array: NullArray,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> NullArray:
        """Forget the values."""
        return self._live(array)

    def read(
        self, array: NullArray, spec: BufferSpec, start: int, stop: int, *, copy: bool = False
    ) -> Array:
        """Raise ``ValueUnavailableError``."""
        self._live(array)
        raise ValueUnavailableError(
            f"the null backend keeps bytes and no data, so elements {start} to {stop} of {spec} "
            "have no value; use the numpy backend for values"
        )

    def scale(self, array: NullArray, spec: BufferSpec, factor: float) -> NullArray:
        """Nothing to multiply."""
        return self._live(array)

    def square_sum(
        self, array: NullArray, spec: BufferSpec, valid: Sequence[tuple[int, int]]
    ) -> float:
        """0.0, for want of data."""
        self._live(array)
        return 0.0

    def total(self, parts: Sequence[float]) -> float:
        """0.0, for want of data."""
        return 0.0

    def wait(self, array: NullArray) -> None:
        """Nothing is ever in flight."""
        self._live(array)

    def free(self, array: NullArray) -> NullArray | None:
        """Give the bytes up, or hand them back as a shell where the profile keeps shells."""
        self._live(array)
        nbytes, memory = array.local_nbytes, array.memory
        array.freed, array.local_nbytes = True, 0
        return NullArray(nbytes, memory) if memory in self.profile.shells else None

    def drop(self, shell: NullArray) -> None:
        """Give a shell's bytes up."""
        self._live(shell)
        shell.freed, shell.local_nbytes = True, 0

    def nbytes(self, array: NullArray) -> dict[int, int]:
        """Bytes of the first rank."""
        return {self.local_ranks[0]: array.local_nbytes}

    def to_numpy(self, array: NullArray) -> Mapping[int, Array]:
        """Raise ``ValueUnavailableError``."""
        self._live(array)
        raise ValueUnavailableError(
            "the null backend keeps bytes and no data, so there is nothing to copy to numpy; use "
            "the numpy backend for values"
        )

    def exchange(self, payload: bytes | Mapping[int, bytes]) -> Mapping[int, bytes]:
        """What the first rank says, as said by every rank that the payload does not name.

        The result is a view of constant size, not a table: iterating it visits the whole mesh.
        """
        if self._closed:
            raise _closed_error()
        if isinstance(payload, bytes):
            return _AllAlike(self.mesh, payload, {})
        first = self.local_ranks[0]
        if first not in payload:
            raise SpecError(f"a payload by rank names rank {first}; it names {sorted(payload)}")
        return _AllAlike(self.mesh, payload[first], payload)

    def close(self) -> None:
        """Refuse further verbs; idempotent."""
        self._closed = True

    @staticmethod
    def _live(array: NullArray) -> NullArray:
        if array.freed:
            raise ClosedError("a freed array was used; rebind to what each verb returned")
        return array


class _AllAlike(Mapping[int, bytes]):
    """One payload for every rank of a mesh, but for the ranks that have their own."""

    def __init__(self, mesh: DeviceMesh, common: bytes, own: Mapping[int, bytes]) -> None:
        self._mesh = mesh
        self._common = common
        self._own = dict(own)

    def __getitem__(self, rank: int) -> bytes:
        if not self._mesh.contains(rank):
            raise KeyError(rank)
        return self._own.get(rank, self._common)

    def __iter__(self) -> Iterator[int]:
        return iter(self._mesh.ids)

    def __len__(self) -> int:
        return self._mesh.size


def _closed_error() -> ClosedError:
    return ClosedError("this null backend is closed; create a new one")


@hookimpl
def meshcore_backend_info() -> BackendInfo:
    """Describe the null backend."""
    return BackendInfo("null", BACKEND_API, "bytes and no data, for dry runs at any size")


@hookimpl
def meshcore_create_backend(name: str, roles: AxisRoles, options: BackendOptions) -> Backend | None:
    """Make a null backend; ``options.profile`` says whose bytes it predicts."""
    if name != "null":
        return None
    if options.extra:
        raise SpecError(f"the null backend has no options of its own; got {sorted(options.extra)}")
    return NullBackend(roles, options.profile)
