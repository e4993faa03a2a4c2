"""What an import brings along, and what plugins may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshcore

ROOT = Path(__file__).parents[2]
PLUGIN_FILES = sorted(ROOT.glob("plugins/*/src/**/*.py"))
PUBLIC_MODULES = {"meshcore", "meshcore.backend", "meshcore.hookspecs", "meshcore.testing"}
FRAMEWORKS = {"torch", "jax", "jaxlib", "meshcore_torch", "meshcore_jax"}
HEAVY = FRAMEWORKS | {"numpy", "ml_dtypes", "matplotlib", "rich", "typer", "pytest", "hypothesis"}


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import meshcore",
        "import meshcore; meshcore.available_backends()",
        "import meshcore as mc; mc.plan_chunks([mc.ParamSpec('w', (4, 2))], shards=2).report()",
        "import meshcore as mc; mc.create_backend('null', mc.DeviceMesh(range(4))).close()",
    ],
    ids=["import", "list backends", "plan", "null backend"],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code):
    loaded = modules_after(code)
    assert "meshcore" in loaded
    assert not loaded.intersection(HEAVY)


def test_a_backend_brings_its_own_framework_only():
    loaded = modules_after(
        "import meshcore as mc; mc.create_backend('numpy', mc.DeviceMesh(range(4))).close()"
    )
    assert "numpy" in loaded
    assert not loaded.intersection(FRAMEWORKS)


def core_imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a file takes from the core."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "meshcore":
                    yield alias.name, ""
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            if module.partition(".")[0] == "meshcore":
                for alias in node.names:
                    yield module, alias.name


def test_there_are_plugins_to_look_at():
    assert {path.parts[-2] for path in PLUGIN_FILES} >= {"meshcore_torch", "meshcore_jax"}


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_plugins_import_public_names_only(path):
    for module, name in core_imports(path):
        assert module in PUBLIC_MODULES, f"{path.name} imports {module}, which is not public"
        assert not name.startswith("_"), f"{path.name} imports {name} of {module}"
        if module == "meshcore" and name and f"meshcore.{name}" not in PUBLIC_MODULES:
            assert name in meshcore.__all__, f"{path.name} imports {name}, which is not public"


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_plugins_do_not_know_each_other(path):
    other = {"meshcore_torch": "meshcore_jax", "meshcore_jax": "meshcore_torch"}
    own = next(part for part in path.parts if part in other)
    assert other[own] not in path.read_text()
