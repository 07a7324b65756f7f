"""Verifies a conversion on a small model of the same type: its outputs must not change.

transformers builds the model from the configuration, with few and narrow layers and random weights.
Its outputs before and after the conversion must be equal. A converted model runs with the model's
own rotation R between permutations of the components, P R P^-1: this rotates the pairs that the
conversion makes by the same angles.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posembed.commands import small_model
from posembed.commands.checkpoint import Checkpoint
from posembed.commands.permutation import Pairing, Rows, Specs, pairing, rotated, windows
from posembed.commands.rotations import Call, first_component, replaced, spec_for
from posembed.commands.small_model import UnverifiedError, telling
from posembed.commands.tracing import TOKENS, trace
from posembed.configuration import CONVERTED
from posembed.specification import RotarySpec

# Some models compute parts in float32, whatever the dtype of their weights.
TOLERANCE = 1e-4


class CorruptionError(Exception):
    """A conversion changes a model's outputs."""


def reordered(x: Tensor, spec: RotarySpec, to_interleaved: bool) -> Tensor:
    """Reorders the components of heads, or of their rotated windows."""
    start = first_component(x, spec)
    end = start + rotated(spec)
    rows = (2, -1) if to_interleaved else (-1, 2)
    pairs = x[..., start:end].reshape(*x.shape[:-1], *rows)
    inside = pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([x[..., :start], inside, x[..., end:]], dim=-1)


def with_other_pairs(call: Call, specs: list[RotarySpec]) -> Any:
    """The result of a rotation of the other pairs."""
    spec_of = {name: spec_for(specs, x, call.angles) for name, x in call.tensors.items()}
    for name, spec in spec_of.items():
        call.tensors[name] = reordered(call.tensors[name], spec, to_interleaved=spec.interleaved)
    result = call.result()
    alone = isinstance(result, Tensor)
    back = [
        reordered(x, spec, to_interleaved=not spec.interleaved)
        for x, spec in zip([result] if alone else result, spec_of.values(), strict=False)
    ]
    return back[0] if alone else (*back, *result[len(back) :])


@torch.no_grad()
def outputs(model: nn.Module, other: bool, specs: list[RotarySpec]) -> Tensor:
    """Logits, or the last hidden states, with the model's own pairs or the other pairs."""
    rotating = replaced(model, lambda call: with_other_pairs(call, specs))
    with rotating if other else contextlib.nullcontext():
        result: Tensor = model(input_ids=torch.arange(TOKENS)[None], use_cache=False)[0]
    return result


def convert(model: nn.Module, rows: dict[str, Rows], to: Pairing) -> None:
    """Converts a model's weights in place."""
    for name, parameter in model.named_parameters():
        if name in rows:
            changed = rows[name].permuted(parameter.detach(), to)
            parameter.data.copy_(changed.view(parameter.dtype).reshape(parameter.shape))


def difference(left: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((left - right).abs().max() / left.abs().max())


@dataclasses.dataclass(frozen=True)
class Trial:
    """A small model of a configuration's type, and where its weights are rotated.

    Args:
        model: The model.
        specs: The rotations that its own configuration describes.
        rows: Where its weights have components that are rotated.
        checkpoint: The same for the tensors of the large model.
    """

    model: nn.Module
    specs: list[RotarySpec]
    rows: dict[str, Rows]
    checkpoint: Checkpoint


def try_on(
    whole: dict[str, Any],
    fields: dict[str, Any],
    specs: Specs,
    read: Callable[[dict[str, Any]], Specs],
) -> Trial:
    """Builds a small model and sees what it rotates.

    Args:
        whole: The configuration of the whole model.
        fields: That of its text model.
        specs: The rotation of each layer type in it.
        read: Returns the same for another configuration.

    Raises:
        UnverifiedError: No small model can be built, or its rotation cannot be observed.
    """
    if "n_heads" in fields and fields.get("model_type", "transformer") == "transformer":
        whole = fields = llama_of(fields)
    with telling("transformers has no small model to try"):
        large = small_model.completed(fields)
        kept = small_model.depth(large)
    trial = observed(whole, large, kept, read)
    if trial.checkpoint.differ:
        trial = observed(whole, large, int(large["num_hidden_layers"]), read)
    if trial.checkpoint.differ:
        raise UnverifiedError("layers of the same kind differ in what they rotate")
    seen = {(spec.head_dim, rotated(spec), spec.rotary_start) for spec in trial.specs}
    if seen != windows(specs):
        raise UnverifiedError(
            f"heads and rotated components read as {sorted(windows(specs))}, where "
            f"transformers completes the configuration as {sorted(seen)}"
        )
    return trial


def observed(
    whole: dict[str, Any],
    large: dict[str, Any],
    kept: int,
    read: Callable[[dict[str, Any]], Specs],
) -> Trial:
    """A small model with a number of layers, and what it rotates."""
    with telling("transformers has no small model to try"):
        model = small_model.build(large, kept)
        own = [spec for spec in read(small_model.fields_of(model)).values() if rotated(spec)]
    with telling("its small model cannot be tried"):
        rows = trace(model, own)
    return Trial(model, own, rows, Checkpoint(whole, large, model, rows))


def verify(trial: Trial, to: Pairing, model_type: str) -> None:
    """Converts the small model and compares its outputs.

    Args:
        trial: The small model.
        to: The new pairing.
        model_type: For errors.

    Raises:
        CorruptionError: The outputs differ.
        UnverifiedError: They do not depend on the pairing, or cannot be computed.
    """
    # Whether converted weights need other pairs than the model's own; before conversion, opposite.
    own = trial.specs
    other = {pairing(spec) for spec in own} != {to}
    with telling("its small model cannot be tried"):
        before = outputs(trial.model, not other, own)
        convert(trial.model, trial.rows, to)
        after = outputs(trial.model, other, own)
        seen = difference(before, outputs(trial.model, not other, own)) > 10 * TOLERANCE
    if not seen:
        raise UnverifiedError("the outputs of its small model do not depend on the pairing")
    if not difference(before, after) < TOLERANCE:
        raise CorruptionError(
            f"model_type {model_type!r}: outputs of a small model differ by "
            f"{difference(before, after):.1g} of the largest after the conversion"
        )


def llama_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Converts Meta's params.json to transformers' configuration of the same model."""
    return {
        "model_type": "llama",
        "hidden_size": fields["dim"],
        "num_hidden_layers": fields.get("n_layers", 32),
        "num_attention_heads": fields["n_heads"],
        "num_key_value_heads": fields.get("n_kv_heads") or fields["n_heads"],
        CONVERTED: "interleaved",
    }
