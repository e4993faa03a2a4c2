"""What the core costs: access + release of a chunk against the bare collective under it.

Usage: ``python benchmarks/chunk_ops.py [--json] [--rounds 40]``

For chunks of 64 KiB, 4 MiB and 64 MiB, on torch (gloo, 2 ranks) and on JAX (4 emulated CPU
devices), three contenders gather the same shards into a whole buffer and give it up:

- ``manager``: ``manager.access`` and ``manager.release``;
- ``backend``: the backend's gather alone, in the form that it takes for this size;
- ``framework``: the framework's plain call, into a buffer that is there already on torch
  (``all_gather_into_tensor``), as a resharding ``jit`` on JAX.

They take turns, in an order that rotates from round to round, and all ranks meet before each turn;
the clock is that of the first rank. On ``null``, which moves nothing, what is left is the core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import meshcore as mc
from meshcore.backend import scratch_specs
from meshcore.layout import format_nbytes

CHUNK_NBYTES = (64 << 10, 4 << 20, 64 << 20)
TORCH_RANKS, JAX_DEVICES = 2, 4
FRAMEWORKS = {
    "torch_gloo_2_ranks": "torch, gloo, 2 ranks",
    "jax_4_devices": "JAX, 4 emulated devices",
}
NULL_CALLS, NULL_REPEATS = 1000, 15


def rounds_for(nbytes: int, rounds: int) -> int:
    """Fewer rounds for the largest chunks, more for the smallest."""
    return max(5, rounds * 4 if nbytes < 1 << 20 else rounds // 2 if nbytes > 16 << 20 else rounds)


def loaded_manager(backend: Any, nbytes: int) -> mc.ChunkManager:
    """One chunk of fp32 that fills its bytes exactly, holding 0, 1, 2, ..."""
    numel = nbytes // 4
    plan = mc.plan_chunks([mc.ParamSpec("w", (numel,))], shards=backend.roles.shards)
    manager = mc.ChunkManager(backend, plan)
    manager.load({"w": np.arange(numel, dtype=np.float32)})
    return manager


def access_and_release(manager: mc.ChunkManager) -> Callable[[], None]:
    """The first contender."""

    def turn() -> None:
        manager.access("w")
        manager.release("w")

    return turn


def bare_gather(backend: Any, manager: mc.ChunkManager) -> Callable[[], None]:
    """The backend's gather of the manager's own shards, without pool, ledger or chunks.

    Where the backend reuses storage, destination and scratch are made once, beforehand.
    """
    home = manager.chunk_of("w").home()
    spec = mc.BufferSpec(home.spec.numel, home.spec.dtype, mc.Placement.REPLICATED)
    scratch = [
        backend.empty(s) for s in scratch_specs(backend.profile, backend.roles, home.spec, spec)
    ]
    if backend.profile.preallocates:
        into = backend.empty(spec)

        def turn() -> None:
            nonlocal into
            into = backend.redistribute(home.array, home.spec, spec, into=into, scratch=scratch)
            backend.wait(into)

    else:

        def turn() -> None:
            whole = backend.redistribute(home.array, home.spec, spec, into=None)
            backend.wait(whole)
            backend.free(whole)

    return turn


def take_turns(
    contenders: Mapping[str, Callable[[], None]], *, rounds: int, meet: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of every turn, by contender; two rounds of warming up are left out."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            meet()
            start = time.perf_counter()
            contenders[name]()
            taken = time.perf_counter() - start
            if number >= 2:
                seconds[name].append(taken)
    return seconds


def summary(nbytes: int, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Medians, minima and the manager's ratios to the others."""
    row: dict[str, Any] = {"chunk_nbytes": nbytes, "rounds": len(seconds["manager"])}
    for name, taken in seconds.items():
        row[name] = {"median_seconds": statistics.median(taken), "min_seconds": min(taken)}
    for name in ("backend", "framework"):
        row[f"manager_to_{name}"] = {
            figure: row["manager"][f"{figure}_seconds"] / row[name][f"{figure}_seconds"]
            for figure in ("median", "min")
        }
    return row


