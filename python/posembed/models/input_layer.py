"""The input layer of a model's folder: options of InputEmbedding, and where its parameters are.

input_layers.json has the families; sizes are those of the tensors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from posembed.models.data import table
from posembed.models.fields import Fields, flag, real, shown, text_of, whole

TENSORS = ("model.safetensors", "model.safetensors.index.json")


def tensors_of(folder: str | os.PathLike[str]) -> Path:
    """The path of a model's safetensors in its folder: one file, or the index of several."""
    for name in TENSORS:
        if Path(folder, name).is_file():
            return Path(folder, name)
    raise ValueError(f"{os.fspath(folder)}: expected a folder with {' or '.join(TENSORS)}")


class _Names:
    """A family's tensors among those of a file."""

    def __init__(self, path: str, prefix: str) -> None:
        from posembed import pretrained

        self.path = path
        self._prefix = prefix
        self._file = pretrained.open_vectors(path)
        self._known = set(self._file.names)

    def find(self, *names: str) -> str | None:
        """The name in the file of the first of these tensors that is present."""
        each = (start + name for name in names for start in (self._prefix, ""))
        return next((name for name in each if name in self._known), None)

    def need(self, *names: str) -> str:
        found = self.find(*names)
        if found is None:
            raise ValueError(f"{self.path}: expected a tensor {names[0]}")
        return found

    def sizes(self, name: str) -> list[int]:
        return list(self._file.shape(name))

    def table(self, name: str) -> list[int]:
        """The sizes of a table."""
        sizes = self.sizes(name)
        if len(sizes) != 2:
            raise ValueError(f"{self.path}: {name}: expected two dimensions, got {sizes}")
        return sizes


def _options_of(config: Fields, family: Fields) -> Fields:
    """What the configuration's keys determine."""
    key, padding = "pad_token_id", family.get("padding")
    if "padding" in family and key in config:
        padding = None if config[key] is None else whole(key, config[key])
    options: Fields = {"padding_idx": padding, "position_rule": family["rule"]}
    options |= {"positions": "learned", "scale": 1.0, "eps": None, "dropout": 0.0, "norm": None}
    options |= {"max_positions": None, "num_types": 0, "token_dim": None, "output_dim": None}
    if "dropout" in family:
        key, otherwise, _ = family["dropout"]
        options["dropout"] = real(key, config.get(key, otherwise))
    if "norm" in family:
        options["eps"] = real("layer_norm_eps", config.get("layer_norm_eps", 1e-12))
    if "position" not in family:
        options["positions"] = "sinusoidal"
        options["scaled"] = flag("scale_embedding", config.get("scale_embedding", True))
        return options
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ValueError(f"position_embedding_type: expected 'absolute', got {shown(kind)}")
    return options


def _add_norm(layer: Fields, names: _Names, module: str) -> None:
    """Old files of BERT name a norm's parameters gamma and beta."""
    layer["options"]["norm"] = "layer"
    layer["tensors"]["norm.weight"] = names.need(f"{module}.weight", f"{module}.gamma")
    layer["tensors"]["norm.bias"] = names.need(f"{module}.bias", f"{module}.beta")


def _add_projection(layer: Fields, names: _Names, family: Fields) -> None:
    """A projection before the sum (OPT) or after it; models with a single width have none."""
    module, options = family["projection"], layer["options"]
    weight = names.find(f"{module}.weight")
    if weight is None:
        return
    layer["tensors"]["projection.weight"] = weight
    if family["rule"] == "opt":
        options["token_dim"] = names.table(weight)[1]
        return
    options["output_dim"] = names.table(weight)[0]
    layer["tensors"]["projection.bias"] = names.need(f"{module}.bias")


def _check_widths(layer: Fields, names: _Names) -> None:
    """Raises ValueError unless the tensors agree on their widths.

    Each of them fits the file, but memory for the rows of one and the width of another may not.
    """
    options = layer["options"]
    width = options["embedding_dim"]
    token_width = options["token_dim"] or width
    for parameter, name in sorted(layer["tensors"].items()):
        sizes = names.sizes(name)
        if not sizes or parameter == "projection.bias":
            continue  # checked when copied
        expected = list(sizes)
        if parameter == "projection.weight" and options["token_dim"] is not None:
            expected[0] = width
        before = parameter in ("token.weight", "projection.weight")
        expected[-1] = token_width if before else width
        if expected != sizes:
            raise ValueError(f"{names.path}: {name}: expected {expected}, got {sizes}")


def family_of(config: Fields) -> Fields | None:
    """What is known of the family of a configuration."""
    families: list[Fields] = table("input_layers")["families"]
    name = text_of(config.get("model_type"))
    return next((family for family in families if name in family["names"]), None)


def names_of_families() -> str:
    """All model types, in words."""
    return ", ".join(name for each in table("input_layers")["families"] for name in each["names"])


def first_row(family: Fields, padding_idx: int | None) -> int:
    """The row of position 0 in the table of a family."""
    return {"opt": 2, "roberta": (padding_idx or 0) + 1}.get(family["rule"], 0)


def read(config: Fields, path: str) -> dict[str, Any]:
    """The input layer of a file of tensors: "options", and "tensors" by parameter.

    Raises:
        ValueError: The family is unknown, or tensors are missing or do not fit each other.
    """
    family = family_of(config)
    if family is None:
        known, got = names_of_families(), shown(config.get("model_type"))
        raise ValueError(f"model_type: expected one of {known}, got {got}")
    names = _Names(path, family["prefix"])
    token = names.need(*family["token"])
    rows, width = names.table(token)
    layer: Fields = {"options": _options_of(config, family), "tensors": {"token.weight": token}}
    options = layer["options"]
    options |= {"num_embeddings": rows, "embedding_dim": width}
    if options.pop("scaled", False):
        options["scale"] = float(width) ** 0.5
    if "position" in family:
        _add_positions(layer, names, family)
    if "token_type" in family:
        layer["tensors"]["token_type.weight"] = names.need(family["token_type"])
        options["num_types"] = names.table(layer["tensors"]["token_type.weight"])[0]
    if "norm" in family:
        _add_norm(layer, names, family["norm"])
    if "projection" in family:
        _add_projection(layer, names, family)
    _check_widths(layer, names)
    return layer


def _add_positions(layer: Fields, names: _Names, family: Fields) -> None:
    """The table of learned positions, whose width is that of the sum."""
    found = names.need(family["position"])
    rows, width = names.table(found)
    first = first_row(family, layer["options"]["padding_idx"])
    layer["tensors"]["position.weight"] = found
    layer["options"] |= {"max_positions": rows - first, "embedding_dim": width}
