"""Starting jax for meshcore: emulated CPU devices, and several processes; imports it when used."""

from __future__ import annotations

import os
import re
import sys

from meshcore import BackendError, MeshError

_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_MIN_THREADS = 32


def emulated_cpu_env(devices: int) -> dict[str, str]:
    """Environment variables of a new process that shall see ``devices`` CPU devices.

    They are to be laid over ``os.environ``; other flags in its ``XLA_FLAGS`` are kept.

    Raises:
        MeshError: fewer than one device.

    >>> emulated_cpu_env(4)["JAX_PLATFORMS"]
    'cpu'
    """
    if devices < 1:
        raise MeshError(f"emulate 1 or more CPU devices, not {devices}")
    flags = re.sub(rf"{_DEVICES_FLAG}=\S*", "", os.environ.get("XLA_FLAGS", "")).split()
    # Each device of a collective waits in a thread of XLA's pool, whose default size is the number
    # of cores: with fewer threads than collectives in flight need, the process blocks for ever.
    threads = max(_MIN_THREADS, 4 * devices, int(os.environ.get("NPROC", "0") or 0))
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags, f"{_DEVICES_FLAG}={devices}"]),
        "NPROC": str(threads),
    }


def emulate_cpu(devices: int) -> None:
    """Let this process see ``devices`` CPU devices or more; call it before jax is first used.

    A larger number that was asked for before (here or in ``XLA_FLAGS``) is kept, and if jax runs
    already with as many CPU devices or more, nothing is changed.

    Raises:
        MeshError: fewer than one device, or jax runs already with fewer.
    """
    if devices >= 1:
        asked = re.search(rf"{_DEVICES_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
        devices = max(devices, int(asked.group(1)) if asked else 0)
    env = emulated_cpu_env(devices)
    if "jax" in sys.modules and not _configure(devices):
        return
    os.environ.update(env)


def _configure(devices: int) -> bool:
    """Tell a jax that is imported already; False if it runs already with enough devices."""
    import jax

    try:
        # jax refuses this once its client is there, and says so in no other public way.
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        have = len(jax.devices("cpu"))
        if have >= devices:
            return False
        raise MeshError(
            f"{devices} emulated CPU devices were asked for, but jax has started with {have}; call "
            "emulate_cpu before the first use of jax, or start the process with the environment of "
            f"emulated_cpu_env({devices})"
        ) from error
    jax.config.update("jax_platforms", "cpu")
    return True


def initialize_distributed(
    coordinator: str,
    processes: int,
    *,
    process: int,
    emulated_devices: int | None = None,
    timeout_seconds: float = 300.0,
) -> None:
    """Join this process to the others; to be called before jax is first used.

    Args:
        coordinator: "host:port" of process 0.
        processes: how many there are.
        process: which one this is, from 0.
        emulated_devices: CPU devices of each process, where there is no accelerator.
        timeout_seconds: how long to wait for the others.

    Raises:
        BackendError: jax has started already, or the others did not come.
        MeshError: as for ``emulate_cpu``.
    """
    if emulated_devices is not None:
        emulate_cpu(emulated_devices)
    import jax

    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=processes,
            process_id=process,
            initialization_timeout=max(1, int(timeout_seconds)),
        )
    except (RuntimeError, ValueError) as error:
        raise BackendError(
            f"process {process} of {processes} could not join {coordinator}: {error}; call this "
            "once, before the first use of jax, with the same coordinator everywhere"
        ) from error
