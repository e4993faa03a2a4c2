"""The numpy backend: all ranks of a mesh in one process, written to be obviously right.

It is the embedded default and the reference for every other backend: each move is spelled out over
explicit ranks, sums run in mesh order, and an array that was given up refuses to be used again.
"""

from __future__ import annotations

from meshcore.backend import BACKEND_API, Backend, BackendInfo, BackendOptions
from meshcore.errors import SpecError
from meshcore.hookspecs import hookimpl
from meshcore.reference._backend import NUMPY_PROFILE as NUMPY_PROFILE
from meshcore.reference._backend import NumpyBackend as NumpyBackend
from meshcore.reference._pieces import Piece as Piece
from meshcore.reference._pieces import Pieces as Pieces
from meshcore.reference._pieces import RankArrays as RankArrays
from meshcore.spec import AxisRoles


@hookimpl
def meshcore_backend_info() -> BackendInfo:
    """Describe the numpy backend."""
    return BackendInfo("numpy", BACKEND_API, "all ranks in one process; the reference")


@hookimpl
def meshcore_create_backend(name: str, roles: AxisRoles, options: BackendOptions) -> Backend | None:
    """Make a numpy backend; ``options.profile`` makes it account like another one."""
    if name != "numpy":
        return None
    if options.extra:
        raise SpecError(f"the numpy backend has no options of its own; got {sorted(options.extra)}")
    return NumpyBackend(roles, options.profile)
