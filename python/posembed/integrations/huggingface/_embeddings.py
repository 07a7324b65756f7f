"""Input layers of the BERT family in one kernel: rows are summed and normalized in one pass.

Parameters stay in the model's modules, and dropout is the model's own. The model's code runs for
arguments that the kernel does not support.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posembed import functional
from posembed.input import has_plain_rows, is_plain, is_simple, norm_parts, own_rows
from posembed.integrations.huggingface._report import Counter
from posembed.integrations.huggingface._rotation import KERNEL_DEVICES

PARTS = {"word_embeddings", "position_embeddings", "LayerNorm", "dropout"}
TYPES = "token_type_embeddings"
STEPS = 16  # tolerance, in steps of the dtype at the largest result
ROLES = "posembed_roles"
Arguments = dict[str, Any]


class OnePass:
    """Base class of input layers that run the kernel.

    An instance's ``posembed_roles`` maps the names of its arguments to their roles: "ids",
    "vectors", "positions", "types" and "past".
    """

    posembed_counter: Counter
    dropout: nn.Dropout

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The embeddings, with the model's dropout."""
        call = self._kernel_call(args, kwargs)
        if not torch.compiler.is_compiling():
            self.posembed_counter.kernel += call is not None
            self.posembed_counter.own += call is None
        if call is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.dropout(functional.input_embedding(**call))

    def _kernel_call(self, args: tuple[Any, ...], kwargs: Arguments) -> Arguments | None:
        roles: dict[str, str] = self.__dict__.get(ROLES, {})
        if len(args) > len(roles) or not kwargs.keys() <= roles.keys():
            return None
        given = {**dict(zip(roles, args, strict=False)), **kwargs}
        if any(value is not None and not roles[name] for name, value in given.items()):
            return None
        return kernel_call(self, {roles[name]: value for name, value in given.items()})


def looks_like_layer(cls: type) -> bool:
    """Whether a class may be an input layer: its code reads the parts of one."""
    if not issubclass(cls, nn.Module):
        return False
    forwards = [vars(base).get("forward") for base in cls.__mro__]
    names = {n for f in forwards if isinstance(f, types.FunctionType) for n in f.__code__.co_names}
    return PARTS - {"dropout"} <= names


def kernel_call(module: Any, given: Arguments) -> Arguments | None:
    """Arguments for ``functional.input_embedding``; None if the model's code has to run.

    Args:
        module: An input layer.
        given: Its arguments, by role.
    """
    parts = _parts(module)
    ids, vectors = given.get("ids"), given.get("vectors")
    tokens = vectors if ids is None else ids
    if parts is None or tokens is None or (ids is None) == (vectors is None):
        return None
    device = tokens.device.type
    if device not in KERNEL_DEVICES or torch.is_autocast_enabled(device):
        return None
    places = _places(module, ids, given)
    kinds = given.get("types")
    if places is None or not (kinds is None or kinds.shape == tokens.shape[:2]):
        return None
    if ids is None:
        if tokens.dim() != 3 or tokens.dtype != parts["token"].dtype:
            return None
        ids, table = own_rows(tokens)
        parts = {**parts, **table, "padding_idx": None}
    elif ids.dim() != 2:
        return None
    return {"ids": ids, "types": kinds, **parts, **places}


def _parts(module: Any) -> Arguments | None:
    """What the kernel reads from the submodules; None if one has hooks, another type or options."""
    token, position, norm = module.word_embeddings, module.position_embeddings, module.LayerNorm
    kind = getattr(module, TYPES, None)
    tables = [token, position] if kind is None else [token, position, kind]
    if not all(is_plain(x, (nn.Embedding,)) and has_plain_rows(x) for x in tables):
        return None
    if position.sparse or not (kind is None or is_simple(kind)):
        return None
    if not is_plain(norm, (nn.LayerNorm,)) or norm.normalized_shape != token.weight.shape[1:]:
        return None
    weights = [x.weight for x in tables] + [x for x in (norm.weight, norm.bias) if x is not None]
    if any(x.dtype != token.weight.dtype for x in weights):
        return None
    return {
        "token": token.weight,
        "position": position.weight,
        "token_type": None if kind is None else kind.weight,
        "padding_idx": token.padding_idx,
        "gradient": "rows" if token.sparse else "dense",
        **norm_parts(norm, token.weight.dtype),
    }


