"""Rotary embedding: prefill, decode, in place, and forward with backward."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from posembed.commands.measure import Case, Goal
from setting import Setting
from torch import Tensor

from cases import floors, peers, rotary_cuda

QUERY_HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
COPY, CLONE = "copy_ into existing memory", "clone"


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
        **floors.copy((query, query_out), (key, key_out)),
        **floors.update(query_out, key_out),
        COPY: lambda: (query_out.copy_(query), key_out.copy_(key)),
        CLONE: lambda: (query.clone(), key.clone()),
    }


def many_tokens(dtype: torch.dtype, allocator: str) -> tuple[Goal, ...]:
    """What a call of thousands of tokens shall reach; fresh memory decides where it is not kept."""
    if allocator == "default":
        return (Goal("posembed", CLONE, 0.95),)
    if allocator == "huge pages":
        return (Goal("posembed", floors.COPY, 0.8),)
    wide = pe.build_info()["instruction_set"] == "avx512"
    times = {
        floors.COPY: 0.9 if wide else 0.8,
        "transformers": 9.0 if wide else 1.0,
        "transformers, compiled": 4.0 if wide else 1.0,
        "complex numbers": (1.2 if dtype == torch.float32 else 5.0) if wide else 1.0,
        **dict.fromkeys(peers.OTHERS, 1.0),
    }
    return tuple(Goal("posembed", other, speed) for other, speed in times.items())


ONE_TOKEN = (
    Goal("posembed", COPY, 0.5),
    Goal("posembed, in place", COPY, 0.5),
    Goal("posembed", "transformers", 5.0),
)


def forward(
    query: Tensor, key: Tensor, compile_peers: bool, goals: tuple[Goal, ...] = ()
) -> Iterator[Case]:
    for interleaved in (False, True):
        rope = pe.RotaryEmbedding(HEAD_DIM, interleaved=interleaved)
        candidates = {
            **copy_of(query, key),
            "posembed": lambda rope=rope: rope(query, key),
            "posembed, in place": lambda rope=rope: rope.rotate_(query, key),
        }
        # A table holds every peer, whatever its pairing: their arithmetic is the same.
        candidates |= {} if interleaved else peers.all_of(query, key, compile_peers)
        pairing = " interleaved" if interleaved else ""
        floor = floors.COPY if floors.COPY in candidates else CLONE
        yield Case(name("forward", query, pairing), candidates, floor, goals)


def backward(query: Tensor, key: Tensor, compile_peers: bool) -> Case:
    leaves = [t.detach().clone().requires_grad_() for t in (query, key)]
    gradients = [torch.randn_like(t) for t in leaves]
    rope = pe.RotaryEmbedding(HEAD_DIM)

    def step(call: peers.Call, of_results: list[Tensor]) -> peers.Call:
        return lambda: torch.autograd.grad(call(), leaves, of_results)

    candidates = {
        "posembed, forward alone": lambda: rope(query, key),
        "posembed": step(lambda: rope(*leaves), gradients),
    }
    transposed = [g.transpose(1, 2) for g in gradients]
    for label, call in peers.transformers(*leaves, compile_peers).items():
        candidates[label] = step(call, transposed)
    for label, call in (peers.complex_form(*leaves) | peers.torchtune(*leaves)).items():
        candidates[label] = step(call, gradients)
    floor = "posembed, forward alone"
    goals = (Goal("posembed", floor, 1 / 2.1),)
    return Case(name("forward and backward", query), candidates, floor, goals)


def cases(setting: Setting) -> Iterator[Case]:
    if setting.device == "cuda":
        yield from rotary_cuda.cases(setting)
        return
    compile_peers = setting.compile_peers
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            goals = many_tokens(dtype, setting.allocator)
            yield from forward(*tensors(4, 2048, dtype, setting.device), compile_peers, goals)
        one = tensors(1, 1, torch.bfloat16, setting.device)
        yield from forward(*one, compile_peers, ONE_TOKEN)
        for seq in (16, 128, 512):
            yield from forward(*tensors(1, seq, torch.bfloat16, setting.device), False)
    for dtype in (torch.bfloat16, torch.float32):
        yield backward(*tensors(4, 2048, dtype, setting.device), compile_peers)
