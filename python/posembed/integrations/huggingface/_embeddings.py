"""Input layers of the BERT family in one kernel: rows are summed and normalized in one pass.

Parameters stay in the model's modules, and dropout is the model's own. The model's code runs for
arguments that the kernel does not support.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from posembed import functional
from posembed.input import has_plain_rows, is_plain, is_simple, norm_parts, own_rows
from posembed.integrations.huggingface._report import Counter
from posembed.integrations.huggingface._rotation import KERNEL_DEVICES

PARTS = {"word_embeddings", "position_embeddings", "LayerNorm", "dropout"}
TYPES = "token_type_embeddings"
ARGUMENTS = {
    "input_ids",
    "token_type_ids",
    "position_ids",
    "inputs_embeds",
    "past_key_values_length",
}
STEPS = 16  # tolerance, in steps of the dtype at the largest result


class OnePass:
    """Base class of input layers that run the kernel; holds argument names, in order, and calls."""

    posembed_arguments: tuple[str, ...]
    posembed_counter: Counter
    dropout: nn.Dropout

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The embeddings, with the model's dropout."""
        given = {**dict(zip(self.posembed_arguments, args, strict=False)), **kwargs}
        known = all(name in self.posembed_arguments for name in given)
        call = kernel_call(self, given) if known else None
        if not torch.compiler.is_compiling():
            self.posembed_counter.kernel += call is not None
            self.posembed_counter.own += call is None
        if call is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.dropout(functional.input_embedding(**call))


def arguments_of(cls: type) -> tuple[str, ...]:
    """Argument names of a class that may be an input layer; empty if it is not."""
    if not issubclass(cls, nn.Module):
        return ()
    try:
        names = tuple(inspect.signature(cls.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()
    known = {"input_ids", "inputs_embeds", "position_ids"} <= set(names) <= ARGUMENTS
    return names if known else ()


def kernel_call(module: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments for ``functional.input_embedding``; None if the model's code has to run."""
    parts = _parts(module)
    ids, vectors = given.get("input_ids"), given.get("inputs_embeds")
    if parts is None or (ids is None) == (vectors is None):
        return None
    tokens: Tensor = given["inputs_embeds" if ids is None else "input_ids"]
    device = tokens.device.type
    if device not in KERNEL_DEVICES or torch.is_autocast_enabled(device):
        return None
    places = _places(module, ids, given)
    types = given.get("token_type_ids")
    if places is None or not (types is None or types.shape == tokens.shape[:2]):
        return None
    if ids is None:
        if tokens.dim() != 3 or tokens.dtype != parts["token"].dtype:
            return None
        ids, table = own_rows(tokens)
        parts = {**parts, **table, "padding_idx": None}
    elif ids.dim() != 2:
        return None
    return {"ids": ids, "types": types, **parts, **places}


def _parts(module: Any) -> dict[str, Any] | None:
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


def _places(module: Any, ids: Tensor | None, given: dict[str, Any]) -> dict[str, Any] | None:
    """Positions as the model counts them; a position table with a padding row means RoBERTa."""
    positions, past = given.get("position_ids"), given.get("past_key_values_length", 0)
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


def refusal(module: Any, original: Any) -> str:
    """Why a module keeps its code; '' if the kernel gives the same results.

    Args:
        module: An input layer.
        original: Its class in the model's code.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return "its tables are not there yet (meta device)"
    if _parts(module) is None:
        return "one of its parts has hooks, another type or an option that the kernel lacks"
    layer = copy.copy(module)  # without dropout; the model may be running
    layer._modules = {**module._modules, "dropout": nn.Identity()}
    try:
        with torch.no_grad():
            alike = all(_alike(layer, original, given) for given in _samples(layer, original))
    except Exception:  # a layer that takes other arguments may raise anything
        alike = False
    return "" if alike else "it computes something else than sum and norm"


def _samples(module: Any, original: Any) -> list[dict[str, Any]]:
    """Calls with and without each argument."""
    token, names = module.word_embeddings, arguments_of(original)
    random = torch.Generator("cpu").manual_seed(7)
    device = token.weight.device

    def numbers(end: int) -> Tensor:
        return torch.randint(end, (2, 3), generator=random, device="cpu").to(device)

    ids = numbers(token.num_embeddings)
    if token.padding_idx is not None:
        ids[0, -1] = ids[1, 0] = token.padding_idx
    vectors = torch.randn(2, 3, token.embedding_dim, generator=random, device="cpu")
    samples: list[dict[str, Any]] = [{"input_ids": ids}]
    samples.append({"inputs_embeds": vectors.to(token.weight), "input_ids": None})
    samples.append({"input_ids": ids, "position_ids": numbers(4)})
    if "past_key_values_length" in names:
        samples.append({"input_ids": ids, "past_key_values_length": 1})
    if "token_type_ids" in names:
        types = numbers(getattr(module, TYPES).num_embeddings)
        samples.append({"input_ids": ids, "token_type_ids": types})
    return samples


def _alike(module: Any, original: Any, given: dict[str, Any]) -> bool:
    """Whether the kernel matches the model's code, for arguments that it supports."""
    call = kernel_call(module, given)
    if call is None:
        return True
    expected = original.forward(module, **given)
    found = functional.input_embedding(**call)
    slack = STEPS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=0, atol=slack)
