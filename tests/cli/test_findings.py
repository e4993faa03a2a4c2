"""What ``doctor`` concludes, piece by piece and in this process."""

from __future__ import annotations

import importlib.metadata
import os
import signal

import pytest

from meshcore.cli import _isolation, _report
from meshcore.registry import BackendDescription


def foreign(installed):
    folder = [str(installed.folder)]
    return _report.foreign_distributions(importlib.metadata.distributions(path=folder))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("meshcore", {}),
        ("MeshCore", {}),
        ("radio", {"RECORD": "radio.py,,\nmeshcore/ble.py,sha256=x,3\n"}),
        ("radio", {"top_level.txt": "radio\nmeshcore\n"}),
    ],
)
def test_what_claims_the_import_name_is_foreign(installed, name, files):
    installed.distribution(name, "2.0", **files)
    assert foreign(installed) == [f"{name} 2.0"]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("meshcore-train", {"RECORD": "meshcore/__init__.py,,\n"}),
        ("meshcore_train", {"top_level.txt": "meshcore\n"}),
        ("meshcore-backend-x", {"RECORD": "meshcore_x/__init__.py,,\n"}),
        ("tool", {"RECORD": "tool/meshcore/__init__.py,,\n", "top_level.txt": "tool meshcores"}),
    ],
)
def test_what_does_not_claim_it_is_not(installed, name, files):
    installed.distribution(name, "2.0", **files)
    assert foreign(installed) == []


def test_a_distribution_without_metadata_does_not_stop_the_search(installed):
    installed.distribution("gone", metadata=False)
    installed.distribution("meshcore", "2.0")
    assert foreign(installed) == ["meshcore 2.0"]


@pytest.mark.parametrize(
    ("value", "status", "text"),
    [
        (None, "ok", "not set"),
        ("", "ok", "not set"),
        ("numpy", "ok", "allows numpy"),
        ("numpy, torsh", "warning", "torsh: not installed (close: torch)"),
        ("zzz", "warning", "zzz: not installed"),
    ],
)
def test_allow_list(monkeypatch, value, status, text):
    if value is None:
        monkeypatch.delenv("MESHCORE_BACKENDS", raising=False)
    else:
        monkeypatch.setenv("MESHCORE_BACKENDS", value)
    check = _report.check_allow_list(["numpy", "torch"])
    assert check.status == status
    assert text in check.message


def test_a_missing_core_distribution_is_a_warning():
    check = _report.check_core(None)
    assert (check.status, "meshcore-train" in check.action) == ("warning", True)
    assert _report.check_core("1.2").status == "ok"


def test_a_backend_that_hangs_is_stopped(installed, monkeypatch):
    installed.backend("slow", "import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(installed.folder))
    monkeypatch.delenv("MESHCORE_BACKENDS", raising=False)
    found = BackendDescription("slow", "dist-slow", "1.0", "fake_slow_slow")
    after = _isolation.examine(found, timeout_seconds=1.5)
    assert (after.status, after.reason) == ("broken", "it did not load within 1.5 s")


def test_a_process_that_a_plugin_leaves_behind_delays_nothing(installed, monkeypatch):
    # It inherits the standard streams of the worker, and outlives it.
    source = """
        import pathlib, subprocess, sys
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pathlib.Path(__file__ + ".pid").write_text(str(left.pid))
    """
    installed.backend("parent", source)
    monkeypatch.setenv("PYTHONPATH", str(installed.folder))
    monkeypatch.delenv("MESHCORE_BACKENDS", raising=False)
    found = BackendDescription("parent", "dist-parent", "1.0", "fake_parent_parent")
    after = _isolation.examine(found, timeout_seconds=40.0)
    left = installed.folder / "fake_parent_parent.py.pid"
    os.kill(int(left.read_text()), signal.SIGKILL)
    assert after.status == "ready"


def test_what_two_distributions_offer_is_not_loaded():
    found = BackendDescription("twin", "a, b", "1", "nowhere", "rejected", "two of them")
    assert _isolation.examine(found, timeout_seconds=1e-9) is found


def test_what_is_not_installed_has_no_version():
    assert _report.installed_version("a-distribution-that-is-nowhere") is None
    assert _report.installed_version("meshcore-train") is not None
