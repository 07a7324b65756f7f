"""The functions that rotate queries and keys in a model's code, and how to watch or change them."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from posembed.commands.permutation import rotated
from posembed.commands.small_model import UnverifiedError
from posembed.specification import RotarySpec

# By name, and by the first argument that holds angles.
ROTATION = re.compile("^apply_.*rotary")
ANGLES = ("cos", "sin", "freqs_cis", "freqs")


class Call:
    """One call of a rotation.

    Args:
        function: The rotation.
        arguments, options: What it is called with.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.function = function
        signature = inspect.signature(function)
        self.bound = signature.bind(*arguments, **options)
        names = list(signature.parameters)
        first = next((place for place, name in enumerate(names) if name in ANGLES), 0)
        given = self.bound.arguments
        self.angles: Tensor = given[names[first]]
        self.tensors: dict[str, Tensor] = {
            name: given[name]
            for name in names[:first]
            if name != "v" and isinstance(given.get(name), Tensor)
        }

    def result(self) -> Any:
        """Calls the rotation with the tensors as they are now."""
        self.bound.arguments.update(self.tensors)
        return self.function(*self.bound.args, **self.bound.kwargs)


def spec_for(specs: Iterable[RotarySpec], x: Tensor, angles: Tensor) -> RotarySpec:
    """The specification that matches a query and its angles, by their widths."""
    for spec in specs:
        wide = x.shape[-1] in (spec.head_dim, rotated(spec))
        if wide and angles.shape[-1] in (rotated(spec), rotated(spec) // 2):
            return spec
    raise UnverifiedError(
        f"the model rotates {tuple(x.shape)} by angles {tuple(angles.shape)}, the configuration "
        "says otherwise"
    )


def first_component(x: Tensor, spec: RotarySpec) -> int:
    """The first rotated component of a rotation's input: a head, or its rotated part alone."""
    return spec.rotary_start if x.shape[-1] == spec.head_dim else 0


def functions_of(model: nn.Module) -> dict[tuple[Any, str], Callable[..., Any]]:
    """The functions that rotate queries and keys, by module and name."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    return {
        (module, name): value
        for module in modules
        for name, value in vars(module).items()
        if ROTATION.search(name)
        and inspect.isfunction(value)
        and set(ANGLES) & set(inspect.signature(value).parameters)
    }


@contextlib.contextmanager
def replaced(model: nn.Module, run: Callable[[Call], Any]) -> Iterator[None]:
    """Runs a function in place of each rotation of a model, but not of those inside one."""
    functions = functions_of(model)
    inside: list[bool] = []

    def outermost(function: Callable[..., Any]) -> Callable[..., Any]:
        def rotate(*arguments: Any, **options: Any) -> Any:
            if inside:
                return function(*arguments, **options)
            inside.append(True)
            try:
                return run(Call(function, arguments, options))
            finally:
                inside.pop()

        return rotate

    for (module, name), function in functions.items():
        setattr(module, name, outermost(function))
    try:
        yield
    finally:
        for (module, name), function in functions.items():
            setattr(module, name, function)
