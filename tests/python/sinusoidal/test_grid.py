"""Tests sinusoidal encodings of pictures and videos beside the programs that models come from."""

import math
from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from support.case import FLOATING, TOLERANCE, assert_close
from support.refusals import refused
from torch import Tensor

DIM = 48
EXACT = 1e-13  # the programs round in float64, at angles up to 100


def encoded(grid: tuple[int, ...], mask: Tensor | None = None, **options: Any) -> Tensor:
    position = pe.SinusoidalPositionalEmbedding(DIM, **options)
    return position.encode_grid(grid, mask, dtype=torch.float64)


def one_axis(positions: Tensor, dim: int) -> Tensor:
    """Sines, then cosines, in float64."""
    omega = 10000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angles = positions.double().flatten().outer(omega)
    return torch.cat([angles.sin(), angles.cos()], 1)


DETRS = [
    ("detr", "DetrSinePositionEmbedding", "detr"),
    ("mask2former", "Mask2FormerSinePositionEmbedding", "detr"),
    ("sam2", "Sam2SinePositionEmbedding", "sam2"),
]


def padding(batch: int, rows: int, columns: int) -> Tensor:
    """Pictures of several sizes in the top left corner."""
    mask = torch.zeros(batch, rows, columns, dtype=torch.bool)
    for i in range(batch):
        mask[i, : rows - i, : columns - 2 * i] = True
    return mask


