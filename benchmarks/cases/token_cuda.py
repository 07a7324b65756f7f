"""Token tables on CUDA: gather beside a device copy, and the gradients of a large vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import posembed as pe
import torch
from plan import Plan, plan
from posembed.commands.measure import Case, Goal, Limit
from setting import Setting

COPY = "copy_ of the same bytes"

# Neither a table nor an output stays in the cache of any device.
TABLE_BYTES, OUTPUT_BYTES = 1 << 30, 1 << 28

VOCABULARY, DIM, TOKENS = 128_000, 4096, 16_384
WHERE = {"device": "cuda", "dtype": torch.bfloat16}


def gather(name: str, row_bytes: int) -> Case:
    rows, count, dim = TABLE_BYTES // row_bytes, OUTPUT_BYTES // row_bytes, row_bytes // 2
    ours = pe.TokenEmbedding(rows, dim, **WHERE)
    ids = torch.randint(rows, (count,), device="cuda")
    out, source = torch.empty(count, dim, **WHERE), torch.randn(count, dim, **WHERE)
    return Case(
        name,
        {
            COPY: lambda: out.copy_(source),
            "posembed": torch.no_grad()(lambda: ours(ids)),
            "nn.Embedding": lambda: torch.nn.functional.embedding(ids, ours.weight.detach()),
        },
        COPY,
        (Goal("posembed", COPY, 0.95),),
    )


def zipf() -> torch.Tensor:
    """Ids as frequent as words are."""
    weights = 1.0 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    return torch.multinomial(weights, TOKENS, replacement=True)


def incoming(spread: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient of looked-up rows, and their ids."""
    ids = zipf() if spread == "Zipf" else torch.randint(VOCABULARY, (TOKENS,))
    return torch.randn(TOKENS, DIM, **WHERE), ids.cuda()


def dense(name: str, spread: str) -> Case:
    gradient, ids = incoming(spread)
    ours = torch.ops.posembed.embedding_backward
    theirs = torch.ops.aten.embedding_dense_backward
    return Case(
        name,
        {
            "posembed": lambda: ours(gradient, ids, num_embeddings=VOCABULARY),
            "nn.Embedding": lambda: theirs(gradient, ids, VOCABULARY, -1, False),
        },
        goals=(Goal("posembed", "nn.Embedding", 1.0),),
        limit=Limit("posembed", 280e-6),  # of an H200: an H100's memory alone takes 350 us
    )


def rows(name: str, spread: str) -> Case:
    gradient, ids = incoming(spread)
    ours = torch.ops.posembed.embedding_backward_rows
    theirs = torch.ops.aten.embedding_sparse_backward
    return Case(
        name,
        {
            "posembed": lambda: ours(gradient, ids, num_embeddings=VOCABULARY),
            "nn.Embedding, sparse": lambda: theirs(gradient, ids, VOCABULARY, -1, False),
            "nn.Embedding, sparse and coalesced": lambda: theirs(
                gradient, ids, VOCABULARY, -1, False
            ).coalesce(),
        },
        limit=Limit("posembed", 60e-6),  # of an H200: an H100's memory alone takes 80 us
    )


def plans(_: Setting) -> Iterator[Plan]:
    for row_bytes in (512, 2048, 8192):
        yield plan(f"token gather, rows of {row_bytes} bytes, bfloat16", gather, row_bytes)
    for spread in ("uniform", "Zipf"):
        sizes = f"{VOCABULARY} x {DIM}, {TOKENS} {spread} ids, bfloat16"
        yield plan(f"token gradient, dense {sizes}", dense, spread)
        yield plan(f"token gradient, rows {sizes}", rows, spread)
