"""Times CUDA kernels: each case beside a copy of the same bytes by a kernel and beside peers.

Calls are replayed from CUDA graphs, so that launches from Python do not count, on buffers that
take turns and together exceed the L2 cache several times. Only bytes that must move count: a row
of a table that fits the L2 cache once, scores that a causal mask hides not at all.

python benchmarks/cuda.py --table results.md            every case
python benchmarks/cuda.py --case "rotary"               cases whose name contains "rotary"
python benchmarks/cuda.py --stale                       cases whose kernels have changed
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
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
from cases import diffusion, peers, transformers

Call = Callable[[], Any]
ROUNDS = 9
SECONDS = 2e-3  # the least length of a timing
L2_BYTES = 60 << 20  # an H200's

ROOT = Path(__file__).parents[1]
# Of each recorded case, the mark of the sources that it was timed with.
RECORD = ROOT / "benchmarks" / "results" / "cuda_h200.json"
# Where the kernels of a case are, by how its name begins.
SOURCES = {
    "rotary_cache_": "rotary_cache",
    "mla_rotary": "rotary_cache",
    "norm_rotary": "rotary_norm",
    "rotary": "rotary",
    "embedding": "token",
    "rows of": "token",
    "token_bag": "bag",
    "learned": "learned",
    "sinusoidal": "sinusoidal",
    "input_embedding": "input",
    "alibi": "alibi",
    "ngram_ids": "ngram",
}

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


@dataclasses.dataclass
class Case:
    """Calls that do the same on the same buffers, by label.

    Attributes:
        moved: Bytes that the call must read and write; 0: no copy stands beside it.
        make: Gives the candidates one set of buffers.
        queued: Whether calls are also timed as Python makes them: backward passes.
        captured: Whether a graph can hold the calls: none that waits for a value can be.
        fills: Whether the call only writes, so that a fill stands beside it.
    """

    name: str
    moved: int
    make: Callable[[], dict[str, Call]]
    queued: bool = False
    captured: bool = True
    fills: bool = False


def randn(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, **{**BF16, **options})


def of_type(dtype: torch.dtype) -> str:
    """How a case's name ends."""
    return "" if dtype == torch.bfloat16 else f" {str(dtype)[6:]}"


def different(ids: int, rows: int) -> int:
    """The expected number of different ids among random ones of a table."""
    return round(rows * (1 - (1 - 1 / rows) ** ids))


def rows_read(ids: int, rows: int, row_bytes: int) -> int:
    """Rows that memory delivers: those of all ids, or different ones if the L2 holds the table."""
    return different(ids, rows) if rows * row_bytes <= L2_BYTES else ids


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


def rotary(batch: int, seq: int, dtype: torch.dtype = torch.bfloat16, **spec: Any) -> Case:
    def make() -> dict[str, Call]:
        query, key = (randn(batch, seq, heads, 128, dtype=dtype) for heads in (32, 8))
        rotation = pe.RotarySpec(128, **spec)
        tables = tuple(table.to(dtype) for table in angle_tables(seq, 128))
        given = [table.squeeze(1)[None] for table in tables]  # as models pass them on
        if spec:
            given = [table.chunk(2, -1)[0].repeat_interleave(2, -1) for table in given]
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
    moved = 2 * dtype.itemsize * batch * seq * 40 * 128
    return Case(f"rotary {kind} [{batch},{seq},32+8,128]{of_type(dtype)}", moved, make)


def rotary_backward(batch: int, seq: int) -> Case:
    def make() -> dict[str, Call]:
        leaves = [randn(batch, seq, heads, 128).requires_grad_() for heads in (32, 8)]
        spec, tables = pe.RotarySpec(128), angle_tables(seq, 128)
        return {
            "posembed": gradient(lambda: pe.functional.rotary(*leaves, spec=spec), leaves),
            "torch.compile": gradient(lambda: compiled(rotate_half)(*leaves, *tables), leaves),
        }

    moved = 2 * 2 * batch * seq * 40 * 128
    return Case(f"rotary backward [{batch},{seq},32+8,128]", moved, make, queued=True)


def learned_frequencies(batch: int, seq: int) -> Case:
    def make() -> dict[str, Call]:
        rope = pe.RotaryEmbedding(128, learned_frequencies=True, device="cuda")
        leaves = [randn(batch, seq, heads, 128).requires_grad_() for heads in (32, 8)]
        return {"posembed": gradient(lambda: rope(*leaves), [*leaves, *rope.parameters()])}

    moved = 3 * 2 * batch * seq * 40 * 128
    name = f"rotary backward, learned frequencies [{batch},{seq},32+8,128]"
    return Case(name, moved, make, queued=True)


