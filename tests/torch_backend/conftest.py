"""One gloo world of four processes for all tests here; meshes of fewer ranks leave some outside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshcore_torch.testing import GlooWorkers

HERE = str(Path(__file__).parent)
# The functions that workers run are imported by name, here and there.
if HERE not in sys.path:
    sys.path.insert(0, HERE)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.path).parent == Path(HERE):
            item.add_marker(pytest.mark.torch)


@pytest.fixture(scope="session")
def workers():
    with GlooWorkers(4) as started:
        yield started
