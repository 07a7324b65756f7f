"""Cases of the rotary operators."""

import json
from typing import Any

import torch
from posembed.glue.decompositions import with_every_argument
from torch import Tensor

from support.case import Sample, case, decomposed, in_schema_order, transposed

rotate = decomposed("rotary")


def by_frequencies(query: Tensor, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The rotation of a query as a function of the frequencies."""
    names = [argument.name for argument in torch.ops.posembed.rotary.default._schema.arguments]
    call = {**dict(zip(names[1:], given, strict=False)), **options}
    return lambda frequencies: rotate(query, **{**call, "frequencies": frequencies})


def reference_tangent(rotated: Tensor, *given: Any, **options: Any) -> Tensor:
    """The derivative at frequencies 0, where the rotation changes nothing."""
    frequencies = given[6]
    of = by_frequencies(rotated, given, options)
    return torch.func.jvp(of, (torch.zeros_like(frequencies),), (frequencies,))[1]


def reference_frequencies_backward(gradient: Tensor, query: Tensor, spec: str, *given: Any, **options: Any) -> Tensor:
    pairs = json.loads(spec).get("rotary_dim", query.shape[-1]) // 2
    still = given[5] if len(given) > 5 and given[5] is not None else query.new_zeros(pairs)
    return transposed(by_frequencies(query, (spec, *given), options), still.double(), gradient)


def float32_program(name: str) -> Any:
    """A PyTorch program's float32 frequencies, computed on the CPU: devices' powers differ."""

    def call(query: Tensor, *given: Any, **options: Any) -> Any:
        numbers = json.loads(next(x for x in given if isinstance(x, str)))
        exponents = torch.arange(0, numbers["rotary_dim"], 2).float() / numbers["rotary_dim"]
        frequencies = (1.0 / 10000.0**exponents).to(query.device)
        return decomposed(name)(query, *given, **options, frequencies=frequencies)

    return call


def random_positions(shape: tuple[int, ...], device: torch.device | str, has_axes: bool = False) -> Tensor:
    """Positions from -1, which is on all axes or on none."""
    places = torch.randint(-1, 40, shape, device=device)
    if has_axes:
        places = places.abs()
        places[..., 1::5] = -1
    return places


def shape_of(layout: str, batch: int, seq: int, heads: int, dim: int) -> tuple[int, ...]:
    return {
        "bshd": (batch, seq, heads, dim),
        "bhsd": (batch, heads, seq, dim),
        "sbhd": (seq, batch, heads, dim),
        "thd": (seq, heads, dim),
    }[layout]


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
            shape = shape_of(layout, batch, seq, count, head_dim)
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


def frequencies(spec: str, device: torch.device | str, dtype: torch.dtype, lead: tuple[int, ...] = ()) -> Tensor:
    """Frequencies like a model's learned ones: float32 for data of 16 or 32 bits."""
    numbers = json.loads(spec)
    pairs = numbers.get("rotary_dim", numbers["head_dim"]) // 2
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.rand(*lead, pairs, device=device, dtype=wide)


HEADS, HEAD_DIM = 3, 8


def reference_permute(weight: Tensor, num_heads: int, interleaved: bool) -> Tensor:
    assert interleaved
    halves = weight.view(num_heads, 2, HEAD_DIM // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape).clone()


def weight_sample(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
    weight = torch.randn(HEADS * HEAD_DIM, 5, device=device, dtype=dtype)
    return Sample((weight, HEADS), {"interleaved": True})


def packed_sample(
    heads: int,
    key_heads: int,
    order: str,
    positions: bool = False,
    axes: int | None = None,
    documents: bool = False,
    learned: bool = False,
    gradients: bool = False,
    **options: Any,
) -> Any:
    """Samples of packed projections, or of the gradients of their three parts."""

    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        counts = (heads, key_heads, key_heads)
        rest = {"positions": positions, "axes": axes, "documents": documents, "learned": learned}
        parts = sample(counts, **rest, **options)(batch, seq, device, dtype)
        tensors, others = parts.args[:3], parts.args[3:]
        if not gradients:
            by_token = [x.transpose(1, 2) if options.get("layout") == "bhsd" else x for x in tensors]
            tensors = (torch.cat(by_token, -2).flatten(-2),)
        packing = {"heads": heads, "key_heads": key_heads, "order": order}
        return Sample((*tensors, *others), {**parts.kwargs, **packing})

    return make


PACKED = decomposed("rotary_packed_pair")


def reference_packed(qkv: Tensor, heads: int, key_heads: int, order: str, *given: Any) -> Tensor:
    """What a projection contains after its query and key are rotated in place."""
    groups = key_heads if order == "groups" else 1
    value = torch.unflatten(qkv, -1, (groups, (heads + 2 * key_heads) // groups, -1))
    layout = given[2]
    found = [
        torch.unflatten(x.transpose(1, 2) if layout == "bhsd" else x, -2, (groups, -1))
        for x in PACKED(qkv, heads, key_heads, order, *given)
    ]
    return torch.cat((*found, value[..., -(key_heads // groups) :, :]), -2).flatten(-3)


def reference_packed_backward(
    query: Tensor, key: Tensor, value: Tensor, heads: int, key_heads: int, order: str, *given: Any
) -> Tensor:
    """The transpose of the rotation with a value that is a part of the projection."""
    layout = given[2]
    groups = key_heads if order == "groups" else 1

    def forward(qkv: Tensor) -> Tensor:
        parts = torch.unflatten(qkv, -1, (groups, (heads + 2 * key_heads) // groups, -1))
        last = parts[..., -(key_heads // groups) :, :].flatten(-3, -2)
        last = last.transpose(1, 2) if layout == "bhsd" else last
        call = (qkv, heads, key_heads, order, *given[:-1], not given[-1])
        return torch.cat([x.flatten() for x in (*PACKED(*call), last)])

    by_token = query.transpose(1, 2) if layout == "bhsd" else query
    width = (heads + 2 * key_heads) * query.shape[-1]
    like = query.new_empty((*by_token.shape[:-2], width))
    return transposed(forward, like, torch.cat([x.flatten() for x in (query, key, value)]))


def packed_case(name: str, heads: int = 4, key_heads: int = 2, order: str = "groups", **options: Any) -> Any:
    """A case with a reference that takes every argument in order."""
    operator = name.split("-")[0]
    references = {"rotary_packed_": reference_packed, "rotary_packed_backward": reference_packed_backward}
    reference = references.get(operator)
    if reference is not None:
        reference = with_every_argument(getattr(torch.ops.posembed, operator).default, reference)
    samples = packed_sample(heads, key_heads, order, gradients="backward" in operator, **options)
    return case(name, samples, reference, mutates=operator.endswith("_"))


PLAIN = '{"head_dim":8}'
PARTIAL = '{"base":500000.0,"head_dim":16,"interleaved":true,"reverse":true,"rotary_dim":10,"rotary_start":4}'

SECTIONS = '{"head_dim":16,"rotary_dim":12,"sections":{"axis_of_pair":[0,1,2,0,2,1]}}'

WITHIN = (
    '{"head_dim":20,"rotary_dim":16,"rotary_start":2,'
    '"sections":{"axis_of_pair":[0,0,0,2,1,1,1,1],"restart":true,"within_axes":true}}'
)

XPOS = '{"head_dim":12,"rotary_dim":8,"rotary_start":4,"scaling":{"center":3.0,"scale_base":16.0,"type":"xpos"}}'

# A float64 rotation by float32 angles: PyTorch programs up to rounding.
FLOAT32 = '{"head_dim":16,"interleaved":true,"numerics":"float32","rotary_dim":12}'
STEPS = '{"head_dim":16,"numerics":"float32_product","rotary_start":4,"rotary_dim":12}'
WIDE = (torch.float32, torch.float64)

CASES = in_schema_order(
    [
        case("rotary", sample((3,), spec=PLAIN)),
        case("rotary-partial-positions", sample((2,), positions=True, spec=PARTIAL, layout="bhsd")),
        case("rotary_pair", sample((4, 1), spec=PARTIAL, offset=5, inverse=True)),
        case("rotary_pair-thd", sample((2, 2), spec=PLAIN, layout="thd")),
        case("rotary_pair-window", sample((3, 1), positions=True, window_only=True, spec=PARTIAL)),
        case("rotary_pair-window-documents", sample((3, 1), learned=True, documents=True, window_only=True, spec=PARTIAL, layout="thd")),
        case("rotary_pair-sections", sample((2, 1), positions=True, axes=3, spec=SECTIONS)),
        case("rotary-sections-thd", sample((2,), positions=True, axes=3, spec=SECTIONS, layout="thd")),
        case("rotary_", sample((3,), spec=PLAIN, layout="sbhd"), mutates=True),
        case("rotary_pair_", sample((4, 2), positions=True, spec=PARTIAL), mutates=True),
        case("rotary-documents", sample((2,), documents=True, spec=PARTIAL, layout="thd", offset=7)),
        case("rotary-learned", sample((3,), positions=True, learned=True, spec=PARTIAL, inverse=True)),
        case("rotary_pair-learned-documents", sample((2, 1), learned=True, documents=True, spec=PLAIN, layout="thd")),
        case("rotary_pair-learned-sections", sample((2, 1), positions=True, axes=3, learned=True, spec=SECTIONS)),
        case("rotary_pair-within-axes", sample((3, 1), positions=True, axes=3, learned=True, window_only=True, spec=WITHIN)),
        case("rotary_pair-by-head-sections", sample((3, 3), positions=True, axes=3, learned=True, by_head=True, spec=WITHIN)),
        case("rotary-by-head", sample((3,), learned=True, by_head=True, spec=PARTIAL, layout="sbhd", offset=3)),
        case("rotary_pair-mixed", sample((2, 2), positions=True, axes=2, learned=True, mixed=True, spec=PARTIAL)),
        case("rotary-mixed-thd", sample((3,), positions=True, axes=3, learned=True, mixed=True, spec=PLAIN, layout="thd")),
        case("rotary_-mixed", sample((2,), positions=True, axes=2, learned=True, mixed=True, spec=PLAIN, layout="bhsd"), mutates=True),
        case("rotary_tangent-mixed", sample((2,), positions=True, axes=3, learned=True, mixed=True, spec=PARTIAL), reference_tangent),
        case("rotary_tangent-within-axes", sample((2,), positions=True, axes=3, learned=True, by_head=True, spec=WITHIN), reference_tangent),
        case(
            "rotary_frequencies_backward-mixed",
            sample((2, 2), positions=True, axes=3, learned=True, mixed=True, spec=PARTIAL),
            reference_frequencies_backward,
            differentiable=False,  # frequencies only give the shape; rotary_pair-mixed has orders
        ),
        case(
            "rotary_frequencies_backward-within-axes",
            sample((3, 3), positions=True, axes=3, learned=True, by_head=True, spec=WITHIN),
            reference_frequencies_backward,
            differentiable=False,  # as above
        ),
        case("rotary_-learned-documents", sample((2,), learned=True, documents=True, spec=PARTIAL, layout="thd"), mutates=True),
        case("rotary_tangent", sample((3,), positions=True, learned=True, spec=PARTIAL), reference_tangent),
        case("rotary_tangent-documents", sample((2,), learned=True, documents=True, spec=PLAIN, layout="thd", transpose=True), reference_tangent),
        case("rotary_frequencies_backward", sample((2, 2), positions=True, spec=PARTIAL, layout="bhsd"), reference_frequencies_backward),
        case("rotary_frequencies_backward-sections", sample((2, 2), positions=True, axes=3, spec=SECTIONS, transpose=True), reference_frequencies_backward),
        case("rotary_frequencies_backward-documents", sample((3, 3), documents=True, spec=PLAIN, layout="thd", offset=3), reference_frequencies_backward),
        case("rotary_out", sample((3, 3), positions=True, spec=PARTIAL, layout="bhsd"), mutates=True),
        case("rotary_pair_out", sample((4, 2, 4, 2), spec=PLAIN, layout="thd"), mutates=True),
        case("rotary-xpos", sample((3,), positions=True, spec=XPOS)),
        case("rotary_pair-xpos", sample((4, 2), spec=XPOS, layout="bhsd", inverse=True, window_only=True)),
        case("rotary-float32", sample((3,), positions=True, spec=FLOAT32), float32_program("rotary"), dtypes=WIDE),
        case("rotary_pair-float32_product", sample((2, 2), spec=STEPS, layout="sbhd", offset=3, window_only=True), float32_program("rotary_pair"), dtypes=WIDE),
        case("rotary-float32-documents", sample((2,), documents=True, spec=FLOAT32, layout="thd", offset=7), float32_program("rotary"), dtypes=WIDE),
        case(
            "rotary_permute_weight",
            weight_sample,
            reference_permute,
            differentiable=False,  # weights are converted once, outside training
        ),
        case("rotary_pair-xpos-learned", sample((2, 1), learned=True, spec=XPOS)),
        packed_case("rotary_packed_pair", order="blocks", positions=True, spec=PARTIAL),
        packed_case("rotary_packed_pair-groups", positions=True, spec=PLAIN, layout="bhsd"),
        packed_case("rotary_packed_pair-neox", 3, 3, offset=5, spec=XPOS, layout="sbhd"),
        packed_case("rotary_packed_pair-documents", documents=True, spec=PLAIN, layout="thd"),
        packed_case("rotary_packed_pair-sections", positions=True, axes=3, spec=SECTIONS),
        packed_case("rotary_packed_pair-learned", learned=True, spec=PARTIAL),
        packed_case("rotary_packed_-groups", positions=True, spec=PARTIAL),
        packed_case("rotary_packed_-blocks", 3, 1, "blocks", spec=XPOS, layout="bhsd", inverse=True),
        packed_case("rotary_packed_backward", positions=True, spec=PARTIAL),
        packed_case("rotary_packed_backward-sections-thd", positions=True, axes=3, spec=SECTIONS, layout="thd"),
        packed_case("rotary_packed_backward-blocks", 3, 1, "blocks", spec=XPOS, layout="bhsd"),
    ],
    "out",
    "query_out",
    "key_out",
    "gradient",
    "rotated",
    "weight",
    "num_heads",
    "qkv",
    "query",
    "key",
    "value",
    "positions",
    "frequencies",
    "cu_seqlens",
)  # fmt: skip
