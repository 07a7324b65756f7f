"""Finds the parameters of the input layers of transformers' model families."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from posembed.input import InputEmbedding


def copy_input(model: Any) -> InputEmbedding:
    """An InputEmbedding with the parameters and the mode of a model's input layer."""
    if not isinstance(getattr(model, "base_model", None), nn.Module):
        found = type(model).__name__
        raise TypeError(f"model_or_path: expected a transformers model or its name, got {found}")
    base = model.base_model
    family = base.config.model_type
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"model_or_path: expected a model of {known}, got {family!r}")
    return FAMILIES[family](base).train(base.training)


@dataclasses.dataclass
class _Parts:
    """The modules of a model's input layer."""

    token: nn.Embedding
    position: nn.Embedding | None = None
    token_type: nn.Embedding | None = None
    norm: nn.LayerNorm | None = None
    projection: nn.Linear | None = None


def _copied(parts: _Parts, *, first_row: int = 0, **options: Any) -> InputEmbedding:
    """An InputEmbedding with these parts' sizes and values."""
    dim = parts.token.embedding_dim
    if parts.position is not None:
        rows, dim = parts.position.weight.shape
        options["max_positions"] = rows - first_row
    embed = InputEmbedding(
        parts.token.num_embeddings,
        dim,
        num_types=parts.token_type.num_embeddings if parts.token_type is not None else 0,
        norm="layer" if parts.norm is not None else None,
        eps=parts.norm.eps if parts.norm is not None else 1e-5,
        padding_idx=parts.token.padding_idx,
        device=parts.token.weight.device,
        dtype=parts.token.weight.dtype,
        **options,
    )
    with torch.no_grad():
        for field in dataclasses.fields(parts):
            source = getattr(parts, field.name)
            if source is None:
                continue
            for key, value in source.named_parameters():
                parameter = embed.get_parameter(f"{field.name}.{key}")
                parameter.copy_(value).requires_grad_(value.requires_grad)
    return embed


def _bert_parts(layer: Any, projection: nn.Linear | None = None) -> _Parts:
    return _Parts(
        layer.word_embeddings,
        layer.position_embeddings,
        getattr(layer, "token_type_embeddings", None),  # DistilBERT has none
        layer.LayerNorm,
        projection,
    )


def _bert(model: Any) -> InputEmbedding:
    layer = model.embeddings
    return _copied(_bert_parts(layer), dropout=layer.dropout.p)


def _roberta(model: Any) -> InputEmbedding:
    layer = model.embeddings
    return _copied(
        _bert_parts(layer),
        first_row=layer.padding_idx + 1,
        position_rule="roberta",
        dropout=layer.dropout.p,
    )


def _projected(layer: Any, projection: nn.Linear | None) -> InputEmbedding:
    output_dim = None if projection is None else projection.out_features
    parts = _bert_parts(layer, projection)
    return _copied(parts, output_dim=output_dim, dropout=layer.dropout.p)


def _electra(model: Any) -> InputEmbedding:
    return _projected(model.embeddings, getattr(model, "embeddings_project", None))


def _albert(model: Any) -> InputEmbedding:
    return _projected(model.embeddings, model.encoder.embedding_hidden_mapping_in)


def _gpt2(model: Any) -> InputEmbedding:
    return _copied(_Parts(model.wte, model.wpe), dropout=model.drop.p)


def _opt(model: Any) -> InputEmbedding:
    decoder = getattr(model, "decoder", model)  # the model may be the decoder itself
    token_dim = None if decoder.project_in is None else decoder.project_in.in_features
    parts = _Parts(decoder.embed_tokens, decoder.embed_positions, projection=decoder.project_in)
    return _copied(parts, first_row=2, position_rule="opt", token_dim=token_dim)


def _fairseq(model: Any) -> InputEmbedding:
    stack = getattr(model, "encoder", model)  # the model may be the encoder or the decoder itself
    token = stack.embed_tokens
    return _copied(
        _Parts(token),
        positions="sinusoidal",
        position_rule="roberta",
        # FSMT's stack scales, the others' table does.
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
