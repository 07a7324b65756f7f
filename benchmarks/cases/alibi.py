"""ALiBi: the bias alone, added to scores, the softmax of biased scores, gradients of slopes."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from posembed.commands.measure import Case
from setting import Setting
from torch import Tensor

HEADS, LENGTH = 32, 2048


class Eager:
    """What one writes without posembed, with everything made beforehand that can be."""

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


def bias(dtype: torch.dtype, device: str) -> Iterator[Case]:
    module, eager = pe.ALiBi(HEADS).to(device), Eager(dtype, device)
    scores = torch.randn(1, HEADS, LENGTH, LENGTH, device=device, dtype=dtype)
    sizes = f"[{HEADS},{LENGTH},{LENGTH}] {dtype}"
    yield Case(
        f"ALiBi bias {sizes}",
        {
            "fill_ of the same bytes": lambda: scores.fill_(1.0),
            "posembed": lambda: module(LENGTH, dtype=dtype),
            "eager": eager.bias,
        },
        "fill_ of the same bytes",
    )
    yield Case(
        f"ALiBi added in place {sizes}",
        {
            "mul_ in place": lambda: scores.mul_(1.0),
            "posembed": lambda: module.add_(scores, scale=0.125),
            "eager, bias at hand": lambda: scores.mul_(0.125).add_(eager.table),
        },
        "mul_ in place",
    )
    scores = torch.randn(1, HEADS, LENGTH, LENGTH, device=device, dtype=dtype)
    yield Case(
        f"ALiBi softmax {sizes}",
        {
            "posembed": lambda: module.softmax(scores),
            "posembed, in place": lambda: module.softmax_(scores),
            "eager, bias at hand": lambda: eager.softmax(scores),
        },
    )


def decode(dtype: torch.dtype, device: str) -> Iterator[Case]:
    module, eager = pe.ALiBi(HEADS).to(device), Eager(dtype, device)
    scores = torch.randn(1, HEADS, 1, LENGTH, device=device, dtype=dtype)
    row = eager.table[:, -1:]
    yield Case(
        f"ALiBi softmax of one query [{HEADS},1,{LENGTH}] {dtype}",
        {
            "posembed": lambda: module.softmax(scores),
            "posembed, in place": lambda: module.softmax_(scores),
            "eager, bias at hand": lambda: (scores + row).softmax(-1),
        },
    )


def gradients(dtype: torch.dtype, device: str) -> Iterator[Case]:
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

    yield Case(
        f"ALiBi softmax and its gradients [{HEADS},{LENGTH},{LENGTH}] {dtype}",
        {
            "posembed": step(lambda: pe.functional.alibi_softmax(scores, slopes)),
            "eager": step(eager),
        },
    )


def cases(setting: Setting) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            yield from bias(dtype, setting.device)
            yield from decode(dtype, setting.device)
        yield from gradients(dtype, setting.device)
