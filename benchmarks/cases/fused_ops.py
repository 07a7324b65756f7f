"""Operators fused with a rotation: RMSNorm of each head, and the write into a paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from measure import Case, Goal
from plan import Plan, plan
from setting import Setting
from torch import Tensor

from cases import bandwidth_limits, peers

QUERY_HEADS, KEY_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
LATENT_HEADS, LATENT, ROPE = 32, 512, 64


def shape(batch: int, seq: int, heads: int) -> tuple[int, ...]:
    return (batch, seq, heads, HEAD_DIM)


def text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def transformers_norm(query: Tensor, key: Tensor, weight: Tensor) -> dict[str, peers.Call]:
    """Qwen 3's attention up to the scores."""
    if not peers.installed("transformers"):
        return {}
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    norm = Qwen3RMSNorm(HEAD_DIM).to(query)
    norm.weight.data.copy_(weight)
    cos, sin = peers.transformers_tables(HEAD_DIM, query.shape[1], query)
    return {
        "transformers": lambda: apply_rotary_pos_emb(
            norm(query).transpose(1, 2), norm(key).transpose(1, 2), cos, sin
        )
    }


def normed(name: str, batch: int, seq: int, dtype: torch.dtype, device: str) -> Case:
    where = {"device": device, "dtype": dtype}
    query = torch.randn(shape(batch, seq, QUERY_HEADS), **where)
    key = torch.randn(shape(batch, seq, KEY_HEADS), **where)
    # Of absolute value 1: smaller ones would make denormals of what is normed in place repeatedly.
    weight = torch.randn(HEAD_DIM, **where).sign()
    spec, apart = pe.RotarySpec(HEAD_DIM), torch.nn.functional.rms_norm
    functional = pe.functional
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key)]

    def unfused() -> object:
        width = (HEAD_DIM,)
        normed_query, normed_key = apart(query, width, weight), apart(key, width, weight)
        return functional.rotary(normed_query, normed_key, spec=spec)

    def in_place() -> None:
        functional.norm_rotary_(query, key, weight, weight, spec=spec)

    return Case(
        name,
        {
            **bandwidth_limits.update(query, key),
            "posembed": lambda: functional.norm_rotary(query, key, weight, weight, spec=spec),
            "posembed, bhsd in memory": lambda: functional.norm_rotary(
                *heads_first, weight, weight, spec=spec
            ),
            "posembed, in place": in_place,
            "rms_norm, then posembed": unfused,
            **transformers_norm(query, key, weight),
        },
        "rms_norm, then posembed",
        (Goal("posembed", "rms_norm, then posembed", 1.0), Goal("posembed", "transformers", 1.0)),
    )


def normed_both_ways(name: str, batch: int, seq: int, dtype: torch.dtype, device: str) -> Case:
    where = {"device": device, "dtype": dtype}
    query = torch.randn(shape(batch, seq, QUERY_HEADS), **where, requires_grad=True)
    key = torch.randn(shape(batch, seq, KEY_HEADS), **where, requires_grad=True)
    weights = [torch.randn(HEAD_DIM, **where, requires_grad=True) for _ in range(2)]
    gradients = [torch.randn_like(tensor) for tensor in (query, key)]
    leaves, spec, apart = [query, key, *weights], pe.RotarySpec(HEAD_DIM), "rms_norm, then posembed"

    def fused() -> object:
        results = pe.functional.norm_rotary(query, key, *weights, spec=spec)
        return torch.autograd.grad(results, leaves, gradients)

    def unfused() -> object:
        width, norm = (HEAD_DIM,), torch.nn.functional.rms_norm
        normed = (norm(t, width, w) for t, w in zip((query, key), weights, strict=True))
        results = pe.functional.rotary(*normed, spec=spec)
        return torch.autograd.grad(results, leaves, gradients)

    candidates = {"posembed": fused, apart: unfused}
    return Case(name, candidates, apart, (Goal("posembed", apart, 1.0),))


