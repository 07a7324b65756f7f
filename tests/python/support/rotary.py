"""Rotary embedding the slow and obvious way, and its operators' cases."""

from __future__ import annotations

import json
from typing import Any

import posembed  # noqa: F401  (registers the operators)
import torch
from torch import Tensor

from support.case import OperatorCase, Sample

ORDERS = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1), "sbhd": (1, 0, 2)}


def angles(positions: Tensor, spec: dict[str, Any]) -> Tensor:
    """Position times frequency in float64: good to 1e-14 at the small positions of these tests."""
    dim = spec.get("rotary_dim", spec["head_dim"])
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    frequencies = spec.get("base", 10000.0) ** -exponents
    axes = (spec.get("sections") or {}).get("axis_of_pair")
    if axes and positions.dim() == 3:  # [axes, batch, seq]: every pair has the position of its axis
        return positions[torch.tensor(axes)].double().movedim(0, -1) * frequencies
    return positions.double().unsqueeze(-1) * frequencies


def rotate(
    tensor: Tensor,
    positions: Tensor | None,
    *,
    spec: str,
    layout: str = "bshd",
    offset: int = 0,
    inverse: bool = False,
    transpose: bool = False,
) -> Tensor:
    """One tensor, pair by pair."""
    numbers = json.loads(spec)
    if layout == "thd":
        tensor = tensor.unsqueeze(0)
        positions = None if positions is None else positions.unsqueeze(-2)
    order = ORDERS.get(layout, (0, 1, 2))
    x = tensor.permute(*order, 3).clone()  # [batch, seq, heads, head_dim]
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device) + offset
    angle = angles(positions, numbers).unsqueeze(-2)  # [(batch,) seq, 1, pairs]
    if inverse != transpose:
        angle = -angle
    if numbers.get("reverse", False):
        angle = -angle
    start, dim = numbers.get("rotary_start", 0), numbers.get("rotary_dim", numbers["head_dim"])
    if x.shape[-1] != numbers["head_dim"]:  # the window alone
        start = 0
    window = x[..., start : start + dim]
    if numbers.get("interleaved", False):
        first, second = window[..., 0::2].clone(), window[..., 1::2].clone()
    else:
        first, second = window[..., : dim // 2].clone(), window[..., dim // 2 :].clone()
    turned = (
        first * angle.cos() - second * angle.sin(),
        second * angle.cos() + first * angle.sin(),
    )
    if numbers.get("interleaved", False):
        rotated = torch.stack(turned, -1).flatten(-2)
    else:
        rotated = torch.cat(turned, -1)
    untouched = (positions < 0)[..., None, None]
    if untouched.dim() == 5:
        untouched = untouched.any(0)
    result = torch.cat(
        [x[..., :start], torch.where(untouched, window, rotated), x[..., start + dim :]], -1
    ).permute(*[order.index(i) for i in range(3)], 3)
    return result.squeeze(0) if layout == "thd" else result


def reference(query: Tensor, positions: Tensor | None = None, **options: Any) -> Tensor:
    return rotate(query, positions, **options)


def reference_pair(
    query: Tensor, key: Tensor, positions: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    return rotate(query, positions, **options), rotate(key, positions, **options)


def sample(
    heads: tuple[int, ...],
    positions: bool = False,
    axes: int | None = None,
    window_only: bool = False,
    **options: Any,
) -> Any:
    """Samples with that many heads in query (and key, which may be the rotated window alone)."""
    layout, spec = options.get("layout", "bshd"), options.pop("spec")

    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        numbers = json.loads(spec)
        dims = (numbers["head_dim"], numbers["rotary_dim" if window_only else "head_dim"])
        tensors: list[Tensor | None] = []
        for count, head_dim in zip(heads, dims, strict=False):
            shape = {
                "bshd": (batch, seq, count, head_dim),
                "bhsd": (batch, count, seq, head_dim),
                "sbhd": (seq, batch, count, head_dim),
                "thd": (seq, count, head_dim),
            }[layout]
            tensors.append(torch.randn(shape, device=device, dtype=dtype))
        places = None
        if positions:
            shape = (seq,) if layout == "thd" else (batch, seq)
            shape = shape if axes is None else (axes, *shape)
            places = torch.randint(-1, 40, shape, device=device)
        return Sample((*tensors, places), {"spec": spec, **options})

    return make


PLAIN = '{"head_dim":8}'
PARTIAL = (
    '{"base":500000.0,"head_dim":16,"interleaved":true,"reverse":true,'
    '"rotary_dim":10,"rotary_start":4}'
)

SECTIONS = '{"head_dim":16,"rotary_dim":12,"sections":{"axis_of_pair":[0,1,2,0,2,1]}}'

CASES = [
    OperatorCase("rotary", torch.ops.posembed.rotary.default, sample((3,), spec=PLAIN), reference),
    OperatorCase(
        "rotary-partial-positions",
        torch.ops.posembed.rotary.default,
        sample((2,), positions=True, spec=PARTIAL, layout="bhsd"),
        reference,
    ),
    OperatorCase(
        "rotary_pair",
        torch.ops.posembed.rotary_pair.default,
        sample((4, 1), spec=PARTIAL, offset=5, inverse=True),
        reference_pair,
    ),
    OperatorCase(
        "rotary_pair-thd",
        torch.ops.posembed.rotary_pair.default,
        sample((2, 2), spec=PLAIN, layout="thd"),
        reference_pair,
    ),
    OperatorCase(
        "rotary_pair-window",
        torch.ops.posembed.rotary_pair.default,
        sample((3, 1), positions=True, window_only=True, spec=PARTIAL),
        reference_pair,
    ),
    OperatorCase(
        "rotary_pair-sections",
        torch.ops.posembed.rotary_pair.default,
        sample((2, 1), positions=True, axes=3, spec=SECTIONS),
        reference_pair,
    ),
    OperatorCase(
        "rotary-sections-thd",
        torch.ops.posembed.rotary.default,
        sample((2,), positions=True, axes=3, spec=SECTIONS, layout="thd"),
        reference,
    ),
    OperatorCase(
        "rotary_",
        torch.ops.posembed.rotary_.default,
        sample((3,), spec=PLAIN, layout="sbhd"),
        reference,
        mutates=True,
    ),
    OperatorCase(
        "rotary_pair_",
        torch.ops.posembed.rotary_pair_.default,
        sample((4, 2), positions=True, spec=PARTIAL),
        reference_pair,
        mutates=True,
    ),
]
