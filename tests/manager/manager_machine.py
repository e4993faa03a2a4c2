"""Two managers and a model that make the same walk; the steps are in ``test_stateful``."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis.strategies as st
from cases_prediction import books, null_like
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
)
from manager_profiles import JAX_LIKE, STAGED, TORCH_LIKE
from manager_support import MESHES, equal, make
from manager_walk import PlainModel
from manager_witness import CountingBackend

import meshcore as mc
from meshcore.errors import ValueUnavailableError
from meshcore.reference import NUMPY_PROFILE

DEVICE, HOST = mc.Memory.DEVICE, mc.Memory.HOST
KINDS = ("param", "grad", "optimizer")

SHAPES = st.sampled_from([(), (1,), (3,), (2, 3), (0, 4), (7,), (4, 4)])
SPEC = st.tuples(
    SHAPES,
    st.sampled_from(["float32", "float32", "bfloat16", "int32"]),
    st.booleans() | st.just(True),
    st.sampled_from(["main", "main", "kept"]),
    st.sampled_from([0, 0, 1]),
)
ANY = st.integers(0, 1 << 16)


class Machine(RuleBasedStateMachine):
    """Makes both managers and the model; compares them after every step and at the end."""

    @initialize(
        mesh_case=st.sampled_from(MESHES),
        profile=st.sampled_from([NUMPY_PROFILE, TORCH_LIKE, JAX_LIKE, STAGED]),
        rows=st.lists(SPEC, min_size=1, max_size=6),
        capacity=st.sampled_from([4, 9, None]),
        alignment=st.sampled_from([1, 8]),
        compute_dtype=st.sampled_from([None, "bfloat16"]),
    )
    def start(
        self,
        mesh_case: Any,
        profile: Any,
        rows: list[Any],
        capacity: int | None,
        alignment: int,
        compute_dtype: str | None,
    ) -> None:
        specs = [
            mc.ParamSpec(f"t{i}", shape, dtype, trainable, group, [f"t{i}.tie"] * ties)
            for i, (shape, dtype, trainable, group, ties) in enumerate(rows)
        ]
        self.backend = CountingBackend(mesh_case.roles(), profile)
        options: dict[str, Any] = {
            "capacity": capacity,
            "alignment": alignment,
            "compute_dtype": compute_dtype,
            "keep_gathered": sorted({spec.group for spec in specs} & {"kept"}),
        }
        self.real = make(self.backend, specs, check=True, **options)
        self.dry = make(null_like(self.backend), specs, **options)
        self.model = PlainModel(self.real.plan, self.backend, compute_dtype)
        self.moments = 0
        self.was_async = False

    def both(self, call: Any) -> Any:
        """Make a call on both managers; both return, or both raise the same error."""
        try:
            result = call(self.real)
        except mc.MeshcoreError as error:
            try:
                call(self.dry)
            except type(error):
                return error
            raise AssertionError(f"null raises no {type(error).__name__}") from error
        with contextlib.suppress(ValueUnavailableError):
            call(self.dry)
        return result

    def pick(self, number: int) -> mc.ParamSpec:
        return self.real.plan.specs[number % len(self.real.plan.specs)]

    def name(self, spec: mc.ParamSpec, number: int) -> str:
        return spec.names[number % len(spec.names)]

    # --- what always holds ----------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "real"):
            return
        assert books(self.real) == books(self.dry)
        used = self.real.memory().used
        for memory in mc.Memory:
            for category in KINDS:
                want = self.model.nbytes(memory, category)
                assert used[memory.value][category] == want, (memory, category)
            # Scratch of a gather that may be in flight is still there.
            assert used[memory.value]["staging"] == 0 or self.was_async
        for name, state in self.model.states.items():
            assert self.real.state(name) is state
            assert self.real.is_gathered(name) is self.model.chunk(name).accessed
        self.real.audit()

    def teardown(self) -> None:
        if not hasattr(self, "real"):
            return
        for name, value in self.model.values.items():
            equal(self.real.to_numpy(name), value)
        self.real.close()
        self.dry.close()
        for manager in (self.real, self.dry):
            report = manager.memory()
            for table in (report.used, report.reserved):
                assert not any(nbytes for row in table.values() for nbytes in row.values())
