"""Cases of Fourier features for the shared operator tests."""

from typing import Any

import torch

from support.case import Sample, case
from support.sinusoidal import places


def sample(rows: int, columns: int = 0, phases: bool = False, **options: Any) -> Any:
    """Two axes and three frequencies; ``columns`` of an x that features are added to."""

    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        coordinates = places((batch, seq, 2), device, dtype) - 10
        angles = normal(3) if phases else None
        x = normal(batch, seq, columns) if columns else None
        last = 4 if columns else 3 if phases else 2
        return Sample((coordinates, normal(rows, 3), angles, x)[:last], options)

    return make


def whole(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
    """Angles that float64 has exactly: the reference of float32 results is one of float32."""
    numbers = torch.arange(batch * seq * 2, device=device, dtype=torch.int32) % 50 - 3
    frequencies = (torch.randn(2, 3, device=device) * 4).round().to(dtype) / 8
    options = {"unit": "half_turn", "dtype": torch.float64}
    return Sample((numbers.reshape(batch, seq, 2), frequencies), options)


CASES = [
    case("fourier_features", sample(2)),
    case("fourier_features-integer", whole),
    case("fourier_features-phases", sample(2, phases=True, order="fw", waves="cos_sin")),
    case("fourier_features-derivative", sample(2, waves="cos", derivative=3)),
    case("fourier_features-added", sample(2, 6, phases=True, unit="turn")),
    case("fourier_features-apart", sample(1, order="afw", unit="half_turn")),
    case("fourier_features-parts", sample(2, 12, phases=True, order="fwa")),
    case("fourier_features-sines", sample(1, 6, order="wfa", waves="sin")),
]
