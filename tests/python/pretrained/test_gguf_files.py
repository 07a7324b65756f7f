"""GGUF files: metadata, frequency tensors and token tables, written by the gguf package."""

import os
import struct
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.tables import code_formats
from posembed.tables import gguf as reader
from support.refusals import refused
from torch import Tensor

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

ROWS, DIM = 3, 64
TYPES = gguf.GGMLQuantizationType


def table() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))


def write(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A file; a tensor is an array, or bytes [rows, bytes of a row] with their type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def raw(kind: Any) -> tuple[Any, Any]:
    return gguf.quantize(table().numpy(), kind), kind


# Those that gguf turns into numbers, of which "C++" and torch know no more.
KINDS = [kind.name for kind in gguf.quants._type_traits] + ["F32", "F16", "F64"]
WIDE = 512


def rows_of_bytes(kind: str) -> Any:
    """Blocks of any bits, whose scales may be infinite or no number."""
    size = gguf.quants.quant_shape_to_byte_shape((ROWS, WIDE), TYPES[kind])
    return np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_token_tables(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows_of_bytes(kind)
    path = write(tmp_path / "model.gguf", "llama", {}, {"token_embd.weight": (data, TYPES[kind])})
    found = pe.TokenEmbedding.from_file(path).weight
    own = {"F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    assert found.dtype == own.get(kind, torch.float32)
    assert found.shape == (ROWS, WIDE)
    with np.errstate(all="ignore"):
        if kind in ("F32", "F16", "F64"):
            expected = torch.from_numpy(data.view(f"<f{data.shape[1] // WIDE}"))
        else:
            expected = torch.from_numpy(gguf.dequantize(data, TYPES[kind]))
    assert torch.equal(found.double().nan_to_num(7), expected.double().nan_to_num(7))
    monkeypatch.setattr(reader, "PART", WIDE)  # a row at a time
    sizes, widened = [], reader.GgufFile._widened
    monkeypatch.setattr(
        reader.GgufFile, "_widened", lambda self, tensor, rows: sizes.append(len(rows)) or widened(self, tensor, rows)
    )
    assert torch.equal(pe.TokenEmbedding.from_file(path).weight.nan_to_num(7), found.nan_to_num(7))
    assert sizes == [1] * ROWS


def test_tables_in_another_dtype(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", {}, {"token_embd.weight": raw(TYPES.Q8_0)})
    table = pe.TokenEmbedding.from_file(path).weight
    with torch.device("meta"):  # where a model is made without memory
        half = pe.TokenEmbedding.from_file(path, tensor="token_embd.weight", dtype=torch.float16).weight
    assert torch.equal(half, table.half())


def test_types_are_those_of_the_gguf_package() -> None:
    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert theirs == code_formats.gguf_types()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_codes_are_kept(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", {}, {"token_embd.weight": raw(TYPES[kind])})
    with torch.device("meta"):
        kept = pe.TokenEmbedding.from_file(path, keep="codes")
    assert kept.table.codes.dtype == (torch.int8 if kind == "Q8_0" else torch.uint8)
    expected = pe.TokenEmbedding.from_file(path).weight
    torch.testing.assert_close(kept.table.dequantize(), expected, rtol=1e-6, atol=1e-6)


def test_a_table_is_a_copy(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "llama", {}, {"token_embd.weight": raw(TYPES.F32)})
    token = pe.TokenEmbedding.from_file(path, freeze=False)
    before = path.read_bytes()
    with torch.no_grad():
        token.weight.zero_()
    assert path.read_bytes() == before


def test_a_rotation_with_its_frequency_tensor(tmp_path: Path) -> None:
    """The same as from metadata with the tensor as a key, by every reader that takes a path."""
    keys = {"embedding_length": 256, "attention.head_count": 2, "block_count": 2}
    keys |= {"context_length": 64, "rope.freq_base": 500000.0}
    divisors = np.linspace(1, 8, 64, dtype=np.float32)
    path = write(tmp_path / "m.gguf", "llama", keys, {"rope_freqs.weight": divisors})
    spec = pe.RotarySpec.from_gguf(path)
    series = 500000.0 ** -(torch.arange(64).double() / 64)
    assert torch.allclose(spec.frequencies(), series / torch.from_numpy(divisors), rtol=1e-14)
    assert spec == pe.RotarySpec.from_huggingface(str(path))
    assert pe.RotarySpec.for_layers(path) == [spec, spec]
    assert pe.RotaryEmbedding.from_config(path).spec == spec


def test_slopes(tmp_path: Path) -> None:
    keys = {"attention.head_count": 8, "attention.max_alibi_bias": 8.0}
    path = write(tmp_path / "mpt.gguf", "mpt", keys, {})
    assert torch.equal(pe.ALiBi.from_config(path).slopes, pe.ALiBi(8).slopes)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.full((ROWS, DIM), 1e6).numpy()
    tensors = {"token_embd.weight": raw(TYPES.Q4_0), "large": large, "norm": np.ones(4, "float32")}
    tensors["whole"] = np.ones((ROWS, DIM), np.int32)
    path = write(tmp_path / "model.gguf", "llama", {}, tensors)
    from_file = pe.TokenEmbedding.from_file
    refused(
        (lambda: from_file(path, tensor="whole"), TypeError, "whole: I32 is not read"),
        (lambda: from_file(path, tensor="large", keep="codes"), TypeError, "large: expected a table in Q8_0, .* got F32"),
        (lambda: from_file(path, tensor="large", dtype=torch.float16), pe.FileFormatError, "large has numbers too large for torch.float16"),
        (lambda: from_file(path, tensor="norm"), ValueError, "tensor: expected a table, got 'norm' of [4]"),
        (lambda: from_file(path, tensor="other"), ValueError, "tensor: expected one of ['large', 'norm', 'token_emb"),
        (lambda: from_file(path, vocabulary=["a"]), ValueError, "vocabulary: expected none for a GGUF file"),
        (lambda: pe.RotarySpec.from_gguf(__file__), ValueError, "path: expected a GGUF file, got"),
        (lambda: pe.RotarySpec.from_gguf("missing.gguf"), FileNotFoundError, "missing.gguf"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert from_file(path, tensor="large").weight.shape == (ROWS, DIM)  # has no codes
    refused((lambda: from_file(path), ImportError, "tables in Q4_0 .* python -m pip install gguf"))


# ------------------------------------------------------------------------------------- broken headers


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


MANY = struct.pack("<Q", 2**62)
BROKEN = {
    "cut in the magic": (b"GGUF\3", "it is cut off"),
    "version": (header(1), "expected version 2 or 3, got 1"),
    "big-endian": (header(3 << 24), "got a big-endian file"),
    "tensors": (header(tensors=2**40, rest=b" " * 48), f"{2**40} tensors in a header of which"),
    "keys": (header(keys=2**63, rest=b" " * 48), "keys in a header of which 48 bytes are left"),
    "length of a name": (header(keys=1, rest=MANY + b" " * 8), "bytes in a header"),
    "name that is no text": (header(keys=1, rest=struct.pack("<Q", 8) + b"\xff" * 16), "expected UTF-8"),
    "type of a value": (header(keys=1, rest=key("a.b", 13, b"1234")), "a type of values, got 13"),
    "name twice": (header(keys=2, rest=2 * key("a.b", 4, b"1234")), "'a.b' is given twice"),
    "numbers": (header(keys=1, rest=key("a.b", 9, struct.pack("<I", 4) + MANY)), "values in a header"),
    "texts": (header(keys=1, rest=key("a.b", 9, struct.pack("<I", 8) + MANY)), "values in a header"),
    "lists": (header(keys=1, rest=key("a.b", 9, 99 * struct.pack("<IQ", 9, 1))), "lists within lists"),
    "passed over": (header(keys=1, rest=key("tokenizer.a", 9, struct.pack("<I", 4) + MANY)), "values in"),
    "alignment": (header(keys=1, rest=key("general.alignment", 4, b"\0\0\0\0")), "general.alignment"),
    "alignment by text": (header(keys=1, rest=key("general.alignment", 8, text("x"))), "general.alignm"),
    "dimensions": (header(tensors=1, rest=tensor("t", 1, 1, 1, 1, 1)), "1 to 4 dimensions, got 5"),
    "no dimension": (header(tensors=1, rest=tensor("t") + b" " * 8), "1 to 4 dimensions, got 0"),
    "size of zero": (header(tensors=1, rest=tensor("t", 0, 2**60)), "expected blocks of 1 numbers"),
    "parts of a block": (header(tensors=1, rest=tensor("t", 33, 1, kind=8)), "blocks of 32 numbers"),
    "data outside": (header(tensors=1, rest=tensor("t", 2**62, 4)), "are not in the file"),
    "offset outside": (header(tensors=1, rest=tensor("t", 1, offset=2**64 - 1)), "are not in the file"),
    "tensor twice": (header(tensors=2, rest=2 * tensor("t", 1)) + b" " * 64, "of different names"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers(case: str, tmp_path: Path) -> None:
    """In time and memory that their bytes justify."""
    data, message = BROKEN[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    begin = time.process_time()
    for read in (pe.RotarySpec.from_gguf, pe.TokenEmbedding.from_file):
        with pytest.raises(pe.FileFormatError, match=message) as raised:
            read(path)
        assert str(raised.value).startswith(f"{path}: byte ")
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 8 << 20
    assert time.process_time() - begin < 1


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", {"block_count": 2}, {"token_embd.weight": raw(TYPES.Q8_0)})
    whole = path.read_bytes()
    for length in range(4, len(whole) - 32, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(pe.FileFormatError):
            pe.TokenEmbedding.from_file(path)


def test_a_file_that_is_shortened_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", {}, {"token_embd.weight": raw(TYPES.Q8_0)})
    file = reader.GgufFile(path)
    size = path.stat().st_size
    os.truncate(path, size - 100)
    for read in (file.table, file.codes):
        with pytest.raises(pe.FileFormatError, match=rf"byte {size - 100 - size % 32}|the file was short"):
            read()


def test_a_header_has_a_limit(tmp_path: Path) -> None:
    """Texts that the file has room for, of which none takes space on the disk."""
    path = tmp_path / "m.gguf"
    rest = key("tokenizer.a", 9, struct.pack("<IQ", 8, 24_000_000))
    path.write_bytes(header(keys=1, rest=rest))
    os.truncate(path, 200_000_000)
    begin = time.process_time()
    refused((lambda: pe.RotarySpec.from_gguf(path), pe.FileFormatError, "values in a header of which .* bytes"))  # fmt: skip
    assert time.process_time() - begin < 1
