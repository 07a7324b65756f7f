"""A small model of a configuration's type, built by transformers, with random weights.

It has few and narrow layers, few heads and few experts; heads keep their width, so what is seen in
it about components of heads holds for the large model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from posembed.configuration import CONVERTED

VOCABULARY, WIDTH, LAYERS = 64, 64, 4

# Keys about weight storage or code location, which a model with random weights does not have.
STORED = frozenset(
    {"quantization_config", "torch_dtype", "dtype", "auto_map", "transformers_version", CONVERTED}
)
# Numbers of layers after which a pattern of kinds repeats.
PERIOD = re.compile("interval|period|pattern|every|_freq$|_step$")


class UnverifiedError(ValueError):
    """The conversion could not be verified, because the model type could not be tried."""


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


def kinds(fields: Mapping[str, Any]) -> list[str]:
    """The kind of each layer: its values in the lists that a configuration has for layers."""
    layers = int(fields["num_hidden_layers"])
    lists = [value for value in fields.values() if isinstance(value, (list, tuple))]
    values = [value for value in lists if len(value) == layers > 1]
    return [str(each) for each in zip(*values, strict=True)] or [""] * layers


def depth(fields: Mapping[str, Any]) -> int:
    """Number of layers that includes at least one of each kind."""
    each = kinds(fields)
    first = [each.index(kind) + 1 for kind in each]
    periods = [
        2 * value for key, value in fields.items() if PERIOD.search(key) and type(value) is int
    ]
    return min(int(fields["num_hidden_layers"]), max(LAYERS, *first, *periods))


def shortened(value: Any, layers: int, kept: int) -> Any:
    """Cuts lists and mappings with an entry per layer to the first layers."""
    if isinstance(value, (list, tuple)) and len(value) == layers > 1:
        return list(value[:kept])
    if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
        return {key: item for key, item in value.items() if int(key) < kept}
    return value


def shrunk(fields: Mapping[str, Any], kept: int) -> dict[str, Any]:
    """The configuration with fewer layers, heads and experts; the head size does not change."""
    queries = int(fields["num_attention_heads"])
    keys = int(fields.get("num_key_value_heads") or queries)
    width = int(fields.get("head_dim") or fields["hidden_size"] // queries)
    few, layers = min(keys, 2), int(fields["num_hidden_layers"])
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


def without_stored(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without keys about files."""
    return {key: value for key, value in fields.items() if key not in STORED}


def completed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of its class in transformers."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[str(fields["model_type"])]
    config = kind(**without_stored(fields))
    whole: dict[str, Any] = config.to_dict()
    for name, own in config.attribute_map.items():  # GPT-J's n_layer is num_hidden_layers
        if own in whole:
            whole[name] = whole.pop(own)
    return without_stored(whole)


def build(fields: Mapping[str, Any], kept: int) -> nn.Module:
    """A small model, in which every weight affects the output.

    Args:
        fields: The large model's configuration, completed.
        kept: Number of layers.
    """
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

    config = CONFIG_MAPPING[str(fields["model_type"])](**shrunk(fields, kept))
    config._attn_implementation = config._experts_implementation = "eager"
    known = type(config) in AutoModelForCausalLM._model_mapping
    auto: Any = AutoModelForCausalLM if known else AutoModel
    model: nn.Module = auto.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2 or "norm" in name:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model.double().eval()


def fields_of(model: nn.Module) -> dict[str, Any]:
    """The configuration of a model."""
    fields: dict[str, Any] = model.config.to_dict()  # type: ignore[operator, union-attr]
    return fields
