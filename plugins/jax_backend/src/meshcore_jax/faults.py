"""What jax raises, as what the core expects: MemoryError, PeerError, BackendError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from meshcore import BackendError, PeerError

_MEMORY_SIGNS = ("RESOURCE_EXHAUSTED", "Out of memory")
_PEER_SIGNS = (
    "Gloo",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "Connection closed",
    "Connection reset",
    "heartbeat",
)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Run ``what``; errors of the jax runtime come out as typed ones, with the cause chained.

    Raises:
        MemoryError: there was no memory.
        PeerError: another process is gone or late.
        BackendError: any other failure of the runtime.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        typed = _typed(what, error)
        if typed is None:
            raise
        raise typed from error


def _typed(what: str, error: Exception) -> Exception | None:
    text = str(error)
    if any(sign in text for sign in _MEMORY_SIGNS):
        return MemoryError(f"{what}: {text}")
    if any(sign in text for sign in _PEER_SIGNS):
        return PeerError(
            f"{what} failed because another jax process is gone or late: {text}; restart all "
            "processes of the mesh"
        )
    # ValueError is also what a wrong argument raises; that is a bug of the caller, shown as it is.
    return BackendError(f"{what} failed: {text}") if isinstance(error, RuntimeError) else None
