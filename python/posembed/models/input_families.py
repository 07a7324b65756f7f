"""Input layers of transformers' model families, as InputEmbedding's options and parameters.

models/input_layer.py finds them in a model's folder by tensor name. A model in memory is
read here from its modules, which may differ from its configuration: dropout, resized tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from posembed import pretrained
from posembed.models import files, input_layer
from posembed.models.fields import Fields, as_fields


@dataclasses.dataclass
class InputLayer:
    """A model's input layer, as :class:`posembed.InputEmbedding` represents it.

    Args:
        options: Arguments of InputEmbedding.
        parameters: Parameter values by name.
        training: Whether the model is in training mode.
    """

    options: dict[str, Any]
    parameters: dict[str, Tensor]
    training: bool = False


def read(model_or_path: Any) -> InputLayer:
    """See :meth:`posembed.InputEmbedding.from_huggingface`."""
    model = model_or_path
    if isinstance(model, (str, Path)):
        config = Path(model, "config.json")  # in a folder with safetensors of a supported family
        is_folder = config.is_file() and any(Path(model).glob("model.safetensors*"))
        if is_folder and input_layer.family_of(files.load(config)) is not None:
            return of_folder(model)
        from transformers import AutoModel

        model = AutoModel.from_pretrained(model)
    return of_model(model)


# -------------------------------------------------------------------------------------------- files


def of_folder(path: str | Path) -> InputLayer:
    """The input layer in a model's folder; reads no other tensors."""
    tensors = str(input_layer.tensors_of(path))
    layer = input_layer.read(as_fields(files.load(path)), tensors)
    file = pretrained.open_vectors(tensors)
    parameters = {key: file.tensor(name, copy=True) for key, name in layer["tensors"].items()}
    table = parameters["token.weight"]
    options = {**layer["options"], "dtype": table.dtype}
    return InputLayer(options, {key: nn.Parameter(value) for key, value in parameters.items()})


# ------------------------------------------------------------------------------------------- models


def of_model(model: Any) -> InputLayer:
    """The input layer of a transformers model, with its training mode."""
    if not isinstance(getattr(model, "base_model", None), nn.Module):
        found = type(model).__name__
        raise TypeError(f"model_or_path: expected a transformers model or its name, got {found}")
    base = model.base_model
    family = input_layer.family_of({"model_type": base.config.model_type})
    if family is None:
        known, got = input_layer.names_of_families(), base.config.model_type
        raise ValueError(f"model_or_path: expected a model of {known}, got {got!r}")
    names = {"token": family["token"]}
    for part in ("position", "token_type", "norm", "projection"):
        names[part] = [family[part]] if part in family else []
    every = {part: _attribute(base, *each) for part, each in names.items()}
    modules = {part: module for part, module in every.items() if module is not None}
    parameters = {
        f"{part}.{key}": value
        for part, module in modules.items()
        for key, value in module.named_parameters()
    }
    return InputLayer(_options(base, family, modules), parameters, base.training)


def _options(model: Any, family: Fields, modules: dict[str, Any]) -> dict[str, Any]:
    """What the modules say."""
    token, position, norm = (modules.get(part) for part in ("token", "position", "norm"))
    weight: Tensor = modules["token"].weight
    options: dict[str, Any] = {
        "num_embeddings": len(weight),
        "embedding_dim": weight.shape[1],
        "padding_idx": modules["token"].padding_idx,
        "position_rule": family["rule"],
        "device": weight.device,
        "dtype": weight.dtype,
    }
    if position is not None:
        rows, options["embedding_dim"] = position.weight.shape
        first = input_layer.first_row(family, options["padding_idx"])
        options["max_positions"] = rows - first
    else:  # FSMT scales in the stack, the others in the table
        stack = getattr(model, "encoder", model)
        holder: Any = stack if hasattr(stack, "embed_scale") else token
        options |= {"positions": "sinusoidal", "scale": holder.embed_scale}
    if "token_type" in modules:
        options["num_types"] = modules["token_type"].num_embeddings
    if norm is not None:
        options |= {"norm": "layer", "eps": norm.eps}
    if "projection" in modules and family["rule"] == "opt":
        options["token_dim"] = modules["projection"].in_features
    elif "projection" in modules:
        options["output_dim"] = modules["projection"].out_features
    if "dropout" in family:
        dropout = _attribute(model, family["dropout"][2])
        options["dropout"] = getattr(dropout, "p", dropout)
    return options


def _attribute(model: Any, *names: str) -> Any:
    """The first of these that the model has, which may be the encoder or decoder itself."""
    for name in names:
        path = name.removesuffix(".weight")
        for own in filter(None, (path, path.partition(".")[2])):
            with contextlib.suppress(AttributeError):
                return operator.attrgetter(own)(model)
    return None
