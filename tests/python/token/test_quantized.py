"""Tests of tables of codes: the operator, QuantizedTable, and modules that use one."""

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed import functional
from posembed.glue.decompositions import decompositions
from safetensors.torch import save_file
from support.refusals import refused
from torch import Tensor

OPERATOR = torch.ops.posembed.embedding_quantized.default
ROWS, COLUMNS = 20, 64
FORMATS = ("float8", "int8", "int4")
IDS = torch.tensor([[3, 19, 0], [7, 7, 1]])


def table(format: Any = "float8", block: int | None = 32, device: Any = "cpu") -> Tensor:
    return functional.quantize_rows(torch.randn(ROWS, COLUMNS, device=device), format, block)


def dequantized(codes: Tensor, scales: Tensor, biases: Tensor | None, rows: int = 1, columns: int = 32) -> Tensor:
    """The table in float64."""
    if codes.dtype == torch.uint8:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    spread = [
        values.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        for values in (scales, biases)
        if values is not None
    ]
    result = codes.double() * spread[0][: codes.shape[0], : codes.shape[1]]
    return result if biases is None else result + spread[1][: codes.shape[0], : codes.shape[1]]


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """As the operator rounds: to float32, then to the dtype."""
    return numbers if dtype == torch.float64 else numbers.float().to(dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows(format: Any, dtype: torch.dtype, device: torch.device) -> None:
    codes, scales, biases = table(format, device=device)
    exact = dequantized(codes, scales, biases)[IDS.to(device)]
    for ids in (IDS, IDS.int()):
        found = functional.embedding_quantized(ids.to(device), codes, scales, biases, dtype=dtype)
        assert found.dtype == dtype
        if biases is None or dtype != torch.float64:
            assert torch.equal(found, rounded(exact, dtype))
        else:
            torch.testing.assert_close(found, exact, rtol=1e-15, atol=1e-15)


def test_blocks_of_rows_and_exponents(device: torch.device) -> None:
    """As DeepSeek's: blocks of 128 x 128 of which the last are cut, and scales in ue8m0."""
    codes = torch.randn(ROWS, COLUMNS, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, device=device) + 0.5
    options = {"block_rows": 8, "block_columns": 48}
    for values in (scales, scales.to(torch.float8_e8m0fnu)):
        expected = dequantized(codes, values.float(), None, 8, 48)[IDS.to(device)].float()
        for ids in (IDS.to(device), IDS.to(device).int()):
            found = functional.embedding_quantized(ids, codes, values, **options)
            assert torch.equal(found, expected)


def test_views_and_scale(device: torch.device) -> None:
    codes, scales, _ = table("int8", None, device)
    wide = torch.cat([codes, codes], 1)[:, :COLUMNS]
    ids = IDS.to(device)
    for view in (wide, codes.t().contiguous().t()):
        found = functional.embedding_quantized(ids, view, scales, scale=8.0)
        assert torch.equal(found, 8 * functional.embedding_quantized(ids, codes, scales))
    assert functional.embedding_quantized(ids[:0], codes, scales).shape == (0, 3, COLUMNS)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block", [None, 16])
def test_quantising_is_as_exact_as_the_codes(format: Any, block: int | None) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    weight[3] = 0
    quantized = pe.QuantizedTable.quantize(weight, format, block)
    blocks = weight.view(ROWS, -1, block or COLUMNS)
    largest = blocks.abs().amax(-1, keepdim=True)
    if format == "float8":  # 4 significant bits, or a step of the smallest codes
        allowed = torch.maximum(blocks.abs() / 16, largest / 448 * 2**-10)
    elif format == "int8":
        allowed = largest / 127 / 2
    else:
        allowed = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15 / 2
    error = (quantized.dequantize().view_as(blocks) - blocks).abs()
    assert bool((error <= allowed * 1.0001).all())
    assert not quantized.dequantize()[3].any()


@pytest.mark.parametrize(
    ("format", "block", "layers"),
    [("float8", None, 4), ("int8", 16, 4), ("int4", 16, 4), ("int8", 32, 4), ("int4", None, 32)],
)
def test_a_layer_of_codes(format: Any, block: int | None, layers: int, device: torch.device) -> None:
    """The bits of whole rows, from blocks that lie within a layer, and from others."""
    table = pe.PerLayerEmbedding(ROWS, layers, COLUMNS // layers, scale=3.0, device=device)
    table.quantize(format, block)
    ids = IDS.to(device)
    for layer in range(layers):
        assert torch.equal(table.layer(ids, layer), table(ids)[..., layer, :])
        assert torch.equal(table.layer(ids.int(), layer - layers), table(ids)[..., layer, :])
    compiled = torch.compile(table.layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids, 1), table.layer(ids, 1))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("block", [None, 2, 6])
def test_parts_of_codes_of_4_bits(parts: int, block: int | None, device: torch.device) -> None:
    """Of 12 columns in 6 bytes: of four parts, two begin in the middle of a byte."""
    table = pe.QuantizedTable.quantize(torch.randn(ROWS, 12, device=device), "int4", block)
    numbers = dequantized(table.codes, table.scales, table.biases, 1, block or 12).float()
    for index in range(parts):
        for ids in (IDS.to(device), IDS.to(device).int()):
            found = table.part(ids, index, parts, 2.0)
            assert torch.equal(found, 2 * numbers[IDS.to(device)].chunk(parts, -1)[index])


@pytest.mark.parametrize("bits", [8, 4])
def test_rowwise_tables_as_torch_unpacks_them(bits: int) -> None:
    """``torch.ops.quantized``'s own tables, which are FBGEMM's."""
    weight = torch.randn(ROWS, COLUMNS) * torch.logspace(-3, 3, ROWS).unsqueeze(1)
    name = {8: "byte", 4: "4bit"}[bits]
    packed = getattr(torch.ops.quantized, f"embedding_bag_{name}_prepack")(weight)
    theirs = getattr(torch.ops.quantized, f"embedding_bag_{name}_unpack")(packed)
    table = pe.QuantizedTable.from_rowwise(packed, bits)
    step = table.scales * (2**bits - 1)
    assert bool(((table(IDS) - theirs[IDS]).abs() <= 2e-7 * step[IDS]).all())
    assert bool(((table.dequantize() - weight).abs() <= step / (2**bits - 1) * 0.6).all())
    for bad, error, message in (
        (packed.char(), TypeError, "packed: expected uint8, got int8"),
        (packed[0], ValueError, r"packed: expected \[num_embeddings, more than"),
        (packed[:, :4], ValueError, r"packed: expected \[num_embeddings, more than"),
        (packed.tolist(), TypeError, "packed: expected a Tensor"),
    ):
        refused((lambda: pe.QuantizedTable.from_rowwise(bad, bits), error, message))
    refused((lambda: pe.QuantizedTable.from_rowwise(packed, 2), ValueError, "bits: expected 8 or 4, got 2"))  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.no_stand_in
def test_tracers(format: Any) -> None:
    codes, scales, biases = table(format)
    given = (codes, scales, IDS, biases)
    # torch cannot compare float8 tensors, which the test of the schema does.
    float8 = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    tests = {"test_utils": float8} if format == "float8" else {}
    torch.library.opcheck(OPERATOR, given, **tests)
    torch._dynamo.reset()
    quantized = pe.QuantizedTable(codes, scales, biases)
    compiled = torch.compile(quantized, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(IDS), quantized(IDS))
    program = torch.export.export(quantized, (IDS,))
    assert torch.equal(program.module()(IDS), quantized(IDS))
    torch.testing.assert_close(pe.decompose(program).module()(IDS), quantized(IDS))
    torch.testing.assert_close(decompositions()[OPERATOR](*given), OPERATOR(*given))
    many = torch.stack([IDS, IDS + 0, IDS.flip(0)])
    assert torch.equal(torch.vmap(quantized)(many), quantized(many))
    assert OPERATOR(*(x if x is None else x.to("meta") for x in given)).shape == (2, 3, COLUMNS)


def test_conversions_keep_every_bit(device: torch.device) -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS, scale=3.0, device=device)
    token.quantize("float8", block=32)
    codes, scales = token.table.codes.clone(), token.table.scales.clone()
    before = token(IDS.to(device))
    for module in (token.bfloat16(), copy.deepcopy(token).half().bfloat16()):
        assert torch.equal(module.table.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(module.table.scales, scales)
        found = module(IDS.to(device))
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, before.bfloat16())
    file = io.BytesIO()
    torch.save(token.state_dict(), file)
    file.seek(0)
    other = pe.TokenEmbedding(ROWS, COLUMNS, scale=3.0, device=device)
    other.quantize("float8", block=32)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(IDS.to(device)), before)


