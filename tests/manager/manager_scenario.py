"""A training step and more, verb by verb, beside a model of what it should do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from manager_support import by_rank, equal, ints, make, over_ranks

import meshcore as mc
from meshcore.backend import Backend

DEVICE, HOST = mc.Memory.DEVICE, mc.Memory.HOST

SPECS = (
    mc.ParamSpec("a", (5,)),
    mc.ParamSpec("b", (2, 2)),
    mc.ParamSpec("c", (7,)),
    mc.ParamSpec("kept", (3,), group="kept"),
    mc.ParamSpec("frozen", (2,), "bfloat16", trainable=False),
)


def start_values() -> dict[str, Any]:
    return {s.name: ints(s.shape, 10 * i, s.dtype) for i, s in enumerate(SPECS)}


@dataclass
class Model:
    """What the tensors, reduced gradients and momenta should be."""

    params: dict[str, Any] = field(default_factory=start_values)
    grads: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, Any] = field(default_factory=dict)
    has_momentum: bool = False
    loaded: bool = False

    def check(self, manager: mc.ChunkManager) -> None:
        if not self.loaded:
            return
        for name, value in self.params.items():
            equal(manager.to_numpy(name), value)
            if manager.is_gathered(name):
                equal(manager.read(name), value)
        pending = {manager.chunk_of(name).name for name in self.pending}
        for spec in SPECS:
            if spec.name in self.grads:
                equal(manager.grad(spec.name), self.grads[spec.name])
            elif spec.trainable and manager.chunk_of(spec.name).name not in pending:
                assert manager.grad(spec.name) is None
        if self.has_momentum:
            equal(manager.to_numpy("a", of="momentum"), np.zeros(5))


@dataclass(frozen=True)
class Step:
    """One verb.

    Attributes:
        run: makes the call.
        model: what it does to the model.
        changes: a tensor whose value says whether a call that must not be repeated took effect.
        atomic: whether a failure that is no failure to free leaves the ledger as it was.
    """

    name: str
    run: Callable[[mc.ChunkManager], object]
    model: Callable[[Model], object] = lambda model: None
    changes: str | None = None
    atomic: bool = False


def manager_on(backend: Backend, **options: Any) -> mc.ChunkManager:
    return make(backend, SPECS, capacity=10, alignment=8, keep_gathered=["kept"], **options)


def gradient(name: str, seed: int) -> Callable[[int], Any]:
    shape = next(spec.shape for spec in SPECS if spec.name == name)
    return lambda position: 4 * (ints(shape, seed) + position)


def accumulate(name: str, seed: int) -> Step:
    def run(manager: mc.ChunkManager) -> None:
        manager.accumulate_grad(name, by_rank(manager.backend, gradient(name, seed)))

    def model(model: Model) -> None:
        model.pending[name] = seed

    return Step(f"accumulate {name}", run, model)


def reduce(backend: Backend) -> Step:
    def model(model: Model) -> None:
        for name, seed in model.pending.items():
            mean = over_ranks(backend, gradient(name, seed)) / backend.mesh.size
            model.grads[name] = model.grads.get(name, 0) + mean
        model.pending.clear()

    return Step("reduce", lambda manager: manager.reduce_grads(), model)


def update() -> Step:
    def step(chunk: mc.ChunkUpdate, arrays: dict[str, Any]) -> dict[str, Any]:
        for param, grad in zip(arrays["param"], arrays["grad"], strict=True):
            param -= grad  # the successor is the same array, changed in place
        return {"param": arrays["param"]}

    def model(model: Model) -> None:
        model.params["a"] = model.params["a"] - model.grads["a"]

    return Step("update", lambda manager: manager.update(step, names=["a"]), model, changes="a")


def scale() -> Step:
    def model(model: Model) -> None:
        model.grads = {name: 2 * value for name, value in model.grads.items()}

    return Step("scale", lambda manager: manager.scale_grads(2.0), model)


def add(name: str) -> Step:
    value = ints(next(spec.shape for spec in SPECS if spec.name == name), 1)

    def model(model: Model) -> None:
        model.params[name] = model.params[name] + value

    return Step(f"add {name}", lambda manager: manager.add({name: value}), model, changes=name)


def write(name: str, start: int) -> Step:
    value = ints(next(spec.shape for spec in SPECS if spec.name == name), start)
    return Step(
        f"write {name}",
        lambda manager: manager.write({name: value}),
        lambda model: model.params.update({name: value}),
    )


def read(*names: str) -> Step:
    def run(manager: mc.ChunkManager) -> None:
        with manager.gathered(*names) as values:
            for value in values.values():
                value.sum()

    return Step(f"read {names}", run, atomic=True)


def add_state(manager: mc.ChunkManager) -> None:
    if "momentum" not in manager.chunk_of("a").state_names:
        manager.add_state("momentum", memory=HOST)


def move(name: str, memory: mc.Memory, *, keep: bool = False) -> Step:
    kinds = ("param", "grad", "optimizer")
    return Step(
        f"move {name} to {memory.value}",
        lambda manager: manager.move(name, memory, kinds, keep_host_copy=keep),
    )


def load() -> Step:
    return Step(
        "load",
        lambda manager: manager.load(start_values()),
        lambda model: setattr(model, "loaded", True),
    )


def state() -> Step:
    return Step("add state", add_state, lambda model: setattr(model, "has_momentum", True))


def training(backend: Backend) -> list[Step]:
    """Two micro-batches, the norm and an update, in device memory."""
    return [
        load(),
        Step("access", lambda manager: manager.access("a", "c", "kept"), atomic=True),
        read("a", "frozen"),
        accumulate("a", 1),
        accumulate("c", 2),
        accumulate("kept", 3),
        reduce(backend),
        accumulate("a", 4),
        accumulate("kept", 5),
        reduce(backend),
        Step("norm", lambda manager: manager.grad_norm(), atomic=True),
        Step("grads", lambda manager: manager.grads("a", "b", "kept"), atomic=True),
        scale(),
        update(),
        Step("release", lambda manager: manager.release("a", "c", "kept", "frozen")),
        Step(
            "zero", lambda manager: manager.zero_grads(), lambda model: setattr(model, "grads", {})
        ),
    ]


def placement(backend: Backend) -> list[Step]:
    """Moves between memories, and verbs on what is on the host."""
    return [
        load(),
        accumulate("a", 1),
        accumulate("kept", 2),
        reduce(backend),
        state(),
        Step("access", lambda manager: manager.access("kept")),
        move("a", HOST),
        move("kept", HOST),
        Step("norm", lambda manager: manager.grad_norm(), atomic=True),
        read("b", "kept"),
        accumulate("a", 6),
        reduce(backend),
        add("b"),
        add("kept"),
        write("c", 50),
        move("a", DEVICE, keep=True),
        move("kept", DEVICE),
        move("a", HOST),
        Step("start", lambda manager: manager.access_async("a", "c", "frozen")),
        Step("wait", lambda manager: manager.access_async("a", "c", "frozen").wait()),
        Step("release", lambda manager: manager.release("a", "c", "frozen")),
        Step("to numpy", lambda manager: manager.to_numpy("c"), atomic=True),
    ]
