"""Tests of all modules in what PyTorch does with modules. Add a row to support/modules.py."""

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import posembed as pe
import pytest
import torch
import torch._dynamo.testing
from support.case import as_tuple, assert_close, same_for_any_thread_count
from support.modules import MODULES, cells, made
from torch import Tensor, nn
from torch.package import PackageExporter, PackageImporter

every = pytest.mark.parametrize("name", MODULES)


def results(module: nn.Module, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(3)  # of dropout
    return as_tuple(module(*given))


def gradients(module: nn.Module, given: tuple[Any, ...]) -> list[Tensor]:
    found = results(module, given)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return list(found)
    loss = sum(x.square().sum() for x in found)
    found_gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return [*found, *(g.to_dense() for g in found_gradients)]


def assert_same(found: Any, expected: Any) -> None:
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)


def test_every_module_has_a_row() -> None:
    """FileTable needs a file: token/test_file_table.py."""
    kinds = {type(part) for row in MODULES.values() for part in row.make().modules()}
    names = [name for name in pe.cpp.__all__ if getattr(pe, name) not in kinds]
    assert names == ["FileTable"]


@pytest.mark.no_stand_in
@every
def test_compiles_for_every_length(name: str) -> None:
    """One graph without breaks, with the gradients of eager mode."""
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module, _ = made(name)
    compiled = torch.compile(module, backend=graphs, fullgraph=True, dynamic=True)
    at_first = 0
    for batch, seq in ((11, 13), (17, 19), (13, 37)):
        given = MODULES[name].inputs(batch, seq)
        for found, wanted in zip(gradients(compiled, given), gradients(module, given), strict=True):
            assert_close(found, wanted, 1e-5)
        # The first call may compile twice: dynamic=True tries a float option as a variable first.
        at_first = at_first or graphs.frame_count
    assert graphs.frame_count == at_first


def packaged(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    with PackageExporter(file) as exporter:
        exporter.extern(["posembed.**", "torch.**", "support.**"])
        exporter.save_pickle("model", "model.pkl", module)
    file.seek(0)
    loaded: nn.Module = PackageImporter(file).load_pickle("model", "model.pkl")
    return loaded


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
    "torch.package": packaged,
}


def part_of(module: nn.Module) -> nn.Module:
    """The module itself: functions of a row cannot be pickled."""
    return getattr(module, "module", module)


def with_part(module: nn.Module, part: nn.Module) -> nn.Module:
    if part_of(module) is module:
        return part
    return type(module)(part, module.function)


@pytest.mark.parametrize("way", COPIES)
@every
def test_copies(name: str, way: str) -> None:
    """A copy has parameters of its own, and the results and the form of the original."""
    module, given = made(name)
    expected = gradients(module, given)  # a copy of a module that has been used
    other = with_part(module, COPIES[way](part_of(module)))
    assert type(part_of(other)) is type(part_of(module))
    assert repr(part_of(other)) == repr(part_of(module))
    assert_same(gradients(other, given), expected)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    assert_same(gradients(other, given), expected)


def changed(change: Callable[[pe.TokenEmbedding], Any], **options: Any) -> Callable[[], Tensor]:
    """A table's rows after a change."""

    def rows() -> Tensor:
        token = pe.TokenEmbedding.from_pretrained(torch.arange(40.0, device="cpu").view(10, 4), freeze=False, **options)
        change(token)
        return token(torch.arange(token.num_embeddings, device="cpu"))

    return rows


def clipped(token: pe.TokenEmbedding) -> None:
    token(torch.ones(3, dtype=torch.int64, device="cpu")).sum().backward()
    pe.optim.clip_grad_norm_(token.parameters(), 1.0)
    assert token.weight.grad.device.type == "cpu"


def with_sparse_state(token: pe.TokenEmbedding) -> None:
    optimizer = torch.optim.SGD(token.parameters(), lr=0.1, momentum=0.9)
    token(torch.ones(3, dtype=torch.int64, device="cpu")).sum().backward()
    optimizer.step()
    token.resize(12, optimizer=optimizer)
    assert optimizer.state[token.weight]["momentum_buffer"].device.type == "cpu"


def saved_ids() -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        pe.data.save_ids(f"{folder}/ids.bin", [IDS], torch.int32)
        return pe.data.open_ids(f"{folder}/ids.bin", torch.int32).clone()


