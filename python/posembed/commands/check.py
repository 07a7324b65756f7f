"""check: a self-test of posembed on this machine.

Compares angles with 50-digit decimal arithmetic, and gradients with finite differences.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from math import cos, sin
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import gradcheck

from posembed import build_info, functional
from posembed.alibi import ALiBi
from posembed.commands import common
from posembed.input import InputEmbedding
from posembed.learned import LearnedPositionalEmbedding
from posembed.rotary import RotaryEmbedding
from posembed.specification import RotarySpec, SinusoidalSpec
from posembed.token import TokenEmbedding

if TYPE_CHECKING:
    from posembed.commands.common import Commands

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
POSITIONS = (0, 1, 511, 4096, 131_071, 1_000_003, 2**31 - 1)
HEAD_DIM, BASE = 128, 500000
# float64: 1e-15, plus the rounding of the reference to a float64 below 2 pi.
ALLOWED = {torch.float32: 1.5e-7, torch.float64: 1.5e-15}
# An in-place rotation moves as many bytes as a copy. A much longer time indicates a problem, such
# as a reduced instruction set or more threads than cores.
SLOWEST = 8.0


@dataclasses.dataclass(frozen=True)
class Result:
    """A measured value and its allowed maximum."""

    name: str
    measured: float
    allowed: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.measured <= self.allowed


def add(commands: Commands) -> None:
    """Arguments of check."""
    parser = common.add_command(
        commands,
        "check",
        run,
        "test exactness, gradients and speed on this machine; exit code 1 where one fails",
        ["", "--device cuda", "--json"],
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: all that are here")
    parser.add_argument("--no-speed", action="store_true", help="leave out what takes time")


# ---------------------------------------------------------------------------------------- exactness


def reference(pairs: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position and pair: float64 [positions, pairs] each."""
    with localcontext() as context:
        context.prec = 50
        speeds = [Decimal(BASE) ** (Decimal(-i) / Decimal(pairs)) for i in range(pairs)]
        angles = [[float(Decimal(at) * speed % (2 * PI)) for speed in speeds] for at in POSITIONS]
    cosines, sines = ([[f(angle) for angle in row] for row in angles] for f in (cos, sin))
    return torch.tensor(cosines, dtype=torch.float64), torch.tensor(sines, dtype=torch.float64)


def worst(found: Tensor, expected: Tensor) -> float:
    """The largest difference."""
    return float((found.double().cpu() - expected).abs().max())


