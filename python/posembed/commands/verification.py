"""Verifies a conversion on a small model of the same type: its outputs must not change.

transformers builds the model from the configuration, with few and narrow layers and random weights.
Its outputs before and after the conversion must be equal. A converted model runs with the model's
own rotation R between permutations of the components, P R P^-1: this rotates the pairs that the
conversion makes by the same angles.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posembed.commands.permutation import (
    KEY,
    NORM,
    OTHER_TOWERS,
    PACKED,
    QUERY,
    Permutation,
    pairing,
    rotated,
)
from posembed.configuration import CONVERTED
from posembed.specification import RotarySpec

TOKENS, VOCABULARY, WIDTH, LAYERS = 12, 64, 64, 4
# Some models compute parts in float32, whatever the dtype of their weights.
TOLERANCE = 1e-4

# Keys about weight storage or code location, which a model with random weights does not have.
STORED = frozenset(
    {"quantization_config", "torch_dtype", "dtype", "auto_map", "transformers_version", CONVERTED}
)
# Functions that rotate: by name, and by the first argument that holds angles.
ROTATION = re.compile("^apply_.*rotary")
ANGLES = ("cos", "sin", "freqs_cis", "freqs")

# Parts of attention that do not affect rows, or are not weights.
WITHOUT_ROWS = frozenset({"bias", "masked_bias", "rotary_emb"})
ROTATED = (QUERY, KEY, NORM, PACKED)

Specs = Mapping[str | None, RotarySpec]


class UnverifiedError(ValueError):
    """The conversion could not be verified, because the model type could not be tried."""


class CorruptionError(Exception):
    """A conversion changes a model's outputs."""


# ------------------------------------------------------------------------------------- small models


def number(key: str, value: int) -> int:
    """A configuration value for a small model, by key."""
    if re.search("intermediate_size$|^ffn_dim$|^vocab_size", key):
        return min(value, WIDTH)
    if re.search("^linear_num_(key|value)_heads$", key):
        return min(value, 2)
    if re.search("_token_(id|index)$", key):
        return min(value, VOCABULARY - 1)
    if re.search("expert|topk$|^moe_k$|top_k", key) and "layer" not in key:
        return min(value, 2 if re.search("per_tok|top|moe_k", key) else 4)
    return 1 if key in ("n_group", "topk_group") else value


def depth(fields: Mapping[str, Any]) -> int:
    """Number of layers that includes at least one of each type."""
    kinds = list(fields.get("layer_types") or [])
    first = [kinds.index(kind) + 1 for kind in set(kinds)]
    return min(int(fields["num_hidden_layers"]), max(2, *first) if first else LAYERS)


def shortened(value: Any, layers: int, kept: int) -> Any:
    """Cuts lists and mappings with an entry per layer to the first layers."""
    if isinstance(value, (list, tuple)) and len(value) == layers > 1:
        return list(value[:kept])
    if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
        return {key: item for key, item in value.items() if int(key) < kept}
    return value


def shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with fewer layers, heads and experts; the head size does not change."""
    queries = int(fields["num_attention_heads"])
    keys = int(fields.get("num_key_value_heads") or queries)
    width = int(fields.get("head_dim") or fields["hidden_size"] // queries)
    few = min(keys, 2)
    kept, layers = depth(fields), int(fields["num_hidden_layers"])
    small = {
        key: number(key, value) if type(value) is int else shortened(value, layers, kept)
        for key, value in fields.items()
    }
    queries = few * min(max(queries // keys, 1), 2)
    small["num_attention_heads"] = queries
    small["hidden_size"] = queries * width
    small["num_hidden_layers"] = kept
    if fields.get("num_key_value_heads"):
        small["num_key_value_heads"] = few
    return small


def small_model(fields: Mapping[str, Any]) -> nn.Module:
    """A small model of the configuration's type, in which every weight affects the output."""
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

    kind = CONFIG_MAPPING[str(fields["model_type"])]
    config = kind(**shrunk(without_stored(kind(**without_stored(fields)).to_dict())))
    config._attn_implementation = config._experts_implementation = "eager"
    known = type(config) in AutoModelForCausalLM._model_mapping
    auto: Any = AutoModelForCausalLM if known else AutoModel
    model: nn.Module = auto.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2 or NORM.search(name):
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model.double().eval()


