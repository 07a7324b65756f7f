"""Files of word vectors: reading all rows, or those of a vocabulary; gensim beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from posembed.commands.measure import Case
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


def cases(setting: Setting) -> Iterator[Case]:
    if setting.device != "cpu":
        return
    with tempfile.TemporaryDirectory() as folder:
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
        yield Case(f"GloVe text of {path.stat().st_size / 1e6:.0f} MB, {WORDS} x {DIM}", candidates)