def exactness(device: str) -> Iterator[Result]:
    """Rotations and sinusoids, from position 0 to the largest int32."""
    cosines, sines = reference(HEAD_DIM // 2)
    positions = torch.tensor(POSITIONS, device=device)
    spec = RotarySpec(HEAD_DIM, base=BASE)
    encoding = SinusoidalSpec(HEAD_DIM, base=BASE, preset="marian")
    for dtype, allowed in ALLOWED.items():
        kind = str(dtype).removeprefix("torch.")
        unit = torch.zeros(len(POSITIONS), 1, HEAD_DIM, dtype=dtype, device=device)
        unit[..., : HEAD_DIM // 2] = 1.0  # (1, 0) in each pair becomes (cosine, sine)
        turned = functional.rotary(unit, positions=positions, spec=spec, layout="thd")[:, 0]
        error = worst(turned, torch.cat((cosines, sines), 1))
        yield Result(f"rotary angles, {kind}", error, allowed)
        encoded = functional.sinusoidal_encode(positions, spec=encoding, dtype=dtype)
        error = worst(encoded, torch.cat((sines, cosines), 1))
        yield Result(f"sinusoids, {kind}", error, allowed)


def counted(device: str) -> Result:
    """Sums many gradients of one row in float32; bfloat16 sums would stop at 256."""
    number = 10_240
    token = TokenEmbedding(4, 8, device=device, dtype=torch.bfloat16)
    token(torch.ones(number, dtype=torch.int64, device=device)).sum().backward()
    assert token.weight.grad is not None
    return Result("token gradients, bfloat16", worst(token.weight.grad[1], torch.tensor(number)), 0)


# ---------------------------------------------------------------------------------------- gradients


def differentiable(device: str) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Functions of float64 tensors, by name, with their arguments."""
    where: dict[str, Any] = {"device": device, "dtype": torch.float64}
    ids = torch.tensor([[1, 4, 1, 0]], device=device)
    rotary = RotaryEmbedding(8)
    learned, token = LearnedPositionalEmbedding(6, 3, **where), TokenEmbedding(5, 3, **where)
    whole = InputEmbedding(5, 6, positions="learned", max_positions=4, norm="layer", **where)
    names = [name for name, _ in whole.named_parameters()]

    def with_table(module: torch.nn.Module, *inputs: Tensor) -> Callable[[Tensor], Any]:
        return lambda weight: torch.func.functional_call(module, {"weight": weight}, inputs)

    def embedded(*parameters: Tensor) -> Any:
        return torch.func.functional_call(whole, dict(zip(names, parameters, strict=True)), (ids,))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, **where, requires_grad=True)

    x = torch.zeros(1, 4, 3, **where)
    return {
        "rotary": (lambda q, k: rotary(q, k), (random(1, 3, 2, 8), random(1, 3, 1, 8))),
        "sinusoidal": (
            lambda at: functional.sinusoidal_encode(at, spec=SinusoidalSpec(6)),
            (random(4),),
        ),
        "learned positions": (with_table(learned, x), (random(6, 3),)),
        "tokens": (with_table(token, ids), (random(5, 3),)),
        "ALiBi": (
            lambda slopes: functional.alibi_bias(slopes, 3, 4, apply_mask=False),
            (random(2),),
        ),
        "input": (embedded, tuple(random(*p.shape) for p in whole.parameters())),
    }


def gradients(device: str) -> Iterator[Result]:
    """Compares each operator's backward with finite differences; 1 means failure."""
    for name, (function, inputs) in differentiable(device).items():
        right = gradcheck(function, inputs, raise_exception=False)
        yield Result(f"gradients, {name}", 0.0 if right else 1.0, 0.0)


# -------------------------------------------------------------------------------------------- speed


def speed(device: str) -> Result:
    """Times an in-place rotation relative to a copy of the same bytes.

    The two take turns, and their fastest times are compared: other work only adds time.
    """
    # Its import warns if there is no CUDA toolkit, which is not needed here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils.benchmark import Timer

    rope, query = RotaryEmbedding(128), torch.randn(1, 4096, 32, 128, device=device)
    other, calls = torch.empty_like(query), ("rope.rotate_(query)", "other.copy_(query)")
    variables = {"rope": rope, "query": query, "other": other}
    timers = [Timer(each, globals=variables, num_threads=torch.get_num_threads()) for each in calls]
    times: list[list[float]] = [[], []]
    for _ in range(5):
        for found, timer in zip(times, timers, strict=True):
            found += timer.blocked_autorange(min_run_time=0.03).times
    rotation, copy = map(min, times)
    return Result("rotation in place, times a copy", rotation / copy, SLOWEST)


# ------------------------------------------------------------------------------------------ command


def devices(chosen: str | None) -> list[str]:
    """The requested device, or all that posembed can use."""
    usable = torch.cuda.is_available() and bool(build_info()["cuda_version"])
    if chosen == "cuda" and not usable:
        raise ValueError("--device cuda: torch or posembed finds no CUDA device here")
    return [chosen] if chosen else ["cpu", "cuda"] if usable else ["cpu"]


def results(device: str, with_speed: bool) -> Iterator[Result]:
    """All checks on a device."""
    torch.manual_seed(0)
    slopes = worst(ALiBi(8).slopes, 2.0 ** -torch.arange(1, 9, dtype=torch.float64))
    yield from exactness(device)
    yield Result("ALiBi slopes", slopes, 0.0)
    yield counted(device)
    yield from gradients(device)
    if with_speed:
        yield speed(device)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each check and the verdict."""
    found: list[dict[str, Any]] = []
    for device in devices(arguments.device):
        for result in results(device, not arguments.no_speed):
            found.append({"device": device, **vars(result), "passed": result.passed})
            if not arguments.json:
                print(line(device, result), flush=True)
    failed = sum(not result["passed"] for result in found)
    if arguments.json:
        facts = build_info()
        known = {"version": facts["version"], "instruction_set": facts["instruction_set"]}
        common.print_json({**known, "passed": failed == 0, "checks": found})
    elif failed:
        print(f"{failed} of {len(found)} checks failed")
    else:
        print(f"all {len(found)} checks passed ({build_info()['instruction_set']})")
    return int(failed > 0)


def line(device: str, result: Result) -> str:
    """One check as a line of text."""
    verdict = "ok    " if result.passed else "FAILED"
    numbers = f"{result.measured:.3g} (at most {result.allowed:g})" if result.allowed else ""
    return f"{verdict}  {device:4}  {result.name:32}  {numbers}".rstrip()
