"""Rotary embedding: prefill, decode, in place, and forward with backward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import posembed as pe
import torch
from measure import Case, Goal
from plan import Plan, plan
from setting import Setting
from torch import Tensor

from cases import bandwidth_limits, peers

QUERY_HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
COPY, CLONE = "copy_ into existing memory", "clone"


def tensors(batch: int, seq: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    shape = (batch, seq, QUERY_HEADS + KEY_HEADS, HEAD_DIM)
    packed = torch.randn(shape, device=device).to(dtype)
    return packed[:, :, :QUERY_HEADS].contiguous(), packed[:, :, QUERY_HEADS:].contiguous()


def sizes(batch: int, seq: int, dtype: torch.dtype) -> str:
    kind = str(dtype).removeprefix("torch.")
    return f"[{batch},{seq},{QUERY_HEADS}+{KEY_HEADS},{HEAD_DIM}] {kind}"


def copy_of(query: Tensor, key: Tensor) -> dict[str, peers.Call]:
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    return {
        **bandwidth_limits.copy((query, query_out), (key, key_out)),
        **bandwidth_limits.update(query_out, key_out),
        COPY: lambda: (query_out.copy_(query), key_out.copy_(key)),
        CLONE: lambda: (query.clone(), key.clone()),
    }


def many_tokens(dtype: torch.dtype, allocator: str) -> tuple[Goal, ...]:
    """Goals of a call of thousands of tokens; fresh memory decides if none is kept."""
    if allocator == "default":
        return (Goal("posembed", CLONE, 0.95),)
    if allocator == "huge pages":
        return (Goal("posembed", bandwidth_limits.COPY, 0.8),)
    wide = pe.build_info()["instruction_set"] == "avx512"
    times = {
        bandwidth_limits.COPY: 0.9 if wide else 0.8,
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
    name: str,
    size: tuple[int, int, torch.dtype],
    interleaved: bool,
    setting: Setting,
    goals: tuple[Goal, ...],
) -> Case:
    query, key = tensors(*size, setting.device)
    rope = pe.RotaryEmbedding(HEAD_DIM, interleaved=interleaved)
    same_bits = pe.RotaryEmbedding(HEAD_DIM, interleaved=interleaved, numerics="float32")
    heads_first = [t.transpose(1, 2).contiguous() for t in (query, key)]
    rope_heads_first = pe.RotaryEmbedding(HEAD_DIM, interleaved=interleaved, layout="bhsd")
    seq_first = [t.transpose(0, 1).contiguous() for t in (query, key)]
    rope_seq_first = pe.RotaryEmbedding(HEAD_DIM, interleaved=interleaved, layout="sbhd")
    packed = torch.cat((query, key, key), 2)  # with the values, as one projection computes them
    query_of_packed, key_of_packed, _ = packed.split((QUERY_HEADS, KEY_HEADS, KEY_HEADS), 2)
    candidates = {
        **copy_of(query, key),
        "posembed": lambda: rope(query, key),
        "posembed, the bits of transformers": lambda: same_bits(query, key),
        "posembed, views of packed QKV": lambda: rope(query_of_packed, key_of_packed),
        "posembed, bhsd in memory": lambda: rope_heads_first(*heads_first),
        "posembed, sbhd in memory": lambda: rope_seq_first(*seq_first),
        "posembed, in place": lambda: rope.rotate_(query, key),
    }
    # A table holds every peer, whatever its pairing: their arithmetic is the same.
    candidates |= {} if interleaved else peers.all_of(query, key, setting.compile_peers)
    limit = bandwidth_limits.COPY if bandwidth_limits.COPY in candidates else CLONE
    return Case(name, candidates, limit, goals)


def window(
    name: str, size: tuple[int, int, torch.dtype], rotary_dim: int, setting: Setting
) -> Case:
    """Only the first ``rotary_dim`` components of a head are rotated, as in GPT-NeoX and Phi."""
    query, key = tensors(*size, setting.device)
    rope = pe.RotaryEmbedding(HEAD_DIM, rotary_dim=rotary_dim)
    windows = [t[..., :rotary_dim] for t in (query, key)]
    rests = [t[..., rotary_dim:].transpose(1, 2) for t in (query, key)]

    def joined(call: peers.Call) -> peers.Call:
        return lambda: [
            torch.cat((rotated, rest), -1) for rotated, rest in zip(call(), rests, strict=True)
        ]

    candidates = {
        **copy_of(query, key),
        "posembed": lambda: rope(query, key),
        "posembed, in place": lambda: rope.rotate_(query, key),
    }
    for label, call in peers.transformers(*windows, setting.compile_peers).items():
        candidates[label] = joined(call)
    limit = bandwidth_limits.COPY if bandwidth_limits.COPY in candidates else CLONE
    return Case(name, candidates, limit)


def one_head(name: str, batch: int, seq: int, dtype: torch.dtype, setting: Setting) -> Case:
    """A key that all heads share: its angles cost more than its rotation."""
    key = torch.randn(batch, seq, 1, 64, device=setting.device).to(dtype)
    rope = pe.RotaryEmbedding(64)
    positions = torch.arange(seq, device=setting.device).repeat(batch, 1)
    out = torch.empty_like(key)
    candidates = {
        **bandwidth_limits.copy((key, out)),
        CLONE: key.clone,
        "posembed": lambda: rope(key),
        "posembed, positions for each sequence": lambda: rope(key, positions=positions),
        "posembed, in place": lambda: rope.rotate_(key),
    }
    return Case(
        name, candidates, bandwidth_limits.COPY if bandwidth_limits.COPY in candidates else CLONE
    )


def backward(name: str, size: tuple[int, int, torch.dtype], setting: Setting) -> Case:
    query, key = tensors(*size, setting.device)
    leaves = [t.detach().clone().requires_grad_() for t in (query, key)]
    gradients = [torch.randn_like(t) for t in leaves]
    rope = pe.RotaryEmbedding(HEAD_DIM)

    def step(call: peers.Call, of_results: list[Tensor]) -> peers.Call:
        return lambda: torch.autograd.grad(call(), leaves, of_results)

    # Both ways read two sets of tensors in turn; the same one each time would be cached in part.
    sets = itertools.cycle([(query, key), gradients])
    candidates = {
        "posembed, forward alone": lambda: rope(*next(sets)),
        "posembed": step(lambda: rope(*leaves), gradients),
    }
    transposed = [g.transpose(1, 2) for g in gradients]
    for label, call in peers.transformers(*leaves, setting.compile_peers).items():
        candidates[label] = step(call, transposed)
    for label, call in (peers.complex_form(*leaves) | peers.torchtune(*leaves)).items():
        candidates[label] = step(call, gradients)
    limit = "posembed, forward alone"
    goals = (Goal("posembed", limit, 1 / 2.1),)
    return Case(name, candidates, limit, goals)


def packed_backward(name: str, size: tuple[int, int, torch.dtype], setting: Setting) -> Case:
    """The gradient of a packed projection from those of query, key and value."""
    batch, seq, dtype = size
    counts = (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    shape = (batch, seq, sum(counts) * HEAD_DIM)
    qkv = torch.randn(shape, device=setting.device).to(dtype).requires_grad_()
    rope = pe.RotaryEmbedding(HEAD_DIM, heads=QUERY_HEADS, key_heads=KEY_HEADS)
    gradients = [torch.randn_like(x) for x in rope.rotate_packed(qkv.detach())]

    def separate(rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        query, key, value = qkv.unflatten(-1, (-1, HEAD_DIM)).split(counts, 2)
        return [*rotate(query, key), value]

    def step(results: Sequence[Tensor]) -> peers.Call:
        return lambda: torch.autograd.grad(results, qkv, gradients, retain_graph=True)

    joined = "posembed, three tensors that torch joins"
    with torch.enable_grad():
        candidates = {
            "posembed": step(rope.rotate_packed(qkv)),
            "posembed, groups": step(rope.rotate_packed(qkv, order="groups")),
            joined: step(separate(rope)),
        }
    out = torch.empty_like(qkv)
    candidates |= bandwidth_limits.copy((qkv.detach(), out))
    return Case(name, candidates, joined, (Goal("posembed", joined, 2.0),))


def forwards(
    size: tuple[int, int, torch.dtype], setting: Setting, goals: tuple[Goal, ...] = ()
) -> Iterator[Plan]:
    """In both pairings."""
    name = f"rotary forward {sizes(*size)}"
    yield plan(name, forward, size, False, setting, goals)
    yield plan(f"{name} interleaved", forward, size, True, setting, goals)


def plans(setting: Setting) -> Iterator[Plan]:
    bfloat16, float32 = torch.bfloat16, torch.float32
    eager = dataclasses.replace(setting, compile_peers=False)
    with torch.no_grad():
        for dtype in (bfloat16, float32):
            goals = many_tokens(dtype, setting.allocator)
            size = (4, 2048, dtype)
            yield from forwards(size, setting, goals)
            for dim in (64, 32):
                title = f"rotary forward {sizes(*size)}, {dim} rotated"
                yield plan(title, window, size, dim, eager)
        yield from forwards((1, 1, bfloat16), setting, ONE_TOKEN)
        for seq in (16, 128, 512):
            yield from forwards((1, seq, bfloat16), eager)
        for dtype in (bfloat16, float32):
            kind = str(dtype).removeprefix("torch.")
            for seq in (2048, 32768):
                title = f"rotary forward [8,{seq},1,64] {kind}"
                yield plan(title, one_head, 8, seq, dtype, setting)
    for dtype in (bfloat16, float32):
        size = (4, 2048, dtype)
        yield plan(f"rotary forward and backward {sizes(*size)}", backward, size, setting)
        size = (1, 2048, dtype)
        title = f"rotary packed backward {sizes(*size)}".replace("+8,", "+8+8,")
        yield plan(title, packed_backward, size, setting)
