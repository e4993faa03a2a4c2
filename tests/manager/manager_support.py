"""What the cases of the chunk manager share; everything works with the arrays of any backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import meshcore as mc
from meshcore.backend import Backend
from meshcore.dtypes import numpy_dtype
from meshcore.testing import Case, MeshCase, grid, line

MESHES: tuple[MeshCase, ...] = (
    line(0),
    line(0, 1),
    line(2, 0, 1),
    grid((3, 0, 2, 1), 2, 2),
    grid((2, 0, 1, 3), 2, 2, shard_first=True),
    grid((1, 0), 2, 1),
)
"""Where a case runs that names none: one rank, odd, permuted, with replicas, replicas only."""


def on(*meshes: MeshCase) -> Callable[[Callable[[Backend], None]], Callable[[Backend], None]]:
    """Say which meshes a case is made for."""

    def mark(function: Callable[[Backend], None]) -> Callable[[Backend], None]:
        function.meshes = meshes  # type: ignore[attr-defined]
        return function

    return mark


def cases_in(module: Any) -> list[Case]:
    """All functions of a module that are called ``case_*``."""
    return [Case(function) for name, function in vars(module).items() if name.startswith("case_")]


def meshes_of(
    case: Case, *, default: tuple[MeshCase, ...], own: int | None
) -> tuple[MeshCase, ...]:
    """The first meshes that a case is made for, or else the default."""
    meshes: tuple[MeshCase, ...] | None = getattr(case.function, "meshes", None)
    return default if meshes is None else meshes[:own]


# --- managers and values ----------------------------------------------------------------------


def make(
    backend: Backend,
    specs: Sequence[mc.ParamSpec],
    *,
    capacity: int | None = None,
    alignment: int = 1,
    **options: Any,
) -> mc.ChunkManager:
    """A manager of some tensors, in a plan without gaps."""
    plan = mc.plan_chunks(
        specs,
        shards=backend.roles.shards,
        capacity_numel=capacity,
        alignment_nbytes=alignment,
    )
    return mc.ChunkManager(backend, plan, **options)


def three(backend: Backend, **options: object) -> mc.ChunkManager:
    """Tensors a and b in one chunk, c in another; loaded."""
    specs = [mc.ParamSpec("a", (3,)), mc.ParamSpec("b", (2, 2)), mc.ParamSpec("c", (7,))]
    manager = make(backend, specs, capacity=7, **options)
    manager.load({"a": ints((3,), 1), "b": ints((2, 2), 10), "c": ints((7,), 20)})
    assert len(manager.chunks) == 2
    return manager


def loaded(backend: Backend, **options: object) -> mc.ChunkManager:
    """Tensors a and b in one chunk; loaded."""
    manager = make(backend, [mc.ParamSpec("a", (5,)), mc.ParamSpec("b", (2, 2))], **options)
    manager.load({"a": ints((5,), 1), "b": ints((2, 2), 10)})
    return manager


def ints(shape: Sequence[int], start: int = 0, dtype: str = "float32") -> Any:
    """Small integers from ``start`` on, in C order: exact in every floating dtype."""
    numel = int(np.prod(shape))
    return (np.arange(numel) % 97 + start).reshape(shape).astype(numpy_dtype(dtype))


def random_values(spec: mc.ParamSpec, seed: int) -> Any:
    """Small integers that another seed makes different; booleans for a bool tensor."""
    raw = np.random.default_rng(seed).integers(-9, 10, tuple(spec.shape))
    return (raw > 0) if spec.dtype == "bool" else raw.astype(numpy_dtype(spec.dtype))


def by_rank(backend: Backend, value: Callable[[int], Any]) -> dict[int, Any]:
    """A value for every local rank, by its position in the mesh."""
    return {rank: value(backend.mesh.position(rank)) for rank in backend.local_ranks}


def over_ranks(backend: Backend, value: Callable[[int], Any]) -> Any:
    """The sum over all ranks of what ``by_rank`` gives."""
    return sum(value(position) for position in range(backend.mesh.size))


def as_numpy(value: Any) -> Any:
    """A backend's array as numpy; torch's bfloat16 has no numpy dtype and becomes float32."""
    return np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value)


def equal(actual: Any, expected: Any) -> None:
    """Compare values and shapes exactly."""
    got, want = as_numpy(actual), np.asarray(expected)
    assert got.shape == want.shape, f"shape {got.shape}, not {want.shape}"
    np.testing.assert_array_equal(
        got.astype(np.float64, copy=False), want.astype(np.float64, copy=False)
    )


def elementwise(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """The successor of ``first`` on any backend: a tuple of ndarrays, a tensor, a jax.Array."""
    if isinstance(first, tuple):
        return tuple(
            np.asarray(function(*pieces), pieces[0].dtype)
            for pieces in zip(first, *others, strict=True)
        )
    value = function(first, *others)
    return first.copy_(value) if hasattr(first, "copy_") else value


def sgd(rate: float) -> Callable[[Any, dict[str, Any]], Mapping[str, Any]]:
    """Plain gradient descent for ``manager.update``."""

    def step(chunk: mc.ChunkUpdate, arrays: dict[str, Any]) -> Mapping[str, Any]:
        return {"param": elementwise(lambda p, g: p - rate * g, arrays["param"], arrays["grad"])}

    return step


# --- bytes and errors -------------------------------------------------------------------------


def used(manager: mc.ChunkManager, category: str, memory: str = "device") -> int:
    """Bytes of one rank in use."""
    return manager.memory().used[memory][category]


def peak(manager: mc.ChunkManager, category: str, memory: str = "device") -> int:
    """Highest bytes of one rank."""
    return manager.memory().peak[memory][category]


def all_used(manager: mc.ChunkManager) -> Any:
    """Everything in use, to compare before and after."""
    return {memory: dict(row) for memory, row in manager.memory().used.items()}


def raises(
    error: type[BaseException], *words: str, builtin: type[BaseException] = mc.MeshcoreError
) -> _Raises:
    """Expect an error that is both classes and whose message has all words."""
    return _Raises(error, words, builtin)


class _Raises:
    def __init__(
        self, error: type[BaseException], words: Sequence[str], builtin: type[BaseException]
    ) -> None:
        self.error = error
        self.words = words
        self.builtin = builtin
        self.caught: Any = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        assert error is not None, f"{self.error.__name__} was not raised"
        if not isinstance(error, self.error):
            return False
        self.caught = error
        assert isinstance(error, self.builtin), f"{kind.__name__} is no {self.builtin.__name__}"
        missing = [word for word in self.words if word not in str(error)]
        assert not missing, f"the message lacks {missing}: {error}"
        return True
