"""Rotations as other projects write them, from their published formulas and in their arithmetic.

Each entry of PROGRAMS has its source, the configuration of a model that runs it, and a program for
``pe.diagnose``. None of them is in the library from which posembed's catalogue was made.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import posembed as pe
import torch
from torch import Tensor

Program = Callable[[Tensor, Tensor], Any]


def series(dim: int, base: float = 1e4) -> Tensor:
    """float32 [dim / 2]."""
    return 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)


def adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1), real arithmetic."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (i, i + dim / 2), real arithmetic."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def by(frequencies: Tensor, turn: Callable[..., Tensor], *, width: int = 0, scale: float = 1.0) -> Program:  # fmt: skip
    """A program with float32 angles, for the first components of a head."""

    def program(x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.outer(positions.float(), frequencies)
        size = width or x.shape[-1]
        turned = turn(x[..., :size], angles.cos() * scale, angles.sin() * scale)
        return torch.cat((turned, x[..., size:]), -1)

    return program


def polar(frequencies: Tensor) -> Program:
    """Complex numbers, as in Meta's and DeepSeek's releases."""

    def program(x: Tensor, positions: Tensor) -> Tensor:
        table = torch.polar(torch.ones(()), torch.outer(positions.float(), frequencies))
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)

    return program


def meta_scaled(frequencies: Tensor, factor: float, length: int) -> Tensor:
    """Llama 3.1's blend over wavelengths, one by one."""
    scaled = []
    for frequency in frequencies.tolist():
        wavelength = 2 * math.pi / frequency
        blend = (length / wavelength - 1.0) / 3.0
        if wavelength < length / 4:
            scaled.append(frequency)
        elif wavelength > length:
            scaled.append(frequency / factor)
        else:
            scaled.append((1 - blend) * frequency / factor + blend * frequency)
    return torch.tensor(scaled)


def mlx_scaled(frequencies: Tensor, factor: float, length: int) -> Tensor:
    """The same with wavelengths instead of frequencies, as arrays."""
    periods = 1 / frequencies
    waves = 2 * math.pi * periods
    slow = torch.where(waves > length, periods * factor, periods)
    smooth = (length / waves - 1) / 3
    middle = (waves > length / 4) & (waves < length)
    return 1 / torch.where(middle, periods / ((1 - smooth) / factor + smooth), slow)


def yarn_limits(dim: int, base: float, length: int) -> tuple[int, int]:
    """The first and the last blended pair."""
    low, high = (dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1))  # fmt: skip
    return max(math.floor(low), 0), min(math.ceil(high), dim - 1)


def mlx_yarn(dim: int, base: float, factor: float, length: int) -> Tensor:
    """The blend of wavelengths as a harmonic mean."""
    low, high = yarn_limits(dim, base, length)
    keep = 1 - ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)
    fast = base ** (torch.arange(0, dim, 2) / dim)
    slow = factor * fast
    return 1 / (slow * fast / (slow * keep + fast * (1 - keep)))


def deepseek_yarn(dim: int, base: float, factor: float, length: int) -> Tensor:
    """The blend of frequencies."""
    low, high = yarn_limits(dim, base, length)
    smooth = 1 - ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    frequencies = series(dim, base)
    return frequencies / factor * (1 - smooth) + frequencies * smooth


