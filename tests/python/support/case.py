"""The description of an operator for the shared operator tests."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import posembed  # noqa: F401  (registers the operators)
import torch
from posembed.glue.decompositions import replacements, with_every_argument
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Largest error relative to the largest element of the float64 reference: a few roundings of float32
# arithmetic, or one rounding of the result to a 16-bit type.
TOLERANCE = {torch.float32: 4e-7, torch.float64: 2e-14, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclasses.dataclass(frozen=True)
class Sample:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """The floating-point tensors among the positional arguments, to which gradients flow."""
        return [a for a in self.args if isinstance(a, Tensor) and a.is_floating_point()]

    def replace(self, tensors: Sequence[Tensor]) -> "Sample":
        """The same call with other floating-point tensors."""
        given = iter(tensors)
        args = [next(given) if isinstance(a, Tensor) and a.is_floating_point() else a for a in self.args]
        return Sample(tuple(args), self.kwargs)

    def requires_grad(self) -> "Sample":
        """The same call with fresh leaves that require gradients."""
        return self.replace([t.detach().clone().requires_grad_() for t in self.tensors()])

    def to(self, dtype: torch.dtype) -> "Sample":
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
        reference: The same call in PyTorch's own operators, with the operator's arguments and
            results; for a mutating operator, returns the expected contents. The operator's
            decomposition, unless another is given.
        mutates: The operator writes to its arguments and returns nothing.
        differentiable: Gradients flow to the floating-point arguments.
        conventional: Gradients follow a convention and are not the derivative: padding gets none,
            for example.
        vmap: A batching rule is registered.
    """

    name: str
    operator: Any
    sample: Callable[[int, int, torch.device | str, torch.dtype], Sample]
    reference: Callable[..., Any] = None  # type: ignore[assignment]
    mutates: bool = False
    differentiable: bool = True
    conventional: bool = False
    vmap: bool = True
    dtypes: tuple[torch.dtype, ...] = FLOATING

    def __post_init__(self) -> None:
        if self.reference is None:
            object.__setattr__(self, "reference", contents_or_results(self.operator))

    def __call__(self, sample: Sample) -> tuple[Tensor, ...]:
        """The operator's results, or the contents of the arguments that it mutates."""
        results = self.operator(*sample.args, **sample.kwargs)
        return tuple(sample.tensors()) if self.mutates else as_tuple(results)

    def expected(self, sample: Sample) -> tuple[Tensor, ...]:
        """The reference's results on the same numbers in float64."""
        exact = sample.to(torch.float64)
        return as_tuple(self.reference(*exact.args, **exact.kwargs))


def case(name: str, sample: Callable[..., Sample], *args: Any, **options: Any) -> OperatorCase:
    """A case of the operator that stands first in its name, before a hyphen."""
    operator = getattr(torch.ops.posembed, name.split("-")[0]).default
    return OperatorCase(name, operator, sample, *args, **options)


def decomposed(name: str) -> Callable[..., Any]:
    """An operator in PyTorch's own; a test of its values also needs a source that is not ours."""
    return with_every_argument(getattr(torch.ops.posembed, name).default, replacements()[name])


def contents_or_results(operator: Any) -> Callable[..., Any]:
    """An operator's decomposition; for one that writes, what its floating arguments contain then.

    An operator that writes has the decomposition of the one that does not, by its name.
    """
    arguments = operator._schema.arguments
    written = [argument.name for argument in arguments if argument.is_write]
    name = operator._opname.removesuffix("_out").removesuffix("_")
    function = decomposed(name)
    if not written:
        return function
    taken = {a.name for a in getattr(torch.ops.posembed, name).default._schema.arguments}

    def call(*args: Any, **named: Any) -> tuple[Tensor, ...]:
        given = {**dict(zip((a.name for a in arguments), args, strict=False)), **named}
        results = as_tuple(function(**{name: x for name, x in given.items() if name in taken}))
        left = dict(zip(written, results, strict=True))
        tensors = {n: x for n, x in given.items() if isinstance(x, Tensor)}
        return tuple(left.get(n, x) for n, x in tensors.items() if x.is_floating_point())

    return call


def transposed(function: Callable[[Tensor], Tensor], like: Tensor, gradient: Tensor) -> Tensor:
    """A function's derivative at zero, transposed: a gradient of its result to one of ``like``."""
    result: Tensor = torch.func.vjp(function, torch.zeros_like(like))[1](gradient)[0]
    return result


Size = tuple[int, int]


def samples(
    cases: Iterable[OperatorCase], sizes: Sequence[Size], device: Any = "cpu"
) -> Iterator[tuple[OperatorCase, torch.dtype, Size, Sample]]:
    """A call of each case in each dtype and size."""
    for case in cases:
        for dtype in case.dtypes:
            for size in sizes:
                torch.manual_seed(1)
                yield case, dtype, size, case.sample(*size, device, dtype)


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


def same_for_any_thread_count(call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """The results of a call, which are the same bits with one, two and three threads."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(call())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    return results[0]


def in_schema_order(cases: Sequence[OperatorCase], *names: str) -> list[OperatorCase]:
    """Cases whose samples pass tensors in the order of ``names``.

    Operators take arguments in the order of their schemas, where options stand between tensors.
    """
    return [dataclasses.replace(case, sample=_ordered(case, names)) for case in cases]


def _ordered(case: OperatorCase, names: Sequence[str]) -> Callable[..., Sample]:
    arguments = {argument.name: argument for argument in case.operator._schema.arguments}
    leading = [n for n in names if n in arguments and str(arguments[n].type) != "str"]

    def sample(*sizes: Any) -> "Sample":
        given = case.sample(*sizes)
        values = {**dict(zip(leading, given.args, strict=False)), **given.kwargs}
        last = max(i for i, name in enumerate(arguments) if isinstance(values.get(name), Tensor))
        required = [name for name in arguments if not arguments[name].has_default_value()]
        last = max(last, list(arguments).index(required[-1]))
        args = [values.pop(name, arguments[name].default_value) for name in [*arguments][: last + 1]]
        return Sample(tuple(args), {name: x for name, x in values.items() if x is not None})

    return sample
