"""Times calls: candidates take turns, and their fastest timings are compared.

Other work on a machine only adds time, so the fastest of many timings describes a call best.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

# The length of a candidate's turn: long enough to include an undisturbed timing.
SECONDS = 0.03


@dataclasses.dataclass(frozen=True)
class Goal:
    """A candidate must be at least ``speed`` times as fast as another call of its case."""

    candidate: str
    other: str
    speed: float


@dataclasses.dataclass(frozen=True)
class Limit:
    """A candidate must take at most this many seconds."""

    candidate: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls that do the same, by label.

    Attributes:
        name: What is measured, with sizes.
        candidates: Calls without arguments. "posembed" is judged against every other one.
        baseline: The label of a copy or update of the same bytes.
        goals: Goals; those relative to a call that the case lacks are skipped.
        limit: A goal that does not depend on another call.
        repeats: How many times a candidate does its work in one call.
    """

    name: str
    candidates: dict[str, Callable[[], Any]]
    baseline: str | None = None
    goals: tuple[Goal, ...] = ()
    limit: Limit | None = None
    repeats: int = 1


def run(case: Case, rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Median and fastest timing of each candidate in seconds, and a line for each goal."""
    # Its import warns if there is no CUDA toolkit, which is not needed here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()
    timers = {}
    for label, call in case.candidates.items():
        call()  # compiles, allocates, fills caches
        timers[label] = Timer("call()", globals={"call": call}, num_threads=threads, timer=clock)
    seconds: dict[str, list[float]] = {label: [] for label in timers}
    for _ in range(rounds):
        for label, timer in timers.items():
            times = timer.blocked_autorange(min_run_time=SECONDS).times
            seconds[label] += [time / case.repeats for time in times]
    best = {label: min(times) for label, times in seconds.items()}
    return {
        "name": case.name,
        "baseline": case.baseline,
        "median": {label: statistics.median(times) for label, times in seconds.items()},
        "best": best,
        "goals": [*verdicts(case, best)],
    }


def speed(best: dict[str, float], candidate: str, other: str) -> float:
    """The ratio of another call's time to the candidate's."""
    return best[other] / best[candidate]


def verdicts(case: Case, best: dict[str, float]) -> Iterator[str]:
    """A line for each goal, with the value reached."""
    for goal in case.goals:
        if goal.other in best:
            reached = speed(best, goal.candidate, goal.other)
            what = f"{goal.candidate}: {goal.speed:.3g} x the speed of {goal.other}"
            yield f"{what}; reached {reached:.2f}, {met(reached >= goal.speed)}"
    if case.limit:
        took = best[case.limit.candidate]
        what = f"{case.limit.candidate}: at most {readable(case.limit.seconds)}"
        yield f"{what}; took {readable(took)}, {met(took <= case.limit.seconds)}"


def met(reached: bool) -> str:
    """The word for a table."""
    return "met" if reached else "**not met**"


def table(result: dict[str, Any]) -> list[str]:
    """A Markdown table: times, fraction of the baseline's speed, slowdown vs. posembed, goals."""
    best, baseline = result["best"], result["baseline"]
    head = "| | median | fastest | of baseline | over posembed |"
    lines = [f"### {result['name']}", "", head, "|---|---:|---:|---:|---:|"]
    for label, median in result["median"].items():
        share = f"{speed(best, label, baseline):.2f}" if baseline else ""
        ratio = f"{speed(best, 'posembed', label):.2f}" if "posembed" in best else ""
        lines.append(
            f"| {label} | {readable(median)} | {readable(best[label])} | {share} | {ratio} |"
        )
    goals = [f"- {line}" for line in result["goals"]]
    return [*lines, "", "Goals:", "", *goals, ""] if goals else [*lines, ""]


def readable(seconds: float) -> str:
    """A time in microseconds or milliseconds."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.2f} µs"
    return f"{seconds * 1e3:.3f} ms"
