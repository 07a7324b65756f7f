"""Widths: components of a head, and how many of them are rotated."""

from __future__ import annotations

from typing import Any, NamedTuple

from posembed.models import scalings
from posembed.models.fields import Fields, Keys, positive, real, same, share_of, shown, whole

HEAD_WIDTHS = ("head_dim", "attention_head_dim", "kv_channels")
# If a vision tower has embed_dim, its hidden_size is the width of the language model.
MODEL_WIDTHS = ("embed_dim", "hidden_size", "n_embd", "d_model", "dim")
HEAD_COUNTS = (
    *("num_attention_heads", "num_heads", "n_head", "n_heads"),
    *("encoder_num_attention_heads", "speech_encoder_attention_heads"),
)
# Twice the pairs that a kernel rotates.
MOST_ROTATED = 1024


class Widths(NamedTuple):
    """Components of a head, and how many of them are rotated."""

    head_dim: int
    rotary_dim: int  # may be odd


def check_rotated(rotary_dim: int) -> None:
    """Raises ValueError for more components than a kernel rotates."""
    if rotary_dim > MOST_ROTATED:
        raise ValueError(f"rotary_dim: expected at most {MOST_ROTATED}, got {rotary_dim}")


def head_width(config: Keys) -> int:
    """Components of one head: as given, or the model's width divided by the number of heads."""
    given = config.first(HEAD_WIDTHS)
    width, heads = config.first(MODEL_WIDTHS), config.first(HEAD_COUNTS)
    if given is not None:
        return whole("head_dim", given)
    if config.take("memory_attention_hidden_size"):  # video trackers
        keys = [f"memory_attention_{key}" for key in ("hidden_size", "downsample_rate")]
        keys.append("memory_attention_num_attention_heads")
        width, rate, heads = (whole(key, config.need(key)) for key in keys)
        if min(rate, heads) <= 0:
            raise ValueError(f"{keys[2]}: expected a positive number")
        return width // rate // heads
    if width is None or heads is None:
        raise ValueError(
            "head_dim: missing in the configuration, and it has not both of hidden_size and "
            f"num_attention_heads; it has {shown(sorted(config.fields))}"
        )
    count = positive("num_attention_heads", heads)
    return whole("hidden_size", width) // count


def latent_width(config: Keys) -> int:
    """Components of a head of latent attention that names rotated components but rotates none."""
    keys = ("qk_nope_head_dim", "qk_rope_head_dim")
    return sum(whole(key, config.take(key, 0)) for key in keys)


def _check_part_of_head(config: Keys, part: Any, own: int, rules: Fields) -> None:
    """Rejects a partial_rotary_factor that qk_rope_head_dim overrides with another width."""
    if part is None or "layer_parts" in rules:
        return
    factor = real("partial_rotary_factor", part)
    agrees = factor == 1.0
    for key in ("head_dim", "qk_head_dim", "qk_nope_head_dim"):
        width = config.take(key)
        if width is not None:
            head = whole(key, width) + (own if key == "qk_nope_head_dim" else 0)
            agrees = agrees or share_of(head, factor) == own
    if not agrees:
        raise ValueError(
            f"partial_rotary_factor: the configuration contradicts itself: {factor:g} of no head "
            f"is qk_rope_head_dim, {own}"
        )


def _rotary_width(head_dim: int, part: Any, stated: Any, rules: Fields, rope_type: str) -> int:
    """The rotated width of heads, unless qk_rope_head_dim gives it."""
    if part is None and rules.get("width") == "partial_rotary_factor":
        part = 1.0
    if "whole_heads" in rules and rope_type in ("axial", "default"):  # only scalings read it
        part = None
    by_part = None if part is None else share_of(head_dim, real("partial_rotary_factor", part))
    width = same("rotary_dim", (stated, by_part))
    return head_dim if width is None else whole("rotary_dim", width)


def widths_of(config: Keys, rope: Keys, rules: Fields) -> Widths:
    """The widths of a head, by the catalogue's entry and the scaling's type."""
    rope_type = scalings.rope_type(rope)
    key = "partial_rotary_factor"
    part = same(key, (rope.take(key), config.take(key), config.take("rotary_pct")))
    apart = config.take("qk_rope_head_dim")
    stated = config.same("rotary_dim", "attn_rotary_emb")
    config.ignore("qk_nope_head_dim", "qk_head_dim", "projection_dim")
    # These do not matter if heads have their own width.
    config.ignore(*HEAD_WIDTHS, *MODEL_WIDTHS, *HEAD_COUNTS)
    if rules.get("width") == "half_of_projection":
        heads = positive("num_attention_heads", config.need("num_attention_heads"))
        projection = whole("projection_dim", config.need("projection_dim"))
        return Widths(head_width(config), max(projection // (2 * heads), 32))
    own = whole("qk_rope_head_dim", apart) if apart else 0
    if apart and "trailing" not in rules:  # the rotated components are a separate head
        _check_part_of_head(config, part, own, rules)
        return Widths(own, own)
    head_dim = head_width(config)
    if apart and part is None:
        return Widths(head_dim, own)  # a window of the head, DeepSeek-V4's
    if rope_type == "proportional":
        return Widths(head_dim, head_dim)
    stated = own if apart else stated
    return Widths(head_dim, _rotary_width(head_dim, part, stated, rules, rope_type))
