"""Tests of programs in which PyTorch's own operators replace posembed's."""

import functools
import io
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.glue.decompositions import decompositions, replacements
from posembed.glue.decompositions.shared import TARGET, exact_cosines_and_sines
from support.case import TOLERANCE, OperatorCase, as_tuple, assert_close
from support.families import cases
from support.modules import MODULES, Row, heads, vectors
from support.refusals import refused
from torch import Tensor, nn

TABLE = decompositions()
CASES = [case for case in cases() if case.operator in TABLE and case.operator._opname in replacements()]
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


@pytest.mark.parametrize("case", [case for case in CASES if "rotary" in case.name], ids=lambda case: case.name)
def test_rotations_of_onnx(case: OperatorCase, device: torch.device) -> None:
    """Layouts, windows, axes and rows of each head, around ONNX's own rotation."""
    torch.manual_seed(0)
    sample = case.sample(2, 3, device, torch.float32)
    before = TARGET.set("onnx")
    try:
        results = as_tuple(TABLE[case.operator](*sample.args, **sample.kwargs))
    finally:
        TARGET.reset(before)
    for result, wanted in zip(results, case.expected(sample), strict=True):
        assert_close(result, wanted, 1e-5)


@pytest.mark.parametrize("target", [None, "onnx"])
@pytest.mark.parametrize("pairs", [1, 64, 1024])
def test_angles_without_float64(pairs: int, target: str | None) -> None:
    """Digits of positions have no maximum and lose nothing, however many digits there are."""
    turns = 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs) / (2 * math.pi)
    places = torch.cat([torch.randint(0, 2**24, (61,)), torch.tensor([0, 2**24, 2**31 - 1, -7])])
    before = TARGET.set(target)
    try:
        found = exact_cosines_and_sines(places, turns, torch.float32, True)
        halves = exact_cosines_and_sines(torch.tensor([-2.25, 70.5]), turns, torch.float32, True)
    finally:
        TARGET.reset(before)
    for positions, results in ((places, found), (torch.tensor([-2.25, 70.5]), halves)):
        angles = positions.double().unsqueeze(-1) * turns * (2 * math.pi)
        for result, wanted in zip(results, (angles.cos(), angles.sin()), strict=True):
            assert result.dtype == torch.float32
            far = positions.abs() > 2**24  # where float64 angles are off by 5e-7 themselves
            assert (result - wanted).abs()[~far].max() <= 5e-7
            assert (result - wanted).abs().max() <= 2e-6


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
ALIKE = ("token-rows", "token-max-norm", "rotary", "rotary-yarn")
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
    "alibi-mask": Row(lambda: Call(pe.ALiBi(4), lambda alibi, x, m: alibi.softmax(x, attention_mask=m)), lambda b, s: (torch.randn(b, 4, s, s), torch.ones(b, s, dtype=torch.int64))),
    "sinusoidal-before": Row(lambda: Call(pe.SinusoidalPositionalEmbedding(8), lambda m, x: m(x, offset=-3)), lambda b, s: (torch.randn(b, s, 8),)),
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
def exported(name: str, target: str | None) -> tuple[nn.Module, tuple[Tensor, ...], torch.export.ExportedProgram]:
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
    return module, others, pe.decompose(program, target=target)


def tolerance_of(results: tuple[Tensor, ...]) -> float:
    return 2e-3 if results[0].dtype == torch.float16 else 4e-6


# Coordinates and learned frequencies; positions and slopes that the operators compute in float64.
WITH_FLOAT64 = {"fourier", "fourier-random", "fourier-time2vec", "rotary-learned"}
WITH_FLOAT64 |= {"alibi-attention", "relative-logits", "sinusoidal-grid", "sinusoidal-mask"}


@modules
def test_programs_have_pytorchs_operators_alone(name: str) -> None:
    module, given, program = exported(name, None)
    assert not any("posembed" in str(node.target) for node in program.graph.nodes)
    steps = [node.meta.get("val") for node in program.graph.nodes if node.op == "call_function"]
    dtypes = {value.dtype for value in steps if isinstance(value, Tensor)}
    assert (torch.float64 in dtypes) == (name in WITH_FLOAT64)
    expected = as_tuple(module(*given))
    for result, wanted in zip(as_tuple(program.module()(*given)), expected, strict=True):
        assert_close(result, wanted, tolerance_of(expected))


ROTATED = [name for name in PROGRAMS if "rotary" in name]
# By target: all programs, and some that together have every step of all; `make reliability` converts all.
EVERY = {None: list(PROGRAMS), "onnx": ROTATED}
COVERING = {
    None: (
        *("alibi-attention", "bag", "bag-offsets", "fourier-time2vec", "input", "input-roberta", "input-sinusoidal"),
        *("learned-antialias", "learned-grid", "ngram", "quantized", "relative-bias", "relative-logits"),
        *("relative-window", "rotary-half", "rotary-sections", "rotary-xpos", "sinusoidal-grid", "sinusoidal-mask"),
        "sinusoidal-sequence-first",
    ),
    "onnx": (
        *("norm_rotary", "rotary-half", "rotary-learned", "rotary-sections", "rotary-xpos", "rotary-yarn"),
        "rotary_tables",
    ),
}
CONVERTED = EVERY if os.environ.get("POSEMBED_LONG") == "1" else COVERING


