"""Slow, obvious references for sinusoidal encodings, and the cases of their operators."""

from __future__ import annotations

import json
import math
from typing import Any

import posembed  # noqa: F401  (registers the operators)
import torch
from torch import Tensor

from support.case import OperatorCase, Sample, in_schema_order


def encode(
    positions: Tensor,
    scale: Tensor | float | None = None,
    *,
    spec: str,
    order: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Encodes column by column, in the layouts of the presets' code bases."""
    numbers = json.loads(spec)
    dim, preset = numbers["embedding_dim"], numbers.get("preset", "vaswani")
    halves = preset != "vaswani"
    even_only = preset in ("tensor2tensor", "ddpm", "fairseq")
    usual = 1.0 if even_only else 0.0
    shift = usual if numbers.get("shift") is None else numbers["shift"]
    half = (dim // 2 if even_only else dim / 2) - shift
    pairs = dim // 2 if even_only else (dim + 1) // 2
    exponents = torch.arange(pairs, dtype=torch.float64, device=positions.device)
    frequencies = numbers.get("base", 10000.0) ** -(exponents / (half if pairs > 1 else 1.0))
    padding = numbers.get("padding_idx")
    if padding is None:
        padding = 1 if preset == "fairseq" else -1
    places = positions.double().unsqueeze(-1)
    angles = (places + padding + 1) * frequencies + order * math.pi / 2
    first, second = angles.sin() * frequencies**order, angles.cos() * frequencies**order
    if numbers.get("cos_first"):
        first, second = second, first
    columns = (
        torch.cat([first, second], -1) if halves else torch.stack([first, second], -1).flatten(-2)
    )
    if columns.shape[-1] < dim:
        columns = torch.nn.functional.pad(columns, (0, 1))
    factor = numbers.get("scale", 1.0) * (1.0 if scale is None else scale)
    result = columns[..., :dim] * factor
    return result if padding < 0 else result.masked_fill(places == -1, 0.0)


def add(
    x: Tensor,
    positions: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    spec: str,
    offset: int = 0,
) -> Tensor:
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device) + offset
    return x + encode(positions, scale, spec=spec)


def add_axes(
    x: Tensor,
    positions: Tensor,
    scale: Tensor | None = None,
    *,
    spec: str,
) -> Tensor:
    """Blocks of columns in the order of AXES, rows of the specification's preset."""
    numbers = json.loads(spec)
    blocks = []
    for axis, width in zip(numbers["axes"], numbers["widths"], strict=True):
        block = json.dumps({**numbers, "embedding_dim": width})
        blocks.append(encode(positions[axis], scale, spec=block))
    return x + torch.cat(blocks, -1)


def axes_sample(rows: bool, **options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        x = torch.randn(batch, seq, 9, device=device, dtype=dtype)
        shape = (3, 1 if rows else batch, seq)
        return Sample((x, torch.rand(shape, device=device, dtype=dtype) * 20), options)

    return make


def add_sample(positions: str | None = None, dim: int = 6, **options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        x = torch.randn(batch, seq, dim, device=device, dtype=dtype)
        if positions is None:
            return Sample((x,), options)
        if positions == "integer":
            return Sample((x, torch.arange(seq, device=device, dtype=torch.int32) * 3 - 1), options)
        shape = (seq,) if positions == "row" else (batch, seq)
        return Sample((x, torch.rand(shape, device=device, dtype=dtype) * 20), options)

    return make


def encode_sample(**options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        return Sample((torch.rand(batch, seq, device=device, dtype=dtype) * 20,), options)

    return make


def scaled(sample: Any) -> Any:
    """The same call with a learned scale."""

    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        plain = sample(batch, seq, device, dtype)
        positions = [None] if plain.args[0].dim() == 3 and len(plain.args) == 1 else []
        scale = torch.full((1,), 0.75, device=device, dtype=dtype)
        return Sample((*plain.args, *positions, scale), plain.kwargs)

    return make


PLAIN = '{"embedding_dim":6}'
DDPM = '{"base":100.0,"cos_first":true,"embedding_dim":7,"preset":"ddpm","scale":0.5}'
MARIAN = '{"embedding_dim":5,"preset":"marian","shift":0.25}'
FAIRSEQ = '{"embedding_dim":7,"preset":"fairseq","padding_idx":3}'
AXES = '{"axes":[2,0,1],"embedding_dim":9,"preset":"marian","scale":0.5,"widths":[2,4,3]}'
OPERATORS = torch.ops.posembed

CASES = in_schema_order(
    [
        OperatorCase(
            "sinusoidal_add",
            OPERATORS.sinusoidal_add.default,
            add_sample(spec=PLAIN, offset=9),
            add,
        ),
        OperatorCase(
            "sinusoidal_add-integer",
            OPERATORS.sinusoidal_add.default,
            add_sample("integer", 5, spec=MARIAN),
            add,
        ),
        OperatorCase(
            "sinusoidal_add-padding",
            OPERATORS.sinusoidal_add.default,
            add_sample("integer", 7, spec=FAIRSEQ),
            add,
        ),
        OperatorCase(
            "sinusoidal_encode-fairseq",
            OPERATORS.sinusoidal_encode.default,
            encode_sample(spec=FAIRSEQ),
            encode,
        ),
        OperatorCase(
            "sinusoidal_add-row",
            OPERATORS.sinusoidal_add.default,
            add_sample("row", spec=PLAIN),
            add,
        ),
        OperatorCase(
            "sinusoidal_add-each",
            OPERATORS.sinusoidal_add.default,
            add_sample("each", 7, spec=DDPM),
            add,
        ),
        OperatorCase(
            "sinusoidal_encode",
            OPERATORS.sinusoidal_encode.default,
            encode_sample(spec=DDPM),
            encode,
        ),
        OperatorCase(
            "sinusoidal_add-scaled",
            OPERATORS.sinusoidal_add.default,
            scaled(add_sample(spec=PLAIN, offset=9)),
            add,
        ),
        OperatorCase(
            "sinusoidal_add-each-scaled",
            OPERATORS.sinusoidal_add.default,
            scaled(add_sample("each", 7, spec=DDPM)),
            add,
        ),
        OperatorCase(
            "sinusoidal_encode-scaled",
            OPERATORS.sinusoidal_encode.default,
            scaled(encode_sample(spec=DDPM)),
            encode,
        ),
        OperatorCase(
            "sinusoidal_add-axes",
            OPERATORS.sinusoidal_add.default,
            axes_sample(rows=False, spec=AXES),
            add_axes,
        ),
        OperatorCase(
            "sinusoidal_add-axes-rows-scaled",
            OPERATORS.sinusoidal_add.default,
            scaled(axes_sample(rows=True, spec=AXES)),
            add_axes,
        ),
        OperatorCase(
            "sinusoidal_encode-derivative",
            OPERATORS.sinusoidal_encode.default,
            encode_sample(spec=PLAIN, order=3),
            encode,
        ),
    ],
    "x",
    "positions",
    "scale",
)
