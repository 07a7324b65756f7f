"""Files of word vectors: reading all rows, or those of a vocabulary; gensim beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import Case
from plan import Plan, plan
from posembed.pretrained import open_vectors
from setting import Setting

from cases.peers import installed

WORDS, DIM = 10000, 300


def write_glove(path: Path) -> list[str]:
    """Rows with as many digits as GloVe's own files; gives the words."""
    vectors = torch.randn(WORDS, DIM).mul(0.4)
    words = [f"word{i}" for i in range(WORDS)]
    with path.open("w") as file:
        for word, row in zip(words, vectors.tolist(), strict=True):
            file.write(f"{word} {' '.join(f'{x:.5g}' for x in row)}\n")
    return words


def reading(name: str, folder: str) -> Case:
    path = Path(folder, "glove.txt")
    some = write_glove(path)[::10]
    file = open_vectors(path)
    candidates = {
        "posembed": file.table,
        "posembed, to bfloat16": lambda: file.table(dtype=torch.bfloat16),
        "posembed, rows of a tenth of the words": lambda: file.rows(some),
        "posembed, coverage of a tenth of the words": lambda: file.coverage(some),
    }
    if installed("gensim"):
        from gensim.models import KeyedVectors

        candidates["gensim"] = lambda: KeyedVectors.load_word2vec_format(path, no_header=True)
    return Case(name, candidates)


def plans(setting: Setting) -> Iterator[Plan]:
    if setting.device == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            yield plan(f"GloVe text, {WORDS} x {DIM}", reading, folder)
