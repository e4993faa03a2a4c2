"""Starting jax: emulated devices, in time or too late, and what an import brings along."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import meshcore as mc
from meshcore_jax.launch import emulate_cpu, emulated_cpu_env, initialize_distributed


def answers(code, **env):
    """What a fresh process prints, line by line."""
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_the_environment_keeps_other_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=2 --xla_b=2")
    monkeypatch.setenv("NPROC", "2")
    env = emulated_cpu_env(12)
    assert env["XLA_FLAGS"].split() == [
        "--xla_a=1",
        "--xla_b=2",
        "--xla_force_host_platform_device_count=12",
    ]
    assert int(env["NPROC"]) >= 4 * 12
    assert env["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("devices", [0, -1])
def test_no_device_is_refused(devices):
    with pytest.raises(mc.MeshError, match=f"not {devices}"):
        emulated_cpu_env(devices)


def test_enough_devices_are_left_alone():
    import jax

    have = len(jax.devices())
    before = dict(os.environ)
    emulate_cpu(have)
    emulate_cpu(1)
    assert dict(os.environ) == before
    assert len(jax.devices()) == have


def test_too_late_is_too_late():
    import jax

    have = len(jax.devices())
    with pytest.raises(mc.MeshError, match=f"started with {have}.*emulated_cpu_env"):
        emulate_cpu(have + 1)


def test_joining_other_processes_too_late_is_named():
    import jax

    jax.devices()
    with pytest.raises(mc.BackendError, match="process 0 of 2 could not join.*before the first"):
        initialize_distributed("127.0.0.1:1", 2, process=0, timeout_seconds=1)


def test_hooks_and_launcher_leave_jax_alone_until_it_is_needed():
    code = (
        "import sys, meshcore_jax, meshcore_jax.launch\n"
        "meshcore_jax.meshcore_backend_info().probe()\n"
        "meshcore_jax.launch.emulated_cpu_env(2)\n"
        "print('jax' in sys.modules)"
    )
    assert answers(code) == ["False"]


@pytest.mark.parametrize("first", ["", "import jax\n"])
def test_a_fresh_process_gets_the_devices_it_asks_for(first):
    code = (
        f"{first}from meshcore_jax.launch import emulate_cpu\n"
        "emulate_cpu(3)\n"
        "import jax\n"
        "print(len(jax.devices()), jax.devices()[0].platform)"
    )
    assert answers(code) == ["3 cpu"]


def test_the_environment_works_for_a_child():
    code = "import jax; print(len(jax.devices()))"
    assert answers(code, **emulated_cpu_env(5)) == ["5"]


@pytest.mark.parametrize("first", ["", "import jax\n"])
def test_a_larger_number_that_was_asked_for_before_is_kept(first):
    code = (
        f"{first}from meshcore_jax.launch import emulate_cpu\n"
        "emulate_cpu(2)\n"
        "import jax\n"
        "print(len(jax.devices()))"
    )
    assert answers(code, **emulated_cpu_env(5)) == ["5"]
