"""The jax backend of meshcore: one controller for many devices, or several jax processes.

The module holds the two plugin hooks and imports jax only when a backend is made.
"""

from __future__ import annotations

import importlib.util

from meshcore import AxisRoles, BackendInfo, BackendOptions
from meshcore.backend import Backend
from meshcore.hookspecs import hookimpl

NAME = "jax"


def _probe() -> str | None:
    """Why the backend cannot run here, or None."""
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed; install it for your accelerator: pip install jax"
    return None


@hookimpl
def meshcore_backend_info() -> BackendInfo:
    """Describe the backend; starts nothing."""
    return BackendInfo(
        name=NAME,
        api=(1, 0),
        summary="jax arrays over all devices of one controller, or of several jax processes",
        probe=_probe,
    )


@hookimpl
def meshcore_create_backend(name: str, roles: AxisRoles, options: BackendOptions) -> Backend | None:
    """Make the jax backend; None where another backend is asked for."""
    if name != NAME:
        return None
    from meshcore_jax.backend import JaxBackend

    return JaxBackend(roles, options)
