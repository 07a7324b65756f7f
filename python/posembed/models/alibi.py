"""Reads ALiBi from a configuration: the preset of its model type, with the model's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from posembed.models import gguf
from posembed.models.fields import (
    Fields,
    Keys,
    is_number,
    positive,
    real,
    same,
    shown,
    text_of,
    whole,
)


class Preset(NamedTuple):
    """Arguments of :meth:`posembed.ALiBi.from_preset`, for all heads of the model."""

    name: str
    num_heads: int
    options: dict[str, Any]  # max_bias, head_dim, factor or train_length


def _heads(config: Keys) -> int:
    """The number of heads. Its key differs between models and their versions."""
    names = ("num_attention_heads", "n_head", "n_heads")
    heads = config.same(*names)
    if heads is None:
        raise ValueError("num_attention_heads: missing in the configuration")
    return whole(config.stated(*names), heads)


class NotUsedError(ValueError):
    """A model has positions of another kind."""


def _check_used(used: Any, key: str) -> None:
    if not used:
        raise NotUsedError(f"{key}: the model does not use ALiBi, got {shown(used)}")


def _check_kind(config: Keys) -> None:
    kind = config.take("position_embedding_type")
    if kind != "alibi":
        raise NotUsedError(f"position_embedding_type: expected 'alibi', got {shown(kind)}")


def _mpt(config: Keys) -> Preset:
    """MPT's attention has its own configuration."""
    attention = Keys(config.need("attn_config"), "attn_config")
    _check_used(attention.need("alibi"), "attn_config['alibi']")
    max_bias = real("alibi_bias_max", attention.take("alibi_bias_max", 8))
    attention.done("alibi")
    return Preset("mpt", _heads(config), {"max_bias": max_bias})


def _falcon(config: Keys) -> Preset:
    """Falcon-RW; later Falcon models rotate."""
    _check_used(config.take("alibi"), "alibi")
    heads = positive("num_attention_heads", _heads(config))
    width = whole("hidden_size", config.need("hidden_size"))
    return Preset("falcon", heads, {"head_dim": width // heads})


def _baichuan(config: Keys) -> Preset:
    """The 13B models. The 7B models rotate, and only they have max_position_embeddings."""
    key = "max_position_embeddings"
    if config.take(key) is not None:
        raise NotUsedError(f"{key}: Baichuan-7B, which has it, does not use ALiBi")
    return Preset("baichuan", _heads(config), {})


def _scaled(name: str, config: Keys) -> Preset:
    """JAIS and BTLM, which share code, may scale their slopes."""
    _check_kind(config)
    scaling = Keys(config.take("alibi_scaling", {}), "alibi_scaling")
    kind = scaling.take("type", "linear")
    if kind != "linear":
        raise ValueError(f"alibi_scaling: expected type 'linear', got {shown(kind)}")
    factor, length = scaling.take("factor"), scaling.take("train_seq_len")
    scaling.done()
    options: dict[str, Any] = {}
    if factor is not None:
        options["factor"] = real("factor", factor)
    elif length is not None:
        options["train_length"] = whole("train_seq_len", length)
    return Preset(name, _heads(config), options)


def _bert(config: Keys) -> Preset:
    """MosaicBERT and jina-embeddings-v2, both of model type "bert"."""
    if config.take("alibi_starting_size") is not None:  # only MosaicBERT has it
        return Preset("mosaicbert", _heads(config), {})
    _check_kind(config)
    return Preset("jina", _heads(config), {})


_READERS: dict[str, Callable[[Keys], Preset]] = {
    "bloom": lambda config: Preset("bloom", _heads(config), {}),
    "mpt": _mpt,
    **dict.fromkeys(("falcon", "RefinedWeb", "RefinedWebModel"), _falcon),
    "baichuan": _baichuan,
    "jais": lambda config: _scaled("jais", config),
    "btlm": lambda config: _scaled("btlm", config),
    "gpt_refact": lambda config: Preset("refact", _heads(config), {}),
    "bert": _bert,
}


def _of_metadata(fields: Fields) -> Preset:
    """GGUF metadata: the table has the family, and the bias of those that have no key for it."""
    architecture = text_of(fields.get("general.architecture"))
    alibi = gguf.rules_of(architecture).get("alibi")
    if alibi is None:
        raise NotUsedError(
            f"general.architecture: expected one with ALiBi, got {shown(architecture)}"
        )
    config = Keys(gguf.keys_of_architecture(fields, architecture), "the metadata")
    count = config.take("block_count")
    if count != alibi.get("block_count", count):
        raise NotUsedError(
            f"block_count: only the model of {shown(alibi['block_count'])} layers uses ALiBi, got "
            f"{shown(count)}"
        )
    key, heads = "attention.max_alibi_bias", "attention.head_count"
    known = alibi.get("max_bias")
    needed = known and not is_number(known)
    bias = same(key, (config.need(key), None) if needed else (config.take(key), known))
    _check_used(bias, key)
    num_heads = whole(heads, config.need(heads))
    config.done("alibi")
    return Preset(alibi["preset"], num_heads, {"max_bias": real(key, bias)})


def is_used(fields: Fields) -> bool:
    """Whether a model uses ALiBi. What it says of it may still be wrong."""
    try:
        read(fields)
    except ValueError as error:
        return not isinstance(error, NotUsedError)
    return True


def read(fields: Fields) -> Preset:
    """See :meth:`posembed.ALiBi.from_config`."""
    if gguf.is_metadata(fields):
        return _of_metadata(fields)
    model_type = fields.get("model_type")
    reader = _READERS.get(text_of(model_type))
    if reader is None:
        known = ", ".join(f"'{name}'" for name in _READERS)
        raise NotUsedError(f"model_type: expected one of {known}, got {shown(model_type)}")
    config = Keys(fields, "the configuration")
    preset = reader(config)
    config.done("alibi")
    return preset
