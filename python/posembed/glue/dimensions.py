"""What each dimension of an operator's tensors is, stated once: batch, sequence, heads, columns.

torch.func.vmap merges copies into one of these dimensions (vmap/), and a device mesh splits them
(sharding/).
"""

from __future__ import annotations

import string
from typing import Any, NamedTuple

import torch

from posembed.glue.validation import one_of

LAYOUTS = {"bshd": "bsh.", "bhsd": "bhs.", "sbhd": "sbh.", "thd": "sh."}


class Dimensions(NamedTuple):
    """A letter for each dimension of an operator's tensors.

    "b" is the batch, "s" the sequence, "h" the heads ("k" those of the key), "V" the rows and "D"
    the columns of a table, "." any other dimension. "b?" may be absent, "*" is any number of
    dimensions. After a slash stand letters on which the tensor's gradient does not depend. Tensors
    with heads follow the argument ``layout``, if there is one. "h~" may be absent too, and is so
    before others are.

    Attributes:
        leading: The tensors that give the results their sizes, by the names of the schema.
        following: Other tensors.
        results: The results, or the names of the leading tensors that they are like.
    """

    leading: dict[str, str]
    following: dict[str, str]
    results: tuple[str, ...]

    def arranged(self, layout: str | None) -> Dimensions:
        """The same for tensors in ``layout``; a ValueError for an unknown one."""
        if layout is None:
            return self
        one_of("layout", layout, *LAYOUTS)
        leading = {name: _arranged(letters, layout) for name, letters in self.leading.items()}
        results = tuple(r if r in leading else _arranged(r, layout) for r in self.results)
        return self._replace(leading=leading, results=results)

    def with_whole_heads(self) -> Dimensions:
        """The same for a call that sums over heads, which can neither be split nor take copies."""
        whole = str.maketrans("hk", "..")
        leading = {name: letters.translate(whole) for name, letters in self.leading.items()}
        return self._replace(leading=leading)

    def letters(self) -> dict[str, str]:
        """The letters of the arguments."""
        return {**self.leading, **self.following}

    def results_letters(self) -> list[str]:
        """The letters of the results."""
        return [self.leading.get(result, result) for result in self.results]


def _arranged(given: str, layout: str) -> str:
    letters, slash, apart = given.partition("/")
    order = LAYOUTS[layout].replace("h", "k") if "k" in letters else LAYOUTS[layout]
    names = (name + "?" * (name + "?" in letters) for name in order if name in letters)
    return "".join(names) + slash + apart


def letters_of(given: str, rank: int) -> str:
    """A letter for each dimension of a tensor of that rank, if it has the right rank."""
    names = given.partition("/")[0]
    absent = len(names.replace("?", "").replace("~", "")) - rank
    if absent > 0 and "h~" in names:
        names, absent = names.replace("h~", ""), absent - 1
    names = names.replace("~", "")
    letters = ""
    for name, after in zip(names, names[1:] + ".", strict=True):
        if after == "?" and absent > 0:
            absent -= 1
        elif name != "?":
            letters += name
    return letters.replace("*", string.ascii_lowercase[: max(1 - absent, 0)])


_POSITIONS = {"positions": "b?s"}
_ROTATION = {"positions": ".?b?s", "cu_seqlens": ".", "frequencies": ".?h?."}
_NORM = {
    "query_weight": "./k",
    "key_weight": "./h",
    "positions": ".?b?s",
    "query_bias": "./k",
    "key_bias": "./h",
    "cos": "b?s.",
    "sin": "b?s.",
}
_TABLES = {"cos": "b?sh~.", "sin": "b?sh~."}
_SCORES = {
    "attention_mask": "b?.",
    "query_positions": "b?.",
    "key_positions": "b?.",
    "cu_seqlens": ".",
    "query_offsets": "b",
}

