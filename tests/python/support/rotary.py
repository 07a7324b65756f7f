"""Slow, obvious references for rotary embedding, and the cases of its operators."""

from __future__ import annotations

import json
from typing import Any

import posembed  # noqa: F401  (registers the operators)
import torch
from torch import Tensor

from support.case import OperatorCase, Sample, in_schema_order

ORDERS = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1), "sbhd": (1, 0, 2)}


def turns(
    positions: Tensor, spec: dict[str, Any], frequencies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine in float64, accurate to 1e-14 at the small positions of these tests.

    With float32 numerics, as in a PyTorch program.
    """
    exact = spec.get("numerics", "exact") == "exact"
    dtype = torch.float64 if exact else torch.float32
    dim = spec.get("rotary_dim", spec["head_dim"])
    if frequencies is None:  # on the CPU, as in programs, because a device's float32 powers differ
        exponents = torch.arange(0, dim, 2).to(dtype) / dim
        frequencies = (1.0 / (spec.get("base", 10000.0) ** exponents)).to(positions.device)
    angle = angles(positions, spec, frequencies).to(dtype)
    return angle.cos().double(), angle.sin().double()


def angles(positions: Tensor, spec: dict[str, Any], frequencies: Tensor) -> Tensor:
    """Position times frequency of each pair: [(batch,) seq, (heads,) pairs]."""
    if frequencies.dim() == 3:  # [axes, heads, pairs]: summed over axes
        return torch.einsum("a...,ahp->...hp", positions.to(frequencies.dtype), frequencies)
    axes = (spec.get("sections") or {}).get("axis_of_pair")
    if axes and positions.dim() == 3:  # [axes, batch, seq]: each pair takes its axis's position
        positions = positions[torch.tensor(axes)].movedim(0, -1)
    else:
        positions = positions.unsqueeze(-1)
    if frequencies.dim() == 2:  # [heads, pairs]
        positions = positions.unsqueeze(-2)
    return positions.to(frequencies.dtype) * frequencies


def pairs_of(spec: dict[str, Any]) -> Tensor:
    """The components of each pair within the window: [2, pairs]."""
    dim = spec.get("rotary_dim", spec["head_dim"])
    components = torch.arange(dim)
    if spec.get("interleaved", False):
        return components.view(-1, 2).T
    sections = spec.get("sections") or {}
    counts = [dim // 2]
    if sections.get("within_axes"):
        axes = torch.tensor(sections["axis_of_pair"])
        counts = torch.unique_consecutive(axes, return_counts=True)[1].tolist()
    parts = components.split([2 * count for count in counts])
    return torch.cat([part.view(2, -1) for part in parts], 1)


def amplitude(positions: Tensor, spec: dict[str, Any]) -> Tensor | float:
    """The factors of a query's pairs with xPos: [..., seq, pairs]."""
    scaling = spec.get("scaling") or {}
    if scaling.get("type") != "xpos":
        return 1.0
    dim = spec.get("rotary_dim", spec["head_dim"])
    zeta = (torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim + 0.4) / 1.4
    distance = positions.double().unsqueeze(-1) - scaling.get("center", 0.0)
    return zeta ** (distance / scaling.get("scale_base", 512.0))


def rotate(
    tensor: Tensor,
    positions: Tensor | None,
    frequencies: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    spec: str,
    layout: str = "bshd",
    offset: int = 0,
    inverse: bool = False,
    transpose: bool = False,
    is_key: bool = False,
    tangent: bool = False,
) -> Tensor:
    """Rotates one tensor, pair by pair; with ``tangent``, by a quarter turn times the angle."""
    numbers = json.loads(spec)
    if layout == "thd":
        tensor = tensor.unsqueeze(0)
        positions = None if positions is None else positions.unsqueeze(-2)
    order = ORDERS.get(layout, (0, 1, 2))
    x = tensor.permute(*order, 3).clone()  # [batch, seq, heads, head_dim]
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device) + offset
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().long()
        positions = positions - cu_seqlens[:-1].long().repeat_interleave(lengths)
    cosine, sine = turns(positions, numbers, frequencies)  # [(batch,) seq, pairs]
    if tangent:
        cosine, sine = torch.zeros_like(sine), angles(positions, numbers, frequencies)
    if frequencies is not None and frequencies.dim() > 1:
        size: Tensor | float = 1.0
    else:
        cosine, sine = cosine.unsqueeze(-2), sine.unsqueeze(-2)
        size = amplitude(positions, numbers)
        size = size.unsqueeze(-2) if isinstance(size, Tensor) else size
    if is_key != inverse:
        size = 1.0 / size
    if (inverse != transpose) != numbers.get("reverse", False):
        sine = -sine
    cosine, sine = cosine * size, sine * size
    start, dim = numbers.get("rotary_start", 0), numbers.get("rotary_dim", numbers["head_dim"])
    if x.shape[-1] != numbers["head_dim"]:  # only the window
        start = 0
    window = x[..., start : start + dim]
    pairs = pairs_of(numbers).to(x.device)
    first, second = window[..., pairs[0]], window[..., pairs[1]]
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    rotated = torch.cat(turned, -1)[..., pairs.flatten().argsort()]
    marked = torch.zeros_like(positions).bool() if positions.is_floating_point() else positions < 0
    untouched = marked[..., None, None]
    if untouched.dim() == 5:
        untouched = untouched.all(0)
    result = torch.cat(
        [x[..., :start], torch.where(untouched, window, rotated), x[..., start + dim :]], -1
    ).permute(*[order.index(i) for i in range(3)], 3)
    return result.squeeze(0) if layout == "thd" else result


