"""Tests specifications that are made inside a compiled or exported function."""

import dataclasses
from collections.abc import Callable

import posembed as pe
import pytest
import torch
from support.refusals import refused
from support.scalings import SCALINGS
from torch import Tensor, nn

ROTARY: dict[str, Callable[[Tensor], pe.RotarySpec]] = {
    "width of the tensor": lambda x: pe.RotarySpec(x.shape[-1], base=500000.0),
    "options": lambda x: pe.RotarySpec(128, rotary_dim=32, rotary_start=2, interleaved=True),
    "sections": lambda x: pe.RotarySpec(128, sections=pe.Sections((24, 20, 20), interleaved=True)),
    "frequencies": lambda x: pe.RotarySpec(128, custom_frequencies=[0.5] * 64),
    "another's": lambda x: dataclasses.replace(pe.RotarySpec(128), base=1e6, reverse=True),
    **{
        f"{scaling.kind}-{i}": lambda x, scaling=scaling: pe.RotarySpec(128, scaling=dataclasses.replace(scaling))
        for i, (scaling, _, _) in enumerate(SCALINGS)
        if not pe.RotarySpec(128, scaling=scaling).is_dynamic
    },
}


# A scaling's numbers do not depend on a length, so one of them is compiled for unknown lengths.
CASES = [(name, dynamic) for dynamic, names in ((None, list(ROTARY)), (True, list(ROTARY)[:6])) for name in names]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_rotary(name: str, dynamic: bool | None) -> None:
    def rotate(x: Tensor) -> Tensor:
        return pe.functional.rotary(x, spec=ROTARY[name](x)) * 2

    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for seq in (5, 6, 9):
        x = torch.randn(2, seq, 3, 128)
        assert torch.equal(compiled(x), rotate(x))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("preset", ["vaswani", "ddpm"])
def test_sinusoidal(preset: str, dynamic: bool | None) -> None:
    def add(x: Tensor) -> Tensor:
        spec = pe.SinusoidalSpec(x.shape[-1], preset=preset, shift=0.5, cos_first=True, scale=2.0)
        return pe.functional.sinusoidal(x, spec=spec)

    compiled = torch.compile(add, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for width in (8, 12, 30):
        x = torch.randn(2, 3, width)
        assert torch.equal(compiled(x), add(x))


def test_export() -> None:
    class Rotate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return pe.functional.rotary(x, spec=pe.RotarySpec(x.shape[-1], base=500000.0))

    shapes = {"x": {1: torch.export.Dim("seq", min=2)}}
    exported = torch.export.export(Rotate(), (torch.randn(2, 5, 3, 16),), dynamic_shapes=shapes)
    x = torch.randn(2, 7, 3, 16)
    assert torch.equal(exported.module()(x), Rotate()(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pe.RotarySpec(63), "rotary_dim: expected an even number, got 63"),
        (lambda: pe.RotarySpec(64, base=float("inf")), "base: expected a finite number, got inf"),
        (lambda: pe.SinusoidalSpec(8, preset="sinus"), "preset: expected .*, got 'sinus'"),
    ],
)  # fmt: skip
def test_errors_are_those_of_eager_calls(make: Callable[[], object], message: str) -> None:
    def fail(x: Tensor) -> Tensor:
        make()
        return x + 1

    for function in (fail, torch.compile(fail, backend="aot_eager")):
        refused((lambda: function(torch.ones(2)), ValueError, message))
