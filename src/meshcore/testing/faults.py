"""Fault injection: fail the k-th call of a backend, before its effect or after it.

for k in itertools.count():
    backend = FaultyBackend(make_backend(), fail_at=k, when="after")
    try:
        scenario(backend)
    except InjectedFaultError:
        check_that_nothing_leaked(backend)
    if not backend.fired:
        break
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from meshcore.backend import Array, Backend
from meshcore.errors import BackendError, SpecError
from meshcore.spec import BufferSpec
from meshcore.testing.wrappers import ForwardingBackend

VERBS: tuple[str, ...] = (
    "empty",
    "zeros",
    "redistribute",
    "write",
    "read",
    "scale",
    "square_sum",
    "total",
    "wait",
    "free",
    "drop",
    "nbytes",
    "to_numpy",
    "exchange",
)
"""What can be made to fail: every verb but ``close``."""

_T = TypeVar("_T")


class InjectedFaultError(BackendError):
    """The failure that was asked for; never raised outside tests."""


class FaultyBackend(ForwardingBackend):
    """Counts calls and fails one of them.

    Args:
        inner: does the work.
        fail_at: index, from 0, of the counted call that fails; None only counts.
        when: "before" the call has any effect, or "after" it had. A verb that must leave everything
            as it was (``empty``, ``zeros``, a move that does not add) works on storage of its own
            then, which is given up again: ``into`` is untouched, as the seam asks. One that may
            consume its input has consumed it, and its result is given up.
        verbs: which verbs are counted.
        error: the class to raise; ``MemoryError`` for a lack of memory. It gets one string.

    Attributes:
        calls: counted calls so far.
        fired: the verb that failed, or None.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        fail_at: int | None = None,
        when: Literal["before", "after"] = "before",
        verbs: Iterable[str] = VERBS,
        error: type[Exception] = InjectedFaultError,
    ) -> None:
        super().__init__(inner)
        self.fail_at = fail_at
        self.when = when
        self.verbs = frozenset(verbs)
        self.error = error
        self.calls = 0
        self.fired: str | None = None
        unknown = sorted(self.verbs - set(VERBS))
        if unknown:
            raise SpecError(f"{unknown} cannot be made to fail; verbs are {', '.join(VERBS)}")
        if when not in ("before", "after"):
            raise SpecError(f"a call fails 'before' or 'after' its effect, not {when!r}")

    def empty(self, spec: BufferSpec, into: Array | None = None) -> Array:
        """Forward or fail."""
        return self._make("empty", self.inner.empty, spec, into)

    def zeros(self, spec: BufferSpec, into: Array | None = None) -> Array:
        """Forward or fail."""
        return self._make("zeros", self.inner.zeros, spec, into)

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
        """Forward or fail."""
        fails = self._counts("redistribute")
        if fails and not add and into is not None:
            into = self.inner.empty(dst)
        out = self.inner.redistribute(
            array, src, dst, into=into, scratch=scratch, scale=scale, add=add
        )
        return self._lose("redistribute", out) if fails else out

    def write(
        self,
        array: Array,
        spec: BufferSpec,
        start: int,
        values: Array | Mapping[int, Array],
        *,
        add: bool = False,
    ) -> Array:
        """Forward or fail."""
        fails = self._counts("write")
        out = self.inner.write(array, spec, start, values, add=add)
        return self._lose("write", out) if fails else out

    def scale(self, array: Array, spec: BufferSpec, factor: float) -> Array:
        """Forward or fail."""
        fails = self._counts("scale")
        out = self.inner.scale(array, spec, factor)
        return self._lose("scale", out) if fails else out

    def read(
        self, array: Array, spec: BufferSpec, start: int, stop: int, *, copy: bool = False
    ) -> Array:
        """Forward or fail."""
        return self._plain("read", lambda: self.inner.read(array, spec, start, stop, copy=copy))

    def square_sum(self, array: Array, spec: BufferSpec, valid: Sequence[tuple[int, int]]) -> Any:
        """Forward or fail."""
        return self._plain("square_sum", lambda: self.inner.square_sum(array, spec, valid))

    def total(self, parts: Sequence[Any]) -> float:
        """Forward or fail."""
        return self._plain("total", lambda: self.inner.total(parts))

    def wait(self, array: Array) -> None:
        """Forward or fail."""
        self._plain("wait", lambda: self.inner.wait(array))

    def free(self, array: Array) -> Array | None:
        """Forward or fail; after its effect the storage is gone and there is no shell."""
        fails = self._counts("free")
        shell = self.inner.free(array)
        if fails:
            if shell is not None:
                self.inner.drop(shell)
            raise self._failure("free")
        return shell

    def drop(self, shell: Array) -> None:
        """Forward or fail."""
        self._plain("drop", lambda: self.inner.drop(shell))

    def nbytes(self, array: Array) -> Mapping[int, int]:
        """Forward or fail."""
        return self._plain("nbytes", lambda: self.inner.nbytes(array))

    def to_numpy(self, array: Array) -> Mapping[int, Any]:
        """Forward or fail."""
        return self._plain("to_numpy", lambda: self.inner.to_numpy(array))

    def exchange(self, payload: bytes | Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Forward or fail."""
        return self._plain("exchange", lambda: self.inner.exchange(payload))

    # --- how it fails -----------------------------------------------------------------------

    def _counts(self, verb: str) -> bool:
        """Count a call; raise before its effect, or say that it fails after it."""
        if verb not in self.verbs:
            return False
        index, self.calls = self.calls, self.calls + 1
        if index != self.fail_at:
            return False
        if self.when == "before":
            raise self._failure(verb)
        return True

    def _failure(self, verb: str) -> Exception:
        self.fired = verb
        return self.error(f"injected: call {self.fail_at} ({verb}) fails {self.when} its effect")

    def _plain(self, verb: str, call: Callable[[], _T]) -> _T:
        fails = self._counts(verb)
        out = call()
        if fails:
            raise self._failure(verb)
        return out

    def _make(
        self,
        verb: str,
        make: Callable[[BufferSpec, Array | None], Array],
        spec: BufferSpec,
        into: Array | None,
    ) -> Array:
        if self._counts(verb):
            return self._lose(verb, make(spec, None))
        return make(spec, into)

    def _lose(self, verb: str, array: Array) -> Array:
        """Give the effect's result up, and fail."""
        self.inner.wait(array)
        shell = self.inner.free(array)
        if shell is not None:
            self.inner.drop(shell)
        raise self._failure(verb)
