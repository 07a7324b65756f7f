"""Files as they are found: words that end in numbers, odd rows, missing shards, other formats."""

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import posembed as pe
import pytest
import torch
from posembed.pretrained import open_vectors
from safetensors.torch import save_file
from support import vector_files
from support.refusals import refused
from support.vector_files import entry, safetensors

# ---------------------------------------------------------------------------------------- separators


@pytest.mark.parametrize("header", ["", "3 2\n"])
@pytest.mark.parametrize("between", [" ", "\t"])
def test_a_tab_ends_a_word_that_ends_in_a_number(header: str, between: str, tmp_path: Path) -> None:
    """As wikipedia2vec writes them."""
    path = tmp_path / "vectors.txt"
    rows = {"ENTITY/Apollo 11": (0.5, 1.0), "7": (2.0, 3.0), "new york": (4.0, 5.0)}
    lines = [f"{word}\t{a}{between}{b}\n" for word, (a, b) in rows.items()]
    path.write_text(header + "".join(lines))
    file = open_vectors(path)
    assert file.words() == list(rows)
    assert file.table().tolist() == [list(row) for row in rows.values()]


def test_a_row_without_the_files_separator(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("a\t1 2\nb 1 2\n")
    refused((open_vectors(path).table, pe.FileFormatError, "byte 6: expected a TAB after the word"))
    path.write_text("a\t1 2\nb\t1 2 3\n")
    refused((open_vectors(path).table, pe.FileFormatError, "expected a row of 2 numbers, got 3"))


# ------------------------------------------------------------------------------------------ odd rows

GOOD = {"the": [1.0, 2.0], "cat": [3.0, 4.0], "sat": [5.0, 6.0]}
ODD = {
    "narrow": (b"x 1\n", "expected a row of 2 numbers, got 1"),
    "wide": (b"x 1 2 3\n", "expected a row of 2 numbers, got 3"),
    "no number": (b"x 1 b\n", "expected a finite number, got 'b'"),
    "nan": (b"x 1 nan\n", "expected a finite number, got 'nan'"),
    "infinite": (b"x -inf 1\n", "expected a finite number, got '-inf'"),
    "blank": (b"\n", "a line without a word"),
    "no word": (b" 1 2\n", "a row without a word"),
    "not UTF-8": (b"x\xff 1 2\n", "a word that is not UTF-8"),
}


def with_odd_row(path: Path, odd: bytes, header: bytes = b"") -> Path:
    rows = [f"{word} {a} {b}\n".encode() for word, (a, b) in GOOD.items()]
    path.write_bytes(header + rows[0] + odd + b"".join(rows[1:]))
    return path


@pytest.mark.parametrize("header", [b"", b"4 2\n"])
@pytest.mark.parametrize("case", ODD)
def test_one_odd_row_does_not_lose_the_file(case: str, header: bytes, tmp_path: Path) -> None:
    odd, reason = ODD[case]
    path = with_odd_row(tmp_path / "vectors.txt", odd, header)
    with pytest.raises(pe.FileFormatError) as raised:
        open_vectors(path).table()
    assert raised.value.reason == f"{reason} (on_bad_row 'skip' leaves such rows out)"
    file = open_vectors(path, on_bad_row="skip")
    assert file.skipped().count == 1
    (skipped,) = file.skipped().rows
    assert (skipped.row, skipped.reason) == (2, reason)
    assert skipped.offset == raised.value.offset
    assert file.shape() == (3, 2)
    assert file.words() == list(GOOD)
    assert file.table().tolist() == list(GOOD.values())
    vectors, coverage = file.rows(["sat", "x"], missing="zero")
    assert vectors.tolist() == [GOOD["sat"], [0.0, 0.0]]
    assert coverage == file.coverage(["sat", "x"])
    assert coverage.missing == ["x"]


def binary(rows: list[tuple[bytes, list[float]]]) -> bytes:
    body = b"".join(word + b" " + np.float32(numbers).tobytes() for word, numbers in rows)
    return f"{len(rows)} 2\n".encode() + body


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_have_one_rule(number: float, tmp_path: Path) -> None:
    path = tmp_path / "vectors.bin"
    path.write_bytes(binary([(b"the", [1, 2]), (b"x", [3, number]), (b"cat", [5, 6])]))
    message = f"byte 22: expected a finite number, got '{number}' .on_bad_row 'skip'"
    refused((lambda: open_vectors(path).table(), pe.FileFormatError, message))
    file = open_vectors(path, on_bad_row="skip")
    assert file.format == "word2vec-binary"
    assert file.words() == ["the", "cat"]
    assert file.table().tolist() == [[1, 2], [5, 6]]
    assert file.skipped().rows[0].word == "x"


def test_a_binary_file_that_is_cut_off_is_not_an_odd_row(tmp_path: Path) -> None:
    path = tmp_path / "vectors.bin"
    path.write_bytes(binary([(b"the", [1, 2]), (b"x", [3, 4])])[:-1])
    file = open_vectors(path, on_bad_row="skip")
    with pytest.raises(pe.FileFormatError, match=r"ends inside row 2 of 2$"):
        file.table()


def test_many_odd_rows_are_counted_and_some_named(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("the 1 2\n" + "odd 1\n" * 250 + "cat 3 4\n")
    file = open_vectors(path, on_bad_row="skip")
    skipped = file.skipped()
    assert (skipped.count, len(skipped.rows), skipped.rows[99].row) == (250, 100, 101)
    assert file.words() == ["the", "cat"]


def test_token_embedding_tells_what_it_skipped(tmp_path: Path) -> None:
    path = with_odd_row(tmp_path / "vectors.txt", b"x 1\n")
    with pytest.warns(UserWarning, match=r"skipped 1 rows .*: row 2 'x': expected a row of 2 num"):
        token = pe.TokenEmbedding.from_file(path, on_bad_row="skip")
    assert token.weight.tolist() == list(GOOD.values())
    theirs = pe.cpp.TokenEmbedding.from_file(path, on_bad_row="skip")
    assert torch.equal(theirs.weight, token.weight)


def test_on_bad_row_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    path = with_odd_row(tmp_path / "vectors.txt", b"")
    refused((lambda: open_vectors(path, on_bad_row="ignore"), ValueError, "on_bad_row: expected 'raise' or 'skip', got 'ignore'"))  # fmt: skip
    tensors = write(tmp_path / "m.safetensors", "t", "F32", [1, 1], bytes(4))
    refused((lambda: open_vectors(tensors, on_bad_row="skip"), ValueError, "on_bad_row: expected 'raise' for safetensors"))  # fmt: skip


# ------------------------------------------------------------------------------------------- tensors


def write(path: Path, name: str, dtype: str, shape: list[int], data: bytes) -> Path:
    path.write_bytes(safetensors({name: entry(shape, 0, len(data), dtype)}, data))
    return path


def test_one_tensor_needs_one_shard(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    write(tmp_path / "a.safetensors", "wte", "F32", [1, 2], np.float32([1, 2]).tobytes())
    places = {"wte": "a.safetensors", "wpe": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    token = pe.TokenEmbedding.from_file(index, tensor="wte")
    assert token.weight.tolist() == [[1.0, 2.0]]
    assert torch.equal(pe.cpp.TokenEmbedding.from_file(index, tensor="wte").weight, token.weight)
    assert open_vectors(index).names == ["wpe", "wte"]
    refused((lambda: open_vectors(index).tensor("wpe"), pe.FileFormatError, "'wpe': shard 'b.safetensors': No such file"))  # fmt: skip
    with pytest.raises(pe.FileFormatError, match=r"'wpe': shard 'b.safetensors': No such file"):
        open_vectors(index).table()  # which one is the only table, none but all shards can tell


@pytest.mark.parametrize(("name", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_eight_bits_are_converted_or_refused(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    table = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
    data = table.to(dtype).view(torch.uint8).numpy().tobytes()
    path = write(tmp_path / "m.safetensors", "t", name, [2, 2], data)
    for kind in (pe.TokenEmbedding, pe.cpp.TokenEmbedding):
        refused((lambda: kind.from_file(path), TypeError, "expected float32, float64, bfloat16 or float16, got"))  # fmt: skip
        token = kind.from_file(path, dtype=torch.bfloat16)
        assert token(torch.tensor([1])).tolist() == [[0.5, 4.0]]
    refused((lambda: pe.TokenEmbedding.from_pretrained(table.to(dtype)), TypeError, "embeddings: expected float32, .* got torch.float8"))  # fmt: skip


def test_four_bits_as_far_as_torch_has_them(tmp_path: Path) -> None:
    data = bytes(range(4))
    path = write(tmp_path / "m.safetensors", "t", "F4", [2, 4], data)
    file = open_vectors(path, words=["a", "b"])
    assert file.dtype("t") == torch.float4_e2m1fn_x2
    assert file.shape("t") == (2, 2)  # two numbers in each
    for tensor in (file.tensor("t"), file.table("t")):
        assert tensor.dtype == torch.float4_e2m1fn_x2
        assert tensor.view(torch.uint8).tolist() == [[0, 1], [2, 3]]
    rows = file.rows(["b"], missing="error").vectors
    assert rows.view(torch.uint8).tolist() == [[2, 3]]
    refused(
        (lambda: file.table("t", torch.float32), TypeError, "dtype: tensor 't': torch does not convert F4 to Float"),
        (lambda: pe.TokenEmbedding.from_file(path), TypeError, "embeddings: expected float32"),
    )  # fmt: skip
    odd = write(tmp_path / "odd.safetensors", "t", "F4", [2, 1], bytes(1))
    refused((lambda: open_vectors(odd).shape("t"), TypeError, "tensor 't': torch has F4 in pairs only"))  # fmt: skip


# ------------------------------------------------------------------------------------- other formats

FOREIGN = {
    "xz": (b"\xfd7zXZ\x00\x00\x04", "an xz archive: unpack it first"),
    "bzip2": (b"BZh91AY&SY", "a bzip2 archive"),
    "Zstandard": (b"\x28\xb5\x2f\xfd\x04\x00", "a Zstandard archive"),
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", "a gzip archive"),
    "zip": (b"PK\x03\x04\x14\x00\x00\x00\x08\x00", "a zip archive"),
    "page": (b"\n <!DOCTYPE html>\n<html><body>404</body>", "a web page and not the file"),
    "page without type": (b"<HTML><head>", "a web page and not the file"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
}


@pytest.mark.parametrize("name", ["v.txt", "m.safetensors", "m.safetensors.index.json"])
@pytest.mark.parametrize("case", FOREIGN)
def test_says_what_a_file_is(case: str, name: str, tmp_path: Path) -> None:
    content, message = FOREIGN[case]
    path = tmp_path / name
    path.write_bytes(content)
    refused((lambda: open_vectors(path), pe.FileFormatError, f"byte 0: {message}"))


@pytest.mark.parametrize("kind", ["word2vec-binary", "word2vec-text", "fasttext", "glove"])
def test_a_gzip_archive_is_unpacked(kind: str, tmp_path: Path, monkeypatch) -> None:
    """As fastText's vectors are downloaded; nothing of it is left behind."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = vector_files.write_all(tmp_path, vector_files.WORDS, vector_files.table())[kind]
    packed = tmp_path / f"{path.name}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for given in (packed, str(packed), bytes(packed)):
        file, plain = open_vectors(given), open_vectors(path)
        assert not list(folder.iterdir())
        assert (file.format, file.words()) == (plain.format, plain.words())
        assert torch.equal(file.table(), plain.table())
    words = vector_files.WORDS[::-2]
    token = pe.TokenEmbedding.from_file(packed, vocabulary=words, missing="error")
    assert torch.equal(token.weight, open_vectors(path).rows(words).vectors)


def test_a_gzip_archive_that_is_malformed(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt.gz"
    whole = gzip.compress(b"a 1 2\n" * 1000)
    for content in (whole[:-9], whole[:40] + b"\xff\xff\xff" + whole[43:], whole[:-8] + bytes(8)):
        path.write_bytes(content)
        refused((lambda: open_vectors(path), pe.FileFormatError, r"vectors.txt.gz: byte 0: a gzip archive that is malformed"))  # fmt: skip
    path.write_bytes(gzip.compress(b"a 1 2\nb 1\n"))
    refused((lambda: open_vectors(path).table(), pe.FileFormatError, "vectors.txt: byte 6: expected a row of 2 numbers"))  # fmt: skip


# ------------------------------------------------------------------------- numbers beyond the dtype's range

LARGEST = {"float16": 65504.0, "bfloat16": float(torch.finfo(torch.bfloat16).max)}
# The smallest numbers that round to infinity: halfway from the largest to the next power of two.
ROUNDS_UP = {"float16": 65520.0, "bfloat16": 3.39617752923046e38, "float32": 3.4028236e38}


def table_of(path: Path, kind: str, number: float) -> Path:
    """Rows [1, 2] and [3, number] of the words a and b."""
    if kind == "text":
        path.write_text(f"a 1 2\nb 3 {number!r}\n")
    elif kind == "binary":
        path.write_bytes(binary([(b"a", [1, 2]), (b"b", [3, number])]))
    else:
        dtype = np.dtype({"F32": "<f4", "F64": "<f8"}[kind])
        write(path, "t", kind, [2, 2], np.array([1, 2, 3, number], dtype).tobytes())
    return path


def reads_of(path: Path) -> list[Callable[[torch.dtype], torch.Tensor]]:
    file = open_vectors(path, words=["a", "b"] if path.read_bytes()[8:9] == b"{" else None)
    return [
        lambda dtype: file.table(dtype=dtype),
        lambda dtype: file.tensor(file.names[0], dtype),
        lambda dtype: file.rows(["b", "none", "a"], dtype=dtype, missing="zero").vectors,
        lambda dtype: pe.TokenEmbedding.from_file(path, dtype=dtype).weight,
    ]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ROUNDS_UP)
@pytest.mark.parametrize("kind", ["text", "binary", "F32", "F64"])
def test_a_finite_number_stays_finite_or_is_refused(kind: str, dtype: str, sign: int, tmp_path: Path) -> None:
    number = sign * ROUNDS_UP[dtype]
    if dtype == "float32" and kind in ("binary", "F32"):
        pytest.skip("the file's own dtype")
    path = table_of(tmp_path / "file", kind, number)
    where = "row 2, column 2" if kind in ("text", "binary") else r"tensor 't' at \[1, 1\]"
    message = rf"{where}: expected a number that is finite in {dtype}, got {str(number)[:5]}"
    for read in reads_of(path):
        refused((lambda: read(getattr(torch, dtype)), pe.FileFormatError, message))
    if dtype in LARGEST:  # the largest finite number is read
        path = table_of(tmp_path / "file", kind, sign * LARGEST[dtype])
        for read in reads_of(path):
            assert LARGEST[dtype] in read(getattr(torch, dtype)).double().abs()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_infinity_and_nan_of_a_tensor_stay(dtype: torch.dtype, tmp_path: Path) -> None:
    numbers = np.array([np.inf, -np.inf, np.nan, 1.0])
    for kind, own in (("F32", "<f4"), ("F64", "<f8")):
        path = write(tmp_path / "m.safetensors", "t", kind, [2, 2], numbers.astype(own).tobytes())
        found = open_vectors(path).table("t", dtype).double().numpy()
        assert np.array_equal(found.reshape(-1), numbers, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "own", "number"), [("U16", "<u2", 65535), ("U64", "<u8", 2**63), ("C64", "<c8", 1e30)]
)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_every_dtype_of_a_file_has_the_rule(kind: str, own: str, number: float, tmp_path: Path) -> None:
    def file_with(given: float) -> pe.pretrained.VectorFile:
        data = np.array([3, given], own).tobytes()
        return open_vectors(write(tmp_path / "m.safetensors", "t", kind, [2, 1], data))

    assert file_with(7).tensor("t", torch.float16).tolist() == [[3], [7]]
    refused((lambda: file_with(number).tensor("t", torch.float16), pe.FileFormatError, "at [1, 0]: .* in float16, got"))  # fmt: skip


def test_integers_and_rows_far_into_a_tensor_have_the_rule_too(tmp_path: Path) -> None:
    """The place is that in the tensor, whichever part it was read in and whichever row was asked."""
    path = tmp_path / "m.safetensors"
    numbers = np.zeros((3000, 1000), "<i4")
    numbers[2500, 7] = 70000
    write(path, "t", "I32", [3000, 1000], numbers.tobytes())
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        assert open_vectors(path).table("t", dtype)[2500, 7] != 0
    refused((lambda: open_vectors(path).table("t", torch.float16), pe.FileFormatError, "at [2500, 7]: .* in float16, got 70000"))  # fmt: skip
    file = open_vectors(path, words=[f"w{i}" for i in range(3000)])
    refused((lambda: file.rows(["w1", "w2500"], tensor="t", dtype=torch.float16), pe.FileFormatError, "at [2500, 7]"))  # fmt: skip
    assert not file.rows(["w1", "none"], tensor="t", dtype=torch.float16).vectors.any()


def test_skipping_rows_does_not_skip_what_a_dtype_cannot_hold(tmp_path: Path) -> None:
    """Which rows are bad does not depend on the dtype: 65520 is a number, 1e39 is none of float32."""
    path = tmp_path / "v.txt"
    path.write_text("a 1 2\nb 3 65520\nc 4 1e39\n")
    file = open_vectors(path, on_bad_row="skip")
    assert file.table().tolist() == [[1, 2], [3, 65520]]
    assert [each.row for each in file.skipped().rows] == [3]
    with pytest.raises(pe.FileFormatError, match=r"row 2, column 2: .* in float16, got 65520$"):
        file.table(dtype=torch.float16)


# ------------------------------------------------------------------------------------------ ends of lines

CR = {
    "one column": b"the 0.5\rcat 1\r",
    "header": b"2 2\rthe 0.5 0.25\rcat 1 2\r",
    "tabs": b"the\t0.5\t0.25\rcat\t1\t2\r",
    "without the last": b"the 0.5 0.25\rcat 1 2",
    "long": b"".join(b"word%d 1 2\r" % i for i in range(500_000)),
    "one line ends in LF": b"the 0.5 0.25\rcat 1 2\ndog 3 4\n",
}


@pytest.mark.parametrize("case", CR)
def test_lines_that_end_in_cr_alone_are_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_bytes(CR[case])
    refused((lambda: open_vectors(path), pe.FileFormatError, "expected lines that end in LF or CR LF, got CR"))  # fmt: skip


def test_a_line_that_ends_in_cr_alone_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_bytes(b"the 0.5 0.25\r\ncat 1 2\rdog 3 4\r\na b 5 6\r\n\r 7 8\r\n")
    refused((open_vectors(path).table, pe.FileFormatError, "byte 21: expected lines that end in LF or CR LF"))  # fmt: skip
    assert open_vectors(path, on_bad_row="skip").words() == ["the", "a b", "\r"]


def numbers(*shape: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(shape) * 0.1


SCALES = {
    "one for all": lambda rows, columns: torch.tensor(0.25),
    "one for each row": lambda rows, columns: torch.rand(rows),
    "a column of rows": lambda rows, columns: torch.rand(rows, 1),
    "groups of columns": lambda rows, columns: torch.rand(rows, columns // 4),
    "blocks": lambda rows, columns: torch.rand(-(-rows // 128), -(-columns // 128)),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("end", ["_scale", "_scale_inv"])
def test_codes_are_multiplied_by_the_scales_beside_them(
    kind: str, dtype: torch.dtype, end: str, tmp_path: Path
) -> None:
    rows, columns = 300, 132
    scale = SCALES[kind](rows, columns)
    codes = numbers(rows, columns).mul(300).round().to(dtype)
    path = tmp_path / "m.safetensors"
    save_file({"e.weight": codes, f"e.weight{end}": scale, "other": torch.ones(2)}, path)
    if kind == "blocks":
        full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    elif kind == "groups of columns":
        full = scale.repeat_interleave(4, 1)
    else:
        full = scale.reshape(-1, 1) if scale.dim() else scale
    expected = codes.float() * full
    file = open_vectors(path, words=[f"w{i}" for i in range(rows)])
    assert torch.equal(file.table("e.weight"), expected)
    picked = file.rows(["w299", "w130", "w0"], tensor="e.weight", dtype=torch.float64).vectors
    assert torch.equal(picked, expected[[299, 130, 0]].double())
    for module in (pe.TokenEmbedding, pe.cpp.TokenEmbedding):
        table = module.from_file(path, tensor="e.weight", dtype=torch.bfloat16).weight
        assert torch.equal(table, expected.bfloat16())
    assert file.tensor("e.weight").dtype == dtype  # codes, for those who ask for them


def test_packed_numbers_with_scales_are_refused(tmp_path: Path) -> None:
    """F4 in pairs, with a scale for each group of 16, as NVFP4 and MXFP4 files have them."""
    codes = torch.zeros(4, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scales = torch.ones(4, 2).to(torch.float8_e4m3fn)
    save_file({"e.weight": codes, "e.weight_scale": scales}, tmp_path / "m.safetensors")
    message = r"'e.weight' has codes \(F4\) of packed codes with scales beside: dequantise it with"
    for options in ({}, {"dtype": torch.bfloat16}):
        refused((lambda: pe.TokenEmbedding.from_file(tmp_path / "m.safetensors", tensor="e.weight", **options), TypeError, message))  # fmt: skip


# --------------------------------------------------------------------------------------- model2vec

ROWS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MAPPING, WEIGHTS = torch.tensor([0, 1, 2, 1, 0]), torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0])


@pytest.mark.parametrize("table", ["embeddings", "embedding.weight"])
@pytest.mark.parametrize("beside", [{"mapping"}, {"weights"}, {"mapping", "weights"}])
def test_rows_of_model2vec_by_token_id(table: str, beside: set[str], tmp_path: Path) -> None:
    """As StaticModel._encode_helper of model2vec 0.10: embedding[mapping[id]] * weights[id]."""
    mapping = MAPPING if "mapping" in beside else torch.arange(3)
    weights = WEIGHTS.double()[: len(mapping)]
    tensors = {table: ROWS, "mapping": mapping, "weights": weights}
    path = tmp_path / "model.safetensors"
    save_file({name: tensors[name] for name in (table, *sorted(beside))}, path)
    expected = ROWS.double()[mapping] * (weights[:, None] if "weights" in beside else 1)
    token = pe.TokenEmbedding.from_file(path)
    assert torch.equal(token.weight, expected.float())
    half = pe.TokenEmbedding.from_file(path, tensor=table, dtype=torch.bfloat16)
    assert torch.equal(half.weight, expected.float().bfloat16())
    if "weights" in beside:
        refused((lambda: pe.TokenEmbedding.from_file(path, tensor=table, words=list("abc"), vocabulary=["b"]), ValueError, "words: expected none for a file with weights by"))  # fmt: skip
    else:
        words = dict(zip("abcde", mapping.tolist(), strict=False))
        found = pe.TokenEmbedding.from_file(path, tensor=table, words=words, vocabulary=["b"])
        assert torch.equal(found.weight, ROWS[1:2])


def test_a_mapping_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"embeddings": ROWS, "mapping": torch.tensor([0, 3])}, path)
    refused((lambda: pe.TokenEmbedding.from_file(path), ValueError, "mapping: expected rows of 'embeddings', which has 3"))  # fmt: skip
    save_file({"embeddings": ROWS, "mapping": MAPPING, "weights": WEIGHTS[:3]}, path)
    refused((lambda: pe.TokenEmbedding.from_file(path), ValueError, "weights: expected 5, one for each token, got 3"))  # fmt: skip
    save_file({"embeddings": 70000 * ROWS, "mapping": MAPPING}, path)
    refused((lambda: pe.TokenEmbedding.from_file(path, dtype=torch.float16), pe.FileFormatError, "embeddings: expected a number that is finite in"))  # fmt: skip


CODES = torch.ones(4, 2, dtype=torch.int8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"e.weight": CODES, "e.weight_scale": torch.ones(3)}, r"expected scales for all, .* 'e.weight_scale' has the shape \[3\]"),
        ({"e.weight": CODES, "e.weight_scale": torch.ones(4) > 0}, r"'e.weight_scale': expected scales in a floating dtype, got BOOL"),
    ],
)  # fmt: skip
def test_codes_are_never_taken_as_numbers(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(tensors, path)
    for module in (pe.TokenEmbedding, pe.cpp.TokenEmbedding):
        for dtype in (None, torch.float32):
            refused((lambda: module.from_file(path, tensor="e.weight", dtype=dtype), TypeError, message))  # fmt: skip


def test_rows_of_missing_words_have_no_scale(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    codes = torch.ones(2, 3, dtype=torch.int8)
    save_file({"e": codes, "e_scale": torch.tensor([[float("inf")], [2.0]])}, path)
    file = open_vectors(path, words=["a", "b"])
    assert file.rows(["x", "b"], missing="zero").vectors.tolist() == [[0.0] * 3, [2.0] * 3]
    assert file.table().shape == (2, 3)  # the only table: scales are none


def test_blocks_come_first_where_a_row_could_be_groups(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    codes = torch.ones(1, 300).to(torch.float8_e4m3fn)
    save_file({"e": codes, "e_scale_inv": torch.tensor([[1.0, 2.0, 3.0]])}, path)
    row = open_vectors(path).table("e")[0]
    assert [row[i].item() for i in (127, 128, 255, 256)] == [1.0, 2.0, 2.0, 3.0]


def test_a_large_shape_without_numbers_takes_no_memory(tmp_path: Path) -> None:
    header = {"e": entry([2**40, 0], 0, 0, "F8_E4M3"), "e_scale": entry([1], 0, 4)}
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors(header, bytes(4)))
    assert open_vectors(path).table("e").shape == (2**40, 0)


def test_words_may_share_rows(tmp_path: Path) -> None:
    """As in model2vec's files, whose "mapping" gives each token a row."""
    rows, mapping = torch.arange(6.0).reshape(3, 2), [0, 1, 2, 1, 0]
    path = tmp_path / "m.safetensors"
    save_file({"embeddings": rows, "mapping": torch.tensor(mapping)}, path)
    words = dict(zip("abcde", mapping, strict=True))
    file = open_vectors(path, words=words)
    found = file.rows([*"dxe", "a"], tensor="embeddings", missing="zero")
    assert found.vectors.tolist() == [[2.0, 3.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    assert found.coverage == file.coverage([*"dxea"])
    assert (found.coverage.found, found.coverage.missing) == (3, ["x"])
    order = list("edcba")
    token = pe.TokenEmbedding.from_file(path, tensor="embeddings", words=words, vocabulary=order)
    assert torch.equal(token.weight, rows[[words[word] for word in order]])
    refused(
        (lambda: file.rows(["d", "d"], tensor="embeddings"), ValueError, "vocabulary: expected each word once, got 'd' twice"),
        (lambda: pe.TokenEmbedding.from_file(path, tensor="embeddings", words=list("abcde")), ValueError, "words: expected at most the 3 rows of .*, got 5"),
    )  # fmt: skip
