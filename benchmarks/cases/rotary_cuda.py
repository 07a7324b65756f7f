"""Rotary embedding on CUDA: prefill against a device copy, decode as servers replay it."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from plan import Plan, plan
from posembed.commands.measure import Case, Goal, Limit
from setting import Setting
from torch import Tensor

from cases import peers

QUERY_HEADS, KEY_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
COPY = "copy_ into existing memory"
CALLS_IN_GRAPH = 100

# Microseconds that one replayed call may take.
DECODE = {1: 1.05, 8: 1.05, 32: 1.05, 128: 1.5, 256: 2.1}


def tensors(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    where = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(batch, seq, QUERY_HEADS, HEAD_DIM, **where)
    return query, torch.randn(batch, seq, KEY_HEADS, HEAD_DIM, **where)


def title(what: str, batch: int, seq: int) -> str:
    return f"rotary {what} [{batch},{seq},{QUERY_HEADS}+{KEY_HEADS},{HEAD_DIM}] bfloat16"


def graphed(call: peers.Call) -> peers.Call:
    """Replays a CUDA graph of `call`, many times over: launches from Python cost more than it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # compiles outside the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_IN_GRAPH):
            call()
    return graph.replay


def prefill(name: str, batch: int, seq: int, compile_peers: bool) -> Case:
    query, key = tensors(batch, seq)
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    rope = pe.RotaryEmbedding(HEAD_DIM)
    candidates: dict[str, peers.Call] = {
        COPY: lambda: (query_out.copy_(query), key_out.copy_(key)),
        "posembed": lambda: rope(query, key),
        "posembed, in place": lambda: rope.rotate_(query, key),
        **peers.triton(query, key),
        **peers.all_of(query, key, compile_peers),
    }
    return Case(name, candidates, COPY, (Goal("posembed", COPY, 0.975),))


def backward(name: str, batch: int, seq: int) -> Case:
    query, key = tensors(batch, seq)
    leaves = [t.detach().requires_grad_() for t in (query, key)]
    gradients = [torch.randn_like(t) for t in leaves]
    rope = pe.RotaryEmbedding(HEAD_DIM)
    results = rope(*leaves)

    def back() -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, leaves, gradients, retain_graph=True)

    forward = "posembed, forward"
    candidates = {forward: lambda: rope(query, key), "posembed": back}
    return Case(name, candidates, forward, (Goal("posembed", forward, 0.97),))


def decode(name: str, tokens: int, compile_peers: bool) -> Case:
    query, key = tensors(tokens, 1)
    rope = pe.RotaryEmbedding(HEAD_DIM)
    calls: dict[str, peers.Call] = {
        "posembed": lambda: rope.rotate_(query, key),
        **peers.triton(query, key),
        **peers.transformers(query, key, compile_peers),
    }
    return Case(
        name,
        {label: graphed(call) for label, call in calls.items()},
        limit=Limit("posembed", DECODE[tokens] * 1e-6),
        repeats=CALLS_IN_GRAPH,
    )


def cached(name: str, batch: int, seq: int) -> Case:
    """Query in place, key and value into pages in any order, beside a copy of query and key."""
    query, key = (t.flatten(0, 1) for t in tensors(batch, seq))
    value, tokens = torch.randn_like(key), batch * seq
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    caches = torch.zeros(2, tokens // PAGE, PAGE, KEY_HEADS, HEAD_DIM).to(key)
    slots, spec = torch.randperm(tokens, device="cuda"), pe.RotarySpec(HEAD_DIM)
    rows = caches.flatten(1, 2)
    positions = torch.arange(seq, device="cuda").repeat(batch)

    def apart() -> None:
        pe.functional.rotary_(query, key, positions, spec=spec, layout="thd")
        rows[0].index_copy_(0, slots, key)
        rows[1].index_copy_(0, slots, value)

    candidates: dict[str, peers.Call] = {
        COPY: lambda: (query_out.copy_(query), key_out.copy_(key)),
        "posembed": lambda: pe.functional.rotary_cache_(
            query, key, value, caches[0], caches[1], slots, positions, spec=spec
        ),
        "rotary_, then index_copy_": apart,
    }
    return Case(name, candidates, COPY, (Goal("posembed", COPY, 1 / 1.25),))


def plans(setting: Setting) -> Iterator[Plan]:
    with torch.no_grad():
        yield plan(title("forward", 4, 8192), prefill, 4, 8192, setting.compile_peers)
        for tokens in DECODE:
            yield plan(title("decode", tokens, 1), decode, tokens, setting.compile_peers)
        yield plan(title("with the paged cache", 4, 8192), cached, 4, 8192)
    yield plan(title("backward", 4, 8192), backward, 4, 8192)
