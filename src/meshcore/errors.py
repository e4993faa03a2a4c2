"""Every error that meshcore raises: a ``MeshcoreError`` and the builtin that a caller would expect.

A message says what was asked, what is allowed and what to do; the classes exist so that a caller
can tell the cases apart without reading it.
"""

from __future__ import annotations

from collections.abc import Mapping


class MeshcoreError(Exception):
    """Base of all errors raised by meshcore and its backends."""


# --- meshes -----------------------------------------------------------------------------------


class MeshError(MeshcoreError, ValueError):
    """A mesh, axis or role that cannot be: duplicate ids, a wrong shape, an unknown axis."""


class NotInMeshError(MeshcoreError, RuntimeError):
    """A verb was called by a rank that is not part of the mesh."""


class MeshNameError(MeshcoreError, LookupError):
    """A mesh name that is unknown, or already taken."""


# --- specs, plans and moves -------------------------------------------------------------------


class SpecError(MeshcoreError, ValueError):
    """A parameter or buffer description that cannot be, or a move that the seam does not know."""


class PlanMismatchError(MeshcoreError, RuntimeError):
    """The ranks of one mesh do not hold the same plan."""


class DtypeMismatchError(MeshcoreError, TypeError):
    """A value has another dtype than its tensor, and no cast was allowed."""


class ShapeMismatchError(MeshcoreError, ValueError):
    """A value has another shape than its tensor."""


class UnsupportedDtypeError(MeshcoreError, TypeError):
    """A dtype that this backend cannot hold or move; raised before any traffic, on every rank."""


class GroupClosedError(MeshcoreError, RuntimeError):
    """A tensor was registered in a group that takes no more tensors."""


class DuplicateNameError(MeshcoreError, ValueError):
    """Two tensors of one plan have the same name or alias."""


class UnknownTensorError(MeshcoreError, LookupError):
    """No tensor of the plan has this name or alias."""


# --- life of a tensor -------------------------------------------------------------------------


class StateTransitionError(MeshcoreError, RuntimeError):
    """A move that the table of tensor states does not know; nothing was changed."""


class NotGatheredError(MeshcoreError, RuntimeError):
    """A tensor was read or written in place while its chunk was not gathered."""


class ChunkBusyError(MeshcoreError, RuntimeError):
    """A chunk cannot be released: one of its tensors is being computed with."""


class FrozenTensorError(MeshcoreError, ValueError):
    """A gradient was offered for a tensor that takes none."""


class UnusedGradientError(MeshcoreError, RuntimeError):
    """Tensors had no gradient on some rank and were not marked unused; raised on all ranks."""


class NoGradientError(MeshcoreError, RuntimeError):
    """A gradient was asked for before it was reduced."""


class BrokenBufferError(MeshcoreError, RuntimeError):
    """A buffer was lost half-way through an operation that consumes its input; reload it."""


class ClosedError(MeshcoreError, RuntimeError):
    """A verb was called on something that is closed."""


class ValueUnavailableError(MeshcoreError, RuntimeError):
    """The backend keeps bytes and no data (``null``), so it has no value to give."""


# --- memory -----------------------------------------------------------------------------------


class LedgerError(MeshcoreError, RuntimeError):
    """A buffer was opened twice, or closed without being open."""


class AuditError(MeshcoreError, AssertionError):
    """Ledger, states and backend disagree."""


class DeviceMemoryError(MeshcoreError, MemoryError):
    """There is no memory for a buffer; nothing was changed, on any rank.

    One exception: where a backend runs out of memory inside a sum into a live gradient, that
    gradient is lost and says so (``BrokenBufferError``) when it is used.

    Attributes:
        buffer: name of the buffer that was wanted.
        nbytes: its bytes on one rank.
        report: the ledger at that moment, memory kind -> category -> bytes of one rank.
    """

    def __init__(
        self,
        message: str,
        *,
        buffer: str = "",
        nbytes: int = 0,
        report: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        super().__init__(message)
        self.buffer = buffer
        self.nbytes = nbytes
        self.report = dict(report or {})


# --- backends ---------------------------------------------------------------------------------


class BackendError(MeshcoreError, RuntimeError):
    """A backend failed in an operation; the cause is chained."""


class PeerError(BackendError, ConnectionError):
    """A peer is gone or did not arrive in time; the group of ranks cannot be used any more."""


class BackendNotFoundError(MeshcoreError, LookupError):
    """No installed backend has this name."""


class BackendConflictError(MeshcoreError, RuntimeError):
    """Two distributions offer a backend of one name."""


class BackendLoadError(MeshcoreError, ImportError):
    """A backend is installed but does not load; the original error is the cause."""


class BackendIncompatibleError(MeshcoreError, RuntimeError):
    """A backend was built for another version of the backend API."""


class MissingExtraError(MeshcoreError, ImportError):
    """A feature needs an optional dependency that is not installed."""
