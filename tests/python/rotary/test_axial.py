"""Positions with several axes: presets against their programs' formulas, and parts of a head."""

import json
from collections.abc import Callable

import posembed as pe
import pytest
import torch
from support.refusals import refused
from torch import Tensor

TOKENS, HEADS = 6, 2


def series(dim: int, theta: float) -> Tensor:
    """``get_1d_rotary_pos_embed`` of diffusers, ``freq_bands`` of timm."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def interleaved(x: Tensor, angles: Tensor) -> Tensor:
    """``apply_rotary_emb(use_real_unbind_dim=-1)`` of diffusers, ``rot`` of timm."""
    cos, sin = (table.repeat_interleave(2, -1)[:, None] for table in (angles.cos(), angles.sin()))
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return x * cos + torch.stack([-imaginary, real], -1).flatten(-2) * sin


def halves(x: Tensor, angles: Tensor) -> Tensor:
    """``use_real_unbind_dim=-2`` (Cosmos), ``rotate_half`` (DINOv3)."""
    cos, sin = (table.repeat(1, 2)[:, None] for table in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def thirds(x: Tensor, angles: Tensor) -> Tensor:
    """``apply_rotary_emb_allegro``: ``rotate_half`` of each third."""
    parts = zip(x.chunk(3, -1), angles.chunk(3, -1), strict=True)
    return torch.cat([halves(part, own) for part, own in parts], -1)


def cosmos() -> list[Tensor]:
    """``CosmosRotaryPosEmbed`` with rope_scale (2, 1, 1)."""
    return [series(44, 10000.0 * 2.0 ** (44 / 42)), series(42, 10000.0), series(42, 10000.0)]


def equal(dims: tuple[int, ...], theta: float = 10000.0) -> list[Tensor]:
    return [series(dim, theta) for dim in dims]


PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor]]] = {
    "flux": (interleaved, equal((16, 56, 56))),
    "flux2": (interleaved, equal((32, 32, 32, 32), 2000.0)),
    "flux3": (interleaved, equal((32, 32, 32, 32))),
    "wan": (interleaved, equal((44, 42, 42))),
    "qwen_image": (interleaved, equal((16, 56, 56))),
    "hunyuan_video": (interleaved, equal((16, 56, 56), 256.0)),
    "cogvideox": (interleaved, equal((16, 24, 24))),
    "z_image": (interleaved, equal((32, 48, 48), 256.0)),
    "cosmos": (halves, cosmos()),
    "allegro": (thirds, equal((32, 32, 32))),
    "hidream": (interleaved, equal((64, 32, 32))),
    "lumina2": (interleaved, equal((32, 32, 32))),
    "dinov3": (halves, [2 * torch.pi * each for each in equal((32, 32), 100.0)]),
    "eva02": (interleaved, equal((32, 32))),
    "sam2": (interleaved, equal((128, 128))),
}

CONFIGURATIONS = {
    "flux": {"_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]},
    "flux2": {"_class_name": "Flux2Transformer2DModel", "attention_head_dim": 128, "axes_dims_rope": [32, 32, 32, 32], "rope_theta": 2000},
    "wan": {"_class_name": "WanTransformer3DModel", "attention_head_dim": 128},
    "qwen_image": {"_class_name": "QwenImageTransformer2DModel", "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]},
    "hunyuan_video": {"_class_name": "HunyuanVideoTransformer3DModel", "attention_head_dim": 128, "rope_axes_dim": [16, 56, 56], "rope_theta": 256.0},
    "cogvideox": {"_class_name": "CogVideoXTransformer3DModel", "attention_head_dim": 64, "use_rotary_positional_embeddings": True},
    "z_image": {"_class_name": "ZImageTransformer2DModel", "dim": 3840, "n_heads": 30, "axes_dims": [32, 48, 48], "rope_theta": 256.0},
    "cosmos": {"_class_name": "CosmosTransformer3DModel", "attention_head_dim": 128, "rope_scale": [2.0, 1.0, 1.0]},
    "allegro": {"_class_name": "AllegroTransformer3DModel", "attention_head_dim": 96},
}  # fmt: skip


def grid(axes: int, device: torch.device) -> Tensor:
    """Positions [axes, tokens] of both signs, with fractions."""
    return torch.randint(-40, 40, (axes, TOKENS), device=device) + 0.25


@pytest.mark.parametrize("name", PROGRAMS)
def test_presets_rotate_as_their_programs(name: str, device: torch.device) -> None:
    rotate, of_axes = PROGRAMS[name]
    places = grid(len(of_axes), device)
    angles = torch.cat([places[i, :, None].double().cpu() * own for i, own in enumerate(of_axes)], 1)
    spec = pe.RotarySpec.from_preset(name)
    query = torch.randn(TOKENS, HEADS, spec.head_dim, dtype=torch.float64)
    rope = pe.RotaryEmbedding(spec, layout="thd")
    found = rope(query.to(device), positions=places.double()).cpu()
    # A program's frequency is rounded once more than ours, and multiplied by up to 40.
    assert torch.allclose(found, rotate(query, angles), rtol=0, atol=1e-13)
    if name in CONFIGURATIONS:
        assert pe.RotarySpec.from_huggingface(CONFIGURATIONS[name]) == spec


def test_every_preset_is_compared() -> None:
    with pytest.raises(ValueError, match="name: expected one of") as caught:
        pe.RotarySpec.from_preset("flux9")
    assert all(f"'{name}'" in str(caught.value) for name in PROGRAMS)
    assert str(caught.value).split("], got")[0].count("'") == 2 * len(PROGRAMS)


def test_sizes_follow_the_head() -> None:
    assert pe.RotarySpec.from_preset("dinov3", 128).head_dim == 128
    wan = pe.RotarySpec.from_preset("wan", head_dim=64).sections
    assert [wan.axis_of_pair.count(axis) for axis in range(3)] == [12, 10, 10]
    changed = {**CONFIGURATIONS["cosmos"], "rope_scale": [1.0, 3.0, 3.0]}
    wanted = pe.RotarySpec(42, scaling=pe.NtkScaling(3.0)).frequencies()
    assert torch.equal(pe.RotarySpec.from_huggingface(changed).frequencies()[22:43], wanted)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pe.RotarySpec.from_preset("flux", 64), r"head_dim: expected 128, the sum of the axes \[16, 56, 56\], got 64"),
        (lambda: pe.RotarySpec.from_preset("flux", 0), "head_dim: expected a positive number, got 0"),
        (lambda: pe.RotarySpec.from_preset("mochi"), "mochi: has no specification: its frequencies are a parameter"),
        (lambda: pe.RotarySpec.from_huggingface({"_class_name": "LTXVideoTransformer3DModel"}), "LTXVideoTransformer3DModel: has no specification: it rotates the hidden size"),
        (lambda: pe.RotarySpec.from_huggingface({"_class_name": "UNet2DConditionModel"}), "_class_name: expected one of .*, got 'UNet2DConditionModel'"),
        (lambda: pe.RotarySpec.from_huggingface({"_class_name": "FluxTransformer2DModel", "attention_head_dim": 128}), "axes_dims_rope: expected a value for 'FluxTransformer2DModel', got none"),
        (lambda: pe.RotarySpec.from_huggingface({**CONFIGURATIONS["cogvideox"], "use_rotary_positional_embeddings": False}), "use_rotary_positional_embeddings: is false, so the model does not rotate"),
        (lambda: pe.RotarySpec.from_huggingface({**CONFIGURATIONS["cosmos"], "rope_scale": [1.0]}), "rope_scale: expected 3 numbers, got 1"),
        (lambda: pe.RotarySpec.from_huggingface(CONFIGURATIONS["wan"], base=1e6), "base: "),
        (lambda: pe.RotarySpec.for_layers(CONFIGURATIONS["wan"]), "config: a model of diffusers rotates alike in all layers"),
        (lambda: pe.RotarySpec.axial([]), "axes: expected at least one specification"),
        (lambda: pe.RotarySpec.axial([pe.RotarySpec(8), pe.RotarySpec(8, rotary_dim=4)]), "axes: expected specifications that rotate a whole head by one axis, got 8, "),
        (lambda: pe.RotarySpec.axial([pe.RotarySpec(8), pe.RotarySpec(8, interleaved=True)]), "axes: expected the same interleaved, reverse and numerics"),
        (lambda: pe.RotarySpec.axial([pe.RotarySpec(8), pe.RotarySpec(8, scaling=pe.YarnScaling(4.0, 99))]), "axes: expected the same attention factor, got 1 and 1.13"),
        (lambda: pe.RotarySpec.axial([pe.RotarySpec(8, scaling=pe.XPosScaling())]), "axes: expected frequencies that do not depend on the length, and no xPos"),
        (lambda: pe.RotarySpec(8, interleaved=True, sections=pe.Sections((2, 2), within_axes=True)), "within_axes=False for interleaved pairs"),
        (lambda: pe.RotarySpec(8, sections=pe.Sections(axis_of_pair=(0, 1, 0, 1), within_axes=True)), "the pairs of each axis side by side for within_axes"),
        (lambda: pe.RotarySpec(8, custom_attention_factor=2.0), "custom_attention_factor: expected None without custom_frequencies, got 2"),
        (lambda: pe.RotarySpec(2, custom_frequencies=[1.0], custom_attention_factor=0.0), "custom_attention_factor: expected a finite positive number, got 0"),
    ],
)  # fmt: skip
def test_bad_specifications_raise(call: Callable[[], object], text: str) -> None:
    refused((call, ValueError, text))


def test_parts_keep_their_base_and_scaling(device: torch.device) -> None:
    """Each part of the head rotates as a head of its own, in one call; the other order too."""
    parts = [
        pe.RotarySpec(8, base=256.0),
        pe.RotarySpec(16, scaling=pe.LinearScaling(3.0)),
        pe.RotarySpec(12, scaling=pe.NtkScaling(2.0)),
    ]
    sizes = [part.head_dim for part in parts]
    spec = pe.RotarySpec.axial(parts)
    assert spec == pe.RotarySpec.from_json(spec.to_json())
    query = torch.randn(2, TOKENS, HEADS, 36, device=device)
    places = grid(3, device).unsqueeze(1)
    alone = [
        pe.functional.rotary(part.contiguous(), positions=places[axis], spec=parts[axis])
        for axis, part in enumerate(query.split(sizes, -1))
    ]
    found = pe.functional.rotary(query, positions=places, spec=spec)
    assert torch.allclose(found, torch.cat(alone, -1), atol=1e-6)
    across = pe.functional.rotary(query, positions=places, spec=pe.RotarySpec.axial(parts, within_axes=False))
    wanted = halves(query, torch.cat([places[i, 0, :, None] * part.frequencies().to(query) for i, part in enumerate(parts)], 1))  # fmt: skip
    assert torch.allclose(across, wanted, atol=1e-4)


@pytest.mark.parametrize("change", [{"reverse": True}, {"numerics": "float32"}, {"interleaved": True}])
def test_axes_keep_what_their_parts_have_in_common(change: dict[str, object]) -> None:
    for base in (1e4, 1e2):  # equal parts, and parts with frequencies of their own
        found = pe.RotarySpec.axial([pe.RotarySpec(8, **change), pe.RotarySpec(8, base=base, **change)])
        assert {name: getattr(found, name) for name in change} == change


def test_equal_parts_are_sections() -> None:
    parts = [pe.RotarySpec(16, interleaved=True, scaling=pe.LinearScaling(2.0))] * 2
    sections = pe.Sections((8, 8), restart=True)
    wanted = pe.RotarySpec(32, interleaved=True, scaling=pe.LinearScaling(2.0), sections=sections)
    assert pe.RotarySpec.axial(parts) == wanted
    assert pe.RotarySpec.axial([parts[0]]) == parts[0]
    yarn = pe.RotarySpec(8, scaling=pe.YarnScaling(4.0, 99))
    assert pe.RotarySpec.axial([yarn, yarn]).attention_factor == yarn.attention_factor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [5, 3000])  # also more than fits into the caches
def test_windows_within_axes(dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    """The same bits as a call for each axis, out of place, in place and for the window alone."""
    sections = pe.Sections((24, 20, 20), restart=True, within_axes=True)
    rope = pe.RotaryEmbedding(136, rotary_dim=128, rotary_start=4, sections=sections)
    query = torch.randn(1, tokens, 8, 136, dtype=dtype, device=device)
    key = torch.randn(1, tokens, 1, 128, dtype=dtype, device=device)
    places = torch.randint(0, 90, (3, 1, tokens), device=device)
    places[:, 0, 1] = -1
    wanted_query, wanted_key = query.clone(), key.clone()
    for axis, (start, dim) in enumerate([(0, 48), (48, 40), (88, 40)]):
        for tensor, first, head in ((wanted_query, start + 4, 136), (wanted_key, start, 128)):
            part = pe.RotarySpec(head, rotary_dim=dim, rotary_start=first)
            pe.functional.rotary_(tensor, positions=places[axis], spec=part)
    for found, wanted in zip(rope(query, key, places), (wanted_query, wanted_key), strict=True):
        assert torch.equal(found, wanted)
    rope.rotate_(query, key, places)
    assert torch.equal(query, wanted_query)
    assert torch.equal(key, wanted_key)


def test_kernels_without_windows_refuse_them() -> None:
    spec = pe.RotarySpec(8, sections=pe.Sections((2, 2), within_axes=True))
    query, weight = torch.randn(1, 3, 2, 8), torch.ones(8)
    refused((lambda: pe.functional.norm_rotary(query, query, weight, weight, spec=spec), ValueError, "expected within_axes=False for norm_rotary"))  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_minus_one_is_on_all_axes_or_none(layout: str, device: torch.device) -> None:
    """A centred grid of integers is refused: it would leave its middle rows and columns as is."""
    rope = pe.RotaryEmbedding(8, sections=pe.Sections((2, 2)), layout=layout)
    query = torch.randn((1, 9, 2, 8) if layout == "bshd" else (9, 2, 8), device=device)
    centred = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2)).T.to(device)
    places = centred.unsqueeze(1) if layout == "bshd" else centred

    def rotate(call: Callable[..., Tensor]) -> None:
        call(query, positions=places)
        pe.check_errors()  # CUDA kernels record bad positions

    for call in (rope, rope.rotate_):
        refused((lambda: rotate(call), IndexError, "expected -1 .* on all axes of a token or on none"))  # fmt: skip
    moved = rope(query, positions=places.float())
    assert not torch.equal(moved[..., 1, :, :], query[..., 1, :, :])
    left = torch.where(places[:1] == 0, -1, 3).expand(places.shape).contiguous()
    same = (rope(query, positions=left) == query).all(-1).all(-1)
    assert torch.equal(same, left[0] == -1)


def test_axes_without_a_batch_are_named() -> None:
    """[axes, seq] would be read as [batch, seq] if there were as many axes as sequences."""
    rope = pe.RotaryEmbedding(16, sections=pe.Sections((2, 3, 3)))
    query, places = torch.randn(2, 6, 2, 16), torch.randint(0, 9, (3, 6))
    refused((lambda: rope(query, positions=places), ValueError, "positions: expected [axes, batch, seq] or"))  # fmt: skip
    text = torch.randint(0, 9, (2, 6))  # the same on all axes
    assert torch.equal(rope(query, positions=text), rope(query, positions=text.expand(3, 2, 6)))


def test_attention_factor_of_custom_frequencies(device: torch.device) -> None:
    frequencies = pe.RotarySpec(8).frequencies().tolist()
    plain = pe.RotarySpec(8, custom_frequencies=frequencies)
    scaled = pe.RotarySpec(8, custom_frequencies=frequencies, custom_attention_factor=1.25)
    assert "custom_attention_factor" not in json.loads(plain.to_json())
    assert scaled == pe.RotarySpec.from_json(scaled.to_json()) != plain
    assert scaled.attention_factor == 1.25
    assert "custom_attention_factor=1.25" in repr(pe.RotaryEmbedding(scaled))
    query = torch.randn(1, 5, 2, 8, device=device)
    rotated = pe.functional.rotary(query, spec=scaled)
    assert torch.allclose(rotated, 1.25 * pe.functional.rotary(query, spec=plain))
    assert torch.allclose(pe.functional.rotary(rotated, spec=scaled, inverse=True), query, atol=1e-6)
