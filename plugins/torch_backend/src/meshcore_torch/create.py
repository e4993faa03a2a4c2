"""Decide rank, device and profile, and make the backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshcore import BackendError, MeshError, SpecError
from meshcore.backend import AxisRoles, BackendOptions, TransferProfile
from meshcore_torch.backend import TorchBackend
from meshcore_torch.groups import GroupSet
from meshcore_torch.measure import measured_profile
from meshcore_torch.profile import GLOO_PROFILE, NCCL_PROFILE, check_profile


def create(roles: AxisRoles, options: BackendOptions) -> TorchBackend:
    """Make a torch backend for a mesh of global ranks.

    Every process of the world calls this, in the same order, with equal arguments: making
    communicators is collective, also for processes outside the mesh. A mesh of one rank needs no
    process group. With ``extra={"profile": "measure"}`` on the CPU, the form of sums over shards is
    chosen by measuring, which takes about a second; the first rank of the mesh decides for all.

    Args:
        roles: the mesh and its axes.
        options: ``device`` is "cpu", "cuda" or "cuda:1"; the default is the CPU where the default
            process group knows no CUDA, or there is no CUDA, and else the current CUDA device.

    Raises:
        MeshError: the mesh names ranks that this world does not have.
        SpecError: an unknown option, or a profile that does not fit.
        BackendError: the device is not here.
        PeerError: other processes of the world did not come.
    """
    asked = _check_extra(options)
    world = _world()
    _check_ranks(roles, world)
    device = _device(options.device, world)
    is_cuda = device.type == "cuda"
    default = NCCL_PROFILE if is_cuda else GLOO_PROFILE
    profile = check_profile(options.profile or default, on_cpu=not is_cuda)
    groups = GroupSet(
        roles,
        world.rank,
        transport="cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        timeout_seconds=options.timeout_seconds,
    )
    backend = TorchBackend(roles, world.rank, device=device, groups=groups, profile=profile)
    if asked and not is_cuda and backend.local_ranks:
        try:
            backend.profile = _measured(backend, groups, profile)
        except BaseException:
            backend.close()
            raise
    return backend


@dataclass(frozen=True)
class _World:
    rank: int
    size: int
    transport: str | None  # of the default process group; None without one


def _world() -> _World:
    if not (dist.is_available() and dist.is_initialized()):
        return _World(0, 1, None)
    return _World(dist.get_rank(), dist.get_world_size(), str(dist.get_backend()))


def _check_extra(options: BackendOptions) -> bool:
    """Whether the profile is to be measured."""
    unknown = sorted(set(options.extra) - {"profile"})
    if unknown:
        raise SpecError(f"the torch backend has no options {unknown}; it has ['profile']")
    asked = options.extra.get("profile")
    if asked not in (None, "measure"):
        raise SpecError(
            f"option 'profile' is {asked!r}; it can be 'measure'; pass a stored profile as "
            "BackendOptions(profile=...)"
        )
    if asked and options.profile is not None:
        raise SpecError("a stored profile was passed and a measured one was asked for; take one")
    return asked is not None


def _check_ranks(roles: AxisRoles, world: _World) -> None:
    beyond = [rank for rank in roles.mesh.ids if rank >= world.size]
    if not beyond:
        return
    if world.transport is None:
        raise MeshError(
            f"the mesh names rank {beyond[0]} and this process is alone, as rank 0: "
            "torch.distributed is not initialised; call torch.distributed.init_process_group "
            "first, or start with torchrun"
        )
    raise MeshError(
        f"the mesh names rank {beyond[0]} and the world has {world.size} ranks, 0 to "
        f"{world.size - 1}; start more processes or make a smaller mesh"
    )


def _device(asked: str | None, world: _World) -> torch.device:
    if asked is None:
        speaks_cuda = world.transport is None or "nccl" in world.transport
        asked = "cuda" if speaks_cuda and torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise BackendError(f"device {asked!r} is none that torch knows; {error}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise BackendError(f"device {asked!r} is not supported; the torch backend has cpu and cuda")
    if not torch.cuda.is_available():
        raise BackendError(
            f"device {asked!r} was asked for and this torch finds no CUDA device; use 'cpu', or a "
            "build of torch with CUDA on a machine that has one"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def _measured(backend: TorchBackend, groups: GroupSet, profile: TransferProfile) -> TransferProfile:
    mesh = backend.mesh
    if mesh.size == 1:
        return profile
    times = b"" if backend.roles.shards == 1 else measured_profile(profile, groups).encode()
    answers = backend.exchange(times)
    return TransferProfile.from_json(answers[mesh.ids[0]].decode()) if times else profile
