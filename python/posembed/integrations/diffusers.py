"""posembed in models of diffusers: the same ``patch`` as for all others."""

from __future__ import annotations

from posembed.integrations.huggingface import Report, patch, unpatch

__all__ = ["Report", "patch", "unpatch"]
