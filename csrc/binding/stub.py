"""Writes posembed/_C.pyi from the signatures in pybind11's docstrings.

Run ``python csrc/binding/stub.py`` after a change of the binding; a test names a stale stub.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import posembed
from posembed import _C

STUB = Path(posembed.__file__).parent / "_C.pyi"
HEAD = """\
# Written by csrc/binding/stub.py.
from collections.abc import Sequence
from os import PathLike
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.cpp import ModuleWrapper

from posembed.modules.ngram import NgramSpec
from posembed.specifications import RotarySpec

_Path = str | bytes | PathLike[str]
"""
WORDS = {
    "posembed._C.cpp.": "",
    "posembed._C.": "",
    "posembed::RowsAhead": "RowsAhead",
    "typing.SupportsInt": "int",
    "typing.SupportsFloat": "float",
    'typing.Annotated[collections.abc.Sequence[int], "FixedSize(2)"]': "tuple[int, int]",
    "collections.abc.": "",
    "torch.Tensor": "Tensor",
    "words: list,": "words: list[str],",
    "words: list)": "words: list[str])",
    "**kwargs": "**kwargs: Any",
    "path: object": "path: _Path",
    "scale: object": "scale: float | str",
    "spec_or_head_dim: object": "spec_or_head_dim: RotarySpec | int",
    "new_spec: object": "new_spec: RotarySpec | None",
    "spec: object": "spec: NgramSpec",
}
# Static methods of wrappers, whose docstrings have no parameters.
STATIC = {
    "ALiBi.from_preset": "name: str, num_heads: int, *, head_dim: int | None = None",
    "LearnedPositionalEmbedding.from_file": (
        "path: _Path, *, grid: tuple[int, int], tensor: str = '', freeze: bool = True, "
        "resampling: str = 'bicubic', align_corners: bool = False, antialias: bool = False, "
        "scale_offset: float = 0.0"
    ),
    "TokenEmbedding.from_file": (
        "path: _Path, *, tensor: str = '', vocabulary: list[str] | None = None, "
        "missing: str = 'mean', dtype: torch.dtype | None = None, freeze: bool = True, "
        "on_bad_row: str = 'raise'"
    ),
}


def signatures(function: Any, place: str = "") -> list[str]:
    """The ``def`` lines of a bound function or method, one for each overload."""
    lines = [line for line in (function.__doc__ or "").splitlines() if " -> " in line]
    found = []
    for line in lines:
        text = line.partition(". ")[2] if line[0].isdigit() else line
        for word, plain in WORDS.items():
            text = text.replace(word, plain)
        result = text.rpartition(" -> ")[2]
        text = text.rpartition(" -> ")[0].replace(f"self: {place[:-1]}", "self")
        found.append(f"def {text} -> {result}: ...")
    return found


def methods(name: str) -> Iterator[str]:
    """The lines of a class: of its own in C++, not of those that torch adds to each module."""
    wrapper = getattr(_C, name)
    bound = getattr(_C.cpp, name, wrapper)
    modules = [vars(kind) for kind in vars(_C.cpp).values() if inspect.isclass(kind)]
    of_torch = set.intersection(*map(set, modules)) if bound is not wrapper else set()
    for method, function in vars(bound).items():
        own = method not in of_torch and not method.startswith("_")
        if own or method in ("__init__", "forward"):
            overloads = signatures(function, f"{name}.")
            if method == "forward":
                overloads = overloads[-1:]  # torch binds one, too
            for line in overloads:
                yield from ["@overload"] * (len(overloads) > 1)
                yield line
    for place, parameters in STATIC.items():
        kind, _, method = place.partition(".")
        if kind == name:
            yield "@staticmethod"
            yield f"def {method}({parameters}) -> {name}: ..."


def text() -> str:
    """The stub, a line for each signature."""
    names = sorted(set(vars(_C)) - {"cpp"} - {name for name in vars(_C) if name.startswith("_")})
    lines = [HEAD]
    for name in names:
        kind = getattr(_C, name)
        if not inspect.isclass(kind):
            lines += signatures(kind)
            continue
        base = "ModuleWrapper" if hasattr(_C.cpp, name) else kind.__base__.__name__
        lines.append(f"class {name}{'' if 'pybind11' in base else f'({base})'}:")
        lines += [f"    {line}" for line in methods(name)] or ["    pass"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
