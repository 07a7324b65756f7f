"""Tests of functional.ngram_ids beside its definition in Python's integers and models' programs."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import posembed as pe
import pytest
import torch
from posembed import functional
from posembed.glue.decompositions import decompositions
from support.ngram import reference
from support.refusals import refused
from torch import Tensor

ngram_ids = functional.ngram_ids
PRODUCTS: dict[str, Any] = {
    "multipliers": (0x7654_3210_FEDC_BA99, -3, 2**62 + 1),
    "moduli": ((11, 2**61 - 1, 1), (20_000_003, 2**63 - 1, 7)),
    "offsets": ((0, 11, 12), (13, 0, 5)),
}
ROLLING: dict[str, Any] = {
    "multipliers": (1_000_000_007, 5_915_587_277),
    "moduli": ((30_000, 2**40), (7, 9), (1, 12)),
    "sizes": (2, 4, 7),
    "rule": "rolling",
}
MODULAR: dict[str, Any] = {
    "multipliers": (131_072, 7),
    "moduli": ((10_223_617, 2**43 + 3), (2**44, 9), (1, 13)),
    "sizes": (1, 4, 7),
    "rule": "modular",
}
# Padding on the left, on the right and inside.
TEXT = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 0, 0]])
CASES: dict[str, dict[str, Any]] = {
    "products": PRODUCTS,
    "boundary": {**PRODUCTS, "boundary": 2},
    "padding": {**PRODUCTS, "boundary": 2, "padding": -1},
    "history": {**PRODUCTS, "boundary": 2, "history": torch.tensor([[4, 2], [3, 1]])},
    "one history": {**PRODUCTS, "history": torch.tensor([[4, 2]], dtype=torch.int32)},
    "documents": {**PRODUCTS, "boundary": 2, "cu_seqlens": torch.tensor([0, 3, 3, 4, 9])},
    "documents, history": {**PRODUCTS, "cu_seqlens": torch.tensor([0, 3, 9], dtype=torch.int32), "history": torch.arange(8).view(4, 2)},
    "mask": {**PRODUCTS, "boundary": 2, "mask": TEXT},
    "mask of bool, history": {**PRODUCTS, "boundary": 2, "history": torch.tensor([[4, 2], [3, 1]]), "mask": TEXT.bool()},
    "mask, documents, history": {**PRODUCTS, "cu_seqlens": torch.tensor([0, 3, 3, 9]), "history": torch.arange(12).view(6, 2), "mask": TEXT.int()},
    "rolling, mask": {**ROLLING, "padding": -7, "mask": TEXT},
    "rolling": ROLLING,
    "rolling, history": {**ROLLING, "history": torch.arange(6).view(1, 6), "boundary": 2},
    "modular": {**MODULAR, "boundary": 2, "padding": 0},
    "modular, mask": {**MODULAR, "padding": -7, "mask": TEXT},
    "modular, history": {**MODULAR, "history": torch.arange(6).view(1, 6)},
    "single tokens": {"multipliers": (5,), "moduli": ((3, 7),), "sizes": (1,)},
}  # fmt: skip
every = pytest.mark.parametrize("name", CASES)


def make_ids(batch: int = 2, seq: int = 9) -> Tensor:
    return torch.randint(-1, 5, (batch, seq), generator=torch.Generator().manual_seed(0))


def flat(options: dict[str, Any]) -> dict[str, Any]:
    """The options as the operator takes them."""
    tables = {"moduli", "offsets"} & options.keys()
    return {**options, **{name: [x for row in options[name] for x in row] for name in tables}}


def call(name: str) -> Callable[[Tensor], Tensor]:
    return lambda ids: ngram_ids(ids, **CASES[name])


@every
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_definition(name: str, dtype: torch.dtype, device: torch.device) -> None:
    options = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in CASES[name].items()}
    ids = make_ids().to(device, dtype)
    expected = reference(ids, **options)
    for view in (ids, ids.t().contiguous().t()):
        assert torch.equal(ngram_ids(view, **options), expected)
    if "history" not in options:
        mask = {"mask": options["mask"][1]} if "mask" in options else {}
        assert torch.equal(ngram_ids(ids[1], **{**options, **mask}), expected[1])
    mask = {"mask": options["mask"][:0]} if "mask" in options else {}
    none = {**options, "history": None, **mask}
    assert ngram_ids(ids[:0], **none).shape == (0, *expected.shape[1:])


@every
def test_texts_longer_than_a_piece(name: str, device: torch.device) -> None:
    """The CPU hashes 256 tokens together: those before are others' at the edge of a piece."""
    options, ids = dict(CASES[name]), make_ids(2, 700)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = options["cu_seqlens"] * 700 // 9
    if "mask" in options:
        options["mask"] = options["mask"].repeat(1, 78)[:, :700]
    expected = reference(ids, **options)
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    assert torch.equal(ngram_ids(ids.to(device), **options).cpu(), expected)


