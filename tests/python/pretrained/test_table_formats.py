"""Tables of codes of all programs in table_formats.json: as the program itself reads them, or refused by name.

formats/ has small files that the programs wrote, and the numbers that they make of them.
"""

import json
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.pretrained import open_vectors
from posembed.tables import code_formats
from support.refusals import refused
from torch import Tensor

theirs = pytest.importorskip("safetensors.torch")

FOLDER = Path(__file__).with_name("formats")
WRITTEN = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
PACKED = "quanto_int4"
READ = [name for name in WRITTEN if name != PACKED]
NAME = "model.embed_tokens."

# Formats of the table whose codes are no table of codes here.
WIDENED = ("bitsandbytes_nf4", "bitsandbytes_nf4_nested", "bitsandbytes_fp4", "nvfp4", "mxfp4",
           "2_bits", "3_bits", "5_bits", "6_bits", "7_bits")  # fmt: skip


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(0, 100, shape).to(dtype)


# What other programs write, in outline: the names, dtypes and shapes by which they are known.
REFUSED: dict[str, dict[str, Tensor]] = {
    "GPTQ or AWQ": {"qweight": ints(8, 16), "scales": torch.ones(4, 16).half(), "qzeros": ints(4, 2), "g_idx": ints(64)},
    "EETQ": {"weight": ints(8, 16, dtype=torch.int8), "weight_scales": torch.ones(16).half()},
    "HQQ": {"W_q": ints(8, 16, dtype=torch.uint8), "scale": torch.ones(8, 1), "zero": torch.ones(8, 1)},
    "MXFP4 in blocks": {"x_blocks": ints(8, 16, dtype=torch.uint8), "x_scales": ints(8, 1, dtype=torch.uint8)},
    "MLX mxfp4, mxfp8 or nvfp4": {"weight": ints(8, 8).to(torch.uint32), "scales": ints(8, 2, dtype=torch.uint8)},
    "torchao with packed codes": {"_weight_qdata": ints(8, 32, dtype=torch.uint8), "_weight_scale": torch.ones(8, 1)},
    "packed codes with scales beside": {"weight": ints(8, 8, dtype=torch.uint8), "weight_scale": torch.ones(8, 4)},
    "packed codes with scales in the same module": {"weight": ints(8, 8).to(torch.uint32), "scale": torch.ones(8, 4)},
}  # fmt: skip


def from_file(path: Path, **options: Any) -> Tensor:
    return pe.TokenEmbedding.from_file(path, progress=False, **options).weight


def expected_of(name: str) -> Tensor:
    return theirs.load_file(FOLDER / name / "expected.safetensors")["expected"]  # type: ignore[no-any-return]


def written(path: Path, tensors: dict[str, Tensor], config: Any = None, **metadata: str) -> Path:
    """A file; ``metadata`` are texts by the last part of their names."""
    whole = {NAME + key: value.clone().contiguous() for key, value in tensors.items()}
    theirs.save_file(whole, path / "m.safetensors", {NAME + k: v for k, v in metadata.items()})
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (path / "config.json").write_text(text)
    return path / "m.safetensors"


def copied(name: str, path: Path, config: Any = None, **changed: Any) -> Path:
    """A file of the folder with other tensors; None leaves one out."""
    file = FOLDER / name / "model.safetensors"
    tensors = {key.removeprefix(NAME): each for key, each in theirs.load_file(file).items()}
    tensors |= changed
    beside = FOLDER / name / "config.json"
    if config is None and beside.is_file():
        config = beside.read_text()
    return written(path, {k: v for k, v in tensors.items() if v is not None}, config)


@pytest.mark.parametrize("name", READ)
def test_numbers_are_those_of_the_program_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = FOLDER / name / "model.safetensors", expected_of(name)
    # Programs that compute in float16 or in bfloat16.
    rough = {"bitsandbytes_int8": 1e-3, "compressed_tensors_nvfp4": 4e-3}
    tolerance = {"rtol": rough.get(name, 1e-6), "atol": 1e-7}
    table = from_file(path)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[-len(expected) :], expected, **tolerance)
    for tensor in (NAME + "weight", NAME[:-1]):
        assert torch.equal(from_file(path, tensor=tensor), table)
    assert torch.equal(open_vectors(path).table(), table)
    for dtype in (torch.bfloat16, torch.float64):
        with torch.device("meta"):  # where a model is made without memory
            converted = from_file(path, dtype=dtype)
        assert torch.equal(converted, table.to(dtype))
    monkeypatch.setattr(code_formats, "PART", 128)  # two rows at a time
    sizes, rows_of = [], code_formats.Codes._rows

    def recorded(self: code_formats.Codes, part: slice) -> Tensor:
        sizes.append(len(rows_of(self, part)))
        return rows_of(self, part)

    monkeypatch.setattr(code_formats.Codes, "_rows", recorded)
    assert torch.equal(from_file(path), table)
    assert max(sizes) == 2


