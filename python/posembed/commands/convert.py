"""convert: a safetensors file whose queries and keys have the other pairing, scores unchanged.

Tensor by tensor: the file's header stays as it is, because no shape changes, and no more than one
tensor is in memory at a time.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from posembed.commands import common
from posembed.configuration import load
from posembed.conversion import permute_rotary_weight
from posembed.specification import RotarySpec

if TYPE_CHECKING:
    from posembed.commands.common import Commands

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


def add(commands: Commands) -> None:
    """Arguments of convert."""
    parser = common.add_command(
        commands,
        "convert",
        run,
        "rewrite a safetensors file for the other pairing of rotary components",
        [
            "model.safetensors interleaved.safetensors --config config.json --to interleaved",
            "meta.safetensors hf.safetensors --config params.json --to half_split",
        ],
    )
    parser.add_argument("source", help="a safetensors file; of a sharded model one shard")
    parser.add_argument("target", help="the file to write")
    parser.add_argument("--config", required=True, help="the model's config.json, or its folder")
    parser.add_argument("--to", required=True, choices=("interleaved", "half_split"))
    parser.add_argument("--force", action="store_true", help="overwrite the target")
    common.add_reading_options(parser)


# -------------------------------------------------------------------------------------- which heads


class Permutation:
    """What a model's configuration says about the rows of its projections."""

    def __init__(self, spec: RotarySpec, fields: dict[str, Any], to: Any) -> None:
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


# -------------------------------------------------------------------------------------------- files


def copy_header(source: Path, target: BinaryIO) -> None:
    """Copies the header's length, little-endian in 8 bytes, and the header: JSON."""
    with source.open("rb") as file:
        length = file.read(8)
        target.write(length + file.read(int.from_bytes(length, "little")))


def rewrite(source: Path, target: BinaryIO, permutation: Permutation, quiet: bool) -> list[str]:
    """Writes all tensors in the order of their bytes; returns the names of those permuted."""
    try:
        from safetensors import SafetensorError, safe_open
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "convert needs safetensors and tqdm: python -m pip install safetensors tqdm"
        ) from error
    permuted = []
    try:
        with safe_open(source, framework="pt") as tensors:
            names = tensors.offset_keys()
            chosen = {name for name in names if permutation.rotates(name)}
            copy_header(source, target)
            # No bar where nobody watches: disable=None asks whether stderr is a terminal.
            for name in tqdm(names, unit="tensor", disable=True if quiet else None):
                tensor = tensors.get_tensor(name)
                if name in chosen:
                    tensor = permutation.apply(name, tensor)
                    permuted.append(name)
                target.write(tensor.reshape(-1).view(torch.uint8).numpy())
    except SafetensorError as error:
        raise ValueError(f"{source}: {error}") from error
    return permuted


def convert(source: Path, target: Path, permutation: Permutation, quiet: bool) -> list[str]:
    """Writes the target, whole or not at all."""
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb") as file:
            permuted = rewrite(source, file, permutation, quiet)
        if not permuted:
            raise ValueError(f"{source}: no tensor has the name of a query's or key's projection")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return permuted


def run(arguments: argparse.Namespace) -> int:
    """Writes the target and tells what was permuted."""
    source, target = Path(arguments.source), Path(arguments.target)
    if target.exists() and not arguments.force:
        raise ValueError(f"{target}: exists; --force overwrites it")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target}: expected another file than the source")
    spec = common.read_spec(arguments.config, arguments)
    fields = load(common.config_file(arguments.config))
    fields = fields.get("text_config") or fields
    permutation = Permutation(spec, fields, arguments.to)
    permuted = convert(source, target, permutation, quiet=arguments.json)
    if arguments.json:
        common.print_json({"target": str(target), "to": arguments.to, "permuted": permuted})
    else:
        print(f"{target}: {len(permuted)} tensors have {arguments.to} pairs now")
    return 0
