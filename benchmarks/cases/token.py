"""Token tables: gather, and the gradients of the table in each form."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from measure import Case, Goal
from plan import Plan, plan
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


def coalesced_step(module: nn.Module, ids: Tensor, gradient: Tensor):
    """To where "rows" ends: each row once, summed and sorted, as optimizers read them."""
    run_step = step(module, ids, gradient)

    def run() -> None:
        run_step()
        module.weight.grad = module.weight.grad.coalesce()

    return run


def backward_goals(allocator: str) -> tuple[Goal, ...]:
    """Where memory is not kept, a dense gradient costs its pages, which are torch's as well."""
    dense = Goal("posembed", "nn.Embedding", 1.7 if allocator == "reusing" else 1.0)
    return dense, Goal("posembed, rows", "nn.Embedding, sparse", 1.0)


def forward(name: str, dtype: torch.dtype, setting: Setting) -> Case:
    where = {"device": setting.device, "dtype": dtype}
    ours = pe.TokenEmbedding(VOCABULARY, DIM, **where)
    theirs = nn.Embedding(VOCABULARY, DIM, **where)
    ids = torch.randint(VOCABULARY, (TOKENS,), device=setting.device)
    out = torch.empty(TOKENS, DIM, **where)
    source = torch.randn_like(out)
    return Case(
        name,
        {
            "copy_ of the same bytes": lambda: out.copy_(source),
            "posembed": torch.no_grad()(lambda: ours(ids)),
            "nn.Embedding": torch.no_grad()(lambda: theirs(ids)),
        },
        "copy_ of the same bytes",
        (Goal("posembed", "nn.Embedding", 1.6 if dtype == torch.float32 else 2.0),),
    )


def backward(name: str, dtype: torch.dtype, spread: str, setting: Setting) -> Case:
    device = setting.device
    where = {"device": device, "dtype": dtype}
    uniform = torch.randint(VOCABULARY, (TOKENS,), device=device)
    ids = uniform if spread == "uniform" else zipf(TOKENS, device)
    modules = {
        "posembed": pe.TokenEmbedding(VOCABULARY, DIM, **where),
        "nn.Embedding": nn.Embedding(VOCABULARY, DIM, **where),
        "posembed, rows": pe.TokenEmbedding(VOCABULARY, DIM, gradient="rows", **where),
        "nn.Embedding, sparse": nn.Embedding(VOCABULARY, DIM, sparse=True, **where),
    }
    gradient = torch.randn(TOKENS, DIM, **where)
    candidates = {label: step(module, ids, gradient) for label, module in modules.items()}
    sparse = modules["nn.Embedding, sparse"]
    candidates["nn.Embedding, sparse, coalesced"] = coalesced_step(sparse, ids, gradient)
    return Case(name, candidates, goals=backward_goals(setting.allocator))


def plans(setting: Setting) -> Iterator[Plan]:
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        yield plan(f"token forward {TOKENS} x {DIM} {kind}", forward, dtype, setting)
        for spread in ("uniform", "Zipf"):
            sizes = f"{VOCABULARY} x {DIM}, {TOKENS} {spread} ids, {kind}"
            name = f"token forward and backward {sizes}"
            yield plan(name, backward, dtype, spread, setting)