@pytest.mark.parametrize("name", READ)
def test_codes_are_kept_where_the_kernel_has_them(name: str) -> None:
    path = FOLDER / name / "model.safetensors"
    if name.endswith(WIDENED):
        refused((lambda: pe.TokenEmbedding.from_file(path, keep="codes"), TypeError, "no table of such codes exists here"))  # fmt: skip
        return
    with torch.device("meta"):
        kept = pe.TokenEmbedding.from_file(path, keep="codes")
    torch.testing.assert_close(kept.table.dequantize(), from_file(path), rtol=1e-6, atol=2e-6)
    assert kept.table.codes.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn)


def refusal(name: str, tmp_path: Path) -> tuple[Path, str]:
    """A file that is refused, and the name of its codes."""
    if name == PACKED:
        return FOLDER / name / "model.safetensors", NAME + "weight._data._data"
    tensors = REFUSED[name]
    return written(tmp_path, tensors), NAME + next(iter(tensors))


@pytest.mark.parametrize("name", [*REFUSED, PACKED])
def test_other_formats_are_refused_by_name(name: str, tmp_path: Path) -> None:
    path, codes = refusal(name, tmp_path)
    shown = "quanto 2 or 4 bits" if name == PACKED else name
    for module in (pe.TokenEmbedding, pe.cpp.TokenEmbedding):
        for options in ({}, {"tensor": codes}, {"tensor": codes, "dtype": torch.float32}):
            with pytest.raises(TypeError, match=rf"{codes}.*of {shown}.*: dequantise it"):
                module.from_file(path, **options)
    for keep in ("codes", "file"):
        with pytest.raises(TypeError, match=rf"of {shown}.*: dequantise it"):
            pe.TokenEmbedding.from_file(path, keep=keep)


@pytest.mark.parametrize("name", READ)
def test_cpp_and_tables_in_files_name_the_format(name: str) -> None:
    """They read float8 and int8 with scales beside alone."""
    path = FOLDER / name / "model.safetensors"
    maker = "ModelOpt|MLX|bitsandbytes|compressed-tensors|quanto|torchao"
    for read in (pe.cpp.TokenEmbedding.from_file, pe.FileTable):
        with pytest.raises(TypeError, match=rf"of ({maker}).*: Python's VectorFile.table"):
            read(path)
    file = open_vectors(path, words=["a"])
    with pytest.raises(TypeError, match=rf"of ({maker})"):
        file.rows(["a"])


@pytest.mark.parametrize("name", [*WRITTEN, *REFUSED])
def test_what_codes_need_is_never_a_table(name: str, tmp_path: Path) -> None:
    path = refusal(name, tmp_path)[0] if name in REFUSED else FOLDER / name / "model.safetensors"
    file = open_vectors(path)
    codes = file._file.codes("")[2]
    parts = [each for each in file.names if each != codes and len(file.shape(each)) == 2]
    for part in parts:
        for module in (pe.TokenEmbedding, pe.cpp.TokenEmbedding):
            with pytest.raises(ValueError, match=rf"{part}' belongs to the codes of '{codes}'"):
                module.from_file(path, tensor=part)
        file.tensor(part)


@pytest.mark.parametrize("scales", ["weight_scale", "absmax", "SCB", "scale_of_blocks", "qzeros"])
def test_scales_of_an_unknown_program_are_no_table(scales: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"bits": ints(8, 8), scales: torch.ones(8, 4)})
    for module in (pe.TokenEmbedding, pe.cpp.TokenEmbedding):
        refused((lambda: module.from_file(path), ValueError, "no table of floating-point numbers; others are"))  # fmt: skip
        assert module.from_file(path, tensor=NAME + scales).weight.shape == (8, 4)