def steps(names: Sequence[str], target: str | None) -> set[tuple[str, str]]:
    """The operators of programs, and the dtypes of their results."""
    nodes = [node for name in names for node in exported(name, target)[2].graph.nodes if node.op == "call_function"]
    return {(str(node.target), str(getattr(node.meta.get("val"), "dtype", ""))) for node in nodes}


@pytest.mark.parametrize("target", COVERING)
def test_programs_for_onnx_have_every_step(target: str | None) -> None:
    assert steps(EVERY[target], target) == steps(COVERING[target], target)


@pytest.mark.program
@pytest.mark.parametrize(("name", "opset"), [(n, 23 if to else 20) for to, names in CONVERTED.items() for n in names])
def test_onnx_runtime(name: str, opset: int) -> None:
    """Runs with another batch and length than those of the export."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module, given, program = exported(name, "onnx" if opset == 23 else None)
    file = io.BytesIO()
    torch.onnx.export(program, dynamo=True, verbose=False, opset_version=opset).save(file)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    tensors = [x for x in given if isinstance(x, Tensor)]
    feed = {each: x.numpy() for each, x in zip(names, tensors, strict=True)}
    expected = as_tuple(module(*given))
    for result, wanted in zip(session.run(None, feed), expected, strict=True):
        assert_close(torch.from_numpy(result), wanted, tolerance_of(expected))


def test_onnx_runtime_takes_more_tokens_than_a_table_has_rows() -> None:
    runtime = pytest.importorskip("onnxruntime")
    rope, x, sizes = pe.RotaryEmbedding(8), torch.randn(2, 7, 1, 8), {1: torch.export.Dim.AUTO}
    program = torch.export.export(rope, (x,), dynamic_shapes=(sizes,))
    file = io.BytesIO()
    decomposed = pe.decompose(program, target="onnx")
    torch.onnx.export(decomposed, dynamo=True, verbose=False, opset_version=23).save(file)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    x = torch.randn(2, 2100, 1, 8)
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_close(torch.from_numpy(result), rope(x), 4e-6)


def test_onnx_runtime_runs_patched_models() -> None:
    for needed in ("onnxscript", "transformers"):
        pytest.importorskip(needed)
    runtime = pytest.importorskip("onnxruntime")
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 20}
    model = LlamaModel(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    ids = torch.arange(9).view(1, 9)
    with torch.no_grad():
        expected = model(ids, use_cache=False)[0]
        pe.patch(model)
        program = torch.export.export(model, (ids,), {"use_cache": False, "return_dict": False})
        pe.unpatch(model)
    assert any("posembed" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    plain = pe.decompose(program, target="onnx")
    torch.onnx.export(plain, dynamo=True, verbose=False, opset_version=23).save(file)
    session = runtime.InferenceSession(file.getvalue())
    (found,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
    assert_close(torch.from_numpy(found), expected, 1e-6)


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


class Twice(nn.Module):
    """Two layers' rotations, and a cache that the program writes."""

    def __init__(self) -> None:
        super().__init__()
        self.ropes = nn.ModuleList([pe.RotaryEmbedding(64), pe.RotaryEmbedding(64)])
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        for rope in self.ropes:
            x = rope(x)
        return x * (self.count * 2)


@pytest.mark.parametrize("target", [None, "onnx"])
def test_layers_share_constants_and_steps(target: str | None) -> None:
    """And what a program writes is no constant."""
    module, x = Twice(), torch.randn(3, 7, 2, 64)
    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    program = pe.decompose(torch.export.export(module, (x,), dynamic_shapes=(sizes,)), target=target)
    kept = {name: value for name, value in program.constants.items() if value.numel() > 1}
    assert len(kept) == (5 if target else 6)
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("aten.embedding.default") == (1 if target else 6)
    assert names.count("onnx.RotaryEmbedding.opset23") == (4 if target else 0)
    own, run, other = Twice(), program.module(), torch.randn(5, 11, 2, 64)
    for _ in range(2):
        assert_close(run(other), own(other), 4e-6)


def test_unknown_targets_are_refused() -> None:
    program = torch.export.export(pe.RotaryEmbedding(8), (torch.randn(1, 5, 2, 8),))
    refused((lambda: pe.decompose(program, target="tflite"), ValueError, "target: .*'tflite'"))


def test_operators_that_write_are_refused() -> None:
    rope = pe.RotaryEmbedding(64)

    def write(rope: pe.RotaryEmbedding, cache: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        other = cache.clone()
        pe.functional.rotary_cache_(x, x, x, cache, other, slots, spec=rope.spec, layout="thd")
        return x

    given = (torch.zeros(2, 4, 2, 64), torch.randn(3, 2, 64), torch.arange(3))
    program = torch.export.export(Call(rope, write), given)
    refused((lambda: pe.decompose(program), ValueError, "decompose: expected .* got .*posembed.rotary_cache_"))  # fmt: skip
