"""torch.func.vmap rules, which let operators take one more dimension.

Every operator has one: where the dimensions of its tensors are known, a rule merges the mapped
dimension with one of them, so vmap makes a single call; otherwise there is a call per copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from posembed.glue.dimensions import TABLE
from posembed.glue.vmap.copies import in_place_rule, loop_rule, some_or_no_copies
from posembed.glue.vmap.merging import merged_rule, ngram_ids_rule
from posembed.glue.vmap.token import embedding_backward_rule, embedding_rule

# Rules by hand, which also join the rows of mapped tables.
BY_HAND: dict[str, Callable[..., Any]] = {
    "embedding": embedding_rule,
    "embedding_backward": embedding_backward_rule,
    "ngram_ids": ngram_ids_rule,
}
# Operators that are called once per copy, although their dimensions are known.
COPY_BY_COPY = {"token_bag": "bags of one size cannot be added to ids that have offsets"}
# Operators without a rule.
WITHOUT_RULE = {
    "embedding_backward_rows": "each copy has its own number of rows",
    "input_embedding_backward_rows": "each copy has its own number of rows",
    "token_bag_backward_rows": "each copy has its own number of rows",
    "embedding_resize": "new rows are random",
    "mapped": "a view of memory",
    "prefer_huge_pages": "advises the system and returns no tensor",
}


def _rule(name: str, operator: Any) -> Callable[..., Any] | None:
    """None for operators without tensors, and for compositions, whose parts have rules."""
    schema = operator._schema
    if name in WITHOUT_RULE or not any("Tensor" in str(each.type) for each in schema.arguments):
        return None
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, f"posembed::{name}")
    if has("FuncTorchBatchedDecomposition"):
        return None
    if schema.is_mutable:
        return functools.partial(in_place_rule, operator)
    rule = BY_HAND.get(name)
    if rule is None and name in TABLE and name not in COPY_BY_COPY:
        rule = functools.partial(merged_rule, name, operator)
    return functools.partial(
        some_or_no_copies, operator, rule or functools.partial(loop_rule, operator)
    )


def register() -> None:
    """Registers a rule for each operator with torch.func."""
    for qualified in torch._C._dispatch_get_all_op_names():
        library, _, name = qualified.partition("::")
        if library == "posembed":
            rule = _rule(name, getattr(torch.ops.posembed, name).default)
            if rule is not None:
                torch.library.register_vmap(qualified, rule)
