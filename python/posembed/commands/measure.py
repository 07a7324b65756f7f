"""Timing: candidates take turns, so that a noisy neighbour hits all of them alike."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch

from posembed.rotary import RotaryEmbedding

# One timing lasts about this long: enough to forget the clock's own cost.
SECONDS = 0.03


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls that do the same, by label.

    Attributes:
        name: What is measured, with sizes.
        candidates: Calls without arguments. "posembed" is judged against every other one.
        floor: The label of the yardstick: a copy or update of the same bytes.
    """

    name: str
    candidates: dict[str, Callable[[], Any]]
    floor: str | None = None


def run(case: Case, rounds: int) -> dict[str, Any]:
    """Median seconds of each candidate, one timing each round."""
    # Its import looks for a CUDA toolkit, which nothing here needs, and complains of finding none.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils.benchmark import Timer

    timers = {}
    for label, call in case.candidates.items():
        call()  # compiles, allocates, fills caches
        timer = Timer("call()", globals={"call": call})
        once = timer.timeit(1).mean
        timers[label] = (timer, max(1, int(SECONDS / max(once, 1e-7))))
    seconds: dict[str, list[float]] = {label: [] for label in timers}
    for _ in range(rounds):
        for label, (timer, number) in timers.items():
            seconds[label].append(timer.timeit(number).mean)
    return {
        "name": case.name,
        "floor": case.floor,
        "seconds": {label: statistics.median(times) for label, times in seconds.items()},
        "best": {label: min(times) for label, times in seconds.items()},
    }


def table(result: dict[str, Any]) -> list[str]:
    """Markdown: time, share of the floor's speed, and how many times slower than posembed."""
    seconds, floor = result["seconds"], result["floor"]
    ours = seconds.get("posembed")
    head = "| | median | of floor | over posembed |"
    lines = [f"### {result['name']}", "", head, "|---|---:|---:|---:|"]
    for label, value in seconds.items():
        share = f"{seconds[floor] / value:.2f}" if floor else ""
        ratio = f"{value / ours:.2f}" if ours else ""
        lines.append(f"| {label} | {readable(value)} | {share} | {ratio} |")
    return [*lines, ""]


def readable(seconds: float) -> str:
    """In microseconds or milliseconds."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.2f} µs"
    return f"{seconds * 1e3:.3f} ms"


def rotation_in_place(device: str) -> Case:
    """The rotation of one layer's queries, which reads and writes as many bytes as a copy."""
    rope = RotaryEmbedding(128)
    query = torch.randn(1, 4096, 32, 128, device=device)
    other = torch.empty_like(query)
    return Case(
        "rotary in place [1, 4096, 32, 128] float32",
        {"copy_": lambda: other.copy_(query), "posembed": lambda: rope.rotate_(query)},
        "copy_",
    )
