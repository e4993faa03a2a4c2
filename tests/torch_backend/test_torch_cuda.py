"""What only a CUDA device can show: streams, pinned memory, NCCL. One device, one process.

A mesh of one rank needs no communicator, so NCCL is driven through a group of one rank that is made
here; its collectives run as they do among many.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch_support import bits, here, moved, value_of

from meshcore.backend import BackendOptions
from meshcore.dtypes import ALL_DTYPES
from meshcore.mesh import DeviceMesh
from meshcore.registry import create_backend
from meshcore.spec import BufferSpec, Memory, Placement

pytestmark = pytest.mark.gpu

N = 1 << 20
SHARD = BufferSpec(N, "float32", Placement.SHARDED)
WHOLE = BufferSpec(N, "float32", Placement.REPLICATED)
PARKED = replace(SHARD, memory=Memory.HOST)


@pytest.fixture
def backend():
    made = create_backend("torch", DeviceMesh([0]), options=BackendOptions(device="cuda"))
    yield made
    made.close()
    torch.cuda.synchronize()


@pytest.fixture
def group():
    from meshcore_torch.groups import Group

    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    made = dist.new_group([0], backend="cpu:gloo,cuda:nccl")
    yield Group((0,), (0,), made, 30.0)
    dist.destroy_process_group()


def busy(backend, milliseconds=20):
    """Keep the current stream busy, so that what does not wait for it reads old data."""
    torch.cuda._sleep(int(milliseconds * 1e6))
    return backend


def test_default_device_is_the_current_one():
    made = create_backend("torch", DeviceMesh([0]))
    assert made.device == torch.device("cuda", torch.cuda.current_device())
    assert made.zeros(WHOLE).is_cuda
    assert made.profile.name == "torch-nccl"
    made.close()


def test_host_memory_is_pinned_and_device_memory_keeps_no_shells(backend):
    array = backend.zeros(PARKED)
    assert array.is_pinned()
    assert not array.is_cuda
    assert backend.nbytes(array) == {0: 4 * N}
    assert backend.free(array) is None
    assert backend.nbytes(array) == {0: 0}


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_round_trip_through_host_memory(backend, dtype):
    spec, value = replace(SHARD, dtype=dtype), value_of(N, dtype)
    source = backend.empty(spec)
    source.copy_(torch.from_numpy(value.view(np.uint8)).view(source.dtype))
    held = replace(spec, memory=Memory.HOST)
    parked = moved(backend, source, spec, held)
    back = moved(backend, parked, held, spec)
    np.testing.assert_array_equal(bits(here(backend, back)), bits(value))


def test_move_waits_for_the_stream_that_wrote_its_source(backend):
    for _ in range(5):
        source, into = backend.zeros(SHARD), backend.zeros(PARKED)
        torch.cuda.synchronize()
        busy(backend)
        source.fill_(7.0)
        out = backend.redistribute(source, SHARD, PARKED, into=into)
        backend.wait(out)
        assert float(out.min()) == 7.0  # the host reads: wait has to stop it


def test_wait_orders_the_next_work_behind_the_move(backend):
    for _ in range(5):
        source = backend.zeros(PARKED)
        source.fill_(3.0)
        into = backend.zeros(SHARD)
        out = backend.redistribute(source, PARKED, SHARD, into=into)
        backend.wait(out)
        source.fill_(9.0)  # the upload is complete: the host may write its source again
        assert float(out.max()) == 3.0


def test_move_does_not_stop_the_host(backend):
    dst = replace(SHARD, dtype="bfloat16")
    source, into = backend.zeros(SHARD), backend.empty(dst)
    torch.cuda.synchronize()
    busy(backend, 200)
    out = backend.redistribute(source, SHARD, dst, into=into)
    backend.wait(out)
    still_running = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert still_running


def test_sums_and_norm(backend):
    src = BufferSpec(N, "bfloat16", Placement.PARTIAL)
    value = torch.randn(N).to(torch.bfloat16)
    source = backend.write(backend.zeros(src), src, 0, value)
    out = moved(backend, source, src, SHARD, scale=0.5)
    out = moved(backend, source, src, SHARD, into=out, scale=0.25, add=True)
    expected = value.float() * 0.5 + value.float() * 0.25
    np.testing.assert_array_equal(here(backend, out), expected.numpy())
    share = backend.square_sum(out, SHARD, [(5, N - 5)])
    assert share.is_cuda
    wanted = float(expected[5:-5].double().square().sum())
    np.testing.assert_allclose(backend.total([share]), wanted, rtol=1e-12)


def test_nccl_collectives_of_one_rank(group):
    from meshcore_torch import collectives, profile

    whole = torch.arange(64.0, device="cuda")
    expected = whole.clone()
    for work in collectives.start_gather(profile.ALL_GATHER.name, group, whole, 0):
        work.wait()
    for work in collectives.start_gather(profile.BROADCASTS.name, group, whole, 0):
        work.wait()
    for work in collectives.start_all_reduce(group, whole):
        work.wait()
    works, parts = collectives.start_exchange_shards(
        profile.ALL_TO_ALL.name, group, whole, torch.empty_like(whole), 0
    )
    for work in works:
        work.wait()
    assert torch.equal(parts[0], expected)
    assert torch.equal(whole, expected)


def test_no_memory_is_a_memory_error(backend):
    with pytest.raises(MemoryError, match="no memory"):
        backend.empty(BufferSpec(1 << 45, "float64", Placement.REPLICATED))
