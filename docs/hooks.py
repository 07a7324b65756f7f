"""What `mkdocs build` does besides: the pictures, drawn by posembed itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parent / "pictures"


def draw(folder: Path) -> None:
    """Every picture that the pages show."""
    import matplotlib

    matplotlib.use("Agg")
    import posembed as pe

    llama = {f"base {base:,}": pe.RotarySpec(256, base=float(base)) for base in (10_000, 500_000)}
    pictures = {
        "heat_map": pe.plot.heat_map(pe.SinusoidalSpec(512)),
        "shift_matrix": pe.plot.shift_matrix(pe.SinusoidalSpec(32), 7),
        "binary_codes": pe.plot.binary_codes(100),
        "component_scores": pe.plot.component_scores(pe.RotarySpec(256), 128),
        "wavelengths": pe.plot.wavelengths(llama),
        "scores_by_distance": pe.plot.scores_by_distance(llama, 512),
        "angle_error": pe.plot.angle_error(pe.RotarySpec(128, base=500000.0)),
        "alibi_bias": pe.plot.alibi_bias(pe.ALiBi(8), 32),
    }
    folder.mkdir(exist_ok=True)
    for name, axes in pictures.items():
        axes.figure.savefig(folder / f"{name}.png")


def on_pre_build(config: Any) -> None:
    """Pictures first: pages link to them."""
    draw(PICTURES)
