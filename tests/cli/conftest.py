"""Folders that look like installed distributions, for the processes that the command starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

HOOKS = """
from types import SimpleNamespace
from meshcore.backend import BackendInfo
from meshcore.hookspecs import hookimpl

@hookimpl
def meshcore_backend_info():
    return BackendInfo("{name}", (1, 0), summary="about {name}", probe=PROBE)

@hookimpl
def meshcore_create_backend(name, roles, options):
    return SimpleNamespace(name=name)

PROBE = None
"""


class Installed:
    """Fake distributions under one folder."""

    def __init__(self, folder):
        self.folder = folder

    def distribution(self, name, version="1.0", *, entries=None, metadata=True, **files):
        """Metadata alone: a METADATA file, entry points, and other files by name."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        if metadata:
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        if entries:
            lines = [f"{key} = {value}" for key, value in entries.items()]
            files["entry_points.txt"] = "\n".join(["[meshcore.backends]", *lines, ""])
        for file, text in files.items():
            (info / file).write_text(text)

    def backend(self, name, source="", *, distribution=None, hooks=True):
        """A distribution with one backend; ``source`` comes after its good hooks."""
        module = f"fake_{name}_{(distribution or name).replace('-', '_')}"
        text = (HOOKS.replace("{name}", name) if hooks else "") + textwrap.dedent(source)
        (self.folder / f"{module}.py").write_text(text)
        self.distribution(distribution or f"dist-{name}", entries={name: module})

    def run(self, *arguments, **environment):
        """Run the command with this folder on the path."""
        return subprocess.run(
            [sys.executable, "-P", "-W", "error", "-m", "meshcore.cli", *arguments],
            env={**os.environ, "PYTHONPATH": str(self.folder), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def installed(tmp_path):
    return Installed(tmp_path)


@pytest.fixture(scope="session")
def trouble(tmp_path_factory):
    """One installation with everything that can go wrong, beside what is good."""
    made = Installed(tmp_path_factory.mktemp("trouble"))
    made.backend("good")
    made.backend("noisy", "import os; print('{not json'); os.system('echo loud')")
    made.backend("nowhere", "PROBE = lambda: 'it has no device'")
    made.backend("broken", "import a_module_that_is_nowhere", hooks=False)
    made.backend("exits", "import os, sys; sys.stderr.write('licence expired\\n'); os._exit(3)")
    made.backend("aborts", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    made.backend("odd", "@hookimpl\ndef meshcore_wrong(): ...")
    made.backend("twin", distribution="a-dist")
    made.backend("twin", distribution="b-dist")
    made.backend("hidden", "raise SystemExit('must not be loaded')")
    made.distribution("meshcore", "2.3.1", RECORD="meshcore/__init__.py,,\n")
    return made


ALLOWED = "good,noisy,nowhere,broken,exits,aborts,odd,twin,nunpy"


@pytest.fixture(scope="session")
def allowed():
    return ALLOWED
