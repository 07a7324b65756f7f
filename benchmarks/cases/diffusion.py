"""Blocks of diffusers and a model of timm at real sizes, beside themselves patched.

The first label, "transformers", is the program itself.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import Case, Goal
from plan import Plan, plan
from setting import Setting
from torch import Tensor, nn

from cases import peers, transformers

TEXT, PICTURES = 512, (1024, 4096)  # tokens of text, and of pictures of 512 and of 1024 pixels
EXACT = "posembed, exact"  # norms of query and key in the rotation's pass
Made = tuple[nn.Module, dict[str, Any]]
Maker = Callable[[torch.dtype, str], Made]


def angles(tokens: int, width: int, device: str) -> Tensor:
    """Angles of the pairs of each token."""
    inverse = 1.0 / 10000.0 ** (torch.arange(0, width, 2, device=device).float() / width)
    return torch.outer(torch.arange(tokens, device=device).float(), inverse)


def code(name: str) -> Any:
    return importlib.import_module(f"diffusers.models.transformers.transformer_{name}")


def flux(dtype: torch.dtype, device: str, picture: int) -> Made:
    """A block of FLUX.1 whose two streams are one."""
    repeated = angles(TEXT + picture, 128, device).repeat_interleave(2, -1)
    block = code("flux").FluxSingleTransformerBlock(3072, 24, 128)
    return block, {
        "hidden_states": torch.randn(1, picture, 3072, dtype=dtype, device=device),
        "encoder_hidden_states": torch.randn(1, TEXT, 3072, dtype=dtype, device=device),
        "temb": torch.randn(1, 3072, dtype=dtype, device=device),
        "image_rotary_emb": (repeated.cos(), repeated.sin()),
    }


def wan(dtype: torch.dtype, device: str, picture: int) -> Made:
    """A block of Wan 2.1 with 1.3B parameters."""
    repeated = angles(TEXT + picture, 128, device).repeat_interleave(2, -1)[None, :, None]
    block = code("wan").WanTransformerBlock(1536, 8960, 12, cross_attn_norm=True)
    return block, {
        "hidden_states": torch.randn(1, TEXT + picture, 1536, dtype=dtype, device=device),
        "encoder_hidden_states": torch.randn(1, TEXT, 1536, dtype=dtype, device=device),
        "temb": torch.randn(1, 6, 1536, device=device),
        "rotary_emb": (repeated.cos(), repeated.sin()),
    }


def qwen_image(dtype: torch.dtype, device: str, picture: int) -> Made:
    """A block of Qwen-Image."""
    tables = [angles(tokens, 128, device) for tokens in (picture, TEXT)]
    block = code("qwenimage").QwenImageTransformerBlock(3072, 24, 128)
    return block, {
        "hidden_states": torch.randn(1, picture, 3072, dtype=dtype, device=device),
        "encoder_hidden_states": torch.randn(1, TEXT, 3072, dtype=dtype, device=device),
        "encoder_hidden_states_mask": None,
        "temb": torch.randn(1, 3072, dtype=dtype, device=device),
        "image_rotary_emb": tuple(torch.polar(torch.ones_like(x), x) for x in tables),
    }


def dinov3(dtype: torch.dtype, device: str) -> Made:
    """DINOv3 of base size, for a picture of 512 x 512 pixels."""
    timm = importlib.import_module("timm")
    model = timm.create_model("vit_base_patch16_dinov3", img_size=512)
    return model, {"x": torch.randn(1, 3, 512, 512, dtype=dtype, device=device)}


# Package and model.
MODELS: dict[str, tuple[str, Maker]] = {
    f"diffusers: a block of {name}, {TEXT + picture} tokens": (
        "diffusers",
        functools.partial(make, picture=picture),
    )
    for picture in PICTURES
    for name, make in (("Flux", flux), ("Wan 1.3B", wan), ("Qwen-Image", qwen_image))
} | {"timm: DINOv3, base, 1029 tokens": ("timm", dinov3)}


def both(make: Maker, dtype: torch.dtype, device: str) -> dict[str, Callable[[], object]]:
    """Calls of a model and of its patched copies, which share the weights."""
    torch.manual_seed(0)
    model, given = make(dtype, device)

    def call(model: nn.Module) -> Callable[[], object]:
        def run() -> object:
            with torch.inference_mode():
                return model(**given)

        return run

    models = transformers.beside_patched(model.to(device, dtype).eval())
    models[EXACT] = transformers.beside_patched(model, "exact")[transformers.AFTER]
    return {label: call(model) for label, model in models.items()}


def forward(name: str, make: Maker, dtype: torch.dtype, device: str) -> Case:
    goals = tuple(Goal(x, transformers.BEFORE, 1.0) for x in (transformers.AFTER, EXACT))
    return Case(name, both(make, dtype, device), None, goals)


def plans(setting: Setting) -> Iterator[Plan]:
    for model, (package, make) in MODELS.items():
        if peers.installed(package):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"{model}, {str(dtype).removeprefix('torch.')}"
                yield plan(name, forward, make, dtype, setting.device)
