"""Compares the results of every operator on two processors, bit for bit.

    python tests/aarch64/same_bits.py record FILE     # inputs and results
    python tests/aarch64/same_bits.py compare FILE    # elsewhere: other results of the same inputs?

Inputs travel in the file, because torch's random numbers may differ between processors.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

from support import calls
from support.case import Sample, as_tuple, samples
from torch import Tensor

SIZES = ((2, 3), (3, 37))

# Results that may differ in their last bits, and why.
EXCEPTIONS = {
    r"alibi_attention .*": "torch's scaled_dot_product_attention",
    r"alibi_softmax[-_ ].*": "exponentials are added in the order of vectors (reliability.md)",
    r"rotary(_pair)?-float32.*": "numerics of PyTorch programs: torch's sine and cosine",
    r"(learned|relative_window)_resample.*": "torch's interpolate",
    r"norm_rotary-(layer|all|tables|half-tables).* gradient .*": "torch's operators compute it",
    r"sinusoidal_.* gradient .*": "torch's operators compute it, for positions and a scale",
}
CLOSE = 1e-3  # for those, relative to the largest number: a step of float16


def recorded_calls() -> Iterator[tuple[str, str, Sample, bool]]:
    """Name and text of a call, its arguments, and whether gradients flow to them."""
    for case, dtype, size, sample in samples(calls.every(), SIZES):
        name = case.operator._opname
        if name != "file_rows":  # computes by others' kernels
            yield name, f"{case.name} {dtype} {size}", sample, case.differentiable


def results(name: str, sample: Sample, differentiable: bool) -> dict[str, Tensor]:
    """Outputs, contents of the arguments afterwards, and gradients."""
    operator = getattr(torch.ops.posembed, name).default
    sample = sample.replace([tensor.clone() for tensor in sample.tensors()])
    outputs = outputs_of(operator, sample)
    found = [(f"output {i}", output) for i, output in enumerate(outputs)]
    found += [(f"argument {i}", argument) for i, argument in enumerate(sample.tensors())]
    if differentiable and not any(a.is_write for a in operator._schema.arguments):
        leaves = sample.requires_grad()
        outputs = [output for output in outputs_of(operator, leaves) if output.requires_grad]
        if outputs:
            gradients = torch.autograd.grad(
                outputs, leaves.tensors(), [weights(output) for output in outputs], allow_unused=True
            )
            found += [(f"gradient {i}", g) for i, g in enumerate(gradients) if g is not None]
    return {label: tensor.detach().to_dense() for label, tensor in found}


def outputs_of(operator: torch._ops.OpOverload, sample: Sample) -> list[Tensor]:
    torch.manual_seed(2)
    found = as_tuple(operator(*sample.args, **sample.kwargs))
    return [output for output in found if isinstance(output, Tensor)]


def weights(output: Tensor) -> Tensor:
    """Gradients of an output that every processor computes alike."""
    return torch.linspace(-64, 96, output.numel()).round().div(64).to(output).view_as(output)


def bits(value: Tensor) -> bytes:
    """The bytes of a tensor, with one NaN for all."""
    if value.is_floating_point():
        value = value.masked_fill(value.isnan(), torch.nan)
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def difference(found: Tensor, recorded: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    if found.shape != recorded.shape or found.dtype != recorded.dtype:
        return torch.inf
    error = (found.double() - recorded.double()).abs().nan_to_num(torch.inf)
    largest = recorded.double().nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1e-300)
    return float(error.max() / largest)


def reason(text: str) -> str | None:
    """Why a result may differ."""
    found = [why for pattern, why in EXCEPTIONS.items() if re.fullmatch(pattern, text)]
    return found[0] if found else None


def record(file: Path) -> int:
    """Writes calls with their results."""
    recorded = [
        (name, text, sample.args, sample.kwargs, differentiable, results(name, sample, differentiable))
        for name, text, sample, differentiable in recorded_calls()
    ]
    torch.save(recorded, file)
    return 0


def compare(file: Path) -> int:
    """Repeats the calls; the status is 1 if a result differs that may not."""
    recorded = torch.load(file, weights_only=False)
    excused: dict[str, int] = {}
    wrong = 0
    for name, text, args, kwargs, differentiable, expected in recorded:
        found = results(name, Sample(args, kwargs), differentiable)
        for label in expected.keys() | found.keys():
            ours, theirs = found.get(label), expected.get(label)
            if ours is not None and theirs is not None and bits(ours) == bits(theirs):
                continue
            error = torch.inf if ours is None or theirs is None else difference(ours, theirs)
            why = reason(f"{text} {label}") if error <= CLOSE else None
            if why is None:
                print(f"{text} {label}: differs by {error:.1e}")
                wrong += 1
            else:
                excused[why] = excused.get(why, 0) + 1
    for why, count in excused.items():
        print(f"{count} results differ in their last bits: {why}")
    operators = len({name for name, *_ in recorded})
    print(f"{len(recorded)} calls of {operators} operators; {wrong} results differ that may not")
    return int(wrong > 0)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    return {"record": record, "compare": compare}[arguments.action](arguments.file)


if __name__ == "__main__":
    sys.exit(main())
