"""Decides which norms of query and key wait for the rotation: see _late.py.

A norm is verified by running it with random weights; it must be one of ``norm_rotary``.
"""

from __future__ import annotations

import ast
import itertools
import json
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posembed import functional
from posembed.integrations.huggingface import _shadow
from posembed.integrations.huggingface._exact import Decision
from posembed.integrations.huggingface._flow import (
    TablesStayError,
    functions_of,
    rotation_named,
    source,
)
from posembed.integrations.huggingface._late import NormOptions, hooked
from posembed.integrations.huggingface._rotation import KERNEL_DEVICES, MAX_WIDTH, Rotation
from posembed.specification import RotarySpec

TOLERANCE = 1e-5  # relative to the largest result, in float32 and float64
STEPS = 4  # the same in 16-bit types, in steps of the dtype
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDTH = 8  # of norms that take any
FUSED = "norms that it takes whole, in the same pass"
AFTER = "it normalises what is rotated already"
OTHER = "it is of the type {.__name__}"


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
    late: dict[tuple[nn.Module, str, Rotation], None] = {}
    for rotation, called, function in _calls(module):
        if rotations is not None and rotation not in rotations:
            continue
        names = _shadow.names_in(function.__code__)
        for name, child in module.named_children():
            kind = _shadow.original_of(type(child))
            if name not in names or (id(child), rotation) in seen:
                continue
            if kind not in _shadow.NORMS and ("norm" not in name or kind is nn.Identity):
                continue
            if _comes_after(function.__code__, name, called):
                late[child, name, rotation] = None
                continue
            seen.add((id(child), rotation))
            waits = kind in _shadow.NORMS
            yield child, name, rotation, _options(child, dims) if waits else OTHER.format(kind)
    for child, name, rotation in late:  # in no function it is before the rotation
        if (id(child), rotation) not in seen:
            seen.add((id(child), rotation))
            yield child, name, rotation, AFTER


def _comes_after(code: types.CodeType, norm: str, rotation: str) -> bool:
    """Whether code reads a norm only after its last call of a rotation."""
    try:
        tree = source(code)
    except TablesStayError:
        return False
    rotations = [x for x in tree.names if x.id == rotation]
    calls = (tree.parents[x] for x in rotations)
    norms = [(x.lineno, x.col_offset) for x in tree.attributes if x.attr == norm]
    direct = all(isinstance(x, ast.Call) and x.func in rotations for x in calls)
    ends = [(x.lineno, x.col_offset) for x in rotations]
    return direct and bool(norms) and bool(ends) and min(norms) > max(ends)


def _calls(module: nn.Module) -> Iterator[tuple[Rotation, str, types.FunctionType]]:
    """Rotations that a module's functions call, by what names, and these functions."""
    for holder in (module, *_shadow.held(module)):
        for function in functions_of(holder):
            names = sorted(_shadow.names_in(function.__code__))
            found = [(rotation_named(function, name), name) for name in names]
            shadow = _shadow.SHADOWS.get(str(function.__globals__.get("__name__")))
            for place, name in sorted(shadow.uses.get(function.__code__, ())) if shadow else ():
                found.append((_shadow.SHADOWS[place].rotations.get(name), name))
            for rotation, name in found:
                if rotation is not None:
                    yield rotation, name, function


def _options(norm: nn.Module, dims: set[int]) -> NormOptions | str:
    if hooked(norm) or "forward" in vars(norm):
        return "it has hooks or another forward"
    parameters = dict(norm.named_parameters())
    if not parameters.keys() <= {"weight", "bias"} or parameters.keys() == {"bias"}:
        return "it has other parameters than a weight and a bias"
    if any(x.dim() != 1 for x in parameters.values()):
        return "its weight has another shape than [head_dim] or [heads x head_dim]"
    if next(norm.buffers(), None) is not None:
        return "it has buffers"
    for parameter in parameters.values():
        if parameter.device.type not in KERNEL_DEVICES - {"meta"}:
            return f"it is on the device {parameter.device.type}"
    if len(dims) > 1:
        return "layers have heads of several sizes"
    head_dim = next(iter(dims), None)
    sizes = [x.shape[0] for x in parameters.values()] or list(getattr(norm, "normalized_shape", ()))
    size = sizes[0] if sizes else None
    if size is not None and size % (head_dim or 2):
        return f"it normalises {size} components, and heads have {head_dim}"
    found = _verified(norm, len(parameters), size, head_dim)
    return found or "it computes something else than RMSNorm or LayerNorm, and weight"


