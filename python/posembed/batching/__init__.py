"""torch.func.vmap rules, which let operators take one more dimension.

A rule merges the mapped dimension with one of the operator's, so vmap makes a single call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from posembed.batching.alibi import (
    alibi_bias_backward_rule,
    alibi_bias_rule,
    alibi_scores_rule,
    alibi_softmax_backward_rule,
)
from posembed.batching.copies import in_place_rule, loop_rule, some_or_no_copies
from posembed.batching.learned import learned_add_rule
from posembed.batching.rotary import rotary_rule
from posembed.batching.sinusoidal import sinusoidal_add_rule, sinusoidal_encode_rule
from posembed.batching.token import embedding_backward_rule, embedding_rule

# Operators that take the mapped dimension in one call.
MERGED: dict[str, Callable[..., Any]] = {
    "embedding": embedding_rule,
    "embedding_backward": embedding_backward_rule,
    "learned_add": learned_add_rule,
    "sinusoidal_add": sinusoidal_add_rule,
    "sinusoidal_encode": sinusoidal_encode_rule,
    "rotary": functools.partial(rotary_rule, 1),
    "rotary_pair": functools.partial(rotary_rule, 2),
    "alibi_bias": alibi_bias_rule,
    "alibi_bias_backward": alibi_bias_backward_rule,
    "alibi_add": functools.partial(alibi_scores_rule, "alibi_add"),
    "alibi_softmax": functools.partial(alibi_scores_rule, "alibi_softmax"),
    "alibi_softmax_backward": alibi_softmax_backward_rule,
}
# Operators that are called once per copy.
COPY_BY_COPY = (
    "alibi_lse_correction",
    "learned_extend",
    "rotary_permute_weight",
    "rotary_tangent",
    "rotary_frequencies_backward",
    "learned_encode",
    "learned_backward",
    "norm_rotary",
    "norm_rotary_forward",
    "norm_rotary_backward",
    "rotary_tables",
    "rotary_tables_pair",
    "input_embedding",
    "input_embedding_forward",
    "input_embedding_backward",
    "input_dropout",
    "token_bag",
    "token_bag_max",
    "token_bag_backward",
    "token_bag_weights_backward",
)
IN_PLACE = (
    "alibi_add_",
    "alibi_bias_out",
    "alibi_softmax_",
    "rotary_",
    "rotary_pair_",
    "rotary_out",
    "rotary_pair_out",
    "norm_rotary_",
    "rotary_tables_",
    "rotary_tables_pair_",
    "rotary_tables_out",
    "rotary_tables_pair_out",
)


def register() -> None:
    """Registers every rule with torch.func."""
    for name in (*MERGED, *COPY_BY_COPY):
        operator = getattr(torch.ops.posembed, name)
        rule = MERGED.get(name) or functools.partial(loop_rule, operator)
        rule = functools.partial(some_or_no_copies, operator, rule)
        torch.library.register_vmap(f"posembed::{name}", rule)
    for name in IN_PLACE:
        torch.library.register_vmap(f"posembed::{name}", functools.partial(in_place_rule, name))
