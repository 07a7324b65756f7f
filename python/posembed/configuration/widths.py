"""Widths: components of a head, and how many of them are rotated."""

from __future__ import annotations

from posembed.configuration import conventions
from posembed.configuration.keys import Keys, same
from posembed.configuration.scalings import rope_type

HEAD_WIDTHS = ("head_dim", "attention_head_dim", "kv_channels")


def head_width(config: Keys) -> int:
    """Components of one head: given, or the width shared out among the heads."""
    given = config.first(*HEAD_WIDTHS)
    # Where a vision tower has embed_dim, hidden_size is the width of the language model.
    width = config.first("embed_dim", "hidden_size", "n_embd", "d_model", "dim")
    heads = config.first(
        *("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_num_attention_heads"),
        "speech_encoder_attention_heads",
    )
    if given:
        return int(given)
    if config.take("memory_attention_hidden_size"):  # video trackers rotate there
        keys = ("hidden_size", "downsample_rate", "num_attention_heads")
        width, rate, heads = (config.need(f"memory_attention_{key}") for key in keys)
        return int(width) // int(rate * heads)
    if not width or not heads:
        raise ValueError(
            "head_dim: missing in the configuration, and it has not both of hidden_size and "
            f"num_attention_heads; it has {sorted(config.fields)}"
        )
    return int(width) // int(heads)


def latent_width(config: Keys) -> int:
    """Heads of latent attention that keep the name of rotated components but rotate none."""
    return int(config.take("qk_nope_head_dim", 0)) + int(config.take("qk_rope_head_dim", 0))


def widths(config: Keys, rope: Keys, model_type: str) -> tuple[int, int]:
    """head_dim and the rotated width, which may be odd."""
    part = same(
        "partial_rotary_factor",
        rope.take("partial_rotary_factor"),
        config.take("partial_rotary_factor"),
        config.take("rotary_pct"),
    )
    apart, stated = config.take("qk_rope_head_dim"), config.same("rotary_dim", "attn_rotary_emb")
    config.ignore("qk_nope_head_dim", "qk_head_dim", "projection_dim", *HEAD_WIDTHS)
    if model_type == "clvp_encoder":
        heads = int(config.need("num_attention_heads"))
        return head_width(config), max(int(config.need("projection_dim")) // (2 * heads), 32)
    if apart and model_type not in conventions.TRAILING:  # rotated components are a head of theirs
        return int(apart), int(apart)
    head_dim = head_width(config)
    if apart and part is None:  # a window of the head, DeepSeek-V4's
        return head_dim, int(apart)
    if rope_type(rope) == "proportional":
        return head_dim, head_dim
    if part is None and model_type in conventions.WIDTH_BY_PART:
        part = 1.0
    if part is None and stated is None:
        part = conventions.DEFAULT_PART.get(model_type)
    rotary_dim = same("rotary_dim", stated, None if part is None else int(head_dim * part))
    return head_dim, head_dim if rotary_dim is None else int(rotary_dim)
