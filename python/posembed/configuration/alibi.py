"""ALiBi from a Hugging Face configuration: the preset of its model type, with its numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from posembed.configuration.keys import Fields, Keys


class Preset(NamedTuple):
    """Arguments of :meth:`posembed.ALiBi.from_preset`, for all heads of the model."""

    name: str
    num_heads: int
    options: dict[str, Any]


def read(fields: Fields) -> Preset:
    """See :meth:`posembed.ALiBi.from_config`."""
    model_type = fields.get("model_type")
    if model_type not in READERS:
        known = ", ".join(repr(name) for name in READERS)
        raise ValueError(f"model_type: expected one of {known}, got {model_type!r}")
    config = Keys(fields, "the configuration")
    preset = READERS[model_type](config)
    config.done("alibi")
    return preset


def heads_of(config: Keys) -> int:
    """The number of heads, whose key differs between models and their versions."""
    heads = config.same("num_attention_heads", "n_head", "n_heads")
    if heads is None:
        raise ValueError("num_attention_heads: missing in the configuration")
    return int(heads)


def check_alibi(used: Any, key: str) -> None:
    """Raises where the model has another kind of positions."""
    if not used:
        raise ValueError(f"{key}: the model does not use ALiBi, got {used!r}")


def bloom(config: Keys) -> Preset:
    """Bloom has ALiBi always."""
    return Preset("bloom", heads_of(config), {})


def mpt(config: Keys) -> Preset:
    """MPT's attention has a configuration of its own."""
    attention = Keys(config.need("attn_config"), "attn_config")
    check_alibi(attention.need("alibi"), "attn_config['alibi']")
    max_bias = float(attention.take("alibi_bias_max", 8))
    attention.done("alibi")
    return Preset("mpt", heads_of(config), {"max_bias": max_bias})


def falcon(config: Keys) -> Preset:
    """Falcon-RW; later models rotate."""
    check_alibi(config.need("alibi"), "alibi")
    heads = heads_of(config)
    return Preset("falcon", heads, {"head_dim": int(config.need("hidden_size")) // heads})


def baichuan(config: Keys) -> Preset:
    """The models of 13B; those of 7B rotate, and alone say how many positions they have at most."""
    if config.take("max_position_embeddings") is not None:
        raise ValueError("max_position_embeddings: Baichuan-7B, which has it, does not use ALiBi")
    return Preset("baichuan", heads_of(config), {})


def check_kind(config: Keys) -> None:
    """Raises where the key for the kind of positions names another."""
    kind = config.need("position_embedding_type")
    if kind != "alibi":
        raise ValueError(f"position_embedding_type: expected 'alibi', got {kind!r}")


def scaled(name: str, config: Keys) -> Preset:
    """JAIS and BTLM, whose code JAIS has, may scale their slopes."""
    check_kind(config)
    scaling = Keys(config.take("alibi_scaling", {}), "alibi_scaling")
    if scaling.take("type", "linear") != "linear":
        raise ValueError(f"alibi_scaling: expected type 'linear', got {scaling.take('type')!r}")
    factor, length = scaling.take("factor"), scaling.take("train_seq_len")
    scaling.done()
    options: dict[str, Any] = {} if factor is None else {"factor": float(factor)}
    if length is not None and factor is None:
        options["train_length"] = int(length)
    return Preset(name, heads_of(config), options)


def jais(config: Keys) -> Preset:
    """JAIS may scale its slopes."""
    return scaled("jais", config)


def btlm(config: Keys) -> Preset:
    """BTLM may scale its slopes."""
    return scaled("btlm", config)


def refact(config: Keys) -> Preset:
    """Refact has ALiBi always."""
    return Preset("refact", heads_of(config), {})


def bert(config: Keys) -> Preset:
    """MosaicBERT and jina-embeddings-v2, which have BERT's model type."""
    if config.take("alibi_starting_size") is not None:  # of the table that MosaicBERT starts with
        return Preset("mosaicbert", heads_of(config), {})
    check_kind(config)
    return Preset("jina", heads_of(config), {})


READERS = {
    "bloom": bloom,
    "mpt": mpt,
    "falcon": falcon,
    "RefinedWeb": falcon,
    "RefinedWebModel": falcon,
    "baichuan": baichuan,
    "jais": jais,
    "btlm": btlm,
    "gpt_refact": refact,
    "bert": bert,
}
