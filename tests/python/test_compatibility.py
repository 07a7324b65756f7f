"""Tests of all modules in what PyTorch does with modules: copies, packages, workers, autotuning.

``python tests/python/test_compatibility.py`` saves the modules that have not been saved yet, for
tests of later versions.
"""

import copy
import importlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from support.refusals import refused
from torch import Tensor, nn
from torch.package import PackageExporter, PackageImporter
from torch.utils.data import DataLoader, Dataset

IDS = torch.tensor([[1, 5, 3], [7, 0, 2]])
VECTORS = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
HEADS = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1))
AXES = torch.tensor([[0, 0, 1], [0, 1, 0]])
NGRAMS = pe.NgramSpec((3, 5), ((11, 13),), boundary=2)
SHARED = Path(__file__).parents[1] / "shared"
STORED = "table.safetensors"  # [9, 8], beside the modules


def quantized() -> nn.Module:
    token = pe.TokenEmbedding(9, 8, scale=2.0)
    token.quantize("int8", block=4)  # torch cannot pickle float8 but by torch.save
    return token


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "token": (lambda: pe.TokenEmbedding(9, 8, padding_idx=0, scale=2.0), (IDS,)),
    "bag": (lambda: pe.TokenBag(9, 8, padding_idx=0), (IDS,)),
    "learned": (lambda: pe.LearnedPositionalEmbedding(9, 8), (VECTORS,)),
    "sinusoidal": (lambda: pe.SinusoidalPositionalEmbedding(8), (VECTORS,)),
    "rotary": (lambda: pe.RotaryEmbedding(8, scaling=pe.LinearScaling(2.0)), (HEADS,)),
    "rotary-dynamic": (lambda: pe.RotaryEmbedding(8, scaling=pe.DynamicNtkScaling(2.0, 2)).resolve(3), (HEADS,)),
    "rotary-learned": (lambda: pe.RotaryEmbedding(8, learned_frequencies=True), (HEADS,)),
    "alibi": (lambda: pe.ALiBi(4), (3,)),
    "alibi-learned": (lambda: pe.ALiBi(4, learned=True), (3,)),
    "relative-bias": (lambda: pe.RelativePositionBias(4), (3,)),
    "relative-logits": (lambda: pe.RelativeLogits(5, 8), (HEADS,)),
    "input": (lambda: pe.InputEmbedding(9, 8, max_positions=5, norm="layer"), (IDS,)),
    "rotary-window": (lambda: pe.RotaryEmbedding(8, rotary_dim=4, rotary_start=2), (HEADS,)),
    "relative-window": (lambda: pe.RelativePositionBias(4, window=(1, 3)), ()),
    "learned-grid": (lambda: pe.LearnedPositionalEmbedding(embedding_dim=8, grid=(1, 3)), (VECTORS,)),
    "sinusoidal-grid": (lambda: pe.SinusoidalPositionalEmbedding(8, preset="mae"), (VECTORS, AXES)),
    "ngrams": (lambda: pe.NgramEmbedding(NGRAMS, 8), (IDS,)),
    "ngrams-summed": (lambda: pe.NgramEmbedding(pe.NgramSpec.blt(2, (2, 3), 7), 8, summed=True), (IDS,)),
    "per-layer": (lambda: pe.PerLayerEmbedding(9, 2, 4, scale="sqrt_dim"), (IDS,)),
    "quantized": (lambda: pe.QuantizedTable.quantize(torch.randn(9, 8), "int4", 4), (IDS,)),
    "token-quantized": (quantized, (IDS,)),
    "file-table": (lambda: pe.FileTable(STORED), (IDS,)),
    "token-file": (lambda: pe.TokenEmbedding.from_file(STORED, keep="file"), (IDS,)),
    "per-layer-file": (lambda: pe.PerLayerEmbedding.from_file(STORED, num_layers=2, keep="file"), (IDS,)),
}  # fmt: skip


PATHS_OF_0_1 = (
    "alibi.ALiBi", "bag.TokenBag", "conversion.permute_rotary_weight", "file_table.FileTable", "fourier.FourierFeatures",
    "input.InputEmbedding", "learned.LearnedPositionalEmbedding", "ngram.NgramSpec", "quantized.QuantizedTable",
    "relative_bias.RelativePositionBias", "relative_logits.RelativeLogits", "rotary.RotaryEmbedding",
    "scaling.LinearScaling", "score_scale.ScoreScale", "sinusoidal.SinusoidalPositionalEmbedding",
    "specification.RotarySpec", "specification.Sections", "token.TokenEmbedding",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS_OF_0_1)
def test_paths_of_earlier_versions_import(path: str) -> None:
    module, name = path.split(".")
    assert getattr(importlib.import_module(f"posembed.{module}"), name) is getattr(pe, name)