def reference(query: Tensor, *given: Tensor | None, **options: Any) -> Tensor:
    return rotate(query, *(given or (None,)), **options)


def reference_pair(
    query: Tensor, key: Tensor, *given: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    return reference(query, *given, **options), reference(key, *given, is_key=True, **options)


def reference_out(out: Tensor, query: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return reference(query, *given, **options), query


def reference_pair_out(
    query_out: Tensor, key_out: Tensor, query: Tensor, key: Tensor, *given: Any, **options: Any
) -> tuple[Tensor, ...]:
    return *reference_pair(query, key, *given, **options), query, key


def reference_in_place(
    query: Tensor, positions: Tensor | None, frequencies: Tensor, *given: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Frequencies are among the floating tensors, but are not written."""
    return rotate(query, positions, frequencies, *given, **options), frequencies


def reference_tangent(
    rotated: Tensor, positions: Tensor | None, frequencies: Tensor, *given: Tensor, **options: Any
) -> Tensor:
    """The derivative at frequencies 0, where the rotation changes nothing."""

    def of(direction: Tensor) -> Tensor:
        return rotate(rotated, positions, direction, *given, **options)

    return torch.func.jvp(of, (torch.zeros_like(frequencies),), (frequencies,))[1]


def reference_frequencies_backward(
    gradient: Tensor, query: Tensor, positions: Tensor | None = None, *given: Any, **options: Any
) -> Tensor:
    """The derivative of gradient times rotated query by frequencies, at frequencies 0."""
    pairs = json.loads(options["spec"]).get("rotary_dim", query.shape[-1]) // 2
    shape = given[0].shape if given and given[0] is not None else (pairs,)
    still = torch.zeros(shape, dtype=torch.float64, device=query.device)

    def product(frequencies: Tensor) -> Tensor:
        return (
            gradient * rotate(query, positions, frequencies, *given[1:], tangent=True, **options)
        ).sum()

    return torch.func.grad(product)(still)


def random_positions(
    shape: tuple[int, ...], device: torch.device | str, has_axes: bool = False
) -> Tensor:
    """Positions from -1, which is on all axes or on none."""
    places = torch.randint(-1, 40, shape, device=device)
    if has_axes:
        places = places.abs()
        places[..., 1::5] = -1
    return places


def sample(
    heads: tuple[int, ...],
    positions: bool = False,
    axes: int | None = None,
    learned: bool = False,
    documents: bool = False,
    window_only: bool = False,
    by_head: bool = False,
    mixed: bool = False,
    **options: Any,
) -> Any:
    """Samples with that many heads in query (and key, which may be only the rotated window).

    Learned frequencies are [pairs], with ``by_head`` [heads, pairs], and if ``mixed`` [axes, heads,
    pairs].
    """
    layout, spec = options.get("layout", "bshd"), options.pop("spec")

    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        numbers = json.loads(spec)
        tensors: list[Tensor | None] = []
        for i, count in enumerate(heads):
            head_dim = numbers["rotary_dim" if window_only and i == 1 else "head_dim"]
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
            places = random_positions(shape, device, axes is not None)
        args = [*tensors, places]
        if learned or documents:
            lead = (axes or 1,) * mixed + heads[:1] * (by_head or mixed)
            args += [frequencies(spec, device, dtype, lead) if learned else None]
        if documents:
            starts = [0, seq // 3, seq // 3, seq]
            args += [torch.tensor(starts, dtype=torch.int32, device=device)]
        return Sample(tuple(args), {"spec": spec, **options})

    return make


def frequencies(
    spec: str, device: torch.device | str, dtype: torch.dtype, lead: tuple[int, ...] = ()
) -> Tensor:
    """Frequencies like a model's learned ones: float32 for data of 16 or 32 bits."""
    numbers = json.loads(spec)
    pairs = numbers.get("rotary_dim", numbers["head_dim"]) // 2
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.rand(*lead, pairs, device=device, dtype=wide)


HEADS, HEAD_DIM = 3, 8


def reference_permute(weight: Tensor, num_heads: int, *, interleaved: bool) -> Tensor:
    assert interleaved
    halves = weight.view(num_heads, 2, HEAD_DIM // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape).clone()


def weight_sample(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
    weight = torch.randn(HEADS * HEAD_DIM, 5, device=device, dtype=dtype)
    return Sample((weight, HEADS), {"interleaved": True})


PLAIN = '{"head_dim":8}'
PARTIAL = (
    '{"base":500000.0,"head_dim":16,"interleaved":true,"reverse":true,'
    '"rotary_dim":10,"rotary_start":4}'
)

SECTIONS = '{"head_dim":16,"rotary_dim":12,"sections":{"axis_of_pair":[0,1,2,0,2,1]}}'

WITHIN = (
    '{"head_dim":20,"rotary_dim":16,"rotary_start":2,'
    '"sections":{"axis_of_pair":[0,0,0,2,1,1,1,1],"restart":true,"within_axes":true}}'
)

XPOS = '{"head_dim":8,"scaling":{"center":3.0,"scale_base":16.0,"type":"xpos"}}'

# A float64 rotation by float32 angles: PyTorch programs up to rounding.
FLOAT32 = '{"head_dim":16,"interleaved":true,"numerics":"float32","rotary_dim":12}'
STEPS = '{"head_dim":16,"numerics":"float32_product","rotary_start":4,"rotary_dim":12}'
WIDE = (torch.float32, torch.float64)

CASES = in_schema_order(
    [
        OperatorCase(
            "rotary", torch.ops.posembed.rotary.default, sample((3,), spec=PLAIN), reference
        ),
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
        OperatorCase(
            "rotary-documents",
            torch.ops.posembed.rotary.default,
            sample((2,), documents=True, spec=PARTIAL, layout="thd", offset=7),
            reference,
        ),
        OperatorCase(
            "rotary-learned",
            torch.ops.posembed.rotary.default,
            sample((3,), positions=True, learned=True, spec=PARTIAL, inverse=True),
            reference,
        ),
        OperatorCase(
            "rotary_pair-learned-documents",
            torch.ops.posembed.rotary_pair.default,
            sample((2, 1), learned=True, documents=True, spec=PLAIN, layout="thd"),
            reference_pair,
        ),
        OperatorCase(
            "rotary_pair-learned-sections",
            torch.ops.posembed.rotary_pair.default,
            sample((2, 1), positions=True, axes=3, learned=True, spec=SECTIONS),
            reference_pair,
        ),
        OperatorCase(
            "rotary_pair-within-axes",
            torch.ops.posembed.rotary_pair.default,
            sample((3, 1), positions=True, axes=3, learned=True, window_only=True, spec=WITHIN),
            reference_pair,
        ),
        OperatorCase(
            "rotary_pair-by-head-sections",
            torch.ops.posembed.rotary_pair.default,
            sample((3, 3), positions=True, axes=3, learned=True, by_head=True, spec=WITHIN),
            reference_pair,
        ),
        OperatorCase(
            "rotary-by-head",
            torch.ops.posembed.rotary.default,
            sample((3,), learned=True, by_head=True, spec=PARTIAL, layout="sbhd", offset=3),
            reference,
        ),
        OperatorCase(
            "rotary_pair-mixed",
            torch.ops.posembed.rotary_pair.default,
            sample((2, 2), positions=True, axes=2, learned=True, mixed=True, spec=PARTIAL),
            reference_pair,
        ),
        OperatorCase(
            "rotary-mixed-thd",
            torch.ops.posembed.rotary.default,
            sample(
                (3,), positions=True, axes=3, learned=True, mixed=True, spec=PLAIN, layout="thd"
            ),
            reference,
        ),
        OperatorCase(
            "rotary_-mixed",
            torch.ops.posembed.rotary_.default,
            sample(
                (2,), positions=True, axes=2, learned=True, mixed=True, spec=PLAIN, layout="bhsd"
            ),
            reference_in_place,
            mutates=True,
        ),
        OperatorCase(
            "rotary_tangent-mixed",
            torch.ops.posembed.rotary_tangent.default,
            sample((2,), positions=True, axes=3, learned=True, mixed=True, spec=PARTIAL),
            reference_tangent,
        ),
        OperatorCase(
            "rotary_tangent-within-axes",
            torch.ops.posembed.rotary_tangent.default,
            sample((2,), positions=True, axes=3, learned=True, by_head=True, spec=WITHIN),
            reference_tangent,
        ),
        OperatorCase(
            "rotary_frequencies_backward-mixed",
            torch.ops.posembed.rotary_frequencies_backward.default,
            sample((2, 2), positions=True, axes=3, learned=True, mixed=True, spec=PARTIAL),
            reference_frequencies_backward,
            differentiable=False,  # frequencies only give the shape; rotary_pair-mixed has orders
        ),
        OperatorCase(
            "rotary_frequencies_backward-within-axes",
            torch.ops.posembed.rotary_frequencies_backward.default,
            sample((3, 3), positions=True, axes=3, learned=True, by_head=True, spec=WITHIN),
            reference_frequencies_backward,
            differentiable=False,  # as above
        ),
        OperatorCase(
            "rotary_-learned-documents",
            torch.ops.posembed.rotary_.default,
            sample((2,), learned=True, documents=True, spec=PARTIAL, layout="thd"),
            reference_in_place,
            mutates=True,
        ),
        OperatorCase(
            "rotary_tangent",
            torch.ops.posembed.rotary_tangent.default,
            sample((3,), positions=True, learned=True, spec=PARTIAL),
            reference_tangent,
        ),
        OperatorCase(
            "rotary_tangent-documents",
            torch.ops.posembed.rotary_tangent.default,
            sample((2,), learned=True, documents=True, spec=PLAIN, layout="thd", transpose=True),
            reference_tangent,
        ),
        OperatorCase(
            "rotary_frequencies_backward",
            torch.ops.posembed.rotary_frequencies_backward.default,
            sample((2, 2), positions=True, spec=PARTIAL, layout="bhsd"),
            reference_frequencies_backward,
        ),
        OperatorCase(
            "rotary_frequencies_backward-sections",
            torch.ops.posembed.rotary_frequencies_backward.default,
            sample((2, 2), positions=True, axes=3, spec=SECTIONS, transpose=True),
            reference_frequencies_backward,
        ),
        OperatorCase(
            "rotary_frequencies_backward-documents",
            torch.ops.posembed.rotary_frequencies_backward.default,
            sample((3, 3), documents=True, spec=PLAIN, layout="thd", offset=3),
            reference_frequencies_backward,
        ),
        OperatorCase(
            "rotary_out",
            torch.ops.posembed.rotary_out.default,
            sample((3, 3), positions=True, spec=PARTIAL, layout="bhsd"),
            reference_out,
            mutates=True,
        ),
        OperatorCase(
            "rotary_pair_out",
            torch.ops.posembed.rotary_pair_out.default,
            sample((4, 2, 4, 2), spec=PLAIN, layout="thd"),
            reference_pair_out,
            mutates=True,
        ),
        OperatorCase(
            "rotary-xpos",
            torch.ops.posembed.rotary.default,
            sample((3,), positions=True, spec=XPOS),
            reference,
        ),
        OperatorCase(
            "rotary_pair-xpos",
            torch.ops.posembed.rotary_pair.default,
            sample((4, 2), spec=XPOS, layout="bhsd", inverse=True),
            reference_pair,
        ),
        OperatorCase(
            "rotary-float32",
            torch.ops.posembed.rotary.default,
            sample((3,), positions=True, spec=FLOAT32),
            reference,
            dtypes=WIDE,
        ),
        OperatorCase(
            "rotary_pair-float32_product",
            torch.ops.posembed.rotary_pair.default,
            sample((2, 2), spec=STEPS, layout="sbhd", offset=3),
            reference_pair,
            dtypes=WIDE,
        ),
        OperatorCase(
            "rotary-float32-documents",
            torch.ops.posembed.rotary.default,
            sample((2,), documents=True, spec=FLOAT32, layout="thd", offset=7),
            reference,
            dtypes=WIDE,
        ),
        OperatorCase(
            "rotary_permute_weight",
            torch.ops.posembed.rotary_permute_weight.default,
            weight_sample,
            reference_permute,
            differentiable=False,  # weights are converted once, outside training
        ),
        OperatorCase(
            "rotary_pair-xpos-learned",
            torch.ops.posembed.rotary_pair.default,
            sample((2, 1), learned=True, spec=XPOS),
            reference_pair,
        ),
    ],
    "out",
    "query_out",
    "key_out",
    "gradient",
    "rotated",
    "weight",
    "num_heads",
    "query",
    "key",
    "positions",
    "frequencies",
    "cu_seqlens",
)
