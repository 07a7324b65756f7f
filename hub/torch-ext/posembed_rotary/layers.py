"""The layer for functions that transformers marks as ``rotary_pos_emb``."""

from posembed.integrations.huggingface import RotaryPosEmb

__all__ = ["RotaryPosEmb"]
