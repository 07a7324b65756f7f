"""Which rows of a checkpoint's tensors are components of queries and keys, and their new order.

Tensors are recognised by name, as in transformers' and Meta's models; the layouts of packed
projections are known for some model types. A form whose rows cannot be identified raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from posembed.conversion import permute_rotary_weight
from posembed.specification import RotarySpec

Pairing = Literal["interleaved", "half_split"]

# Rows of one head after the other.
QUERY = re.compile(r"(^|\.)(q_proj|wq|query|linear_q)\.")
KEY = re.compile(r"(^|\.)(k_proj|wk|key|linear_k)\.")
# A weight for each component of a head, or of all heads.
NORM = re.compile(
    r"(^|\.)([qk]_norm|qk_norm|[qk]_layernorm|[qk]_layer_norm|query_layernorm|key_layernorm)\."
)
PACKED = re.compile(r"(^|\.)(qkv_proj|query_key_value|qkv|Wqkv|c_attn)\.")
# In W + B A, only B has one row per head component.
ROWS = re.compile(r"\.(weight|bias|lora_B\.(\w+\.)?weight)$")
UNTOUCHED = re.compile(r"\.lora_A\.")
LATENT = re.compile(r"(^|\.)(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.")
OTHER_TOWERS = re.compile(r"vision|visual|audio")  # they have their own pairs
LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|h)\.(\d+)\.")
# Layouts of packed projections: all queries, keys, values; or those of each group together.
PACKED_IN_ORDER = frozenset({"phi3"})
PACKED_BY_GROUP = frozenset({"gpt_neox", "gpt_neox_japanese"})
# Each head of q_proj has its query rows and then the rows of a gate, which is not rotated.
GATED = frozenset({"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text"})

HEADS = re.compile("(^|_)n?_?heads?($|_)|query_groups")


def pairing(spec: RotarySpec) -> Pairing:
    """The name of a specification's pairs."""
    return "interleaved" if spec.interleaved else "half_split"


def rotated(spec: RotarySpec) -> int:
    """How many components of a head are rotated."""
    return spec.head_dim if spec.rotary_dim is None else spec.rotary_dim


def window(spec: RotarySpec) -> tuple[int, int, int]:
    """Which components of a head are rotated; all that a permutation needs to know."""
    return spec.head_dim, rotated(spec), spec.rotary_start


def counts_of_heads(fields: Mapping[str, Any]) -> set[int]:
    """Every head count in a configuration; some are per layer."""
    found: set[int] = set()
    for key, value in fields.items():
        if HEADS.search(key):
            each = value if isinstance(value, (list, tuple)) else [value]
            found.update(count for count in each if isinstance(count, int) and count > 0)
    return found


