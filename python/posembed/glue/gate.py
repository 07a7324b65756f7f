"""One line for an argument of a wrong type, in place of the dispatcher's error.

A look at the types before each call would cost one-token calls, so operators are called without it.
What the dispatcher refuses is explained afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posembed.glue import sharding
from posembed.glue.sharding import PLAIN

_REFUSED = re.compile(
    r"posembed::\w+\(\) Expected a value of type '(.+?)' for argument '(\w+)' "
    r"but instead found type '(.+?)'"
)
_EXPECTED = {
    "Tensor": "a Tensor",
    "int": "an int",
    "float": "a float",
    "bool": "a bool",
    "str": "a str",
    "List[int]": "a list of int",
    "List[float]": "a list of float",
    "Device": "a torch.device",
    "Generator": "a torch.Generator",
}
_FOUND = {"NoneType": "None", "ndarray": "a numpy array"}
_REMEDIES = {
    "list": "; torch.tensor({name})",
    "tuple": "; torch.tensor({name})",
    "ndarray": "; torch.from_numpy({name})",
}

Pair = Callable[..., tuple[Tensor, Tensor]]  # an operator with two results


def wrong_type(name: str, expected: str, found: str) -> TypeError:
    """The error for an argument whose type has the name ``found``."""
    article = "an" if found[0] in "aeiou" else "a"
    got = _FOUND.get(found, f"{article} {found}")
    got += " of more than 64 bits" if got == expected else ""
    remedy = _REMEDIES.get(found, "") if expected == "a Tensor" else ""
    return TypeError(f"{name}: expected {expected}, got {got}{remedy.format(name=name)}")


def check_tensors(**tensors: Any) -> None:
    """Raises TypeError for arguments that are not tensors, where one is used before the call."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise wrong_type(name, "a Tensor", type(value).__name__)


def gated(operator: Any, *, sharded: bool = False, **names: str) -> Callable[..., Tensor]:
    """The operator; an argument of a wrong type raises TypeError with the argument's name.

    ``names`` are those of the function's arguments, where the operator's differ. Where it does
    not return one Tensor, ``typing.cast`` says what it returns. If ``sharded``, one of the first
    two arguments may be a DTensor: each process then calls the operator with its shards.
    """
    # The last of the two that is a tensor; torch.compile knows no types of some other arguments.
    last = 1 if sharded and "Tensor" in str(operator._schema.arguments[1].type) else 0

    def call(*arguments: Any) -> Any:
        plain = not sharded or (type(arguments[0]) in PLAIN and type(arguments[last]) in PLAIN)
        if not plain and sharding.any_sharded(arguments[0], arguments[last]):
            return sharding.call(call, *arguments)
        try:
            return operator(*arguments)
        except RuntimeError as error:
            explained = _explained(error, operator, arguments, names)
            if explained is None:
                raise
        raise explained

    call.__name__ = operator._schema.name.removeprefix("posembed::")
    return call


def _explained(
    error: RuntimeError, operator: Any, arguments: tuple[Any, ...], names: dict[str, str]
) -> TypeError | None:
    """The error for the user; None if the dispatcher did not refuse an argument's type."""
    refused = _REFUSED.match(str(error))
    if refused is not None:
        declared, name, found = refused.groups()
        declared = declared.removeprefix("Optional[").removesuffix("]" * declared.startswith("Opt"))
        expected = "a torch.dtype" if name == "dtype" else _EXPECTED.get(declared, declared)
        return wrong_type(names.get(name, name), expected, found)
    if not isinstance(error, NotImplementedError):
        return None
    if "no tensor arguments" in str(error):
        # All of them are None, which the dispatcher takes for a tensor.
        name = operator._schema.arguments[0].name
        return wrong_type(names.get(name, name), "a Tensor", "NoneType")
    for declared, value in zip(operator._schema.arguments, arguments, strict=False):
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            name = names.get(declared.name, declared.name)
            found = f"got {value.layout}; {name}.to_dense()"
            return TypeError(f"{name}: expected a Tensor with strides, {found}")
    return None
