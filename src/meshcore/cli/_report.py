"""What ``backends`` and ``doctor`` find, as data; and the JSON of it, which is stable.

``meshcore backends --json`` is ``{"backends": [BACKEND, ...]}``, sorted by name, with

- ``name``, ``distribution``, ``version``, ``entry_point``: text;
- ``api``: text like "1.0", or null where it is not known;
- ``status``: "ready", "unavailable" (loads, and cannot run here), "broken" (does not load),
  "rejected" (does not fit, or two distributions offer it), "excluded" (not in MESHCORE_BACKENDS);
- ``reason``: why it is not ready, or ""; ``summary``: its own one line, or "".

``meshcore doctor --json`` is an object with

- ``ok``: false where a check is an error (the exit code is 1 then);
- ``python``: its version;
- ``core``: ``distribution``, ``version``, ``api``, ``location`` (the folder it is imported from);
- ``packages``: name -> version, or null where it is not installed;
- ``backends``: as above;
- ``checks``: ``{"name", "status": "ok" | "warning" | "error", "message", "action"}``, where
  ``action`` says what to do, or is "".

Keys may be added; none is removed or changes its meaning.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshcore import registry as registry_package
from meshcore.backend import BACKEND_API
from meshcore.cli._isolation import examine_all
from meshcore.registry import BackendDescription, Registry, default_registry
from meshcore.registry.discovery import (
    ALLOW_LIST_VARIABLE,
    CORE_DISTRIBUTION,
    allow_list,
    field,
    normalized,
)
from meshcore.registry.loading import version_text

IMPORT_NAME = "meshcore"
PACKAGES = (
    CORE_DISTRIBUTION,
    "meshcore-backend-torch",
    "meshcore-backend-jax",
    "numpy",
    "ml_dtypes",
    "pluggy",
    "torch",
    "jax",
    "jaxlib",
    "typer",
    "rich",
)


@dataclass(frozen=True)
class Check:
    """One finding: its status is "ok", "warning" or "error"."""

    name: str
    status: str
    message: str
    action: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``doctor`` shows."""

    packages: Mapping[str, str | None]
    backends: Sequence[BackendDescription]
    checks: Sequence[Check]

    @property
    def ok(self) -> bool:
        """Whether no check is an error."""
        return all(check.status != "error" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The object that the module describes."""
        return {
            "ok": self.ok,
            "python": platform.python_version(),
            "core": {
                "distribution": CORE_DISTRIBUTION,
                "version": self.packages[CORE_DISTRIBUTION],
                "api": version_text(BACKEND_API),
                "location": str(location()),
            },
            "packages": dict(self.packages),
            "backends": [backend_json(backend) for backend in self.backends],
            "checks": [asdict(check) for check in self.checks],
        }


def backend_json(backend: BackendDescription) -> dict[str, Any]:
    """One backend as the module describes it."""
    api = None if backend.api is None else version_text(backend.api)
    return {**asdict(backend), "api": api}


def location() -> Path:
    """The folder from which meshcore is imported."""
    return Path(registry_package.__file__).parent.parent


def installed_version(distribution: str) -> str | None:
    """A distribution's version, or None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def examined_backends(
    *, timeout_seconds: float, registry: Registry | None = None
) -> list[BackendDescription]:
    """All installed backends by name: the allowed ones examined, the others "excluded"."""
    registry = registry or default_registry()
    allowed = registry.describe()
    examined = examine_all(allowed.values(), timeout_seconds=timeout_seconds)
    out = []
    for name, found in registry.describe(allowed_only=False).items():
        excluded = replace(
            found, status="excluded", reason=f"{ALLOW_LIST_VARIABLE} does not list it"
        )
        out.append(examined.get(name, excluded))
    return out


