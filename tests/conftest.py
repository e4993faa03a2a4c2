"""What holds for every test: the environment of both frameworks, and which tests can run here."""

from __future__ import annotations

import functools
import os
import sys

import hypothesis
import pytest

EMULATED_DEVICES = 8

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could ask for CPU devices")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + f" --xla_force_host_platform_device_count={EMULATED_DEVICES}"
    ).strip()
# XLA's thread pool has one thread a core; emulated devices that wait for each other in a collective
# need one each, or they wait for ever.
os.environ.setdefault("NPROC", str(4 * EMULATED_DEVICES))

# Deadlines are timing assertions. In CI the examples are the same in every run.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@functools.cache
def _why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"torch is not installed ({error})"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            reason = _why_no_gpu()
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
