"""Bags of tokens: document vectors, and the gradients of table and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import posembed as pe
import torch
from posembed.commands.measure import Case
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
    for bags in (256, 4096):
        offsets = bounds(bags, device)
        for mode in ("sum", "mean", "max"):
            ours = pe.TokenBag(VOCABULARY, DIM, mode, **where)
            theirs = nn.EmbeddingBag(VOCABULARY, DIM, mode=mode, **where)
            name = f"{mode} of {TOKENS} x {DIM} in {bags} bags, {kind}"
            yield Case(
                f"bag forward, {name}",
                {
                    "posembed": torch.no_grad()(lambda m=ours, o=offsets: m(ids, o)),
                    "nn.EmbeddingBag": torch.no_grad()(lambda m=theirs, o=offsets: m(ids, o)),
                },
            )
            gradient = torch.randn(bags, DIM, **where)
            yield Case(
                f"bag forward and backward, {name}",
                {
                    "posembed": step(lambda m=ours, o=offsets: m(ids, o), ours.weight, gradient),
                    "nn.EmbeddingBag": step(
                        lambda m=theirs, o=offsets: m(ids, o), theirs.weight, gradient
                    ),
                },
            )


def cases(setting: Setting) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        yield from of_dtype(dtype, setting.device)
