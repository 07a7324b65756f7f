"""Runs every operator on CUDA and on the CPU in float64, forward and backward, and compares.

Sizes include empty and odd ones, and models' widths (hot.py); tensors start at aligned addresses and
beside them; new memory holds NaN, so that an element that a kernel leaves out shows.
compute-sanitizer runs it too:

    compute-sanitizer --tool racecheck python tests/gpu/sweep.py --quick
"""

import argparse
import functools
import itertools
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

import hot
import posembed as pe
from support.case import TOLERANCE, OperatorCase, Sample, assert_close, samples
from support.families import cases
from support.halves import CUDA_ON_CPU
from torch import Tensor

CASES = cases()
SIZES = ((2, 3), (1, 1), (3, 7), (0, 5), (2, 0), (5, 33), (2, 97))
QUICK_SIZES = ((2, 3), (3, 37))
MODELS = ((hot.BATCH, hot.SEQ),)  # the hot samples have their own sizes

DEVICE = "cpu" if CUDA_ON_CPU else "cuda"
CYCLES = 500_000  # a quarter of a millisecond

# A gradient may add up many products, each rounded once: that of ALiBi's slopes is off by 8.1
# roundings of bfloat16 on the CPU too.
GRADIENT_ROUNDINGS = 12


def beside(tensor: Tensor) -> Tensor:
    """The same values, contiguous, one element behind an aligned address."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].view(tensor.shape).copy_(tensor)


def moved(sample: Sample, device: str, shifted: bool) -> Sample:
    """The sample on a device, perhaps at odd addresses."""

    def move(value: object) -> object:
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            return type(value)(map(move, value))
        if not isinstance(value, Tensor):
            return torch.device(device) if isinstance(value, torch.device) else value
        value = value.to(device, copy=True)
        return beside(value) if shifted and value.is_floating_point() else value

    return Sample(tuple(map(move, sample.args)), {k: move(v) for k, v in sample.kwargs.items()})


def results(case: OperatorCase, sample: Sample, backward: bool) -> list[Tensor]:
    """The operator's results, then the gradients of a sum with different weights."""
    if not backward:
        return list(case(sample))
    sample = sample.replace([t.detach().requires_grad_() for t in sample.tensors()])
    outputs = [t for t in case(sample) if t.requires_grad]
    if not outputs:
        return []
    # Weights that every dtype holds exactly.
    weights = [torch.linspace(-64, 96, t.numel()).round().div(64).to(t).view_as(t) for t in outputs]
    return [
        gradient
        for gradient in torch.autograd.grad(outputs, sample.tensors(), weights, allow_unused=True)
        if gradient is not None
    ]


@functools.cache
def other_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def results_behind_a_kernel(case: OperatorCase, sample: Sample, shifted: bool, backward: bool) -> list[Tensor]:
    """The same on another stream, whose inputs come late: no other stream may be used."""
    if CUDA_ON_CPU:
        return results(case, moved(sample, DEVICE, shifted), backward)
    early = moved(sample, DEVICE, False)
    torch.cuda.synchronize()
    with torch.cuda.stream(other_stream()):
        torch.cuda._sleep(CYCLES)
        found = results(case, moved(early, DEVICE, shifted), backward)
    other_stream().synchronize()
    return found


def check(case: OperatorCase, sample: Sample, dtype: torch.dtype, shifted: bool) -> None:
    for backward in (False, True) if case.differentiable and not case.mutates else (False,):
        roundings = GRADIENT_ROUNDINGS if backward else 1
        wide = torch.float64 if torch.float64 in case.dtypes else torch.float32
        expected = results(case, moved(sample.to(wide), "cpu", False), backward)
        actual = results_behind_a_kernel(case, sample, shifted, backward)
        for ours, wanted in zip(actual, expected, strict=True):
            if ours.is_floating_point():
                tolerance = max(TOLERANCE[dtype], TOLERANCE[ours.dtype])
                if "float32" in case.name:  # sines as torch computes them on each device
                    tolerance = max(tolerance, TOLERANCE[torch.float32])
                rounded = wanted.to(ours.dtype).to(wanted.dtype)
                wanted = torch.where(rounded.isfinite(), wanted, rounded)  # too large for the dtype
                assert_close(ours, wanted, roundings * tolerance)
            else:
                assert torch.equal(ours.cpu(), wanted)
    pe.check_errors()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, two dtypes, aligned")
    parser.add_argument("--no-poison", action="store_true", help="new memory stays uninitialized")
    parser.add_argument("--hot", action="store_true", help="only models' widths")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    if not arguments.no_poison:
        torch.use_deterministic_algorithms(True, warn_only=True)  # and fill new memory with NaN
    began, checks, failures = time.monotonic(), 0, 0
    shared, wide = ([c for c in them if arguments.case in c.name] for them in (CASES, hot.CASES))
    narrow = samples([] if arguments.hot else shared, QUICK_SIZES if arguments.quick else SIZES)
    for case, dtype, size, sample in itertools.chain(samples(wide, MODELS), narrow):
        if arguments.quick and dtype not in (torch.float32, torch.bfloat16):
            continue
        for shifted in (False,) if arguments.quick else (False, True):
            checks += 1
            try:
                check(case, sample, dtype, shifted)
            except Exception as error:
                failures += 1
                text = str(error).splitlines() or traceback.format_exc().splitlines()
                print(f"FAILED {case.name} {dtype} {size} shifted={shifted}: {text[0]}")
                if "CUDA error" in str(error):
                    raise  # the context is lost: what follows would fail for this alone
    print(f"{checks} checks, {failures} failed, {time.monotonic() - began:.0f} s")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
