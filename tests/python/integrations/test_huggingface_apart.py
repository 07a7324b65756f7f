"""patch(model): tables whose two values for a pair are equal in one call and differ in another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import patch
from posembed.integrations.huggingface._door import own_code
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


def transposed(x: Tensor, turns: Tensor) -> Tensor:
    parts, columns = x.unflatten(-1, (-1, 1, 2)), turns.mT
    return (columns[..., 0] * parts[..., 0] + columns[..., 1] * parts[..., 1]).flatten(-2)


def neighbours(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    swapped = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * c + swapped * s


def second_halves(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Reads one of the two values, in a generator expression."""
    c, s = (torch.cat((t.chunk(2, -1)[1],) * 2, -1) for t in (c, s))
    return x * c + half(x) * s


def exchanged(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Turns each component by the sine of the other."""
    return x * c + half(x * s)


def one_half(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Reads a value for each component of one table, and for each pair of the other."""
    first, _ = s.chunk(2, -1)
    return x * c + half(x) * torch.cat((first, first), -1)


def first_columns(x: Tensor, turns: Tensor) -> Tensor:
    c, s, (first, second) = turns[..., 0, 0], turns[..., 1, 0], x.chunk(2, -1)
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def angles_of_neighbours(x: Tensor, angles: Tensor) -> Tensor:
    c, s = angles[..., ::2].cos(), angles[..., 1::2].sin()
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)


class Model(nn.Module):
    def forward(self, form: str, *given: Any, **named: Any) -> Tensor:
        forms = {"separate": separate, "packed": packed, "pair": pair, "joint": joint}
        forms |= {"by_angle": by_angle, "gathered": gathered, "matrices": matrices}  # type: ignore[dict-item]
        forms |= {"transposed": transposed, "neighbours": neighbours}  # type: ignore[dict-item]
        forms |= {"second_halves": second_halves, "exchanged": exchanged, "one_half": one_half}
        forms |= {"first_columns": first_columns}  # type: ignore[dict-item]
        forms |= {"angles_of_neighbours": angles_of_neighbours}  # type: ignore[dict-item]
        return forms[form](*given, **named)


def tables(form: str, equal: bool) -> tuple[Any, ...]:
    """Tables, and whether they repeat each value, or matrices are rotations."""
    theta = torch.rand(TOKENS, HEAD // 2)
    theta = torch.cat((theta, theta if equal else torch.rand(TOKENS, HEAD // 2)), -1)
    cos, sin = theta.cos(), theta.sin()
    if form in ("matrices", "transposed", "first_columns"):
        first, second = cos.chunk(2, -1), sin.chunk(2, -1)
        rows = first[0], -second[0], second[1], first[1]
        return (torch.stack(rows, -1).unflatten(-1, (2, 2)),)
    if form == "gathered":
        return cos, sin, torch.arange(TOKENS)[None]
    if form in ("pair", "joint"):
        return ((cos, sin),) if form == "pair" else (torch.cat((cos, sin), -1),)
    return (theta,) if form in ("by_angle", "angles_of_neighbours") else (cos, sin)


FORMS = (
    *("separate", "packed", "pair", "joint", "by_angle", "gathered", "matrices", "transposed"),
    *("neighbours", "second_halves", "exchanged", "one_half", "first_columns"),
    "angles_of_neighbours",
)


@pytest.mark.parametrize("mode", ["eager", "inference mode", "compiled"])
@pytest.mark.parametrize("form", FORMS)
def test_other_tables_of_the_same_shape(form: str, mode: str) -> None:
    torch._dynamo.reset()
    model = Model()
    report = patch(model)
    operators: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    run = torch.compile(model, backend=backend, fullgraph=True) if mode == "compiled" else model
    with torch.inference_mode(mode == "inference mode"):
        x = torch.randn(1, 2, TOKENS, HEAD)
        for equal in (True, False, True, False):
            given = x, *tables(form, equal)
            found = run(form, *given)
            with own_code():
                assert torch.equal(found, model(form, *given))
    total = [sum(x) for x in zip(*[each[2:4] for each in report.calls()], strict=True)]
    assert total == ([0, 0] if mode == "compiled" else [4, 0])
    rotations = [name for name in operators if name.startswith("posembed.rotary_tables")]
    assert bool(rotations) == (mode == "compiled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_one_of_the_tables(dtype: torch.dtype) -> None:
    model, x = Model(), torch.randn(1, 2, TOKENS, HEAD, dtype=dtype)
    report = patch(model)
    (cos, sin), (other_cos, other_sin) = (tables("separate", equal) for equal in (True, False))
    for given in ((cos, other_sin), (other_cos, sin)):
        c, s = (table.to(dtype) for table in given)
        found = model("separate", x, c, s)
        with own_code():
            assert torch.equal(found, model("separate", x, c, s))
    assert sum(each.kernel for each in report.calls()) == 2


def test_tables_that_change_in_place() -> None:
    model, x = Model(), torch.randn(1, 2, TOKENS, HEAD)
    patch(model)
    for named in (False, True):
        cos, sin = tables("separate", True)
        given: Any = ((x,), {"c": cos, "s": sin}) if named else ((x, cos, sin), {})
        for change in (0, 1, 0):
            cos[..., :2] += change
            found = model("separate", *given[0], **given[1])
            with own_code():
                assert torch.equal(found, model("separate", *given[0], **given[1]))
            assert torch.equal(found, model("separate", *given[0], **given[1]))
