"""Every configuration class of the installed transformers that rotates, against its own code.

Default configurations: nothing is downloaded. Frequencies, attention factor, and the rotation
itself: pairing, direction, window, axes.
"""

from __future__ import annotations

import functools

import posembed as pe
import pytest

pytest.importorskip("transformers")

from support.transformers_models import Model, models

TOKENS = 7
# Their angles are float32 products; positions stay below 50.
TOLERANCE = 2e-5


@functools.cache
def cases() -> dict[str, Model]:
    return {str(model): model for model in models()}


def spec_of(model: Model) -> pe.RotarySpec:
    return pe.RotarySpec.from_huggingface(model.config, model.layer_type)
