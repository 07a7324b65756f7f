"""N-gram hashes: a history of packed documents has rows of batch and documents together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.glue.vmap.copies import loop_rule
from posembed.glue.vmap.merging import merged_rule


def ngram_ids_rule(
    info: Any, in_dims: tuple[int | None, ...], ids: Tensor, *given: Any, **options: Any
) -> Any:
    """ngram_ids: mapped sequences become more sequences, except with such a history."""
    operator = torch.ops.posembed.ngram_ids.default
    history_of_documents = len(given) > 8 and given[7] is not None and given[8] is not None
    if history_of_documents:
        return loop_rule(operator, info, in_dims, ids, *given, **options)
    return merged_rule("ngram_ids", operator, info, in_dims, ids, *given, **options)