def cached(name: str, tokens: int, dtype: torch.dtype, kept: torch.dtype, device: str) -> Case:
    where = {"device": device, "dtype": dtype}
    query = torch.randn(tokens, QUERY_HEADS, HEAD_DIM, **where)
    key, value = torch.randn(2, tokens, KEY_HEADS, HEAD_DIM, **where).unbind()
    pages = (tokens + PAGE - 1) // PAGE + 1
    caches = torch.zeros(2, pages, PAGE, KEY_HEADS, HEAD_DIM, device=device).to(kept)
    slots = torch.randperm(pages * PAGE, device=device)[:tokens]
    spec, rows = pe.RotarySpec(HEAD_DIM), caches.flatten(1, 2)
    copies = [torch.empty_like(t) for t in (query, key, value)]

    def copy() -> None:
        for target, source in zip(copies, (query, key, value), strict=True):
            target.copy_(source)

    def apart() -> None:
        pe.functional.rotary_(query, key, spec=spec, layout="thd")
        rows[0].index_copy_(0, slots, key.to(kept))
        rows[1].index_copy_(0, slots, value.to(kept))

    candidates = {
        "copy_ of the same bytes": copy,
        "posembed": lambda: pe.functional.rotary_cache_(
            query, key, value, caches[0], caches[1], slots, spec=spec
        ),
    }
    if kept == dtype:
        candidates["rotary_, then index_copy_"] = apart
    return Case(
        name,
        candidates,
        "copy_ of the same bytes",
        (Goal("posembed", "rotary_, then index_copy_", 1.0),),
    )


def latent(name: str, tokens: int, dtype: torch.dtype, device: str) -> Case:
    """Multi-head latent attention as in DeepSeek-V3, of a quarter of its heads."""
    where = {"device": device, "dtype": dtype}
    query = torch.randn(tokens, LATENT_HEADS, 128 + ROPE, **where)
    kept, key_rope = torch.randn(tokens, LATENT, **where), torch.randn(tokens, ROPE, **where)
    pages = (tokens + PAGE - 1) // PAGE + 1
    cache = torch.zeros(pages, PAGE, LATENT + ROPE, **where)
    slots = torch.randperm(pages * PAGE, device=device)[:tokens]
    spec = pe.RotarySpec(128 + ROPE, rotary_dim=ROPE, rotary_start=128, interleaved=True)
    window = pe.RotarySpec(ROPE, interleaved=True)
    rows, functional = cache.flatten(0, 1), pe.functional

    def apart() -> None:
        functional.rotary_(query[..., 128:], key_rope[:, None], spec=window, layout="thd")
        rows[:, :LATENT].index_copy_(0, slots, kept)
        rows[:, LATENT:].index_copy_(0, slots, key_rope)

    options = {"spec": spec, "layout": "thd"}
    ours, unfused = "posembed", "rotary_, then index_copy_"
    candidates = {
        **bandwidth_limits.update(query),
        ours: lambda: functional.mla_rotary_cache_(query, kept, key_rope, cache, slots, **options),
        unfused: apart,
    }
    return Case(name, candidates, unfused, (Goal(ours, unfused, 1.0),))


def plans(setting: Setting) -> Iterator[Plan]:
    device, bfloat16 = setting.device, torch.bfloat16
    with torch.no_grad():
        for batch, seq, dtype in ((4, 2048, bfloat16), (4, 2048, torch.float32), (1, 1, bfloat16)):
            sizes = f"[{batch},{seq},{QUERY_HEADS}+{KEY_HEADS},{HEAD_DIM}] {text(dtype)}"
            yield plan(f"rotary with RMSNorm {sizes}", normed, batch, seq, dtype, device)
        for tokens, dtype, kept in (
            (8192, bfloat16, bfloat16),
            (8192, bfloat16, torch.float8_e4m3fn),
            (8192, torch.float32, torch.float32),
            (1, bfloat16, bfloat16),
        ):
            sizes = f"[{tokens},{QUERY_HEADS}+2*{KEY_HEADS},{HEAD_DIM}]"
            name = f"rotary with the paged cache {sizes} {text(dtype)} into {text(kept)}"
            yield plan(name, cached, tokens, dtype, kept, device)
        for tokens, dtype in ((4096, bfloat16), (4096, torch.float32), (1, bfloat16)):
            sizes = f"[{tokens},{LATENT_HEADS},128+{ROPE}] + {LATENT}"
            name = f"rotary with the latent cache {sizes} {text(dtype)}"
            yield plan(name, latent, tokens, dtype, device)
    for dtype in (bfloat16, torch.float32):
        sizes = f"[4,2048,{QUERY_HEADS}+{KEY_HEADS},{HEAD_DIM}] {text(dtype)}"
        name = f"rotary with RMSNorm, forward and backward {sizes}"
        yield plan(name, normed_both_ways, 4, 2048, dtype, device)
