"""Sinusoids and the fused input embedding."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from posembed.commands.measure import Case, Goal
from setting import Setting
from torch import Tensor, nn

BATCH, SEQ, DIM, VOCABULARY = 8, 1024, 768, 30522


def sinusoidal(dtype: torch.dtype, setting: Setting) -> Case:
    device = setting.device
    x = torch.randn(BATCH, SEQ, DIM, device=device, dtype=dtype)
    out = torch.empty_like(x)
    position = pe.SinusoidalPositionalEmbedding(DIM)
    table = position.encode(torch.arange(SEQ, device=device)).to(dtype)
    goals = {
        torch.float32: Goal("posembed", "clone", 0.9),
        torch.bfloat16: Goal("posembed", "eager, table at hand", 1.8),
    }
    return Case(
        f"sinusoidal add [{BATCH},{SEQ},{DIM}] {name(dtype)}",
        {
            "copy_ into existing memory": lambda: out.copy_(x),
            "clone": lambda: x.clone(),
            "posembed": lambda: position(x),
            "eager, table at hand": lambda: x + table,
        },
        "clone",
        (goals[dtype],) if reuses(setting) else (),
    )


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reuses(setting: Setting) -> bool:
    """Whether new outputs are free, so that what is timed is the work."""
    return setting.device == "cpu" and setting.allocator == "reusing"


class EagerSum(nn.Module):
    """Token + position as one writes it without posembed."""

    def __init__(self, max_positions: int, dim: int, **where: object) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, dim, **where)
        self.position = nn.Embedding(max_positions, dim, **where)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.token(ids) + self.position(positions)


def wide_sum(dtype: torch.dtype, setting: Setting) -> Case:
    """Token + position rows of a large model: memory traffic alone."""
    batch, seq, dim = 4, 2048, 4096
    where = {"device": setting.device, "dtype": dtype}
    ours = pe.InputEmbedding(VOCABULARY, dim, max_positions=seq, **where)
    theirs = EagerSum(seq, dim, **where)
    ids = torch.randint(VOCABULARY, (batch, seq), device=setting.device)
    out = torch.empty(batch * seq, dim, **where)
    source = torch.empty_like(out).normal_()
    goal = Goal("posembed", "eager", 2.9)
    return Case(
        f"input: token + position {batch * seq} x {dim} {name(dtype)}",
        {
            "copy_ of the same bytes": lambda: out.copy_(source),
            "posembed": torch.no_grad()(lambda: ours(ids)),
            "eager": torch.no_grad()(lambda: theirs(ids)),
        },
        "copy_ of the same bytes",
        (goal,) if reuses(setting) and dtype == torch.bfloat16 else (),
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


def modules(dtype: torch.dtype, setting: Setting) -> dict[str, nn.Module]:
    where = {"device": setting.device, "dtype": dtype}
    options = {"positions": "learned", "max_positions": SEQ, "norm": "layer", **where}
    result: dict[str, nn.Module] = {
        "posembed": pe.InputEmbedding(VOCABULARY, DIM, **options),
        "posembed, rows": pe.InputEmbedding(VOCABULARY, DIM, gradient="rows", **options),
        "eager": EagerInput(**where),
    }
    if setting.compile_peers:
        result["compiled"] = torch.compile(EagerInput(**where), fullgraph=True, dynamic=False)
    return result


def forward_goals(dtype: torch.dtype, setting: Setting) -> tuple[Goal, ...]:
    if not reuses(setting):
        return ()
    least = 3.0 if dtype == torch.float32 else 5.0
    return Goal("posembed", "eager", least), Goal("posembed", "compiled", 1.0)


def step_goals(setting: Setting) -> tuple[Goal, ...]:
    if setting.device != "cpu":
        return ()
    if setting.allocator != "reusing":
        return (Goal("posembed, rows", "eager", 10.0),)
    return (
        Goal("posembed", "eager", 2.0),
        Goal("posembed", "compiled", 1.0),
        Goal("posembed, rows", "eager", 4.0),
    )


def input_embedding(dtype: torch.dtype, setting: Setting) -> Iterator[Case]:
    candidates = modules(dtype, setting)
    ids = torch.randint(VOCABULARY, (BATCH, SEQ), device=setting.device)
    gradient = torch.randn(BATCH, SEQ, DIM, device=setting.device, dtype=dtype)

    def forward(module: nn.Module):
        return torch.no_grad()(lambda: module(ids))

    def step(module: nn.Module):
        def run() -> None:
            module.zero_grad(set_to_none=True)
            module(ids).backward(gradient)

        return run

    sizes = f"[{BATCH},{SEQ},{DIM}] {name(dtype)}"
    yield Case(
        f"input: token + position + LayerNorm forward {sizes}",
        {label: forward(module) for label, module in candidates.items() if "rows" not in label},
        goals=forward_goals(dtype, setting),
    )
    yield Case(
        f"input: token + position + LayerNorm forward and backward {sizes}",
        {label: step(module) for label, module in candidates.items()},
        goals=step_goals(setting),
    )


def cases(setting: Setting) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            yield sinusoidal(dtype, setting)
        yield wide_sum(dtype, setting)
        yield from input_embedding(dtype, setting)
