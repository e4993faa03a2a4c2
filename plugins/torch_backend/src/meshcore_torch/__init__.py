"""The torch backend of meshcore: one process a rank, gloo for CPU tensors and NCCL for CUDA ones.

Importing this module imports no torch; that happens when a backend is made.
"""

from __future__ import annotations

from meshcore.backend import BACKEND_API, AxisRoles, Backend, BackendInfo, BackendOptions
from meshcore.hookspecs import hookimpl
from meshcore_torch.profile import GLOO_PROFILE, NCCL_PROFILE

__all__ = [
    "GLOO_PROFILE",
    "NCCL_PROFILE",
    "meshcore_backend_info",
    "meshcore_create_backend",
]


@hookimpl
def meshcore_backend_info() -> BackendInfo:
    """Describe the torch backend."""
    return BackendInfo(
        "torch", BACKEND_API, "one process a rank: gloo on CPU, NCCL on CUDA", probe=_probe
    )


@hookimpl
def meshcore_create_backend(name: str, roles: AxisRoles, options: BackendOptions) -> Backend | None:
    """Make a torch backend; see ``meshcore_torch.create.create``."""
    if name != "torch":
        return None
    from meshcore_torch.create import create

    return create(roles, options)


def _probe() -> str | None:
    """None if torch is here and can talk to peers, or why not."""
    import torch.distributed as dist

    if dist.is_available():
        return None
    return "this build of torch has no torch.distributed, so it can hold one rank only"