@pytest.mark.parametrize(("family", "name", "preset"), DETRS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_detr(family: str, name: str, preset: str, normalize: bool, masked: bool) -> None:
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(module, name)(DIM // 2, normalize=normalize)
    shape, mask = (3, 1, 5, 7), padding(3, 5, 7) if masked else None
    expected = theirs(torch.Size(shape), "cpu", torch.float64, mask).flatten(2).transpose(1, 2)
    options = {} if normalize else {"length": 0}
    found = encoded((5, 7), mask, preset=preset, **options)
    assert_close(found.expand(3, -1, -1), expected, EXACT)


def test_deformable_detr_starts_in_the_middle_of_a_cell() -> None:
    module = pytest.importorskip("transformers.models.deformable_detr.modeling_deformable_detr")
    theirs = module.DeformableDetrSinePositionEmbedding(DIM // 2, normalize=True)
    mask = torch.ones(2, 5, 7, dtype=torch.bool)
    expected = theirs(torch.Size((2, 1, 5, 7)), "cpu", torch.float64, mask)
    found = encoded((5, 7), preset="detr", start=0.5)
    assert_close(found, expected[:1].flatten(2).transpose(1, 2), EXACT)


def test_rt_detr_has_rows_first() -> None:
    module = pytest.importorskip("transformers.models.rt_detr.modeling_rt_detr")
    expected = module.RTDetrSinePositionEmbedding(DIM)(7, 5, torch.device("cpu"), torch.float64)
    assert_close(encoded((5, 7), preset="mae", axes=(0, 1)), expected, EXACT)


@pytest.mark.parametrize("grid", [(5, 5), (5, 7)])
def test_mae(grid: tuple[int, int]) -> None:
    """The column's encoding, then the row's: util/pos_embed.py of the paper's program."""
    y, x = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    expected = torch.cat([one_axis(x, DIM // 2), one_axis(y, DIM // 2)], 1)
    assert_close(encoded(grid, preset="mae")[0], expected, EXACT)


def test_sd3_takes_the_middle_of_its_largest_grid() -> None:
    (rows, columns), largest, base = (5, 8), 24, 8
    y = (torch.arange(rows) + (largest - rows) // 2) * base / largest
    x = (torch.arange(columns) + (largest - columns) // 2) * base / largest
    y, x = torch.meshgrid(y.double(), x.double(), indexing="ij")
    expected = torch.cat([one_axis(x, DIM // 2), one_axis(y, DIM // 2)], 1)
    found = encoded((rows, columns), preset="sd3", length=base, max_size=largest)[0]
    assert_close(found, expected, 1e-6)  # torch.arange(…) / … is float32
    middle = encoded((6, 6), preset="sd3")[0]
    at = (torch.arange(6, dtype=torch.float64) + 93) * 64 / 192
    assert_close(middle[:6, : DIM // 2], one_axis(at, DIM // 2), EXACT)


def test_pixart_scales_every_picture_to_one_length() -> None:
    y, x = torch.meshgrid(
        torch.arange(6, dtype=torch.float64) * 32 / 6, torch.arange(9, dtype=torch.float64) * 32 / 9, indexing="ij"
    )
    expected = torch.cat([one_axis(x, DIM // 2), one_axis(y, DIM // 2)], 1)
    assert_close(encoded((6, 9), preset="pixart")[0], expected, EXACT)


def test_cogvideox() -> None:
    t, y, x = torch.meshgrid(*(torch.arange(n).double() for n in (3, 4, 5)), indexing="ij")
    blocks = [(t, DIM // 4), (x / 1.875, 3 * DIM // 8), (y / 1.875, 3 * DIM // 8)]
    expected = torch.cat([one_axis(*block) for block in blocks], 1)
    assert_close(encoded((3, 4, 5), preset="cogvideox")[0], expected, EXACT)


def test_diffusers() -> None:
    """Its positions are float32."""
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    mae = embeddings.get_2d_sincos_pos_embed(DIM, 5, base_size=5)
    assert_close(encoded((5, 5), preset="mae")[0], mae, EXACT)
    sd3 = embeddings.PatchEmbed(16, 16, 2, 4, DIM, pos_embed_max_size=24)
    found = encoded((5, 8), preset="sd3", length=8, max_size=24)[0]
    assert_close(found, sd3.cropped_pos_embed(10, 16)[0], 1e-5)
    pixart = embeddings.get_2d_sincos_pos_embed(DIM, (6, 9), interpolation_scale=2.0, base_size=64)
    assert_close(encoded((6, 9), preset="pixart")[0], pixart, 1e-5)
    cogvideox = embeddings.get_3d_sincos_pos_embed(DIM, (5, 4), 3, 1.875)
    assert_close(encoded((3, 4, 5), preset="cogvideox")[0], cogvideox.flatten(0, 1), 1e-5)


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_addition_rounds_once(dtype: torch.dtype, device: torch.device) -> None:
    """Positions of a grid, of axes, and blocks of one axis give the same bits."""
    position = pe.SinusoidalPositionalEmbedding(DIM, preset="cogvideox", scale=0.5)
    x = torch.randn(3, 24, DIM, dtype=dtype, device=device)
    found = position(x, grid=(2, 3, 4))
    exact = x.double() + position.encode_grid((2, 3, 4), dtype=torch.float64, device=device)
    assert_close(found, exact, TOLERANCE[dtype])
    cells = pe.functional.sinusoidal_grid_positions((2, 3, 4), spec=position.spec, device=device)
    for positions in (cells, cells[:, 0], cells.expand(-1, 3, -1)):
        assert torch.equal(position(x, positions), found)
    column = 0
    for axis, block in position.spec.blocks():
        end = column + block.embedding_dim
        alone = pe.functional.sinusoidal(x[..., column:end], cells[axis], spec=block)
        assert torch.equal(found[..., column:end], alone)
        column = end


def test_specifications_of_axes_inside_a_compiled_function() -> None:
    def encode(x: Tensor, positions: Tensor) -> Tensor:
        spec = pe.SinusoidalSpec(x.shape[-1], preset="vaswani", axes=(1, 0))
        codes = pe.functional.sinusoidal_encode(positions, spec=spec)
        return pe.functional.sinusoidal(x, positions, spec=spec) + codes

    compiled = torch.compile(encode, backend="aot_eager", fullgraph=True, dynamic=True)
    for width in (8, 12):
        x, positions = torch.randn(1, 3, width), torch.rand(2, 3)
        assert torch.equal(compiled(x, positions), encode(x, positions))


def test_a_specification_is_its_text() -> None:
    spec = pe.SinusoidalSpec(64, preset="cogvideox", interpolation_scale=[1, 2, 2])
    assert spec.interpolation_scale == (1.0, 2.0, 2.0)
    assert pe.SinusoidalSpec.from_json(spec.to_json()) == spec
    assert hash(spec) == hash(pe.SinusoidalSpec.from_json(spec.to_json()))
    assert spec.num_axes == 3
    frequencies = torch.cat([block.frequencies() for _, block in spec.blocks()])
    assert torch.equal(spec.frequencies(), frequencies)
    same = pe.SinusoidalSpec(64, preset="marian", axes=(1, 0))
    positions = torch.rand(2, 9)
    encode = pe.functional.sinusoidal_encode
    assert torch.equal(encode(positions, spec=same), encode(positions, spec=pe.SinusoidalSpec(64, preset="mae")))


def test_a_picture_of_padding_alone_has_finite_values() -> None:
    mask = torch.zeros(1, 3, 3, dtype=torch.bool)
    for options in ({"preset": "detr"}, {"preset": "pixart"}, {"preset": "detr", "start": 0.5}):
        assert encoded((3, 3), mask, **options).isfinite().all()


def spec(**options: Any) -> pe.SinusoidalSpec:
    return pe.SinusoidalSpec(DIM, **options)


def cells(grid: Any, mask: Tensor | None = None, **options: Any) -> Tensor:
    return pe.functional.sinusoidal_grid_positions(grid, mask, spec=spec(**options))


def add(*shape: int, **call: Any) -> Tensor:
    return pe.SinusoidalPositionalEmbedding(DIM, preset="mae")(torch.zeros(shape), **call)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("axes: expected each of 0 to 1 once, got", lambda: spec(axes=(0, 2))),
        ("axes: expected the axis of each block", lambda: spec(start=1.0)),
        ("axes: expected an axis for each block", lambda: spec(axes=())),
        ("widths: expected 2 numbers with the sum 48", lambda: spec(preset="mae", widths=(24, 23))),
        ("widths: expected 2 numbers with the sum 48", lambda: spec(preset="mae", widths=(48,))),
        ("widths: expected 2 numbers with the sum 48", lambda: spec(preset="mae", widths=(49, -1))),
        ("embedding_dim: expected a multiple of 8", lambda: pe.SinusoidalSpec(12, preset="cogvideox")),
        ("padding_idx: expected none with several axes", lambda: spec(preset="fairseq", axes=(0, 1))),
        ("length: expected a finite number of at least 0", lambda: spec(preset="mae", length=-1)),
        ("interpolation_scale: expected 2 numbers", lambda: spec(preset="mae", interpolation_scale=(1, 1, 1))),
        ("interpolation_scale: expected finite numbers above 0", lambda: spec(preset="mae", interpolation_scale=(0, 1))),
        ("grid: expected a size for each of 2 axes", lambda: cells((2, 3, 4), preset="mae")),
        ("grid: expected a size for each of", lambda: cells((2, 3))),
        ("grid: expected sizes of at least 1", lambda: cells((2, 0), preset="mae")),
        ("grid: expected at most max_size, 192", lambda: cells((2, 193), preset="sd3")),
        ("mask: expected \\[batch, rows, columns\\]", lambda: cells((2, 3), padding(1, 3, 3), preset="detr")),
        ("mask: expected none beside three axes", lambda: cells((2, 3), padding(1, 2, 3), preset="sd3")),
        ("positions: expected those of 2 axes, got none", lambda: add(1, 6, DIM)),
        ("positions: expected seq 6, got 8", lambda: add(1, 6, DIM, grid=(2, 4))),
        ("positions: expected \\[axes, batch or 1, seq\\] with 2 axes", lambda: add(1, 6, DIM, positions=torch.zeros(3, 6))),
        ("positions: expected None beside a grid", lambda: add(1, 6, DIM, positions=torch.zeros(2, 6), grid=(2, 3))),
        ("x: expected \\[batch, seq, embedding_dim\\] with several axes", lambda: add(6, DIM, grid=(2, 3))),
        ("offset: expected 0 where positions are given", lambda: add(1, 6, DIM, grid=(2, 3), offset=1)),
        ("mask: expected None without a grid", lambda: add(1, 6, DIM, mask=padding(1, 2, 3))),
        ("positions: expected \\[axes, ...\\] with 2 axes", lambda: pe.functional.sinusoidal_encode(torch.zeros(6), spec=spec(preset="mae"))),
        ("spec: expected one axis, got 2", lambda: pe.functional.sinusoidal_shift_matrix(1, spec=spec(preset="mae"))),
        ("spec: expected one axis, got 2", lambda: spec().permutation_to(spec(preset="mae"))),
        ("spec: expected one axis, got 2", lambda: pe.functional.input_embedding(torch.zeros(1, 2).long(), torch.zeros(3, DIM), sinusoid=spec(preset="mae"))),
    ],
)  # fmt: skip
def test_errors(message: str, call: Callable[[], Any]) -> None:
    refused((call, ValueError, message))


def test_a_mask_is_bool() -> None:
    refused((lambda: cells((2, 3), torch.ones(1, 2, 3), preset="detr"), TypeError, "mask: expected bool"))  # fmt: skip


def test_the_length_is_that_of_each_picture() -> None:
    mask = padding(2, 4, 6)
    positions = cells((4, 6), mask, preset="detr").reshape(2, 2, 4, 6)
    assert positions[0, 1, 2, 0] == pytest.approx(2 * math.pi, rel=1e-6)  # three rows
    assert positions[1, 1, 0, 3] == pytest.approx(2 * math.pi, rel=1e-6)  # four columns
