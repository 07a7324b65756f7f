"""Tests that every example in a docstring runs and prints its output."""

import doctest
import importlib
import pkgutil

import posembed
import pytest

MODULES = [
    module.name
    for module in pkgutil.walk_packages(posembed.__path__, "posembed.")
    if module.name not in ("posembed.__main__", "posembed._C")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name in ("posembed.integrations.torchrec", "posembed.integrations.torchtitan"):
        pytest.importorskip(name.rpartition(".")[2])
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for example in doctest.DocTestFinder().find(module, globs={}):
        runner.run(example)
    assert runner.summarize().failed == 0
