"""Sinusoids, learned positions and the fused input embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import posembed as pe
import torch
from measure import Case, Goal
from plan import Plan, plan
from setting import Setting
from torch import Tensor, nn

BATCH, SEQ, DIM, VOCABULARY = 8, 1024, 768, 30522
WIDE = (4, 2048, 4096)  # batch, seq and dim of a large model


def sinusoidal(name: str, dtype: torch.dtype, setting: Setting) -> Case:
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
        name,
        {
            "copy_ into existing memory": lambda: out.copy_(x),
            "clone": lambda: x.clone(),
            "posembed": lambda: position(x),
            "eager, table at hand": lambda: x + table,
        },
        "clone",
        (goals[dtype],) if reuses(setting) else (),
    )


def fourier(name: str, dtype: torch.dtype, setting: Setting) -> Case:
    """Random features of points, beside sinusoids of as many columns at fractional positions."""
    points = torch.rand(BATCH * SEQ, 2, device=setting.device)
    ours = pe.FourierFeatures(random=(2, DIM // 2, 10.0, 0)).to(setting.device)
    waves, rates = pe.SinusoidalSpec(DIM), (ours.frequencies * (2 * math.pi)).float()

    def eager() -> Tensor:
        angles = points @ rates
        return torch.cat([angles.sin(), angles.cos()], -1).to(dtype)

    return Case(
        name,
        {
            "sinusoids of one axis": lambda: pe.functional.sinusoidal_encode(
                points[:, 0], spec=waves, dtype=dtype
            ),
            "posembed": lambda: ours(points, dtype=dtype),
            "eager, inexact": eager,
        },
        goals=(Goal("posembed", "sinusoids of one axis", 1.0),),
    )


def learned(name: str, dtype: torch.dtype, setting: Setting) -> Case:
    """Learned positions, forward and backward: the table's gradient is a sum over the batch."""
    where = {"device": setting.device, "dtype": dtype}
    x = torch.randn(BATCH, SEQ, DIM, **where).requires_grad_()
    gradient, out = torch.randn(BATCH, SEQ, DIM, **where), torch.empty(BATCH, SEQ, DIM, **where)
    ours = pe.LearnedPositionalEmbedding(SEQ, DIM, **where)
    theirs = nn.Embedding(SEQ, DIM, **where)
    positions = torch.arange(SEQ, device=setting.device)

    def step(call: Callable[[], Tensor], table: Tensor) -> Callable[[], None]:
        def run() -> None:
            x.grad = table.grad = None
            call().backward(gradient)

        return run

    return Case(
        name,
        {
            "copy_ into existing memory": lambda: out.copy_(gradient),
            "posembed": step(lambda: ours(x), ours.weight),
            "eager": step(lambda: x + theirs(positions), theirs.weight),
        },
        "copy_ into existing memory",
        (Goal("posembed", "eager", 1.0),),
    )


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


def wide_sum(name: str, dtype: torch.dtype, setting: Setting) -> Case:
    """Token + position rows of a large model: memory traffic alone."""
    batch, seq, dim = WIDE
    where = {"device": setting.device, "dtype": dtype}
    ours = pe.InputEmbedding(VOCABULARY, dim, max_positions=seq, **where)
    theirs = EagerSum(seq, dim, **where)
    ids = torch.randint(VOCABULARY, (batch, seq), device=setting.device)
    out = torch.empty(batch * seq, dim, **where)
    source = torch.empty_like(out).normal_()
    goal = Goal("posembed", "eager", 2.9)
    return Case(
        name,
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


def forward(name: str, dtype: torch.dtype, setting: Setting) -> Case:
    ids = torch.randint(VOCABULARY, (BATCH, SEQ), device=setting.device)
    candidates = {
        label: torch.no_grad()(lambda module=module: module(ids))
        for label, module in modules(dtype, setting).items()
        if "rows" not in label
    }
    return Case(name, candidates, goals=forward_goals(dtype, setting))


def backward(name: str, dtype: torch.dtype, setting: Setting) -> Case:
    ids = torch.randint(VOCABULARY, (BATCH, SEQ), device=setting.device)
    gradient = torch.randn(BATCH, SEQ, DIM, device=setting.device, dtype=dtype)

    def step(module: nn.Module):
        def run() -> None:
            module.zero_grad(set_to_none=True)
            module(ids).backward(gradient)

        return run

    candidates = {label: step(module) for label, module in modules(dtype, setting).items()}
    return Case(name, candidates, goals=step_goals(setting))


def plans(setting: Setting) -> Iterator[Plan]:
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        sizes = f"[{BATCH},{SEQ},{DIM}] {kind}"
        with torch.no_grad():
            yield plan(f"sinusoidal add {sizes}", sinusoidal, dtype, setting)
            yield plan(f"fourier features [{BATCH * SEQ},2] {kind}", fourier, dtype, setting)
        yield plan(f"learned add forward and backward {sizes}", learned, dtype, setting)
        batch, seq, dim = WIDE
        name = f"input: token + position {batch * seq} x {dim} {kind}"
        yield plan(name, wide_sum, dtype, setting)
        name = "input: token + position + LayerNorm forward"
        yield plan(f"{name} {sizes}", forward, dtype, setting)
        yield plan(f"{name} and backward {sizes}", backward, dtype, setting)
