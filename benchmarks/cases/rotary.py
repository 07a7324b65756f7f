"""Rotary embedding: prefill, decode, in place, and forward with backward."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from posembed.commands.measure import Case
from torch import Tensor

from cases import peers

QUERY_HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128


def tensors(batch: int, seq: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    shape = (batch, seq, QUERY_HEADS + KEY_HEADS, HEAD_DIM)
    packed = torch.randn(shape, device=device).to(dtype)
    return packed[:, :, :QUERY_HEADS].contiguous(), packed[:, :, QUERY_HEADS:].contiguous()


def name(what: str, query: Tensor, pairing: str = "") -> str:
    kind = str(query.dtype).removeprefix("torch.")
    batch, seq = query.shape[:2]
    return f"rotary {what} [{batch},{seq},{QUERY_HEADS}+{KEY_HEADS},{HEAD_DIM}] {kind}{pairing}"


def copy_of(query: Tensor, key: Tensor) -> dict[str, peers.Call]:
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    return {
        "copy_ into existing memory": lambda: (query_out.copy_(query), key_out.copy_(key)),
        "clone": lambda: (query.clone(), key.clone()),
    }


def forward(query: Tensor, key: Tensor, compile_peers: bool) -> Iterator[Case]:
    for interleaved in (False, True):
        rope = pe.RotaryEmbedding(HEAD_DIM, interleaved=interleaved)
        candidates = {
            **copy_of(query, key),
            "posembed": lambda rope=rope: rope(query, key),
            "posembed, in place": lambda rope=rope: rope.rotate_(query, key),
        }
        if not interleaved:
            candidates |= peers.all_of(query, key, compile_peers)
        pairing = " interleaved" if interleaved else ""
        yield Case(name("forward", query, pairing), candidates, "clone")


def backward(query: Tensor, key: Tensor, compile_peers: bool) -> Case:
    leaves = [t.detach().clone().requires_grad_() for t in (query, key)]
    gradients = [torch.randn_like(t) for t in leaves]
    rope = pe.RotaryEmbedding(HEAD_DIM)

    def step(call) -> None:
        torch.autograd.grad(call(), leaves, gradients)

    candidates = {
        "posembed, forward alone": lambda: rope(query, key),
        "posembed": lambda: step(lambda: rope(*leaves)),
    }
    gradients_back = [g.transpose(1, 2) for g in gradients]
    for label, call in peers.transformers(*leaves, compile_peers).items():
        candidates[label] = lambda call=call: torch.autograd.grad(call(), leaves, gradients_back)
    return Case(name("forward and backward", query), candidates, "posembed, forward alone")


def cases(device: str, compile_peers: bool) -> Iterator[Case]:
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            yield from forward(*tensors(4, 2048, dtype, device), compile_peers)
        for seq in (1, 128):
            yield from forward(*tensors(1, seq, torch.bfloat16, device), compile_peers)
    for dtype in (torch.bfloat16, torch.float32):
        yield backward(*tensors(4, 2048, dtype, device), compile_peers)