def rotate_by_head(query: Tensor, frequencies: Tensor) -> Tensor:
    angles = torch.arange(query.shape[1], device="cuda")[:, None, None] * frequencies
    angles = torch.cat((angles, angles), -1)  # [seq, heads, head_dim]
    first, second = query.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return query * angles.cos().bfloat16() + turned * angles.sin().bfloat16()


def frequencies_by_head(batch: int, seq: int) -> Case:
    def make() -> dict[str, Call]:
        query, frequencies = randn(batch, seq, 32, 128), torch.rand(32, 64, device="cuda")
        spec = pe.RotarySpec(128)
        return {
            "posembed": lambda: pe.functional.rotary(query, frequencies=frequencies, spec=spec),
            "torch.compile": lambda: compiled(rotate_by_head)(query, frequencies),
        }

    name = f"rotary, frequencies of each head [{batch},{seq},32,128]"
    return Case(name, 2 * 2 * batch * seq * 32 * 128, make)


def ngrams(batch: int, seq: int, heads: int) -> Case:
    def make() -> dict[str, Call]:
        ids = torch.randint(131_072, (batch, seq), device="cuda")
        moduli = ((10_223_617,) * heads,) * 2
        multipliers = (3, 2**61 + 1, -7)
        return {
            "posembed": lambda: pe.functional.ngram_ids(ids, multipliers=multipliers, moduli=moduli)
        }

    moved = 8 * batch * seq * (1 + 2 * heads)  # bigrams and trigrams
    return Case(f"ngram_ids [{batch},{seq}], 2 sizes of {heads} heads", moved, make)


def norm_rotary(
    batch: int,
    seq: int,
    backward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    of: str = "",
) -> Case:
    """`of`: "half of a head" rotates that, and "LayerNorm" takes the kernel with every option."""

    def make() -> dict[str, Call]:
        shapes = ((batch, seq, 32, 128), (batch, seq, 8, 128), (128,), (128,))
        leaves = [randn(*shape, dtype=dtype) for shape in shapes]
        tables = tuple(table.to(dtype) for table in angle_tables(seq, 128))
        spec = pe.RotarySpec(128, rotary_dim=64 if of == "half of a head" else 128)
        norm = "layer" if of == "LayerNorm" else "rms"

        def ours() -> Any:
            return pe.functional.norm_rotary(*leaves, spec=spec, norm=norm)

        def theirs() -> Any:
            return compiled(torch_norm_rotary)(*leaves, *tables)

        if backward:
            leaves[:] = [leaf.requires_grad_() for leaf in leaves]
            return {"posembed": gradient(ours, leaves), "torch.compile": gradient(theirs, leaves)}
        return {"posembed": ours} if of else {"posembed": ours, "torch.compile": theirs}

    moved = (3 if backward else 2) * dtype.itemsize * batch * seq * 40 * 128
    what = "norm_rotary" + " backward" * backward + (of and f", {of}")
    return Case(f"{what} [{batch},{seq},32+8,128]{of_type(dtype)}", moved, make, queued=backward)


