"""Token tables: gather, and the gradients of the table in each form."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from posembed.commands.measure import Case, Goal
from setting import Setting
from torch import Tensor, nn

VOCABULARY, DIM, TOKENS = 50257, 768, 8192


def zipf(count: int, device: str) -> Tensor:
    """Ids as frequent as words are: the n-th with probability 1/n."""
    weights = 1.0 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    return torch.multinomial(weights, count, replacement=True).to(device)


def step(module: nn.Module, ids: Tensor, gradient: Tensor):
    def run() -> None:
        module.weight.grad = None
        module(ids).backward(gradient)

    return run


def backward_goals(allocator: str) -> tuple[Goal, ...]:
    """Where memory is not kept, a dense gradient costs its pages, which are torch's as well."""
    dense = Goal("posembed", "nn.Embedding", 1.7 if allocator == "reusing" else 1.0)
    return dense, Goal("posembed, rows", "nn.Embedding, sparse", 1.0)


def of_dtype(dtype: torch.dtype, setting: Setting) -> Iterator[Case]:
    device = setting.device
    kind = str(dtype).removeprefix("torch.")
    where = {"device": device, "dtype": dtype}
    ours = pe.TokenEmbedding(VOCABULARY, DIM, **where)
    rows = pe.TokenEmbedding(VOCABULARY, DIM, gradient="rows", **where)
    theirs = nn.Embedding(VOCABULARY, DIM, **where)
    sparse = nn.Embedding(VOCABULARY, DIM, sparse=True, **where)
    uniform = torch.randint(VOCABULARY, (TOKENS,), device=device)
    out = torch.empty(TOKENS, DIM, **where)
    source = torch.randn_like(out)
    yield Case(
        f"token forward {TOKENS} x {DIM} {kind}",
        {
            "copy_ of the same bytes": lambda: out.copy_(source),
            "posembed": torch.no_grad()(lambda: ours(uniform)),
            "nn.Embedding": torch.no_grad()(lambda: theirs(uniform)),
        },
        "copy_ of the same bytes",
        (Goal("posembed", "nn.Embedding", 1.6 if dtype == torch.float32 else 2.0),),
    )
    for spread, ids in (("uniform", uniform), ("Zipf", zipf(TOKENS, device))):
        yield Case(
            f"token forward and backward {VOCABULARY} x {DIM}, {TOKENS} {spread} ids, {kind}",
            {
                "posembed": step(ours, ids, source),
                "nn.Embedding": step(theirs, ids, source),
                "posembed, rows": step(rows, ids, source),
                "nn.Embedding, sparse": step(sparse, ids, source),
            },
            goals=backward_goals(setting.allocator),
        )


def cases(setting: Setting) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        yield from of_dtype(dtype, setting)
