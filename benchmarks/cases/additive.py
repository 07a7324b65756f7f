"""Sinusoids and the fused input embedding."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from posembed.commands.measure import Case
from setting import Setting
from torch import Tensor, nn

BATCH, SEQ, DIM, VOCABULARY = 8, 1024, 768, 30522


def sinusoidal(dtype: torch.dtype, device: str) -> Case:
    x = torch.randn(BATCH, SEQ, DIM, device=device, dtype=dtype)
    out = torch.empty_like(x)
    position = pe.SinusoidalPositionalEmbedding(DIM)
    table = position.encode(torch.arange(SEQ, device=device)).to(dtype)
    return Case(
        f"sinusoidal add [{BATCH},{SEQ},{DIM}] {dtype}",
        {
            "copy_ into existing memory": lambda: out.copy_(x),
            "clone": lambda: x.clone(),
            "posembed": lambda: position(x),
            "eager, table at hand": lambda: x + table,
        },
        "clone",
    )


class EagerInput(nn.Module):
    """Token + position + LayerNorm as one writes it without posembed."""

    def __init__(self, **where: object) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, DIM, **where)
        self.position = nn.Embedding(SEQ, DIM, **where)
        self.norm = nn.LayerNorm(DIM, **where)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.token(ids) + self.position.weight[: ids.shape[1]])


def input_embedding(dtype: torch.dtype, device: str, compile_peers: bool) -> Iterator[Case]:
    where = {"device": device, "dtype": dtype}
    options = {"positions": "learned", "max_positions": SEQ, "norm": "layer", **where}
    modules: dict[str, nn.Module] = {
        "posembed": pe.InputEmbedding(VOCABULARY, DIM, **options),
        "posembed, rows": pe.InputEmbedding(VOCABULARY, DIM, gradient="rows", **options),
        "eager": EagerInput(**where),
    }
    if compile_peers:
        modules["compiled"] = torch.compile(EagerInput(**where), fullgraph=True, dynamic=False)
    ids = torch.randint(VOCABULARY, (BATCH, SEQ), device=device)
    gradient = torch.randn(BATCH, SEQ, DIM, **where)

    def forward(module: nn.Module):
        return torch.no_grad()(lambda: module(ids))

    def step(module: nn.Module):
        def run() -> None:
            module.zero_grad(set_to_none=True)
            module(ids).backward(gradient)

        return run

    sizes = f"[{BATCH},{SEQ},{DIM}] {dtype}"
    yield Case(
        f"input: token + position + LayerNorm forward {sizes}",
        {label: forward(module) for label, module in modules.items() if "rows" not in label},
    )
    yield Case(
        f"input: token + position + LayerNorm forward and backward {sizes}",
        {label: step(module) for label, module in modules.items()},
    )


def cases(setting: Setting) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            yield sinusoidal(dtype, setting.device)
        yield from input_embedding(dtype, setting.device, setting.compile_peers)
