"""Runs functions in several processes of one torch.distributed group (gloo, on the CPU).

The processes stay for further functions, because their start takes longer than most tests.
"""

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 120  # seconds for one function
# Imported once, before the processes are forked.
IMPORTED = [
    "posembed.integrations.distributed",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.testing",
]


def _serve(connection: Connection, rank: int, world_size: int, store: str) -> None:
    """Runs what the parent sends, until it sends None."""
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    while (job := connection.recv()) is not None:
        function, arguments = job
        torch.manual_seed(0)
        try:
            connection.send((True, function(*arguments)))
        except BaseException:  # pytest's own failures are no Exception
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Processes:
    """A group of processes; they end with the ``with`` block."""

    def __init__(self, world_size: int, folder: Path) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._connections, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, str(folder / "store"))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "Processes":
        return self

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of a function of a module, one for each process.

        Raises AssertionError with the traceback of the first process that fails; the others may
        wait for it then, so that they all end.
        """
        for connection in self._connections:
            connection.send((function, arguments))
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            waiting = {c: i for i, c in enumerate(self._connections) if i not in results}
            ready = wait(list(waiting), timeout=LIMIT)
            if not ready:
                self.end()
                raise AssertionError(f"no result after {LIMIT} seconds")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    right, results[rank] = self._connections[rank].recv()
                except EOFError:
                    right, results[rank] = False, "the process died"
                if not right:
                    self.end()
                    raise AssertionError(f"process {rank}:\n{results[rank]}")
        return [results[rank] for rank in range(len(results))]

    @property
    def ended(self) -> bool:
        """Whether a function has failed."""
        return not self._processes

    def end(self) -> None:
        """Ends the processes at once."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.ended:
            for connection in self._connections:
                connection.send(None)
            for process in self._processes:
                process.join(10)
        self.end()