def ggml(dim: int, base: float, *, neox: bool, divisors: Tensor | None = None, yarn: tuple[float, int] | None = None) -> Program:  # fmt: skip
    """Angles as a running product, in float32."""

    def program(x: Tensor, positions: Tensor) -> Tensor:
        angle, step = positions.numpy().astype(np.float32), np.float32(base ** (-2.0 / dim))
        angles, scale = [], 1.0
        for pair in range(dim // 2):
            now = angle if divisors is None else angle / np.float32(divisors[pair])
            if yarn is not None:
                low, high = yarn_limits(dim, base, yarn[1])
                ramp = 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
                now = now / np.float32(yarn[0]) * np.float32(1 - ramp) + now * np.float32(ramp)
                scale = 1 + 0.1 * math.log(yarn[0])
            angles.append(now)
            angle = angle * step
        table = np.stack(angles, -1)
        cos, sin = (torch.from_numpy(f(table)) * scale for f in (np.cos, np.sin))
        turned = (halves if neox else adjacent)(x[..., :dim], cos, sin)
        return torch.cat((turned, x[..., dim:]), -1)

    return program


def timescales(dim: int, base: float, divisor: float = 1.0) -> Program:
    """JAX: positions over timescales, in NumPy."""

    def program(x: Tensor, positions: Tensor) -> np.ndarray:
        scale = np.float32(base) ** (2 * np.arange(dim // 2, dtype=np.float32) / dim)
        angles = positions.numpy().astype(np.float32)[:, None] / scale / np.float32(divisor)
        first, second = np.split(x.numpy(), 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    return program


def repeated(dim: int, base: float = 1e4, width: int = 0) -> Program:
    """Tables with each column twice, and a rotated copy of x."""

    def program(x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.einsum("t,f->tf", positions.float(), series(dim, base))
        angles = angles.repeat_interleave(2, -1)
        window = x[..., : width or dim]
        turned = torch.stack((-window[..., 1::2], window[..., ::2]), -1).flatten(-2)
        out = window * angles.cos() + turned * angles.sin()
        return torch.cat((out, x[..., width or dim :]), -1)

    return program


def axial(sizes: list[int], base: float, turn: Callable[..., Tensor], *, double: bool = False, within: bool = False) -> Program:  # fmt: skip
    """Each axis has a part of the head."""

    def program(x: Tensor, positions: Tensor) -> Tensor:
        dtype = torch.float64 if double else torch.float32
        angles = [
            torch.outer(at.to(dtype), base ** -(torch.arange(0, size, 2, dtype=dtype) / size))
            for at, size in zip(positions, sizes, strict=True)
        ]
        if within:
            parts = zip(x.split(sizes, -1), angles, strict=True)
            return torch.cat([turn(part, a.cos(), a.sin()) for part, a in parts], -1)
        table = torch.cat(angles, -1)
        return turn(x, table.cos().to(x.dtype), table.sin().to(x.dtype))

    return program


def matrices(sizes: list[int], base: float) -> Program:
    """Flux: a 2 x 2 matrix for each pair, angles in float64."""

    def program(x: Tensor, positions: Tensor) -> Tensor:
        omegas = [1 / base ** (torch.arange(0, size, 2).double() / size) for size in sizes]
        angles = torch.cat([torch.outer(p.double(), w) for p, w in zip(positions, omegas, strict=True)], -1)  # fmt: skip
        turns = torch.stack((angles.cos(), -angles.sin(), angles.sin(), angles.cos()), -1)
        pairs = x.unflatten(-1, (-1, 2))
        return torch.einsum("tpij,bhtpj->bhtpi", turns.unflatten(-1, (2, 2)).to(x.dtype), pairs).flatten(-2)  # fmt: skip

    return program


def mrope(sections: list[int], base: float, *, in_turns: bool) -> Program:
    """A server's text rotation: a table of half the width for each axis, from which pairs choose."""

    def program(x: Tensor, positions: Tensor) -> Tensor:
        angles = positions.float()[..., None] * series(x.shape[-1], base)
        chosen = angles[0].clone()
        if in_turns:
            for axis in (1, 2):
                places = slice(axis, 3 * sections[axis], 3)
                chosen[:, places] = angles[axis][:, places]
        else:
            parts = angles.split(sections, -1)
            chosen = torch.cat([part[axis] for axis, part in enumerate(parts)], -1)
        return halves(x, chosen.cos(), chosen.sin())

    return program


LLAMA = {"model_type": "llama", "head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072}  # fmt: skip
LLAMA31 = {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}  # fmt: skip
QWEN_YARN = {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}  # fmt: skip
DEEPSEEK = {"model_type": "deepseek_v3", "rope_theta": 10000.0, "max_position_embeddings": 163840, "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}}  # fmt: skip
META = {"dim": 4096, "n_heads": 32, "n_layers": 32, "n_kv_heads": 8, "rope_theta": 5e5}
GPTJ = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64}  # fmt: skip
NEOX = {"model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64, "rotary_pct": 0.25, "rotary_emb_base": 10000, "max_position_embeddings": 2048}  # fmt: skip
GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "max_position_embeddings": 131072}  # fmt: skip
CHATGLM = {"model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 28, "kv_channels": 128, "original_rope": True, "seq_length": 8192}  # fmt: skip
PHI = {"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "partial_rotary_factor": 0.4, "rope_theta": 1e4, "max_position_embeddings": 2048}  # fmt: skip
VL = {"hidden_size": 3584, "num_attention_heads": 28, "rope_theta": 1e6, "max_position_embeddings": 32768}  # fmt: skip
QWEN2_VL = {"model_type": "qwen2_vl", **VL, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}  # fmt: skip
QWEN3_VL = {"model_type": "qwen3_vl_text", "head_dim": 128, **VL, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}}  # fmt: skip
FLUX = {"_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}  # fmt: skip
WAN = {"_class_name": "WanTransformer3DModel", "attention_head_dim": 128}
HUNYUAN = {"_class_name": "HunyuanVideoTransformer3DModel", "attention_head_dim": 128, "rope_axes_dim": [16, 56, 56], "rope_theta": 256.0}  # fmt: skip
COGVIDEO = {"_class_name": "CogVideoXTransformer3DModel", "attention_head_dim": 64, "use_rotary_positional_embeddings": True}  # fmt: skip
ALLEGRO = {"_class_name": "AllegroTransformer3DModel", "attention_head_dim": 96}
Z_IMAGE = {"_class_name": "ZImageTransformer2DModel", "dim": 3840, "n_heads": 30, "axes_dims": [32, 48, 48], "rope_theta": 256.0}  # fmt: skip

YARN_FACTOR = 1 + 0.1 * math.log(4.0)
# Source, configuration, options of diagnose, program.
PROGRAMS: list[tuple[str, Any, dict[str, Any], Program]] = [
    ("mlx, mx.fast.rope(traditional=False)", LLAMA, {}, by(series(128, 5e5), halves)),
    ("mlx-lm, rope_utils.Llama3RoPE", LLAMA31, {}, by(mlx_scaled(series(128, 5e5), 8, 8192), halves)),
    ("mlx-lm, rope_utils.YarnRoPE", QWEN_YARN, {}, by(mlx_yarn(128, 1e6, 4.0, 32768), halves, scale=YARN_FACTOR)),
    ("mlx-lm, gpt_neox: partial", NEOX, {}, by(series(24), halves, width=24)),
    ("Meta, llama-models: complex numbers", META, {}, polar(series(128, 5e5))),
    ("Meta, llama-models: apply_scaling", {**META, "use_scaled_rope": True}, {}, polar(meta_scaled(series(128, 5e5), 8, 8192))),
    ("mistral-inference, rope.py", {"dim": 5120, "n_heads": 32, "n_layers": 40, "head_dim": 128, "n_kv_heads": 8, "rope_theta": 1e6}, {}, polar(series(128, 1e6))),
    ("DeepSeek-V3, inference/model.py: precompute_freqs_cis", DEEPSEEK, {}, polar(deepseek_yarn(64, 1e4, 40, 4096))),
    ("llama.cpp, ggml_rope_ext: Llama 3.1 with rope_freqs", LLAMA31, {}, ggml(128, 5e5, neox=True, divisors=series(128, 5e5) / meta_scaled(series(128, 5e5), 8, 8192))),
    ("llama.cpp, ggml_rope_ext: rope_yarn", QWEN_YARN, {}, ggml(128, 1e6, neox=True, yarn=(4.0, 32768))),
    ("llama.cpp, GGML_ROPE_TYPE_NORMAL: GPT-J", GPTJ, {}, ggml(64, 1e4, neox=False)),
    ("mesh-transformer-jax: rotate_every_two", GPTJ, {}, repeated(64)),
    ("GPT-NeoX, positional_embeddings.py", NEOX, {}, by(series(24), halves, width=24)),
    ("gemma in JAX, apply_rope", {"model_type": "gemma", "head_dim": 256, "max_position_embeddings": 8192}, {}, timescales(256, 1e4)),
    ("gemma 3 in JAX, apply_rope with scale_factor", GEMMA3, {"layer_type": "full_attention"}, timescales(256, 1e6, 8.0)),
    ("gemma 3 in JAX, local layers", GEMMA3, {"layer": 0}, timescales(256, 1e4)),
    ("MaxText, RotaryEmbedding", LLAMA, {}, timescales(128, 5e5)),
    ("ChatGLM2-6B, modeling_chatglm.py", CHATGLM, {}, by(series(64), adjacent, width=64)),
    ("Dao-AILab flash-attention, layers/rotary.py: Phi-2", PHI, {}, by(series(32), halves, width=32)),
    ("RoFormer, repeated sinusoids", {"model_type": "roformer", "hidden_size": 768, "num_attention_heads": 12, "embedding_size": 768, "rotary_value": False}, {}, repeated(64)),
    ("facebookresearch/esm, rotary_embedding.py", {"model_type": "esm", "hidden_size": 640, "num_attention_heads": 20, "position_embedding_type": "rotary"}, {}, by(series(32), halves)),
    ("rotary-embedding-torch, repeated frequencies", pe.RotarySpec(64, interleaved=True), {}, repeated(64)),
    ("torchtune, Llama3ScaledRoPE: a cache of both", pe.RotarySpec.from_huggingface({**META, "use_scaled_rope": True}), {}, by(meta_scaled(series(128, 5e5), 8, 8192), adjacent)),
    ("vLLM, MRotaryEmbedding: Qwen2-VL", QWEN2_VL, {}, mrope([16, 24, 24], 1e6, in_turns=False)),
    ("vLLM, MRotaryEmbedding, interleaved: Qwen3-VL", QWEN3_VL, {}, mrope([24, 20, 20], 1e6, in_turns=True)),
    ("black-forest-labs/flux, math.py", FLUX, {"max_position": 127}, matrices([16, 56, 56], 1e4)),
    ("Wan2.1, rope_apply: complex128", WAN, {}, axial([44, 42, 42], 1e4, adjacent, double=True)),
    ("HunyuanVideo, get_nd_rotary_pos_embed", HUNYUAN, {}, axial([16, 56, 56], 256.0, adjacent)),
    ("CogVideo, Rotary3DPositionEmbeddingMixin", COGVIDEO, {}, axial([16, 24, 24], 1e4, adjacent)),
    ("Allegro, RoPE3D: each third split in halves", ALLEGRO, {}, axial([32, 32, 32], 1e4, halves, within=True)),
    ("diffusers, transformer_z_image.py: RopeEmbedder", Z_IMAGE, {}, axial([32, 48, 48], 256.0, adjacent, double=True)),
    ("timm, pos_embed_sincos.py: EVA-02", pe.RotarySpec.from_preset("eva02"), {}, axial([32, 32], 1e4, adjacent)),
    ("facebookresearch/sam2, compute_axial_cis", pe.RotarySpec.from_preset("sam2"), {}, axial([128, 128], 1e4, adjacent)),
]  # fmt: skip
