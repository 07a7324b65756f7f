"""Loads word vectors from a file into a model: a text's words, their rows, and missing words.

The program writes a file in GloVe's format. Downloaded files (glove.6B.300d.txt, crawl-300d-2M.vec,
GoogleNews-vectors-negative300.bin) and checkpoints (model.safetensors) open in the same way.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

import posembed as pe
import torch

DIM = 50
KNOWN = 1500  # words in the file
VOCABULARY = 2000  # words of the model


def words_of(text: str) -> list[str]:
    """Words, most frequent first."""
    return [word for word, _ in Counter(text.lower().split()).most_common()]


def write_glove(path: Path, words: list[str]) -> None:
    """One line for each word: the word, then its numbers."""
    vectors = torch.randn(len(words), DIM, generator=torch.Generator().manual_seed(0))
    with path.open("w", encoding="utf-8") as file:
        for word, vector in zip(words, vectors.tolist(), strict=True):
            file.write(f"{word} {' '.join(f'{x:.5f}' for x in vector)}\n")


def main() -> int:
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    words = words_of(text)[:VOCABULARY]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "glove.txt")
        write_glove(path, words_of(text)[:KNOWN])

        file = pe.pretrained.open_vectors(path)
        print(f"{file.format}: {file.shape()[0]} words, {file.shape()[1]} numbers each")

        coverage = file.coverage(words)
        print(f"{coverage.found} of {len(words)} words have a vector")
        print(f"those that have none begin with {coverage.missing[:3]}")

        # Trainable, in bfloat16. A word that is not in the file starts as the mean of the others.
        token = pe.TokenEmbedding.from_file(
            path, vocabulary=words, dtype=torch.bfloat16, freeze=False
        )

    ids = torch.tensor([words.index(word) for word in text.lower().split()[:16] if word in words])
    token(ids).sum().backward()
    print(f"{token} learns: gradient {list(token.weight.grad.shape)}")

    missing = token.weight[coverage.found :]
    return int(not torch.equal(missing, missing[:1].expand_as(missing)))


if __name__ == "__main__":
    sys.exit(main())
