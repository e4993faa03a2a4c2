"""One of two jax processes with two devices each: ``jax_process.py SCENARIO PROCESS PORT``."""

from __future__ import annotations

import os
import sys

import numpy as np

import meshcore as mc
from meshcore import BufferSpec, Memory, Placement
from meshcore.spec import reduce_path
from meshcore.testing import grid, line
from meshcore_jax.backend import JaxBackend
from meshcore_jax.launch import initialize_distributed

SHARDED, REPLICATED = Placement.SHARDED, Placement.REPLICATED
PARTIAL, SHARDED_PARTIAL = Placement.PARTIAL, Placement.SHARDED_PARTIAL
TIMEOUT_SECONDS = 40.0


def make(case, timeout_seconds=TIMEOUT_SECONDS):
    return JaxBackend(case.roles(), mc.BackendOptions(timeout_seconds=timeout_seconds))


def expect(backend, array, want):
    """Every local rank holds ``want(rank)``, and nobody else is here."""
    held = backend.to_numpy(array)
    assert set(held) == set(backend.local_ranks)
    for rank, values in held.items():
        np.testing.assert_array_equal(values.astype(np.float64), want(rank), f"rank {rank}")


def shard(backend, rank, whole):
    size = len(whole) // backend.roles.shards
    start = backend.roles.shard_index(rank) * size
    return np.asarray(whole)[start : start + size]