def measure_torch(rank: int, meeting: str, rounds: int) -> None:
    """One rank of the torch measurement; the first prints the result."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=TORCH_RANKS)
    try:
        backend = mc.create_backend("torch", mc.DeviceMesh(range(TORCH_RANKS)))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        rows = []
        for nbytes in CHUNK_NBYTES:
            with loaded_manager(backend, nbytes) as manager:
                shard = torch.from_numpy(backend.to_numpy(manager.chunk_of("w").home().array)[rank])
                whole = torch.empty(nbytes // 4)
                contenders = {
                    "manager": access_and_release(manager),
                    "backend": bare_gather(backend, manager),
                    "framework": lambda whole=whole, shard=shard: gather(whole, shard),
                }
                rounds_here = rounds_for(nbytes, rounds)
                seconds = take_turns(contenders, rounds=rounds_here, meet=dist.barrier)
                rows.append(summary(nbytes, seconds))
        backend.close()
        if rank == 0:
            print(json.dumps(rows))
    finally:
        dist.destroy_process_group()


def start_torch_ranks(rounds: int) -> None:
    """All ranks of the torch measurement."""
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "rendezvous").as_uri()
        processes.spawn(measure_torch, (meeting, rounds), nprocs=TORCH_RANKS)


def measure_jax(rounds: int) -> None:
    """The JAX measurement; this process sees the emulated devices."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.asarray(jax.devices()[:JAX_DEVICES]), ("shard",))
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    backend = mc.create_backend("jax", mc.DeviceMesh(range(JAX_DEVICES)))
    rows = []
    for nbytes in CHUNK_NBYTES:
        with loaded_manager(backend, nbytes) as manager:
            home = manager.chunk_of("w").home().array

            def plain(home: Any = home) -> None:
                whole = gather(home)
                whole.block_until_ready()
                whole.delete()

            contenders = {
                "manager": access_and_release(manager),
                "backend": bare_gather(backend, manager),
                "framework": plain,
            }
            seconds = take_turns(contenders, rounds=rounds_for(nbytes, rounds), meet=lambda: None)
            rows.append(summary(nbytes, seconds))
    backend.close()
    print(json.dumps(rows))


def measure_null() -> list[dict[str, Any]]:
    """CPU seconds of access + release where nothing moves: the core alone."""
    backend = mc.create_backend("null", mc.DeviceMesh(range(4)))
    rows = []
    for nbytes in CHUNK_NBYTES:
        with loaded_manager(backend, nbytes) as manager:
            turn = access_and_release(manager)
            seconds = []
            for _ in range(NULL_REPEATS):
                start = time.process_time()
                for _ in range(NULL_CALLS):
                    turn()
                seconds.append((time.process_time() - start) / NULL_CALLS)
            row = {"median_seconds": statistics.median(seconds), "min_seconds": min(seconds)}
            rows.append({"chunk_nbytes": nbytes, **row})
    backend.close()
    return rows


def in_own_process(worker: str, rounds: int, env: Mapping[str, str]) -> Any:
    """What a worker of this file prints; each framework gets a fresh process."""
    command = [sys.executable, __file__, "--worker", worker, "--rounds", str(rounds)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **env}
    )
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    names = ("meshcore-train", "numpy", "torch", "jax", "jaxlib")
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def measure_all(rounds: int) -> dict[str, Any]:
    """Everything, one framework after the other."""
    from meshcore_jax.launch import emulated_cpu_env

    return {
        "machine": machine(),
        "null": measure_null(),
        "torch_gloo_2_ranks": in_own_process("torch", rounds, {"OMP_NUM_THREADS": "1"}),
        "jax_4_devices": in_own_process("jax", rounds, emulated_cpu_env(JAX_DEVICES)),
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    """The figures for people."""
    for key, title in FRAMEWORKS.items():
        table = Table(title=f"{title}: milliseconds, median (minimum)", title_justify="left")
        for head in ("chunk", "manager", "backend", "framework", "to backend", "to framework"):
            table.add_column(head, justify="right", no_wrap=True)
        for row in result[key]:
            cells = [
                f"{row[n]['median_seconds'] * 1e3:.2f} ({row[n]['min_seconds'] * 1e3:.2f})"
                for n in ("manager", "backend", "framework")
            ]
            ratios = [
                f"{row[n]['median']:.2f} ({row[n]['min']:.2f})"
                for n in ("manager_to_backend", "manager_to_framework")
            ]
            table.add_row(format_nbytes(row["chunk_nbytes"]), *cells, *ratios)
        console.print(table)
    facts, row = result["machine"], result["null"][1]
    console.print(
        f"The core alone, on null: {row['median_seconds'] * 1e6:.1f} us of CPU an access + release "
        f"(minimum {row['min_seconds'] * 1e6:.1f})."
    )
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    console.print(f"{facts['cores']} cores, Python {facts['python']}, {versions}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Cost of the core over bare collectives.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each contender at 4 MiB")
    parser.add_argument("--worker", choices=("torch", "jax"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker == "torch":
        start_torch_ranks(arguments.rounds)
    elif arguments.worker == "jax":
        measure_jax(arguments.rounds)
    elif arguments.json:
        print(json.dumps(measure_all(arguments.rounds), indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 100)
        show(measure_all(arguments.rounds), console)
