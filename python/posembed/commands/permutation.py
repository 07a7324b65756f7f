"""Which rows of a checkpoint's tensors are components of queries and keys, and their other order.

Tensors are told by their names, as models of transformers and of Meta have them; how packed
projections lay out their heads is known for some model types. What cannot be told raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from posembed.conversion import permute_rotary_weight
from posembed.specification import RotarySpec

# One head after the other, or a weight for each component of a head.
SEPARATE = re.compile(
    r"(^|\.)(q_proj|k_proj|wq|wk|query|key|q_norm|k_norm|q_layernorm|k_layernorm)\."
)
PACKED = re.compile(r"(^|\.)(qkv_proj|query_key_value|qkv|Wqkv|c_attn)\.")
# Of W + B A only B has the rows of heads.
ROWS = re.compile(r"\.(weight|bias|lora_B\.(\w+\.)?weight)$")
UNTOUCHED = re.compile(r"\.lora_A\.")
LATENT = re.compile(r"(^|\.)(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.")
OTHER_TOWERS = re.compile(r"vision|visual|audio")  # pairs of their own
# How packed projections are laid out: all queries, keys, values; or those of a group together.
PACKED_IN_ORDER = frozenset({"phi3"})
PACKED_BY_GROUP = frozenset({"gpt_neox", "gpt_neox_japanese"})


class Permutation:
    """What a model's configuration says about the rows of its projections."""

    def __init__(
        self, spec: RotarySpec, fields: dict[str, Any], to: Literal["interleaved", "half_split"]
    ) -> None:
        present = "interleaved" if spec.interleaved else "half_split"
        if to == present:
            raise ValueError(f"--to: the configuration says that the pairs are {present} already")
        self.spec, self.to = spec, to
        self.model_type = str(fields.get("model_type", ""))
        queries = fields.get("num_attention_heads", fields.get("n_heads"))
        self.key_heads = int(fields.get("num_key_value_heads") or queries or 0)

    def rotates(self, name: str) -> bool:
        """Whether a tensor's rows are components of queries or keys.

        Raises:
            ValueError: They are, in a form whose rows cannot be told.
        """
        if OTHER_TOWERS.search(name):
            return False
        if LATENT.search(name):
            raise ValueError(f"{name}: latent attention cannot be converted")
        rotary = SEPARATE.search(name) or PACKED.search(name)
        if not rotary or UNTOUCHED.search(name):
            return False
        if not ROWS.search(name):
            raise ValueError(f"{name}: only weights and biases can be converted, not quantised")
        return True

    def heads(self, name: str, total: int) -> Iterable[int]:
        """Which of the heads in a tensor's rows are queries and keys."""
        if not PACKED.search(name):
            return range(total)
        if self.model_type in PACKED_IN_ORDER:
            return range(total - self.key_heads)
        if self.model_type in PACKED_BY_GROUP and total % self.key_heads == 0:
            group = total // self.key_heads
            return [head for head in range(total) if head % group != group - 1]
        raise ValueError(f"{name}: how model_type {self.model_type!r} packs its heads is not known")

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor with its rows in the other order, as bytes."""
        rows, width = tensor.shape[0] if tensor.dim() else 0, self.spec.head_dim
        if rows == 0 or rows % width:
            raise ValueError(f"{name}: expected a multiple of {width} rows, got {rows}")
        # Bytes move alike, whatever number format they are of.
        return permute_rotary_weight(
            tensor.reshape(rows, -1).view(torch.uint8),
            rows // width,
            to=self.to,
            rotary_dim=self.spec.rotary_dim,
            rotary_start=self.spec.rotary_start,
            heads=self.heads(name, rows // width),
        )