def test_every_format_of_the_table_is_tried(tmp_path: Path) -> None:
    seen = {*REFUSED}
    for name in WRITTEN:
        seen.add(open_vectors(FOLDER / name / "model.safetensors")._file.codes("")[0])
    # ModelOpt's is below; the others of C++ in test_odd_files.py and below.
    rest = {"ModelOpt NVFP4", *(each for each in code_formats.formats() if each.startswith("float8 or"))}
    assert seen | rest == set(code_formats.formats())


def test_the_page_lists_the_formats() -> None:
    page = (Path(__file__).parents[3] / "docs" / "families" / "token.md").read_text()
    for name, row in code_formats.formats().items():
        if row["source"] == "-":
            continue  # what is refused without a name
        ends = [f"`{each[0]}`" for each in row["needs"].values()]
        read = f"{row['bits']} bits" if "read" in row else "refused"
        kept = f"{row['kept']} bits" if "kept" in row else "-"
        line = f"| {name} | `{row['codes'] or '<table>'}`, {', '.join(ends)} | {read} | {kept} |"
        assert line in page.splitlines()


# ------------------------------------------------------------------------- forms without a file above


def test_nvfp4_of_modelopt(tmp_path: Path) -> None:
    """The scale for all multiplies, where that of compressed-tensors divides."""
    file = theirs.load_file(FOLDER / "compressed_tensors_nvfp4" / "model.safetensors")
    parts = {key.removeprefix(NAME): value for key, value in file.items()}
    path = written(tmp_path, {
        "weight": parts["weight_packed"], "weight_scale": parts["weight_scale"],
        "weight_scale_2": 1 / parts["weight_global_scale"], "input_scale": torch.ones(1)})  # fmt: skip
    expected = expected_of("compressed_tensors_nvfp4")
    torch.testing.assert_close(from_file(path), expected, rtol=4e-3, atol=1e-7)


