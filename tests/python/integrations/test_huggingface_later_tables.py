"""patch(model): tables that are no longer those of rotations at a later call of the same shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import _rotation, _shadow, patch
from torch import Tensor, nn

TOKENS, HEAD = 5, 8


def half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def separate(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


def packed(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Its results are contiguous."""
    return (x * c + half(x) * s).contiguous()


def pair(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    return x * tables[0] + half(x) * tables[1]


def joint(x: Tensor, tables: Tensor) -> Tensor:
    c, s = tables.chunk(2, -1)
    return x * c + half(x) * s


def by_angle(x: Tensor, angles: Tensor) -> Tensor:
    return x * angles.cos() + half(x) * angles.sin()


def gathered(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return x * cos + half(x) * sin


def matrices(x: Tensor, turns: Tensor) -> Tensor:
    parts = x.unflatten(-1, (-1, 1, 2))
    return (turns[..., 0] * parts[..., 0] + turns[..., 1] * parts[..., 1]).flatten(-2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HEAD, eps=1e-3)

    def forward(self, form: str, *given: Any, **named: Any) -> Tensor:
        forms = {"separate": separate, "packed": packed, "pair": pair, "joint": joint}
        forms |= {"by_angle": by_angle, "gathered": gathered, "matrices": matrices}  # type: ignore[dict-item]
        if form == "normed":
            return separate(self.norm(given[0]), *given[1:])
        return forms[form](*given, **named)


def tables(form: str, equal: bool) -> tuple[Any, ...]:
    """Tables, and whether they repeat each value, or matrices are rotations."""
    theta = torch.rand(TOKENS, HEAD // 2)
    theta = torch.cat((theta, theta if equal else torch.rand(TOKENS, HEAD // 2)), -1)
    cos, sin = theta.cos(), theta.sin()
    if form == "matrices":
        first, second = cos.chunk(2, -1), sin.chunk(2, -1)
        rows = first[0], -second[0], second[1], first[1]
        return (torch.stack(rows, -1).unflatten(-1, (2, 2)),)
    if form == "gathered":
        return cos, sin, torch.arange(TOKENS)[None]
    if form in ("pair", "joint"):
        return ((cos, sin),) if form == "pair" else (torch.cat((cos, sin), -1),)
    return (theta,) if form == "by_angle" else (cos, sin)


FORMS = ("separate", "packed", "pair", "joint", "by_angle", "gathered", "matrices", "normed")


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("form", FORMS)
def test_other_tables_of_the_same_shape(form: str, inference: bool) -> None:
    own, model = Model(), Model()
    report = patch(model, numerics="exact" if form == "normed" else "model")
    with torch.inference_mode(inference):
        x = torch.randn(1, 2, TOKENS, HEAD)
        for equal in (True, True, False, True, False, False):
            given = x, *tables(form, equal)
            found = model(form, *given)
            torch.testing.assert_close(found, own(form, *given), rtol=1e-5, atol=1e-6)
            again = model(form, *given)
            assert torch.equal(again, found)
    total = [sum(x) for x in zip(*[each[2:] for each in report.calls()], strict=True)]
    assert total == [6, 6]


def test_tables_that_change_in_place() -> None:
    own, model, x = Model(), Model(), torch.randn(1, 2, TOKENS, HEAD)
    patch(model)
    for named in (False, True):
        cos, sin = tables("separate", True)
        given: Any = ((x,), {"c": cos, "s": sin}) if named else ((x, cos, sin), {})
        for change in (0, 1, 0):
            cos[..., :2] += change
            found = model("separate", *given[0], **given[1])
            assert torch.equal(found, own("separate", *given[0], **given[1]))
            assert torch.equal(found, model("separate", *given[0], **given[1]))


def test_parts_of_a_table_that_changes() -> None:
    """Each layer takes its part of a table anew."""
    own, model, x = Model(), Model(), torch.randn(1, 2, TOKENS, HEAD)
    report = patch(model)
    cos, sin = (torch.cat((t, t)) for t in tables("separate", True))
    cos[TOKENS:, :2] += 1  # a part whose halves differ
    for rows in (slice(0, TOKENS), slice(TOKENS, None), slice(0, TOKENS)):
        for _ in range(2):
            given = x, cos[rows], sin[rows]
            assert torch.equal(model("separate", *given), own("separate", *given))
    cos[:, :2] += 1
    given = x, cos[:TOKENS], sin[:TOKENS]
    assert torch.equal(model("separate", *given), own("separate", *given))
    calls = [each for each in report.calls() if each.function == "separate"]
    assert [(each.kernel, each.own) for each in calls] == [(4, 3)]


def test_tables_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers share them, or take the same part of them."""
    model, x = Model(), torch.randn(1, 2, TOKENS, HEAD)
    patch(model)
    cos, sin = tables("separate", True)
    model("separate", x, cos, sin)
    seen: list[int] = []
    compare = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *given: seen.append(1) or compare(*given))
    for _ in range(3):
        model("separate", x, cos, sin)
    assert seen == []
    for _ in range(3):
        model("separate", x, cos[:], sin[:])
    assert len(seen) == 2
    kept = [tables("separate", True) for _ in range(200)]  # more than are remembered
    for each in kept:
        model("separate", x, *each)
    assert len(seen) == 402
    cases = _shadow.SHADOWS[__name__].rotations["separate"].cases
    assert max(len(case.known.seen) for case in cases) <= _rotation.TABLES
