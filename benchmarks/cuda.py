"""Times CUDA kernels: each case beside a device copy of the same bytes and beside peers.

Calls are replayed from CUDA graphs, so that launches from Python do not count, on buffers that
take turns and together exceed the L2 cache several times.

python benchmarks/cuda.py --table results.md            every case
python benchmarks/cuda.py --case "rotary"               cases whose name contains "rotary"
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import posembed as pe
from cases import peers, transformers

Call = Callable[[], Any]
ROUNDS = 9
SECONDS = 2e-3  # the least length of a timing

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


@dataclasses.dataclass
class Case:
    """Calls that do the same on the same buffers, by label.

    Attributes:
        moved: Bytes that the call must read and write; 0: no copy stands beside it.
        make: Gives the candidates one set of buffers.
        graph: Whether calls are replayed from a graph; backward passes run as autograd runs them.
    """

    name: str
    moved: int
    make: Callable[[], dict[str, Call]]
    graph: bool = True


def randn(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, **{**BF16, **options})


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def gradient(forward: Call, leaves: list[Tensor]) -> Call:
    """The backward pass alone."""
    outputs = forward()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = 64  # a graph for every case
    return torch.compile(function, fullgraph=True, dynamic=False)


def rotate_half(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers writes it, for [batch, seq, heads, head_dim]."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turned(query), turned(key)


def angle_tables(seq: int, dim: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device="cuda") / dim)
    angles = torch.outer(torch.arange(seq, device="cuda"), frequencies).repeat(1, 2)[:, None]
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def rotary(batch: int, seq: int, **spec: Any) -> Case:
    def make() -> dict[str, Call]:
        query, key = randn(batch, seq, 32, 128), randn(batch, seq, 8, 128)
        rotation = pe.RotarySpec(128, **spec)
        tables = angle_tables(seq, 128)
        given = [table.squeeze(1)[None] for table in tables]  # as models pass them on
        options = {"unsqueeze_dim": 2, "interleaved": bool(spec)}
        return {
            "posembed": lambda: pe.functional.rotary(query, key, spec=rotation),
            "posembed, in place": lambda: pe.functional.rotary_(query, key, spec=rotation),
            "posembed, given tables": lambda: pe.functional.rotary_tables(
                query, key, *given, **options
            ),
            "torch": lambda: rotate_half(query, key, *tables),
            "torch.compile": lambda: compiled(rotate_half)(query, key, *tables),
        }

    kind = "interleaved" if spec else "half"
    return Case(f"rotary {kind} [{batch},{seq},32+8,128]", 2 * 2 * batch * seq * 40 * 128, make)


def rotary_backward(batch: int, seq: int) -> Case:
    def make() -> dict[str, Call]:
        leaves = [randn(batch, seq, heads, 128).requires_grad_() for heads in (32, 8)]
        spec, tables = pe.RotarySpec(128), angle_tables(seq, 128)
        return {
            "posembed": gradient(lambda: pe.functional.rotary(*leaves, spec=spec), leaves),
            "torch.compile": gradient(lambda: compiled(rotate_half)(*leaves, *tables), leaves),
        }

    moved = 2 * 2 * batch * seq * 40 * 128
    return Case(f"rotary backward [{batch},{seq},32+8,128]", moved, make, graph=False)


def learned_frequencies(batch: int, seq: int) -> Case:
    def make() -> dict[str, Call]:
        rope = pe.RotaryEmbedding(128, learned_frequencies=True, device="cuda")
        leaves = [randn(batch, seq, heads, 128).requires_grad_() for heads in (32, 8)]
        return {"posembed": gradient(lambda: rope(*leaves), [*leaves, *rope.parameters()])}

    moved = 3 * 2 * batch * seq * 40 * 128
    return Case(
        f"rotary backward, learned frequencies [{batch},{seq},32+8,128]", moved, make, False
    )


def norm_rotary(batch: int, seq: int, backward: bool) -> Case:
    def make() -> dict[str, Call]:
        leaves = [randn(batch, seq, heads, 128) for heads in (32, 8)]
        leaves += [randn(128), randn(128)]
        spec, tables = pe.RotarySpec(128), angle_tables(seq, 128)

        def ours() -> Any:
            return pe.functional.norm_rotary(*leaves, spec=spec)

        def theirs() -> Any:
            return compiled(torch_norm_rotary)(*leaves, *tables)

        if backward:
            leaves[:] = [leaf.requires_grad_() for leaf in leaves]
            return {"posembed": gradient(ours, leaves), "torch.compile": gradient(theirs, leaves)}
        return {"posembed": ours, "torch.compile": theirs}

    moved = (3 if backward else 2) * 2 * batch * seq * 40 * 128
    what = "norm_rotary backward" if backward else "norm_rotary"
    return Case(f"{what} [{batch},{seq},32+8,128]", moved, make, not backward)


def torch_norm_rotary(
    query: Tensor, key: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return rotate_half(
        F.rms_norm(query, (128,), wq, 1e-6), F.rms_norm(key, (128,), wk, 1e-6), cos, sin
    )


def rotary_cache(tokens: int, dtype: torch.dtype) -> Case:
    def make() -> dict[str, Call]:
        query, key, value = randn(tokens, 32, 128), randn(tokens, 8, 128), randn(tokens, 8, 128)
        caches = torch.zeros(2, tokens // 16, 16, 8, 128, **BF16).to(dtype)
        slots, spec = torch.randperm(tokens, device="cuda"), pe.RotarySpec(128)
        positions = torch.arange(tokens, device="cuda")
        rows, tables = caches.flatten(1, 2), angle_tables(tokens, 128)

        def torch_cache() -> None:
            rotated, keys = rotate_half(query, key, *tables)
            query.copy_(rotated)
            rows[0].index_copy_(0, slots, keys)
            rows[1].index_copy_(0, slots, value)

        calls: dict[str, Call] = {
            "posembed": lambda: pe.functional.rotary_cache_(
                query, key, value, *caches, slots, positions, spec=spec
            )
        }
        if dtype == torch.bfloat16:
            calls["torch"] = torch_cache
        return calls

    moved = tokens * 128 * (2 * 2 * 32 + (2 + dtype.itemsize) * 16)
    return Case(f"rotary_cache_ [{tokens},32+8,128] into {str(dtype)[6:]}", moved, make)


def mla(tokens: int) -> Case:
    def make() -> dict[str, Call]:
        query, key = randn(1, tokens, 128, 192), randn(1, tokens, 64)
        spec = pe.RotarySpec(192, rotary_dim=64, rotary_start=128, interleaved=True)
        return {"posembed": lambda: pe.functional.mla_rotary(query, key, spec=spec)}

    return Case(f"mla_rotary [1,{tokens},128,192]", 2 * 2 * tokens * (128 * 192 + 64), make)


def embedding(vocabulary: int, dim: int, tokens: int) -> Case:
    def make() -> dict[str, Call]:
        weight, ids = randn(vocabulary, dim), torch.randint(vocabulary, (tokens,), device="cuda")
        return {
            "posembed": lambda: pe.functional.embedding(ids, weight),
            "F.embedding": lambda: F.embedding(ids, weight),
        }

    return Case(f"embedding {vocabulary} x {dim}, {tokens} ids", 2 * 2 * tokens * dim, make)


def embedding_backward(vocabulary: int, dim: int, tokens: int, kind: str) -> Case:
    def make() -> dict[str, Call]:
        incoming, ids = randn(tokens, dim), torch.randint(vocabulary, (tokens,), device="cuda")
        if kind == "rows":
            return {
                "posembed": lambda: torch.ops.posembed.embedding_backward_rows(
                    incoming, vocabulary, ids
                ),
                "torch, sparse and coalesced": lambda: torch.ops.aten.embedding_sparse_backward(
                    incoming, ids, vocabulary, -1, False
                ).coalesce(),
            }
        return {
            "posembed": lambda: torch.ops.posembed.embedding_backward(incoming, vocabulary, ids),
            "torch": lambda: torch.ops.aten.embedding_dense_backward(
                incoming, ids, vocabulary, -1, False
            ),
        }

    moved = 2 * tokens * dim + 2 * (vocabulary if kind == "dense" else tokens) * dim
    name = f"embedding backward, {kind}, {vocabulary} x {dim}, {tokens} ids"
    return Case(name, moved, make, graph=False)


def bag(dim: int, dtype: torch.dtype) -> Case:
    bags, length, vocabulary = 8192, 64, 1_000_000

    def make() -> dict[str, Call]:
        weight = randn(vocabulary, dim, dtype=dtype)
        ids = torch.randint(vocabulary, (bags, length), device="cuda")
        return {
            "posembed": lambda: pe.functional.token_bag(ids, weight),
            "F.embedding_bag": lambda: F.embedding_bag(ids, weight, mode="sum"),
        }

    moved = (bags * length + bags) * dim * dtype.itemsize
    name = f"token_bag sum {vocabulary} x {dim} {str(dtype)[6:]}, {bags} bags of {length}"
    return Case(name, moved, make)


def learned(batch: int, seq: int, dim: int) -> Case:
    def make() -> dict[str, Call]:
        x, weight = randn(batch, seq, dim), randn(seq, dim)
        return {
            "posembed": lambda: pe.functional.learned_add(x, weight),
            "torch": lambda: x + weight,
        }

    return Case(f"learned_add [{batch},{seq},{dim}]", 2 * dim * seq * (2 * batch + 1), make)


def sinusoidal(batch: int, seq: int, dim: int) -> Case:
    def make() -> dict[str, Call]:
        x, table, spec = randn(batch, seq, dim), randn(seq, dim), pe.SinusoidalSpec(dim)
        return {
            "posembed": lambda: pe.functional.sinusoidal(x, spec=spec),
            "torch, from a table": lambda: x + table,
        }

    return Case(f"sinusoidal [{batch},{seq},{dim}]", 2 * 2 * dim * seq * batch, make)


def torch_input(
    ids: Tensor, token: Tensor, position: Tensor, kinds: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    rows = F.embedding(ids, token) + position + kinds[0]
    return F.layer_norm(rows, rows.shape[-1:], weight, bias, 1e-12)


def input_embedding(batch: int, seq: int, dim: int, backward: bool) -> Case:
    def make() -> dict[str, Call]:
        tables = [randn(30522, dim), randn(seq, dim), randn(2, dim), randn(dim), randn(dim)]
        ids = torch.randint(30522, (batch, seq), device="cuda")

        def ours() -> Tensor:
            token, position, kinds, weight, bias = tables
            return pe.functional.input_embedding(
                ids,
                token,
                position,
                token_type=kinds,
                norm_weight=weight,
                norm_bias=bias,
                norm="layer",
                eps=1e-12,
            )

        calls: dict[str, Call] = {
            "posembed": ours,
            "torch": lambda: torch_input(ids, *tables),
            "torch.compile": lambda: compiled(torch_input)(ids, *tables),
        }
        if not backward:
            return calls
        tables[:] = [table.requires_grad_() for table in tables]
        return {label: gradient(call, tables) for label, call in calls.items()}

    rows = batch * seq * dim * 2
    moved = 2 * rows + 30522 * dim * 2 if backward else 2 * rows
    what = "input_embedding backward" if backward else "input_embedding"
    return Case(f"{what}, BERT [{batch},{seq},{dim}]", moved, make, not backward)


def input_sinusoids(batch: int, seq: int, dim: int) -> Case:
    def make() -> dict[str, Call]:
        token, spec = randn(32000, dim), pe.SinusoidalSpec(dim)
        ids = torch.randint(32000, (batch, seq), device="cuda")
        table = randn(seq, dim)
        return {
            "posembed": lambda: pe.functional.input_embedding(
                ids, token, sinusoid=spec, scale=math.sqrt(dim)
            ),
            "torch, from a table": lambda: F.embedding(ids, token) * math.sqrt(dim) + table,
        }

    return Case(f"input_embedding, sinusoids [{batch},{seq},{dim}]", 4 * batch * seq * dim, make)


def alibi(kind: str, heads: int, length: int) -> Case:
    def make() -> dict[str, Call]:
        slopes = pe.functional.alibi_slopes(heads, device="cuda")
        functional = pe.functional
        if kind == "bias":
            return {
                "posembed": lambda: functional.alibi_bias(
                    slopes, length, length, dtype=torch.bfloat16
                )
            }
        scores = randn(1, heads, length, length)
        bias = functional.alibi_bias(slopes, length, length, dtype=torch.bfloat16)
        if kind == "add_":
            return {
                "posembed": lambda: functional.alibi_add_(scores, slopes),
                "torch, from a bias": lambda: scores.add_(bias),
            }
        if kind == "softmax":
            return {
                "posembed": lambda: functional.alibi_softmax(scores, slopes),
                "torch, from a bias": lambda: (scores + bias).softmax(-1),
                "torch.compile": lambda: compiled(torch_softmax)(scores, bias),
            }
        leaf = scores.requires_grad_()
        return {
            "posembed": gradient(lambda: functional.alibi_softmax(leaf, slopes), [leaf]),
            "torch": gradient(lambda: (leaf + bias).softmax(-1), [leaf]),
        }

    elements = heads * length * length
    moved = {"bias": 2, "add_": 4, "softmax": 4, "softmax backward": 6}[kind] * elements
    return Case(f"alibi {kind} [1,{heads},{length},{length}]", moved, make, kind[-1] != "d")


def torch_softmax(scores: Tensor, bias: Tensor) -> Tensor:
    return (scores + bias).softmax(-1)


def decode(tokens: int) -> Case:
    def make() -> dict[str, Call]:
        query, key = randn(tokens, 1, 32, 128), randn(tokens, 1, 8, 128)
        spec, positions = pe.RotarySpec(128), torch.arange(tokens, device="cuda").unsqueeze(1)
        tables = [table.unsqueeze(1) for table in angle_tables(tokens, 128)]  # a row for each token
        return {
            "posembed, in place": lambda: pe.functional.rotary_(query, key, positions, spec=spec),
            "torch.compile": lambda: compiled(rotate_half)(query, key, *tables),
        }

    return Case(f"rotary decode [{tokens},1,32+8,128]", 2 * 2 * tokens * 40 * 128, make)


def model(name: str, kind: str, batch: int, seq: int) -> Case:
    """A whole model of transformers beside itself patched; both share the weights."""

    def make() -> dict[str, Call]:
        both = transformers.models(name, torch.bfloat16, "cuda")
        ids = transformers.ids(batch, seq, "cuda")

        def prefill(model: nn.Module) -> Any:
            with torch.inference_mode():
                return model(ids).logits

        def training_step(model: nn.Module) -> Any:
            loss = model(ids, labels=ids).loss
            return torch.autograd.grad(loss, list(model.parameters()))

        call = prefill if kind == "prefill" else training_step
        return {label: functools.partial(call, model) for label, model in both.items()}

    return Case(f"transformers: {name}, {kind} of {batch} x {seq} tokens", 0, make, graph=False)


def cases() -> Iterator[Case]:
    yield rotary(4, 8192)
    yield rotary(4, 8192, interleaved=True)
    yield rotary_backward(4, 8192)
    yield learned_frequencies(4, 4096)
    yield norm_rotary(4, 4096, backward=False)
    yield norm_rotary(4, 4096, backward=True)
    yield rotary_cache(32768, torch.bfloat16)
    yield rotary_cache(32768, torch.float8_e4m3fn)
    yield mla(4096)
    yield from map(decode, (1, 32, 256))
    yield embedding(128_000, 4096, 16_384)
    yield embedding(1_000_000, 256, 262_144)
    yield embedding_backward(32_000, 4096, 16_384, "dense")
    yield embedding_backward(128_000, 4096, 16_384, "rows")
    yield bag(128, torch.float32)
    yield bag(64, torch.bfloat16)
    yield learned(4, 4096, 4096)
    yield sinusoidal(4, 4096, 4096)
    yield input_embedding(128, 512, 768, backward=False)
    yield input_embedding(128, 512, 768, backward=True)
    yield input_embedding(8, 2048, 4096, backward=False)
    yield input_sinusoids(32, 1024, 1024)
    yield alibi("bias", 32, 4096)
    yield alibi("add_", 32, 4096)
    yield alibi("softmax", 32, 4096)
    yield alibi("softmax backward", 32, 2048)
    if peers.installed("transformers"):
        for name in ("Llama, 2 layers of 7B", "Qwen3, 100M", "ModernBERT, 100M"):
            yield model(name, "prefill", 4, 4096)
            yield model(name, "training step", 2, 4096)


def copy_of(moved: int) -> Call:
    source, target = torch.empty(2, max(moved // 2, 16), device="cuda", dtype=torch.uint8).random_(
        255
    )
    return lambda: target.copy_(source)


def events(run: Call, calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def replayed(calls: list[Call]) -> tuple[Call, int]:
    """A graph that takes the calls in turn, long enough to be timed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph, count = torch.cuda.CUDAGraph(), max(1, 64 // len(calls)) * len(calls)
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    return graph.replay, count


def queued(calls: list[Call]) -> tuple[Call, int]:
    """The calls one after another, as Python makes them."""

    def run() -> None:
        for call in calls * 4:
            call()

    return run, 4 * len(calls)


def measure(calls: list[Call], graph: bool) -> float:
    """Seconds of one call: the median of timings, each of many calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with torch.no_grad() if graph else contextlib.nullcontext():
        run, count = replayed(calls) if graph else queued(calls)
        run()
        took = events(run, count)
        repeats = max(1, math.ceil(SECONDS / (took * count)))
        return statistics.median(
            events(lambda: [run() for _ in range(repeats)], count * repeats) for _ in range(ROUNDS)
        )


def run(case: Case, cache: int, compile_peers: bool) -> list[str]:
    sets = min(64, max(1, math.ceil(4 * cache / case.moved))) if case.moved else 1
    made = [case.make() for _ in range(sets)]
    candidates = {}
    if case.moved:
        candidates["copy of the same bytes"] = [copy_of(case.moved) for _ in range(sets)]
    candidates |= {
        label: [one[label] for one in made]
        for label in made[0]
        if compile_peers or label != "torch.compile"
    }
    lines, limit = (
        [f"### {case.name}", "", "| | time | GB/s | of copy |", "|---|---:|---:|---:|"],
        0.0,
    )
    for label, calls in candidates.items():
        try:
            seconds = measure(calls, case.graph or label.startswith("copy"))
        except Exception as error:  # a peer that cannot run does not end the measurement
            lines.append(
                f"| {label} | {type(error).__name__}: {str(error).splitlines()[0][:80]} | | |"
            )
            continue
        limit = limit or seconds
        speed = case.moved / seconds / 1e9
        lines.append(f"| {label} | {seconds * 1e6:.2f} µs | {speed:.0f} | {limit / seconds:.2f} |")
    return [*lines, ""]


def once(chosen: str) -> None:
    """Calls posembed's candidates once each, for a profiler."""
    for case in cases():
        if chosen in case.name:
            print(case.name, flush=True)
            for label, call in case.make().items():
                if label.startswith("posembed"):
                    call()
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="", help="run the cases whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the names of cases and stop")
    parser.add_argument("--table", type=Path, help="write the table there as well")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--once", action="store_true", help="one call of each, for a profiler")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(case.name for case in cases()))
        return
    if arguments.once:
        once(arguments.case)
        return
    properties = torch.cuda.get_device_properties(0)
    lines = [
        f"- device: {properties.name}, L2 {properties.L2_cache_size >> 20} MiB",
        f"- date: {datetime.date.today().isoformat()}",
        f"- torch: {torch.__version__}, posembed: {pe.__version__}",
        "- dtype: bfloat16 unless a case names another",
        "",
    ]
    print("\n".join(lines), flush=True)
    for case in cases():
        if arguments.case not in case.name:
            continue
        began = time.monotonic()
        try:
            result = run(case, properties.L2_cache_size, not arguments.no_compile)
        except Exception as error:
            result = [f"### {case.name}", "", f"failed: {type(error).__name__}: {error}", ""]
        torch.cuda.empty_cache()
        lines += result
        print("\n".join(result), f"({time.monotonic() - began:.1f} s)", flush=True)
        if arguments.table:
            arguments.table.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
