"""Finds every rotating model of the installed transformers: its default configuration and code."""

import dataclasses
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

ROTARY_KEY = re.compile("rope|rotary|theta")

# Keys that default configurations lack for transformers' code to run and rotate, with the values of
# published checkpoints.
COMPLETED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))}},
    **{key: {"position_embeddings_type": "rotary"} for key in ("seamless_m4t", "wav2vec2-bert", "wav2vec2-conformer")},
    "esm": {"position_embedding_type": "rotary"},
    "glm4v_moe_text": {"head_dim": 128},
    "glm4v_text": {"partial_rotary_factor": 0.5},
    "glm_image_text": {"partial_rotary_factor": 0.5},
    "bamba": {"attn_layer_indices": [9, 18, 27]},  # all layers are Mamba by default
    "granitemoehybrid": {"position_embedding_type": "rope", "layer_types": ["full_attention"] * 32},
    "minimax_m3_vl_text": {"partial_rotary_factor": 0.5},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "zamba2": {"use_mem_rope": True},
}  # fmt: skip
# Two composite configurations that have no default.
WITHOUT_DEFAULT = {"gemma4_assistant", "nougat"}
ROTARY_CLASS = re.compile(r"Rotary\w*Embedding$")


@dataclasses.dataclass(frozen=True)
class Model:
    """One configuration class, and one kind of layer if layers differ."""

    model_type: str
    layer_type: str | None
    config: Any
    code: types.ModuleType

    def __str__(self) -> str:
        return f"{self.model_type}-{self.layer_type}" if self.layer_type else self.model_type

    def rotary(self) -> nn.Module:
        """The model's own rotary module."""
        errors = []
        for candidate in self._candidates():
            try:
                return candidate(self.config)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                errors.append(f"{candidate.__name__}: {error!r}")
        raise LookupError(f"{self}: no rotary module can be built: {errors}")

    def _candidates(self) -> list[type[nn.Module]]:
        """Rotary classes of the model's code; those that name this configuration first."""
        classes = [
            value for name, value in vars(self.code).items() if inspect.isclass(value) and ROTARY_CLASS.search(name)
        ]
        vision = "vision" in self.model_type or self.axial

        def distance(candidate: type[nn.Module]) -> tuple[bool, bool]:
            parameter = inspect.signature(candidate.__init__).parameters.get("config")
            annotation = getattr(parameter, "annotation", None)
            named = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
            return (type(self.config).__name__ not in named, ("Vision" in candidate.__name__) != vision)

        return sorted(classes, key=distance)

    @property
    def axial(self) -> bool:
        parameters = getattr(self.config, "rope_parameters", None) or {}
        return parameters.get("rope_type") == "axial"

    def apply_functions(self) -> dict[str, Any]:
        """The functions that rotate query and key."""
        return {
            name: value
            for name, value in vars(self.code).items()
            if name.startswith(("apply_rotary", "apply_multi")) and callable(value)
        }


def layer_types(config: Any) -> list[str | None]:
    """Kinds of layers with different rotations."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [key for key, value in parameters.items() if isinstance(value, dict)]
    return list(nested) or [None]


def code_of(config: Any) -> types.ModuleType | None:
    """The modeling module beside the configuration's."""
    package = type(config).__module__.rpartition(".")[0]
    folder = Path(inspect.getfile(type(config))).parent
    names = [f.stem for f in sorted(folder.glob("modeling_*.py"))]
    own = type(config).__module__.rpartition(".")[2].replace("configuration_", "modeling_")
    for name in sorted(names, key=lambda name: name != own):
        return importlib.import_module(f"{package}.{name}")
    return None


def models() -> Iterator[Model]:
    """All models, from their default configurations, so that nothing is downloaded."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    for model_type in sorted(CONFIG_MAPPING.keys()):
        try:
            config = CONFIG_MAPPING[model_type](**COMPLETED.get(model_type, {}))
        except (ValueError, StrictDataclassError):
            if model_type not in WITHOUT_DEFAULT:
                raise
            continue
        keys = {key for key, value in config.to_dict().items() if value is not None}
        if not any(ROTARY_KEY.search(key) for key in keys):
            continue
        code = code_of(config)
        if code is None:
            continue
        for layer_type in layer_types(config):
            yield Model(model_type, layer_type, config, code)


def of_layer(rotary: nn.Module, name: str, layer_type: str | None) -> Any:
    """An attribute of the rotary module, for one kind of layer if it has several."""
    own = f"{layer_type}_{name}"
    return getattr(rotary, own) if hasattr(rotary, own) else getattr(rotary, name)


def rotate(model: Model, function: Any, rotary: nn.Module, query: Tensor, positions: Tensor) -> Tensor:
    """The model's own rotation of a query [1, heads, tokens, head_dim] or [tokens, heads, head_dim]."""
    options = {}
    if model.layer_type and "layer_type" in inspect.signature(rotary.forward).parameters:
        options["layer_type"] = model.layer_type
    angles = rotary(query, positions, **options)
    parameters = inspect.signature(function).parameters
    if "freqs_cis" in parameters:
        if model.code.__name__.endswith("llama4"):
            return function(query.transpose(1, 2), query.transpose(1, 2), angles)[0].transpose(1, 2)
        return function(query, query, angles)[0]
    result = function(query, query, *angles) if "k" in parameters else function(query, *angles)
    return result[0] if isinstance(result, tuple) else result
