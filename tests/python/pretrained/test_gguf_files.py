"""GGUF files: metadata, frequency tensors and token tables, written by the gguf package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
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


def q8_0(data: Any) -> Tensor:
    """Blocks of 32: a float16 scale and 32 int8 codes (ggml-common.h of ggml-org/ggml)."""
    blocks = torch.from_numpy(data.copy()).reshape(ROWS, DIM // 32, 34)
    scales = blocks[..., :2].contiguous().view(torch.float16).double()
    return (scales * blocks[..., 2:].contiguous().view(torch.int8)).flatten(1)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_token_tables(kind: str, tmp_path: Path) -> None:
    data = raw(TYPES[kind])
    path = write(tmp_path / "model.gguf", "llama", {}, {"token_embd.weight": data})
    found = pe.TokenEmbedding.from_file(path).weight
    own = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert found.dtype == own
    expected = q8_0(data[0]) if kind == "Q8_0" else table().to(own)
    assert torch.equal(found.double(), expected.double())
    half = pe.TokenEmbedding.from_file(path, tensor="token_embd.weight", dtype=torch.float16).weight
    assert torch.equal(half, expected.to(own).half())


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
    path = write(tmp_path / "model.gguf", "llama", {}, tensors)
    from_file = pe.TokenEmbedding.from_file
    refused(
        (lambda: from_file(path), TypeError, "token_embd.weight: expected F32.*, got Q4_0, which"),
        (lambda: from_file(path, tensor="large", dtype=torch.float16), pe.FileFormatError, "large has numbers too large for torch.float16"),
        (lambda: from_file(path, tensor="norm"), ValueError, "tensor: expected a table, got 'norm' of [4]"),
        (lambda: from_file(path, tensor="other"), ValueError, "tensor: expected one of ['large', 'norm', 'token_emb"),
        (lambda: from_file(path, vocabulary=["a"]), ValueError, "vocabulary: expected none for a GGUF file"),
    )  # fmt: skip
    whole = path.read_bytes()
    for length in (6, 40, len(whole) - 24):
        path.write_bytes(whole[:length])
        refused((lambda: from_file(path, tensor="large"), pe.FileFormatError, "expected a GGUF file"))  # fmt: skip
    path.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(
        (lambda: pe.RotarySpec.from_gguf(path), ImportError, "python -m pip install gguf"),
        (lambda: pe.RotarySpec.from_gguf(__file__), ValueError, "path: expected a GGUF file, got"),
    )
