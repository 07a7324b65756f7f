"""The description of an operator for the shared operator tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Largest error relative to the largest element of the float64 reference: a few roundings of float32
# arithmetic, or one rounding of the result to a 16-bit type.
TOLERANCE = {
    torch.float32: 4e-7,
    torch.float64: 2e-14,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """The floating-point tensors among the positional arguments, to which gradients flow."""
        return [a for a in self.args if isinstance(a, Tensor) and a.is_floating_point()]

    def replace(self, tensors: Sequence[Tensor]) -> Sample:
        """The same call with other floating-point tensors."""
        given = iter(tensors)
        args = [
            next(given) if isinstance(a, Tensor) and a.is_floating_point() else a for a in self.args
        ]
        return Sample(tuple(args), self.kwargs)

    def requires_grad(self) -> Sample:
        """The same call with fresh leaves that require gradients."""
        return self.replace([t.detach().clone().requires_grad_() for t in self.tensors()])

    def to(self, dtype: torch.dtype) -> Sample:
        """The same call in another dtype."""
        return self.replace([t.to(dtype) for t in self.tensors()])


@dataclasses.dataclass(frozen=True)
class OperatorCase:
    """One operator and one way to call it.

    Attributes:
        name: The test's id.
        operator: The overload, ``torch.ops.posembed.name.default``.
        sample: ``sample(batch, seq, device, dtype)`` gives the arguments; only sizes may depend on
            batch and seq, so that one compiled graph serves all.
        reference: The same call in plain float64 torch, slow and obvious, with the operator's
            arguments and results; for a mutating operator, returns the expected contents.
        mutates: The operator writes to its arguments and returns nothing.
        differentiable: Gradients flow to the floating-point arguments.
        conventional: Gradients follow a convention and are not the derivative: padding gets none,
            for example.
        vmap: A batching rule is registered.
    """

    name: str
    operator: Any
    sample: Callable[[int, int, torch.device | str, torch.dtype], Sample]
    reference: Callable[..., Any]
    mutates: bool = False
    differentiable: bool = True
    conventional: bool = False
    vmap: bool = True
    dtypes: tuple[torch.dtype, ...] = FLOATING

    def __call__(self, sample: Sample) -> tuple[Tensor, ...]:
        """The operator's results, or the contents of the arguments that it mutates."""
        results = self.operator(*sample.args, **sample.kwargs)
        return tuple(sample.tensors()) if self.mutates else as_tuple(results)

    def expected(self, sample: Sample) -> tuple[Tensor, ...]:
        """The reference's results on the same numbers in float64."""
        exact = sample.to(torch.float64)
        return as_tuple(self.reference(*exact.args, **exact.kwargs))


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compares in float64 and names the worst element."""
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    found, wanted = actual.detach().double().cpu(), expected.detach().double().cpu()
    finite = wanted.isfinite()
    assert torch.equal(finite, found.isfinite())
    assert torch.equal(found[~finite].nan_to_num(), wanted[~finite].nan_to_num())
    error = (found - wanted).nan_to_num().abs()
    scale = float(wanted[finite].abs().max()) if finite.any() else 0.0
    worst = int(error.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape)]
    assert float(error.max()) <= tolerance * max(scale, 1.0), (
        f"at {place}: got {found.flatten()[worst]}, expected {wanted.flatten()[worst]}"
    )


def in_schema_order(cases: Sequence[OperatorCase], *names: str) -> list[OperatorCase]:
    """Cases whose samples and references pass tensors in the order of ``names``.

    Operators take arguments in the order of their schemas, where options stand between tensors.
    """
    return [dataclasses.replace(case, **_ordered(case, names)) for case in cases]


def _ordered(case: OperatorCase, names: Sequence[str]) -> dict[str, Any]:
    arguments = {argument.name: argument for argument in case.operator._schema.arguments}
    leading = [n for n in names if n in arguments and str(arguments[n].type) != "str"]

    def sample(*sizes: Any) -> Sample:
        given = case.sample(*sizes)
        values = {**dict(zip(leading, given.args, strict=False)), **given.kwargs}
        last = max(i for i, name in enumerate(arguments) if isinstance(values.get(name), Tensor))
        required = [name for name in arguments if not arguments[name].has_default_value()]
        last = max(last, list(arguments).index(required[-1]))
        args = [
            values.pop(name, arguments[name].default_value) for name in [*arguments][: last + 1]
        ]
        return Sample(tuple(args), {name: x for name, x in values.items() if x is not None})

    def reference(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(arguments, args, strict=False)), **kwargs}
        positional = [values.pop(name, None) for name in leading]
        changed = {
            name: value
            for name, value in values.items()
            if not arguments[name].has_default_value() or value != arguments[name].default_value
        }
        return case.reference(*positional, **changed)

    return {"sample": sample, "reference": reference}
