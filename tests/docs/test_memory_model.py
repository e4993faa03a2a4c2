"""The formulas of docs/memory-model.md, evaluated and compared with the ledger."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import meshcore as mc
from meshcore.backend import MoveForm, MoveKind, Staging
from meshcore.dtypes import itemsize

PAGE = Path(__file__).parents[2] / "docs" / "memory-model.md"
FORMULAS = dict(
    line.split(" = ", 1)
    for block in re.findall(r"^```formula\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    for line in block.strip().splitlines()
)

BARE = mc.TransferProfile(name="bare")
SCRATCHY = mc.TransferProfile(
    name="scratchy",
    forms={
        MoveKind.GATHER: (MoveForm("through a copy", 0, (Staging("shard", "dst"),)),),
        MoveKind.REDUCE_SCATTER: (MoveForm("peers", 0, (Staging("peers", "src"),)),),
    },
)


@dataclass(frozen=True)
class Setting:
    """A mesh and dtypes to try the formulas on."""

    shards: int
    replicas: int = 1
    dtype: str = "float32"
    compute_dtype: str | None = None
    grad_dtype: str | None = None
    alignment_nbytes: int = 64
    profile: mc.TransferProfile = BARE

    def __str__(self) -> str:
        dtypes = (self.dtype, self.compute_dtype, self.grad_dtype)
        parts = [f"{self.replicas}x{self.shards}", *(d for d in dtypes if d), self.profile.name]
        return "-".join([*parts, f"align{self.alignment_nbytes}"])

    @property
    def scratchy(self) -> bool:
        return self.profile is SCRATCHY and self.shards > 1

    def plan(self) -> mc.ChunkPlan:
        specs = [
            mc.ParamSpec("w", (13, 7), self.dtype),
            mc.ParamSpec("b", (5,), self.dtype),
        ]
        return mc.plan_chunks(specs, shards=self.shards, alignment_nbytes=self.alignment_nbytes)

    def values(self) -> dict[str, int]:
        """What the formulas say."""
        chunk = self.plan().chunks[0]
        b = itemsize(self.dtype)
        names: dict[str, object] = {
            "S": self.shards,
            "R": self.replicas,
            "used": chunk.used,
            "b": b,
            "c": itemsize(self.compute_dtype or self.dtype),
            "g": itemsize(self.grad_dtype or "float32"),
            "r": 4,
            "k": 8,
            "align": max(1, self.alignment_nbytes // b),
            "ceil": math.ceil,
            "max": max,
        }
        staging = {"staging_gather": 0, "staging_reduce": 0}
        for name, formula in FORMULAS.items():
            if name == "gather_peak":  # the sizes are known by now
                s, n = names["s"], names["n"]
                if self.scratchy:
                    staging = {
                        "staging_gather": s * names["c"],
                        "staging_reduce": (n - s) * names["g"],
                    }
                names.update(staging)
            names[name] = eval(formula, {"__builtins__": {}}, names)
        return {name: names[name] for name in FORMULAS}


SETTINGS = [
    Setting(2),
    Setting(3, alignment_nbytes=1),
    Setting(4, replicas=2),
    Setting(2, replicas=3, alignment_nbytes=4, profile=SCRATCHY),
    Setting(3, dtype="bfloat16"),
    Setting(4, compute_dtype="bfloat16", profile=SCRATCHY),
    Setting(2, compute_dtype="bfloat16", grad_dtype="bfloat16", profile=SCRATCHY),
]
BACKENDS = ["numpy", "null"]


@contextmanager
def manager_of(setting: Setting, backend_name: str, **options: object) -> Iterator[mc.ChunkManager]:
    mesh = mc.DeviceMesh(
        range(setting.replicas * setting.shards),
        (setting.replicas, setting.shards),
        ("replica", "shard"),
    )
    backend = mc.create_backend(
        backend_name,
        mesh,
        shard_axis="shard",
        replica_axis="replica",
        options=mc.BackendOptions(profile=setting.profile),
    )
    manager = mc.ChunkManager(
        backend,
        setting.plan(),
        compute_dtype=setting.compute_dtype,
        grad_dtype=setting.grad_dtype,
        check=True,
        **options,
    )
    try:
        yield manager
    finally:
        manager.close()
        backend.close()


def used(manager: mc.ChunkManager, *categories: str) -> int:
    row = manager.memory().used["device"]
    return sum(row[category] for category in categories or row)


def peak(manager: mc.ChunkManager) -> int:
    return manager.memory().peak["device"]["total"]


def load(manager: mc.ChunkManager) -> None:
    manager.load({"w": np.ones((13, 7)), "b": np.zeros(5)}, cast=True)


def give_gradients(manager: mc.ChunkManager) -> None:
    for name, shape in (("w", (13, 7)), ("b", (5,))):
        manager.accumulate_grad(name, np.ones(shape), cast=True)


def on_all(test):
    test = pytest.mark.parametrize("setting", SETTINGS, ids=str)(test)
    return pytest.mark.parametrize("backend_name", BACKENDS)(test)


def test_the_page_has_the_formulas():
    assert set(FORMULAS) == {
        "s",
        "n",
        "home",
        "optimizer",
        "grad_reduced",
        "gathered",
        "gather_peak",
        "grad_full",
        "reduce_peak",
        "add_peak",
        "load_peak",
        "to_numpy_peak",
    }


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sizes(setting):
    chunk = setting.plan().chunks[0]
    says = setting.values()
    assert (chunk.shard_numel, chunk.numel) == (says["s"], says["n"])
    held = sum(slot.spec.numel for slot in chunk.slots)
    assert setting.plan().waste_nbytes == (says["n"] - held) * itemsize(setting.dtype)


@on_all
def test_loading_and_rest(setting, backend_name):
    says = setting.values()
    with manager_of(setting, backend_name) as manager:
        load(manager)
        assert used(manager) == used(manager, "param") == says["home"]
        assert peak(manager) == says["load_peak"]
        manager.add_state("exp_avg")
        manager.add_state("exp_avg_sq")
        assert used(manager, "optimizer") == says["optimizer"]


@on_all
def test_gathering(setting, backend_name):
    says = setting.values()
    with manager_of(setting, backend_name) as manager:
        load(manager)
        manager.ledger.reset_peak()
        manager.access("w")
        assert used(manager) == used(manager, "param") == says["gathered"]
        manager.release("w")
        assert peak(manager) == says["gather_peak"]
        assert used(manager) == says["home"]


@on_all
def test_gradients(setting, backend_name):
    says = setting.values()
    with manager_of(setting, backend_name) as manager:
        load(manager)
        for says_peak in (says["reduce_peak"], says["add_peak"], says["add_peak"]):
            give_gradients(manager)
            manager.ledger.reset_peak()
            manager.reduce_grads()
            assert peak(manager) - says["home"] == says_peak
            assert used(manager, "grad") == says["grad_reduced"]
        manager.zero_grads()
        give_gradients(manager)
        assert used(manager, "grad") == says["grad_full"]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_to_numpy(setting):
    says = setting.values()
    with manager_of(setting, "numpy") as manager:
        load(manager)
        manager.ledger.reset_peak()
        manager.to_numpy("w")
        scratch = says["s"] * itemsize(setting.dtype) if setting.scratchy else 0
        assert peak(manager) == says["to_numpy_peak"] + scratch


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_a_group_that_is_kept_whole_has_n_for_s(backend_name):
    setting = Setting(4)
    n = setting.values()["n"]
    with manager_of(setting, backend_name, keep_gathered=["param"]) as manager:
        load(manager)
        manager.ledger.reset_peak()
        manager.access("w", "b")
        manager.release("w", "b")
        manager.add_state("exp_avg")
        assert peak(manager) == used(manager) == n * 4 + n * 4
        assert used(manager, "param") == n * 4


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_a_home_on_the_host_is_uploaded_while_it_is_gathered(backend_name):
    setting = Setting(4)
    says = setting.values()
    with manager_of(setting, backend_name) as manager:
        load(manager)
        manager.move("w", mc.Memory.HOST)
        assert used(manager) == 0
        assert manager.memory().used["host"]["param"] == says["home"]
        manager.ledger.reset_peak()
        manager.access("w")
        assert used(manager) == says["n"] * 4
        assert peak(manager) == says["home"] + says["n"] * 4
        assert manager.memory().peak["device"]["staging"] == says["home"]


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_shells_are_reserved_and_bounded(backend_name):
    keeps = mc.TransferProfile(name="keeps", shells=frozenset([mc.Memory.DEVICE]))
    setting = Setting(4, profile=keeps)
    says = setting.values()
    with manager_of(setting, backend_name) as manager:
        load(manager)
        for _ in range(3):
            manager.access("w")
            manager.release("w")
            reserved = sum(manager.memory().reserved["device"].values())
            assert used(manager) == says["home"]
            assert says["n"] * 4 <= reserved <= 4 * says["n"] * 4


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_loading_a_part_later_keeps_the_old_home_until_the_end(backend_name):
    setting = Setting(4)
    says = setting.values()
    with manager_of(setting, backend_name) as manager:
        load(manager)
        manager.ledger.reset_peak()
        manager.load({"b": np.ones(5, np.float32)})
        assert peak(manager) == says["load_peak"] + says["home"]