def test_numbers_of_64_bits(device: torch.device) -> None:
    draw = random.Random(0)
    edges = [0, 1, -1, 2**63 - 1, -(2**63), 2**62, 20_000_003 * 461_168_000_000, 5]
    ids = torch.tensor([edges + [draw.getrandbits(64) - 2**63 for _ in range(200)]], device=device)
    narrow = [1, 2, 3, 20_000_003, 2**31 - 1]
    wide = [2**31, 2**32 - 5, 2**32 + 15, 3 * 2**31]
    for moduli in ([narrow], [wide], [[*narrow, *wide, 2**62, 2**62 + 1, 2**63 - 1]]):
        for multiplier in (1, -1, 2**63 - 1):
            options = {"multipliers": (multiplier,), "moduli": moduli, "sizes": (1,)}
            assert torch.equal(ngram_ids(ids, **options), reference(ids, **options))


def test_lengths_are_a_mask_of_padding_on_the_right(device: torch.device) -> None:
    ids, lengths = make_ids().to(device), torch.tensor([3, 9], device=device)
    options = {**PRODUCTS, "boundary": 2}
    expected = reference(ids, lengths=lengths, **options)
    for given in (lengths, lengths.int()):
        assert torch.equal(ngram_ids(ids, lengths=given, **options), expected)
    assert torch.equal(ngram_ids(ids[0], lengths=lengths[0], **options), expected[0])
    compiled = torch.compile(
        lambda ids, lengths: ngram_ids(ids, lengths=lengths, **options),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    assert torch.equal(compiled(ids, lengths), expected)
    mapped = torch.vmap(lambda ids, lengths: ngram_ids(ids, lengths=lengths, **options))
    assert torch.equal(mapped(ids, lengths), expected)


def test_numbers_may_be_tensors() -> None:
    tensors = {name: torch.tensor(numbers) for name, numbers in PRODUCTS.items()}
    assert torch.equal(ngram_ids(make_ids(), **tensors), ngram_ids(make_ids(), **PRODUCTS))


@pytest.mark.parametrize("layer", [0, 1])
def test_as_qwen4_exp(layer: int) -> None:
    qwen = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = qwen.Qwen4ExpTextConfig(
        vocab_size=50, hidden_size=24, ple_layer_ids=[1, 2], heads_per_ngram=4, ngram_vocab_size_base=90, eos_token_id=3
    )
    theirs = qwen.Qwen4ExpTextNGramEmbedding(config, 24, layer, layer)
    found: list[Tensor] = []
    theirs.ngram_embedding.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    hash = {
        "multipliers": torch.ops.posembed.ngram_multipliers(3, 50, layer),
        "moduli": theirs.ngram_heads_vocab_sizes.view(2, 4).tolist(),
        "offsets": theirs.ngram_heads_offsets.view(2, 4).tolist(),
        "boundary": 3,
    }
    assert hash["multipliers"] == theirs.layer_multipliers.tolist()
    assert torch.ops.posembed.ngram_primes(8, 90, 8 * layer) == theirs.head_vocab_sizes
    ids = torch.randint(0, 50, (3, 600)) % 7
    theirs(ids, None)
    assert torch.equal(ngram_ids(ids, **hash), found.pop())

    cache = qwen.DynamicCache(config=config)
    for begin, end in [(0, 1), (1, 3), (3, 4), (4, 300), (300, 301), (301, 600)]:
        theirs(ids[:, begin:end], cache)
        history = torch.nn.functional.pad(ids, (2, 0), value=3)[:, begin : begin + 2]
        assert torch.equal(ngram_ids(ids[:, begin:end], history=history, **hash), found.pop())


def test_as_engram_is_published() -> None:
    """Cheng et al., arXiv:2601.07372: products of shifted ids, with padding before the text."""
    multipliers, padding = np.random.default_rng(10007).integers(0, 2**40, 4) * 2 + 1, 2
    moduli = [[101, 103], [107, 109], [113, 127]]
    ids = np.random.default_rng(1).integers(0, 9, (2, 30))
    shifted = [np.pad(ids, ((0, 0), (k, 0)), constant_values=padding)[:, :30] for k in range(4)]
    columns, mix = [], shifted[0] * multipliers[0]
    for k in range(1, 4):
        mix = np.bitwise_xor(mix, shifted[k] * multipliers[k])
        columns += [mix % modulus for modulus in moduli[k - 1]]
    found = ngram_ids(torch.from_numpy(ids), multipliers=multipliers.tolist(), moduli=moduli, padding=padding)
    assert np.array_equal(found.numpy(), np.stack(columns, -1))


@pytest.mark.parametrize("ratio", [78, 100.567])
def test_as_longcat_is_published(ratio: float) -> None:
    """Liu et al., arXiv:2601.21204: a sum of shifted ids times powers modulo each head's rows."""
    vocab_size, end, n, k = 163_840, 2, 5, 4
    ids = torch.randint(0, vocab_size, (2, 50), generator=torch.Generator().manual_seed(1))
    ids[0, [0, 7, 8, 30]] = end
    shifted = torch.zeros(n, 2, 50, dtype=torch.int64)
    for row in range(2):
        begin = 0
        for at in range(50):
            for back in range(min(n, at - begin + 1)):
                shifted[back, row, at] = ids[row, at - back]
            if ids[row, at] == end:
                begin = at + 1
    columns = []
    for size in range(2, n + 1):
        for head in range(k):
            rows = int(ratio * vocab_size + 2 * ((size - 2) * k + head) + 1)
            powers = torch.tensor([pow(vocab_size, back, rows) for back in range(size)])
            columns.append((shifted[:size] * powers.view(-1, 1, 1)).sum(0) % rows)
    spec = pe.NgramSpec.longcat(vocab_size, end, ngram_size=n, heads=k, ratio=ratio)
    found = ngram_ids(ids, multipliers=spec.multipliers, moduli=spec.moduli, boundary=end, padding=0, rule=spec.rule)
    assert torch.equal(found, torch.stack(columns, -1))


# Tracing depends on which tensors are given.
KINDS = {tuple(k for k, v in case.items() if isinstance(v, Tensor)): name for name, case in CASES.items()}


@pytest.mark.parametrize("name", KINDS.values())
@pytest.mark.no_stand_in
def test_tracers(name: str) -> None:
    torch._dynamo.reset()
    ids, function = make_ids(), call(name)
    torch.library.opcheck(torch.ops.posembed.ngram_ids.default, (ids,), flat(CASES[name]))
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(ids), function(ids))
    program = torch.export.export(Called(name), (ids,), dynamic_shapes=None)
    assert torch.equal(program.module()(ids), function(ids))
    assert torch.equal(pe.decompose(program).module()(ids), function(ids))
    on_meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in CASES[name].items()}
    assert ngram_ids(ids.to("meta"), **on_meta).shape == function(ids).shape


