"""Cases of learned positions."""

from typing import Any

import torch
from torch import Tensor

from support.case import Sample, case, decomposed, in_schema_order, transposed

COLUMNS = 4


def rows_for(seq: int) -> int:
    """Few rows for tests that vary every element, otherwise enough for the longest sequence."""
    return 20 if seq < 15 else 1100


def reference_backward(
    gradient: Tensor, num_rows: int, positions: Tensor | None = None, offset: int = 0, first_row: int = 0
) -> Tensor:
    def rows(weight: Tensor) -> Tensor:
        return decomposed("learned_add")(gradient, weight, positions, offset, first_row)

    return transposed(rows, gradient.new_zeros(num_rows, gradient.shape[2]), gradient)


def make_positions(form: str | None, batch: int, seq: int, first_row: int, device: Any) -> Tensor | None:
    if form is None:
        return None
    shape = (batch, seq) if form == "batch" else (seq,)
    return torch.randint(-first_row, 15, shape, device=device, dtype=torch.int32)


def sample(positions: str | None = None, **options: Any) -> Any:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        x = torch.randn(batch, seq, COLUMNS, device=device, dtype=dtype)
        weight = torch.randn(rows_for(seq), COLUMNS, device=device, dtype=dtype)
        given = make_positions(positions, batch, seq, options.get("first_row", 0), device)
        return Sample((x, weight, given), options)

    return make


def encode_sample(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
    weight = torch.randn(17, COLUMNS, device=device, dtype=dtype)
    return Sample((weight, make_positions("batch", batch, seq, 2, device)), {"first_row": 2})


def backward_sample(positions: str | None = None, **options: Any) -> Any:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        gradient = torch.randn(batch, seq, COLUMNS, device=device, dtype=dtype)
        given = make_positions(positions, batch, seq, 0, device)
        return Sample((gradient, given), {"num_rows": 1100, **options})

    return make


def reference_extend(weight: Tensor, max_positions: int, first_row: int, method: str) -> Tensor:
    """Extends by repetition; tests/python/learned tests the interpolations."""
    assert method == "repeat"
    rows = weight[first_row:]
    return torch.cat([weight[:first_row], *[rows] * max_positions])[: first_row + max_positions]


def extend_sample(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
    weight = torch.randn(7, COLUMNS, device=device, dtype=dtype)
    return Sample((weight, 12), {"first_row": 2, "method": "repeat"})


def reference_resample(
    weight: Tensor,
    grid: list[int],
    new_grid: list[int],
    method: str = "bicubic",
    align_corners: bool = False,
    antialias: bool = False,
) -> Tensor:
    image = weight[2:].reshape(1, *grid, COLUMNS).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(image, new_grid, mode=method, antialias=antialias)
    return torch.cat([weight[:2], resized[0].flatten(1).T])


def resample_sample(method: str, antialias: bool) -> Any:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        weight = torch.randn(14, COLUMNS, device=device, dtype=dtype)
        options = {"method": method, "antialias": antialias}
        return Sample((weight, [3, 4], [5, 2]), options)

    return make


def reference_packed(
    weight: Tensor,
    grid: list[int],
    grids: Tensor,
    merge: int = 1,
    num_tokens: int | None = None,
    method: str = "bicubic",
) -> Tensor:
    pictures = [
        reference_resample(weight, grid, [height, width], method)[2:].repeat(frames, 1)
        for frames, height, width in grids.tolist()
    ]
    return torch.cat(pictures)


def packed_sample(method: str) -> Any:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        weight = torch.randn(14, COLUMNS, device=device, dtype=dtype)
        grids = torch.tensor([[1, 5, 2], [2, 3, 7]], device=device)
        return Sample((weight, [3, 4], grids), {"num_tokens": 52, "method": method})

    return make


CASES = in_schema_order(
    [
        case("learned_add", sample()),
        case("learned_add-offset", sample(offset=3, first_row=2)),
        case("learned_add-positions", sample("batch", first_row=2)),
        case("learned_add-positions-seq", sample("seq")),
        case("learned_encode", encode_sample),
        case("learned_extend", extend_sample, reference_extend),
        case("learned_resample", resample_sample("bicubic", False), reference_resample),
        case("learned_resample-bilinear-antialias", resample_sample("bilinear", True), reference_resample),
        case("learned_resample-bilinear", resample_sample("bilinear", False), reference_resample),
        case("learned_packed", packed_sample("bicubic"), reference_packed),
        case("learned_packed-bilinear", packed_sample("bilinear"), reference_packed),
        case("learned_backward", backward_sample(offset=1), reference_backward),
        case("learned_backward-positions", backward_sample("seq"), reference_backward),
    ],
    "x",
    "gradient",
    "weight",
    "positions",
    "max_positions",
    "grid",
    "new_grid",
    "grids",
)  # fmt: skip
