"""ALiBi: the bias alone, added to scores, the softmax of biased scores, gradients of slopes."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from measure import Case, Goal
from plan import Plan, plan
from setting import Setting
from torch import Tensor

from cases import bandwidth_limits

HEADS, LENGTH = 32, 2048
EAGER = "eager"


class Eager:
    """The code that one writes without posembed, with everything made beforehand that can be."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.slopes = pe.functional.alibi_slopes(HEADS, device=device)
        self.place = torch.arange(LENGTH, device=device)
        self.future = self.place[None] > self.place[:, None]
        self.table = self.bias()

    def bias(self) -> Tensor:
        distance = (self.place[None] - self.place[:, None]).float()
        bias = self.slopes[:, None, None] * distance
        return bias.masked_fill(self.future, -torch.inf).to(self.dtype)

    def softmax(self, scores: Tensor) -> Tensor:
        return (scores + self.table).masked_fill(self.future, -torch.inf).softmax(-1)


def sizes(dtype: torch.dtype, queries: int = LENGTH) -> str:
    return f"[{HEADS},{queries},{LENGTH}] {str(dtype).removeprefix('torch.')}"


def against_eager(allocator: str, speed: float) -> tuple[Goal, ...]:
    """A new result beside eager's; fresh memory decides where it is not kept."""
    return (Goal("posembed", EAGER, speed if allocator == "reusing" else 1.0),)


def bias(name: str, dtype: torch.dtype, setting: Setting) -> Case:
    """Beside the fastest fill of the same bytes."""
    module, eager = pe.ALiBi(HEADS).to(setting.device), Eager(dtype, setting.device)
    out = torch.empty(HEADS, LENGTH, LENGTH, device=setting.device, dtype=dtype)
    limit = bandwidth_limits.fill(out) or {"fill_": lambda: out.fill_(1.0)}
    return Case(
        name,
        {
            **limit,
            "posembed": lambda: module(LENGTH, dtype=dtype),
            "posembed, into existing memory": lambda: module(LENGTH, out=out),
            EAGER: eager.bias,
        },
        next(iter(limit)),
        (
            Goal("posembed, into existing memory", bandwidth_limits.FILL, 0.95),
            *against_eager(setting.allocator, 2.0 if dtype == torch.float32 else 5.0),
        ),
    )


def added(name: str, dtype: torch.dtype, causal: bool, setting: Setting) -> Case:
    """Beside the fastest update of the same bytes in place."""
    module, eager = pe.ALiBi(HEADS, causal=causal).to(setting.device), Eager(dtype, setting.device)
    scores = torch.zeros(1, HEADS, LENGTH, LENGTH, device=setting.device, dtype=dtype)
    limit = bandwidth_limits.update(scores) or {"mul_": lambda: scores.mul_(1.0)}
    return Case(
        name,
        {
            **limit,
            "posembed": lambda: module.add_(scores, scale=0.125),
            EAGER: lambda: scores.mul_(0.125).add_(eager.table),
        },
        next(iter(limit)),
        (Goal("posembed", bandwidth_limits.UPDATE, 0.95),),
    )


def softmax(name: str, dtype: torch.dtype, setting: Setting) -> Case:
    module, eager = pe.ALiBi(HEADS).to(setting.device), Eager(dtype, setting.device)
    scores = torch.randn(1, HEADS, LENGTH, LENGTH, device=setting.device).to(dtype)
    copy = scores.clone()
    return Case(
        name,
        {
            **bandwidth_limits.update(copy),
            "posembed": lambda: module.softmax(scores),
            "posembed, in place": lambda: module.softmax_(copy),
            EAGER: lambda: eager.softmax(scores),
        },
        goals=(
            Goal("posembed, in place", EAGER, 3.0),
            *against_eager(setting.allocator, 3.0),
        ),
    )


def decode(name: str, dtype: torch.dtype, device: str) -> Case:
    module, eager = pe.ALiBi(HEADS).to(device), Eager(dtype, device)
    scores = torch.randn(1, HEADS, 1, LENGTH, device=device).to(dtype)
    row = eager.table[:, -1:].clone()
    return Case(
        name,
        {
            "posembed": lambda: module.softmax(scores),
            "posembed, in place": lambda: module.softmax_(scores),
            EAGER: lambda: (scores + row).softmax(-1),
        },
        goals=(Goal("posembed, in place", EAGER, 1.0), Goal("posembed", EAGER, 1.0)),
    )


def gradients(name: str, dtype: torch.dtype, device: str) -> Case:
    slopes = pe.functional.alibi_slopes(HEADS, device=device).to(dtype).requires_grad_()
    scores = torch.randn(1, HEADS, LENGTH, LENGTH, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(1, HEADS, LENGTH, LENGTH, device=device, dtype=dtype)
    place = torch.arange(LENGTH, device=device)
    distance = (place[None] - place[:, None]).to(dtype)
    future = distance > 0

    def eager() -> Tensor:
        biased = scores + slopes[:, None, None] * distance
        return biased.masked_fill(future, -torch.inf).softmax(-1)

    def step(forward):
        return lambda: torch.autograd.grad(forward(), (scores, slopes), grad)

    return Case(
        name,
        {
            "posembed": step(lambda: pe.functional.alibi_softmax(scores, slopes)),
            EAGER: step(eager),
        },
    )


def plans(setting: Setting) -> Iterator[Plan]:
    for dtype in (torch.float32, torch.bfloat16):
        size = sizes(dtype)
        with torch.no_grad():
            yield plan(f"ALiBi bias {size}", bias, dtype, setting)
            for kind in ("causal", "symmetric"):
                name = f"ALiBi added in place, {kind} {size}"
                yield plan(name, added, dtype, kind == "causal", setting)
            yield plan(f"ALiBi softmax {size}", softmax, dtype, setting)
            name = f"ALiBi softmax of one query {sizes(dtype, 1)}"
            yield plan(name, decode, dtype, setting.device)
        yield plan(f"ALiBi softmax and its gradients {size}", gradients, dtype, setting.device)
