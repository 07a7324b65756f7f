"""Decides which norms of query and key wait for the rotation: see _late.py.

A norm is verified by running it with random weights; it must be the RMSNorm of ``norm_rotary``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from posembed import functional
from posembed.integrations.huggingface import _shadow
from posembed.integrations.huggingface._exact import Decision
from posembed.integrations.huggingface._flow import functions_of, rotation_named
from posembed.integrations.huggingface._late import NormOptions, hooked
from posembed.integrations.huggingface._rotation import KERNEL_DEVICES, Rotation
from posembed.specification import RotarySpec

TOLERANCE = 1e-5  # relative to the largest result, in float32
FUSED = "norms that only it takes in the same pass"


def late_norms(
    decision: Decision,
) -> Iterator[tuple[nn.Module, str, Rotation, NormOptions | str]]:
    """Norms beside rotations with exact angles, with their names and the rotations.

    Last is what ``norm_rotary`` takes for the norm, or why it stays apart.
    """
    dims = {json.loads(halves)["head_dim"] for halves, _, _ in decision.texts.values()}
    for owner in decision.owners:
        for module in owner.modules():
            for rotation, names in _calls(module, decision.rotations):
                for name, child in module.named_children():
                    if name in names and _shadow.original_of(type(child)) in _shadow.NORMS:
                        yield child, name, rotation, _options(module, child, dims)


def _calls(
    module: nn.Module, rotations: frozenset[Rotation]
) -> Iterator[tuple[Rotation, set[str]]]:
    """Rotations that a module's functions call, with the names that these functions use."""
    for function in functions_of(module):
        names = _shadow.names_in(function.__code__)
        for name in sorted(names):
            rotation = rotation_named(function, name)
            if rotation in rotations and rotation is not None:
                yield rotation, names


def _options(owner: nn.Module, norm: nn.Module, dims: set[int]) -> NormOptions | str:
    if hooked(norm) or "forward" in vars(norm):
        return "it has hooks or another forward"
    parameters = dict(norm.named_parameters())
    weight = parameters.get("weight")
    if set(parameters) != {"weight"} or weight is None or weight.dim() != 1:
        return "it has other parameters than one weight"
    if next(norm.buffers(), None) is not None:
        return "it has buffers"
    if weight.device.type not in KERNEL_DEVICES - {"meta"}:
        return f"it is on the device {weight.device.type}"
    if len(dims) != 1:
        return "layers have heads of several sizes"
    (head_dim,), size = dims, weight.shape[0]
    if size % head_dim:
        return f"its weight has {size} elements, and heads {head_dim}"
    found = _verified(norm, head_dim, size)
    return found or "it computes something else than RMSNorm and weight"


def _verified(norm: nn.Module, head_dim: int, size: int) -> NormOptions | None:
    """The options with which ``norm_rotary`` normalises like a norm; None if there are none."""
    random = torch.Generator("cpu").manual_seed(3)
    shape = (2, 3, 2, size) if size == head_dim else (2, 3, size)
    rows, weight = torch.randn(shape, generator=random), torch.randn(size, generator=random)
    rows = rows * torch.tensor([1.0, 1e-3])[(...,) + (None,) * (rows.dim() - 1)]  # to see eps
    try:
        expected = _theirs(norm, rows, weight)
    except Exception:  # another kind of module may need anything
        return None
    if not isinstance(expected, Tensor) or expected.shape != rows.shape:
        return None
    all_heads = size != head_dim
    heads = torch.unflatten(rows, -1, (-1, head_dim)) if all_heads else rows
    still = torch.full(rows.shape[:2], -1)
    values = {x for x in vars(norm).values() if isinstance(x, float) and 0 <= x < 1}
    for eps in sorted(values):
        for offset in (0.0, 1.0):
            ours = functional.norm_rotary(
                heads,
                None,
                weight,
                positions=still,
                spec=RotarySpec(head_dim),
                eps=eps,
                weight_offset=offset,
                over="all_heads" if all_heads else "head",
            ).reshape(rows.shape)
            slack = TOLERANCE * expected.abs().amax(-1, keepdim=True)
            if bool(((ours - expected).abs() <= slack).all()):
                return NormOptions(eps, offset, head_dim, all_heads)
    return None


def _theirs(norm: nn.Module, rows: Tensor, weight: Tensor) -> Any:
    """What a norm returns with another weight, on the CPU in float32."""
    with torch.no_grad():
        return torch.func.functional_call(norm, {"weight": weight}, (rows,))
