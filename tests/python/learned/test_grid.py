"""Tests learned positions of pictures beside the programs that train them."""

import copy
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import safetensors.torch
import torch
import torch._dynamo.testing
from support.case import FLOATING, TOLERANCE, assert_close
from support.refusals import refused
from torch import Tensor, nn
from torch.nn.functional import interpolate

DIM, PATCH = 8, 4
GRIDS = [(6, 5), (3, 7), (4, 9), (11, 11)]
SMALL = {"hidden_size": DIM, "num_attention_heads": 2, "image_size": 5 * PATCH, "patch_size": PATCH}


def embeddings(family: str, name: str, config: str, **options: Any) -> nn.Module:
    """A small module of transformers with a random table of 5 x 5 patches."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    made: nn.Module = getattr(module, name)(getattr(configuration, config)(**SMALL, **options))
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=generator)
    return made


def of_parameter(module: Any) -> Tensor:
    return module.position_embeddings.detach()


def of_embedding(module: Any) -> Tensor:
    return module.position_embedding.weight.detach()


def encoded(module: Any, tokens: int, height: int, width: int) -> Tensor:
    rows = torch.zeros(1, tokens, DIM)
    return module.interpolate_pos_encoding(rows, height * PATCH, width * PATCH)


def resized_in_dpt(module: Any, tokens: int, height: int, width: int) -> Tensor:
    return module._resize_pos_embed(module.position_embeddings, height, width)


# Family, module, configuration, prefix tokens, options of posembed, table, its own resampling.
Family = tuple[str, str, str, int, dict[str, Any], Callable[..., Tensor], Callable[..., Tensor]]
FAMILIES: list[Family] = [
    ("vit", "ViTEmbeddings", "ViTConfig", 1, {}, of_parameter, encoded),
    ("deit", "DeiTEmbeddings", "DeiTConfig", 2, {}, of_parameter, encoded),
    ("clip", "CLIPVisionEmbeddings", "CLIPVisionConfig", 1, {}, of_embedding, encoded),
    ("siglip", "SiglipVisionEmbeddings", "SiglipVisionConfig", 0, {}, of_embedding, encoded),
    ("ijepa", "IJepaEmbeddings", "IJepaConfig", 0, {}, of_parameter, encoded),
    ("dinov2", "Dinov2Embeddings", "Dinov2Config", 1, {}, of_parameter, encoded),
    ("dinov2_with_registers", "Dinov2WithRegistersEmbeddings", "Dinov2WithRegistersConfig", 1, {"antialias": True}, of_parameter, encoded),
    ("dpt", "DPTViTEmbeddings", "DPTConfig", 1, {"resampling": "bilinear"}, of_parameter, resized_in_dpt),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_grids_of_transformers(family: Family) -> None:
    name, module, config, prefix, options, table_of, resampled = family
    theirs = embeddings(name, module, config)
    table = table_of(theirs)
    ours = pe.LearnedPositionalEmbedding.from_pretrained(table, grid=(5, 5), **options)
    assert (ours.prefix_tokens, ours.embedding_dim) == (prefix, DIM)
    assert ours.weight.data_ptr() == table.data_ptr()
    for height, width in [(5, 5), *GRIDS]:
        tokens = prefix + height * width
        expected = resampled(theirs, tokens, height, width).reshape(-1, DIM)
        assert torch.equal(ours.resampled((height, width)), expected)
        x = torch.randn(2, tokens, DIM)
        assert torch.equal(ours(x, grid=(height, width)), x + expected)


def test_siglip2_pads_pictures_of_a_batch() -> None:
    """Its batch has pictures of several grids: the tables of each, one after the other."""
    siglip2 = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
    table = torch.randn(5, 5, DIM)
    position = pe.LearnedPositionalEmbedding.from_pretrained(table, grid=(5, 5), resampling="bilinear", antialias=True)
    grids = [(3, 4), (7, 2)]
    resize = siglip2.Siglip2VisionEmbeddings.resize_positional_embeddings
    expected = resize(table, torch.tensor(grids), 16)
    for row, (height, width) in zip(expected, grids, strict=True):
        assert torch.equal(position.resampled((height, width)), row[: height * width])


PACKED = torch.tensor([[1, 4, 6], [3, 2, 2], [1, 12, 2], [2, 6, 8]])


def of_each(position: pe.LearnedPositionalEmbedding, grids: Tensor, merge: int) -> Tensor:
    """Rows of packed pictures, one picture at a time."""
    rows = []
    for frames, height, width in grids.tolist():
        table = position.resampled((height, width))[position.prefix_tokens :]
        squares = table.view(height // merge, merge, width // merge, merge, DIM).transpose(1, 2)
        rows.append(squares.reshape(-1, DIM).repeat(frames, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
@pytest.mark.parametrize("align_corners", [False, True])
def test_packed_pictures_are_those_of_each(
    method: Any, align_corners: bool, dtype: torch.dtype, device: torch.device
) -> None:
    for prefix, merge, offset in ((0, 1, 0.0), (1, 2, 0.0), (1, 2, 0.1)):
        options = {"resampling": method, "align_corners": align_corners, "scale_offset": offset}
        position = pe.LearnedPositionalEmbedding(
            grid=(5, 7), prefix_tokens=prefix, embedding_dim=DIM, device=device, dtype=dtype, **options
        )
        nn.init.normal_(position.weight)
        grids = PACKED.to(device)
        exact = copy.deepcopy(position).double()  # interpolate's float32 weights lose digits
        expected = of_each(exact, PACKED, merge)
        found = position.packed(grids, merge=merge)
        assert found.dtype == dtype
        assert_close(found, expected, TOLERANCE[dtype])
        gradient = torch.randn_like(found)
        (own,) = torch.autograd.grad(found, position.weight, gradient)
        (theirs,) = torch.autograd.grad(expected, exact.weight, gradient.double())
        assert_close(own, theirs, 8 * TOLERANCE[dtype])
    unchanged = position.packed(torch.tensor([[5, 7]], device=device))
    if offset == 0:
        assert torch.equal(unchanged, position.weight[1:])


def test_packed_pictures_of_transformers() -> None:
    """Qwen3-VL weighs two rows and columns between corners, GLM-4V four around centres."""
    utilities = pytest.importorskip("transformers.vision_utils")
    table = torch.randn(48 * 48, DIM)
    for method, align_corners in (("bilinear", True), ("bicubic", False)):
        indices, weights = utilities.get_vision_interpolation_indices_and_weights(
            PACKED, 48, mode=method, align_corners=align_corners, spatial_merge_size=2
        )
        expected = (table[indices] * weights[:, :, None]).sum(1)
        position = pe.LearnedPositionalEmbedding.from_pretrained(
            table, grid=(48, 48), resampling=method, align_corners=align_corners
        )
        torch.testing.assert_close(position.packed(PACKED, merge=2), expected, rtol=0, atol=2e-5)


def test_glm4vs_samples() -> None:
    """GLM-4V calls grid_sample with the coordinates of the patches' centres."""
    glm4v = pytest.importorskip("transformers.models.glm4v.modeling_glm4v")
    configuration = glm4v.Glm4vVisionConfig(hidden_size=DIM, image_size=70, patch_size=14)
    theirs = glm4v.Glm4vVisionEmbeddings(configuration)
    nn.init.normal_(theirs.position_embedding.weight)
    places = pe.positions.packed_grids(PACKED, merge=2)
    tokens, sizes = places.shape[1], PACKED.prod(1)
    expected = theirs(torch.zeros(tokens, DIM), sizes, PACKED, *places)
    ours = pe.LearnedPositionalEmbedding.from_pretrained(theirs.position_embedding.weight, grid=(5, 5))
    torch.testing.assert_close(ours.packed(PACKED, merge=2), expected, rtol=0, atol=2e-5)


