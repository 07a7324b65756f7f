"""What tests of patched models share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each rotation of a placeholder normalised it in its own pass."""
    from posembed.integrations.huggingface import _late, _rotation

    found: list[bool] = []

    def spy(*args: Any) -> Any:
        result = _late.normed_and_rotated(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(_rotation, "normed_and_rotated", spy)
    return found
