"""Where modules of earlier versions are: old paths import, and pickles that name them load."""

import importlib
import sys

MOVED = {
    "modules": (
        "alibi",
        "bag",
        "fourier",
        "input",
        "learned",
        "ngram",
        "relative_bias",
        "relative_logits",
        "rotary",
        "sinusoidal",
        "token",
    ),
    "specifications": ("scaling", "score_positions", "score_scale"),
    "tables": ("ahead", "file_table", "quantized", "trained_rows"),
    "models": ("conversion", "input_families"),
    "glue": ("dimensions", "shapes", "sharding", "vmap"),
}


def register() -> None:
    """Gives modules their old paths too: an old path is the module itself."""
    package = sys.modules["posembed"]
    now = {name: f"posembed.{folder}.{name}" for folder in MOVED for name in MOVED[folder]}
    for name, path in {**now, "specification": "posembed.specifications"}.items():
        module = importlib.import_module(path)
        sys.modules[f"posembed.{name}"] = module
        setattr(package, name, module)