@pytest.fixture
def _beside_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SHARED)


beside_the_table = pytest.mark.usefixtures("_beside_the_table")


def used(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A module after a step of training, and its arguments."""
    make, arguments = MODULES[name]
    module = make()
    result = module(*arguments)
    if result.requires_grad:
        result.sum().backward()
    return module, arguments


def of_version(version: str) -> Path:
    """Pickled modules, checkpoints and results that a version has saved."""
    return SHARED / f"modules-{version}.pt"


def save_modules() -> None:
    """Saves those of this version that its file lacks."""
    os.chdir(SHARED)
    file = of_version(pe.__version__)
    saved = torch.load(file, weights_only=False) if file.exists() else {}
    for name in MODULES.keys() - saved.keys():
        module, arguments = used(name)
        result = module(*arguments).detach()
        # torch.save refuses memory that module and state share in different types, as codes are.
        state = copy.deepcopy(module.state_dict())
        saved[name] = {"module": module, "state": state, "result": result}
    torch.save(saved, file)


@beside_the_table
def test_this_version_has_saved_its_modules() -> None:
    saved = torch.load(of_version(pe.__version__), weights_only=False)
    assert saved.keys() == MODULES.keys()


@beside_the_table
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("file", sorted(SHARED.glob("modules-*.pt")), ids=lambda file: file.stem)
def test_modules_and_checkpoints_of_other_versions(file: Path, name: str) -> None:
    """They load, and give the results that they gave, but for bits of torch's products and draws that processors change."""
    saved = torch.load(file, weights_only=False).get(name)
    if saved is None:
        pytest.skip("the version did not have it")
    make, arguments = MODULES[name]
    other = make()
    other.load_state_dict(saved["state"])
    for module in (saved["module"], other):
        found = module(*arguments).detach()
        torch.testing.assert_close(found, saved["result"], rtol=0.0, atol=1e-6)
    assert repr(saved["module"]) == repr(other)


def test_a_package_does_not_contain_the_library() -> None:
    """It has a part in C++: the error says what to tell the exporter."""
    file = io.BytesIO()
    with PackageExporter(file) as exporter:
        exporter.extern(["torch.**", "numpy.**"])
        exporter.intern("posembed.**", exclude="posembed._C")
        exporter.mock("**")
        exporter.save_pickle("model", "model.pkl", pe.RotaryEmbedding(8))
    file.seek(0)
    refused((lambda: PackageImporter(file).load_pickle("model", "model.pkl"), ImportError, "torch.package: .*exporter.extern('posembed.**')"))  # fmt: skip


class Samples(Dataset[Tensor]):
    """Samples that a worker computes with a module."""

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.module, self.arguments = module, arguments

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return self.module(*self.arguments).detach() + index


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_after_use(start: str) -> None:
    """A process that has computed with many threads starts workers, which compute too."""
    table = pe.TokenEmbedding(1000, 256)
    ids = torch.arange(200_000) % 1000
    table(ids).sum().backward()
    module = nn.Sequential(pe.TokenEmbedding(9, 8), pe.SinusoidalPositionalEmbedding(8))
    expected = module(IDS).detach()
    samples = Samples(module, (IDS,))
    loader = DataLoader(samples, num_workers=2, multiprocessing_context=start, timeout=120)
    found = [batch[0] for batch in loader]
    assert len(found) == 4
    for index, each in enumerate(found):
        torch.testing.assert_close(each, expected + index)


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("rotary")])
def test_every_module_in_a_worker(name: str) -> None:
    module, arguments = used(name)
    loader = DataLoader(Samples(module, arguments), num_workers=1, timeout=120)
    found = list(loader)
    assert len(found) == 4
    for index, batch in enumerate(found):
        assert torch.equal(batch[0], module(*arguments).detach() + index)


class Model(nn.Module):
    """Every kernel of an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = pe.InputEmbedding(64, 32, max_positions=16, norm="rms")
        self.rope, self.alibi = pe.RotaryEmbedding(8), pe.ALiBi(4)
        self.project = nn.Linear(32, 96)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        query, key, value = self.project(x).unflatten(-1, (3, 4, 8)).unbind(2)
        query, key = self.rope(query, key)
        parts = (part.transpose(1, 2) for part in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(*parts, self.alibi(ids.shape[1]))
        return self.embed.token.logits(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.program
@pytest.mark.slow
def test_max_autotune() -> None:
    model, ids = Model(), torch.randint(64, (2, 8))
    parameters = list(model.parameters())
    compiled = torch.compile(model, mode="max-autotune", fullgraph=True)
    results = [each(ids) for each in (model, compiled)]
    gradients = [torch.autograd.grad(result.square().sum(), parameters) for result in results]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    save_modules()
