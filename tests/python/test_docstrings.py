"""Tests that every example in a docstring runs and prints its output."""

import doctest
import importlib
import pkgutil

import posembed
import posembed_kernels
import pytest

MODULES = [
    module.name
    for package in (posembed, posembed_kernels)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if module.name.partition(".")[2] not in ("__main__", "_C")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name in ("posembed.integrations.torchrec", "posembed.integrations.torchtitan", "posembed_kernels.jax"):
        pytest.importorskip(name.rpartition(".")[2])
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for example in doctest.DocTestFinder().find(module, globs={}):
        runner.run(example)
    assert runner.summarize().failed == 0
