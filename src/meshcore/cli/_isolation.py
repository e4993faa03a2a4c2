"""Examine backends, each in a process with a time-out: one that crashes or hangs is one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from meshcore.registry import BackendDescription


def examine_all(
    descriptions: Iterable[BackendDescription], *, timeout_seconds: float
) -> Mapping[str, BackendDescription]:
    """Name -> description after loading and probing in a subprocess.

    Statuses: "ready", "unavailable" (it loads, and its probe says that it cannot run here),
    "broken", "rejected". What is already known to be rejected (two distributions) is not started.
    """
    todo = list(descriptions)
    with ThreadPoolExecutor(max_workers=max(1, min(len(todo), os.cpu_count() or 1))) as pool:
        done = pool.map(lambda found: examine(found, timeout_seconds=timeout_seconds), todo)
        return {description.name: description for description in done}


def examine(found: BackendDescription, *, timeout_seconds: float) -> BackendDescription:
    """Load and probe one backend in a subprocess of its own."""
    if found.status == "rejected":
        return found
    # -P: a folder in which the command happens to run adds nothing to the path.
    command = [sys.executable, "-P", "-m", "meshcore.cli._worker", found.name]
    # Files and not pipes: a process that a plugin leaves behind would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            reason = f"it did not load within {timeout_seconds:g} s"
            return replace(found, status="broken", reason=reason)
        finally:
            _end(process)
        out.seek(0)
        err.seek(0)
        return _outcome(found, process.returncode, out.read(), err.read())


def _outcome(found: BackendDescription, code: int, out: bytes, err: bytes) -> BackendDescription:
    try:
        answer = json.loads(out)
    except ValueError:
        return replace(found, status="broken", reason=_death(code, err))
    api = answer["api"]
    return replace(
        found,
        status=answer["status"],
        reason=answer["reason"],
        api=None if api is None else (api[0], api[1]),
        summary=answer["summary"],
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker that still runs, and what it started."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()


def _death(code: int, err: bytes) -> str:
    """Why a worker gave no answer."""
    how = f"exit code {code}"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        how = f"signal {known.get(-code, -code)}"
    lines = err.decode(errors="replace").strip().splitlines()
    return f"its process ended with {how} while loading" + (f": {lines[-1]}" if lines else "")
