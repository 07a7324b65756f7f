"""kernels puts posembed in place of the functions that transformers marks, with their bits."""

import importlib.metadata
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.20")

from posembed.integrations.huggingface import (  # noqa: E402
    RotaryPosEmb,
    _kernels,
    apply_rotary_pos_emb,
    patch,
    register_kernels,
    unpatch,
    unregister_kernels,
)
from support.transformers_small import ids, small_model  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

NAME = "rotary_pos_emb"
HUB = Path(__file__).parents[3] / "hub"
MADE: list[Any] = []  # modules of functions, which all models share

try:
    fits = bool(_kernels._kernels())
except ImportError as error:
    fits = False
    reason = str(error)
else:
    reason = ""
    import kernels
    from kernels.layer import repos
needs_kernels = pytest.mark.skipif(not fits, reason=reason)


def functions(model: Any) -> list[Any]:
    """Those that kernels has put on a model's modules, each once."""
    found = {id(f): f for m in model.modules() for f in vars(m).get("_kernel_funcs", {}).values()}
    return [f for f in found.values() if type(f).kernel_layer_name == NAME]


def forget(function: Any) -> None:
    """The module has its own function again, and posembed does not know it."""
    vars(function).pop("forward", None)
    if hasattr(type(function), "_posembed"):
        del type(function)._posembed


def made(name: str) -> Any:
    model = small_model(name)
    MADE.extend(functions(model))
    assert not any(map(replaced, functions(model)))
    return model


def replaced(function: Any) -> bool:
    return getattr(function.forward, "__func__", None) is RotaryPosEmb.forward


def kernelize(model: Any, mode: Any = None) -> None:
    """With the kernels that are registered here, without those that transformers would load."""
    kernels.kernelize(model, mode=mode or kernels.Mode.INFERENCE, device="cpu")


@pytest.fixture
def registered() -> Iterator[None]:
    register_kernels()
    yield
    unregister_kernels()


@pytest.fixture(autouse=True)
def functions_stay() -> Iterator[None]:
    yield
    while MADE:
        forget(MADE.pop())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(ids()).logits


@pytest.mark.parametrize("installed", [None, "0.1.0", "99.0"])
def test_kernels_that_does_not_fit(installed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = importlib.metadata.version

    def version(name: str) -> str:
        if name != "kernels":
            return theirs(name)
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    for call in (register_kernels, unregister_kernels):
        with pytest.raises(ImportError) as caught:
            call()
        message = str(caught.value)
        needed = f">={import_utils.KERNELS_MIN_VERSION},<{import_utils.KERNELS_MAX_VERSION}"
        assert f"needs kernels {needed} for transformers {transformers.__version__}" in message
        assert (f"kernels {installed} is" if installed else "no kernels package is") in message
        assert f"pip install 'kernels{needed}'" in message
        assert "patch(model) needs no kernels package" in message


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("llama", "half-split"),
        ("qwen3", "half-split"),
        ("gemma3", "half-split"),
        ("nanochat", "half-split, backwards"),
        ("gpt_oss", "half-split, half tables"),
        ("modernbert", "half-split, float32"),
    ],
)
@pytest.mark.usefixtures("registered")
def test_logits(name: str, rule: str, dtype: torch.dtype) -> None:
    model = made(name).to(dtype)
    expected = logits(model)
    kernelize(model)
    assert torch.equal(logits(model), expected)
    (function,) = functions(model)
    assert replaced(function)
    assert str(type(function)._posembed.rule) == rule


@needs_kernels
@pytest.mark.usefixtures("registered")
def test_gradients() -> None:
    model = made("llama").train()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids()).logits.pow(2).mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    kernelize(model, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
    assert replaced(functions(model)[0])
    kernelize(model, kernels.Mode.TRAINING)
    assert replaced(functions(model)[0])
    for found, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "nanochat"])
@pytest.mark.usefixtures("registered")
def test_compiles_whole_at_the_first_call(name: str) -> None:
    model = made(name)
    expected = logits(model)
    kernelize(model, kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE)
    targets = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    assert torch.equal(logits(torch.compile(model, fullgraph=True, backend=backend)), expected)
    assert "posembed.rotary_tables_pair.default" in targets


@needs_kernels
@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        torch._subclasses.FakeTensorMode,
    ],
    ids=["inference", "autocast", "meta", "fake"],
)
@pytest.mark.usefixtures("registered")
def test_a_mode_of_the_first_call_does_not_reach_the_recognition(mode: Any) -> None:
    model = made("nanochat")
    kernelize(model)
    (function,) = functions(model)
    with mode():
        q, angles = torch.randn(1, 2, 5, 8), torch.rand(1, 5, 8)
        function(q, q, angles, angles)
    assert str(type(function)._posembed.rule) == "half-split, backwards"


