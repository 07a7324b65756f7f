"""Token and positional embeddings for PyTorch: the same operators in C++ and Python."""

import importlib
from typing import TYPE_CHECKING, Any

from posembed import _library

_library.load()

# ruff: noqa: E402  (the imports below need the library)
from posembed import diagnosis, functional, positions, pretrained
from posembed.diagnosis import diagnose
from posembed.functional import check_errors
from posembed.glue import moved, other_names, shapes, tracers, vmap
from posembed.glue.build_info import build_info
from posembed.glue.decompositions import decompose
from posembed.glue.memory import empty_cache, prefer_huge_pages, set_cache_limit
from posembed.models.conversion import permute_rotary_weight
from posembed.models.description import describe
from posembed.modules.alibi import ALiBi
from posembed.modules.bag import TokenBag
from posembed.modules.fourier import FourierFeatures
from posembed.modules.input import InputEmbedding
from posembed.modules.learned import LearnedPositionalEmbedding
from posembed.modules.ngram import NgramEmbedding, NgramSpec, PerLayerEmbedding
from posembed.modules.relative_bias import RelativePositionBias
from posembed.modules.relative_logits import RelativeLogits
from posembed.modules.rotary import RotaryEmbedding
from posembed.modules.sinusoidal import SinusoidalPositionalEmbedding
from posembed.modules.token import TokenEmbedding
from posembed.pretrained import FileFormatError
from posembed.specifications import MropeRule, RotarySpec, Sections, SinusoidalSpec
from posembed.specifications import scaling as scaling
from posembed.specifications.scaling import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    ProportionalScaling,
    XPosScaling,
    YarnScaling,
)
from posembed.specifications.score_scale import ScoreScale
from posembed.tables.file_table import FileTable
from posembed.tables.quantized import QuantizedTable

if TYPE_CHECKING:
    from posembed import analysis as analysis
    from posembed import cpp as cpp
    from posembed import data as data
    from posembed import optim as optim
    from posembed import plot as plot
    from posembed.integrations.huggingface import patch as patch
    from posembed.integrations.huggingface import unpatch as unpatch

shapes.register()
vmap.register()
tracers.register()
moved.register()

__version__ = build_info()["version"]

__all__ = [
    "ALiBi",
    "DynamicNtkScaling",
    "FileFormatError",
    "FileTable",
    "FourierFeatures",
    "InputEmbedding",
    "LearnedPositionalEmbedding",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MropeRule",
    "NgramEmbedding",
    "NgramSpec",
    "NtkScaling",
    "PerLayerEmbedding",
    "ProportionalScaling",
    "QuantizedTable",
    "RelativeLogits",
    "RelativePositionBias",
    "RotaryEmbedding",
    "RotarySpec",
    "ScoreScale",
    "Sections",
    "SinusoidalPositionalEmbedding",
    "SinusoidalSpec",
    "TokenBag",
    "TokenEmbedding",
    "XPosScaling",
    "YarnScaling",
    "build_info",
    "check_errors",
    "decompose",
    "describe",
    "diagnose",
    "diagnosis",
    "empty_cache",
    "functional",
    "permute_rotary_weight",
    "positions",
    "prefer_huge_pages",
    "pretrained",
    "set_cache_limit",
]

for _name in __all__:
    _value = globals()[_name]
    if isinstance(_value, type):
        other_names.answered(_value)

# Imported on first use: models do not need them, plots need matplotlib, and the C++ modules are
# bound for one version of Python.
_AT_FIRST_USE = ("analysis", "cpp", "data", "optim", "plot")
_FUNCTIONS_AT_FIRST_USE = ("patch", "unpatch")


def __getattr__(name: str) -> Any:
    if name in _AT_FIRST_USE:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS_AT_FIRST_USE:
        return getattr(importlib.import_module(f"{__name__}.integrations.huggingface"), name)
    meant = other_names.ours("names", name)
    guess = "" if meant is None else f"; posembed's is {__name__}.{meant}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{guess}")


def __dir__() -> list[str]:
    """Public names, and the dunder names that Python looks for."""
    own = {name for name in globals() if name.startswith("__")}
    return sorted({*own, *__all__, "scaling", *_AT_FIRST_USE, *_FUNCTIONS_AT_FIRST_USE})
