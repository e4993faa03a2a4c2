"""The pool: the only caller of a backend, and the only one that opens and closes in the ledger.

[Note: failure] ``empty``, ``zeros``, ``redistribute`` without ``add`` and ``free`` roll back
exactly. ``write``, ``scale``, ``update`` and sums into a live buffer may have consumed their input
when they fail: that buffer is closed, marked broken and named, and never used again.

[Note: agreement] A collective that needs memory which no shell offers could run out of it on one
rank alone and leave the others waiting. So destination and scratch are allocated first, the ranks
exchange whether that worked, and only then the collective is issued. Which moves need fresh memory
is equal on all ranks, because shells (and counts of live buffers) come and go by specs alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshcore.backend import Array, Backend, scratch_specs
from meshcore.buffers import Buffer, Flight, ShellStore
from meshcore.errors import (
    BackendError,
    BrokenBufferError,
    ClosedError,
    DeviceMemoryError,
    SpecError,
)
from meshcore.layout import Slot, format_nbytes
from meshcore.ledger import Category, Entry, Ledger, Table
from meshcore.spec import BufferSpec, Memory, MoveKind, check_move
from meshcore.witness import Witness


class Pool:
    """Opens, moves, changes and frees buffers, and keeps the ledger equal to what is alive.

    Args:
        backend: who does it.
        check: measure the backend's bytes at every open and compare them with the ledger.
        limits: bytes of one rank, used and reserved, that a memory may hold.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        check: bool = False,
        limits: Mapping[Memory, int] | None = None,
    ) -> None:
        self.backend = backend
        self.roles = backend.roles
        self.ledger = Ledger()
        self.check = check
        self.limits = dict(limits or {})
        self.leftovers: list[Buffer] = []
        self._live: dict[int, Buffer] = {}
        self._shells = ShellStore(backend, self.ledger)
        self._witness = Witness(backend, self.ledger, exclusive=check)
        self._next_key = 0
        self._scratch_cache: dict[tuple[BufferSpec, BufferSpec, bool], tuple[Any, ...]] = {}
        self._nbytes_cache: dict[BufferSpec, int] = {}
        self._live_count: dict[BufferSpec, int] = {}
        self._most_live: dict[BufferSpec, int] = {}
        self._closed = False
        local = backend.local_ranks
        self._one_process = len(local) == backend.mesh.size or not backend.profile.has_data

    # --- opening --------------------------------------------------------------------------

    def zeros(self, name: str, category: Category, spec: BufferSpec) -> Buffer:
        """Open a buffer of zeros.

        Raises:
            DeviceMemoryError: there is no memory; nothing was changed.
        """
        if self._one_process:
            return self._open_alone(name, category, spec, zero=True)
        return self._open(name, category, spec, zero=True)

    def _open(self, name: str, category: Category, spec: BufferSpec, *, zero: bool) -> Buffer:
        self._require_open()
        if self.leftovers:
            self._sweep()
        shell = self._shells.take(spec)
        if shell is None:
            self._make_room(name, spec)
        make = self.backend.zeros if zero else self.backend.empty
        try:
            array = make(spec, None if shell is None else shell.array)
        except BaseException as error:
            if shell is not None:
                self._shells.put_back(shell)
            if isinstance(error, MemoryError):
                raise self._out_of_memory(name, spec, str(error)) from error
            raise
        return self._adopt(name, category, spec, array)

    def _adopt(self, name: str, category: Category, spec: BufferSpec, array: Array) -> Buffer:
        key = self._next_key
        self._next_key = key + 1
        buffer = Buffer(key, name, spec, category, array)
        self._live[key] = buffer
        count = self._live_count[spec] = self._live_count.get(spec, 0) + 1
        if count > self._most_live.get(spec, 0):
            self._most_live[spec] = count
        self.ledger.open(key, Entry(name, category, spec.memory, self._nbytes(spec)))
        if self.check:
            try:
                self.audit()
            except BaseException:
                self._abandon([buffer])
                raise
        return buffer

    def _make_room(self, name: str, spec: BufferSpec) -> None:
        limit = self.limits.get(spec.memory)
        if limit is None:
            return
        room = limit - self.ledger.used_nbytes(spec.memory) - self._nbytes(spec)
        if room < 0:
            raise self._out_of_memory(name, spec, f"the limit is {format_nbytes(limit)}")
        self._shells.shrink(spec.memory, room)

    def _out_of_memory(self, name: str, spec: BufferSpec, reason: str) -> DeviceMemoryError:
        nbytes = self._nbytes(spec)
        report = self.ledger.report()
        return DeviceMemoryError(
            f"no memory for {name} ({spec}, {nbytes} bytes a rank): {reason}; in use: "
            f"{_nonzero(report.used)}; reserved: {_nonzero(report.reserved)}; release chunks, move "
            "some to host, or plan smaller chunks",
            buffer=name,
            nbytes=nbytes,
            report=report.used,
        )

    def _raise_lack_of_memory(self, error: BaseException, name: str, spec: BufferSpec) -> None:
        """A backend's lack of memory becomes ours, with names and figures; nothing else does."""
        if isinstance(error, MemoryError) and not isinstance(error, DeviceMemoryError):
            raise self._out_of_memory(name, spec, str(error)) from error

    # --- moving ---------------------------------------------------------------------------

    def move(
        self,
        src: Buffer,
        spec: BufferSpec,
        *,
        name: str,
        category: Category,
        scale: float = 1.0,
        wait: bool = True,
    ) -> Buffer:
        """Open a buffer of another placement, dtype or memory with the source's value.

        The source stays. With ``wait=False`` the move may be in flight; any later use fences it.

        Raises:
            DeviceMemoryError: on all ranks, if any rank has no memory; nothing was changed.
        """
        self._ready(src)
        kind, scratch_of = self._move_facts(src.spec, spec, add=False)
        if not self.backend.profile.preallocates:
            return self._move_whole(src, spec, name, category, scale, wait)
        dst, scratch = self._allocate(kind, name, category, spec, scratch_of)
        try:
            dst.array = self.backend.redistribute(
                src.array,
                src.spec,
                spec,
                into=dst.array,
                scratch=[buffer.array for buffer in scratch],
                scale=scale,
            )
            if wait:
                self.backend.wait(dst.array)
                for buffer in scratch:
                    self.free(buffer)
        except BaseException as error:
            self._abandon([*scratch, dst])
            self._raise_lack_of_memory(error, name, spec)
            raise
        if not wait:
            self._launch(Flight(src, dst, scratch))
        return dst

    def forward(
        self, temporary: Buffer, spec: BufferSpec, *, name: str, category: Category
    ) -> Buffer:
        """Move a buffer that nobody else knows, and give it up; a failure gives both up."""
        buffers = [temporary]
        try:
            buffers.append(self.move(temporary, spec, name=name, category=category))
            self.discard(temporary)
        except BaseException:
            self._abandon([buffer for buffer in buffers if buffer not in self.leftovers])
            raise
        return buffers[-1]

    def _move_whole(
        self,
        src: Buffer,
        spec: BufferSpec,
        name: str,
        category: Category,
        scale: float,
        wait: bool,
    ) -> Buffer:
        """A move of a backend that makes its destinations itself."""
        self._make_room(name, spec)
        try:
            array = self.backend.redistribute(src.array, src.spec, spec, into=None, scale=scale)
        except BaseException as error:
            self._raise_lack_of_memory(error, name, spec)
            raise
        dst = self._adopt(name, category, spec, array)
        self._launch(Flight(src, dst, []))
        if wait:
            self.wait(dst)
        return dst

    def add_into(self, src: Buffer, dst: Buffer, *, scale: float = 1.0) -> None:
        """Add the source's value, times ``scale``, to a live buffer of another placement.

        Raises:
            BrokenBufferError: never for this call itself; but if it fails, ``dst`` is broken.
        """
        self._ready(src)
        self._ready(dst)
        kind, scratch_of = self._move_facts(src.spec, dst.spec, add=True)
        scratch = self._allocate_all(kind, [(dst.name, s) for s in scratch_of])
        try:
            dst.array = self.backend.redistribute(
                src.array,
                src.spec,
                dst.spec,
                into=dst.array,
                scratch=[buffer.array for buffer in scratch],
                scale=scale,
                add=True,
            )
            self.backend.wait(dst.array)
        except BaseException as error:
            self._break(dst, error)
            self._abandon(scratch)
            self._raise_lack_of_memory(error, dst.name, dst.spec)
            raise
        dst.version += 1
        self.discard(*scratch)

    def _move_facts(
        self, src: BufferSpec, dst: BufferSpec, *, add: bool
    ) -> tuple[MoveKind, tuple[BufferSpec, ...]]:
        key = (src, dst, add)
        facts = self._scratch_cache.get(key)
        if facts is None:
            kind = check_move(src, dst, self.roles, add=add)
            scratch = scratch_specs(self.backend.profile, self.roles, src, dst, add=add)
            facts = self._scratch_cache[key] = (kind, scratch)
        return facts[0], facts[1]

    def _allocate(
        self,
        kind: MoveKind,
        name: str,
        category: Category,
        spec: BufferSpec,
        scratch_of: tuple[BufferSpec, ...],
    ) -> tuple[Buffer, list[Buffer]]:
        steady = self._one_process or not (self.limits or self._needs_fresh([spec]))
        if steady and not scratch_of:
            return self._open_alone(name, category, spec, zero=False), []  # nothing to agree on
        wanted = [(name, spec), *((name, s) for s in scratch_of)]
        first, *rest = self._allocate_all(kind, wanted, category)
        return first, rest

    def _open_alone(self, name: str, category: Category, spec: BufferSpec, *, zero: bool) -> Buffer:
        try:
            return self._open(name, category, spec, zero=zero)
        except DeviceMemoryError:
            if not any(True for _ in self._shells):
                raise
        self._shells.drop_all()
        return self._open(name, category, spec, zero=zero)

    def _allocate_all(
        self,
        kind: MoveKind,
        wanted: Sequence[tuple[str, BufferSpec]],
        first_category: Category = Category.STAGING,
    ) -> list[Buffer]:
        """Open destination and scratch, on all ranks or on none. See [Note: agreement]."""
        if not wanted:
            return []
        # Under limits shells go by what a rank holds, which may differ: ask every time.
        fresh = bool(self.limits) or self._needs_fresh([spec for _, spec in wanted])
        agrees = fresh and not self._one_process and self.roles.group_size(kind) > 1
        for last in (False, True):
            opened: list[Buffer] = []
            category, problem = first_category, None
            try:
                for name, spec in wanted:
                    opened.append(self._open(name, category, spec, zero=False))
                    category = Category.STAGING
            except DeviceMemoryError as error:
                problem = error
            except BaseException:
                self._abandon(opened)
                raise
            failures = self.agree(problem) if agrees else _own_failure(problem)
            if not failures:
                return opened
            self._abandon(opened)
            self._shells.drop_specs([spec for _, spec in wanted])
            for _, spec in wanted:  # some ranks got further than others: start again as equals
                self._most_live[spec] = self._live_count.get(spec, 0)
            if last or not any(True for _ in self._shells):
                raise problem or self.peer_out_of_memory(*wanted[0], failures)
            self._shells.drop_all()
        raise BackendError("unreachable: the second attempt returns or raises")

    def _needs_fresh(self, specs: Sequence[BufferSpec]) -> bool:
        """Whether buffers of these specs take memory that they did not have before.

        Where freed buffers leave no shells, an allocator below the backend keeps their memory: what
        was alive at once before needs nothing new.
        """
        need: dict[BufferSpec, int] = {}
        for spec in specs:
            need[spec] = need.get(spec, 0) + 1
        keeps = self.backend.profile.shells
        return any(
            self._shells.count(spec) < count
            if spec.memory in keeps
            else self._live_count.get(spec, 0) + count > self._most_live.get(spec, 0)
            for spec, count in need.items()
        )

    def exchange(self, own: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """All-gather small payloads; no traffic where this process speaks for the whole mesh."""
        self._require_open()
        return own if self._one_process else self.backend.exchange(own)

    def agree(self, problem: BaseException | None) -> dict[int, str]:
        """Tell all ranks whether this one has a problem; returns rank -> problem, of all ranks."""
        if self._one_process:
            return _own_failure(problem)
        payload = b"" if problem is None else (str(problem) or repr(problem)).encode()
        answers = self.backend.exchange(payload)
        return {rank: text.decode() for rank, text in answers.items() if text}

    def peer_out_of_memory(
        self, name: str, spec: BufferSpec, failures: Mapping[int, str]
    ) -> DeviceMemoryError:
        """The error for a rank whose peers had no memory."""
        rank, text = next(iter(failures.items()))
        return DeviceMemoryError(
            f"no memory for {name} on rank(s) {sorted(failures)}; nothing was changed on this one; "
            f"rank {rank} says: {text}",
            buffer=name,
            nbytes=self._nbytes(spec),
            report=self.ledger.report().used,
        )

    # --- completing -----------------------------------------------------------------------

    def _launch(self, flight: Flight) -> None:
        for buffer in (flight.src, flight.dst, *flight.scratch):
            buffer.flights.append(flight)

    def wait(self, buffer: Buffer) -> None:
        """Complete all moves that this buffer takes part in; waiting twice is fine.

        Raises:
            whatever the move failed with; its destination is closed then.
        """
        while buffer.flights:
            self._complete(buffer.flights[0])

    def scratch_in_flight(self) -> list[Buffer]:
        """Scratch of moves that may not be complete; no chunk knows it."""
        flights = {id(f): f for buffer in self._live.values() for f in buffer.flights}
        return [buffer for flight in flights.values() for buffer in flight.scratch]

    def _complete(self, flight: Flight) -> None:
        for buffer in (flight.src, flight.dst, *flight.scratch):
            buffer.flights.remove(flight)
        try:
            self.backend.wait(flight.dst.array)
        except BaseException as error:
            self._abandon([*flight.scratch, flight.dst])
            self._raise_lack_of_memory(error, flight.dst.name, flight.dst.spec)
            raise
        self.discard(*flight.scratch)

    def _ready(self, buffer: Buffer) -> None:
        """Fence before any use, and refuse what is broken or gone."""
        if buffer.flights:
            self.wait(buffer)
        if not buffer.live:
            self._require_open()
            if buffer.broken is not None:
                raise BrokenBufferError(
                    f"buffer {buffer.name} is lost: {buffer.broken}; load or zero it again"
                )
            raise ClosedError(f"buffer {buffer.name} is freed")

    # --- content --------------------------------------------------------------------------

    def write(
        self,
        buffer: Buffer,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> None:
        """Write (or add) 1-D values from element ``start`` on. See [Note: failure].

        Raises:
            SpecError: the values do not fit; nothing was changed.
        """
        self._ready(buffer)
        if buffer.spec.placement.is_split:
            raise SpecError(f"only whole buffers are written, not {buffer.spec}")
        each = values.values() if isinstance(values, Mapping) else (values,)
        for value in each:
            stop = start + int(value.shape[0])
            if len(value.shape) != 1 or start < 0 or stop > buffer.spec.numel:
                raise SpecError(
                    f"{buffer.name} holds elements 0 to {buffer.spec.numel}; values of shape "
                    f"{tuple(value.shape)} do not fit at {start}"
                )
        try:
            buffer.array = self.backend.write(buffer.array, buffer.spec, start, values, add=add)
        except BaseException as error:
            self._break(buffer, error)
            raise
        buffer.version += 1

    def read(self, buffer: Buffer, start: int, stop: int, *, copy: bool = False) -> Array:
        """Elements [start, stop) of a REPLICATED buffer; may alias it unless ``copy``."""
        self._ready(buffer)
        return self.backend.read(buffer.array, buffer.spec, start, stop, copy=copy)

    def scale(self, buffer: Buffer, factor: float) -> None:
        """Multiply the content. See [Note: failure]."""
        self._ready(buffer)
        try:
            buffer.array = self.backend.scale(buffer.array, buffer.spec, factor)
        except BaseException as error:
            self._break(buffer, error)
            raise
        buffer.version += 1

    def square_sum(self, buffer: Buffer, valid: Sequence[tuple[int, int]]) -> Any:
        """This process's share of the sum of squares over valid ranges of a device buffer."""
        self._ready(buffer)
        return self.backend.square_sum(buffer.array, buffer.spec, valid)

    def total(self, parts: Sequence[Any]) -> float:
        """The sum of shares over the whole mesh, the same float on every rank."""
        self._require_open()
        return self.backend.total(parts)

    def numpy_slots(self, buffer: Buffer, slots: Sequence[Slot]) -> list[Any]:
        """Values of slots of a REPLICATED buffer as numpy arrays that own their memory."""
        self._ready(buffer)
        flat = next(iter(self.backend.to_numpy(buffer.array).values()))
        return [flat[slot.start : slot.stop].reshape(slot.shape).copy() for slot in slots]

    def update(
        self,
        buffers: Mapping[str, Buffer],
        fn: Callable[[dict[str, Array]], Mapping[str, Array]],
    ) -> None:
        """Let ``fn`` consume arrays and give back their successors, by key.

        Raises:
            SpecError: a successor has other bytes than its buffer, or a key is unknown. The buffers
                given to ``fn`` are broken then, as with any error that ``fn`` raises.
        """
        for buffer in buffers.values():
            self._ready(buffer)
        try:
            successors = fn({key: buffer.array for key, buffer in buffers.items()})
            self._check_successors(buffers, successors)
        except BaseException as error:
            for buffer in buffers.values():
                self._break(buffer, error)
            raise
        for key, array in successors.items():
            buffers[key].array = array
            buffers[key].version += 1

    def _check_successors(
        self, buffers: Mapping[str, Buffer], successors: Mapping[str, Array]
    ) -> None:
        unknown = sorted(set(successors) - set(buffers))
        if unknown:
            raise SpecError(f"update gave back {unknown}; it was given {sorted(buffers)}")
        for key, array in successors.items():
            spec = buffers[key].spec
            want = self._nbytes(spec)
            for rank, nbytes in self.backend.nbytes(array).items():
                if nbytes != want:
                    raise SpecError(
                        f"update gave back {nbytes} bytes for {key!r} on rank {rank}; {spec} has "
                        f"{want}; keep numel and dtype"
                    )

    # --- giving up ------------------------------------------------------------------------

    def free(self, buffer: Buffer) -> None:
        """Give a buffer up; a freed or broken one is a no-op. Its storage may stay as a shell."""
        if not buffer.live:
            return
        if buffer.flights:
            self.wait(buffer)
        try:
            shell = self.backend.free(buffer.array)
        except BaseException:
            if not any(self.backend.nbytes(buffer.array).values()):
                self._forget(buffer)
            raise
        self._forget(buffer)
        if shell is not None:
            self._shells.keep(buffer, shell, self._nbytes(buffer.spec))

    def _forget(self, buffer: Buffer) -> None:
        buffer.live = False
        buffer.array = None
        del self._live[buffer.key]
        self._live_count[buffer.spec] -= 1
        self.ledger.close(buffer.key)

    def discard(self, *buffers: Buffer) -> None:
        """Free buffers that nobody else knows; one that fails is kept and freed later.

        Raises:
            whatever ``free`` failed with first; that buffer is in ``leftovers`` and counted.
        """
        problem: BaseException | None = None
        for buffer in buffers:
            try:
                self.free(buffer)
            except BaseException as error:
                problem = problem or error
                if buffer.live:
                    self.leftovers.append(buffer)
        if problem is not None:
            raise problem

    def _sweep(self) -> None:
        """Free what could not be freed before."""
        while self.leftovers:
            self.free(self.leftovers[-1])
            self.leftovers.pop()

    def _abandon(self, buffers: Sequence[Buffer]) -> None:
        """Free on the way out of a failure; a second failure must not hide the first."""
        with contextlib.suppress(Exception):
            self.discard(*buffers)

    def _abandon_flights(self, buffer: Buffer) -> None:
        """Complete what is in flight, whether or not it fails: nobody will read it."""
        with contextlib.suppress(Exception):
            self.wait(buffer)

    def _break(self, buffer: Buffer, error: BaseException) -> None:
        """See [Note: failure]."""
        if buffer.live:
            buffer.broken = f"{type(error).__name__}: {error}"
            self._forget(buffer)

    def close(self) -> None:
        """Free everything, shells too; idempotent. The backend stays open."""
        if self._closed:
            return
        while self._live:
            buffer = next(iter(self._live.values()))
            if buffer.flights:
                self._abandon_flights(buffer)
            else:
                self.free(buffer)
        self.leftovers.clear()
        self._shells.drop_all()
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this pool is closed; make a new manager")
        self.roles.require_member(self.backend.local_ranks)

    # --- the second witness ---------------------------------------------------------------

    def audit(self) -> Table:
        """Compare ledger and backend; returns measured bytes, memory kind -> category.

        Raises:
            AuditError: naming the buffer and both figures.
        """
        return self._witness.audit(self._live, self._shells)

    def measured_peak(self) -> Table:
        """Highest bytes that ``audit`` measured so far; complete only with ``check=True``."""
        return self._witness.peak()

    def _nbytes(self, spec: BufferSpec) -> int:
        nbytes = self._nbytes_cache.get(spec)
        if nbytes is None:
            nbytes = self._nbytes_cache[spec] = spec.local_nbytes(self.roles.shards)
        return nbytes


def _own_failure(problem: BaseException | None) -> dict[int, str]:
    return {} if problem is None else {-1: str(problem)}


def _nonzero(table: Mapping[str, Mapping[str, int]]) -> str:
    cells = [
        f"{memory} {category} {format_nbytes(nbytes)}"
        for memory, row in table.items()
        for category, nbytes in row.items()
        if nbytes
    ]
    return ", ".join(cells) or "nothing"
