"""The formulas of test_axial.py beside the programs of diffusers, for `make test-stacks`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import posembed as pe
import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", minversion="0.42")

SHAPE = (2, 3, 4)
GRID = torch.cartesian_prod(*map(torch.arange, SHAPE)).float()  # [tokens, axes]
LATENT = torch.zeros(1, 1, 2, 6, 8)  # patches of 1 x 2 x 2
Rotate = Callable[[Tensor], Tensor]


def code(name: str) -> Any:
    return import_module(f"diffusers.models.transformers.transformer_{name}")


def by_tables(tables: Any, **options: Any) -> Rotate:
    apply = import_module("diffusers.models.embeddings").apply_rotary_emb
    return lambda x: apply(x, tables, sequence_dim=1, **options)  # type: ignore[no-any-return]


def complex_product(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table.to(pairs.dtype)).flatten(-2)


def qwen_image() -> tuple[Rotate, Tensor]:
    module = code("qwenimage")
    embed = module.QwenEmbedRope(theta=10000, axes_dim=[16, 56, 56], scale_rope=True)
    tables = embed(SHAPE, torch.device("cpu"), max_txt_seq_len=5)[0]
    centred = GRID - torch.tensor([0.0, 2.0, 2.0])
    return lambda x: module.apply_rotary_emb_qwen(x, tables, use_real=False), centred


def hidream() -> tuple[Rotate, Tensor]:
    module = code("hidream_image")
    tables = module.HiDreamImageEmbedND(10000, [64, 32, 32])(GRID[None])
    return lambda x: module.apply_rope(x, x, tables)[0], GRID


def allegro() -> tuple[Rotate, Tensor]:
    module, index = import_module("diffusers.models.embeddings"), GRID.long().T[:, None]
    tables = module.get_3d_rotary_pos_embed_allegro(96, ((0, 0), SHAPE[1:]), SHAPE[1:], SHAPE[0])

    def rotate(x: Tensor) -> Tensor:
        turned = module.apply_rotary_emb_allegro(x.transpose(1, 2), tables[:3], [*index])
        return turned.transpose(1, 2)  # type: ignore[no-any-return]

    return rotate, GRID


def flux(name: str, *options: Any) -> tuple[Rotate, Tensor]:
    ids = torch.cat([GRID, GRID[:, :1]], 1)[:, : len(options[1])]
    embed = getattr(code(name), f"{name.capitalize()}PosEmbed")
    return by_tables(embed(*options)(ids)), ids


def wan() -> tuple[Rotate, Tensor]:
    tables = code("wan").WanRotaryPosEmbed(128, (1, 2, 2), 64)(LATENT)
    return by_tables([table.flatten(0, 2) for table in tables]), GRID


def cosmos() -> tuple[Rotate, Tensor]:
    tables = code("cosmos").CosmosRotaryPosEmbed(128)(LATENT)
    return by_tables(tables, use_real_unbind_dim=-2), GRID


def z_image() -> tuple[Rotate, Tensor]:
    tables = code("z_image").RopeEmbedder(256.0, [32, 48, 48], [99, 99, 99])(GRID.long())
    return lambda x: complex_product(x, tables[:, None]), GRID


def cogvideox() -> tuple[Rotate, Tensor]:
    embed = import_module("diffusers.models.embeddings").get_3d_rotary_pos_embed
    return by_tables(embed(64, ((0, 0), SHAPE[1:]), SHAPE[1:], SHAPE[0])), GRID


def hunyuan_video() -> tuple[Rotate, Tensor]:
    embed = code("hunyuan_video").HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56])
    return by_tables(embed(LATENT)), GRID


def lumina2() -> tuple[Rotate, Tensor]:
    tables = code("lumina2").Lumina2RotaryPosEmbed(10000, [32, 32, 32])._get_freqs_cis(GRID[None].long())  # fmt: skip
    return lambda x: complex_product(x, tables[:, :, None]), GRID


PROGRAMS = {
    "flux": lambda: flux("flux", 10000, [16, 56, 56]),
    "flux2": lambda: flux("flux2", 2000, [32] * 4),
    "flux3": lambda: flux("flux3", 10000, [32] * 4),
    **{f.__name__: f for f in (wan, qwen_image, hunyuan_video, cogvideox, z_image)},
    **{f.__name__: f for f in (cosmos, allegro, hidream, lumina2)},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_presets_beside_the_program(name: str) -> None:
    rotate, places = PROGRAMS[name]()
    spec = pe.RotarySpec.from_preset(name)
    query = torch.randn(1, len(places), 2, spec.head_dim)
    found = pe.functional.rotary(query, positions=places.T.unsqueeze(1).contiguous(), spec=spec)
    assert torch.allclose(found, rotate(query), rtol=0, atol=1e-6)  # the program's float32 tables
