"""Which rows of a model's weights become components of queries and keys: seen by running it.

The inputs x of a model's rotations are differentiated by the weights of the module that rotates.
If a row feeds component n and no other, its gradient of sum(n a x) is n times that of sum(a x), for
any a. The statistics of norms count as constants, so norms keep components apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from posembed.commands.permutation import Rows, rotated
from posembed.commands.rotations import Call, first_component, replaced, spec_for
from posembed.commands.small_model import UnverifiedError
from posembed.specification import RotarySpec

TOKENS, DRAWS = 12, 3
UNUSED, MIXED = -1, -2  # units that feed no component, or several

STATISTICS = frozenset({"mean", "var", "norm", "vector_norm", "rsqrt"})


class ConstantStatistics(TorchFunctionMode):
    """Derivatives take the statistics of norms for constants."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        result = function(*args, **kwargs)
        if name in STATISTICS and isinstance(result, Tensor):
            return result.detach()
        if name in ("rms_norm", "layer_norm", "normalize"):
            with torch._C.DisableTorchFunction():
                return self.scaled(result, *args, **kwargs) if name != "normalize" else args[0]
        return result

    @staticmethod
    def scaled(
        result: Tensor,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float | None = None,
        **_: Any,
    ) -> Tensor:
        """A norm with the derivatives of x * weight + bias, and the values of the norm."""
        linear = input if weight is None else input * weight
        linear = linear if bias is None else linear + bias
        return linear + (result - linear).detach()