def every_verb(case):
    backend = make(case)
    roles, n = backend.roles, 6 * case.roles().shards
    full, split = BufferSpec(n, "float32", REPLICATED), BufferSpec(n, "float32", SHARDED)
    content = np.arange(n) * 2.0
    array = backend.write(backend.zeros(full), full, 0, np.arange(n))
    array = backend.write(array, full, 0, np.arange(n, dtype=np.float32), add=True)
    shards = backend.redistribute(array, full, split, into=None)
    expect(backend, shards, lambda rank: shard(backend, rank, content))
    narrow = BufferSpec(n, "bfloat16", REPLICATED)
    gathered = backend.redistribute(shards, split, narrow, into=None)
    np.testing.assert_array_equal(
        np.asarray(backend.read(gathered, narrow, 1, 5)).astype(float), content[1:5]
    )
    assert backend.nbytes(gathered) == dict.fromkeys(backend.local_ranks, 2 * n)

    # Gradients: what one process opens and writes, the other may not have at all.
    parts = BufferSpec(n, "bfloat16", PARTIAL)
    addends = backend.zeros(parts)
    if 0 in backend.local_ranks:
        backend.free(backend.zeros(BufferSpec(n, "float16", PARTIAL)))
        for _ in range(3):
            addends = backend.write(addends, parts, 0, {0: np.ones(n)}, add=True)
    expect(backend, addends, lambda rank: np.full(n, 3.0 if rank == 0 else 0.0))
    addends = backend.write(addends, parts, 2, np.ones(2), add=True)
    world = backend.mesh.size
    total = np.full(n, 3.0)
    total[2:4] += world
    src, reduced = parts, addends
    for placement in reduce_path(roles, SHARDED)[1:]:
        dst = BufferSpec(n, "float32", placement)
        reduced, src = backend.redistribute(reduced, src, dst, into=None, scale=0.5), dst
    factor = 0.25 if roles.replicas > 1 else 0.5
    expect(backend, reduced, lambda rank: factor * shard(backend, rank, total))
    summed = backend.redistribute(addends, parts, full, into=array, scale=2.0, add=True)
    assert array.is_deleted()
    expect(backend, summed, lambda rank: content + 2 * total)

    square = float(np.sum((factor * total[1:]) ** 2))
    share = backend.square_sum(reduced, split, [(1, n)])
    assert backend.total([share, share]) == 2 * square
    far = BufferSpec(n, "float32", SHARDED, Memory.HOST)
    away = backend.redistribute(reduced, split, far, into=None)
    away = backend.scale(away, far, 2.0)
    expect(backend, away, lambda rank: 2 * factor * shard(backend, rank, total))
    alive = backend.live_nbytes()
    assert set(alive) == set(backend.local_ranks)
    assert {row[Memory.HOST] for row in alive.values()} == {4 * n // roles.shards}

    for step in range(4):
        said = backend.exchange({r: b"%d at %d" % (r, step) for r in backend.local_ranks})
        assert list(said) == list(backend.mesh.ids)
        assert said == {r: b"%d at %d" % (r, step) for r in backend.mesh.ids}
    long = backend.exchange(bytes(3_000_000) if 0 in backend.local_ranks else b"")
    assert {r: len(v) for r, v in long.items()} == {
        r: 3_000_000 if r in (0, 1) else 0 for r in backend.mesh.ids
    }
    backend.close()


def outside_the_mesh(process):
    backend = make(line(1, 0))
    spec = BufferSpec(4, "float32", REPLICATED)
    if process == 0:
        assert backend.local_ranks == (1, 0)
        assert backend.exchange(b"alone") == {1: b"alone", 0: b"alone"}
        expect(backend, backend.zeros(spec), lambda rank: np.zeros(4))
    else:
        assert backend.local_ranks == ()
        assert backend.group_count == 0
        for verb in (lambda: backend.zeros(spec), lambda: backend.exchange(b"")):
            try:
                verb()
            except mc.NotInMeshError:
                continue
            raise AssertionError("a verb worked outside the mesh")
    backend.close()


def training(case):
    """The manager over two processes, with every open audited."""
    specs = [mc.ParamSpec("w", (5, 3)), mc.ParamSpec("b", (3,), "bfloat16")]
    backend = make(case)
    plan = mc.plan_chunks(specs, shards=backend.roles.shards)
    with mc.ChunkManager(backend, plan, check=True) as manager:
        manager.load({"w": np.ones((5, 3), np.float32), "b": np.zeros(3, np.float32)}, cast=True)
        with manager.gathered("w") as values:
            np.testing.assert_array_equal(np.asarray(values["w"]), np.ones((5, 3)))
        own = {rank: np.full((5, 3), rank, np.float32) for rank in backend.local_ranks}
        manager.accumulate_grad("w", own)
        if 0 in backend.local_ranks:
            manager.accumulate_grad("b", np.ones(3, np.float32))
        manager.reduce_grads()
        np.testing.assert_array_equal(np.asarray(manager.grad("w")), np.full((5, 3), 1.5))
        np.testing.assert_array_equal(np.asarray(manager.grad("b")).astype(float), np.full(3, 0.5))
        np.testing.assert_allclose(manager.grad_norm(), np.sqrt(15 * 2.25 + 3 * 0.25), rtol=1e-6)
        manager.update(lambda chunk, arrays: {"param": arrays["param"] * 2})
        np.testing.assert_array_equal(manager.to_numpy("w"), np.full((5, 3), 2.0))
        manager.audit()
    backend.close()


def main(scenario, process, port):
    initialize_distributed(
        f"127.0.0.1:{port}",
        2,
        process=process,
        emulated_devices=2,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    if scenario == "verbs":
        every_verb(line(0, 1, 2, 3))
        every_verb(grid((2, 0, 3, 1), 2, 2))  # both processes in every group
        outside_the_mesh(process)
    elif scenario == "training":
        every_verb(line(3, 0, 1))  # processes of unequal size
        training(grid((0, 1, 2, 3), 2, 2))
    elif process == 1:
        make(line(0, 1, 2, 3)).exchange(b"last words")
        os._exit(7)
    else:
        backend = make(line(0, 1, 2, 3), timeout_seconds=3.0)
        backend.exchange(b"still here")
        try:
            backend.exchange(b"anybody?")
        except mc.PeerError as error:
            print(error, flush=True)
        os._exit(0)  # jax itself would end this process once its heartbeats fail
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
