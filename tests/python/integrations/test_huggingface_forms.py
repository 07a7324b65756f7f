"""Usual forms of a rotation in one's own code: the kernel runs, with the bits of the code."""

from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import patch
from posembed.integrations.huggingface._door import own_code
from torch import Tensor, nn

BATCH, HEADS, TOKENS, HEAD = 2, 3, 7, 8
SHAPE = (BATCH, HEADS, TOKENS, HEAD)
Pair = tuple[Tensor, Tensor]


def half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def swapped(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def short_names(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


def other_names(x: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    return x * freqs_cos + swapped(x) * freqs_sin


def sine_before_cosine(x: Tensor, sin_emb: Tensor, emb: Tensor) -> Tensor:
    return (x * emb + half(x) * sin_emb).to(x.dtype)


def pair_of_tables(q: Tensor, k: Tensor, tables: Pair) -> Pair:
    c, s = tables
    return q * c + half(q) * s, k * c + half(k) * s


def key_if_given(q: Tensor, k: Tensor | None, c: Tensor, s: Tensor) -> Any:
    turned = q * c + half(q) * s
    return turned if k is None else (turned, k * c + half(k) * s)


def side_by_side(x: Tensor, cache: Tensor) -> Tensor:
    c, s = cache.chunk(2, -1)
    return x * c + half(x) * s


def stacked(x: Tensor, cache: Tensor) -> Tensor:
    parts = x.float().unflatten(-1, (-1, 2))
    first = parts[..., 0] * cache[..., 0] - parts[..., 1] * cache[..., 1]
    second = parts[..., 1] * cache[..., 0] + parts[..., 0] * cache[..., 1]
    return torch.stack((first, second), -1).flatten(-2).type_as(x)


def angles(theta: Tensor, x: Tensor) -> Tensor:
    width = theta.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    turned = turned * theta.cos() + half(turned) * theta.sin()
    return torch.cat((turned, rest), -1).type(x.dtype)


def angles_of_neighbours(x: Tensor, angles: Tensor) -> Tensor:
    c, s = angles[..., ::2].cos(), angles[..., 1::2].sin()
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)


def matrices(x: Tensor, pe: Tensor) -> Tensor:
    parts = x.float().unflatten(-1, (-1, 1, 2))
    return (pe[..., 0] * parts[..., 0] + pe[..., 1] * parts[..., 1]).reshape(x.shape).type_as(x)


def transposed(x: Tensor, turns: Tensor) -> Tensor:
    parts, columns = x.unflatten(-1, (-1, 1, 2)), turns.mT
    return (columns[..., 0] * parts[..., 0] + columns[..., 1] * parts[..., 1]).flatten(-2)


def first_columns(x: Tensor, turns: Tensor) -> Tensor:
    c, s, (first, second) = turns[..., 0, 0], turns[..., 1, 0], x.chunk(2, -1)
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def sums_of_matrices(x: Tensor, pe: Tensor) -> Tensor:
    parts = x.unflatten(-1, (-1, 1, 2)).float()
    return (pe.float() * parts).sum(-1).reshape(x.shape).to(x.dtype)


def complex_numbers(x: Tensor, freqs: Tensor) -> Tensor:
    with torch.amp.autocast("cpu", enabled=False):  # as Z-Image's
        parts = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        return torch.view_as_real(parts * freqs).flatten(-2).type_as(x)


def two_products(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * c[..., ::2] - x[..., 1::2] * s[..., 1::2]
    out[..., 1::2] = x[..., ::2] * s[..., 1::2] + x[..., 1::2] * c[..., ::2]
    return out


def tables_in_the_dtype_of_data(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    c, s = c.to(x.dtype), s.to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def with_options(x: Tensor, c: Tensor, s: Tensor, adjacent: bool = False, mode: str = "on") -> Any:
    if mode == "off":
        return x
    if mode != "on":
        raise ValueError(mode)
    return x * c + (swapped(x) if adjacent else half(x)) * s


def own_variable(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    width = c.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat((turned * c + half(turned) * s, rest), -1)


def contiguous(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Its result is contiguous, whatever the memory order of x."""
    return (x * c + half(x) * s).contiguous()


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


def by_position(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Gathers rows only if there are positions."""
    if position_ids is not None:
        cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return x * cos + half(x) * sin


def backwards(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c - half(x) * s


def reads_half(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """As GLM's: of tables that repeat each value, it reads the first half."""
    width = c.shape[-1] // 2
    c, s = c[..., :width].repeat_interleave(2, -1), s[..., :width].repeat_interleave(2, -1)
    return x * c + swapped(x) * s


def tokens_first(t: Tensor, freqs: Tensor, mscale: float = 1.0) -> Tensor:
    """As megatron-core's: [tokens, batch, heads, width], and angles [tokens, 1, 1, width]."""
    turned, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    cos, sin = (freqs.cos() * mscale).to(t.dtype), (freqs.sin() * mscale).to(t.dtype)
    return torch.cat((turned * cos + half(turned) * sin, rest), -1)


def both_orders(x: Tensor, c: Tensor, s: Tensor, seq_dim: int = -2) -> Tensor:
    """Its option is a dimension, which its code compares with nothing."""
    shape = [-1, *[1] * (-2 - seq_dim), c.shape[-1]]
    return x * c.view(shape) + half(x) * s.view(shape)


class Model(nn.Module):
    """Rotates by every function above."""

    def forward(self, form: str, *given: Any, **options: Any) -> Any:
        every = (
            *(short_names, other_names, sine_before_cosine, pair_of_tables, side_by_side, stacked),
            *(angles, angles_of_neighbours, matrices, transposed, first_columns, sums_of_matrices),
            *(complex_numbers, two_products, tables_in_the_dtype_of_data, with_options, one_half),
            *(own_variable, contiguous, second_halves, exchanged, by_position, backwards),
            *(reads_half, tokens_first, both_orders, key_if_given),
        )
        return {function.__name__: function for function in every}[form](*given, **options)


FORMS = (
    *("short_names", "other_names", "sine_before_cosine", "pair_of_tables", "side_by_side"),
    *("stacked", "angles", "matrices", "sums_of_matrices", "complex_numbers", "two_products"),
    *("tables_in_the_dtype_of_data", "with_options", "own_variable", "backwards", "reads_half"),
    "key_if_given",
)
# Of which both values for a pair count, or one of two.
APART = (
    *("short_names", "contiguous", "pair_of_tables", "side_by_side", "angles", "by_position"),
    *("matrices", "transposed", "other_names", "second_halves", "exchanged", "one_half"),
    *("first_columns", "angles_of_neighbours"),
)


def tables(form: str, leading: tuple[int, ...] = (TOKENS,), apart: bool = False) -> tuple[Any, ...]:
    """The tables that a form takes; ``apart``: with two values for each pair."""
    theta = 6 * torch.rand(*leading, HEAD // 2)
    other = 6 * torch.rand(*leading, HEAD // 2) if apart else theta
    whole = torch.cat((theta, other), -1)
    if form in ("other_names", "two_products", "angles_of_neighbours"):
        whole = torch.stack((theta, other), -1).flatten(-2)
    cos, sin, c, s = whole.cos(), whole.sin(), theta.cos(), theta.sin()
    turns = torch.stack((c, -s, other.sin(), other.cos()), -1).unflatten(-1, (2, 2))
    return {
        "sine_before_cosine": (sin, cos),
        "pair_of_tables": ((cos, sin),),
        "side_by_side": (torch.cat((cos, sin), -1),),
        "stacked": (torch.stack((c, s), -1),),
        "angles": (torch.cat((theta[..., :2], other[..., :2]), -1),),
        "angles_of_neighbours": (whole,),
        **dict.fromkeys(("matrices", "transposed", "first_columns", "sums_of_matrices"), (turns,)),
        "complex_numbers": (torch.polar(torch.ones_like(theta).double(), theta.double()),),
        "tables_in_the_dtype_of_data": (c, s),
        "own_variable": (torch.cat((c[..., :2],) * 2, -1), torch.cat((s[..., :2],) * 2, -1)),
        "by_position": (cos, sin, torch.arange(TOKENS)[None]),
    }.get(form, (cos, sin))


def arguments(form: str, dtype: torch.dtype = torch.float32, apart: bool = False) -> list[Any]:
    x, rest = torch.randn(SHAPE, dtype=dtype), tables(form, apart=apart)
    if form == "pair_of_tables":
        return [x, torch.randn(SHAPE, dtype=dtype), *rest]
    if form == "key_if_given":
        return [x, None, *rest]
    return [*rest, x] if form == "angles" else [x, *rest]


def own(function: Any, *given: Any, **options: Any) -> Any:
    """The result of the model's own code."""
    with own_code():
        return function(*given, **options)


def equal(found: Any, expected: Any) -> bool:
    if isinstance(found, tuple):
        return all(map(equal, found, expected))
    return found.dtype == expected.dtype and torch.equal(found, expected)


def calls_of(report: Any) -> dict[str, tuple[int, int]]:
    """Calls of the kernel, and of own code, by function; those without any are left out."""
    calls = {each.function: (each.kernel, each.own) for each in report.calls()}
    return {name: counts for name, counts in calls.items() if counts != (0, 0)}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, dtype: torch.dtype, model: Model) -> None:
    given = arguments(form, dtype)
    expected = model(form, *given)
    report = patch(model)
    for _ in range(2):  # decided at the first call, remembered at the second
        assert equal(model(form, *given), expected)
    assert calls_of(report) == {form: (2, 0)}
    other = arguments(form, dtype), arguments(form, torch.bfloat16), arguments(form)
    for given in other:  # the operator call that is remembered is that of these dtypes alone
        assert equal(model(form, *given), own(model, form, *given))


@pytest.mark.parametrize("mode", ["eager", "inference mode", "compiled"])
@pytest.mark.parametrize("form", APART)
def test_values_of_a_pair_that_are_equal_or_not(form: str, mode: str, model: Model) -> None:
    """Tables of the same shape may repeat each value in one call, and not in another."""
    torch._dynamo.reset()
    report = patch(model)
    operators: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    run = torch.compile(model, backend=backend, fullgraph=True) if mode == "compiled" else model
    with torch.inference_mode(mode == "inference mode"):
        for apart in (False, True, False, True):
            given = arguments(form, apart=apart)
            found = run(form, *given)
            assert equal(found, own(model, form, *given))
    assert calls_of(report) == ({} if mode == "compiled" else {form: (4, 0)})
    rotations = [name for name in operators if name.startswith("posembed.rotary_tables")]
    assert bool(rotations) == (mode == "compiled")


def test_tables_that_change_in_place_or_apart(model: Model) -> None:
    report = patch(model)
    for dtype in (torch.float32, torch.bfloat16):
        x, cos, sin = (x.to(dtype) for x in arguments("short_names"))
        _, other_cos, other_sin = (x.to(dtype) for x in arguments("short_names", apart=True))
        for given in ((x, cos, other_sin), (x, other_cos, sin)):
            for change in (0, 1, 0):
                cos[..., :2] += change
                found = model("short_names", given[0], s=given[2], c=given[1])
                assert equal(found, model("short_names", *given))
                assert equal(found, own(short_names, *given))
    assert calls_of(report) == {"short_names": (24, 0)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_tables_of_other_dtypes(dtype: torch.dtype, model: Model) -> None:
    """The kernel's bits are the function's, or the function runs."""

    def converted(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(converted, x))
        return x if x.is_complex() else x.to(dtype)

    patch(model)
    for form in FORMS:
        for other in (torch.float32, torch.bfloat16, torch.float64):
            tensors = {"pair_of_tables": (0, 1), "angles": (1,), "key_if_given": (0, 1)}.get(form, (0,))
            given = arguments(form, other)
            given = [x if i in tensors else converted(x) for i, x in enumerate(given)]
            assert equal(model(form, *given), own(model, form, *given))


def layouts() -> dict[str, tuple[str, tuple[int, int], list[tuple[Any, ...]]]]:
    """Other shapes: the form, calls of the kernel and of own code, and arguments with options."""
    x, y = torch.randn(SHAPE), torch.randn(BATCH, HEADS, TOKENS + 1, HEAD)
    cos, sin = tables("short_names")
    wide = torch.rand(BATCH, TOKENS, 1200).repeat_interleave(2, -1)
    each = torch.rand(TOKENS + 1, HEAD)
    adjacent = tables("other_names")
    positions = torch.randint(TOKENS, (BATCH, TOKENS))
    first = [torch.randn(TOKENS, batch, HEADS, HEAD) for batch in (1, BATCH)]
    turns = torch.rand(TOKENS, 1, 1, HEAD // 4).repeat(1, 1, 1, 2)
    leading = (HEADS, TOKENS), (1, HEADS, TOKENS), (BATCH, HEADS, TOKENS)
    return {
        "a row for each head": (*("short_names", (3, 0)), [(x, *tables("short_names", lead), {}) for lead in leading]),
        # As in LTX-Video: wider than the kernel takes, which rotates parts.
        "heads in the last dimension": (
            *("other_names", (1, 0)),
            [(torch.randn(BATCH, TOKENS, 2400), wide.cos(), wide.sin(), {})],
        ),
        "a value for each component": ("short_names", (1, 0), [(y, each.cos(), each.sin(), {})]),
        "and of neighbours": ("other_names", (1, 0), [(y, each.cos(), each.sin(), {})]),
        "no rotations": ("matrices", (1, 0), [(x, torch.rand(TOKENS, HEAD // 2, 2, 2), {})]),
        "tokens first": (
            *("tokens_first", (4, 0)),
            [(t.to(kind), turns, {}) for t in first for kind in (torch.float32, torch.bfloat16)],
        ),
        "positions only if given": (
            *("by_position", (3, 0)),
            [(x, cos, sin, *p, {}) for p in ((), (positions,), (positions.flip(-1),))],
        ),
        "options that are dimensions": (
            *("both_orders", (2, 0)),
            [(x, cos, sin, {}), (x.transpose(1, 2), cos, sin, {"seq_dim": -3})],
        ),
        "options by their values": (
            *("with_options", (2, 1)),
            [(x, cos, sin, {}), (x, *adjacent, {"adjacent": True}), (x, cos, sin, {"mode": "off"})],
        ),
    }


@pytest.mark.parametrize("name", layouts())
def test_layouts_and_options(name: str, model: Model) -> None:
    form, calls, every = layouts()[name]
    report = patch(model)
    for *given, options in every:
        expected = own(model, form, *given, **options)
        assert equal(model(form, *given, **options), expected)
    assert calls_of(report) == {form: calls}
    with pytest.raises(ValueError, match="other"):
        model("with_options", *arguments("with_options"), mode="other")


@pytest.mark.parametrize("form", ["short_names", "contiguous"])
def test_results_have_the_functions_memory_order(form: str, model: Model) -> None:
    x = torch.randn(BATCH, TOKENS, HEADS, HEAD).transpose(1, 2)
    given = x, *tables("short_names")
    expected = model(form, *given)
    patch(model)
    for _ in range(2):
        found = model(form, *given)
        assert equal(found, expected)
        assert found.stride() == expected.stride()


class Inline(nn.Module):
    """Rotates in the code of a method."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def test_what_stays_has_a_row_with_its_reason() -> None:
    (row,) = patch(Inline()).left
    assert row.function == "Inline.forward"
    assert row.action == "a method whose own code may rotate; posembed replaces functions"
    report = patch(nn.Linear(2, 2))
    assert str(report).startswith("nothing to replace")


class Holds(nn.Module):
    """Rotates by a table that it holds, as torchtune's module."""

    def __init__(self) -> None:
        super().__init__()
        theta = 6 * torch.rand(2 * TOKENS, HEAD // 2)
        self.register_buffer("cache", torch.stack((theta.cos(), theta.sin()), -1))

    def forward(self, x: Tensor, *, positions: Tensor | None = None) -> Tensor:
        rows = self.cache[: x.shape[1]] if positions is None else self.cache[positions]
        parts = x.float().unflatten(-1, (-1, 2))
        rows = rows.view(-1, parts.shape[1], 1, parts.shape[3], 2)
        first = parts[..., 0] * rows[..., 0] - parts[..., 1] * rows[..., 1]
        second = parts[..., 1] * rows[..., 0] + parts[..., 0] * rows[..., 1]
        return torch.stack((first, second), -1).flatten(-2).type_as(x)


class HoldsTwo(nn.Module):
    """Rotates by two tables that it holds; another attribute of the class is a method's."""

    def __init__(self) -> None:
        super().__init__()
        self.s, self.c = tables("short_names")[::-1]

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.c + torch.cat((-second, first), -1) * self.s


class Counts(HoldsTwo):
    """Does something else, too: it is not run."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        first, second = x.chunk(2, -1)
        return x * self.c + torch.cat((-second, first), -1) * self.s


def test_modules_that_hold_their_tables() -> None:
    x, holds, two = torch.randn(BATCH, TOKENS, HEADS, HEAD), Holds(), HoldsTwo()
    positions = torch.randint(2 * TOKENS, (BATCH, TOKENS))
    given: list[tuple[nn.Module, Tensor, dict[str, Any]]] = [
        (holds, x, {}),
        (holds, x.bfloat16(), {}),
        (holds, x, {"positions": positions}),
        (holds, x[:, :1], {"positions": positions[:, :1]}),
        (holds, torch.randn(BATCH, 2 * TOKENS, HEADS, HEAD), {}),
        (two, x.transpose(1, 2), {}),
    ]
    expected = [module(x, **options) for module, x, options in given]
    reports = patch(holds), patch(two)
    for (module, x, options), result in zip(given, expected, strict=True):
        assert equal(module(x, **options), result)
    calls = [(each.kernel, each.own) for report in reports for each in report.calls()]
    assert calls == [(5, 0), (1, 0)]
    assert equal(torch.jit.script(two)(given[-1][1]), expected[-1])
    counts = Counts()
    assert not patch(counts).patched
    assert not hasattr(counts, "calls")