class Permutation:
    """Where a model's projections have query and key rows, and how these are reordered.

    Args:
        specs: The rotation of each layer type; None: of layers of no named type.
        fields: The model's configuration.
        to: The new pairing; the model currently has the other one.
    """

    def __init__(
        self, specs: Mapping[str | None, RotarySpec], fields: dict[str, Any], to: Pairing
    ) -> None:
        self.rotating = {kind: spec for kind, spec in specs.items() if rotated(spec)}
        if not self.rotating:
            raise ValueError("the configuration says that no layer is rotated")
        present = {pairing(spec) for spec in self.rotating.values()}
        if to in present:
            raise ValueError(f"--to: the configuration says that the pairs are {to} already")
        if fields.get("attention_k_eq_v"):
            raise ValueError("attention_k_eq_v: values shared with keys cannot be converted")
        self.specs, self.to = specs, to
        self.windows = {window(spec): spec for spec in self.rotating.values()}
        self.kinds = list(fields.get("layer_types") or [])
        self.model_type = str(fields.get("model_type", ""))
        queries = fields.get("num_attention_heads", fields.get("n_heads"))
        self.key_heads = int(fields.get("num_key_value_heads") or queries or 0)
        self.counts = counts_of_heads(fields)

    def rotates(self, name: str) -> bool:
        """Whether a tensor's rows are components of queries or keys.

        Raises:
            ValueError: They are, but in a form whose rows cannot be identified.
        """
        if OTHER_TOWERS.search(name):
            return False
        if LATENT.search(name):
            raise ValueError(f"{name}: latent attention cannot be converted")
        rotary = any(kind.search(name) for kind in (QUERY, KEY, NORM, PACKED))
        if not rotary or UNTOUCHED.search(name):
            return False
        if not ROWS.search(name):
            raise ValueError(f"{name}: only weights and biases can be converted, not quantised")
        return True

    def spec_of(self, name: str) -> RotarySpec:
        """The rotation of a tensor's layer, or of any layer if layers differ only in angles."""
        if len(self.windows) == 1:
            return next(iter(self.windows.values()))
        layer = LAYER.search(name)
        place = len(self.kinds) if layer is None else int(layer[1])
        kind = self.kinds[place] if place < len(self.kinds) else None
        if kind not in self.specs:
            raise ValueError(
                f"{name}: layers have heads of different widths, {sorted(self.windows)}, and the "
                "configuration does not say of which kind this one is"
            )
        return self.specs[kind]

    def heads(self, name: str, total: int) -> Iterable[int]:
        """Which of the heads in a tensor's rows are queries and keys.

        Raises:
            ValueError: The configuration has no such number of heads, or their packing is not
                known.
        """
        if NORM.search(name):
            self.check_count(name, total, total == 1)
            return range(total)
        if not PACKED.search(name):
            parts = 2 if QUERY.search(name) and self.model_type in GATED else 1
            self.check_count(name, total, total % parts == 0 and total // parts in self.counts)
            return range(0, total, parts)
        if self.model_type in PACKED_IN_ORDER:
            return range(total - self.key_heads)
        if self.model_type in PACKED_BY_GROUP and total % self.key_heads == 0:
            group = total // self.key_heads
            return [head for head in range(total) if head % group != group - 1]
        raise ValueError(f"{name}: how model_type {self.model_type!r} packs its heads is not known")

    def check_count(self, name: str, total: int, fits: bool) -> None:
        """Raises ValueError if the number of heads in the rows does not match the configuration."""
        if self.counts and not fits and not (NORM.search(name) and total in self.counts):
            raise ValueError(
                f"{name}: expected the rows of {sorted(self.counts)} heads, as the configuration "
                f"says, got those of {total}"
            )

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor with its rows in the new order, as bytes."""
        spec = self.spec_of(name)
        if NORM.search(name):  # some norms have a row for each head
            tensor = tensor.reshape(-1)
        rows, width = tensor.shape[0] if tensor.dim() else 0, spec.head_dim
        if rows == 0 or rows % width:
            raise ValueError(f"{name}: expected a multiple of {width} rows, got {rows}")
        # Permute bytes, so any number format works.
        parts = tensor.reshape(rows, -1).view(torch.uint8)
        heads = self.heads(name, rows // width)
        if rotated(spec) == 0:
            return parts
        return permute_rotary_weight(
            parts,
            rows // width,
            to=self.to,
            rotary_dim=spec.rotary_dim,
            rotary_start=spec.rotary_start,
            heads=heads,
        )


def specs_of_kinds(
    fields: dict[str, Any],
    interleaved: bool | None,
    base: float | None,
    ignore: Iterable[str] = (),
) -> dict[str | None, RotarySpec]:
    """The rotation of each layer type in a configuration.

    None: of layers of no named type, if the configuration needs no type.

    Raises:
        ValueError: The configuration cannot be read, or weights of such models cannot be converted.
    """
    if "_class_name" in fields:
        raise ValueError(
            "_class_name: a class of diffusers has one pairing, whatever its file says"
        )
    named = (*(fields.get("layer_types") or ()), *(fields.get("rope_parameters") or ()))
    specs: dict[str | None, RotarySpec] = {}
    refused: list[ValueError] = []
    for kind in dict.fromkeys((None, *named, "full_attention", "sliding_attention")):
        try:
            specs[kind] = RotarySpec.from_huggingface(
                fields, kind, interleaved=interleaved, base=base, ignore=ignore
            )
        except ValueError as error:
            if not str(error).startswith("layer_type:"):  # no such type, or a type is needed
                raise
            refused.append(error)
    if not specs:
        raise refused[0]
    if any(spec.sections is not None and spec.sections.within_axes for spec in specs.values()):
        raise ValueError("config: expected pairs of the whole head, got pairs within axes")
    return specs
