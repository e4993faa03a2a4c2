"""Making, measuring and closing a backend, and its errors."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest
from conftest import MESHES, open_with

import meshcore as mc
from meshcore import BufferSpec, Memory, Placement
from meshcore.testing import grid, line
from meshcore_jax.faults import translated
from meshcore_jax.grid import Grid

SHARDED, REPLICATED, PARTIAL = Placement.SHARDED, Placement.REPLICATED, Placement.PARTIAL


def test_it_is_found_by_name():
    backend = mc.create_backend("jax", mc.DeviceMesh([1, 0]), shard_axis="shard")
    assert backend.name == "jax"
    assert backend.local_ranks == (1, 0)
    assert "float64" not in backend.profile.dtypes
    backend.close()


@pytest.mark.parametrize(
    ("case", "count"),
    [
        (line(0), 0),
        (line(0, 1, 2), 1),
        (grid(range(4), 1, 4), 1),
        (grid(range(4), 4, 1), 1),
        (grid(range(6), 2, 3), 5),
    ],
)
def test_groups_are_the_rank_sets_in_use(make, case, count):
    backend = make(case)
    assert backend.group_count == count
    backend.close()
    backend.close()
    assert backend.group_count == 0


def test_ids_without_a_device_are_named(make):
    with pytest.raises(mc.MeshError, match=r"\[8, 11\].*there are 8 .*emulate_cpu\(12\)"):
        make(line(11, 0, 8))


def test_unknown_options_are_refused(make):
    with pytest.raises(mc.SpecError, match=r"\['async', 'typo'\].*'sync'"):
        make(line(0), extra={"typo": 1, "async": True, "sync": True})


def test_an_unknown_platform_is_named(make):
    with pytest.raises(mc.BackendError, match="abacus"):
        make(line(0), device="abacus")


def test_a_closed_backend_gives_memory_back_and_does_nothing_else(square):
    spec = BufferSpec(4, "float32", REPLICATED)
    array = square.zeros(spec)
    square.close()
    for verb in (
        lambda: square.zeros(spec),
        lambda: square.write(array, spec, 0, np.zeros(1)),
        lambda: square.read(array, spec, 0, 1),
        lambda: square.to_numpy(array),
        lambda: square.exchange(b""),
        lambda: square.total([]),
        lambda: square.wait(array),
        lambda: square.redistribute(array, spec, BufferSpec(4, "float32", SHARDED), into=None),
    ):
        with pytest.raises(mc.ClosedError, match="create_backend"):
            verb()
    assert square.free(array) is None
    assert array.is_deleted()


# --- bytes ------------------------------------------------------------------------------------


def test_bytes_follow_the_spec_and_end_with_free(backend):
    shards = backend.roles.shards
    for placement in Placement:
        for memory in Memory:
            spec = BufferSpec(6 * shards, "float16", placement, memory)
            array = backend.empty(spec)
            assert backend.nbytes(array) == dict.fromkeys(
                backend.local_ranks, spec.local_nbytes(shards)
            )
            assert backend.free(array) is None
            assert not any(backend.nbytes(array).values())
            backend.free(array)


def test_live_bytes_are_those_of_arrays_that_were_handed_out(square):
    def live():
        rows = square.live_nbytes()
        assert set(rows) == set(square.local_ranks)
        (row,) = {(row[Memory.DEVICE], row[Memory.HOST]) for row in rows.values()}
        return row

    gc.collect()
    assert live() == (0, 0)
    near, far = BufferSpec(8, "float32", SHARDED), BufferSpec(8, "float32", SHARDED, Memory.HOST)
    first = open_with(square, near, np.arange(8))
    assert live() == (16, 0)
    second = square.redistribute(first, near, far, into=None)
    assert live() == (16, 16)
    first = square.scale(first, near, 2.0)
    assert live() == (16, 16)
    square.free(second)
    assert live() == (16, 0)
    successor = first * 2
    assert live() == (16, 0)
    square.nbytes(successor)  # as the pool does with what an optimizer gives back
    assert live() == (32, 0)
    del first
    gc.collect()
    assert live() == (16, 0)


def test_freed_storage_is_gone(square):
    spec = BufferSpec(8, "float32", SHARDED)
    array = square.zeros(spec)
    square.free(array)
    with pytest.raises(RuntimeError, match="deleted"):
        square.redistribute(array, spec, BufferSpec(8, "float32", REPLICATED), into=None)


# --- what cannot be ---------------------------------------------------------------------------


def test_wide_dtypes_need_x64(square, make):
    spec = BufferSpec(4, "float64", REPLICATED)
    with pytest.raises(mc.UnsupportedDtypeError, match="float64.*jax_enable_x64"):
        square.zeros(spec)
    with jax.enable_x64(True):
        wide = make(MESHES["2x2"])
        assert {"float64", "int64", "uint64"} <= set(wide.profile.dtypes)
        value = 1.0 + 2.0**-40
        parts = BufferSpec(4, "float64", PARTIAL)
        addends = open_with(wide, parts, np.full(4, value))
        total = wide.redistribute(addends, parts, spec, into=None, scale=0.25)
        np.testing.assert_array_equal(wide.to_numpy(total)[0], np.full(4, value), strict=True)
        assert wide.total([wide.square_sum(total, spec, [(0, 4)])]) == 4 * value**2


def test_more_elements_than_int32_are_refused(square):
    with pytest.raises(mc.SpecError, match="2147483647.*smaller chunks"):
        square.zeros(BufferSpec(2**31, "int8", SHARDED))


def test_a_platform_without_pinned_memory_says_so(square):
    mesh = square._binding.whole.mesh
    bare = Grid(mesh, 2, ("device", "unpinned_host"))
    assert bare.sharding(SHARDED).memory_kind == "device"
    with pytest.raises(mc.SpecError, match=r"pinned_host.*'unpinned_host'.*Memory\.DEVICE"):
        bare.sharding(SHARDED, Memory.HOST)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.", MemoryError),
        ("UNKNOWN: Gloo AllGather failed: Connection closed by peer", mc.PeerError),
        ("DEADLINE_EXCEEDED: GetKeyValue() timed out", mc.PeerError),
        ("INTERNAL: something else", mc.BackendError),
    ],
)
def test_errors_of_the_runtime_get_types(text, kind):
    with pytest.raises(kind, match="a gather") as caught, translated("a gather"):
        raise jax.errors.JaxRuntimeError(text)
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_wrong_arguments_are_not_dressed_up():
    with pytest.raises(ValueError, match="^plain$"), translated("a gather"):
        raise ValueError("plain")
    with pytest.raises(mc.PeerError), translated("a gather"):
        raise ValueError("UNKNOWN: Gloo ReduceScatter failed")


# --- control plane ----------------------------------------------------------------------------


def test_exchange_speaks_for_each_rank(square):
    assert square.exchange(b"x") == dict.fromkeys((2, 0, 3, 1), b"x")
    said = {rank: bytes([rank]) * 5 for rank in square.local_ranks}
    assert square.exchange(said) == said
    with pytest.raises(mc.SpecError, match=r"\[0, 9\].*\[0, 1, 2, 3\]"):
        square.exchange({0: b"", 9: b""})


# --- with the manager -------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["2x2", "three_of_them", "one"])
def test_a_training_step_keeps_ledger_and_devices_equal(make, mesh):
    optax = pytest.importorskip("optax")
    backend = make(MESHES[mesh])
    specs = [mc.ParamSpec("w", (3, 5)), mc.ParamSpec("b", (5,)), mc.ParamSpec("v", (40,))]
    plan = mc.plan_chunks(specs, shards=backend.roles.shards, capacity_numel=32)
    start = {spec.name: np.arange(spec.numel).reshape(spec.shape) / 8 for spec in specs}
    tx = optax.adam(0.1)
    moments = jax.jit(lambda p, g, m, v: _adam(tx, optax, p, g, m, v), donate_argnums=(0, 2, 3))

    def step(_, buffers):
        names = ("param", "grad", "exp_avg", "exp_avg_sq")
        param, exp_avg, exp_avg_sq = moments(*(buffers[name] for name in names))
        return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    with mc.ChunkManager(backend, plan, check=True) as manager:
        manager.load({name: value.astype(np.float32) for name, value in start.items()})
        manager.add_state("exp_avg")
        manager.add_state("exp_avg_sq")
        for _ in range(2):
            for spec in specs:
                with manager.gathered(spec.name) as values:
                    manager.accumulate_grad(spec.name, values[spec.name] * 2)
            manager.reduce_grads()
            manager.update(step)
            manager.zero_grads()
        manager.audit()
        got = {spec.name: manager.to_numpy(spec.name) for spec in specs}
    want = {name: value.astype(np.float32) for name, value in start.items()}
    for name, value in want.items():
        moment = {"m": np.zeros_like(value), "v": np.zeros_like(value)}
        for _ in range(2):
            value, moment["m"], moment["v"] = _adam(
                tx, optax, value, 2 * value, moment["m"], moment["v"]
            )
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)
    assert not any(sum(row.values()) for row in backend.live_nbytes().values())


def _adam(tx, optax, param, grad, exp_avg, exp_avg_sq):
    """The first step of Adam again and again: enough to have moments to consume."""
    state = tx.init(param)
    state = (state[0]._replace(mu=exp_avg, nu=exp_avg_sq), *state[1:])
    updates, state = tx.update(grad, state, param)
    return optax.apply_updates(param, updates), state[0].mu, state[0].nu
