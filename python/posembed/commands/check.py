"""check: a self-test of posembed on this machine.

Compares angles with 50-digit decimal arithmetic, and gradients with finite differences.
"""

from __future__ import annotations

import argparse
from decimal import Decimal, localcontext
from math import cos, sin
from typing import Any

import torch
from torch.autograd import gradcheck

from posembed import build_info, functional
from posembed.commands import common
from posembed.specifications import RotarySpec

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
POSITIONS = (0, 1, 511, 4096, 131_071, 1_000_003, 2**31 - 1)
SPEC = RotarySpec(128, base=500000)
# float64: 1e-15, plus the rounding of the reference to a float64 below 2 pi.
ALLOWED = {torch.float32: 1.5e-7, torch.float64: 1.5e-15}


def add(commands: common.Commands) -> None:
    """Arguments of check."""
    summary = "test angles and gradients on this machine; exit code 1 where one fails"
    parser = common.add_command(commands, "check", run, summary, ["", "--device cuda", "--json"])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: all that are here")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each check and the verdict."""
    usable = torch.cuda.is_available() and bool(build_info()["cuda_version"])
    if arguments.device == "cuda" and not usable:
        raise ValueError("--device cuda: torch or posembed finds no CUDA device here")
    with localcontext() as context:
        context.prec = 50
        steps = [Decimal(500000) ** (Decimal(-i) / 64) for i in range(64)]
        angles = [[float(Decimal(at) * step % (2 * PI)) for step in steps] for at in POSITIONS]
    rows = [[f(angle) for f in (cos, sin) for angle in row] for row in angles]
    expected = torch.tensor(rows, dtype=torch.float64)
    checks: list[dict[str, Any]] = []
    for device in [arguments.device] if arguments.device else ["cpu", "cuda"][: 1 + usable]:
        at = torch.tensor(POSITIONS, device=device)
        for dtype, allowed in ALLOWED.items():
            unit = torch.zeros(len(POSITIONS), 1, 128, dtype=dtype, device=device)
            unit[..., :64] = 1.0  # (1, 0) in each pair becomes (cosine, sine)
            found = functional.rotary(unit, positions=at, spec=SPEC, layout="thd")[:, 0]
            error = float((found.double().cpu() - expected).abs().max())
            name = f"rotary angles, {str(dtype).removeprefix('torch.')}"
            facts = {"device": device, "name": name, "measured": error, "allowed": allowed}
            checks.append({**facts, "passed": error <= allowed})  # False for NaN too
        x = torch.randn(1, 3, 2, 8, dtype=torch.float64, device=device, requires_grad=True)
        right = gradcheck(
            lambda x: functional.rotary(x, spec=RotarySpec(8)), x, raise_exception=False
        )
        checks.append({"device": device, "name": "rotary gradients", "passed": right})
    failed = sum(not check["passed"] for check in checks)
    known = build_info()
    if arguments.json:
        facts = {name: known[name] for name in ("version", "instruction_set")}
        common.print_json({**facts, "passed": failed == 0, "checks": checks})
        return int(failed > 0)
    for check in checks:
        verdict = "ok    " if check["passed"] else "FAILED"
        measured = "measured" in check
        numbers = f"{check['measured']:.3g} (at most {check['allowed']:g})" if measured else ""
        print(f"{verdict}  {check['device']:4}  {check['name']:32}  {numbers}".rstrip())
    ending = f"{failed} of {len(checks)} checks failed" if failed else ""
    print(ending or f"all {len(checks)} checks passed ({known['instruction_set']})")
    return int(failed > 0)