def test_int8_with_zero_points(tmp_path: Path) -> None:
    codes, scales = ints(8, 16, dtype=torch.int8), torch.rand(8, 4)
    zeros = ints(8, 4, dtype=torch.int8)
    wide = [each.float().repeat_interleave(4, 1) for each in (zeros, scales)]
    expected = (codes.float() - wide[0]) * wide[1]
    for names in (("weight_scale", "weight_zero_point"), ("scales", "zeros"), ("scale", "zero_point")):
        path = written(tmp_path, {"weight": codes, names[0]: scales, names[1]: zeros})
        assert torch.equal(from_file(path), expected)
        kept = pe.TokenEmbedding.from_file(path, keep="codes").table.dequantize()
        torch.testing.assert_close(kept, expected, rtol=1e-6, atol=2e-5)
        refused((lambda: pe.cpp.TokenEmbedding.from_file(path), TypeError, "with zero points: Python's VectorFile.table"))  # fmt: skip


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_of_older_releases(bits: int, tmp_path: Path) -> None:
    """Before compressed-tensors 0.20, no code lay in two words; the number of words tells."""
    rows, columns, each = 4, 64, 32 // bits
    codes = torch.randint(0, 2**bits, (rows, columns))
    padded = torch.nn.functional.pad(codes, (0, -columns % each)).view(rows, -1, each)
    words = (padded << (torch.arange(each) * bits)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    scales = torch.rand(rows, 1)
    path = written(tmp_path, {"weight_packed": words, "weight_scale": scales,
                              "weight_shape": torch.tensor([rows, columns])},
                   {"quantization_config": {"config_groups": {"a": {"weights": {"num_bits": bits}}}}})  # fmt: skip
    assert torch.equal(from_file(path), (codes - 2 ** (bits - 1)).float() * scales)


def test_groups_by_the_index_of_a_column(tmp_path: Path) -> None:
    """weight_g_idx, which activation order writes; -1 says that it is not set."""
    name = "compressed_tensors_4_bits"
    plain = from_file(FOLDER / name / "model.safetensors")
    scales = theirs.load_file(FOLDER / name / "model.safetensors")[NAME + "weight_scale"]
    index = torch.randperm(64) % 4
    expected = plain / scales.repeat_interleave(16, 1) * scales[:, index]
    path = copied(name, tmp_path, weight_g_idx=index.int())
    torch.testing.assert_close(from_file(path), expected, rtol=1e-6, atol=1e-7)
    refused((lambda: pe.TokenEmbedding.from_file(path, keep="codes"), TypeError, "no table of such codes exists here"))  # fmt: skip
    path = copied(name, tmp_path, weight_g_idx=torch.full((64,), -1, dtype=torch.int32))
    assert torch.equal(from_file(path), plain)


def test_bits_that_the_shape_leaves_open_must_be_said(tmp_path: Path) -> None:
    """16 words hold 64 codes of 8 bits, or of 7 as older releases packed them."""
    path = copied("compressed_tensors_8_bits", tmp_path, config={})
    refused((lambda: from_file(path), pe.FileFormatError, "which a config.json states, got 16 words"))  # fmt: skip
    assert from_file(copied("compressed_tensors_4_bits", tmp_path, config={})).shape == (6, 64)


# ------------------------------------------------------------------------------------- FBGEMM's rows


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_table_batched_embeddings(bits: int) -> None:
    """Scale and bias in float16 before the codes, as fbgemm_gpu's inference tables have them."""
    rows, columns = 50, 32
    codes = torch.randint(0, 2**bits, (rows, columns))
    pair = torch.stack([torch.rand(rows) + 0.1, torch.randn(rows)], 1).half()
    data = codes.byte() if bits == 8 else (codes[:, ::2] | codes[:, 1::2] << 4).byte()
    packed = torch.cat([pair.view(torch.uint8), data], 1)
    expected = codes * pair[:, :1].float() + pair[:, 1:].float()
    table = pe.QuantizedTable.from_rowwise(packed, bits, layout="table-batched")
    torch.testing.assert_close(table.dequantize(), expected, rtol=1e-5, atol=1e-5)
    refused((lambda: pe.QuantizedTable.from_rowwise(packed, bits), ValueError, "packed: expected finite scales .* table-batched"))  # fmt: skip
    other = torch.cat([data, pair.float().view(torch.uint8) if bits == 8 else pair.view(torch.uint8)], 1)
    refused(
        (lambda: pe.QuantizedTable.from_rowwise(other, bits, layout="table-batched"), ValueError, "packed: expected finite scales"),
        (lambda: pe.QuantizedTable.from_rowwise(packed, bits, layout="x"), ValueError, "layout: expected 'rowwise' or 'table-batched', got 'x'"),
        (lambda: pe.QuantizedTable.from_rowwise(packed, 2), ValueError, "bits: expected 8 or 4, got 2, FBGEMM's INT2"),
    )  # fmt: skip


# -------------------------------------------------------------------------- files that are malformed

DEEP = '{"a":' * 100_000
MLX, AO, WORDS, NF4 = "mlx_4_bits", "torchao_int8", "compressed_tensors_4_bits", "bitsandbytes_nf4"


def state(text: str) -> dict[str, Tensor]:
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return {"weight.quant_state.bitsandbytes__nf4": data}


BROKEN: list[tuple[str, dict[str, Any], Any, str]] = [
    (MLX, {}, {"quantization": {"bits": 4, "group_size": 64}}, "expected groups of 64 columns, as"),
    (MLX, {}, {"quantization": {"bits": 0, "group_size": 32}}, "has the bits, got 0"),
    (MLX, {}, {"quantization": {"bits": True}}, "has the bits, got True"),
    (MLX, {}, {"quantization": {"bits": "4"}}, "has the bits, got '4'"),
    (MLX, {}, {"quantization": [4]}, "has the bits, got None"),
    (MLX, {}, {}, "has the bits, got None"),
    (MLX, {}, {"quantization": {"bits": 8, "group_size": 32}}, "expected groups of 32 columns, as"),
    (MLX, {}, {"quantization": {"bits": 4}}, "expected groups of 64 columns, as"),
    (MLX, {}, "[1]", "config.json: byte 0: the file: expected an object"),
    (MLX, {}, "{", "config.json: byte 0: the file: expected JSON"),
    (MLX, {}, DEEP, "config.json: byte 0: the file: expected JSON of fewer levels"),
    (MLX, {"scales": torch.ones(6, 0)}, None, "expected scales and biases for groups"),
    (MLX, {"scales": torch.ones(6)}, None, "expected scales and biases for groups"),
    (MLX, {"scales": torch.ones(6, 3)}, None, "expected scales and biases for groups"),
    (MLX, {"biases": torch.ones(5, 2)}, None, "expected scales and biases for groups"),
    (WORDS, {"weight_shape": torch.tensor([6, 0])}, None, "expected words for a table of"),
    (WORDS, {"weight_shape": torch.tensor([7, 64])}, None, "expected words for a table of"),
    (WORDS, {"weight_shape": torch.tensor([6])}, None, "expected words for a table of"),
    (WORDS, {"weight_shape": torch.tensor([6, 2**60])}, None, "expected words for a table of"),
    (WORDS, {"weight_scale": torch.ones(6, 3)}, None, "expected scales for all, for 6 rows"),
    (WORDS, {"weight_scale": torch.ones(0)}, None, "expected scales for all, for 6 rows"),
    (WORDS, {"weight_g_idx": ints(3)}, None, "expected the group of each of 64 columns"),
    (WORDS, {"weight_g_idx": ints(64) + 4}, None, "expected the group of each of 64 columns"),
    (WORDS, {"weight_zero_point": ints(1, 3)}, None, "expected 1 words of zero points"),
    (WORDS, {}, {"quantization_config": {"config_groups": {"a": {"weights": {"num_bits": 8}}}}}, "expected codes of the bits that its config.json states, got 8 words"),
    (WORDS, {}, {"quantization_config": {"config_groups": {"a": {"weights": {"num_bits": []}}}}}, "expected codes of the bits that its config.json states"),
    (WORDS, {}, {"quantization_config": {"config_groups": {"a": {"weights": {"num_bits": 0}}}}}, "expected codes of the bits that its config.json states"),
    ("compressed_tensors_nvfp4", {"weight_scale": torch.ones(6, 4)}, None, "expected scales in|for groups"),
    ("compressed_tensors_nvfp4", {"weight_scale": torch.ones(6, 3)}, None, "scales for groups of 16"),
    ("compressed_tensors_nvfp4", {"weight_global_scale": torch.ones(2)}, None, "one divisor for all"),
    ("compressed_tensors_mxfp4", {"weight_packed": ints(6, 0, dtype=torch.uint8)}, None, "scales for"),
    ("quanto_int8", {"weight._scale": torch.ones(5, 1)}, None, "expected scales for all, for 6 rows"),
    ("bitsandbytes_int8", {"SCB": torch.ones(5)}, None, "expected scales for all, for 6 rows"),
    (NF4, state("{"), None, "state: expected JSON"),
    (NF4, state(DEEP), None, "state: expected JSON of fewer levels"),
    (NF4, state("[]"), None, "state: expected an object"),
    (NF4, state('{"shape": [6, 64], "blocksize": 0}'), None, "expected a state with the shape"),
    (NF4, state('{"shape": [6, 0], "blocksize": 64}'), None, "expected 384 numbers, got a shape"),
    (NF4, state('{"shape": [-6, -64], "blocksize": 64}'), None, "expected 384 numbers, got a sh"),
    (NF4, state('{"shape": [6, 64], "blocksize": 32}'), None, "expected 12 scales, got 6"),
    (NF4, {"weight.quant_map": torch.ones(15)}, None, "and a map of 16 numbers"),
    ("bitsandbytes_nf4_nested", {"weight.nested_absmax": torch.ones(1)}, None, "nested block"),
    ("bitsandbytes_nf4_nested", {"weight.nested_quant_map": torch.ones(16)}, None, "nested block"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BROKEN)))
