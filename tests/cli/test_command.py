"""The ``meshcore`` command as a user runs it, in a process of its own."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def doctor(trouble, allowed):
    result = trouble.run("doctor", "--json", MESHCORE_BACKENDS=allowed)
    return result, json.loads(result.stdout)


@pytest.fixture(scope="module")
def found(doctor):
    return {backend["name"]: backend for backend in doctor[1]["backends"]}


@pytest.fixture(scope="module")
def checks(doctor):
    return {check["name"]: check for check in doctor[1]["checks"]}


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("numpy", "ready", ""),
        ("null", "ready", ""),
        ("good", "ready", ""),
        ("noisy", "ready", ""),
        ("nowhere", "unavailable", "it has no device"),
        ("broken", "broken", "a_module_that_is_nowhere"),
        ("exits", "broken", "exit code 3 while loading: licence expired"),
        ("aborts", "broken", "signal SIGKILL"),
        ("odd", "rejected", "meshcore_wrong"),
        ("twin", "rejected", "a-dist 1.0"),
        ("hidden", "excluded", "MESHCORE_BACKENDS"),
    ],
)
def test_each_backend_is_judged_alone(found, name, status, reason):
    assert found[name]["status"] == status
    assert reason in found[name]["reason"]
    assert bool(found[name]["reason"]) is bool(reason)


def test_a_backend_is_described_as_documented(found):
    assert found["good"] == {
        "name": "good",
        "distribution": "dist-good",
        "version": "1.0",
        "entry_point": "fake_good_good",
        "api": "1.0",
        "status": "ready",
        "reason": "",
        "summary": "about good",
    }
    assert found["broken"]["api"] is None


def test_doctor_fails_where_something_is_broken(doctor):
    result, diagnosis = doctor
    assert result.returncode == 1
    assert diagnosis["ok"] is False
    assert set(diagnosis) == {"ok", "python", "core", "packages", "backends", "checks"}
    assert set(diagnosis["core"]) == {"distribution", "version", "api", "location"}


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("import name", "error"),
        ("allow-list", "warning"),
        ("backend good", "ok"),
        ("backend nowhere", "warning"),
        ("backend broken", "error"),
        ("backend odd", "error"),
        ("backend twin", "error"),
    ],
)
def test_doctor_weighs_what_it_finds(checks, name, status):
    assert checks[name]["status"] == status
    assert bool(checks[name]["action"]) is (status != "ok" and name != "backend nowhere")


def test_doctor_names_the_foreign_package_and_what_to_do(checks):
    check = checks["import name"]
    assert "meshcore 2.3.1" in check["message"]
    assert "pip uninstall meshcore," in check["action"]
    assert "meshcore-train" in check["action"]
    assert "pip install meshcore " not in check["action"] + " "


def test_doctor_checks_the_allow_list(checks):
    assert "nunpy: not installed (close: numpy)" in checks["allow-list"]["message"]
    assert "backend hidden" not in checks


def test_doctor_writes_plain_tables_into_a_pipe(trouble, allowed):
    result = trouble.run("doctor", MESHCORE_BACKENDS=allowed)
    assert result.returncode == 1
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    text = " ".join(result.stdout.split())
    for expected in ("meshcore 2.3.1", "licence expired", "pip uninstall meshcore", "see above"):
        assert expected in text
    assert result.stdout.isascii()


def test_doctor_passes_a_good_installation(installed):
    installed.backend("good")
    result = installed.run("doctor", MESHCORE_BACKENDS="good")
    assert (result.returncode, result.stderr) == (0, "")
    assert "nothing is broken" in result.stdout
    machine = json.loads(installed.run("doctor", "--json", MESHCORE_BACKENDS="good").stdout)
    assert machine["ok"] is True
    assert {check["status"] for check in machine["checks"]} <= {"ok", "warning"}


def test_backends_lists_what_is_installed(installed):
    installed.backend("good")
    result = installed.run("backends", "--json", MESHCORE_BACKENDS="good")
    assert result.returncode == 0
    rows = {row["name"]: row["status"] for row in json.loads(result.stdout)["backends"]}
    expected = {"good": "ready", "numpy": "ready", "null": "ready"}
    assert {name: rows[name] for name in expected} == expected
    assert list(rows) == sorted(rows)
    table = installed.run("backends", MESHCORE_BACKENDS="good")
    assert table.returncode == 0
    assert "\x1b" not in table.stdout
    row = next(line for line in table.stdout.splitlines() if line.startswith("good"))
    assert row.split() == ["good", "dist-good", "1.0", "1.0", "ready", "about", "good"]


def test_backends_exits_with_0_whatever_it_finds(installed):
    installed.backend("broken", "1 / 0", hooks=False)
    result = installed.run("backends", MESHCORE_BACKENDS="broken")
    assert result.returncode == 0
    assert "ZeroDivisionError" in result.stdout


def test_version(installed):
    result = installed.run("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("meshcore-train ")
    assert "backend API 1.0" in result.stdout


@pytest.mark.parametrize("arguments", [["nope"], ["backends", "--colour"], ["doctor", "extra"]])
def test_wrong_usage_exits_with_2(installed, arguments):
    assert installed.run(*arguments).returncode == 2


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_named(installed, missing):
    # The folder comes first on the path, so this hides the real package.
    (installed.folder / f"{missing}.py").write_text(
        f"raise ModuleNotFoundError('No module named {missing}.x', name='{missing}.x')\n"
    )
    result = installed.run("backends")
    assert (result.returncode, result.stdout) == (2, "")
    assert "pip install 'meshcore-train[cli]'" in result.stderr
    assert missing in result.stderr
    assert "Traceback" not in result.stderr


def test_another_missing_module_is_not_taken_for_the_extra(installed):
    (installed.folder / "typer.py").write_text("import a_module_that_is_nowhere\n")
    result = installed.run("backends")
    assert result.returncode == 1
    assert "a_module_that_is_nowhere" in result.stderr
    assert "[cli]" not in result.stderr


def test_the_command_does_not_import_from_the_folder_it_runs_in(installed, monkeypatch):
    work = installed.folder / "work"
    work.mkdir()
    (work / "pluggy.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(work)
    result = installed.run("backends", "--json", MESHCORE_BACKENDS="numpy")
    rows = {row["name"]: row["status"] for row in json.loads(result.stdout)["backends"]}
    assert (rows["numpy"], rows["null"]) == ("ready", "ready")