def torch_norm_rotary(
    query: Tensor, key: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return rotate_half(
        F.rms_norm(query, (128,), wq, 1e-6), F.rms_norm(key, (128,), wk, 1e-6), cos, sin
    )


def rotary_cache(tokens: int, dtype: torch.dtype, norm: str | None = None) -> Case:
    def make() -> dict[str, Call]:
        query, key, value = randn(tokens, 32, 128), randn(tokens, 8, 128), randn(tokens, 8, 128)
        caches = torch.zeros(2, tokens // 16, 16, 8, 128, **BF16).to(dtype)
        slots, spec = torch.randperm(tokens, device="cuda"), pe.RotarySpec(128)
        positions = torch.arange(tokens, device="cuda")
        rows, tables = caches.flatten(1, 2), angle_tables(tokens, 128)
        weights = {name: randn(128) for name in ("query_weight", "key_weight") if norm}

        def torch_cache() -> None:
            rotated, keys = rotate_half(query, key, *tables)
            query.copy_(rotated)
            rows[0].index_copy_(0, slots, keys)
            rows[1].index_copy_(0, slots, value)

        calls: dict[str, Call] = {
            "posembed": lambda: pe.functional.rotary_cache_(
                query, key, value, *caches, slots, positions, spec=spec, norm=norm, **weights
            )
        }
        if dtype == torch.bfloat16 and norm is None:
            calls["torch"] = torch_cache
        return calls

    moved = tokens * 128 * (2 * 2 * 32 + (2 + dtype.itemsize) * 16)
    name = f"rotary_cache_{' normed' * bool(norm)} [{tokens},32+8,128] into {str(dtype)[6:]}"
    return Case(name, moved, make)


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

    dense = kind == "dense"
    moved = 2 * dim * (tokens + (vocabulary if dense else different(tokens, vocabulary)))
    name = f"embedding backward, {kind}, {vocabulary} x {dim}, {tokens} ids"
    return Case(name, moved, make, queued=True, captured=dense)


def quantized(vocabulary: int, dim: int, tokens: int) -> Case:
    block = 128

    def make() -> dict[str, Call]:
        table = pe.QuantizedTable.quantize(randn(vocabulary, dim), "float8", block=block)
        ids = torch.randint(vocabulary, (tokens,), device="cuda")
        return {"posembed": lambda: table(ids)}

    moved = tokens * (3 * dim + 4 * dim // block)
    return Case(f"rows of float8 {vocabulary} x {dim}, {tokens} ids", moved, make)


def bag(dim: int, dtype: torch.dtype) -> Case:
    bags, length, vocabulary = 8192, 64, 1_000_000

    def make() -> dict[str, Call]:
        weight = randn(vocabulary, dim, dtype=dtype)
        ids = torch.randint(vocabulary, (bags, length), device="cuda")
        return {
            "posembed": lambda: pe.functional.token_bag(ids, weight),
            "F.embedding_bag": lambda: F.embedding_bag(ids, weight, mode="sum"),
        }

    moved = (bags * length + bags) * dim * dtype.itemsize + 8 * bags * length
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


def input_embedding(
    batch: int,
    seq: int,
    dim: int,
    backward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    of: str = "BERT",
) -> Case:
    """`of`: "RoBERTa" gives each token its position, and "dropout" is that of training."""

    def make() -> dict[str, Call]:
        shapes = ((30522, dim), (seq, dim), (2, dim), (dim,), (dim,))
        tables = [randn(*shape, dtype=dtype) for shape in shapes]
        ids = torch.randint(30522, (batch, seq), device="cuda")
        positions = torch.arange(seq, device="cuda").expand(batch, seq).contiguous()

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
                positions=positions if of == "RoBERTa" else None,
                dropout=0.1 if of == "dropout" else 0.0,
            )

        calls: dict[str, Call] = {
            "posembed": ours,
            "torch": lambda: torch_input(ids, *tables),
            "torch.compile": lambda: compiled(torch_input)(ids, *tables),
        }
        if of != "BERT":
            return {"posembed": ours}
        if not backward:
            return calls
        tables[:] = [table.requires_grad_() for table in tables]
        return {label: gradient(call, tables) for label, call in calls.items()}

    tokens = batch * seq
    read = rows_read(tokens, 30522, dim * dtype.itemsize)
    rows = tokens + read + (tokens + 30522 if backward else 0)
    what = "input_embedding backward" if backward else "input_embedding"
    name = f"{what}, {of} [{batch},{seq},{dim}]{of_type(dtype)}"
    return Case(name, rows * dim * dtype.itemsize, make, queued=backward)


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

    moved = 2 * dim * (batch * seq + rows_read(batch * seq, 32000, 2 * dim))
    return Case(f"input_embedding, sinusoids [{batch},{seq},{dim}]", moved, make)


def alibi(kind: str, heads: int, length: int, masked: bool = False) -> Case:
    """Causal; with a mask, batches of two of which one is padded by an eighth."""
    batch = 2 if masked else 1

    def make() -> dict[str, Call]:
        slopes = pe.functional.alibi_slopes(heads, device="cuda")
        functional = pe.functional
        mask = torch.ones(batch, length, dtype=torch.bool, device="cuda")
        mask[-1, : length // 8] = False
        padding: dict[str, Any] = {"attention_mask": mask} if masked else {}
        if kind == "bias":
            return {
                "posembed": lambda: functional.alibi_bias(
                    slopes, length, length, dtype=torch.bfloat16, **padding
                )
            }
        scores = randn(batch, heads, length, length)
        bias = functional.alibi_bias(slopes, length, length, dtype=torch.bfloat16, **padding)
        if kind == "add_":
            return {
                "posembed": lambda: functional.alibi_add_(scores, slopes, **padding),
                "torch, from a bias": lambda: scores.add_(bias),
            }
        if kind == "softmax":
            return {
                "posembed": lambda: functional.alibi_softmax(scores, slopes, **padding),
                "torch, from a bias": lambda: (scores + bias).softmax(-1),
                "torch.compile": lambda: compiled(torch_softmax)(scores, bias),
            }
        leaf = scores.requires_grad_()
        return {
            "posembed": gradient(lambda: functional.alibi_softmax(leaf, slopes, **padding), [leaf]),
            "torch": gradient(lambda: (leaf + bias).softmax(-1), [leaf]),
        }

    # What the mask hides is written and not read: half of the scores.
    passes = {"bias": 1, "add_": 1.5, "softmax": 1.5, "softmax backward": 2}[kind]
    moved = round(passes * 2 * batch * heads * length * length)
    name = f"alibi {kind}{', padded' * masked} [{batch},{heads},{length},{length}]"
    return Case(name, moved, make, queued=kind.endswith("backward"), fills=kind == "bias")


def torch_softmax(scores: Tensor, bias: Tensor) -> Tensor:
    return (scores + bias).softmax(-1)


def decode(tokens: int) -> Case:
    def make() -> dict[str, Call]:
        query, key = randn(tokens, 1, 32, 128), randn(tokens, 1, 8, 128)
        spec, positions = pe.RotarySpec(128), torch.arange(tokens, device="cuda").unsqueeze(1)
        given = angle_tables(tokens, 128)  # [tokens, 1, 128]: a row for each token
        tables = [table.unsqueeze(1) for table in given]
        return {
            "posembed, in place": lambda: pe.functional.rotary_(query, key, positions, spec=spec),
            "posembed, given tables": lambda: pe.functional.rotary_tables_(
                query, key, *given, unsqueeze_dim=2
            ),
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

    label = f"transformers: {name}, {kind} of {batch} x {seq} tokens"
    return Case(label, 0, make, queued=True, captured=False)


def decode_step(name: str, batch: int, context: int) -> Case:
    """One token after a context, queued and in a CUDA graph, with a cache of fixed size."""

    def make() -> dict[str, Call]:
        cache_class = peers.imported("transformers").StaticCache
        prompt = transformers.ids(batch, context, "cuda")
        token = transformers.ids(batch, 1, "cuda")

        def step(model: nn.Module) -> Call:
            cache = cache_class(config=model.config, max_cache_len=context + 8)
            with torch.inference_mode():
                model(prompt, past_key_values=cache)

            def run() -> Any:
                with torch.inference_mode():
                    logits = model(token, past_key_values=cache).logits
                    for layer in cache.layers:  # each call is the first after the context
                        layer.cumulative_length.fill_(context)
                    return logits

            return run

        both = transformers.models(name, torch.bfloat16, "cuda")
        return {label: step(model) for label, model in both.items()}

    return Case(f"transformers: {name}, decode of {batch} after {context}", 0, make, queued=True)


def block(name: str) -> Case:
    """A block of diffusers, or a model of timm, beside itself patched."""

    def make() -> dict[str, Call]:
        return diffusion.both(diffusion.MODELS[name][1], torch.bfloat16, "cuda")

    return Case(name, 0, make, queued=True)


def cases() -> Iterator[Case]:
    half, single = torch.float16, torch.float32
    yield rotary(4, 8192)
    yield rotary(4, 8192, interleaved=True)
    yield rotary(4, 8192, half)
    yield rotary(4, 4096, single)
    yield rotary_backward(4, 8192)
    yield learned_frequencies(4, 4096)
    yield frequencies_by_head(4, 8192)
    yield norm_rotary(4, 4096)
    yield norm_rotary(4, 4096, dtype=half)
    yield norm_rotary(4, 4096, backward=True)
    yield norm_rotary(4, 4096, of="half of a head")
    yield norm_rotary(4, 4096, of="LayerNorm")
    yield rotary_cache(32768, torch.bfloat16)
    yield rotary_cache(32768, torch.bfloat16, norm="rms")
    yield rotary_cache(32768, torch.float8_e4m3fn)
    yield mla(4096)
    yield from map(decode, (1, 32, 256))
    yield embedding(128_000, 4096, 16_384)
    yield embedding(1_000_000, 256, 262_144)
    yield embedding(400_000, 300, 262_144)
    yield quantized(128_000, 4096, 16_384)
    yield embedding_backward(32_000, 4096, 16_384, "dense")
    yield embedding_backward(128_000, 4096, 16_384, "rows")
    yield embedding_backward(128_000, 300, 65_536, "dense")
    yield ngrams(4, 8192, 8)
    yield bag(128, torch.float32)
    yield bag(64, torch.bfloat16)
    yield bag(300, torch.bfloat16)
    yield learned(4, 4096, 4096)
    yield learned(64, 4096, 300)
    yield sinusoidal(4, 4096, 4096)
    yield sinusoidal(64, 4096, 300)
    yield input_embedding(128, 512, 768)
    yield input_embedding(128, 512, 768, dtype=half)
    yield input_embedding(128, 512, 768, dtype=single)
    yield input_embedding(32, 128, 768)
    yield input_embedding(128, 512, 768, of="RoBERTa")
    yield input_embedding(128, 512, 768, of="dropout")
    yield input_embedding(128, 512, 300)
    yield input_embedding(128, 512, 384)
    yield input_embedding(64, 512, 1024)
    yield input_embedding(8, 2048, 4096)
    yield input_embedding(128, 512, 768, backward=True)
    yield input_embedding(128, 512, 768, backward=True, dtype=half)
    yield input_embedding(64, 512, 1024, backward=True)
    yield input_embedding(128, 512, 300, backward=True)
    yield input_sinusoids(32, 1024, 1024)
    for kind, length in (("bias", 4096), ("add_", 4096), ("softmax", 4096)):
        yield alibi(kind, 32, length)
        yield alibi(kind, 16, length, masked=True)
    yield alibi("softmax backward", 32, 2048)
    yield alibi("softmax backward", 16, 2048, masked=True)
    yield alibi("softmax", 32, 4098)
    if peers.installed("transformers"):
        for name in ("Llama, 2 layers of 7B", "Qwen3, 100M", "ModernBERT, 100M"):
            yield model(name, "prefill", 4, 4096)
            yield model(name, "training step", 2, 4096)
        for name in ("Llama, 2 layers of 7B", "Qwen3, 100M"):
            yield decode_step(name, 1, 512)
    for name, (package, _) in diffusion.MODELS.items():
        if peers.installed(package):
            yield block(name)


@functools.cache
def stream() -> torch.cuda.Stream:
    """Where all calls are made: a graph can hold a backward pass only on its forward's stream."""
    return torch.cuda.Stream()


def events(run: Call, calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def replayed(calls: list[Call]) -> tuple[Call, int]:
    """A graph that takes the calls in turn, long enough to be timed."""
    graph, count = torch.cuda.CUDAGraph(), max(1, 64 // len(calls)) * len(calls)
    with torch.cuda.graph(graph, stream=stream()):
        for i in range(count):
            calls[i % len(calls)]()
    return graph.replay, count


def in_turn(calls: list[Call]) -> tuple[Call, int]:
    """The calls one after another, as Python makes them."""

    def run() -> None:
        for call in calls * 4:
            call()

    return run, 4 * len(calls)


def timed(run: Call, count: int) -> float:
    """Seconds of one call: the median of timings, each of many calls."""
    run()
    took = events(run, count)
    repeats = max(1, math.ceil(SECONDS / (took * count)))
    return statistics.median(
        events(lambda: [run() for _ in range(repeats)], count * repeats) for _ in range(ROUNDS)
    )


def measure(calls: list[Call], queued: bool, captured: bool) -> list[float | None]:
    """Seconds of one call: queued from Python, if asked for, and of its kernels, if captured."""
    with contextlib.nullcontext() if queued else torch.no_grad():
        for call in calls:  # compiles what a capture must not compile, which depends on the mode
            call()
        torch.cuda.synchronize()
        return [
            timed(*in_turn(calls)) if queued else None,
            timed(*replayed(calls)) if captured else None,
        ]


def run(case: Case, cache: int, with_peers: bool) -> list[str]:
    sets = min(64, max(1, math.ceil(4 * cache / case.moved))) if case.moved else 1
    made = [case.make() for _ in range(sets)]
    lines = [f"### {case.name}", "", "| | queued | kernels | GB/s | of limit |"]
    lines += ["|---|---:|---:|---:|---:|"]
    limit = None
    if case.moved:
        from cases import device_bandwidth  # needs triton, which comes with torch for CUDA

        made_of = device_bandwidth.fill_of if case.fills else device_bandwidth.copy_of
        calls = [made_of(case.moved) for _ in range(sets)]
        limit = measure(calls, queued=False, captured=True)[1]
        lines.append(row("fill" if case.fills else "copy", None, limit, case.moved, limit))
        del calls
    for label in made[0]:
        if not label.startswith("posembed") and not with_peers:
            continue
        try:
            times = measure([one[label] for one in made], case.queued, case.captured)
        except Exception as error:  # a peer that cannot run does not end the measurement
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            lines.append(f"| {label} | {text} | | | |")
            continue
        lines.append(row(label, times[0], times[1], case.moved, limit))
    return [*lines, ""]


def row(
    label: str, queued: float | None, kernels: float | None, moved: int, limit: float | None
) -> str:
    """A candidate's line; its speed is that of its kernels, where they are known."""
    seconds = kernels or queued
    assert seconds is not None
    cells = [f"{time * 1e6:.2f} µs" if time else "" for time in (queued, kernels)]
    cells += [f"{moved / seconds / 1e9:.0f}", f"{limit / seconds:.2f}"] if limit else ["", ""]
    return f"| {label} | {' | '.join(cells)} |"


def once(chosen: list[Case]) -> None:
    """Calls posembed's candidates once each, for a profiler."""
    for case in chosen:
        print(case.name, flush=True)
        for label, call in case.make().items():
            if label.startswith("posembed"):
                call()
        torch.cuda.synchronize()


@functools.cache
def mark(name: str) -> str:
    """What changes with the kernels of a case: the start of a hash of their sources."""
    families = [folder for begin, folder in SOURCES.items() if name.startswith(begin)]
    if not families:
        raise ValueError(f"{name}: SOURCES does not say where its kernels are")
    hashed = hashlib.sha256()
    for path in sorted(
        p for folder in (families[0], "core") for p in (ROOT / "csrc" / folder).iterdir()
    ):
        if path.suffix in (".cu", ".h"):
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def chosen_of(arguments: argparse.Namespace) -> list[Case]:
    """The cases to run, in their order."""
    named = [case for case in cases() if arguments.case in case.name]
    if arguments.cases:
        by_name = {case.name: case for case in named}
        named = [by_name[line] for line in arguments.cases.read_text().splitlines() if line]
    if arguments.stale:
        recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        named = [
            case for case in named if case.moved and recorded.get(case.name) != mark(case.name)
        ]
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="", help="run the cases whose name contains this")
    parser.add_argument("--cases", type=Path, help="a file with names of cases, one a line")
    parser.add_argument("--stale", action="store_true", help="cases of changed kernels alone")
    parser.add_argument("--record", action="store_true", help="write the marks of sources of these")
    parser.add_argument("--list", action="store_true", help="print the names of cases and stop")
    parser.add_argument("--table", type=Path, help="write the table there as well")
    parser.add_argument("--peers", action="store_true", help="time others too, torch.compile last")
    parser.add_argument("--once", action="store_true", help="one call of each, for a profiler")
    arguments = parser.parse_args()
    chosen = chosen_of(arguments)
    if arguments.list:
        print("\n".join(case.name for case in chosen))
        return
    if arguments.once:
        once(chosen)
        return
    with torch.cuda.stream(stream()):
        run_all(chosen, arguments)


def run_all(chosen: list[Case], arguments: argparse.Namespace) -> None:
    """Prints each case's table when it is measured."""
    properties = torch.cuda.get_device_properties(0)
    lines = [
        f"- device: {properties.name}, L2 {properties.L2_cache_size >> 20} MiB",
        f"- date: {datetime.date.today().isoformat()}",
        f"- torch: {torch.__version__}, posembed: {pe.__version__}",
        "- dtype: bfloat16 unless a case names another",
        "",
    ]
    print("\n".join(lines), flush=True)
    for case in chosen:
        began = time.monotonic()
        try:
            result = run(case, properties.L2_cache_size, arguments.peers)
        except Exception as error:
            result = [f"### {case.name}", "", f"failed: {type(error).__name__}: {error}", ""]
        torch.cuda.empty_cache()
        lines += result
        print("\n".join(result), f"({time.monotonic() - began:.1f} s)", flush=True)
        if arguments.table:
            arguments.table.write_text("\n".join(lines))
    if arguments.record:
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        known |= {case.name: mark(case.name) for case in chosen if case.moved}
        RECORD.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