def test_malformed_files_say_what_is_wrong(case: int, tmp_path: Path) -> None:
    name, changed, config, message = BROKEN[case]
    path = copied(name, tmp_path, config, **changed)
    with pytest.raises(pe.FileFormatError, match=message) as raised:
        from_file(path)
    assert str(raised.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", pe.FileFormatError, "expected torchao's metadata"),
        ("{", pe.FileFormatError, "expected JSON"),
        ("[]", pe.FileFormatError, "expected an object"),
        ("{}", pe.FileFormatError, "with a block_size, got none"),
        ('{"_data": 3}', pe.FileFormatError, "with a block_size, got none"),
        (DEEP, pe.FileFormatError, "expected JSON of fewer levels"),
        ('{"_data": {"block_size": 0}}', TypeError, "with blocks of 0"),
        ('{"_data": {"block_size": [1, 32]}}', TypeError, r"with blocks of \[1, 32\]"),
    ],
)
def test_metadata_of_torchao(text: str, kind: type[Exception], message: str, tmp_path: Path) -> None:
    tensors = {"_weight_qdata": ints(6, 64, dtype=torch.int8), "_weight_scale": torch.ones(6, 1)}
    path = written(tmp_path, tensors, weight=text)
    with pytest.raises(kind, match=message) as raised:
        from_file(path)
    assert str(raised.value).startswith(str(tmp_path))