NUMBERS, IDS = torch.tensor([[1.0, 2.0]]), torch.arange(5)
ON_THE_CPU: dict[str, Callable[[], Tensor]] = {
    "train_rows": changed(lambda token: token.train_rows([1, 7])),
    "freeze_rows": changed(lambda token: token.freeze_rows([1, 7])),
    "select": changed(lambda token: token.select([1, 7])),
    "resize": changed(lambda token: token.resize(12, optimizer=torch.optim.SGD(token.parameters(), lr=0.1))),
    "resize with sparse state": changed(with_sparse_state, gradient="rows"),
    "clip_grad_norm_": changed(clipped, gradient="rows"),
    "save_ids": saved_ids,
    "FourierFeatures": lambda: pe.FourierFeatures(NUMBERS, device="cpu")(torch.ones(1, 1, device="cpu")),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_tensors_on_the_cpu_stay_there(name: str) -> None:
    """Whatever the default device is: a GPU, or meta where a model is made without memory."""
    expected = ON_THE_CPU[name]()
    with torch.device("meta"):
        found = ON_THE_CPU[name]()
    assert torch.equal(found, expected)


@every
def test_state_comes_back_from_meta(name: str) -> None:
    """Without memory a module gives shapes; with memory and its state it is what it was."""
    module, given = made(name)
    expected = results(module, given)
    with torch.device("meta"):
        other = MODULES[name].make()
    if part_of(other) is not None and name != "quantized":
        on_meta = tuple(x.to("meta") for x in given)
        other.to("meta")
        for found, wanted in zip(results(other, on_meta), expected, strict=True):
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    other.to_empty(device="cpu").load_state_dict(module.state_dict())
    assert_same(results(other, given), expected)


@every
def test_starts_anew_after_meta(name: str) -> None:
    """reset_parameters of each module gives the values that a new module has."""
    module, given = made(name)
    other = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    if not list(module.buffers()):
        torch.manual_seed(0)
        for part in other.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        assert_same(other.state_dict().values(), module.state_dict().values())
        assert_same(results(other, given), results(module, given))


@every
def test_holds_nothing_that_can_rot(name: str) -> None:
    """A cast and its reverse change nothing in a module that does not learn."""
    module, given = made(name)
    if not list(module.parameters()) and name != "quantized":  # its results have another dtype
        expected = results(module, given)
        for changed in (copy.deepcopy(module).bfloat16(), copy.deepcopy(module).half().float()):
            assert_same(results(changed, given), expected)


@every
def test_same_bits_for_any_thread_count(name: str) -> None:
    module, given = made(name, 4, 40 if MODULES[name].inputs is cells else 600)
    same_for_any_thread_count(lambda: gradients(module, given))


@every
def test_autocast_leaves_tables_alone(name: str) -> None:
    """Kernels compute in float32 for all data; only matrix products are cast."""
    module, given = made(name)
    expected = results(module, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(module, given)
    if name in ("input-roberta", "alibi-attention", "relative-logits"):
        for ours, wanted in zip(found, expected, strict=True):
            assert_close(ours, wanted, 2.0**-6)
    else:
        assert_same(found, expected)
        assert [x.dtype for x in found] == [x.dtype for x in expected]


PLACES = torch.arange(12).view(2, 6)
CALLS: list[dict[str, Any]] = [
    {},
    {"offset": 3},
    {"offset": torch.tensor([3, 7])},
    {"positions": PLACES},
    {"positions": PLACES[0]},
]
SEQUENCE_FIRST: dict[str, tuple[Callable[..., nn.Module], list[dict[str, Any]]]] = {
    "learned": (partial(pe.LearnedPositionalEmbedding, 20, 8, first_row=2), CALLS),
    "learned-grid": (partial(pe.LearnedPositionalEmbedding, grid=(4, 4), prefix_tokens=1, embedding_dim=8), [{"grid": (1, 5)}]),
    "sinusoidal": (partial(pe.SinusoidalPositionalEmbedding, 8, learned_scale=True), [*CALLS, {"positions": PLACES[:1]}]),
    "sinusoidal-grid": (partial(pe.SinusoidalPositionalEmbedding, 8, preset="detr"), [{"grid": (2, 3)}, {"grid": (2, 3), "mask": PLACES.view(2, 2, 3) < 9}]),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCE_FIRST)
def test_the_sequence_first(name: str, device: torch.device) -> None:
    """X [seq, batch, dim], the default of torch.nn.Transformer."""
    make, calls = SEQUENCE_FIRST[name]
    usual, first = make().to(device), make(layout="sbd").to(device)
    first.load_state_dict(usual.state_dict())
    assert repr(first).endswith("layout='sbd')")
    x, weight = torch.randn(2, 6, 2, 8, device=device)
    for call in calls:
        call = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}
        found, wanted = first(x, **call), usual(x.transpose(0, 1), **call).transpose(0, 1)
        assert torch.equal(found, wanted)
        assert found.is_contiguous()
        for parameter, other in zip(first.parameters(), usual.parameters(), strict=True):
            (gradient,) = torch.autograd.grad((found * weight).sum(), parameter)
            (expected,) = torch.autograd.grad((wanted * weight).sum(), other)
            assert_close(gradient, expected, 1e-5)
