"""Tests of programs in which PyTorch's own operators replace posembed's."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from posembed._decompositions import decompositions, replacements
from support.case import TOLERANCE, OperatorCase, as_tuple, assert_close
from support.families import cases
from support.modules import MODULES, Row, heads, vectors
from support.refusals import refused
from torch import Tensor, nn

TABLE = decompositions()
CASES = [
    case for case in cases() if case.operator in TABLE and case.operator._opname in replacements()
]
WITH_DROPOUT = {"input_embedding-bert", "input_embedding-plain-norm-dropout"}
# Not in a program for inference, or not functions of tensors alone.
OTHERS = {
    "file_rows": "reads a file",
    "mapped": "a view of memory",
    "input_dropout": "draws a mask",
    "rotary_tangent": "a derivative",
    "token_bag_max": "the maximum with its places, for the gradient",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case: OperatorCase, device: torch.device) -> None:
    for dtype in case.dtypes:
        torch.manual_seed(0)
        sample = case.sample(2, 3, device, dtype)
        function = TABLE[case.operator]
        if case.name in WITH_DROPOUT:
            refused((lambda: function(*sample.args, **sample.kwargs), ValueError, "decompose: expected dropout 0"))  # fmt: skip
            continue
        # Float32 angles of float64 data: the program's frequencies have other last bits.
        exact = dtype == torch.float64 and '"numerics"' not in str(sample)
        tolerance = 1e-12 if exact else max(4 * TOLERANCE[dtype], 1e-5)
        results = as_tuple(function(*sample.args, **sample.kwargs))
        dtypes = [result.dtype for result in case(sample)]
        for result, wanted, own in zip(results, case.expected(sample), dtypes, strict=True):
            assert result.dtype == own
            assert_close(result, wanted, tolerance)


def test_every_operator_of_inference_is_replaced() -> None:
    missing = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
        gives = any("Tensor" in str(argument.type) for argument in schema.returns)
        if namespace == "posembed" and takes and gives and not schema.is_mutable:
            missing |= set() if getattr(torch.ops.posembed, name).default in TABLE else {name}
    inner = {name for name in missing if "backward" in name or name.endswith("_forward")}
    assert missing - inner == set(OTHERS)


class Call(nn.Module):
    """A module whose forward is a function of another one and of tensors."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.function(self.module, *given)


def far(*size: int) -> Tensor:
    return torch.randint(0, 1_000_000, size)


YARN = pe.YarnScaling(4.0, original_max_positions=128)
PARTIAL = pe.RotarySpec(64, rotary_dim=32, interleaved=True, scaling=YARN)
SECTIONS = pe.RotarySpec(8, sections=pe.Sections((1, 2, 1)))
# Those of support/modules.py that differ in a program for inference, and other calls.
ALIKE = ("token-rows", "token-max-norm", "rotary", "input-roberta", "rotary-yarn")
PROGRAMS: dict[str, Row] = {
    **{name: row for name, row in MODULES.items() if name not in ALIKE},
    "sinusoidal-far": Row(lambda: pe.SinusoidalPositionalEmbedding(8), lambda b, s: (*vectors(b, s), far(b, s))),
    "rotary-far": Row(lambda: pe.RotaryEmbedding(8), lambda b, s: (*heads(b, s), far(b, s))),
    "rotary-yarn": Row(lambda: pe.RotaryEmbedding(PARTIAL), lambda b, s: (torch.randn(b, s, 4, 64), None, far(b, s))),
    "rotary-sections": Row(lambda: pe.RotaryEmbedding(SECTIONS), lambda b, s: (*heads(b, s), far(3, b, s))),
    "rotary-half": Row(lambda: pe.RotaryEmbedding(8), lambda b, s: tuple(x.half() for x in heads(b, s))),
    "norm_rotary": Row(lambda: Call(pe.RotaryEmbedding(8), lambda rope, q, k: pe.functional.norm_rotary(q, k, torch.ones(8), torch.ones(8), spec=rope.spec)), heads),
    "rotary_tables": Row(
        lambda: Call(
            nn.Identity(), lambda _, q, k, cos, sin: pe.functional.rotary_tables(q, k, cos, sin)
        ),
        lambda b, s: (
            *(torch.randn(b, h, s, 8) for h in (4, 2)),
            *(torch.randn(b, s, 4).repeat(1, 1, 2) for _ in range(2)),
        ),
    ),
    "alibi-mask": Row(
        lambda: Call(pe.ALiBi(4), lambda alibi, x, m: alibi.softmax(x, attention_mask=m)),
        lambda b, s: (torch.randn(b, 4, s, s), torch.ones(b, s, dtype=torch.int64)),
    ),
    "alibi-offsets": Row(lambda: Call(pe.ALiBi(4), lambda alibi, x, o: alibi.softmax(x, query_offset=o)), lambda b, s: (torch.randn(b, 4, s, s), torch.arange(b))),
    "alibi-placed-mask": Row(
        lambda: Call(
            pe.ALiBi(4),
            lambda alibi, x, m, k: alibi.softmax(x, attention_mask=m, key_positions=k),
        ),
        lambda b, s: (torch.randn(b, 4, s, s), torch.arange(s).expand(b, s) % 3, far(b, s) % 9),
    ),
}  # fmt: skip
modules = pytest.mark.parametrize("name", PROGRAMS)