def test_packed_pictures_compile_and_export() -> None:
    position = pe.LearnedPositionalEmbedding(grid=(5, 7), embedding_dim=DIM, resampling="bilinear")
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = position

        def forward(self, x: Tensor, grids: Tensor) -> Tensor:
            return x + self.position.packed(grids, num_tokens=x.shape[0])

    module = Packed()
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    batches = [PACKED, torch.tensor([[1, 9, 3], [2, 4, 4]])]
    sizes = {"x": {0: torch.export.Dim("tokens")}, "grids": {0: torch.export.Dim("pictures")}}
    tokens = [torch.randn(int(grids.prod(1).sum()), DIM) for grids in batches]
    exported = torch.export.export(module, (tokens[0], PACKED), dynamic_shapes=sizes).module()
    for x, grids in zip(tokens, batches, strict=True):
        expected = x + position.packed(grids)
        assert_close(compiled(x, grids), expected.double(), 1e-6)
        assert_close(exported(x, grids), expected.double(), 1e-6)
    assert counter.frame_count == 1
    traced = torch.compile(module, backend="aot_eager", fullgraph=True)  # reads no values
    with pytest.raises(IndexError):
        traced(tokens[1], batches[1][:1])


def test_packed_pictures_that_do_not_fit() -> None:
    position = pe.LearnedPositionalEmbedding(grid=(5, 5), embedding_dim=DIM)
    grids = torch.tensor([[1, 2, 3]])
    refused(
        (lambda: position.packed(grids, merge=2), ValueError, "grids: expected heights and widths that merge 2 divides"),
        (lambda: position.packed(grids, num_tokens=7), ValueError, "grids: expected 7 tokens, num_tokens, got 6"),
    )  # fmt: skip
    averaging = pe.LearnedPositionalEmbedding(grid=(5, 5), embedding_dim=DIM, antialias=True)
    refused(
        (lambda: averaging.packed(grids), ValueError, "antialias: expected False for packed pictures"),
        (lambda: torch.ops.posembed.learned_packed(averaging.weight, (5, 5), grids, antialias=True), ValueError, "antialias: expected False for packed pictures"),
        (lambda: pe.LearnedPositionalEmbedding(25, DIM).packed(grids), ValueError, "grids: expected none, because the table has no grid"),
    )  # fmt: skip


