"""Input layers of transformers' model families, as InputEmbedding's options and parameters.

models/input_layer.py finds them in a model's folder by tensor name. A model in memory is
read here from its modules, which may differ from its configuration: dropout, resized tables.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from posembed import pretrained
from posembed.models import files, input_layer
from posembed.models.fields import as_fields


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
        if is_folder_of_family(Path(model)):
            return of_folder(model)
        from transformers import AutoModel

        model = AutoModel.from_pretrained(model)
    return of_model(model)


# -------------------------------------------------------------------------------------------- files


def is_folder_of_family(path: Path) -> bool:
    """Whether this is a folder with safetensors of a supported family."""
    if not (path / "config.json").is_file() or not any(path.glob("model.safetensors*")):
        return False
    return files.load(path / "config.json").get("model_type") in FAMILIES


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
    family = base.config.model_type
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"model_or_path: expected a model of {known}, got {family!r}")
    layer = FAMILIES[family](base)
    layer.training = base.training
    return layer


@dataclasses.dataclass
class _Parts:
    """The modules of a model's input layer."""

    token: nn.Embedding
    position: nn.Embedding | None = None
    token_type: nn.Embedding | None = None
    norm: nn.LayerNorm | None = None
    projection: nn.Linear | None = None


def _layer(parts: _Parts, *, first_row: int = 0, **options: Any) -> InputLayer:
    """The sizes and values of these modules."""
    dim = parts.token.embedding_dim
    if parts.position is not None:
        rows, dim = parts.position.weight.shape
        options["max_positions"] = rows - first_row
    options.update(
        num_embeddings=parts.token.num_embeddings,
        embedding_dim=dim,
        num_types=parts.token_type.num_embeddings if parts.token_type is not None else 0,
        norm="layer" if parts.norm is not None else None,
        eps=parts.norm.eps if parts.norm is not None else None,
        padding_idx=parts.token.padding_idx,
        device=parts.token.weight.device,
        dtype=parts.token.weight.dtype,
    )
    parameters = {
        f"{field.name}.{key}": value
        for field in dataclasses.fields(parts)
        if (module := getattr(parts, field.name)) is not None
        for key, value in module.named_parameters()
    }
    return InputLayer(options, parameters)


def _bert_parts(layer: Any, projection: nn.Linear | None = None) -> _Parts:
    return _Parts(
        layer.word_embeddings,
        layer.position_embeddings,
        getattr(layer, "token_type_embeddings", None),  # DistilBERT has none
        layer.LayerNorm,
        projection,
    )


def _bert(model: Any) -> InputLayer:
    layer = model.embeddings
    return _layer(_bert_parts(layer), dropout=layer.dropout.p)


def _roberta(model: Any) -> InputLayer:
    layer = model.embeddings
    return _layer(
        _bert_parts(layer),
        first_row=layer.padding_idx + 1,
        position_rule="roberta",
        dropout=layer.dropout.p,
    )


def _projected(layer: Any, projection: nn.Linear | None) -> InputLayer:
    output_dim = None if projection is None else projection.out_features
    parts = _bert_parts(layer, projection)
    return _layer(parts, output_dim=output_dim, dropout=layer.dropout.p)


def _electra(model: Any) -> InputLayer:
    return _projected(model.embeddings, getattr(model, "embeddings_project", None))


def _albert(model: Any) -> InputLayer:
    return _projected(model.embeddings, model.encoder.embedding_hidden_mapping_in)


def _gpt2(model: Any) -> InputLayer:
    return _layer(_Parts(model.wte, model.wpe), dropout=model.drop.p)


def _opt(model: Any) -> InputLayer:
    decoder = getattr(model, "decoder", model)  # the model may be the decoder itself
    token_dim = None if decoder.project_in is None else decoder.project_in.in_features
    parts = _Parts(decoder.embed_tokens, decoder.embed_positions, projection=decoder.project_in)
    return _layer(parts, first_row=2, position_rule="opt", token_dim=token_dim)


def _fairseq(model: Any) -> InputLayer:
    stack = getattr(model, "encoder", model)  # the model may be the encoder or the decoder itself
    token = stack.embed_tokens
    return _layer(
        _Parts(token),
        positions="sinusoidal",
        position_rule="roberta",
        # FSMT scales in the stack, the others in the table.
        scale=stack.embed_scale if hasattr(stack, "embed_scale") else token.embed_scale,
        dropout=stack.dropout,
    )


FAMILIES = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "camembert": _roberta,
    "distilbert": _bert,
    "electra": _electra,
    "albert": _albert,
    "gpt2": _gpt2,
    "opt": _opt,
    "m2m_100": _fairseq,
    "nllb-moe": _fairseq,
    "fsmt": _fairseq,
}
