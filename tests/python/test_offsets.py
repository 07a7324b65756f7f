"""Tests of offsets that are tensors: the position of each sample's or document's first token."""

import itertools
from typing import Any

import posembed as pe
import pytest
import torch
from support.halves import AT_ONCE
from support.refusals import refused
from torch import Tensor

OFFSETS = [7, 0, 19]


@pytest.mark.parametrize("modules", [pe, pe.cpp], ids=["python", "cpp"])
def test_what_is_refused(modules: Any) -> None:
    rope = modules.RotaryEmbedding(8)
    x = torch.randn(3, 5, 2, 8)
    offsets = torch.tensor(OFFSETS)
    refused(
        (lambda: rope(x, positions=torch.arange(5), offset=offsets), ValueError, "offset: expected 0 where positions are given, got [3]"),
        (lambda: rope(x, offset=offsets.float()), TypeError, "offset: expected int32 or int64"),
        (lambda: rope(x, offset=offsets[:2]), ValueError, "expected a number or [batch] with batch 3, got [2]"),
        (lambda: modules.RotaryEmbedding(8, layout="thd")(x[0], offset=offsets), ValueError, "offset: expected a number where there is no batch"),
        (lambda: modules.SinusoidalPositionalEmbedding(8)(x[0, 0], offset=offsets), ValueError, "offset: expected a number where there is no batch"),
    )  # fmt: skip
    counted = modules.InputEmbedding(
        11, 8, positions="learned", max_positions=9, padding_idx=1, position_rule="roberta"
    )
    refused((lambda: counted(torch.zeros(3, 5, dtype=torch.int64), offset=offsets), ValueError, "offset: expected a number where padding is counted"))  # fmt: skip


# ------------------------------------------------------------------------------------- documents

BOUNDS = [0, 2, 2, 5, 9]
STARTS = [7, 3, 0, 19]
TOKENS = BOUNDS[-1]
SPEC = pe.RotarySpec(8)


def by_document(x: Tensor, dim: int) -> list[Tensor]:
    return list(x.split([b - a for a, b in itertools.pairwise(BOUNDS)], dim))


def cached(x: Tensor, **options: Any) -> Tensor:
    """Query and cache of rotary_cache_, side by side."""
    caches = torch.zeros(2, 1, 16, 2, 8, device=x.device).unbind()
    slots = torch.arange(len(x), device=x.device)
    parts = (x.clone(), x.clone(), x)
    query = pe.functional.rotary_cache_(*parts, *caches, slots, spec=SPEC, **options)
    return torch.cat([query, caches[0][0, : len(x)]], -1)


def latent(x: Tensor, **options: Any) -> Tensor:
    cache = torch.zeros(1, 16, 4 + 8, device=x.device)
    slots = torch.arange(len(x), device=x.device)
    parts = (x.clone(), x[:, 0, :4], x[:, 1], cache, slots)
    query = pe.functional.mla_rotary_cache_(*parts, spec=SPEC, **options)
    return torch.cat([query.flatten(1), cache[0, : len(x)]], -1)


def rope_of(modules: Any, layout: str) -> Any:
    rope = modules.RotaryEmbedding(8, layout=layout)
    return lambda x, **options: rope(x, x, **options)[1]


def functional(name: str, layout: str = "thd") -> Any:
    function = getattr(pe.functional, name)
    key = {"mla_rotary": lambda x: x[:, 0]}.get(name, lambda x: x)

    def call(x: Tensor, **options: Any) -> Tensor:
        query = x.clone()
        return function(query, key(query.clone()), spec=SPEC, layout=layout, **options)[0]

    return call


def in_pack(name: str) -> Any:
    """The query of a projection that holds x three times."""

    def call(x: Tensor, **options: Any) -> Tensor:
        layout = "thd" if x.dim() == 3 else "bshd"
        qkv = torch.cat([x, x, x], -2).flatten(-2)
        function = getattr(pe.functional, name)
        return function(qkv, x.shape[-2], spec=SPEC, layout=layout, **options)[0]

    return call


def learned_module(modules: Any) -> Any:
    torch.manual_seed(0)
    return modules.LearnedPositionalEmbedding(30, 8)


def input_layer(modules: Any) -> Any:
    torch.manual_seed(0)
    layer = modules.InputEmbedding(12, 8, max_positions=30)

    def call(x: Tensor, **options: Any) -> Tensor:
        layer.to(x.device)
        return layer(inputs_embeds=x, **options)  # type: ignore[no-any-return]

    return call


