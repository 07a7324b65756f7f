"""Bags of tokens: document vectors, and the gradients of table and weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import posembed as pe
import torch
from posembed.commands.measure import Case, Goal
from setting import Setting
from torch import Tensor, nn

from cases.token import zipf

VOCABULARY, DIM, TOKENS = 50257, 384, 32768


def bounds(bags: int, device: str) -> Tensor:
    """Where bags of unequal sizes begin."""
    offsets = torch.randint(TOKENS, (bags,), generator=torch.Generator().manual_seed(0))
    offsets[0] = 0
    return offsets.sort().values.to(device)


def step(call: Callable[[], Tensor], weight: Tensor, gradient: Tensor) -> Callable[[], None]:
    def run() -> None:
        weight.grad = None
        call().backward(gradient)

    return run


def of_dtype(dtype: torch.dtype, device: str) -> Iterator[Case]:
    kind = str(dtype).removeprefix("torch.")
    where = {"device": device, "dtype": dtype}
    ids = zipf(TOKENS, device)
    goals = (Goal("posembed", "nn.EmbeddingBag", 1.0),)
    for bags in (256, 4096):
        offsets = bounds(bags, device)
        gradient = torch.randn(bags, DIM, **where)
        for what in ("sum", "weighted sum", "mean", "max"):
            mode = what.removeprefix("weighted ")
            weights = torch.rand(TOKENS, **where) if what == "weighted sum" else None
            ours = pe.TokenBag(VOCABULARY, DIM, mode, **where)
            theirs = nn.EmbeddingBag(VOCABULARY, DIM, mode=mode, **where)
            modules = {"posembed": ours, "nn.EmbeddingBag": theirs}
            calls = {
                label: functools.partial(module, ids, offsets, weights)
                for label, module in modules.items()
            }
            name = f"{what} of {TOKENS} x {DIM} in {bags} bags, {kind}"
            yield Case(
                f"bag forward, {name}",
                {label: torch.no_grad()(call) for label, call in calls.items()},
                goals=goals,
            )
            yield Case(
                f"bag forward and backward, {name}",
                {
                    label: step(call, modules[label].weight, gradient)
                    for label, call in calls.items()
                },
                goals=goals,
            )


def cases(setting: Setting) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        yield from of_dtype(dtype, setting.device)