TABLE = {
    "embedding": Dimensions({"ids": "*"}, {"weight": "VD"}, ("*D",)),
    "embedding_quantized": Dimensions(
        {"ids": "*"}, {"codes": "..", "scales": "..", "biases": ".."}, ("*.",)
    ),
    "file_rows": Dimensions({"ids": "*"}, {}, ("*.",)),
    "embedding_backward": Dimensions({"gradient": "*D"}, {"ids": "*"}, ("VD",)),
    "token_bag": Dimensions(
        {"ids": "b?."}, {"weight": ".D", "offsets": ".", "weights": "b?."}, ("bD",)
    ),
    "learned_add": Dimensions({"x": "bsD"}, {"weight": ".D", **_POSITIONS}, ("x",)),
    "learned_backward": Dimensions({"gradient": "bsD"}, _POSITIONS, (".D",)),
    "learned_encode": Dimensions({"positions": "*"}, {"weight": ".D"}, ("*D",)),
    "learned_packed": Dimensions({"weight": ".D"}, {"grids": ".."}, (".D",)),
    "learned_resample": Dimensions({"weight": ".D"}, {}, (".D",)),
    "sinusoidal_add": Dimensions({"x": "b?s."}, {"positions": ".?b?s", "scale": "."}, ("x",)),
    "sinusoidal_encode": Dimensions({"positions": "*"}, {"scale": "."}, ("*.",)),
    "fourier_features": Dimensions(
        {"coordinates": "*."}, {"frequencies": "..", "phases": ".", "x": "*."}, ("*.",)
    ),
    "rotary": Dimensions({"query": "bsh."}, _ROTATION, ("query",)),
    "rotary_pair": Dimensions({"query": "bsh.", "key": "bsk."}, _ROTATION, ("query", "key")),
    "rotary_packed": Dimensions({"qkv": "bs."}, _ROTATION, ("bsh.", "bsk.", "bsk.")),
    "rotary_packed_pair": Dimensions({"qkv": "bs."}, _ROTATION, ("bsh.", "bsk.")),
    "rotary_packed_backward": Dimensions(
        {"query": "bsh.", "key": "bsk.", "value": "bsk."}, _ROTATION, ("bs.",)
    ),
    "rotary_tangent": Dimensions({"rotated": "bsh."}, _ROTATION, ("rotated",)),
    "mla_rotary": Dimensions(
        {"query": "bsh.", "key_rope": "bsh?./h"}, {"positions": ".?b?s"}, ("query", "key_rope")
    ),
    "norm_rotary": Dimensions({"query": "bsh.", "key": "bsk."}, _NORM, ("query", "key")),
    "norm_rotary_packed": Dimensions({"qkv": "bs."}, _NORM, ("bsh.", "bsk.", "bsk.")),
    "rotary_tables": Dimensions({"query": "bsh."}, _TABLES, ("query",)),
    "rotary_tables_pair": Dimensions({"query": "bsh.", "key": "bsk."}, _TABLES, ("query", "key")),
    "alibi_scaled_slopes": Dimensions({"slopes": ".?h"}, {}, ("slopes",)),
    "alibi_lse_correction": Dimensions({"slopes": ".?h"}, {}, ("h.",)),
    "alibi_bias": Dimensions({"slopes": ".?h"}, _SCORES, ("b?h..",)),
    "alibi_bias_backward": Dimensions({"grad": "b?h.."}, _SCORES, (".?h",)),
    "alibi_add": Dimensions({"scores": "b?h.."}, {"slopes": ".?h", **_SCORES}, ("scores",)),
    "alibi_softmax": Dimensions({"scores": "b?h.."}, {"slopes": ".?h", **_SCORES}, ("scores",)),
    "alibi_softmax_backward": Dimensions(
        {"grad": "b?h..", "weights": "b?h.."}, _SCORES, ("grad", ".?h")
    ),
    "alibi_attention": Dimensions(
        {"query": "bh..", "key": "bh..", "value": "bh.."}, {"slopes": ".?h", **_SCORES}, ("query",)
    ),
    "ngram_ids": Dimensions(
        {"ids": "b?s"}, {"history": "b?.", "cu_seqlens": ".", "mask": "b?s"}, ("b?s.",)
    ),
    "relative_bias": Dimensions({"weight": ".h"}, {}, ("h..",)),
    "relative_logits": Dimensions(
        {"query": "bh.."}, {"table": "h?..", "rows": ".?b?..", "scores": "bh.."}, ("bh..",)
    ),
    "relative_window_bias": Dimensions({"weight": ".h"}, {}, ("h..",)),
    "relative_window_resample": Dimensions({"weight": ".h"}, {}, (".h",)),
}


_OPERATORS = {name: getattr(torch.ops.posembed, name).default for name in TABLE}
# The arguments of each of these operators, in the order of the schema, with default values.
ARGUMENTS: dict[str, dict[str, Any]] = {
    name: {argument.name: argument.default_value for argument in operator._schema.arguments}
    for name, operator in _OPERATORS.items()
}
