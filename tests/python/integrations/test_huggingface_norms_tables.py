"""patch(model, numerics="exact"): norms of query and key in the rotation by the model's tables."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import _late, patch, unpatch
from posembed.integrations.huggingface._norms import AFTER, FUSED
from torch import Tensor, nn

BATCH, HEADS, TOKENS, HEAD = 2, 3, 7, 8


def half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def halves(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


def backwards(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c - half(x) * s


def both(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return q * c + half(q) * s, k * c + half(k) * s


def first_part(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    width = c.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat((turned * c + half(turned) * s, rest), -1)


def regrouped(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """As DeepSeek-V3's: reads adjacent pairs and writes halves."""
    x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    return x * c + half(x) * s


def complex_numbers(x: Tensor, freqs: Tensor) -> Tensor:
    parts = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(parts * freqs.unsqueeze(1)).flatten(-2).type_as(x)


class Processor:
    """Normalises before and rotates after heads are split, or both after, as diffusers'."""

    def __call__(self, attention: Any, q: Tensor, k: Tensor, form: str, *tables: Tensor) -> Any:
        forms = {"halves": halves, "backwards": backwards, "first_part": first_part}
        forms |= {"regrouped": regrouped, "complex_numbers": complex_numbers}  # type: ignore[dict-item]
        if attention.over_all_heads:
            q = attention.norm_q(q).unflatten(2, (HEADS, -1))
            k = attention.norm_k(k).reshape(*k.shape[:-1], HEADS, -1)
        else:
            q, k = (x.unflatten(2, (HEADS, -1)) for x in (q, k))
            q, k = attention.norm_q(q), attention.norm_k(k)
        if form != "complex_numbers":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if form == "both":
            return both(q, k, *tables)
        return forms[form](q, *tables), forms[form](k, *tables)


class Attention(nn.Module):
    def __init__(self, over_all_heads: bool = False) -> None:
        super().__init__()
        self.over_all_heads = over_all_heads
        size = HEADS * HEAD if over_all_heads else HEAD
        self.norm_q, self.norm_k = nn.RMSNorm(size, eps=1e-3), nn.RMSNorm(size, eps=1e-3)
        for norm in (self.norm_q, self.norm_k):
            nn.init.normal_(norm.weight, 1.0, 0.3)
        self.processor = Processor()

    def forward(self, *given: Any) -> Any:
        return self.processor(self, *given)