@functools.cache
def exported(name: str) -> tuple[nn.Module, tuple[Tensor, ...], torch.export.ExportedProgram]:
    """A module, its arguments of other sizes, and its decomposed program."""
    make, inputs = PROGRAMS[name]
    torch.manual_seed(0)
    module, given, others = make(), inputs(3, 7), inputs(5, 11)
    dynamic = tuple(
        {d: torch.export.Dim.AUTO for d in range(x.dim()) if x.shape[d] != other.shape[d]}
        if isinstance(x, Tensor)
        else None
        for x, other in zip(given, others, strict=True)
    )
    shapes = (dynamic,) if isinstance(module, Call) else dynamic
    program = torch.export.export(module.eval(), given, dynamic_shapes=shapes)
    return module, others, pe.decompose(program)


def tolerance_of(results: tuple[Tensor, ...]) -> float:
    return 2e-3 if results[0].dtype == torch.float16 else 4e-6


@modules
def test_programs_have_pytorchs_operators_alone(name: str) -> None:
    module, given, program = exported(name)
    assert not any("posembed" in str(node.target) for node in program.graph.nodes)
    expected = as_tuple(module(*given))
    for result, wanted in zip(as_tuple(program.module()(*given)), expected, strict=True):
        assert_close(result, wanted, tolerance_of(expected))


@modules
def test_onnx_runtime(name: str) -> None:
    """Runs with another batch and length than those of the export."""
    if name == "quantized":
        pytest.skip("ONNX Runtime refuses to stack unpacked codes of 4 bits")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module, given, program = exported(name)
    file = io.BytesIO()
    torch.onnx.export(program, dynamo=True, verbose=False).save(file)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    tensors = [x for x in given if isinstance(x, Tensor)]
    feed = {each: x.numpy() for each, x in zip(names, tensors, strict=True)}
    expected = as_tuple(module(*given))
    for result, wanted in zip(session.run(None, feed), expected, strict=True):
        assert_close(torch.from_numpy(result), wanted, tolerance_of(expected))


@pytest.mark.parametrize("frequencies", [(0.0, 1.0, 0.5, 0.0), (0.0,) * 4, (1.0, 1.0, 3.0, 1e-9)])
def test_any_frequencies(frequencies: tuple[float, ...]) -> None:
    """Also zeros, and those that are no geometric series."""
    rope = pe.RotaryEmbedding(pe.RotarySpec(8, custom_frequencies=frequencies))
    query = torch.randn(1, 5, 2, 8)
    program = pe.decompose(torch.export.export(rope, (query,)))
    assert_close(program.module()(query), rope(query), 1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    "given",
    [
        (torch.tensor([3, 1]), torch.tensor([], dtype=torch.int64)),
        (torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])),
        (torch.zeros(2, 0, dtype=torch.int64),),
        (torch.zeros(0, 3, dtype=torch.int64),),
    ],
    ids=["no bags", "no ids", "empty bags", "no rows"],
)
def test_bags_without_tokens(mode: str, given: tuple[Tensor, ...]) -> None:
    bag = pe.TokenBag(50, 16, mode=mode)
    program = pe.decompose(torch.export.export(bag, given))
    expected = torch.zeros(len(given[-1]), 16)  # as torch.nn's, which ends the process for maxima
    assert torch.equal(program.module()(*given), expected)
    assert torch.equal(bag(*given), expected)


def test_encodings_of_integers_are_float32() -> None:
    """As the operator's are, whatever torch's default dtype."""
    encode = torch.ops.posembed.sinusoidal_encode.default
    torch.set_default_dtype(torch.float64)
    try:
        found = TABLE[encode](torch.arange(3), '{"embedding_dim":6}')
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == encode(torch.arange(3), '{"embedding_dim":6}').dtype == torch.float32


def test_operators_that_write_are_refused() -> None:
    rope = pe.RotaryEmbedding(64)

    def write(rope: pe.RotaryEmbedding, cache: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        other = cache.clone()
        pe.functional.rotary_cache_(x, x, x, cache, other, slots, spec=rope.spec, layout="thd")
        return x

    given = (torch.zeros(2, 4, 2, 64), torch.randn(3, 2, 64), torch.arange(3))
    program = torch.export.export(Call(rope, write), given)
    refused((lambda: pe.decompose(program), ValueError, "decompose: expected .* got .*posembed.rotary_cache_"))  # fmt: skip
