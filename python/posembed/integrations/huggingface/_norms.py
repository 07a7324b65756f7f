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
from posembed.integrations.huggingface._rotation import KERNEL_DEVICES, MAX_WIDTH, Rotation
from posembed.specification import RotarySpec

TOLERANCE = 1e-5  # relative to the largest result, in float32
FUSED = "norms that only it takes in the same pass"


Found = tuple[nn.Module, str, Rotation, NormOptions | str]


def late_norms(model: nn.Module, decisions: list[Decision]) -> Iterator[Found]:
    """Norms beside rotations, with their names and the rotations.

    Last is what ``norm_rotary`` takes for the norm, or why it stays apart.
    """
    seen: set[tuple[int, Rotation]] = set()
    for decision in decisions:
        dims = {json.loads(halves)["head_dim"] for halves, _, _ in decision.texts.values()}
        for owner in decision.owners if dims else ():
            for module in owner.modules():
                yield from _beside(module, decision.rotations, dims, seen)
    for module in model.modules():
        yield from _beside(module, None, set(), seen)


def _beside(
    module: nn.Module,
    rotations: frozenset[Rotation] | None,
    dims: set[int],
    seen: set[tuple[int, Rotation]],
) -> Iterator[Found]:
    """Norms of a module whose functions, or those of objects that it holds, call a rotation.

    Args:
        module: The module.
        rotations: The rotations; None for all, by their tables.
        dims: The heads' sizes, if they are known.
        seen: Norms and rotations that are known.
    """
    for rotation, names in _calls(module):
        if rotations is not None and rotation not in rotations:
            continue
        for name, child in module.named_children():
            kind = _shadow.original_of(type(child))
            if name not in names or (id(child), rotation) in seen:
                continue
            if kind in _shadow.NORMS:
                seen.add((id(child), rotation))
                yield child, name, rotation, _options(child, dims)
            elif "norm" in name and kind is not nn.Identity:
                seen.add((id(child), rotation))
                yield child, name, rotation, f"it is of the type {kind.__name__}"


def _calls(module: nn.Module) -> Iterator[tuple[Rotation, set[str]]]:
    """Rotations that a module's functions call, with the names that these functions use."""
    for holder in (module, *_shadow.held(module)):
        for function in functions_of(holder):
            names = _shadow.names_in(function.__code__)
            found = [rotation_named(function, name) for name in sorted(names)]
            shadow = _shadow.SHADOWS.get(str(function.__globals__.get("__name__")))
            for place, name in sorted(shadow.uses.get(function.__code__, ())) if shadow else ():
                found.append(_shadow.SHADOWS[place].rotations.get(name))
            for rotation in found:
                if rotation is not None and not rotation.apart:
                    yield rotation, names


def _options(norm: nn.Module, dims: set[int]) -> NormOptions | str:
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
    if len(dims) > 1:
        return "layers have heads of several sizes"
    size, head_dim = weight.shape[0], next(iter(dims), None)
    if size % (head_dim or 2):
        return f"its weight has {size} elements, and heads {head_dim}"
    found = _verified(norm, size, head_dim)
    return found or "it computes something else than RMSNorm and weight"


def _verified(norm: nn.Module, size: int, head_dim: int | None) -> NormOptions | None:
    """The options with which ``norm_rotary`` normalises like a norm; None if there are none.

    Both are given rows of all heads, and rows of single heads.
    """
    random = torch.Generator("cpu").manual_seed(3)
    weight = torch.randn(size, generator=random)
    samples, results = [], []
    for shape in ((2, 3, size), (2, 3, 2, size)):
        rows = torch.randn(shape, generator=random)
        rows = rows * torch.tensor([1.0, 1e-3])[(...,) + (None,) * (rows.dim() - 1)]  # to see eps
        try:
            expected = _theirs(norm, rows, weight)
        except Exception:  # another kind of module may need anything
            return None
        if not isinstance(expected, Tensor) or expected.shape != rows.shape:
            return None
        samples.append(rows)
        results.append(expected)
    values = {x for x in vars(norm).values() if isinstance(x, float) and 0 <= x < 1}
    for eps in sorted(values):
        for offset in (0.0, 1.0):
            options = NormOptions(eps, offset, head_dim)
            if all(_near(*x, weight, options) for x in zip(samples, results, strict=True)):
                return options
    return None


def _near(rows: Tensor, expected: Tensor, weight: Tensor, options: NormOptions) -> bool:
    """Whether ``norm_rotary`` gives the expected rows, which it does not rotate."""
    size = rows.shape[-1]
    heads = next(n for n in range(1, size + 1) if size % n == 0 and size // n <= MAX_WIDTH)
    flat = rows.reshape(1, -1, heads, size // heads)  # [batch, tokens, heads, head_dim]
    ours = functional.norm_rotary(
        flat,
        None,
        weight,
        positions=torch.full(flat.shape[:2], -1),
        spec=RotarySpec(size // heads),
        eps=options.eps,
        weight_offset=options.weight_offset,
        over="all_heads",
    ).reshape(rows.shape)
    slack = TOLERANCE * expected.abs().amax(-1, keepdim=True)
    return bool(((ours - expected).abs() <= slack).all())


def _theirs(norm: nn.Module, rows: Tensor, weight: Tensor) -> Any:
    """What a norm returns with another weight, on the CPU in float32."""
    with torch.no_grad():
        return torch.func.functional_call(norm, {"weight": weight}, (rows,))