TABLE = torch.randn(30, 8)
FORMS: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "thd": (rope_of(pe, "thd"), (TOKENS, 2), 0),
    "bshd": (rope_of(pe, "bshd"), (1, TOKENS, 2), 1),
    "bhsd": (rope_of(pe, "bhsd"), (1, 2, TOKENS), 2),
    "sbhd": (rope_of(pe, "sbhd"), (TOKENS, 1, 2), 0),
    "cpp thd": (rope_of(pe.cpp, "thd"), (TOKENS, 2), 0),
    "cpp bshd": (rope_of(pe.cpp, "bshd"), (1, TOKENS, 2), 1),
    "rotary": (functional("rotary"), (TOKENS, 2), 0),
    "rotary_": (functional("rotary_"), (TOKENS, 2), 0),
    "rotate_": (lambda x, **options: pe.RotaryEmbedding(8, layout="thd").rotate_(x.clone(), **options), (TOKENS, 2), 0),
    "rotary_packed": (in_pack("rotary_packed"), (TOKENS, 2), 0),
    "norm_rotary_packed": (in_pack("norm_rotary_packed"), (TOKENS, 2), 0),
    "norm_rotary": (functional("norm_rotary"), (TOKENS, 2), 0),
    "norm_rotary_": (functional("norm_rotary_"), (TOKENS, 2), 0),
    "mla_rotary": (functional("mla_rotary"), (TOKENS, 2), 0),
    "rotary_cache_": (cached, (TOKENS, 2), 0),
    "mla_rotary_cache_": (latent, (TOKENS, 2), 0),
    "learned": (learned_module(pe), (1, TOKENS), 1),
    "learned cpp": (learned_module(pe.cpp), (1, TOKENS), 1),
    "learned_add": (lambda x, **options: pe.functional.learned_add(x, TABLE.to(x.device), **options), (1, TOKENS), 1),
    "input": (input_layer(pe), (1, TOKENS), 1),
    "input cpp": (input_layer(pe.cpp), (1, TOKENS), 1),
    "input_embedding": (lambda x, **options: pe.functional.input_embedding(torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]), x[0], TABLE.to(x.device), **options), (1, TOKENS), 1),
    "sinusoidal": (pe.SinusoidalPositionalEmbedding(8), (1, TOKENS), 1),
    "sinusoidal cpp": (pe.cpp.SinusoidalPositionalEmbedding(8), (1, TOKENS), 1),
    "sinusoidal without a batch": (pe.SinusoidalPositionalEmbedding(8), (TOKENS,), 0),
    "functional.sinusoidal": (lambda x, **options: pe.functional.sinusoidal(x, spec=pe.SinusoidalSpec(8), **options), (1, TOKENS), 1),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_document_begins_at_its_own(form: str, device: torch.device) -> None:
    call, shape, dim = FORMS[form]
    if hasattr(call, "to"):
        call.to(device)
    x = torch.randn(*shape, 8, device=device)
    parts = by_document(x, dim)
    for dtype in (torch.int32, torch.int64):
        bounds = torch.tensor(BOUNDS, dtype=dtype, device=device)
        starts = torch.tensor(STARTS, dtype=dtype, device=device)
        own = [call(part, offset=start) for part, start in zip(parts, STARTS, strict=True) if part.numel()]
        assert torch.equal(call(x, cu_seqlens=bounds, offset=starts), torch.cat(own, dim))
        same = [call(part, offset=4) for part in parts if part.numel()]
        assert torch.equal(call(x, cu_seqlens=bounds, offset=4), torch.cat(same, dim))


# Forms that take a batch: the shape of three samples of five tokens, and their dimension.
SAMPLES: dict[str, tuple[Any, tuple[int, ...], int]] = {
    **{name: (FORMS[name][0], (3, 5), 0) for name in FORMS if len(FORMS[name][1]) == 2 and FORMS[name][2] == 1},
    **{f"{name} {layout}": (rope_of(modules, layout), *shape)
       for name, modules in (("python", pe), ("cpp", pe.cpp))
       for layout, shape in {"bshd": ((3, 5, 2), 0), "bhsd": ((3, 2, 5), 0), "sbhd": ((5, 3, 2), 1)}.items()},
    "rotary_packed": (in_pack("rotary_packed"), (3, 5, 2), 0),
    "norm_rotary_packed": (in_pack("norm_rotary_packed"), (3, 5, 2), 0),
    **{name: (functional(name, "bshd"), (3, 5, 2), 0) for name in ("rotary", "rotary_", "norm_rotary", "norm_rotary_")},
    "rotate_": (lambda x, **options: pe.RotaryEmbedding(8).rotate_(x.clone(), **options), (3, 5, 2), 0),
}  # fmt: skip
SAMPLES.pop("input_embedding")  # takes no batch of tables: below


