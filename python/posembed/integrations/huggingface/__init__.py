"""posembed in Hugging Face transformers models, without changes to their code or weights."""

from __future__ import annotations

from posembed.integrations.huggingface._kernels import (
    RotaryPosEmb,
    apply_rotary_pos_emb,
    register_kernels,
    unregister_kernels,
)
from posembed.integrations.huggingface._patch import Report, Row, patch, unpatch

__all__ = [
    "Report",
    "RotaryPosEmb",
    "Row",
    "apply_rotary_pos_emb",
    "patch",
    "register_kernels",
    "unpatch",
    "unregister_kernels",
]
