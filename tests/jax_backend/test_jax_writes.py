"""What may be written, from which library and place, and what a read gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import open_with
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshcore import BufferSpec, Placement, SpecError

REPLICATED, PARTIAL = Placement.REPLICATED, Placement.PARTIAL


def held(backend, array):
    return {rank: values.astype(np.float64) for rank, values in backend.to_numpy(array).items()}


def expect_everywhere(backend, array, want):
    for values in held(backend, array).values():
        np.testing.assert_array_equal(values, want)


def test_a_range_is_written_and_the_rest_left_alone(backend):
    n = 6 * backend.roles.shards
    spec = BufferSpec(n, "float32", REPLICATED)
    array = open_with(backend, spec, np.arange(n))
    array = backend.write(array, spec, n - 2, np.array([50.0, 60.0]))
    array = backend.write(array, spec, 1, np.array([1.0, 1.0]), add=True)
    expect_everywhere(backend, array, [0, 2, 3, *range(3, n - 2), 50, 60])


def test_values_by_rank_reach_these_ranks_alone(backend):
    n = 4 * backend.roles.shards
    spec = BufferSpec(n, "float32", PARTIAL)
    array = backend.write(backend.zeros(spec), spec, 0, np.full(n, 2.0))
    first, *others = backend.local_ranks
    array = backend.write(array, spec, 1, {first: np.array([5.0, 7.0])})
    array = backend.write(array, spec, 2, {rank: np.array([10.0 + rank]) for rank in others})
    array = backend.write(array, spec, 0, {first: np.array([-0.0])}, add=True)
    values = held(backend, array)
    np.testing.assert_array_equal(values[first][:4], [2, 5, 7, 2])
    for rank in others:
        np.testing.assert_array_equal(values[rank][:4], [2, 2, 10 + rank, 2])


def test_adding_leaves_absent_ranks_bit_by_bit(square):
    spec = BufferSpec(4, "float32", PARTIAL)
    array = square.write(square.zeros(spec), spec, 0, np.array([-0.0, np.nan, 1, 2]))
    array = square.write(array, spec, 0, {3: np.ones(4)}, add=True)
    assert np.signbit(square.to_numpy(array)[0][0])
    assert not np.signbit(square.to_numpy(array)[3][0])


def test_nothing_is_written_for_no_rank_or_no_element(square):
    spec = BufferSpec(4, "float32", PARTIAL)
    array = square.write(square.zeros(spec), spec, 0, np.arange(4.0))
    array = square.write(array, spec, 0, {})
    array = square.write(array, spec, 4, np.zeros(0))
    expect_everywhere(square, array, [0, 1, 2, 3])


@pytest.mark.parametrize("given", [{0: np.zeros(1), 7: np.zeros(1)}, {7: np.zeros(1)}])
def test_ranks_of_others_are_refused(square, given):
    spec = BufferSpec(4, "float32", PARTIAL)
    with pytest.raises(SpecError, match=r"local ranks \[2, 0, 3, 1\]"):
        square.write(square.zeros(spec), spec, 0, given)


def test_values_by_rank_are_for_partial_buffers(square):
    spec = BufferSpec(4, "float32", REPLICATED)
    with pytest.raises(SpecError, match="partial"):
        square.write(square.zeros(spec), spec, 0, {0: np.zeros(1)})


# --- where values come from -------------------------------------------------------------------


def test_the_caller_may_change_its_array_afterwards(square):
    """jax takes over aligned numpy memory; the values must not follow it."""
    raw = np.zeros(4096 + 16, np.float32)
    offset = (-raw.ctypes.data % 64) // 4
    aligned = raw[offset : offset + 4096]
    spec = BufferSpec(4096, "float32", REPLICATED)
    array = square.write(square.zeros(spec), spec, 0, aligned)
    parts = BufferSpec(4096, "float32", PARTIAL)
    addends = square.write(square.zeros(parts), parts, 0, {0: aligned})
    aligned[:] = 9
    expect_everywhere(square, array, np.zeros(4096))
    expect_everywhere(square, addends, np.zeros(4096))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_values_are_cast(square, dtype):
    spec = BufferSpec(4, dtype, REPLICATED)
    wide = np.array([1, 2, -3, 4], np.float64)
    array = square.write(square.zeros(spec), spec, 0, wide)
    array = square.write(array, spec, 0, wide.astype(np.int64)[::-1], add=True)
    expect_everywhere(square, array, [5, -1, -1, 5])
    array = square.write(array, spec, 2, jnp.array([7, 8], jnp.float16))
    expect_everywhere(square, array, [5, -1, 7, 8])


def test_too_large_values_become_infinite_without_a_warning(square):
    spec = BufferSpec(2, "float16", REPLICATED)
    array = square.write(square.zeros(spec), spec, 0, np.array([1e30, -1e30]))
    expect_everywhere(square, array, [np.inf, -np.inf])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "float8_e5m2"])
def test_torch_tensors_are_taken(square, dtype):
    torch = pytest.importorskip("torch")
    values = torch.tensor([0, 1, 1, 0], dtype=torch.float32).to(getattr(torch, dtype))
    if dtype == "float32":
        values.requires_grad_()
    spec = BufferSpec(4, "float32", PARTIAL)
    array = square.write(square.zeros(spec), spec, 0, values)
    array = square.write(array, spec, 0, {0: values}, add=True)
    np.testing.assert_array_equal(held(square, array)[0], [0, 2, 2, 0])
    np.testing.assert_array_equal(held(square, array)[1], [0, 1, 1, 0])


def jax_places(backend):
    """jax arrays of 4 elements in many places."""
    devices = jax.devices()
    host = jax.sharding.SingleDeviceSharding(devices[0], memory_kind="pinned_host")
    other_mesh = Mesh(np.array(devices[:4]), ("x",))
    own = backend._binding.whole
    return {
        "uncommitted": None,
        "a device of the mesh": devices[backend.mesh.ids[-1]],
        "a device outside": devices[7],
        "host memory": host,
        "replicated on the mesh": own.sharding(REPLICATED),
        "sharded on the mesh": own.sharding(Placement.SHARDED),
        "replicated in another order": NamedSharding(other_mesh, PartitionSpec()),
        "sharded in another order": NamedSharding(other_mesh, PartitionSpec("x")),
    }


@pytest.mark.parametrize(
    "place",
    [
        "uncommitted",
        "a device of the mesh",
        "a device outside",
        "host memory",
        "replicated on the mesh",
        "sharded on the mesh",
        "replicated in another order",
        "sharded in another order",
    ],
)
def test_jax_arrays_are_taken_from_anywhere(square, place):
    where = jax_places(square)[place]
    values = jnp.arange(4, dtype=jnp.float32)
    if where is not None:
        values = jax.device_put(values, where)
    spec = BufferSpec(8, "float32", PARTIAL)
    array = square.write(square.zeros(spec), spec, 2, values)
    array = square.write(array, spec, 2, {0: values, 3: values}, add=True)
    whole = BufferSpec(8, "bfloat16", REPLICATED)
    narrow = square.write(square.zeros(whole), whole, 4, values)
    for rank, got in held(square, array).items():
        want = np.array([0, 0, 0, 1, 2, 3, 0, 0]) * (2 if rank in (0, 3) else 1)
        np.testing.assert_array_equal(got, want)
    expect_everywhere(square, narrow, [0, 0, 0, 0, 0, 1, 2, 3])
    np.testing.assert_array_equal(np.asarray(values), np.arange(4))  # neither consumed nor changed


def test_gradients_of_each_device_stay_on_their_devices(square, monkeypatch):
    """The usual case: {rank: a jax array on that rank's device} is no copy through the host."""
    from meshcore_jax import values as module

    def refuse(*_):
        raise AssertionError("a device array went through the host")

    monkeypatch.setattr(module, "host_copy", refuse)
    devices = jax.devices()
    given = {r: jax.device_put(jnp.full(4, r + 1.0), devices[r]) for r in square.local_ranks}
    spec = BufferSpec(4, "float32", PARTIAL)
    array = square.write(square.zeros(spec), spec, 0, given)
    for rank, got in held(square, array).items():
        np.testing.assert_array_equal(got, np.full(4, rank + 1.0))


# --- reading ----------------------------------------------------------------------------------


def test_a_read_is_a_copy_that_lives_on(backend):
    spec = BufferSpec(6 * backend.roles.shards, "float32", REPLICATED)
    array = open_with(backend, spec, np.arange(spec.numel))
    everything = backend.read(array, spec, 0, spec.numel)
    part = backend.read(array, spec, 2, 5, copy=True)
    backend.free(array)
    assert isinstance(part, jax.Array)
    assert set(part.sharding.device_set) == {jax.devices()[i] for i in backend.mesh.ids}
    np.testing.assert_array_equal(np.asarray(part), [2, 3, 4])
    np.testing.assert_array_equal(np.asarray(everything), np.arange(spec.numel))


def test_a_read_is_ready_for_programs_over_the_mesh(square):
    spec = BufferSpec(4, "float32", REPLICATED)
    weight = square.read(open_with(square, spec, [1, 2, 3, 4]), spec, 1, 4)
    batch = jax.device_put(jnp.ones((4, 3)), square._binding.whole.sharding(PARTIAL))
    np.testing.assert_array_equal(np.asarray(jax.jit(jnp.dot)(batch, weight)), [9, 9, 9, 9])


def test_empty_ranges_are_read(square):
    spec = BufferSpec(4, "float32", REPLICATED)
    assert square.read(square.zeros(spec), spec, 4, 4).shape == (0,)
