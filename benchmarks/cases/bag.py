"""Bags of tokens: document vectors, and the gradients of table and weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import posembed as pe
import torch
from measure import Case, Goal
from plan import Plan, plan
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


class Bags:
    """A table, ids and the bags that share them."""

    def __init__(self, bags: int, pooling: str, dtype: torch.dtype, device: str) -> None:
        where = {"device": device, "dtype": dtype}
        mode = pooling.removeprefix("weighted ")
        self.ids, self.offsets = zipf(TOKENS, device), bounds(bags, device)
        self.weights = None if mode == pooling else torch.rand(TOKENS, **where)
        self.modules = {
            "posembed": pe.TokenBag(VOCABULARY, DIM, mode, **where),
            "nn.EmbeddingBag": nn.EmbeddingBag(VOCABULARY, DIM, mode=mode, **where),
        }
        self.gradient = torch.randn(bags, DIM, **where)

    def calls(self) -> dict[str, tuple[Callable[[], Tensor], Tensor]]:
        """Each call with the table that it reads."""
        places = self.ids, self.offsets, self.weights
        return {
            label: (functools.partial(module, *places), module.weight)
            for label, module in self.modules.items()
        }


GOALS = (Goal("posembed", "nn.EmbeddingBag", 1.0),)


def forward(name: str, *which: object) -> Case:
    calls = {label: torch.no_grad()(call) for label, (call, _) in Bags(*which).calls().items()}
    return Case(name, calls, goals=GOALS)


def backward(name: str, *which: object) -> Case:
    bags = Bags(*which)
    calls = {label: step(*call, bags.gradient) for label, call in bags.calls().items()}
    return Case(name, calls, goals=GOALS)


def plans(setting: Setting) -> Iterator[Plan]:
    poolings = ("sum", "weighted sum", "mean", "max")
    dtypes = (torch.float32, torch.bfloat16)
    for dtype, bags, pooling in itertools.product(dtypes, (256, 4096), poolings):
        kind = str(dtype).removeprefix("torch.")
        name = f"{pooling} of {TOKENS} x {DIM} in {bags} bags, {kind}"
        which = (bags, pooling, dtype, setting.device)
        yield plan(f"bag forward, {name}", forward, *which)
        yield plan(f"bag forward and backward, {name}", backward, *which)