@needs_kernels
@pytest.mark.usefixtures("registered")
def test_use_kernels_of_transformers(tmp_path: Path) -> None:
    model = made("llama")
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, use_kernels=True)
    assert replaced(functions(loaded)[0])
    assert torch.equal(logits(loaded), expected)
    unregister_kernels()
    loaded.set_use_kernels(True)
    assert not replaced(functions(loaded)[0])
    register_kernels()
    model.use_kernels = True
    assert replaced(functions(model)[0])


@needs_kernels
@pytest.mark.usefixtures("registered")
def test_a_function_that_is_not_recognised_stays() -> None:
    @kernels.use_kernel_forward_from_hub(NAME)
    def scale(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return q * cos.unsqueeze(unsqueeze_dim), k * sin.unsqueeze(unsqueeze_dim)

    @kernels.use_kernelized_func(scale)
    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return scale(*given)

    given = *torch.randn(2, 1, 2, 5, 8), *torch.randn(2, 1, 5, 8)
    model = Model()
    expected = model(*given)
    kernelize(model)
    assert replaced(scale)
    assert all(map(torch.equal, model(*given), expected))


@needs_kernels
@pytest.mark.usefixtures("registered")
def test_a_patched_model_is_recognised_by_its_own_code() -> None:
    model = made("nanochat")
    expected = logits(model)
    patch(model)
    kernelize(model)
    assert torch.equal(logits(model), expected)
    assert str(type(functions(model)[0])._posembed.rule) == "half-split, backwards"
    unpatch(model)
    assert torch.equal(logits(model), expected)


@needs_kernels
@pytest.mark.usefixtures("registered")
def test_functions_without_the_mark_stay() -> None:
    model = made("gpt_neox")
    expected = logits(model)
    kernelize(model)
    assert functions(model) == []
    assert torch.equal(logits(model), expected)
    assert patch(model).patched


@needs_kernels
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("built", [True, False], ids=["with CUDA", "without CUDA"])
def test_the_entry_of_transformers_for_gpus(built: bool, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is registered again for every model that is made with use_kernels=True."""
    from transformers.integrations.hub_kernels import register_kernel_mapping_transformers

    monkeypatch.setattr(repos, "_find_capability", lambda: 90)
    monkeypatch.setattr(_kernels, "KERNEL_DEVICES", {"cpu", "cuda"} if built else {"cpu"})
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        for step in (
            (register_kernels, register_kernel_mapping_transformers)
            if first
            else (register_kernel_mapping_transformers, register_kernels)
        ):
            step()
        entry = _kernels._mapping()[NAME]
        ours = {kernels.Mode.FALLBACK: _kernels.Repository()}
        assert entry["cpu"].repos == ours
        assert (entry["cuda"].repos == ours) is built
        unregister_kernels()
        register_kernel_mapping_transformers()
        entry = _kernels._mapping()[NAME]
        assert "cpu" not in entry
        assert ours != entry["cuda"].repos == {kernels.Mode.INFERENCE: hub_entry()}


def hub_entry() -> Any:
    from transformers.integrations.hub_kernels import get_kernel_mapping_transformers

    return get_kernel_mapping_transformers()[NAME]["cuda"][kernels.Mode.INFERENCE]


@needs_kernels
def test_what_was_registered_before_comes_back() -> None:
    class Other:
        def load(self) -> Any:
            raise FileNotFoundError

    with kernels.use_kernel_mapping({NAME: {"cpu": Other()}}, inherit_mapping=False):
        for _ in range(2):
            register_kernels()
        unregister_kernels()
        (found,) = _kernels._mapping()[NAME]["cpu"].repos.values()
        assert isinstance(found, Other)
        unregister_kernels()
        assert _kernels._mapping()[NAME]["cpu"].repos


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The folder ``hub`` as kernel-builder lays it out. kernels loads the variant of the torch."""
    kernels._rust.Build.open(HUB)  # raises for a wrong build.toml
    for backend in ("cpu", "cuda"):
        variant = tmp_path / "build" / f"torch-{backend}"
        shutil.copytree(HUB / "torch-ext" / "posembed_rotary", variant)
        metadata = {
            "name": "posembed-rotary",
            "id": f"_posembed_rotary_{backend}_test",
            "version": 0,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata))
    return tmp_path


@needs_kernels
def test_the_kernel_of_the_hub(repository: Path) -> None:
    layer = kernels.LocalLayerRepository(repository, layer_name="RotaryPosEmb")
    model = made("nanochat")
    expected = logits(model)
    with kernels.use_kernel_mapping({NAME: {"cpu": layer}}):
        kernelize(model)
    assert replaced(functions(model)[0])
    assert torch.equal(logits(model), expected)
    kernel = kernels.get_local_kernel(repository)
    assert kernel.apply_rotary_pos_emb is apply_rotary_pos_emb