@pytest.mark.parametrize("format", FORMATS)
def test_pickles_keep_every_bit(format: Any) -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS)
    token.quantize(format, block=32)
    exponents = torch.ones(ROWS, 1).to(torch.float8_e8m0fnu)
    for module in (token, token.table, pe.QuantizedTable(table("float8")[0], exponents)):
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        before = {name: buffer.dtype for name, buffer in module.named_buffers()}
        for each in (
            pickle.loads(pickle.dumps(module)),
            torch.load(file, weights_only=False),
            copy.deepcopy(module),
            copy.copy(module),
        ):
            assert {name: buffer.dtype for name, buffer in each.named_buffers()} == before
            assert torch.equal(each(IDS), module(IDS))
        assert {name: buffer.dtype for name, buffer in module.named_buffers()} == before


def test_codes_of_another_format_are_not_converted() -> None:
    weight = torch.randn(ROWS, COLUMNS)
    tables = {name: pe.QuantizedTable.quantize(weight, name) for name in ("float8", "int8")}
    number = pe.TokenEmbedding(ROWS, COLUMNS)
    for own, other in (("float8", "int8"), ("int8", "float8")):
        before, state = tables[own](IDS), tables[other].state_dict()
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=r"codes: expected torch\.\w+, got torch\.\w+"):
                tables[own].load_state_dict(state, strict=strict)
        assert torch.equal(tables[own](IDS), before)  # nor are the scales
        refused((lambda: number.load_state_dict({"weight": state["codes"]}), RuntimeError, "weight: expected torch.float32, got torch"))  # fmt: skip
        copied = copy.deepcopy(tables[own])
        copied.load_state_dict(state, assign=True)  # the codes themselves
        assert torch.equal(copied(IDS), tables[other](IDS))
    scales = tables["int8"].scales.to(torch.float8_e8m0fnu)
    refused((lambda: tables["int8"].load_state_dict({**tables["int8"].state_dict(), "scales": scales}), RuntimeError, "scales: expected torch.float32, got torch.float8"))  # fmt: skip
    number.load_state_dict({"weight": weight.double()})
    assert torch.equal(number.weight, weight)


