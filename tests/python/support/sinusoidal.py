"""Cases of sinusoidal encodings."""

from typing import Any

import torch

from support.case import Sample, case, in_schema_order


def places(shape: tuple[int, ...], device: Any, dtype: torch.dtype) -> torch.Tensor:
    """Positions, which are never in 16 bits."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.rand(shape, device=device, dtype=wide) * 20


def axes_sample(rows: bool, **options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        x = torch.randn(batch, seq, 9, device=device, dtype=dtype)
        shape = (3, 1 if rows else batch, seq)
        return Sample((x, places(shape, device, dtype)), options)

    return make


def add_sample(positions: str | None = None, dim: int = 6, **options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        x = torch.randn(batch, seq, dim, device=device, dtype=dtype)
        if positions is None:
            return Sample((x,), options)
        if positions == "integer":
            return Sample((x, torch.arange(seq, device=device, dtype=torch.int32) * 3 - 1), options)
        shape = (seq,) if positions == "row" else (batch, seq)
        return Sample((x, places(shape, device, dtype)), options)

    return make


def encode_sample(**options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        return Sample((places((batch, seq), device, dtype),), options)

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

CASES = in_schema_order(
    [
        case("sinusoidal_add", add_sample(spec=PLAIN, offset=9)),
        case("sinusoidal_add-integer", add_sample("integer", 5, spec=MARIAN)),
        case("sinusoidal_add-padding", add_sample("integer", 7, spec=FAIRSEQ)),
        case("sinusoidal_encode-fairseq", encode_sample(spec=FAIRSEQ)),
        case("sinusoidal_add-row", add_sample("row", spec=PLAIN)),
        case("sinusoidal_add-each", add_sample("each", 7, spec=DDPM)),
        case("sinusoidal_encode", encode_sample(spec=DDPM)),
        case("sinusoidal_add-scaled", scaled(add_sample(spec=PLAIN, offset=9))),
        case("sinusoidal_add-each-scaled", scaled(add_sample("each", 7, spec=DDPM))),
        case("sinusoidal_encode-scaled", scaled(encode_sample(spec=DDPM))),
        case("sinusoidal_add-axes", axes_sample(rows=False, spec=AXES)),
        case("sinusoidal_add-axes-rows-scaled", scaled(axes_sample(rows=True, spec=AXES))),
        case("sinusoidal_encode-derivative", encode_sample(spec=PLAIN, order=3)),
    ],
    "x",
    "positions",
    "scale",
)