def without_stored(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without keys about files."""
    return {key: value for key, value in fields.items() if key not in STORED}


# -------------------------------------------------------------------------------------- other pairs


def reordered(x: Tensor, spec: RotarySpec, to_interleaved: bool) -> Tensor:
    """Reorders the components of heads, or of their rotated windows."""
    start = spec.rotary_start if x.shape[-1] == spec.head_dim else 0
    end = start + rotated(spec)
    rows = (2, -1) if to_interleaved else (-1, 2)
    pairs = x[..., start:end].reshape(*x.shape[:-1], *rows)
    inside = pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([x[..., :start], inside, x[..., end:]], dim=-1)


def spec_for(specs: Iterable[RotarySpec], x: Tensor, angles: Tensor) -> RotarySpec:
    """The specification that matches a query and its angles, by their widths."""
    for spec in specs:
        wide = x.shape[-1] in (spec.head_dim, rotated(spec))
        if wide and angles.shape[-1] in (rotated(spec), rotated(spec) // 2):
            return spec
    raise UnverifiedError(
        f"the model rotates {tuple(x.shape)} by angles {tuple(angles.shape)}, the configuration "
        "says otherwise"
    )


def with_other_pairs(function: Callable[..., Any], specs: list[RotarySpec]) -> Callable[..., Any]:
    """Wraps a model's rotation for queries and keys with the other pairing."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    first = next((place for place, name in enumerate(names) if name in ANGLES), 0)
    of_angles = names[first]
    turned = [name for name in names[:first] if name != "v"]

    def rotate(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        given = bound.arguments
        here = [name for name in turned if isinstance(given.get(name), Tensor)]
        spec_of = {name: spec_for(specs, given[name], given[of_angles]) for name in here}
        for name, spec in spec_of.items():
            given[name] = reordered(given[name], spec, to_interleaved=spec.interleaved)
        result = function(*bound.args, **bound.kwargs)
        alone = isinstance(result, Tensor)
        back = [
            reordered(x, spec, to_interleaved=not spec.interleaved)
            for x, spec in zip([result] if alone else result, spec_of.values(), strict=False)
        ]
        return back[0] if alone else (*back, *result[len(back) :])

    return rotate


def rotations(model: nn.Module) -> dict[tuple[Any, str], Callable[..., Any]]:
    """The functions that rotate queries and keys, by module and name."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    return {
        (module, name): value
        for module in modules
        for name, value in vars(module).items()
        if ROTATION.search(name)
        and inspect.isfunction(value)
        and set(ANGLES) & set(inspect.signature(value).parameters)
    }


@contextlib.contextmanager
def rotating_other_pairs(model: nn.Module, specs: list[RotarySpec]) -> Iterator[None]:
    """Makes the model rotate the other pairs."""
    functions = rotations(model)
    inside: list[bool] = []  # inside a rotation: rotations that it calls are left unchanged

    def outermost(function: Callable[..., Any]) -> Callable[..., Any]:
        changed = with_other_pairs(function, specs)

        def rotate(*arguments: Any, **options: Any) -> Any:
            if inside:
                return function(*arguments, **options)
            inside.append(True)
            try:
                return changed(*arguments, **options)
            finally:
                inside.pop()

        return rotate

    for (module, name), function in functions.items():
        setattr(module, name, outermost(function))
    try:
        yield
    finally:
        for (module, name), function in functions.items():
            setattr(module, name, function)


# --------------------------------------------------------------------------------------- comparison


@torch.no_grad()
def outputs(model: nn.Module, other: bool, specs: list[RotarySpec]) -> Tensor:
    """Logits, or the last hidden states, with the model's own pairs or the other pairs."""
    ids = torch.arange(TOKENS)[None]
    with rotating_other_pairs(model, specs) if other else contextlib.nullcontext():
        result: Tensor = model(input_ids=ids, use_cache=False)[0]
    return result


def convert(model: nn.Module, permutation: Permutation) -> None:
    """Converts a model's weights in place."""
    for name, tensor in model.state_dict().items():
        if permutation.rotates(name):
            changed = permutation.apply(name, tensor.clone())
            tensor.copy_(changed.view(tensor.dtype).reshape(tensor.shape))


def difference(left: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((left - right).abs().max() / left.abs().max())


def siblings(names: Iterable[str]) -> set[str]:
    """Sibling modules of query and key projections and norms."""
    names = [name for name in names if not OTHER_TOWERS.search(name)]
    found = (kind.search(name) for kind in ROTATED for name in names)
    parents = {match.string[: match.end(1)] for match in found if match}
    return {
        name[end:].split(".")[0]
        for name in names
        for end in (dot.end() for dot in re.finditer(r"^|\.", name))
        if name[:end] in parents
    }


def check_names(names: Iterable[str], tried: Iterable[str]) -> None:
    """Raises UnverifiedError if a checkpoint's attention has other parts than the model's."""
    unknown = siblings(names) - siblings(tried) - WITHOUT_ROWS
    if unknown:
        raise UnverifiedError(f"transformers' own model has no {sorted(unknown)}")


def small_configuration(model: nn.Module) -> dict[str, Any]:
    """The configuration of the model."""
    fields: dict[str, Any] = model.config.to_dict()  # type: ignore[operator, union-attr]
    return fields


def verify(
    fields: dict[str, Any],
    permutation: Permutation,
    read: Callable[[dict[str, Any]], Specs],
    names: Iterable[str],
) -> None:
    """Converts a small model of the configuration's type and compares its outputs.

    Args:
        fields: The configuration of the model to convert.
        permutation: The conversion of that model.
        read: Returns the rotation of each layer type in a configuration.
        names: The tensors of the checkpoint.

    Raises:
        CorruptionError: The outputs differ.
        UnverifiedError: No small model can be built, its rotation cannot be observed, or its
            attention lacks parts that the checkpoint has.
    """
    if "n_heads" in fields and "model_type" not in fields:
        fields, names = llama_of(fields), [in_words_of_llama(name) for name in names]
    with telling("transformers has no small model to try"):
        model = small_model(fields)
        small = small_configuration(model)
        own = [spec for spec in read(small).values() if rotated(spec)]
        present = {CONVERTED: fields[CONVERTED]} if CONVERTED in fields else {}
        trial = Permutation(read({**small, **present}), small, permutation.to)
    check_names(names, model.state_dict())
    if set(trial.windows) != set(permutation.windows):
        raise UnverifiedError(
            f"heads and rotated components read as {sorted(permutation.windows)}, where "
            f"transformers completes the configuration as {sorted(trial.windows)}"
        )
    # Whether converted weights need other pairs than the model's own; before conversion, opposite.
    other = {pairing(spec) for spec in own} != {permutation.to}
    with telling("its small model cannot be tried"):
        before = outputs(model, not other, own)
        convert(model, trial)
        after = outputs(model, other, own)
        seen = difference(before, outputs(model, not other, own)) > 10 * TOLERANCE
    if not seen:
        raise UnverifiedError("the outputs of its small model do not depend on the pairing")
    if not difference(before, after) < TOLERANCE:
        raise CorruptionError(
            f"model_type {fields['model_type']!r}: outputs of a small model differ by "
            f"{difference(before, after):.1g} of the largest after the conversion"
        )


def llama_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Converts Meta's params.json to transformers' configuration of the same model."""
    return {
        "model_type": "llama",
        "hidden_size": fields["dim"],
        "num_attention_heads": fields["n_heads"],
        "num_key_value_heads": fields.get("n_kv_heads") or fields["n_heads"],
        CONVERTED: "interleaved",
    }


def in_words_of_llama(name: str) -> str:
    """Converts the name of one of Meta's tensors to transformers' name."""
    return re.sub(r"(^|\.)w([qkvo])\.", r"\1\2_proj.", name)


@contextlib.contextmanager
def telling(where: str) -> Iterator[None]:
    """Turns any error in a model's own code into an UnverifiedError."""
    try:
        yield
    except UnverifiedError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UnverifiedError(f"{where}: {text:.160}") from error