@pytest.mark.parametrize("antialias", [False, True])
def test_dinos_offset(antialias: bool) -> None:
    """As DINO and DINOv2's own program call interpolate, to avoid a grid that is too small."""
    position = pe.LearnedPositionalEmbedding(
        grid=(5, 5), prefix_tokens=1, embedding_dim=DIM, antialias=antialias, scale_offset=0.1
    )
    image = position.weight.detach()[1:].reshape(1, 5, 5, DIM).permute(0, 3, 1, 2)
    for height, width in GRIDS:
        scale = ((height + 0.1) / 5, (width + 0.1) / 5)
        expected = interpolate(image, scale_factor=scale, mode="bicubic", antialias=antialias)
        assert expected.shape[2:] == (height, width)
        found = position.resampled((height, width))[1:]
        assert torch.equal(found, expected.permute(0, 2, 3, 1).reshape(-1, DIM))
    assert position.resampled((5, 5)) is position.weight


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
@pytest.mark.parametrize("how", [{}, {"align_corners": True}, {"antialias": True}], ids=str)
def test_results_beside_float64(dtype: torch.dtype, method: Any, how: dict[str, bool], device: torch.device) -> None:
    """And gradients."""
    position = pe.LearnedPositionalEmbedding(grid=(4, 7), prefix_tokens=2, embedding_dim=DIM, resampling=method, dtype=dtype, device=device, **how)  # fmt: skip
    exact = position.weight.detach().double().requires_grad_()
    image = exact[2:].reshape(1, 4, 7, DIM).permute(0, 3, 1, 2)
    rows = interpolate(image, (9, 3), mode=method, **how).permute(0, 2, 3, 1).reshape(-1, DIM)
    found = position.resampled((9, 3))
    assert found.dtype == dtype
    assert torch.equal(found[:2], position.weight[:2])
    assert_close(found[2:], rows, TOLERANCE[dtype])
    gradient = torch.randn_like(found)
    (own,) = torch.autograd.grad(found, position.weight, gradient)
    (theirs,) = torch.autograd.grad(torch.cat([exact[:2], rows]), exact, gradient.double())
    assert_close(own, theirs, 8 * TOLERANCE[dtype])


