"""Rotary embeddings of other installed libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]

# Package names for pip.
PACKAGES = ("transformers", "torchtune", "rotary-embedding-torch", "torchembed")

# Labels of peers without their own goal.
OTHERS = ("torchtune", "rotary-embedding-torch", "torchembed (key repeated)")


def imported(module: str) -> Any:
    """A module, or None if it or a suitable version of its requirements is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def installed(package: str) -> bool:
    """Whether it can be imported."""
    return imported(package) is not None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function into one graph for static shapes."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def transformers_tables(head_dim: int, seq: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines as in transformers: float32 angles, cast to the model's dtype."""
    inverse = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2, device=like.device).float() / head_dim)
    angles = torch.outer(torch.arange(seq, device=like.device).float(), inverse)
    angles = torch.cat((angles, angles), -1).unsqueeze(0)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def transformers(query: Tensor, key: Tensor, compile_peers: bool) -> dict[str, Call]:
    """Llama's rotation of [batch, heads, seq, head_dim] views, with precomputed tables."""
    module = imported("transformers.models.llama.modeling_llama")
    if module is None:
        return {}
    apply_rotary_pos_emb = module.apply_rotary_pos_emb
    cos, sin = transformers_tables(query.shape[-1], query.shape[1], query)
    q, k = query.transpose(1, 2), key.transpose(1, 2)
    calls: dict[str, Call] = {"transformers": lambda: apply_rotary_pos_emb(q, k, cos, sin)}
    if compile_peers:
        fast = compiled(apply_rotary_pos_emb)
        calls["transformers, compiled"] = lambda: fast(q, k, cos, sin)
    return calls


def complex_form(query: Tensor, key: Tensor) -> dict[str, Call]:
    """Meta's form: pairs as complex numbers, in float32."""
    half = query.shape[-1] // 2
    angles = torch.outer(
        torch.arange(query.shape[1], device=query.device).float(),
        10000.0 ** (-torch.arange(half, device=query.device) / half),
    )
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # type: ignore[no-untyped-call]
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)

    return {"complex numbers": lambda: (rotate(query), rotate(key))}


def torchtune(query: Tensor, key: Tensor) -> dict[str, Call]:
    """A module for query and one for key, with a precomputed table."""
    module = imported("torchtune.modules")
    if module is None:
        return {}
    rope = module.RotaryPositionalEmbeddings(query.shape[-1], max_seq_len=query.shape[1])
    rope = rope.to(query.device)
    return {"torchtune": lambda: (rope(query), rope(key))}


def rotary_embedding_torch(query: Tensor, key: Tensor) -> dict[str, Call]:
    """Query and key in two calls."""
    module = imported("rotary_embedding_torch")
    if module is None:
        return {}
    rope = module.RotaryEmbedding(query.shape[-1], seq_before_head_dim=True).to(query.device)
    rotate = torch.no_grad()(rope.rotate_queries_or_keys)
    return {"rotary-embedding-torch": lambda: (rotate(query), rotate(key))}


def torchembed(query: Tensor, key: Tensor) -> dict[str, Call]:
    """Query and key in one call."""
    module = imported("torchembed")
    if module is None:
        return {}
    rope = module.RotaryEmbedding(query.shape[-1], max_seq_len=query.shape[1]).to(query.device)
    q, k = query.transpose(1, 2), key.transpose(1, 2)
    repeats = q.shape[1] // k.shape[1]
    wide = k.repeat_interleave(repeats, 1)  # it needs as many key heads as query heads
    return {"torchembed (key repeated)": lambda: rope(q, wide)}


def all_of(query: Tensor, key: Tensor, compile_peers: bool = False) -> dict[str, Call]:
    """All installed peers, by label."""
    return {
        **transformers(query, key, compile_peers),
        **complex_form(query, key),
        **torchtune(query, key),
        **rotary_embedding_torch(query, key),
        **torchembed(query, key),
    }
