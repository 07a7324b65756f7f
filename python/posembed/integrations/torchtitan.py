"""Overrides for torchtitan's training: its rotary modules rotate by posembed's kernel.

torchtitan_train … --override.imports posembed.integrations.torchtitan.complex_rope
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from posembed import functional

try:
    import spmd_types as spmd  # type: ignore[import-not-found]
    from torchtitan.config import derive, override  # type: ignore[import-not-found]
    from torchtitan.models.common.rope import (  # type: ignore[import-not-found]
        ComplexRoPE,
        CosSinRoPE,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "posembed.integrations.torchtitan overrides modules of torchtitan, and "
        f"{error.name} is missing: python -m pip install torchtitan",
        name=error.name,
    ) from error

__all__ = ["RotaryComplex", "RotaryCosSin", "complex_rope", "cos_sin_rope"]

_HEADS = {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.S(2)}  # [batch, seq, heads, head_dim]


@spmd.local_map(out_types=(_HEADS, _HEADS))  # type: ignore[untyped-decorator]
def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Query and key by tables [1 or batch, seq, 1, width], rounded once like torchtitan's."""
    tables = cos.squeeze(2), None if sin is None else sin.squeeze(2)
    return functional.rotary_tables(
        query, key, *tables, interleaved=sin is None, unsqueeze_dim=2, numerics="float32_product"
    )


class RotaryComplex(ComplexRoPE):  # type: ignore[misc]
    """torchtitan's ``ComplexRoPE``, with one kernel for query and key.

    Results may differ in the last bit of float32, as PyTorch's complex products do by layout.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):  # type: ignore[misc]
        """The options of ``ComplexRoPE.Config``."""

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key [batch, seq, heads, head_dim] by the module's cache."""
        rotated: tuple[Tensor, Tensor] = _rotated(query, key, rope_cache, None)
        return rotated


class RotaryCosSin(CosSinRoPE):  # type: ignore[misc]
    """torchtitan's ``CosSinRoPE``, with one kernel for query and key and the same bits."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):  # type: ignore[misc]
        """The options of ``CosSinRoPE.Config``."""

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key [batch, seq, heads, head_dim] by the module's cache."""
        cos, sin = rope_cache.chunk(2, -1)
        rotated: tuple[Tensor, Tensor] = _rotated(query, key, cos, sin)
        return rotated


@override(  # type: ignore[untyped-decorator]
    target=ComplexRoPE.Config, exact=True, description="posembed's rotation by complex tables"
)
def complex_rope(config: ComplexRoPE.Config) -> RotaryComplex.Config:
    """Replaces every ``ComplexRoPE`` (Llama 3, DeepSeek-V3)."""
    made: RotaryComplex.Config = derive(config, RotaryComplex.Config)
    return made


@override(  # type: ignore[untyped-decorator]
    target=CosSinRoPE.Config, exact=True, description="posembed's rotation by cosines and sines"
)
def cos_sin_rope(config: CosSinRoPE.Config) -> RotaryCosSin.Config:
    """Replaces every ``CosSinRoPE`` (Qwen3, gpt-oss); subclasses stay."""
    made: RotaryCosSin.Config = derive(config, RotaryCosSin.Config)
    return made