def test_token_embedding(device: torch.device) -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS, device=device)
    whole = token.memory()
    token.quantize("int8")
    assert whole == {str(token.table.codes.device): ROWS * COLUMNS * 4}
    assert token.memory() == {next(iter(whole)): ROWS * (COLUMNS + 4)}
    assert not list(token.parameters())
    assert not token(IDS.to(device)).requires_grad
    assert torch.equal(token(IDS.to(device)), token.table.dequantize()[IDS.to(device)])
    for call in (lambda: token.logits(torch.ones(COLUMNS)), lambda: token.resize(30)):
        refused((call, TypeError, "weight: expected a table of numbers, got none"))
    refused(
        (token.quantize, ValueError, "weight: expected a table of numbers, got none"),
        (token.reset_parameters, ValueError, "weight: expected a table of numbers, got none"),
        (pe.TokenEmbedding(3, 4, max_norm=1.0).quantize, ValueError, "max_norm: expected none for a frozen table, got 1"),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_token_bag(mode: Any, device: torch.device) -> None:
    bag = pe.TokenBag(ROWS, COLUMNS, mode, padding_idx=7, device=device)
    bag.quantize("int4", block=16)
    plain = pe.TokenBag.from_pretrained(bag.table.dequantize(), mode=mode, padding_idx=7)
    ids, offsets = torch.tensor([3, 7, 7, 1, 2]).to(device), torch.tensor([0, 2, 3]).to(device)
    assert torch.equal(bag(ids, offsets), plain(ids, offsets))
    assert torch.equal(bag(IDS.to(device)), plain(IDS.to(device)))
    if mode == "sum":
        weights = torch.rand(5, device=device)
        assert torch.equal(bag(ids, offsets, weights), plain(ids, offsets, weights))


@pytest.mark.parametrize("summed", [False, True])
def test_ngram_embedding(summed: bool, device: torch.device) -> None:
    spec = pe.NgramSpec((3, 5), ((11, 13),))
    memory = pe.NgramEmbedding(spec, 16, summed=summed, device=device)
    memory.quantize("float8", block=4)
    plain = pe.NgramEmbedding.from_pretrained(memory.table.dequantize(), spec, summed=summed)
    assert torch.equal(memory(IDS.to(device)), plain(IDS.to(device)))


def call(**changed: Any) -> Callable[[], Tensor]:
    codes, scales, _ = table("int8")
    given = {"ids": IDS, "codes": codes, "scales": scales, **changed}
    return lambda: functional.embedding_quantized(**given)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (call(codes=torch.ones(3, 4)), TypeError, "codes: expected float8_e4m3fn, int8, or uint8"),
        (call(codes=torch.ones(3, dtype=torch.int8)), ValueError, "codes: expected .num_emb"),
        (call(scales=torch.ones(ROWS, 2).half()), TypeError, "scales: expected float32 or"),
        (call(scales=torch.ones(ROWS, 3)), ValueError, "scales: expected columns that divide 64"),
        (call(codes=torch.ones(ROWS, 0, dtype=torch.int8), scales=torch.ones(ROWS, 1)), ValueError, "scales: expected columns that divide 0"),
        (call(scales=torch.ones(7, 2)), ValueError, "scales: expected 20 rows, one for each 1 of"),
        (call(scales=torch.ones(3, 2), block_rows=8, block_columns=20), ValueError, "4 columns"),
        (call(block_rows=0), ValueError, "block_rows: expected 1 or more, got 0"),
        (call(biases=torch.ones(1)), ValueError, "biases: expected the shape of scales"),
        (call(dtype=torch.int32), TypeError, "dtype: expected float32, float64, bfloat16 or"),
        (call(ids=torch.tensor([20])), IndexError, "ids: expected 0 to 19, .* got 20 at index 0"),
        (call(ids=IDS.float()), TypeError, "ids: expected int32 or int64"),
        (call(scales=torch.ones(ROWS, 2).requires_grad_()), ValueError, "scales: expected a ten"),
        (call(codes=torch.zeros(ROWS, 3, dtype=torch.uint8), scales=torch.ones(ROWS, 2)), ValueError, "block_columns: expected an even number for codes of 4 bits, got 3"),
        (lambda: table("int2"), ValueError, "format: expected 'float8', 'int8' or 'int4'"),
        (lambda: table("int8", 7), ValueError, "block: expected a divisor of 64, .* got 7"),
    ],
)  # fmt: skip
def test_bad_arguments(make: Any, error: type[Exception], message: str) -> None:
    refused((make, error, message))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_of_mlx(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    groups = 4
    numbers = torch.randint(2**bits, (ROWS, COLUMNS))
    scales = (torch.rand(ROWS, groups) / 16).to(dtype)
    biases = (-8 * scales.double() * torch.rand(ROWS, groups)).to(dtype)
    shifts = torch.arange(0, 32, bits)
    words = (numbers.view(ROWS, -1, 32 // bits) << shifts).sum(-1)
    signed = torch.where(words >= 2**31, words - 2**32, words).int()
    save_file(
        {"t.weight": signed.view(torch.uint32), "t.scales": scales, "t.biases": biases, "other": torch.zeros(3)},
        tmp_path / "model.safetensors",
    )
    path = tmp_path / "model.safetensors"
    refused((lambda: pe.QuantizedTable.from_file(path), pe.FileFormatError, "expected a config\\.json beside the file"))  # fmt: skip
    config = {"quantization": {"group_size": 16, "bits": 2, "t": {"bits": bits}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wide = [x.double().repeat_interleave(COLUMNS // groups, 1) for x in (scales, biases)]
    expected = (numbers * wide[0] + wide[1])[IDS]
    for tensor in (None, "t.weight"):
        found = pe.TokenEmbedding.from_file(path, tensor=tensor, keep="codes")(IDS)
        torch.testing.assert_close(found.double(), expected, rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("groups", [1, 4])
def test_codes_of_torchao(dtype: torch.dtype, groups: int, tmp_path: Path) -> None:
    """As torchao.prototype.safetensors writes the weights of an embedding."""
    codes = torch.randint(-100, 100, (ROWS, COLUMNS)).to(dtype)
    scales = torch.rand(ROWS, groups).bfloat16()
    told = {"_type": "AnyTensor", "_data": {"block_size": [1, COLUMNS // groups]}}
    parts = {"a.b._weight_qdata": codes, "a.b._weight_scale": scales, "c.weight": torch.ones(2)}
    wide = scales.float().repeat_interleave(COLUMNS // groups, 1)
    path = tmp_path / "model.safetensors"
    for zeros in (None, torch.randint(-9, 9, (ROWS, groups)).char(), torch.zeros(ROWS, groups)):
        if zeros is not None:
            parts["a.b._weight_zero_point"] = zeros
        save_file(parts, path, {"a.b.weight": json.dumps(told)})
        expected = codes.float()
        if zeros is not None:
            expected = expected - zeros.float().repeat_interleave(COLUMNS // groups, 1)
        expected = expected.double() * wide
        for tensor in (None, "a.b.weight", "a.b"):
            found = pe.TokenEmbedding.from_file(path, tensor=tensor, keep="codes")(IDS)
            torch.testing.assert_close(found.double(), expected[IDS], rtol=2e-7, atol=1e-5)


def test_cpp_modules_quantise() -> None:
    """The C++ modules give the same bits."""
    spec = pe.NgramSpec((3, 5), ((11, 13),))
    for ours, theirs in (
        (pe.TokenEmbedding(ROWS, COLUMNS), pe.cpp.TokenEmbedding(ROWS, COLUMNS)),
        (pe.TokenBag(ROWS, COLUMNS), pe.cpp.TokenBag(ROWS, COLUMNS)),
        (pe.NgramEmbedding(spec, 64), pe.cpp.NgramEmbedding(spec, 64)),
        (pe.NgramEmbedding(spec, 64, summed=True), pe.cpp.NgramEmbedding(spec, 64, summed=True)),
        (pe.PerLayerEmbedding(ROWS, 4, 16), pe.cpp.PerLayerEmbedding(ROWS, 4, 16)),
    ):
        with torch.no_grad():
            theirs.parameters()[0].copy_(ours.weight)
        ours.quantize("int4", 16)
        theirs.quantize("int4", 16)
        assert torch.equal(theirs.forward(IDS), ours(IDS))
        assert theirs.memory() == ours.memory()["cpu"]
    for layer in range(-4, 4):
        assert torch.equal(theirs.layer(IDS, layer), ours.layer(IDS, layer))
