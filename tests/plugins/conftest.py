"""A folder that looks like installed distributions: real metadata, real modules."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import sys
import textwrap

import pytest

from meshcore.registry import Registry

GOOD = """
    from types import SimpleNamespace

    from meshcore.backend import BackendInfo
    from meshcore.hookspecs import hookimpl

    @hookimpl
    def meshcore_backend_info():
        return BackendInfo("{name}", {api}, summary="good", probe=PROBE)

    @hookimpl
    def meshcore_create_backend(name, roles, options):
        return SimpleNamespace(name=name, roles=roles, options=options, module=__name__)

    PROBE = None
"""


class Site:
    """Distributions under one folder, and a registry that sees these and no others."""

    _numbers = itertools.count()

    def __init__(self, folder):
        self.folder = folder
        self.modules = []

    def module(self, source, **values):
        """A new importable module with this source; returns its name."""
        module = f"meshcore_fake_{next(self._numbers)}"
        text = textwrap.dedent(source)
        for key, value in values.items():
            text = text.replace("{" + key + "}", str(value))
        (self.folder / f"{module}.py").write_text(text)
        importlib.invalidate_caches()
        self.modules.append(module)
        return module

    def add(self, distribution, entries, version="1.0", metadata=True):
        """A distribution with entry points, name -> value."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        if metadata:
            text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            (info / "METADATA").write_text(text)
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[meshcore.backends]", *lines, ""]))

    def good(self, name, distribution=None, *, api=(1, 0), **options):
        """A distribution with one good backend; returns its module."""
        module = self.module(GOOD, name=name, api=api)
        self.add(distribution or f"dist-{name}", {name: module}, **options)
        return module

    def bad(self, name, source):
        """A distribution with one backend of this source; returns its module."""
        module = self.module(source)
        self.add(f"dist-{name}", {name: module}, version="2.5")
        return module

    def entry_points(self):
        """The entry points in this folder."""
        return [
            entry_point
            for distribution in importlib.metadata.distributions(path=[str(self.folder)])
            for entry_point in distribution.entry_points
        ]

    def registry(self, *, strict=False):
        """A new registry over this folder."""
        return Registry(self.entry_points, strict=strict)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.delenv("MESHCORE_BACKENDS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    made = Site(tmp_path)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)
