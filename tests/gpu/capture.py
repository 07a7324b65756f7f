"""Records every operator's first call of a process into a CUDA graph, then replays it.

The first call loads kernels and allocates the record of errors, which a capture restricts. Each
replay must have the bits of an eager call on the same inputs. A process for each operator:

    python tests/gpu/capture.py
"""

import multiprocessing
import os
import sys
import time

import torch
from hot import CASES as HOT
from sweep import CASES as SHARED
from sweep import QUICK_SIZES, OperatorCase, Sample, moved
from torch import Tensor

CASES = [*SHARED, *HOT]


def sample_of(case: OperatorCase, seed: int) -> Sample:
    torch.manual_seed(seed)
    return case.sample(*QUICK_SIZES[1], "cpu", case.dtypes[0])


def tensors_of(sample: Sample) -> list[Tensor]:
    """All tensors of a call, in lists too."""
    flat: list[Tensor] = []
    for value in (*sample.args, *sample.kwargs.values()):
        values = value if isinstance(value, (list, tuple)) else [value]
        flat += [x for x in values if isinstance(x, Tensor)]
    return flat


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(
        x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found, wanted, strict=True)
    )


def outcome(number: int) -> str:
    """Empty if the case passes."""
    case = CASES[number]
    try:
        given = moved(sample_of(case, 1), "cuda", False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = case(given)
        for seed in (1, 2, 3):
            other = moved(sample_of(case, seed), "cuda", False)
            for x, y in zip(tensors_of(given), tensors_of(other), strict=True):
                x.copy_(y)
            graph.replay()
            if not same(results, case(other)):
                return f"{case.name}: a replay differs"
    except Exception as error:
        return f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def main() -> None:
    began = time.monotonic()
    context = multiprocessing.get_context("fork")  # before this process starts the driver
    with context.Pool(min(12, os.cpu_count() or 1), maxtasksperchild=1) as pool:
        failures = [text for text in pool.map(outcome, range(len(CASES)), chunksize=1) if text]
    print("\n".join(failures))
    print(f"{len(CASES)} operators, {len(failures)} failed, {time.monotonic() - began:.0f} s")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
