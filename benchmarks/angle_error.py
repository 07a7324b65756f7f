"""Errors of rotary angles that are computed in float32, as most code computes them.

python benchmarks/angle_error.py > benchmarks/results/angle_error.md

The angle is a float32 position times a float32 frequency. Here the frequency and the product are
rounded correctly; a library's power function may add to the error. benchmarks/exactness measures
the errors of posembed.
"""

from __future__ import annotations

import numpy as np

HEAD_DIM = 128
BASES = (10_000, 500_000)
POSITIONS = tuple(2**bits for bits in range(6, 25))
BLOCK = 1 << 16  # positions at a time, which bounds the memory

HEAD = """\
# Errors of float32 angles

Largest absolute error of sine and cosine at any position below a number of positions, head_dim 128,
written by `python benchmarks/angle_error.py`. The angle is a float32 position times a float32
frequency, each rounded correctly; the reference is computed in float64. The errors of posembed's
angles are in exactness.md.
"""


def worst_error(first: int, last: int, base: int, known: float) -> float:
    """The largest error at positions first to last - 1, or ``known`` if that is larger."""
    positions = np.arange(first, last)[:, None]
    frequencies = base ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    exact = positions * frequencies
    rounded = positions.astype(np.float32) * frequencies.astype(np.float32)
    # Neither sine nor cosine can differ by more than the angle: few angles need both.
    candidates = np.abs(rounded - exact) > known
    angles, references = rounded[candidates].astype(np.float64), exact[candidates]
    for function in (np.sin, np.cos):
        known = max(known, np.abs(function(angles) - function(references)).max(initial=0.0))
    return float(known)


def errors(base: int, counts: tuple[int, ...] = POSITIONS) -> list[float]:
    """The largest error at any position below each count."""
    found, worst, first = [], 0.0, 0
    for count in counts:
        for start in range(first, count, BLOCK):
            worst = worst_error(start, min(start + BLOCK, count), base, worst)
        found.append(worst)
        first = count
    return found


def page() -> str:
    """The results file."""
    lines = [HEAD, "| positions |" + "".join(f" base {base:,} |" for base in BASES)]
    lines.append("|---:|" + "---:|" * len(BASES))
    for count, *row in zip(POSITIONS, *map(errors, BASES), strict=True):
        lines.append(f"| {count:,} |" + "".join(f" {error:.2e} |" for error in row))
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
