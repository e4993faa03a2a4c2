"""The hooks of a backend plugin: a module that an entry point of ``meshcore.backends`` names."""

from __future__ import annotations

import pluggy

from meshcore.backend import Backend, BackendInfo, BackendOptions
from meshcore.spec import AxisRoles

PROJECT_NAME = "meshcore"
ENTRY_POINT_GROUP = "meshcore.backends"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec
def meshcore_backend_info() -> BackendInfo:  # type: ignore[empty-body]  # pluggy specs have no body
    """Describe the backend; must be cheap and start nothing."""


@hookspec(firstresult=True)
def meshcore_create_backend(name: str, roles: AxisRoles, options: BackendOptions) -> Backend | None:
    """Make the backend called ``name`` for a mesh with its axis roles, or return None."""
