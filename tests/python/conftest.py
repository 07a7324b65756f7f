"""Fixtures of all tests: every test that takes ``device`` runs on the CPU, and on CUDA where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import pytest
import torch


def why_not_on_a_gpu() -> str:
    """Why tests marked gpu cannot run here; empty where they can."""
    if not torch.cuda.is_available():
        return "no CUDA device on this machine"
    return "" if pe.build_info()["cuda_version"] else "posembed is built for the CPU alone"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_not_on_a_gpu()):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    yield torch.device(request.param)
    if request.param == "cuda":
        pe.check_errors()  # or the next test would be blamed
