"""Several jax processes on this machine: the same verbs, and a peer that is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("jax_process.py")
WATCHDOG_SECONDS = 150

pytestmark = [pytest.mark.slow, pytest.mark.timeout(WATCHDOG_SECONDS + 30)]


def run_both(scenario, logs):
    """Run a scenario in two processes; (exit status, output) of each."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    running, outputs = [], [logs / f"{scenario}{process}.log" for process in range(2)]
    try:
        for process, output in enumerate(outputs):
            with output.open("w") as stream:
                arguments = [str(SCRIPT), scenario, str(process), str(port)]
                command = [sys.executable, "-W", "error", *arguments]
                running.append(
                    subprocess.Popen(command, env=clean, stdout=stream, stderr=subprocess.STDOUT)
                )
        deadline = time.monotonic() + WATCHDOG_SECONDS
        return [
            (job.wait(max(0.0, deadline - time.monotonic())), output.read_text())
            for job, output in zip(running, outputs, strict=True)
        ]
    finally:
        for job in running:
            if job.poll() is None:
                job.kill()
                job.wait()


@pytest.mark.parametrize("scenario", ["verbs", "training"])
def test_two_processes_do_what_one_does(scenario, tmp_path):
    for status, output in run_both(scenario, tmp_path):
        assert status == 0, output
        assert output.endswith("done\n"), output


OUT_OF_MEMORY = """
from meshcore_jax.launch import emulate_cpu
emulate_cpu(2)
import resource
import numpy as np
import meshcore as mc
from meshcore.testing import line
from meshcore_jax.backend import JaxBackend

backend = JaxBackend(line(0, 1).roles(), mc.BackendOptions())
numel = 1 << 26
shards = mc.BufferSpec(numel, "float32", mc.Placement.SHARDED)
whole = mc.BufferSpec(numel, "float32", mc.Placement.REPLICATED)
array = backend.zeros(shards)
backend.wait(array)
with open("/proc/self/statm") as pages:
    used = int(pages.read().split()[0]) * resource.getpagesize()
limit = used + whole.local_nbytes(2)  # of the two that a gather opens
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    backend.redistribute(array, shards, whole, into=None)
except MemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
full = backend.redistribute(array, shards, whole, into=None)
print(backend.nbytes(full))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits address space by RLIMIT_AS")
def test_running_out_of_memory_is_a_memory_error_and_can_be_tried_again():
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told, measured = done.stdout.splitlines()
    assert told.startswith("gather of 67108864 x float32")
    assert "RESOURCE_EXHAUSTED" in told
    assert measured == "{0: 268435456, 1: 268435456}"


def test_a_peer_that_is_gone_is_named(tmp_path):
    (status, output), (peer_status, _) = run_both("peer", tmp_path)
    assert (status, peer_status) == (0, 7), output
    assert "exchange 1 (waiting for jax process 1, ranks (2, 3))" in output
    assert "restart all processes" in output
