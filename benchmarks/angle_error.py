"""Errors of rotary angles that are computed in float32, as most code computes them.

python benchmarks/angle_error.py > benchmarks/results/angle_error.md

The numbers are those of posembed.analysis.float32_error. benchmarks/exactness measures the errors
of posembed.
"""

from __future__ import annotations

import posembed as pe

HEAD_DIM = 128
BASES = (10_000, 500_000)
POSITIONS = tuple(2**bits for bits in range(6, 25))

HEAD = """\
# Errors of float32 angles

Largest error of an angle, in radians, at any position below a number of positions, head_dim 128,
written by `python benchmarks/angle_error.py`. Sine and cosine are off by nearly as much. The angle
is a float32 position times a float32 frequency, as transformers computes it; the reference is
computed in float64. The errors of posembed's angles are in exactness.md.
"""


def errors(base: int, counts: tuple[int, ...] = POSITIONS) -> list[float]:
    """The largest error at any position below each count."""
    spec = pe.RotarySpec(HEAD_DIM, base=float(base))
    return [pe.analysis.float32_error(spec, count).radians for count in counts]


def page() -> str:
    """The results file."""
    lines = [HEAD, "| positions |" + "".join(f" base {base:,} |" for base in BASES)]
    lines.append("|---:|" + "---:|" * len(BASES))
    for count, *row in zip(POSITIONS, *map(errors, BASES), strict=True):
        lines.append(f"| {count:,} |" + "".join(f" {error:.2e} |" for error in row))
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
