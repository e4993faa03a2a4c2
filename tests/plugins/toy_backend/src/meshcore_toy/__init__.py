"""A toy backend: all ranks in one process, an array is one 2-D ndarray with a row for each rank.

Written from the documentation, with public names only.
"""

from __future__ import annotations

from meshcore import AxisRoles, SpecError
from meshcore.backend import Backend, BackendInfo, BackendOptions
from meshcore.hookspecs import hookimpl


@hookimpl
def meshcore_backend_info() -> BackendInfo:
    """Describe the backend; numpy is imported when one is made."""
    return BackendInfo("toy", (1, 0), "rows of one ndarray", probe=_probe)


@hookimpl
def meshcore_create_backend(name: str, roles: AxisRoles, options: BackendOptions) -> Backend | None:
    """Make one; it has no options of its own."""
    from meshcore_toy.backend import ToyBackend

    if options.extra:
        raise SpecError(f"the toy backend has no options; got {sorted(options.extra)}")
    return ToyBackend(roles)


def _probe() -> str | None:
    try:
        import numpy  # noqa: F401  # whether it is there is the question
    except ImportError as error:
        return f"numpy is missing ({error})"
    return None
