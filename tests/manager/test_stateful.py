"""Random walks of a manager beside a model in plain numpy, and beside a dry run on null."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import precondition, rule
from manager_machine import ANY, KINDS, Machine
from manager_support import by_rank, equal, random_values

import meshcore as mc
from meshcore.dtypes import numpy_dtype
from meshcore.errors import ValueUnavailableError
from meshcore.state import TRANSITIONS


class Walk(Machine):
    """Every verb, in any order, with arguments that fit and arguments that do not."""

    # --- values ---------------------------------------------------------------------------

    @rule(numbers=st.lists(ANY, min_size=1, max_size=3), seed=ANY)
    def load(self, numbers: list[int], seed: int) -> None:
        chosen = {self.pick(number).name: (self.pick(number), number) for number in numbers}
        values = {self.name(*one): random_values(one[0], seed) for one in chosen.values()}
        assert self.both(lambda manager: manager.load(values)) is None
        for (spec, _), value in zip(chosen.values(), values.values(), strict=True):
            self.model.load(spec.name, value)

    @rule(seed=ANY)
    def load_all(self, seed: int) -> None:
        values = {spec.name: random_values(spec, seed) for spec in self.real.plan.specs}
        assert self.both(lambda manager: manager.load(values)) is None
        for name, value in values.items():
            self.model.load(name, value)

    @rule(number=ANY, seed=ANY, add=st.booleans())
    def change(self, number: int, seed: int, add: bool) -> None:
        spec = self.pick(number)
        value = random_values(spec, seed)
        verb = "add" if add else "write"
        result = self.both(lambda m: getattr(m, verb)({self.name(spec, number): value}))
        if self.model.chunk_loaded(spec.name):
            assert result is None
            if add:
                value = np.add(self.model.values[spec.name], value)
            self.model.load(spec.name, value)
        else:
            assert isinstance(result, mc.NotGatheredError)

    @rule(number=ANY)
    def read(self, number: int) -> None:
        spec = self.pick(number)
        result = self.both(lambda manager: manager.read(self.name(spec, number)))
        if self.model.readable(spec.name):
            equal(result, self.model.seen(spec.name))
        else:
            assert isinstance(result, mc.NotGatheredError)

    @rule(number=ANY)
    def to_numpy(self, number: int) -> None:
        spec = self.pick(number)
        result = self.both(lambda manager: manager.to_numpy(spec.name))
        if self.model.chunk_loaded(spec.name):
            assert result.dtype == numpy_dtype(spec.dtype)
            equal(result, self.model.values[spec.name])
        else:
            assert isinstance(result, mc.NotGatheredError)

    # --- gather, release, states ----------------------------------------------------------

    @rule(number=ANY, waits=st.booleans())
    def access(self, number: int, waits: bool) -> None:
        name = self.pick(number).name

        def call(manager: mc.ChunkManager) -> None:
            if waits:
                manager.access(name)
            else:
                manager.access_async(name)

        result = self.both(call)
        self.was_async |= not waits
        if self.model.chunk_loaded(name):
            assert result is None
            self.model.chunk(name).accessed = True
        else:
            assert isinstance(result, mc.NotGatheredError)

    @rule(number=ANY)
    def release(self, number: int) -> None:
        name = self.pick(number).name
        result = self.both(lambda manager: manager.release(name))
        if self.model.busy(name):
            assert isinstance(result, mc.ChunkBusyError)
        else:
            assert result is None
            self.model.chunk(name).accessed = False

    @rule(number=ANY, releases=st.booleans())
    def scope(self, number: int, releases: bool) -> None:
        name = self.pick(number).name

        def call(manager: mc.ChunkManager) -> Any:
            with manager.gathered(name) as values:
                value = None
                with contextlib.suppress(ValueUnavailableError):
                    value = np.array(values[name], np.float64)
                if releases and not self.model.busy(name):
                    manager.release(name)
                return value

        result = self.both(call)
        if self.model.values.get(name) is None or self.model.states[name] is mc.TensorState.FREE:
            assert isinstance(result, mc.NotGatheredError)
            if self.model.chunk_loaded(name) and self.model.busy(name):
                self.model.chunk(name).accessed = True
        else:
            equal(result, self.model.seen(name))
            if self.model.busy(name):
                self.model.chunk(name).accessed = True
            elif releases:
                self.model.chunk(name).accessed = False

    @rule(number=ANY, asked=st.sampled_from(mc.TensorState))
    def set_state(self, number: int, asked: mc.TensorState) -> None:
        name = self.pick(number).name
        result = self.both(lambda manager: manager.set_state(name, asked))
        if asked in TRANSITIONS[self.model.states[name]]:
            assert result is None
            self.model.states[name] = asked
        else:
            assert isinstance(result, mc.StateTransitionError)

    # --- gradients ------------------------------------------------------------------------

    @rule(number=ANY, seed=ANY, which=st.sets(st.integers(0, 3), min_size=1))
    def accumulate(self, number: int, seed: int, which: set[int]) -> None:
        spec = self.pick(number)
        fp32 = mc.ParamSpec(spec.name, spec.shape)
        whole = by_rank(self.backend, lambda p: random_values(fp32, seed + p))
        value = {r: v for i, (r, v) in enumerate(whole.items()) if i in which} or whole
        first = self.backend.local_ranks[0]

        def call(manager: mc.ChunkManager) -> None:
            ranks = value if manager is self.real else {first: whole[first]}
            manager.accumulate_grad(self.name(spec, number), ranks)

        result = self.both(call)
        if spec.takes_grad:
            assert result is None
            self.model.accumulate(spec.name, sum(value.values()))
        else:
            assert isinstance(result, mc.FrozenTensorError)

    @rule(divisor=st.sampled_from([None, 1.0, 0.5]))
    def reduce(self, divisor: float | None) -> None:
        assert self.both(lambda manager: manager.reduce_grads(divisor)) is None
        self.model.reduce(float(self.backend.mesh.size) if divisor is None else divisor)

    @rule(number=ANY)
    def grad(self, number: int) -> None:
        spec = self.pick(number)
        result = self.both(lambda manager: manager.grad(spec.name))
        if not spec.takes_grad:
            assert isinstance(result, mc.FrozenTensorError)
        elif spec.name in self.model.grads:
            np.testing.assert_allclose(result, self.model.grads[spec.name], rtol=1e-5, atol=1e-5)
        elif self.model.chunk(spec.name).pending:
            assert isinstance(result, mc.NoGradientError)
        else:
            assert result is None

    @rule()
    def norm(self) -> None:
        squares = sum(float(np.sum(g.astype(np.float64) ** 2)) for g in self.model.grads.values())
        assert math.isclose(
            self.both(lambda m: m.grad_norm()), squares**0.5, rel_tol=1e-5, abs_tol=1e-4
        )
        assert not self.both(lambda m: m.found_nonfinite())

    @rule(factor=st.sampled_from([0.5, 2.0, -1.0]))
    def scale(self, factor: float) -> None:
        assert self.both(lambda manager: manager.scale_grads(factor)) is None
        self.model.grads = {name: factor * grad for name, grad in self.model.grads.items()}

    @rule()
    def zero(self) -> None:
        assert self.both(lambda manager: manager.zero_grads()) is None
        self.model.zero()

    # --- optimizer and memory -------------------------------------------------------------

    @precondition(lambda self: self.moments < 2)
    @rule(dtype=st.sampled_from(["float32", "bfloat16"]), memory=st.sampled_from(mc.Memory))
    def add_state(self, dtype: str, memory: mc.Memory) -> None:
        state = f"m{self.moments}"
        self.moments += 1
        assert self.both(lambda manager: manager.add_state(state, dtype, memory)) is None
        self.model.add_state(state, dtype, memory)

    @precondition(lambda self: self.model.can_update())
    @rule()
    def update(self) -> None:
        def step(chunk: mc.ChunkUpdate, arrays: dict[str, Any]) -> dict[str, Any]:
            if isinstance(arrays["param"], tuple):  # null has nothing to subtract
                for param, grad in zip(arrays["param"], arrays["grad"], strict=True):
                    param[...] = np.asarray(param - grad, param.dtype)
            return {"param": arrays["param"]}

        assert self.both(lambda manager: manager.update(step)) is None
        self.model.update()

    @rule(number=ANY, memory=st.sampled_from(mc.Memory), kinds=st.sets(st.sampled_from(KINDS)))
    def move(self, number: int, memory: mc.Memory, kinds: set[str]) -> None:
        name = self.pick(number).name
        keep = number % 3 == 0
        kinds = kinds if self.model.chunk_loaded(name) else kinds - {"param"}
        result = self.both(lambda m: m.move(name, memory, sorted(kinds), keep_host_copy=keep))
        assert result is None
        self.model.move(name, memory, kinds, keep=keep)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