def arguments(form: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    q, k = torch.randn(2, BATCH, TOKENS, HEADS * HEAD, dtype=dtype).unbind()
    theta = 6 * torch.rand(TOKENS, HEAD // (4 if form == "first_part" else 2))
    if form == "complex_numbers":
        return q, k, form, torch.polar(torch.ones_like(theta), theta)
    theta = theta.repeat(1, 2)
    return q, k, form, theta.cos().to(dtype), theta.sin().to(dtype)


FORMS = ("halves", "backwards", "both", "first_part", "complex_numbers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("over_all_heads", [False, True], ids=["each head", "all heads"])
@pytest.mark.parametrize("form", FORMS)
def test_one_pass(form: str, over_all_heads: bool, dtype: torch.dtype, fused: list[bool]) -> None:
    attention = Attention(over_all_heads).to(dtype)
    wide, given = copy.deepcopy(attention).double(), arguments(form, dtype)
    own = attention(*given)
    exact = wide(
        *(x.double() if isinstance(x, Tensor) and not x.is_complex() else x for x in given)
    )
    report = patch(attention, numerics="exact")
    assert all(row.action.endswith(FUSED) for row in report.patched)
    calls = 1 if form == "both" else 2
    found = attention(*given)
    assert fused == [True] * calls
    assert sum(each.kernel for each in report.calls()) == calls
    for x, y, z in zip(found, own, exact, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        torch.testing.assert_close(x.double(), z, rtol=torch.finfo(dtype).eps, atol=2e-6)
    patch(attention)  # complex products may differ in the last bit
    slack = 1e-6 if form == "complex_numbers" and dtype == torch.float32 else 0.0
    for x, y in zip(attention(*given), own, strict=True):
        torch.testing.assert_close(x, y, rtol=slack, atol=slack)
    unpatch(attention)
    assert type(attention.norm_q) is nn.RMSNorm
    assert not [name for name in vars(attention.norm_q) if name.startswith("posembed")]


class L2Norm(nn.Module):
    """As Llama 4's: no weights, and any number of components."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x)


class LayerNorm1P(nn.LayerNorm):
    """As Nemotron's: its weights are stored less one."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(
            x, self.normalized_shape, self.weight + 1, self.bias, self.eps
        )


class Float32Norm(nn.RMSNorm):
    """Gives float32, whatever it takes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


KINDS_OF_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": lambda size: nn.LayerNorm(size, eps=1e-3),
    "LayerNorm without bias": lambda size: nn.LayerNorm(size, bias=False),
    "LayerNorm without weights": lambda size: nn.LayerNorm(size, elementwise_affine=False),
    "LayerNorm with weights less one": LayerNorm1P,
    "RMSNorm without weights": lambda size: nn.RMSNorm(size, 1e-3, elementwise_affine=False),
    "RMSNorm with torch's eps": nn.RMSNorm,
    "L2 norm": L2Norm,
}


def normed_by(kind: Callable[[int], nn.Module], over_all_heads: bool = False) -> Any:
    torch.manual_seed(0)
    attention: Any = Attention(over_all_heads)
    size = HEADS * HEAD if over_all_heads else HEAD
    attention.norm_q, attention.norm_k = kind(size), kind(size)
    for name, parameter in attention.named_parameters():
        nn.init.normal_(parameter, float("weight" in name), 0.3)
    return attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("over_all_heads", [False, True], ids=["each head", "all heads"])
@pytest.mark.parametrize("kind", KINDS_OF_NORMS)
def test_norms_of_every_kind(
    kind: str, over_all_heads: bool, dtype: torch.dtype, fused: list[bool]
) -> None:
    attention = normed_by(KINDS_OF_NORMS[kind], over_all_heads).to(dtype)
    given = arguments("both", dtype)
    given = given[0] * 1e-3, *given[1:]  # to see eps
    expected = attention(*given)
    report = patch(attention, numerics="exact")
    assert all(row.action.endswith(FUSED) for row in report.patched)
    found = attention(*given)
    assert fused == [True]
    slack = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=slack * y.abs().max().item())
    if dtype == torch.float32:
        torch.compiler.reset()  # code is compiled eight times at most
        compiled = torch.compile(attention, backend="eager", fullgraph=True)
        assert all(map(torch.equal, compiled(*given), found))
    unpatch(attention)
    assert all(map(torch.equal, attention(*given), expected))


def test_norms_of_a_dtype_that_is_not_verified_run(fused: list[bool]) -> None:
    """Float32Norm gives another dtype, and torch's eps is another one in float64."""
    for kind, dtype, wide in (
        (Float32Norm, torch.bfloat16, torch.float32),
        (nn.RMSNorm, torch.float64, torch.float64),
    ):
        attention = normed_by(kind).to(dtype)
        given = arguments("both", dtype)
        given = given[0] * 1e-3, *given[1:]
        expected = attention(*given)
        patch(attention, numerics="exact")
        found = attention(*given)
        assert [x.dtype for x in found] == [wide, wide]
        assert all(map(torch.equal, found, expected))
        assert fused == []
        attention.float()(*[x.float() if isinstance(x, Tensor) else x for x in given])
        assert fused == [True]
        fused.clear()


def test_parameters_that_come_later_count(fused: list[bool]) -> None:
    attention = normed_by(KINDS_OF_NORMS["RMSNorm without weights"])
    given = arguments("halves")
    patch(attention, numerics="exact")
    attention.norm_q.weight = nn.Parameter(torch.rand(HEAD))
    found = attention(*given)
    unpatch(attention)
    torch.testing.assert_close(found, attention(*given))
    assert fused == [True]  # the key's


def test_under_autocast_the_norm_runs(fused: list[bool]) -> None:
    attention = normed_by(KINDS_OF_NORMS["LayerNorm without weights"])
    given = arguments("halves", torch.bfloat16)
    patch(attention, numerics="exact")
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(*given)
        unpatch(attention)
        assert all(map(torch.equal, found, attention(*given)))
    assert fused == []


def test_norms_that_the_kernel_lacks_have_a_reason() -> None:
    by_head = nn.LayerNorm((HEADS, HEAD))
    two = normed_by(nn.RMSNorm)
    two.norm_q.register_parameter("other", nn.Parameter(torch.ones(1)))
    for attention, reason in (
        (normed_by(lambda size: by_head), "its weight has another shape than [head_dim]"),
        (two, "it has other parameters than a weight and a bias"),
        (normed_by(lambda size: nn.RMSNorm(size, 2.0)), "it computes something else than"),
    ):
        actions = [row.action for row in patch(attention, numerics="exact").patched]
        assert all(f"norm_q stays: {reason}" in x for x in actions)


class Afterwards(nn.Module):
    """Normalises what is rotated, as Llama 4."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.RMSNorm(HEAD, eps=1e-3), nn.RMSNorm(HEAD, eps=1e-3)

    def forward(self, q: Tensor, k: Tensor, *tables: Tensor) -> Any:
        k = self.other(k)
        q, k = both(q, k, *tables)
        return self.norm(q), k


def test_norms_of_what_is_rotated_stay() -> None:
    module, (q, k, _, *tables) = Afterwards(), arguments("both")
    q, k = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (q, k))
    expected = module(q, k, *tables)
    (row,) = patch(module, numerics="exact").patched
    assert row.action.startswith("half-split; tables stay")
    assert row.action.endswith(f"; {FUSED}; norm stays: {AFTER}")
    assert type(module.norm) is nn.RMSNorm
    torch.testing.assert_close(module(q, k, *tables), expected)


def test_gradients_copies_and_compiled_code(fused: list[bool]) -> None:
    attention = Attention(over_all_heads=True)
    q, k, *rest = arguments("halves")
    q.requires_grad_()
    weights = torch.randn(BATCH, HEADS, TOKENS, HEAD)
    wanted = [q, attention.norm_q.weight]
    expected = torch.autograd.grad(attention(q, k, *rest)[0], wanted, weights)
    patch(attention, numerics="exact")
    results = attention(q, k, *rest)
    for x, y in zip(torch.autograd.grad(results[0], wanted, weights), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
            assert all(map(torch.equal, other(q, k, *rest), results))
        compiled = torch.compile(attention, backend="eager", fullgraph=True)
        assert all(map(torch.equal, compiled(q, k, *rest), results))
    assert all(fused)


def test_what_stays_has_a_reason(fused: list[bool]) -> None:
    attention, given = Attention(), arguments("halves")
    expected = attention(*given)
    attention.norm_q.register_forward_hook(lambda *x: None)
    actions = [row.action for row in patch(attention, numerics="exact").patched]
    assert all("norm_q stays: it has hooks or another forward" in x for x in actions)
    found = attention(*given)
    assert fused == [True]  # the key's
    assert torch.equal(found[0], expected[0])
    attention = Attention()
    attention.norm_q = nn.GroupNorm(1, TOKENS)  # type: ignore[assignment]
    expected = attention(*given)
    actions = [row.action for row in patch(attention, numerics="exact").patched]
    assert all("norm_q stays: it is of the type GroupNorm" in x for x in actions)
    assert torch.equal(attention(*given)[0], expected[0])
    assert all("norm" not in row.action for row in patch(Attention()).patched)


def test_hooks_and_dtypes_that_come_later_get_the_norm(fused: list[bool]) -> None:
    attention, given = Attention(), arguments("halves")
    expected = attention(*given)
    patch(attention, numerics="exact")
    seen: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *x: seen.append(x[-1]))
    try:
        assert all(map(torch.equal, attention(*given), expected))
    finally:
        handle.remove()
    assert type(seen[0]) is Tensor
    assert fused == []
    narrow = arguments("halves", torch.bfloat16)  # data of another dtype than the weights
    unpatched = Attention()
    unpatched.load_state_dict(attention.state_dict())
    for x, y in zip(attention(*narrow), unpatched(*narrow), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    assert fused == []


KINDS = ["forward", "full_backward", "full_backward_pre"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_hooks_of_every_kind_get_the_norm(before: bool, kind: str, fused: list[bool]) -> None:
    attention, (q, k, *rest), seen = Attention(), arguments("halves"), list[Any]()
    q.requires_grad_()
    register = getattr(attention.norm_q, f"register_{kind}_hook")
    if before:
        register(lambda *x: seen.append(x[-1]))
    actions = [row.action for row in patch(attention, numerics="exact").patched]
    assert all(("norm_q stays: it has hooks or another forward" in x) == before for x in actions)
    if not before:
        register(lambda *x: seen.append(x[-1]))
    attention(q, k, *rest)[0].sum().backward()
    (found,) = seen
    assert type(found[0] if isinstance(found, tuple) else found) is Tensor
    assert fused == [True]  # the key's


def test_a_norm_with_another_forward_stays() -> None:
    attention, given = Attention(), arguments("halves")
    attention.norm_q.forward = lambda x: 2 * x  # type: ignore[method-assign]
    expected = attention(*given)
    actions = [row.action for row in patch(attention, numerics="exact").patched]
    assert all("norm_q stays: it has hooks or another forward" in x for x in actions)
    assert torch.equal(attention(*given)[0], expected[0])


def test_results_of_a_wider_dtype_are_the_functions(fused: list[bool]) -> None:
    """PyTorch's product with float32 tables is in float32: the kernel of both has no such result."""
    attention, given = Attention().bfloat16(), arguments("halves", torch.bfloat16)
    given = *given[:3], *(x.float() for x in given[3:])
    expected = attention(*given)
    patch(attention, numerics="exact")
    for x, y in zip(attention(*given), expected, strict=True):
        assert x.dtype == y.dtype == torch.float32
        assert torch.equal(x, y)
    assert not any(fused)


def test_rotations_of_several_calls_get_the_norm(fused: list[bool]) -> None:
    attention, given = Attention(), arguments("regrouped")
    expected = attention(*given)
    report = patch(attention, numerics="exact")
    assert all(map(torch.equal, attention(*given), expected))
    assert sum(each.kernel for each in report.calls()) == 2
    assert not any(fused)


class Mixed(nn.Module):
    """Normalises the query over all heads, and the key by head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_q, self.norm_k = nn.RMSNorm(HEADS * HEAD, eps=1e-3), nn.RMSNorm(HEAD, eps=1e-3)

    def forward(self, q: Tensor, k: Tensor, form: str, *tables: Tensor) -> Any:
        q = self.norm_q(q).unflatten(2, (HEADS, -1)).transpose(1, 2)
        k = self.norm_k(k.unflatten(2, (HEADS, -1))).transpose(1, 2)
        return both(q, k, *tables)


def test_two_norms_that_one_call_cannot_take(fused: list[bool]) -> None:
    other, given = Attention(), arguments("both")
    other.norm_k.eps = 0.5
    for module in (other, Mixed()):
        expected = module(*given)
        patch(module, numerics="exact")
        assert all(map(torch.equal, module(*given), expected))
    assert not any(fused)


def test_other_uses_see_the_norm_and_what_is_written_to_it() -> None:
    attention = Attention(over_all_heads=True)
    x = torch.randn(BATCH, TOKENS, HEADS * HEAD)
    expected = attention.norm_q(x)
    patch(attention, numerics="exact")
    with torch.no_grad():
        late: Any = attention.norm_q(x)
        split = late.unflatten(-1, (HEADS, HEAD))
        assert isinstance(split, _late.Late)
        assert torch.equal(torch.cat((late, x), 1), torch.cat((expected, x), 1))
        late[:, 0] = 0.0  # as into a tensor
        late.mul_(2)
        late += 1
        wanted = expected.detach().clone()
        wanted[:, 0] = 0.0
        wanted = wanted * 2 + 1
        assert torch.equal(split.tensor(), wanted.unflatten(-1, (HEADS, HEAD)))
        assert _late.rows_of([split]) is None
        assert torch.equal(
            attention.norm_q(x).unflatten(1, (1, -1)), expected.unflatten(1, (1, -1))
        )


class Windows(nn.Module):
    """What it splits after the norm are tokens, not heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HEAD, eps=1e-3)

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        return halves(self.norm(x).unflatten(1, (2, -1)), *tables)


def test_other_dimensions_are_split(fused: list[bool]) -> None:
    windows, theta = Windows(), torch.rand(TOKENS, HEAD // 2).repeat(1, 2)
    given = torch.randn(BATCH, 2 * TOKENS, HEAD), theta.cos(), theta.sin()
    expected = windows(*given)
    patch(windows, numerics="exact")
    assert torch.equal(windows(*given), expected)
    assert fused == []
