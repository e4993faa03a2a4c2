"""Third-party backends as wheels: one of its own kind passes the contract, a broken one is a line.

The sources are the small projects beside this file; they are built and installed without network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

LISTING = """
import json, sys
import meshcore as mc

found = mc.available_backends()
assert "meshcore_toy" not in sys.modules and "meshcore_broken" not in sys.modules
mesh = mc.DeviceMesh([2, 0, 1])
try:
    mc.create_backend("broken", mesh)
except mc.BackendLoadError as error:
    cause, message = type(error.__cause__).__name__, str(error)
backend = mc.create_backend("toy", mesh)
plan = mc.plan_chunks([mc.ParamSpec("w", (4, 2), "float32")], shards=3, alignment_nbytes=1)
manager = mc.ChunkManager(backend, plan)
manager.load({"w": __import__("numpy").arange(8.0, dtype="float32").reshape(4, 2)})
manager.access("w")
value = manager.read("w").tolist()
manager.close()
backend.close()
print(json.dumps({
    "found": {n: [d.distribution, d.version, d.entry_point, d.status] for n, d in found.items()},
    "cause": cause, "message": message, "value": value,
    "after": {n: d.status for n, d in mc.available_backends().items()},
}))
"""

CONTRACT = """
from meshcore.testing import BackendContract, BackendHarness

class ToyHarness(BackendHarness):
    backend_name = "toy"

class TestToy(BackendContract):
    harness = ToyHarness()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which both wheels are installed."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    for project in ("toy_backend", "broken_backend"):
        run("build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(HERE / project))
    built = sorted(map(str, wheels.glob("*.whl")))
    assert len(built) == 2
    run("pip", "install", "--no-deps", "--no-index", "--target", str(site), *built)
    return site


def run(module, *arguments, **environment):
    """Run a module of this environment; its output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_is_found_used_and_not_disturbed_by_a_broken_one(site, tmp_path):
    script = tmp_path / "listing.py"
    script.write_text(LISTING)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["found"]["toy"] == ["meshcore-backend-toy", "1.2.3", "meshcore_toy", "found"]
    assert result["found"]["broken"] == [
        "meshcore-backend-broken", "0.0.7", "meshcore_broken", "found",
    ]  # fmt: skip
    assert result["cause"] == "ModuleNotFoundError"
    assert "meshcore-backend-broken 0.0.7" in result["message"]
    assert result["value"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    after = result["after"]
    assert (after["toy"], after["broken"], after["numpy"]) == ("ready", "broken", "found")


def test_the_command_lists_both(site):
    text = run(
        "meshcore.cli", "backends", "--json", PYTHONPATH=str(site), MESHCORE_BACKENDS="toy,broken"
    )
    rows = {row["name"]: row for row in json.loads(text)["backends"]}
    assert (rows["toy"]["status"], rows["toy"]["api"]) == ("ready", "1.0")
    assert rows["broken"]["status"] == "broken"
    assert "a_framework_that_nobody_has" in rows["broken"]["reason"]
    assert (rows["numpy"]["status"], rows["null"]["status"]) == ("ready", "ready")


def test_the_toy_passes_the_contract(site, tmp_path):
    (tmp_path / "test_toy_contract.py").write_text(CONTRACT)
    text = run(
        "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--rootdir", str(tmp_path),
        str(tmp_path), PYTHONPATH=str(site),
    )  # fmt: skip
    last = text.strip().splitlines()[-1]
    assert "passed" in last
    assert int(last.split()[0]) >= 200
