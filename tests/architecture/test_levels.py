"""Imports between modules of the core only go down: no module knows what stands above it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "meshcore"

# A module may import what is on its own level or below, and never in a circle; a package is one.
LEVELS = {
    0: {"errors", "dtypes", "links"},
    1: {"mesh", "spec", "state"},
    2: {"layout", "backend", "ledger"},
    3: {"plan", "hookspecs", "reference", "null", "values", "buffers", "witness"},
    4: {"registry", "registration", "pool"},
    5: {"chunk", "grads", "gradient_set"},
    6: {"manager", "mesh_manager"},
    7: {"trace", "runtime"},
    8: {"checkpoint", "report", "testing"},
    9: {"__init__", "cli"},
}
LEVEL_OF = {module: level for level, modules in LEVELS.items() for module in modules}


def unit_of(path: Path) -> str:
    """The module or package directly under meshcore that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_units(tree: ast.AST) -> Iterator[str]:
    """Every unit of the core that some code imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "meshcore":
            names = [f"meshcore.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            if root == "meshcore":
                unit = rest.partition(".")[0]
                yield unit if unit in UNITS else "__init__"


FILES = sorted(SOURCE.rglob("*.py"))
UNITS = {unit_of(path) for path in FILES}


@pytest.mark.parametrize("unit", sorted(UNITS))
def test_every_module_has_a_level(unit):
    assert unit in LEVEL_OF, f"give {unit} a level in {Path(__file__).name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path):
    unit = unit_of(path)
    wrong = {
        other
        for other in imported_units(ast.parse(path.read_text()))
        if LEVEL_OF[other] > LEVEL_OF[unit]
    }
    assert not wrong, f"{unit} (level {LEVEL_OF[unit]}) imports {sorted(wrong)} from above"


def test_imports_have_no_circle():
    graph: dict[str, set[str]] = {unit: set() for unit in UNITS}
    for path in FILES:
        graph[unit_of(path)].update(imported_units(ast.parse(path.read_text())))
    for unit, others in graph.items():
        others.discard(unit)
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize(
    ("code", "units"),
    [
        ("import meshcore.pool", {"pool"}),
        ("from meshcore import pool", {"pool"}),
        ("from meshcore import DeviceMesh", {"__init__"}),
        ("def f():\n    from meshcore.manager import ChunkManager", {"manager"}),
        ("import numpy\nfrom collections import abc", set()),
    ],
)
def test_the_reader_of_imports_sees_every_form(code, units):
    assert set(imported_units(ast.parse(code))) == units


def test_only_the_pool_and_its_helpers_call_verbs_of_a_backend():
    verbs = {"empty", "zeros", "redistribute", "square_sum", "free", "drop"}
    callers = {
        unit_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in verbs
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr in {"backend", "_backend"}
    }
    assert callers <= {"pool", "buffers", "testing"}
