"""Rules of the house that a reader could miss in review."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import meshcore

ROOT = Path(__file__).parents[2]
LIBRARY = sorted(
    [*ROOT.glob("src/meshcore/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")],
)
LONGEST_FUNCTION_LINES = 60
CORE_BUDGET_LINES = 8000
"""All of src/meshcore without the conformance package. It may grow, with a record in docs/adr."""


def ids(path: Path) -> str:
    return "/".join(path.parts[path.parts.index("src") + 1 :])


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", LIBRARY, ids=ids)
def test_library_code_does_not_assert(path):
    lines = [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]
    assert not lines, "python -O removes assert; raise a typed error instead"


@pytest.mark.parametrize("path", LIBRARY, ids=ids)
def test_library_code_does_not_print(path):
    lines = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"print", "breakpoint"}
    ]
    assert not lines


@pytest.mark.parametrize("path", LIBRARY, ids=ids)
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(tree_of(path))


@pytest.mark.parametrize("path", LIBRARY, ids=ids)
def test_functions_are_short(path):
    long = {
        node.name: lines
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION_LINES
    }
    assert not long


def test_the_core_stays_small():
    files = [p for p in LIBRARY if "src/meshcore/" in p.as_posix() and "testing" not in p.parts]
    assert len(files) > 10
    lines = {ids(path): len(path.read_text().splitlines()) for path in files}
    assert sum(lines.values()) <= CORE_BUDGET_LINES, lines


@pytest.mark.parametrize("name", sorted(meshcore.__all__))
def test_public_names_are_there_and_documented(name):
    value = getattr(meshcore, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value), f"meshcore.{name} has no docstring"


@pytest.mark.parametrize(
    "name", sorted(n for n in meshcore.__all__ if inspect.isclass(getattr(meshcore, n)))
)
def test_public_methods_are_documented(name):
    cls = getattr(meshcore, name)
    bare = [
        attribute
        for attribute, value in vars(cls).items()
        if not attribute.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(cls, attribute, None) or value)
    ]
    assert not bare, f"meshcore.{name}: {bare} have no docstring"


def test_public_names_are_listed_once():
    assert len(set(meshcore.__all__)) == len(meshcore.__all__)
