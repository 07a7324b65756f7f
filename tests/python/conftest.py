"""Fixtures of all tests: tests that take ``device`` run on the CPU, and on CUDA if available.

In a build of ``make test-cuda-on-cpu``, operators run their CUDA code for tensors on the CPU.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from support.halves import CUDA_ON_CPU


class WithoutCpp:
    """Stands for posembed.cpp, or a part of it, where the build lacks _C: a test that uses it is skipped."""

    def __getattr__(self, name: str) -> "WithoutCpp":
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        return self

    def __call__(self, *_arguments: Any, **_options: Any) -> "WithoutCpp":
        if "PYTEST_CURRENT_TEST" in os.environ:  # otherwise a table of cases is being made
            pytest.skip("posembed.cpp needs posembed._C, which this build lacks")
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter([self()])


if importlib.util.find_spec("posembed._C") is None:
    setattr(pe, "cpp", WithoutCpp())  # noqa: B010


def why_not_on_a_gpu() -> str:
    """The reason why tests marked gpu cannot run here; empty if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device on this machine"
    return "" if pe.build_info()["cuda_version"] else "posembed is built for the CPU alone"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if CUDA_ON_CPU and item.get_closest_marker("no_stand_in"):
        pytest.skip("left out by make test-cuda-on-cpu")
    if CUDA_ON_CPU and "cuda" in item.fixturenames:
        return
    if item.get_closest_marker("gpu") and (reason := why_not_on_a_gpu()):
        pytest.skip(reason)


# The files that take longest, by seconds: they start first, so that no process waits for another at the end.
LONGEST = ("test_operators", "test_reliability", "test_decompositions", "test_guard_pages", "install/test_wheel",
           "test_hostile_files", "test_huggingface", "install/test_install", "test_compatibility", "test_benchmarks",
           "test_memory", "test_modules", "test_specifications_compiled", "test_pretrained", "test_lost_device",
           "test_completion", "test_docs", "test_context_parallel", "test_import")  # fmt: skip


def order(item: pytest.Item) -> int:
    file = item.nodeid.partition(".py::")[0]
    return next((i for i, name in enumerate(LONGEST) if file.endswith("/" + name)), len(LONGEST))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a build of ``make test-cuda-on-cpu``, only tests that name a device can tell it apart."""
    items.sort(key=order)
    if not CUDA_ON_CPU:
        return
    chosen, others = [], []
    for item in items:
        call = getattr(item, "callspec", None)
        on_gpu = call is not None and call.params.get("device") == "cuda"
        names = {"device", "cuda"} & set(getattr(item, "fixturenames", ()))
        (chosen if names and not on_gpu else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


def heap() -> range:
    """The addresses of malloc's heap: several lines of the map if NumPy requested huge pages."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in lines if line.endswith("[heap]")]
    return range(int(places[0][0], 16), int(places[-1][1], 16))


@pytest.fixture
def fresh_memory() -> Iterator[None]:
    """Malloc takes blocks above 32 MiB from the system: the gaps that earlier tests left in its heap are filled."""
    blocks = []
    while (block := torch.empty((32 << 20) + 1, dtype=torch.uint8)).data_ptr() in heap():
        blocks.append(block)
    del block
    yield
    blocks.clear()


LOST_DEVICE = re.compile("CUDA error: (?!out of memory|invalid)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After an illegal access every later call on the device fails: stop, and name the test."""
    if call.excinfo is not None and LOST_DEVICE.search(str(call.excinfo.value)):
        item.session.shouldstop = f"the CUDA context is lost since {item.nodeid}"
    return (yield)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    if torch.cuda.is_initialized():
        torch.manual_seed(0)
    else:  # without the call stack that torch keeps until a GPU is used
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_error_is_left() -> Iterator[None]:
    yield
    pe.check_errors()  # otherwise the next test would report them


def settings() -> dict[str, object]:
    """What later tests of the process would see, if a test left it changed."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "folder": os.getcwd(),
        "variables": {name: text for name, text in os.environ.items() if name.startswith("POSEMBED_")},
    }


@pytest.fixture(autouse=True)
def _nothing_is_left_changed() -> Iterator[None]:
    before = settings()
    yield
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.input_codes.seen:
        torch._dynamo.reset()  # code is compiled for eight kinds of calls, whichever tests make them
    after = settings()
    torch.set_num_threads(before["threads"])
    torch.set_default_dtype(before["dtype"])
    assert after == before


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """For tests marked gpu: the device on which operators run their CUDA code."""
    return torch.device("cpu" if CUDA_ON_CPU else "cuda")
