"""One rank, no process group: storage, writes, reads, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch_support import MESHES, PROFILES, moved, value_of
from torch_world import largest_allocations

from meshcore.backend import BackendOptions, SupportsLiveBytes, TransferProfile
from meshcore.dtypes import ALL_DTYPES, numpy_dtype
from meshcore.errors import BackendError, ClosedError, MeshError, SpecError
from meshcore.mesh import DeviceMesh
from meshcore.null import NullBackend
from meshcore.registry import create_backend
from meshcore.spec import AxisRoles, BufferSpec, Memory, MoveKind, Placement
from meshcore_torch import tensors
from meshcore_torch.profile import GLOO_PROFILE, check_profile

WHOLE = BufferSpec(8, "float32", Placement.REPLICATED)


@pytest.fixture
def backend():
    made = create_backend("torch", DeviceMesh([0]), options=BackendOptions(device="cpu"))
    yield made
    made.close()


def test_import_of_the_plugin_imports_no_torch():
    code = (
        "import sys, meshcore_torch as m; m.meshcore_backend_info(); "
        "print(sorted({'torch', 'jax'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_freed_array_is_empty_and_refuses_use(backend):
    array = backend.zeros(WHOLE)
    shell = backend.free(array)
    assert backend.nbytes(array) == {0: 0}
    assert backend.nbytes(shell) == {0: 32}
    for verb in (
        lambda: backend.read(array, WHOLE, 0, 1),
        lambda: backend.scale(array, WHOLE, 2.0),
        lambda: backend.write(array, WHOLE, 0, np.ones(1)),
        lambda: backend.square_sum(array, WHOLE, [(0, 8)]),
    ):
        with pytest.raises(ClosedError, match="rebind"):
            verb()
    backend.drop(shell)
    assert backend.nbytes(shell) == {0: 0}


def test_view_outlives_a_dropped_buffer(backend):
    array = backend.write(backend.zeros(WHOLE), WHOLE, 0, np.arange(8, dtype=np.float32))
    view = backend.read(array, WHOLE, 2, 5)
    backend.drop(backend.free(array))
    np.testing.assert_array_equal(view.numpy(), [2, 3, 4])


def test_shell_is_the_same_memory(backend):
    array = backend.zeros(WHOLE)
    pointer = array.data_ptr()
    again = backend.empty(WHOLE, backend.free(array))
    assert again.data_ptr() == pointer
    np.testing.assert_array_equal(backend.zeros(WHOLE, backend.free(again)).numpy(), np.zeros(8))


def test_profile_without_shells_keeps_none():
    options = BackendOptions(profile=replace(GLOO_PROFILE, shells=frozenset()), device="cpu")
    made = create_backend("torch", DeviceMesh([0]), options=options)
    assert made.free(made.zeros(WHOLE)) is None
    made.close()


def test_wrong_size_is_named(backend):
    with pytest.raises(SpecError, match="4 elements"):
        backend.read(torch.zeros(4), WHOLE, 0, 1)


def test_read_aliases_and_copy_does_not(backend):
    array = backend.zeros(WHOLE)
    view, copy = backend.read(array, WHOLE, 0, 8), backend.read(array, WHOLE, 0, 8, copy=True)
    backend.write(array, WHOLE, 0, np.ones(8, np.float32))
    assert view.tolist() == [1.0] * 8
    assert copy.tolist() == [0.0] * 8


def strange_values():
    base = np.arange(8, dtype=np.float32)
    read_only = base.copy()
    read_only.flags.writeable = False
    yield "plain", base
    yield "read only", read_only
    yield "reversed", base[::-1].copy()[::-1]
    yield "strided", np.repeat(base, 2)[::2]
    yield "broadcast", np.broadcast_to(np.float32(3), (8,))
    yield "big endian", base.astype(">f4")
    yield "bfloat16", base.astype(ml_dtypes.bfloat16)
    yield "float8", base.astype(ml_dtypes.float8_e4m3fn)
    yield "int64", base.astype(np.int64)
    yield "uint16", base.astype(np.uint16)
    yield "bool", base > 3
    yield "tensor", torch.arange(8.0)
    yield "tensor with gradient", torch.arange(8.0, requires_grad=True)
    yield "strided tensor", torch.arange(8.0).repeat_interleave(2)[::2]
    yield "bfloat16 tensor", torch.arange(8).to(torch.bfloat16)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("name", "value"), list(strange_values()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_write_takes_any_value(backend, name, value, add):
    array = backend.write(backend.zeros(WHOLE), WHOLE, 0, np.full(8, 10, np.float32))
    array = backend.write(array, WHOLE, 0, value, add=add)
    flat = value.detach().float().numpy() if isinstance(value, torch.Tensor) else value
    expected = flat.astype(np.float32) + (10 if add else 0)
    np.testing.assert_array_equal(backend.to_numpy(array)[0], expected, name)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_write_add_and_scale_in_every_dtype(backend, dtype):
    spec = BufferSpec(6, dtype, Placement.PARTIAL)
    first = np.array([0, 1, 1, 0, 2, 3]).astype(numpy_dtype(dtype))
    second = np.array([1, 1, 0, 0, 1, 5]).astype(numpy_dtype(dtype))
    array = backend.write(backend.zeros(spec), spec, 0, first)
    array = backend.write(array, spec, 0, second, add=True)
    array = backend.write(array, spec, 2, second[2:4].astype(np.float32), add=True)
    expected = np.add(first, second)
    expected[2:4] = np.add(expected[2:4], second[2:4])
    np.testing.assert_array_equal(backend.to_numpy(array)[0], expected)
    array = backend.scale(array, spec, 2.0)
    doubled = (expected.astype(np.float64) * 2).astype(numpy_dtype(dtype))
    np.testing.assert_array_equal(backend.to_numpy(array)[0], doubled)


def test_read_only_values_larger_than_a_block(backend):
    n = 150_001
    spec = BufferSpec(n, "float32", Placement.REPLICATED)
    value = value_of(n, "float32")
    value.flags.writeable = False
    array = backend.write(backend.zeros(spec), spec, 0, value)
    array = backend.write(array, spec, 0, value.astype(np.float64), add=True)
    np.testing.assert_array_equal(backend.to_numpy(array)[0], value + value)


def test_values_by_rank(backend):
    spec = replace(WHOLE, placement=Placement.PARTIAL)
    array = backend.zeros(spec)
    array = backend.write(array, spec, 0, {0: np.ones(8, np.float32)})
    array = backend.write(array, spec, 0, {})
    assert array.tolist() == [1.0] * 8
    with pytest.raises(SpecError, match=r"\[3\]"):
        backend.write(array, spec, 0, {3: np.ones(8, np.float32)})


def test_works_in_inference_mode_and_is_trainable_afterwards(backend):
    with torch.inference_mode():
        array = backend.zeros(WHOLE)
        array = backend.write(array, WHOLE, 0, torch.ones(8))
        shell = backend.free(array)
        array = backend.empty(WHOLE, shell)
        copy = backend.read(array, WHOLE, 0, 8, copy=True)
        share = backend.square_sum(array, WHOLE, [(0, 8)])
        assert backend.total([share]) == 8.0
    for tensor in (array, copy):
        assert not tensor.is_inference()
    backend.scale(array, WHOLE, 3.0)
    weight = torch.nn.Parameter(array)
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [2.0] * 8
    assert not array.requires_grad


def test_no_memory_is_a_memory_error(backend):
    for numel in (1 << 50, 1 << 61):
        with pytest.raises(MemoryError, match="no memory"):
            backend.empty(BufferSpec(numel, "float64", Placement.REPLICATED))


def test_square_sum_packs_many_small_ranges():
    random = np.random.default_rng(0)
    values = random.standard_normal(200_000).astype(np.float32)
    borders = np.sort(random.choice(200_000, 3_000, replace=False))
    ranges = [(int(a), int(b)) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    expected = sum(np.sum(np.square(values[a:b].astype(np.float64))) for a, b in ranges)
    masked = np.full_like(values, np.nan)
    for a, b in ranges:
        masked[a:b] = values[a:b]
    got = tensors.square_sum(torch.from_numpy(masked), ranges)
    assert got.dtype is torch.float64
    np.testing.assert_allclose(float(got), expected, rtol=1e-12)


def test_closed_backend_refuses_traffic_and_takes_memory_back(backend):
    array = backend.zeros(WHOLE)
    backend.close()
    for verb in (
        lambda: backend.empty(WHOLE),
        lambda: backend.exchange(b""),
        lambda: backend.total([]),
        lambda: backend.scale(array, WHOLE, 1.0),
    ):
        with pytest.raises(ClosedError):
            verb()
    backend.free(array)
    assert backend.nbytes(array) == {0: 0}


def test_backend_does_not_claim_to_see_everything(backend):
    assert not isinstance(backend, SupportsLiveBytes)


@pytest.mark.parametrize("profile", ["collectives", "messages"])
def test_null_predicts_the_scratch_of_every_form(profile):
    from meshcore.backend import scratch_specs

    roles = MESHES["four"].roles()
    null = NullBackend(roles, PROFILES[profile])
    src = BufferSpec(40, "bfloat16", Placement.PARTIAL)
    dst = BufferSpec(40, "float32", Placement.SHARDED)
    (scratch,) = scratch_specs(null.profile, roles, src, dst)
    assert scratch.dtype == "bfloat16"
    assert scratch.numel == {"collectives": 40, "messages": 30}[profile]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (BackendOptions(extra={"shm": True}), SpecError, "shm"),
        (BackendOptions(extra={"profile": "guess"}), SpecError, "'guess'"),
        (BackendOptions(extra={"profile": "measure"}, profile=GLOO_PROFILE), SpecError, "one"),
        (BackendOptions(device="tpu9"), BackendError, "tpu9"),
        (BackendOptions(device="meta"), BackendError, "meta"),
        (BackendOptions(profile=TransferProfile("numpy")), SpecError, "no form for gather"),
        (BackendOptions(profile=replace(GLOO_PROFILE, has_data=False)), SpecError, "no data"),
        (
            BackendOptions(device="cpu", profile=replace(GLOO_PROFILE, shells={Memory.HOST})),
            SpecError,
            "both or in none",
        ),
    ],
)
def test_bad_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        create_backend("torch", DeviceMesh([0]), options=options)


def test_unknown_forms_are_refused():
    forms = {**GLOO_PROFILE.forms, MoveKind.GATHER: GLOO_PROFILE.forms[MoveKind.REDUCE_SCATTER]}
    with pytest.raises(SpecError, match="gather by 'all_to_all'"):
        check_profile(replace(GLOO_PROFILE, forms=forms), on_cpu=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_cuda_is_named():
    with pytest.raises(BackendError, match="no CUDA device"):
        create_backend("torch", DeviceMesh([0]), options=BackendOptions(device="cuda"))


def test_more_ranks_need_a_process_group():
    with pytest.raises(MeshError, match="init_process_group"):
        create_backend("torch", DeviceMesh([0, 1]))


def test_destinations_can_be_made_by_the_backend(backend):
    src = replace(WHOLE, placement=Placement.SHARDED)
    dst = replace(WHOLE, dtype="bfloat16")
    source = backend.zeros(src)
    out = backend.redistribute(source, src, dst, into=None)
    assert backend.nbytes(out) == {0: 16}


def test_one_rank_moves_are_copies(backend):
    roles = AxisRoles(DeviceMesh([0]))
    assert roles.shards == 1
    src = BufferSpec(8, "bfloat16", Placement.PARTIAL)
    dst = replace(WHOLE, placement=Placement.SHARDED)
    source = backend.write(backend.zeros(src), src, 0, np.arange(8, dtype=np.float32))
    out = moved(backend, source, src, dst, scale=0.5)
    out = moved(backend, source, src, dst, into=out, scale=2.0, add=True)
    np.testing.assert_array_equal(backend.to_numpy(out)[0], np.arange(8) * 2.5)
    np.testing.assert_array_equal(backend.to_numpy(source)[0], np.arange(8))


@pytest.mark.parametrize("profile", ["collectives", "messages"])
def test_no_move_makes_a_temporary_that_grows_with_the_buffer(workers, profile):
    numel = 1 << 20
    mesh = MESHES["four permuted"]
    for largest, control in workers.run(largest_allocations, mesh, PROFILES[profile], numel):
        # The witness sees what it is there for: a full float32 copy inside float32 += bfloat16.
        assert control >= 4 * numel
        assert {move: n for move, n in largest.items() if n > 600_000} == {}
