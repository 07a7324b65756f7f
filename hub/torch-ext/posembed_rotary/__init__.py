"""The installed posembed's rotation, as a Hugging Face Hub kernel."""

from posembed.integrations.huggingface import apply_rotary_pos_emb

from . import layers

__all__ = ["apply_rotary_pos_emb", "layers"]
