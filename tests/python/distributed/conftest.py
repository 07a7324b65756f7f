"""Groups of processes that the tests of a file share."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.processes import Processes


class Groups:
    """The groups by size, each started by the first test that needs it."""

    def __init__(self, stack: ExitStack, folders: pytest.TempPathFactory) -> None:
        self._stack, self._folders = stack, folders
        self._started: dict[int, Processes] = {}

    def of(self, size: int) -> Processes:
        group = self._started.get(size)
        if group is None or group.ended:
            group = self._stack.enter_context(Processes(size, self._folders.mktemp("group")))
            self._started[size] = group
        return group


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    with ExitStack() as stack:
        yield Groups(stack, tmp_path_factory)


@pytest.fixture
def two(groups: Groups) -> Processes:
    return groups.of(2)


@pytest.fixture
def four(groups: Groups) -> Processes:
    return groups.of(4)
