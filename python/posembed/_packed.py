"""Tables of codes as MLX and torchao store them in safetensors.

MLX packs codes into uint32 from the lower to the upper bits; config.json says how many bits a code
has. A number is code * scale + bias: https://ml-explore.github.io/mlx, mlx.core.quantize. torchao
stores the tensors of a quantised weight, (code - zero_point) * scale, and its block_size in the
metadata: https://docs.pytorch.org/ao, torchao.prototype.safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posembed import pretrained

MLX = ("weight", "scales", "biases")
TORCHAO = ("_weight_qdata", "_weight_scale")

Parts = tuple[Tensor, Tensor, Tensor | None]


def table(path: str | os.PathLike[str], names: Sequence[str]) -> Parts | None:
    """Codes, scales and biases as a table of codes takes them; None for other tables.

    Raises:
        ValueError: config.json does not say how MLX quantised the table, or torchao's metadata does
            not say so.
        TypeError: torchao packed the codes.
    """
    file = pretrained.open_vectors(path)
    if file.format != "safetensors":
        return None
    stem = _stem(file, names, MLX)
    if stem is not None and file.dtype(f"{stem}.weight") == torch.uint32:
        return _of_mlx(file, stem)
    stem = _stem(file, names, TORCHAO)
    return None if stem is None else _of_torchao(file, stem)


def _stem(file: pretrained.VectorFile, names: Sequence[str], parts: Sequence[str]) -> str | None:
    """The module of the only table with these parts, or of the one that is named."""
    known = set(file.names)
    candidates = names or [name for name in file.names if name.endswith(f".{parts[0]}")]
    stems = [name.removesuffix(f".{parts[0]}").removesuffix(".weight") for name in candidates]
    found = [stem for stem in stems if {f"{stem}.{part}" for part in parts} <= known]
    return found[0] if len(found) == 1 else None


def _of_mlx(file: pretrained.VectorFile, stem: str) -> Parts:
    words, scales, biases = (file.tensor(f"{stem}.{part}", copy=True) for part in MLX)
    bits = _bits(Path(file.path), stem)
    numbers = words.view(torch.uint8)
    scales, biases = scales.float(), biases.float()
    if bits == 4:
        return numbers, scales, biases
    # Codes 0 to 255 as -128 to 127.
    codes = numbers.bitwise_xor(128).view(torch.int8)
    return codes, scales, biases + 128 * scales


def _bits(path: Path, stem: str) -> int:
    config: dict[str, Any] = {}
    beside = path.parent / "config.json"
    if beside.is_file():
        config = json.loads(beside.read_text()).get("quantization") or {}
    own = config.get(stem)
    bits = (own if isinstance(own, dict) else config).get("bits")
    if bits not in (4, 8):
        raise ValueError(
            f"{path}: expected a config.json beside it whose quantization has 4 or 8 bits, got "
            f"{bits!r}"
        )
    return int(bits)


def _of_torchao(file: pretrained.VectorFile, stem: str) -> Parts:
    codes, scales = (file.tensor(f"{stem}.{part}", copy=True) for part in TORCHAO)
    block = _block_size(file.path, stem)
    scales = scales.float().view(len(codes), -1)
    # Types that pack their codes, or order them otherwise, have other shapes.
    if codes.dim() != 2 or block != [1, codes.shape[1] // scales.shape[1]]:
        raise TypeError(
            f"{stem}.weight: expected a code for each number and scales for rows or groups of "
            f"columns, got {list(codes.shape)} with blocks of {block}"
        )
    zero = f"{stem}._weight_zero_point"
    if zero not in file.names:
        return codes, scales, None
    zero_points = file.tensor(zero, copy=True).float().view_as(scales)
    return codes, scales, -zero_points * scales if bool(zero_points.any()) else None


def _block_size(path: str, stem: str) -> Any:
    """The numbers that share a scale, from the metadata of a file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    told = json.loads(header.get("__metadata__", {}).get(f"{stem}.weight", "{}"))
    found = told.get("_data", {}).get("block_size")
    if found is None:
        raise ValueError(
            f"{path}: expected torchao's metadata of {stem}.weight with a block_size, got none"
        )
    return found
