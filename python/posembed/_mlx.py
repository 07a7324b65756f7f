"""Tables of MLX in safetensors: codes packed in uint32, with scales and biases beside them.

A word holds codes from its lower to its upper bits; a number is code * scale + bias, where a group
of columns shares both: https://ml-explore.github.io/mlx, mlx.core.quantize. config.json says how
many bits a code has.
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

PARTS = ("weight", "scales", "biases")


def table(
    path: str | os.PathLike[str], names: Sequence[str]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Codes, scales and biases as a table of codes takes them; None for other tables.

    Raises:
        ValueError: config.json does not say how the table was quantised, or with other bits.
    """
    file = pretrained.open_vectors(path)
    if file.format != "safetensors":
        return None
    stem = _stem(file, names)
    if stem is None:
        return None
    words, scales, biases = (file.tensor(f"{stem}.{part}", copy=True) for part in PARTS)
    bits = _bits(Path(path), stem)
    numbers = words.view(torch.uint8)
    scales, biases = scales.float(), biases.float()
    if bits == 4:
        return numbers, scales, biases
    # Codes 0 to 255 as -128 to 127.
    codes = numbers.bitwise_xor(128).view(torch.int8)
    return codes, scales, biases + 128 * scales


def _stem(file: pretrained.VectorFile, names: Sequence[str]) -> str | None:
    """The name of the only table, or of the one that is named, without ".weight"."""
    known = set(file.names)
    stems = [
        name.removesuffix(".weight")
        for name in names or file.names
        if name.endswith(".weight") and name in known
    ]
    found = [
        stem
        for stem in stems
        if {f"{stem}.{part}" for part in PARTS} <= known
        and file.dtype(f"{stem}.weight") == torch.uint32
    ]
    return found[0] if len(found) == 1 else None


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