def diagnose(*, timeout_seconds: float, registry: Registry | None = None) -> Diagnosis:
    """Examine this installation; loads every backend in a process of its own."""
    backends = examined_backends(timeout_seconds=timeout_seconds, registry=registry)
    packages = {name: installed_version(name) for name in PACKAGES}
    checks = [
        check_core(packages[CORE_DISTRIBUTION]),
        check_foreign(importlib.metadata.distributions()),
        check_allow_list([backend.name for backend in backends]),
        *(check_backend(backend) for backend in backends if backend.status != "excluded"),
    ]
    return Diagnosis(packages, backends, checks)


def check_core(version: str | None) -> Check:
    """Whether the core is installed, given its version."""
    if version is None:
        return Check(
            "core",
            "warning",
            f"{CORE_DISTRIBUTION} runs from a folder and is not installed; backends of other "
            "distributions may ask for it in vain",
            f"pip install {CORE_DISTRIBUTION}, or pip install --editable in its source tree",
        )
    return Check("core", "ok", f"{CORE_DISTRIBUTION} {version}, API {version_text(BACKEND_API)}")


def foreign_distributions(
    distributions: Iterable[importlib.metadata.Distribution],
) -> list[str]:
    """Distributions other than ours that are called meshcore or install into ``meshcore/``.

    The name on the public index belongs to an unrelated package, whose files then lie among ours.
    """
    found = set()
    for distribution in distributions:
        name = field(distribution, "Name")
        if normalized(name) == CORE_DISTRIBUTION:
            continue
        record = distribution.read_text("RECORD") or ""
        top_level = (distribution.read_text("top_level.txt") or "").split()
        writes = re.search(rf"^{IMPORT_NAME}/", record, re.MULTILINE) or IMPORT_NAME in top_level
        if writes or normalized(name) == IMPORT_NAME:
            found.add(f"{name} {field(distribution, 'Version')}")
    return sorted(found)


def check_foreign(distributions: Iterable[importlib.metadata.Distribution]) -> Check:
    """Whether an unrelated package claims the import name."""
    foreign = foreign_distributions(distributions)
    if not foreign:
        return Check("import name", "ok", f"only {CORE_DISTRIBUTION} installs {IMPORT_NAME}/")
    names = " ".join(text.split()[0] for text in foreign)
    return Check(
        "import name",
        "error",
        f"{', '.join(foreign)} installs {IMPORT_NAME}/ too and is no part of this project; "
        "the files of the two overwrite each other",
        f"pip uninstall {names}, then pip install --force-reinstall --no-deps {CORE_DISTRIBUTION} "
        "(uninstalling takes files of ours along)",
    )


def check_allow_list(installed: Sequence[str]) -> Check:
    """Whether MESHCORE_BACKENDS names only what is installed."""
    allowed = allow_list()
    if allowed is None:
        return Check("allow-list", "ok", f"{ALLOW_LIST_VARIABLE} is not set: all are allowed")
    unknown = [name for name in allowed if name not in installed]
    if not unknown:
        return Check("allow-list", "ok", f"{ALLOW_LIST_VARIABLE} allows {', '.join(allowed)}")
    close = [match for name in unknown for match in difflib.get_close_matches(name, installed, 1)]
    hint = f" (close: {', '.join(close)})" if close else ""
    return Check(
        "allow-list",
        "warning",
        f"{ALLOW_LIST_VARIABLE} lists {', '.join(unknown)}: not installed{hint}",
        f"correct {ALLOW_LIST_VARIABLE}, or install what it lists",
    )


def check_backend(backend: BackendDescription) -> Check:
    """What a backend's status means for the user."""
    name = f"backend {backend.name}"
    if backend.status == "ready":
        return Check(name, "ok", f"{backend.distribution} {backend.version} is ready")
    if backend.status == "unavailable":
        return Check(name, "warning", f"it cannot run here: {backend.reason}")
    action = (
        "follow the reason: uninstall or upgrade what it names"
        if backend.status == "rejected"
        else f"reinstall or repair {backend.distribution} and what it needs, or leave it out with "
        f"{ALLOW_LIST_VARIABLE}"
    )
    return Check(name, "error", backend.reason, action)