def _verified(
    norm: nn.Module, parameters: int, size: int | None, head_dim: int | None
) -> NormOptions | None:
    """The options with which ``norm_rotary`` normalises like a norm; None if there are none.

    Both are given rows of all heads, and rows of single heads.
    """
    widths = (head_dim or WIDTH, 3 * (head_dim or WIDTH)) if size is None else (size,)
    samples = [_sample(norm, parameters, width) for width in widths]
    values = {x for x in vars(norm).values() if isinstance(x, float) and 0 <= x < 1}
    if vars(norm).get("eps", 0.0) is None:
        values.add(torch.finfo(torch.float32).eps)  # torch's default, but for float64
    offsets = (0.0, 1.0) if parameters else (0.0,)
    kinds = (False, True)[parameters == 2 :]  # only LayerNorm may have a bias
    for eps, offset, centred in itertools.product(sorted(values), offsets, kinds):
        options = NormOptions(eps, offset, centred, head_dim, parameters, size, DTYPES)
        dtypes = [x for x in DTYPES if _follows(norm, samples, options, x)]
        if DTYPES[0] in dtypes:
            return options._replace(dtypes=tuple(dtypes))
    return None


class Sample(NamedTuple):
    """Arguments of a norm: rows of several shapes, and random parameters."""

    rows: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]


def _sample(norm: nn.Module, parameters: int, width: int) -> Sample:
    random = torch.Generator("cpu").manual_seed(3)
    made = tuple(
        torch.randn(width, generator=random, dtype=torch.float32, device="cpu")
        for _ in range(parameters)
    )
    rows = []
    for shape in ((2, 3, width), (2, 3, 2, width)):
        numbers = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")
        sizes = torch.tensor([1.0, 1e-3], dtype=torch.float32, device="cpu")  # to see eps
        rows.append(numbers * sizes[(...,) + (None,) * (numbers.dim() - 1)])
    return Sample(tuple(rows), made)


def _follows(
    norm: nn.Module, samples: list[Sample], options: NormOptions, dtype: torch.dtype
) -> bool:
    """Whether ``norm_rotary`` gives a norm's rows, which it does not rotate, in their dtype."""
    for sample in samples:
        parameters = tuple(x.to(dtype) for x in sample.parameters)
        for rows in sample.rows:
            given = rows.to(dtype)
            try:
                expected = _theirs(norm, given, parameters)
            except Exception:  # another kind of module may need anything
                return False
            if not isinstance(expected, Tensor) or expected.shape != rows.shape:
                return False
            if expected.dtype != dtype or not _near(given, expected, parameters, options):
                return False
    return True


def _near(
    rows: Tensor, expected: Tensor, parameters: tuple[Tensor, ...], options: NormOptions
) -> bool:
    size = rows.shape[-1]
    heads = next(n for n in range(1, size + 1) if size % n == 0 and size // n <= MAX_WIDTH)
    flat = rows.reshape(1, -1, heads, size // heads)  # [batch, tokens, heads, head_dim]
    weight, bias = (*parameters, None, None)[:2]
    ours = functional.norm_rotary(
        flat,
        None,
        weight,
        positions=torch.full(flat.shape[:2], -1, device="cpu"),
        spec=RotarySpec(size // heads),
        eps=options.eps,
        weight_offset=options.weight_offset,
        norm="layer" if options.centred else "rms",
        over="all_heads",
        query_bias=bias,
    ).reshape(rows.shape)
    narrow = rows.dtype in (torch.bfloat16, torch.float16)
    slack = STEPS * torch.finfo(rows.dtype).eps if narrow else TOLERANCE
    limits = slack * expected.abs().amax(-1, keepdim=True)
    return bool(((ours - expected).abs() <= limits).all())


def _theirs(norm: nn.Module, rows: Tensor, parameters: tuple[Tensor, ...]) -> Any:
    """What a norm returns with other parameters, on the CPU."""
    given = dict(zip(("weight", "bias"), parameters, strict=False))
    with torch.no_grad():
        return torch.func.functional_call(norm, given, (rows,))