class Called(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, ids: Tensor) -> Tensor:
        return call(self.name)(ids)


@every
def test_decomposition(name: str, device: torch.device) -> None:
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in CASES[name].items()}
    ids = make_ids().to(device)
    replaced = decompositions()[torch.ops.posembed.ngram_ids.default]
    assert torch.equal(replaced(ids, **flat(options)), ngram_ids(ids, **options))


def test_vmap() -> None:
    ids, history = torch.randint(0, 5, (4, 2, 9)), torch.randint(0, 5, (4, 2, 2))
    options = {**PRODUCTS, "boundary": 2}
    cu_seqlens = torch.tensor([0, 4, 9])

    def check(function: Callable[..., Tensor], dims: tuple[int | None, ...], *given: Tensor) -> None:
        expected = torch.stack(
            [
                function(*(x if d is None else x.select(d, i) for x, d in zip(given, dims, strict=True)))
                for i in range(4)
            ]
        )
        assert torch.equal(torch.vmap(function, dims)(*given), expected)

    check(lambda x: ngram_ids(x, **options), (0,), ids)
    check(lambda x: ngram_ids(x, **options), (0,), ids[:, 0])
    masks = torch.randint(0, 2, (4, 2, 9))
    check(lambda x, m: ngram_ids(x, mask=m, **options), (0, 0), ids, masks)
    check(lambda x, m: ngram_ids(x, mask=m, **options), (0, None), ids, masks[0])
    check(lambda x, m: ngram_ids(x, mask=m, **options), (None, 0), ids[0], masks)
    check(lambda x, m: ngram_ids(x, mask=m, **options), (0, 0), ids[:, 0], masks[:, 0])
    check(lambda x, h: ngram_ids(x, history=h, **options), (0, 0), ids, history)
    check(lambda x, h: ngram_ids(x, history=h, **options), (0, None), ids, history[0])
    check(lambda x, h: ngram_ids(x, history=h, **options), (None, 0), ids[0], history)
    check(lambda x, h: ngram_ids(x, history=h, **options), (0, 0), ids[:, 0], history[:, 0])
    check(lambda x: ngram_ids(x, cu_seqlens=cu_seqlens, **options), (0,), ids[:, 0])
    check(lambda x, h: ngram_ids(x, history=h, cu_seqlens=cu_seqlens, **options), (0, 0), ids[:, 0], history)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"ids": torch.zeros(1, 1, 1, dtype=torch.int64)}, ValueError, r"ids: expected \[seq\] or"),
        ({"ids": torch.zeros(2)}, TypeError, "ids: expected int32 or int64"),
        ({"multipliers": (1,)}, ValueError, "multipliers: expected 2 to 64 numbers, got 1"),
        ({"moduli": ((2, 0, 3), (4, 5, 6))}, ValueError, "moduli: expected 1 or more, got 0 at"),
        ({"moduli": ((2, 3), (4, 5, 6))}, ValueError, r"moduli: expected \[2, heads\] numbers"),
        ({"moduli": ((2, 3), (4, 5), (6, 7))}, ValueError, r"moduli: expected \[2, heads\]"),
        ({"moduli": (2, 3, 4, 5, 6, 7)}, ValueError, r"moduli: expected \[2, heads\] numbers"),
        ({"moduli": ((9,) * 65,) * 2, "offsets": None}, ValueError, "moduli: expected 1 to 128"),
        ({"offsets": ((0, 1), (2, 3))}, ValueError, "offsets: expected 6, as many as moduli"),
        ({"offsets": ((0, 1, -2), (2, 3, 4))}, ValueError, "offsets: expected 0 to .* at index 2"),
        ({"offsets": ((0, 0, 0), (0, 2, 0))}, ValueError, "offsets: expected 0 to 1, got 2 at"),
        ({"sizes": (3, 2)}, ValueError, r"sizes: expected ascending numbers from 1 to 64, got \[3"),
        ({"sizes": (2, 4)}, ValueError, "multipliers: expected 4, one for each token"),
        ({"rule": "sum"}, ValueError, "rule: expected 'xor', 'rolling' or 'modular', got 'sum'"),
        ({**MODULAR, "multipliers": (1, 0), "offsets": None}, ValueError, "multipliers: expected 1 or more for rule 'modular', got 0"),
        ({**MODULAR, "multipliers": (1, 2**20), "offsets": None}, ValueError, "moduli: expected at most 4398046511103 for multiplier 1048576 .* at index 1"),
        ({"rule": "rolling", "multipliers": (5, 7)}, ValueError, r"moduli: expected \[sizes, 2\]"),
        ({"history": torch.zeros(2, 3).long()}, ValueError, r"history: expected \[2, 2\], the"),
        ({"history": torch.zeros(2, 2)}, TypeError, "history: expected int32 or int64"),
        ({"mask": torch.ones(2, 8)}, TypeError, "mask: expected bool or integers, got"),
        ({"mask": torch.ones(2, 8).int()}, ValueError, r"mask: expected the shape of ids, \[2, 9\]"),
        ({"lengths": torch.tensor([1, 10])}, ValueError, "lengths: expected 0 to 9, got 1 to 10"),
        ({"lengths": torch.tensor([-1, 1])}, ValueError, "lengths: expected 0 to 9, got -1 to 1"),
        ({"lengths": torch.tensor([1])}, ValueError, r"lengths: expected \[2\], the tokens of each"),
        ({"lengths": torch.ones(2)}, TypeError, "lengths: expected int32 or int64"),
        ({"lengths": TEXT[:, 0], "mask": TEXT}, ValueError, "lengths: expected none beside a mask"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "cu_seqlens: expected the number of"),
        ({"cu_seqlens": torch.tensor([[0]])}, ValueError, r"cu_seqlens: expected \[documents"),
    ],
)  # fmt: skip
def test_bad_arguments(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    refused((lambda: ngram_ids(**{"ids": make_ids(), **PRODUCTS, **changed}), error, message))


def test_the_operator_checks_lists_of_numbers() -> None:
    refused(
        (lambda: torch.ops.posembed.ngram_ids(make_ids(), (1, 2, 3), (4, 5, 6, 7, 8)), ValueError, "as many for each of 2 sizes, got 5"),
        (lambda: torch.ops.posembed.ngram_ids(make_ids(), (1, 2), (4,) * 6, sizes=(2, 3), rule="rolling"), ValueError, "moduli: expected one for each of 2 sizes and 2 heads"),
    )  # fmt: skip


def test_derived_numbers_are_checked() -> None:
    for arguments, message in {
        (0, 50): "count: expected 1 to 64, got 0",
        (3, 0): "vocab_size: expected 1 or more, got 0",
        (3, 50, -1): "layer: expected 0 or more, got -1",
    }.items():
        refused((lambda: torch.ops.posembed.ngram_multipliers(*arguments), ValueError, message))
    for arguments, message in {
        (129, 5): "count: expected 0 to 128, got 129",
        (2, -1): "start: expected 0 to",
        (2, 5, -1): "skip: expected 0 to",
    }.items():
        refused((lambda: torch.ops.posembed.ngram_primes(*arguments), ValueError, message))