def test_antialiasing_that_learns_has_a_graph_for_each_grid() -> None:
    """The torch compiler cannot derive it for symbolic sizes; others: tests/python/test_modules.py."""
    position = pe.LearnedPositionalEmbedding(grid=(5, 5), embedding_dim=DIM, antialias=True)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(position, backend=graphs, fullgraph=True, dynamic=True)
    for grid in GRIDS[:3]:
        before = graphs.frame_count
        x = torch.randn(2, math.prod(grid), DIM)
        found = compiled(x, grid=grid)
        assert_close(found, position(x, grid=grid), TOLERANCE[torch.float32])
        found.sum().backward()
        assert graphs.frame_count > before


def test_extend() -> None:
    position = pe.LearnedPositionalEmbedding(1 + 16, DIM)
    table = position.weight.detach().clone()
    position.extend((6, 5), from_grid=(4, 4))
    expected = pe.functional.learned_resample(table, (4, 4), (6, 5))
    assert torch.equal(position.weight, expected)
    assert (position.grid, position.prefix_tokens, position.max_positions) == ((6, 5), 1, 31)
    position.extend((2, 3), "bilinear")
    assert torch.equal(position.weight, pe.functional.learned_resample(expected, (6, 5), (2, 3), method="bilinear"))
    x = torch.zeros(2, 7, DIM)
    position(x).sum().backward()
    assert torch.equal(position.weight.grad, torch.full((7, DIM), 2.0))
    refused((lambda: position.extend(40), ValueError, "max_positions: expected the numbers of rows and columns"))  # fmt: skip


def test_positions_of_kept_patches() -> None:
    """A masked autoencoder keeps a part of the patches."""
    position = pe.LearnedPositionalEmbedding(grid=(4, 4), prefix_tokens=1, embedding_dim=DIM)
    kept = torch.tensor([[1, 14, 3], [30, 7, 2]])
    x = torch.randn(2, 3, DIM)
    rows = position.resampled((6, 5))
    assert torch.equal(position(x, kept, grid=(6, 5)), x + rows[kept])
    patches = torch.randn(2, 30, DIM)
    assert torch.equal(position(patches, offset=1, grid=(6, 5)), patches + rows[1:])


NAMES = [
    ("vit.embeddings.position_embeddings", (1, 17, DIM)),
    ("vision_model.embeddings.position_embedding.weight", (17, DIM)),
    ("pos_embed", (1, 17, DIM)),
]