@pytest.mark.parametrize("form", SAMPLES)
def test_each_sample_begins_at_its_own(form: str, device: torch.device) -> None:
    call, shape, batch = SAMPLES[form]
    if hasattr(call, "to"):
        call.to(device)
    x = torch.randn(*shape, 8, device=device)
    parts = zip(x.split(1, batch), OFFSETS, strict=True)
    expected = torch.cat([call(part, offset=offset) for part, offset in parts], batch)
    for dtype in (torch.int32, torch.int64):
        offsets = torch.tensor(OFFSETS, dtype=dtype, device=device)
        assert torch.equal(call(x, offset=offsets), expected)


def test_the_input_as_one_function_takes_each_samples_offset(device: torch.device) -> None:
    ids = torch.randint(30, (3, 5), device=device)
    table = TABLE.to(device)
    call = pe.functional.input_embedding
    found = call(ids, table, table, offset=torch.tensor(OFFSETS, device=device))
    alone = [call(ids[i : i + 1], table, table, offset=offset) for i, offset in enumerate(OFFSETS)]
    assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("form", FORMS)
def test_documents_are_checked(form: str) -> None:
    call, shape, dim = FORMS[form]
    x, bounds, starts = torch.randn(*shape, 8), torch.tensor(BOUNDS), torch.tensor(STARTS)
    refused(
        (lambda: call(x, cu_seqlens=bounds, offset=starts[:2]), ValueError, "offset: expected a number or [documents] with documen"),
        (lambda: call(x, cu_seqlens=bounds, offset=starts.float()), TypeError, "offset: expected int32 or int64, got float32"),
        (lambda: call(x, positions=torch.arange(TOKENS), cu_seqlens=bounds, offset=starts), ValueError, "cu_seqlens: expected none where positions are given"),
    )  # fmt: skip
    if dim == 1:
        refused((lambda: call(x.expand(3, *x.shape[1:]), cu_seqlens=bounds, offset=starts), ValueError, "cu_seqlens: expected .*batch 1, got batch 3"))  # fmt: skip


@AT_ONCE
@pytest.mark.parametrize("form", FORMS)
def test_boundaries_that_do_not_fit_are_refused(form: str) -> None:
    call, shape, _ = FORMS[form]
    x, starts = torch.randn(*shape, 8), torch.tensor([5, 9])
    for bounds in ([0, 3, 8], [1, 3, 9], [0, 10, 9]):
        refused((lambda: call(x, cu_seqlens=torch.tensor(bounds), offset=starts), ValueError, "cu_seqlens: expected"))  # fmt: skip


def test_documents_in_compiled_functions() -> None:
    rope = pe.RotaryEmbedding(8, layout="thd")
    x, bounds, starts = torch.randn(TOKENS, 2, 8), torch.tensor(BOUNDS), torch.tensor(STARTS)
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend="aot_eager")
    expected = rope(x, cu_seqlens=bounds, offset=starts)
    assert torch.equal(compiled(x, cu_seqlens=bounds, offset=starts), expected)


def test_gradients_of_documents() -> None:
    rope = pe.RotaryEmbedding(8, layout="thd")
    x, upper = torch.randn(TOKENS, 2, 8, requires_grad=True), torch.randn(TOKENS, 2, 8)
    whole = rope(x, cu_seqlens=torch.tensor(BOUNDS), offset=torch.tensor(STARTS))
    parts = zip(by_document(x, 0), STARTS, strict=True)
    alone = torch.cat([rope(part, offset=start) for part, start in parts])
    found, expected = (torch.autograd.grad(each, x, upper)[0] for each in (whole, alone))
    assert torch.equal(found, expected)


def test_in_compiled_functions() -> None:
    rope = pe.RotaryEmbedding(8)
    x, offsets = torch.randn(3, 5, 2, 8), torch.tensor(OFFSETS)
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x, offset=offsets), rope(x, offset=offsets))


@pytest.mark.parametrize("modules", [pe, pe.cpp], ids=["python", "cpp"])
def test_positions_that_would_wrap_are_refused(modules: Any) -> None:
    last = 2**63 - 3  # the third position does not fit
    rows, ids = torch.zeros(1, 3, 8), torch.zeros(1, 3, dtype=torch.int64)
    embed = modules.InputEmbedding(11, 8, positions="sinusoidal")
    for call in (
        lambda: modules.RotaryEmbedding(8)(rows.unsqueeze(2), offset=last),
        lambda: modules.SinusoidalPositionalEmbedding(8)(rows, offset=last),
        lambda: embed(ids, offset=last),
    ):
        refused((call, ValueError, "offset: expected a sum below 2^63, got 92"))