def _places(module: Any, ids: Tensor | None, given: Arguments) -> Arguments | None:
    """Positions as the model counts them; a position table with a padding row means RoBERTa."""
    positions, past = given.get("positions"), given.get("past", 0)
    padding = module.position_embeddings.padding_idx
    if not isinstance(past, int):
        return None
    if padding is None:
        return {"offset": past} if positions is None else {"positions": positions}
    if positions is not None:
        return None
    rows = {"first_row": padding + 1, "position_padding_idx": padding}
    if ids is None:
        return rows
    return {**rows, "positions": functional.roberta_positions(ids, padding, past_length=past)}


def has_parts(module: nn.Module) -> bool:
    """Whether a module has exactly the submodules of an input layer."""
    return {name for name, _ in module.named_children()} in (PARTS, PARTS | {TYPES})


def refusal(module: Any) -> str:
    """Why a module cannot run the kernel; '' if it can."""
    if any(parameter.is_meta for parameter in module.parameters()):
        return "its tables are not there yet (meta device)"
    if _parts(module) is None:
        return "one of its parts has hooks, another type or an option that the kernel lacks"
    return ""


def roles_of_layer(module: Any, original: Any) -> dict[str, str]:
    """The role of each argument, '' for one without; empty if the layer is no sum and norm.

    An argument has a role if the kernel gives the layer's results with it, whatever its name.

    Args:
        module: An input layer.
        original: Its class in the model's code.
    """
    layer = copy.copy(module)  # without dropout; the model may be running
    layer._modules = {**module._modules, "dropout": nn.Identity()}
    parameters = list(inspect.signature(original.forward).parameters.values())[1:]
    roles = {x.name: "" for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)}
    values = _values(layer)
    with torch.no_grad(), torch.autocast(layer.word_embeddings.weight.device.type, enabled=False):
        for role in values:
            free = (name for name, taken in roles.items() if not taken)
            found = (n for n in free if _has_role(layer, original, {**roles, n: role}, values))
            roles.update(dict.fromkeys(itertools.islice(found, 1), role))
    return roles if "ids" in roles.values() else {}


def _values(module: Any) -> dict[str, tuple[Any, Any]]:
    """A valid value for each role, and one that a table has no row for."""
    token = module.word_embeddings
    random = torch.Generator("cpu").manual_seed(7)
    device = token.weight.device

    def numbers(end: int) -> Tensor:
        return torch.randint(end, (2, 3), generator=random, device="cpu").to(device)

    ids = numbers(token.num_embeddings)
    if token.padding_idx is not None:
        ids[0, -1] = ids[1, 0] = token.padding_idx
    vectors = torch.randn(2, 3, token.embedding_dim, generator=random, device="cpu")
    values: dict[str, tuple[Any, Any]] = {
        "ids": (ids, None),
        "vectors": (vectors.to(token.weight), None),
    }
    places = module.position_embeddings.num_embeddings
    values["positions"] = (numbers(min(4, places)), torch.full_like(ids, places))
    kind = getattr(module, TYPES, None)
    if kind is not None:
        rows = kind.num_embeddings
        values["types"] = (numbers(rows), torch.full_like(ids, rows))
    return {**values, "past": (1, places)}


def _has_role(
    module: Any, original: Any, roles: dict[str, str], values: dict[str, tuple[Any, Any]]
) -> bool:
    """Whether the last role's argument has the effect that it has in the kernel."""
    role = [role for role in values if role in roles.values()][-1]
    alone = {} if role in ("ids", "vectors") else {"ids": values["ids"][0]}
    value, missing = values[role]
    call = kernel_call(module, {**alone, role: value})
    if call is None:
        return False

    def result(given: Arguments) -> Any:
        given = {"ids": None, **given}
        named = {name: given[role] for name, role in roles.items() if role in given}
        return original.forward(module, **named)

    try:
        expected = result({**alone, role: value})
        if not _alike(functional.input_embedding(**call), expected):
            return False
        if not alone or not torch.equal(result(alone), expected):
            return True
    except Exception:  # a layer that takes other arguments may raise anything
        return False
    return module.word_embeddings.weight.device.type == "cpu" and _raises(
        lambda: result({**alone, role: missing})
    )


def _raises(call: Callable[[], Any]) -> bool:
    """Whether a call looks for a row that there is not; never tried on a GPU, which would stop."""
    try:
        call()
    except (IndexError, RuntimeError):
        return True
    return False


def _alike(found: Tensor, expected: Any) -> bool:
    slack = STEPS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=0, atol=slack)
