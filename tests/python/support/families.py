"""The families of embeddings: the folders that have operators."""

from __future__ import annotations

from pathlib import Path

CSRC = Path(__file__).resolve().parents[3] / "csrc"
FAMILIES = tuple(sorted(path.parent.name for path in CSRC.glob("*/schema.cpp")))
