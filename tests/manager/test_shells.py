"""Shells of freed buffers: reused, kept within a budget, and given up before memory is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from manager_profiles import STAGED, TORCH_LIKE
from manager_scenario import manager_on, start_values
from manager_support import make
from manager_witness import CountingBackend, FaultyCountingBackend

import meshcore as mc
from meshcore.testing import grid, line

MESH = grid((3, 0, 2, 1), 2, 2)


def reserved(manager: mc.ChunkManager) -> int:
    return sum(manager.memory().reserved["device"].values())


def test_shells_are_dropped_before_memory_is_missing():
    backend = FaultyCountingBackend(
        CountingBackend(MESH.roles(), STAGED), verbs=("zeros", "empty"), error=MemoryError
    )
    with manager_on(backend) as manager:
        manager.load(start_values())
        manager.access("a")
        manager.release("a")
        assert sum(manager.memory().reserved["device"].values()) > 0
        backend.fail_at = backend.calls
        manager.add_state("momentum")
        assert backend.fired == "zeros"
        assert sum(manager.memory().reserved["device"].values()) == 0
        manager.audit()
        backend.fired, backend.fail_at = None, backend.calls
        with pytest.raises(mc.DeviceMemoryError, match="param.0.grad_full") as caught:
            manager.accumulate_grad("a", np.ones(5, np.float32))
        assert caught.value.buffer == "param.0.grad_full"
        assert caught.value.nbytes == 4 * manager.plan.chunks[0].numel
        assert caught.value.report == manager.memory().used
        manager.accumulate_grad("a", np.ones(5, np.float32))


def test_a_released_chunk_leaves_a_shell_that_the_next_gather_takes():
    backend = FaultyCountingBackend(CountingBackend(line(0, 1).roles(), TORCH_LIKE))
    with make(backend, [mc.ParamSpec("w", (8,))]) as manager:
        manager.load_zeros()
        for _ in range(3):
            manager.access("w")
            # What loading left: the whole chunk that was cut into shards, before it was gathered.
            assert reserved(manager) == 0
            manager.release("w")
            assert reserved(manager) == 32
        alive = backend.live_nbytes()[0]
        assert alive == {mc.Memory.DEVICE: 16 + 32, mc.Memory.HOST: 0}
    assert reserved(manager) == 0


def test_shells_stay_within_four_times_the_largest():
    specs = [mc.ParamSpec(f"t{numel}", (numel,), group=f"g{numel}") for numel in range(1, 31)]
    with make(CountingBackend(line(0, 1).roles(), TORCH_LIKE), specs) as manager:
        manager.load_zeros()
        manager.access(*(spec.name for spec in specs))
        manager.release(*(spec.name for spec in specs))
        assert 3 * 120 < reserved(manager) <= 4 * 120
        manager.audit()


def test_shells_are_given_up_under_a_limit():
    specs = [mc.ParamSpec("a", (16,), group="a"), mc.ParamSpec("b", (12,), group="b")]
    limit = 32 + 24 + 64 + 8
    backend = CountingBackend(line(0, 1).roles(), TORCH_LIKE)
    with make(backend, specs, limits={mc.Memory.DEVICE: limit}) as manager:
        manager.load_zeros()
        for name in "abab":
            manager.access(name)
            held = sum(manager.memory().used["device"].values()) + reserved(manager)
            assert held <= limit
            assert backend.live_nbytes()[0][mc.Memory.DEVICE] == held
            manager.release(name)


def test_addends_that_only_some_ranks_open_never_push_out_other_shells():
    """Else ranks would disagree about which gathers need an agreement, and wait for ever."""
    specs = [mc.ParamSpec(f"t{numel}", (numel,), group=f"g{numel}") for numel in range(1, 31)]
    with make(CountingBackend(line(0, 1).roles(), TORCH_LIKE), specs) as manager:
        manager.load_zeros()
        names = [spec.name for spec in specs]
        for name in names:
            manager.access(name)
            manager.release(name)
        shells = manager.pool._shells
        whole = [s.spec for s in shells if s.spec.placement is mc.Placement.REPLICATED]
        assert whole
        for name in names:  # the gradients of this rank, which another one may not have
            manager.accumulate_grad(name, np.ones(manager.plan.find(name)[1].shape, np.float32))
        manager.zero_grads()
        assert any(s.spec.placement is mc.Placement.PARTIAL for s in shells)
        assert [s.spec for s in shells if s.spec.placement is mc.Placement.REPLICATED] == whole
        manager.audit()


@pytest.mark.parametrize("shells", [frozenset(mc.Memory), frozenset()], ids=["shells", "none"])
def test_ranks_agree_about_memory_only_while_it_is_new(shells):
    specs = [mc.ParamSpec("a", (16,), group="a"), mc.ParamSpec("b", (12,), group="b")]
    backend = CountingBackend(line(0, 1).roles(), replace(TORCH_LIKE, shells=shells))
    with make(backend, specs) as manager:
        manager.load_zeros()
        manager.pool._one_process = False  # as if there were another process to agree with
        asked = []
        agree = manager.pool.agree
        manager.pool.agree = lambda problem: asked.append(problem) or agree(problem)
        for turn in range(3):
            for name in ("a", "b"):
                manager.access(name)
                manager.accumulate_grad(name, np.ones(manager.plan.find(name)[1].shape, np.float32))
                manager.release(name)
            manager.reduce_grads()
            manager.zero_grads()
            if turn == 0:
                assert asked
                asked.clear()
        assert asked == []