@pytest.mark.parametrize(("name", "shape"), NAMES)
def test_checkpoints(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    path, table = tmp_path / "model.safetensors", torch.randn(shape)
    state = {"layer.weight": torch.zeros(3, 3), name: table}
    safetensors.torch.save_file(state, path)
    for position in (
        pe.LearnedPositionalEmbedding.from_file(path, grid=(4, 4)),
        pe.cpp.LearnedPositionalEmbedding.from_file(path, grid=(4, 4)),
    ):
        assert torch.equal(position.weight, table.reshape(17, DIM))
        assert not position.weight.requires_grad
        assert "grid=(4, 4), prefix_tokens=1" in repr(position)
    safetensors.torch.save_file({**state, "text.position_embeddings": torch.zeros(9, DIM)}, path)
    for kind in (pe.LearnedPositionalEmbedding, pe.cpp.LearnedPositionalEmbedding):
        refused((lambda: kind.from_file(path, grid=(4, 4)), ValueError, "tensor: expected the name .* several"))  # fmt: skip
        assert torch.equal(kind.from_file(path, tensor=name, grid=(4, 4)).weight, position.weight)


def test_sams_table_is_a_grid() -> None:
    table = torch.randn(1, 4, 6, DIM)
    position = pe.LearnedPositionalEmbedding.from_pretrained(table, grid=(4, 6), freeze=False)
    assert torch.equal(position.weight, table.reshape(24, DIM))
    assert position.weight.requires_grad


def grid_table(**options: Any) -> pe.LearnedPositionalEmbedding:
    return pe.LearnedPositionalEmbedding(grid=(4, 4), embedding_dim=DIM, **options)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("max_positions: expected either it or grid", lambda: pe.LearnedPositionalEmbedding(embedding_dim=4)),
        ("max_positions: expected either it or grid", lambda: pe.LearnedPositionalEmbedding(16, 4, grid=(4, 4))),
        ("embedding_dim: expected a whole number", lambda: pe.LearnedPositionalEmbedding(16)),
        ("grid: expected the numbers of rows and columns", lambda: pe.LearnedPositionalEmbedding(grid=(4, 0), embedding_dim=4)),
        ("grid: expected the numbers of rows and columns", lambda: pe.LearnedPositionalEmbedding(grid=16, embedding_dim=4)),
        ("prefix_tokens: expected 0 without a grid", lambda: pe.LearnedPositionalEmbedding(16, 4, prefix_tokens=1)),
        ("prefix_tokens: expected 0 or more", lambda: grid_table(prefix_tokens=-1)),
        ("resampling: expected 'bicubic' or 'bilinear', got 'area'", lambda: grid_table(resampling="area")),
        ("scale_offset: expected a finite number of at least 0", lambda: grid_table(scale_offset=-0.1)),
        ("new_grid: expected the numbers of rows and columns", lambda: grid_table().resampled((4, 0))),
        ("new_grid: expected the numbers of rows and columns", lambda: grid_table().resampled((4,))),
        ("grid: expected None, because the table has none", lambda: pe.LearnedPositionalEmbedding(16, 4).resampled((4, 4))),
        ("grid: expected at most 15 cells", lambda: pe.functional.learned_resample(torch.zeros(15, 4), (4, 4), (2, 2))),
        ("grid: expected a product below 2^63", lambda: pe.functional.learned_resample(torch.zeros(15, 4), (2**62, 4), (2, 2))),
        ("grid: expected a product below 2^63", lambda: pe.functional.learned_resample(torch.zeros(15, 4, device="meta"), (2**62 + 1, 4), (2, 2))),
        ("new_grid: expected", lambda: pe.functional.learned_resample(torch.zeros(16, 4), (4, 4), (2**62, 2))),
        ("method: expected 'bicubic' or 'bilinear', got 'cubic'", lambda: pe.functional.learned_resample(torch.zeros(16, 4), (4, 4), (2, 2), method="cubic")),
        ("from_grid: expected at most 16 cells", lambda: pe.LearnedPositionalEmbedding(16, 4, first_row=2).extend((6, 6), from_grid=(3, 6))),
        ("embeddings: expected", lambda: pe.LearnedPositionalEmbedding.from_pretrained(torch.zeros(2, 17, 4), grid=(4, 4))),
        ("embeddings: expected", lambda: pe.LearnedPositionalEmbedding.from_pretrained(torch.zeros(1, 15, 4), grid=(4, 4))),
    ],
)  # fmt: skip
def test_errors(message: str, call: Callable[[], Any]) -> None:
    refused((call, ValueError, message))


def test_a_longer_sequence_than_the_grid() -> None:
    refused((lambda: grid_table()(torch.zeros(1, 30, DIM)), IndexError, "position table of 16, got 29, the last of the sequence"))  # fmt: skip