@contextlib.contextmanager
def stack_of(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The modules that are running, outermost first."""
    running: list[nn.Module] = []

    def enter(module: nn.Module, *_: Any) -> None:
        running.append(module)

    def leave(*_: Any) -> None:
        running.pop()

    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def cut_off(modules: set[nn.Module]) -> Iterator[None]:
    """Detaches what comes into modules, so that nothing before them has a part in derivatives."""

    def detach(_: nn.Module, arguments: Any, options: Any) -> Any:
        return tree_map_only(Tensor, Tensor.detach, (arguments, options))

    handles = [module.register_forward_pre_hook(detach, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run(model: nn.Module, rotate: Callable[[nn.Module, Call], Any]) -> None:
    """Runs a model with another function in place of its rotations.

    Args:
        model: The model.
        rotate: Takes the innermost module with weights that calls the rotation, and the call.
    """
    with stack_of(model) as running:

        def of_caller(call: Call) -> Any:
            caller = next(m for m in reversed(running) if next(m.parameters(), None) is not None)
            return rotate(caller, call)

        with replaced(model, of_caller):
            model(input_ids=torch.arange(TOKENS)[None], use_cache=False)


def numbers(first: Tensor, second: Tensor) -> Tensor:
    """The component that each unit feeds, from both gradients [units, rest]."""
    sizes, seen = first.square().sum(1), second.square().sum(1)
    found = ((first * second).sum(1) / sizes.clamp_min(1e-300)).round()
    alone = (second - found[:, None] * first).square().sum(1) < 1e-6 * seen
    unused = seen <= 1e-20 * seen.max()
    return torch.where(unused, UNUSED, torch.where(alone, found.long() - 1, MIXED))


def components(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor | None]:
    """For each weight, the component of x that each of its rows feeds, or each of its elements."""
    if not x.requires_grad:
        return [None] * len(weights)
    number = torch.arange(1, x.shape[-1] + 1)
    factors = [torch.rand_like(x) + 0.5 for _ in range(DRAWS)]  # a single one may fit by chance
    first, second = (
        [
            torch.autograd.grad((factor * x).sum(), weights, retain_graph=True, allow_unused=True)
            for factor in each
        ]
        for each in (factors, [factor * number for factor in factors])
    )
    return [
        None if one[0] is None else units_of(torch.stack(one, -1), torch.stack(two, -1))
        for one, two in zip(zip(*first, strict=True), zip(*second, strict=True), strict=True)
    ]


def units_of(first: Tensor, second: Tensor) -> Tensor:
    """The component that each row of a weight feeds, or each element, as in norms by head.

    Args:
        first: The gradients of the first sum [*weight, draws].
        second: Those of the other sum.
    """
    rows = numbers(first.reshape(len(first), -1), second.reshape(len(second), -1))
    if first.dim() != 3 or not bool((rows == MIXED).all()):
        return rows
    elements = numbers(first.reshape(-1, DRAWS), second.reshape(-1, DRAWS))
    return rows if bool((elements == MIXED).any()) else elements


def placed(name: str, weight: Tensor, found: Tensor, first: int, spec: RotarySpec) -> Rows | None:
    """The heads in a weight, of which the component of each unit is known; None without any."""
    size = rotated(spec)
    if not bool(((found >= first) & (found < first + size)).any()):
        return None
    starts = (found == first).nonzero().flatten()
    heads = found.new_full(found.shape, UNUSED)
    for start in starts.tolist():
        end = min(start + size, len(heads))
        heads[start:end] = torch.arange(first, first + end - start)
    inside = torch.where((found >= first) & (found < first + size), found, UNUSED)
    if bool((found == MIXED).any()) or not torch.equal(heads, inside):
        raise UnverifiedError(
            f"{name}: its rows are components of queries or keys in no known order"
        )
    return Rows(spec, tuple(starts.tolist()), len(found), len(found) != len(weight))


class Trace:
    """Finds where the weights of a model have components that are rotated.

    Args:
        model: The model.
        specs: The rotations that its configuration describes.
    """

    def __init__(self, model: nn.Module, specs: list[RotarySpec]) -> None:
        self.model, self.specs = model, specs
        self.names = {id(weight): name for name, weight in model.named_parameters()}
        self.found: dict[str, Rows] = {}
        self.functions: set[str] = set()
        self.callers: dict[nn.Module, None] = {}
        self.unseen: set[nn.Module] = set()  # some loops run their first rounds without gradients
        self.rotated: list[tuple[RotarySpec, int, Tensor]] = []  # with a factor of each component

    def note(self, caller: nn.Module, call: Call) -> Any:
        """Notes who calls which rotation."""
        self.callers[caller] = None
        self.functions.add(call.function.__name__)
        return call.result()

    def add(self, x: Tensor, weights: Sequence[Tensor], first: int, spec: RotarySpec) -> bool:
        """Adds the weights that have components of x; returns whether there are any."""
        known = False
        for weight, labels in zip(weights, components(x, weights), strict=True):
            if labels is None or bool((labels < 0).all()):
                continue
            name = self.names[id(weight)]
            rows = placed(name, weight, labels, first, spec)
            if rows is not None:
                self.merge(name, rows)
                known = True
        return known

    def merge(self, name: str, rows: Rows) -> None:
        """Adds heads of a weight to those that are known of it: packed queries and keys."""
        before = self.found.get(name, rows)
        if (before.spec, before.elements) != (rows.spec, rows.elements):
            raise UnverifiedError(f"{name}: it is rotated in two ways")
        starts = tuple(sorted({*before.starts, *rows.starts}))
        self.found[name] = dataclasses.replace(rows, starts=starts)

    def see(self, caller: nn.Module, call: Call) -> Any:
        """Finds the weights before a rotation, and marks its results for those after it."""
        weights, marked = list(caller.parameters()), []
        for x in call.tensors.values():
            spec = spec_for(self.specs, x, call.angles)
            first = first_component(x, spec)
            if x.requires_grad:
                self.unseen.discard(caller)
                if not self.add(x, weights, first, spec):
                    self.refuse(caller)
            factor = torch.ones(x.shape[-1], dtype=x.dtype, requires_grad=True)
            self.rotated.append((spec, first, factor))
            marked.append(factor)
        result = call.result()
        if isinstance(result, Tensor):
            return result * marked[0]
        return (*(x * y for x, y in zip(result, marked, strict=False)), *result[len(marked) :])

    def see_norm(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Finds the weights of a norm after a rotation."""
        x = arguments[0] if arguments else None
        weights = list(module.parameters(recurse=False))
        if not weights or not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return
        for spec, first, factor in self.rotated:
            if x.requires_grad and x.shape[-1] == len(factor) and output.shape == x.shape:
                (labels,) = components(x, [factor])
                if labels is not None and torch.equal(labels, torch.arange(len(factor))):
                    self.add(output, weights, first, spec)

    def run(self) -> dict[str, Rows]:
        """Runs the model twice: to see who rotates, and what."""
        with torch.no_grad():
            run(self.model, self.note)
        if len(self.functions) != 1:
            what = ", ".join(sorted(self.functions)) or "no function that is known"
            raise UnverifiedError(f"its queries and keys are rotated by {what}")
        self.unseen = set(self.callers)
        parts = dict.fromkeys(m for caller in self.callers for m in caller.modules())
        handles = [part.register_forward_hook(self.see_norm) for part in parts]
        try:
            with torch.enable_grad(), cut_off(set(self.callers)), ConstantStatistics():
                run(self.model, self.see)
        finally:
            for handle in handles:
                handle.remove()
        for caller in self.unseen:
            self.refuse(caller)
        return self.found

    def refuse(self, caller: nn.Module) -> None:
        """Raises UnverifiedError for a module whose rotated weights are not found."""
        raise UnverifiedError(f"which rows of {type(caller).__name__} it rotates cannot be seen")


def trace(model: nn.Module, specs: list[RotarySpec]) -> dict[str, Rows]:
    """Where each weight of a model has components that are rotated; others are left out.

    Args:
        model: A small model in float64.
        specs: The rotations that its configuration describes.

    Raises:
        UnverifiedError: It rotates nothing that can be seen, by several functions, or something
            that does not come from rows of weights in a known order.
    """
    return Trace(model, specs).run()
