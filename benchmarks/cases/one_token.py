"""One token, as a step of generation has it: what a call costs beside its little work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import posembed as pe
import torch
from measure import Case, Goal
from plan import Plan, plan
from setting import Setting
from torch import Tensor, nn

VOCABULARY, DIM, POSITIONS, OFFSET = 50257, 768, 2048, 1000
HEADS = 32
NO_SLOWER = (Goal("posembed", "eager", 1.0),)


def beside(
    name: str,
    ours: Callable[[], object],
    eager: Callable[[], object],
    goals: tuple[Goal, ...] = NO_SLOWER,
) -> Case:
    return Case(name, {"posembed": ours, "eager": eager}, goals=goals)


def for_inference(module: nn.Module, setting: Setting) -> nn.Module:
    """Without gradients; to enter torch.no_grad() in each call would cost as much as a look-up."""
    return module.to(setting.device).requires_grad_(False)


def tables(setting: Setting) -> dict[str, nn.Module]:
    """The tables and the norm of eager code."""
    modules = {
        "token": nn.Embedding(VOCABULARY, DIM),
        "position": nn.Embedding(POSITIONS, DIM),
        "norm": nn.LayerNorm(DIM),
    }
    return {name: for_inference(module, setting) for name, module in modules.items()}


def token(name: str, setting: Setting) -> Case:
    ids = torch.tensor([[7]], device=setting.device)
    ours = for_inference(pe.TokenEmbedding(VOCABULARY, DIM), setting)
    theirs = tables(setting)["token"]
    return beside(name, lambda: ours(ids), lambda: theirs(ids))


def learned(name: str, setting: Setting) -> Case:
    x = torch.randn(1, 1, DIM, device=setting.device)
    ours = for_inference(pe.LearnedPositionalEmbedding(POSITIONS, DIM), setting)
    theirs = tables(setting)["position"]
    place = torch.tensor([OFFSET], device=setting.device)
    return beside(name, lambda: ours(x, offset=OFFSET), lambda: x + theirs(place))


def sinusoidal(name: str, setting: Setting) -> Case:
    """Eager code has the table at hand, up to a length that it has to know."""
    x = torch.randn(1, 1, DIM, device=setting.device)
    ours = pe.SinusoidalPositionalEmbedding(DIM)
    table = ours.encode(torch.arange(POSITIONS, device=setting.device))
    rows = slice(OFFSET, OFFSET + 1)
    return beside(name, lambda: ours(x, offset=OFFSET), lambda: x + table[None, rows], goals=())


def embedding(name: str, setting: Setting, norm: str | None) -> Case:
    ids = torch.tensor([[7]], device=setting.device)
    ours = for_inference(
        pe.InputEmbedding(VOCABULARY, DIM, max_positions=POSITIONS, norm=norm), setting
    )
    theirs, place = tables(setting), torch.tensor([OFFSET], device=setting.device)

    def eager() -> Tensor:
        total = theirs["token"](ids) + theirs["position"](place)
        return total if norm is None else theirs["norm"](total)

    return beside(name, lambda: ours(ids, offset=OFFSET), eager)


def alibi(name: str, setting: Setting) -> Case:
    """Eager code has slopes and distances at hand."""
    scores = torch.randn(1, HEADS, 1, POSITIONS, device=setting.device)
    ours = pe.ALiBi(HEADS).to(setting.device)
    slopes = pe.functional.alibi_slopes(HEADS, device=setting.device)[:, None, None]
    distance = torch.arange(1 - POSITIONS, 1, device=setting.device)
    return beside(name, lambda: ours.add_(scores), lambda: scores.add_(slopes * distance))


def plans(setting: Setting) -> Iterator[Plan]:
    yield plan(f"one token: token [1,1,{DIM}]", token, setting)
    yield plan(f"one token: learned add [1,1,{DIM}]", learned, setting)
    yield plan(f"one token: sinusoidal add [1,1,{DIM}]", sinusoidal, setting)
    yield plan(f"one token: token + position [1,1,{DIM}]", embedding, setting, None)
    yield plan(f"one token: token + position + LayerNorm [1,1,{DIM}]", embedding, setting, "layer")
    yield plan(f"one token: ALiBi onto scores [1,{HEADS},1,{POSITIONS}]", alibi, setting)
