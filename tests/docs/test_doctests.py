"""Every example in a docstring gives what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import meshcore

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(meshcore.__path__, "meshcore.")
    if not info.name.endswith("__main__")
)


def examples_of(name: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", ["meshcore", *MODULES])
def test_docstring_examples(name):
    runner = doctest.DocTestRunner()
    report: list[str] = []
    for test in examples_of(name):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


def test_there_are_examples():
    assert sum(len(examples_of(name)) for name in MODULES) > 20
