"""Cases about a chunk manager on the backend: what a user meets, with the pool in between."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshcore.backend import Backend
from meshcore.dtypes import dtype_name, is_floating, numpy_dtype
from meshcore.errors import NotGatheredError
from meshcore.layout import ChunkPlan, ParamSpec
from meshcore.ledger import MemoryReport
from meshcore.manager import ChunkManager
from meshcore.null import NullBackend
from meshcore.plan import plan_chunks
from meshcore.spec import Memory
from meshcore.testing.contract.model import Case, dtypes_of, require, values


def _specs(backend: Backend) -> tuple[ParamSpec, ...]:
    """More than one chunk, shards that no tensor divides into, and tensors of every odd kind."""
    whole_numbers = [d for d in ("int32", "int64", "uint8") if d in backend.profile.dtypes]
    return (
        ParamSpec("wide", (5, 3), ties=("tied",)),
        ParamSpec("scalar", ()),
        ParamSpec("empty", (0, 4)),
        ParamSpec("other", (7,)),
        ParamSpec("frozen", (2, 2), (*whole_numbers, "float32")[0], trainable=False),
    )


def _plan(backend: Backend) -> ChunkPlan:
    return plan_chunks(
        _specs(backend), shards=backend.roles.shards, capacity_numel=16, alignment_nbytes=1
    )


def _content(backend: Backend, seed: int = 0) -> dict[str, Any]:
    return {
        spec.name: values(spec.numel, spec.dtype, seed + i).reshape(spec.shape)
        for i, spec in enumerate(_specs(backend))
    }


def _loaded(backend: Backend, **options: Any) -> ChunkManager:
    manager = ChunkManager(backend, _plan(backend), **options)
    manager.load(_content(backend))
    return manager


def _expect_values(manager: ChunkManager, content: dict[str, Any]) -> None:
    for name, want in content.items():
        np.testing.assert_array_equal(manager.to_numpy(name), want, name, strict=True)


def loaded_values_come_back(backend: Backend) -> None:
    """Through access, read and release, by name and tie; never while the chunk is released."""
    with _loaded(backend) as manager:
        content = _content(backend)
        _expect_values(manager, content)
        held = manager.memory().used
        for name in ("wide", "tied", "scalar", "empty", "frozen"):
            manager.access(name)
            want = content["wide" if name == "tied" else name]
            got = np.asarray(manager.read(name))
            np.testing.assert_array_equal(got, want, name, strict=True)
            manager.audit()
            manager.release(name)
            try:
                manager.read(name)
            except NotGatheredError as error:
                require(name in str(error), f"the error does not name {name}: {error}")
            else:
                raise AssertionError(f"{name} can be read after its release")
        require(manager.memory().used == held, "accesses and releases changed the bytes in use")
        manager.audit()


def writes_reach_home_and_copies(backend: Backend) -> None:
    """Writing and adding change what is gathered and what stays after the release."""
    with _loaded(backend) as manager:
        content = _content(backend)
        manager.access("wide")
        content["wide"] = _content(backend, 4)["wide"]
        manager.write({"wide": content["wide"]})
        manager.add({"other": np.full(7, 2, np.float32)})
        content["other"] = content["other"] + 2
        np.testing.assert_array_equal(np.asarray(manager.read("wide")), content["wide"])
        manager.release("wide")
        _expect_values(manager, content)
        manager.audit()


def gradients_are_summed_over_ranks(backend: Backend) -> None:
    """Two micro-batches with values by rank, a weight, a mean, and a tensor that nobody used."""
    ranks = backend.mesh.ids
    with _loaded(backend) as manager:
        for step in range(2):
            by_rank = {
                rank: np.full((5, 3), 1 + step + ranks.index(rank), np.float32)
                for rank in backend.local_ranks
            }
            manager.accumulate_grad("wide", by_rank)
        manager.accumulate_grad("scalar", np.float32(3))
        manager.reduce_grads(divisor=2)
        total = sum(3 + 2 * i for i in range(len(ranks))) / 2
        scalar = 3 * len(ranks) / 2
        _expect_grad(manager, "wide", np.full((5, 3), total))
        _expect_grad(manager, "scalar", np.float32(scalar))
        require(manager.grad("other") is None, "a tensor that no rank used has a gradient")
        want = math.sqrt(15 * total**2 + scalar**2)
        np.testing.assert_allclose(manager.grad_norm(), want, rtol=1e-6)
        manager.accumulate_grad("wide", np.ones((5, 3), np.float32))
        manager.reduce_grads()  # a mean over ranks, added to what is there
        got = np.asarray(manager.grad("wide"))
        np.testing.assert_allclose(got, np.full((5, 3), total + 1), rtol=1e-6)
        require(not manager.found_nonfinite(), "finite gradients were called non-finite")
        manager.audit()


def _expect_grad(manager: ChunkManager, name: str, want: Any) -> None:
    got = manager.grad(name)
    require(got is not None, f"{name} has no gradient")
    np.testing.assert_array_equal(np.asarray(got), want, name)


def overflow_on_one_rank_is_seen_by_all(backend: Backend) -> None:
    """One infinite element on the last rank alone."""
    last = backend.mesh.ids[-1]
    with _loaded(backend) as manager:
        by_rank = {
            rank: np.full(7, np.inf if rank == last else 1, np.float32)
            for rank in backend.local_ranks
        }
        manager.accumulate_grad("other", by_rank)
        manager.reduce_grads()
        require(manager.found_nonfinite(), "an infinite gradient went unnoticed")


def low_precision_copies_of_a_master(backend: Backend) -> None:
    """Gathered values have the compute dtype; what is kept does not lose a bit."""
    fine = np.full((5, 3), 1 + 2**-12, np.float32)
    low = dtypes_of(backend, floating=True)[-1]  # float32 itself, if there is nothing lower
    with _loaded(backend, compute_dtype=low) as manager:
        manager.write({"wide": fine})
        with manager.gathered("wide", "frozen") as gathered:
            got = dtype_name(gathered["wide"])
            require(got == low, f"gathered values are {got}, not the compute dtype {low}")
            frozen = np.asarray(gathered["frozen"])
            want = _content(backend)["frozen"]
            if not is_floating(str(want.dtype)):
                np.testing.assert_array_equal(frozen, want, "integers are not cast", strict=True)
        np.testing.assert_array_equal(manager.to_numpy("wide"), fine)
        manager.accumulate_grad("wide", np.ones((5, 3), numpy_dtype(low)))
        manager.reduce_grads(divisor=1)
        total = manager.to_numpy("wide", of="grad")
        np.testing.assert_array_equal(total, np.full((5, 3), backend.mesh.size))
        manager.audit()


def host_keeps_values(backend: Backend) -> None:
    """Home goes to host memory and back; it can be gathered from there."""
    with _loaded(backend) as manager:
        device = manager.memory().used["device"]["param"]
        for name in ("wide", "other", "frozen"):
            manager.move(name, Memory.HOST)
        used = manager.memory().used
        require(used["device"]["param"] == 0, f"left on the device: {used['device']}")
        require(used["host"]["param"] == device, f"{device} bytes became {used['host']}")
        _expect_values(manager, _content(backend))
        manager.move("wide", Memory.DEVICE)
        _expect_values(manager, _content(backend))
        manager.audit()


def many_cycles_leave_no_byte(backend: Backend) -> None:
    """Accesses and releases, waited for at once or later, end where they began."""
    with _loaded(backend) as manager:
        manager.access("wide", "other")
        manager.release("wide", "other")
        before = manager.memory()
        for step in range(20):
            if step % 2:
                manager.access_async("wide", "frozen").wait()
            else:
                manager.access("wide", "frozen")
            manager.release("wide", "frozen")
        after = manager.memory()
        require(
            (before.used, before.reserved) == (after.used, after.reserved),
            f"bytes were {before}\nand are\n{after}",
        )
        _expect_values(manager, _content(backend))


def _steps(backend: Backend, manager: ChunkManager) -> Iterator[tuple[str, MemoryReport]]:
    """A training step with everything in it, and the bytes after each part."""
    manager.load(_content(backend))
    yield "load", manager.memory()
    manager.add_state("exp_avg")
    yield "add_state", manager.memory()
    manager.access("wide", "frozen")
    yield "access", manager.memory()
    manager.accumulate_grad("wide", np.ones((5, 3), np.float32))
    manager.accumulate_grad("other", np.ones(7, np.float32))
    yield "accumulate_grad", manager.memory()
    manager.release("wide", "frozen")
    yield "release", manager.memory()
    manager.reduce_grads()
    yield "reduce_grads", manager.memory()
    manager.accumulate_grad("wide", np.ones((5, 3), np.float32))
    manager.reduce_grads()
    yield "reduce_grads again", manager.memory()
    manager.grad_norm()
    manager.scale_grads(0.5)
    manager.move("wide", Memory.HOST, kinds=("param", "grad", "optimizer"))
    yield "move to host", manager.memory()
    manager.access("wide")
    manager.release("wide")
    manager.move("wide", Memory.DEVICE, kinds=("param", "grad", "optimizer"))
    yield "move back", manager.memory()
    manager.zero_grads()
    yield "zero_grads", manager.memory()


def null_predicts_every_byte(backend: Backend) -> None:
    """The same calls on ``null`` with this backend's profile: equal bytes after every step."""
    dry = ChunkManager(NullBackend(backend.roles, backend.profile), _plan(backend))
    with ChunkManager(backend, _plan(backend)) as manager, dry:
        for (step, got), (_, want) in zip(
            _steps(backend, manager), _steps(backend, dry), strict=True
        ):
            for what in ("used", "reserved", "peak"):
                measured, predicted = getattr(got, what), getattr(want, what)
                require(
                    measured == predicted,
                    f"after {step}, {what} is {measured}, and null predicts {predicted}",
                )
            manager.audit()


def measured_peaks_are_the_ledgers(backend: Backend) -> None:
    """In a checked run the backend is measured at every open: its peaks are the ledger's."""
    with ChunkManager(backend, _plan(backend), check=True) as manager:
        for step, report in _steps(backend, manager):
            measured = manager.audit().measured_peak
            require(
                measured == report.peak,
                f"after {step} the measured peak is {measured}, and the ledger's {report.peak}",
            )
        used = manager.audit().measured
        require(used == manager.memory().used, f"measured {used}, not {manager.memory().used}")


CASES = (
    Case(loaded_values_come_back),
    Case(writes_reach_home_and_copies),
    Case(gradients_are_summed_over_ranks),
    Case(overflow_on_one_rank_is_seen_by_all),
    Case(low_precision_copies_of_a_master),
    Case(host_keeps_values),
    Case(many_cycles_leave_no_byte),
    Case(null_predicts_every_byte, needs_data=False),
    Case(measured_peaks_are_the_ledgers, needs_data=False, fresh=True),
)
