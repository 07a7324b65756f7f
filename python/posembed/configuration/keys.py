"""Strict reading of a dictionary: unknown and missing keys raise, and so do words for numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = dict[str, Any]


def words(text: str) -> frozenset[str]:
    """The words of a text: hundreds of names read better without quotes."""
    return frozenset(text.split())


# Keys whose value is one number wherever they occur.
NUMBERS = words(
    """
alpha attention_factor attention_head_dim base beta beta_fast beta_slow compress_rope_theta dim
embed_dim factor global_head_dim global_rope_theta head_dim hidden_size high_freq_factor
kv_channels layer_rope_theta local_rope_theta long_mscale low_freq_factor max_position_embeddings
mscale mscale_all_dim n_embd n_head n_heads num_attention_heads num_heads
original_max_position_embeddings partial_rotary_factor projection_dim qk_nope_head_dim
qk_rope_head_dim rope_high_freq_factor rope_local_base_freq rope_ratio rope_scaling_factor
rope_theta rotary_dim rotary_emb_base rotary_embedding_base rotary_pct seq_length short_mscale
swa_rope_theta
attention.key_length context_length embedding_length freq_base freq_base_swa scale_linear
scaling.attn_factor scaling.factor scaling.original_context_length
"""
)


class Keys:
    """A dictionary whose keys are taken one by one; :meth:`done` refuses those that are left.

    Args:
        fields: The dictionary; keys that are None count as absent.
        where: What it is, for error messages.
    """

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        check_mapping(fields, where)
        self._names = set(fields)
        self.fields = {key: value for key, value in fields.items() if value is not None}
        self.where = where
        self._accepted: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key that may be absent."""
        self._accepted.add(key)
        value = self.fields.get(key)
        if value is None:
            return default
        return number(key, value) if key in NUMBERS else value

    def has(self, key: str) -> bool:
        """Whether the key is there, be it with None."""
        return key in self._names

    def need(self, key: str) -> Any:
        """The value of a key that must be there."""
        value = self.take(key)
        if value is None:
            raise ValueError(f"{key}: missing in {self.where}, which has {sorted(self.fields)}")
        return value

    def first(self, *keys: str) -> Any:
        """The value of the first key that is there and is not zero."""
        values = [self.take(key) for key in keys]
        return next((value for value in values if value), None)

    def same(self, *keys: str) -> Any:
        """The one value that several keys agree on; None where none is there."""
        return same(keys[0], *(self.take(key) for key in keys))

    def ignore(self, *keys: str) -> None:
        """Accepts keys that do not matter here."""
        self._accepted.update(keys)

    def left(self, containing: str = "") -> list[str]:
        """The keys that contain a word and were neither taken nor accepted."""
        return sorted(key for key in set(self.fields) - self._accepted if containing in key)

    def done(self, containing: str = "") -> None:
        """Raises for keys that contain a word and were not taken."""
        unknown = self.left(containing)
        if unknown:
            accepted = sorted(key for key in self._accepted if containing in key)
            raise ValueError(f"{self.where}: unknown keys {unknown}; accepted are {accepted}")


def check_mapping(value: Any, where: str) -> None:
    """Raises ValueError for what is not a dictionary."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a dictionary, got {value!r}")


def number(key: str, value: Any) -> Any:
    """The value, if it is a number; ValueError names the key otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key}: expected a number, got {value!r:.60}")
    return value


def same(key: str, *values: Any) -> Any:
    """The one value that several places agree on; None where no place has one."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise ValueError(f"{key}: the configuration contradicts itself: {given}")
    return given[0] if given else None


def check_effect(name: str, value: Any, why: str) -> None:
    """Raises ValueError for an argument that would have no effect."""
    if value is not None:
        raise ValueError(f"{name}: expected none: {why}, got {value!r}")
