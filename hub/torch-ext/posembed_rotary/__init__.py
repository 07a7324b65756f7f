"""The rotation of the installed posembed, as a kernel of the Hugging Face hub."""

from posembed.integrations.huggingface import apply_rotary_pos_emb

from . import layers

__all__ = ["apply_rotary_pos_emb", "layers"]
