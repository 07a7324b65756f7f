"""PEFT and accelerate on top of patched models: adapters, offloading and training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.0")
accelerate = pytest.importorskip("accelerate", reason="accelerate is missing: make test-stacks")
peft = pytest.importorskip("peft", reason="peft is missing: make test-stacks")

from posembed.integrations.huggingface import _door, patch, unpatch  # noqa: E402
from support.transformers_small import ids, small_model  # noqa: E402

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt_neox": ["query_key_value"]}
LAYERS = 2
models = pytest.mark.parametrize("name", TARGETS)


def rotations(model: Any) -> int:
    """How often posembed rotates in a call of a model."""
    counters = [rotation.calls for found in _door._calls.values() for rotation, *_ in found.values()]
    before = sum(each.kernel for each in counters)
    logits(model)
    return sum(each.kernel for each in counters) - before


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(ids()).logits


def adapted(name: str, patched: str = "") -> Any:
    """A model with adapters of random weights, patched before or after it got them."""
    torch.manual_seed(3)
    model = small_model(name)
    if patched == "before":
        patch(model)
    config = peft.LoraConfig(r=4, target_modules=TARGETS[name], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).eval()
    if patched == "after":
        patch(model)
    return model


def step(model: Any) -> list[Tensor]:
    """The gradients of one step of training."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    model(input_ids=ids(), labels=ids()).loss.backward()
    gradients = [p.grad.clone() for p in parameters]
    torch.optim.SGD(parameters, 0.1).step()
    model.eval()
    return gradients


@models
@pytest.mark.parametrize("patched", ["before", "after"])
def test_adapters(name: str, patched: str) -> None:
    plain, model = adapted(name), adapted(name, patched)
    assert rotations(model) == LAYERS
    assert torch.equal(logits(model), logits(plain))
    gradients = step(model)
    assert len(gradients) == 2 * LAYERS * len(TARGETS[name])
    torch.testing.assert_close(gradients, step(plain), rtol=1e-4, atol=1e-6)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(small_model(name)))
    merged = model.merge_and_unload()
    assert rotations(merged) == LAYERS
    torch.testing.assert_close(logits(merged), logits(plain.merge_and_unload()), rtol=1e-4, atol=1e-6)
    for each in (model, merged):  # what was patched, before or after it got adapters
        unpatch(each)
    assert rotations(merged) == 0


@models
def test_adapters_in_a_file(name: str, tmp_path: Path) -> None:
    model = adapted(name, "before")
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(small_model(name), tmp_path).eval()
    assert rotations(loaded) == LAYERS  # models of a family share the patch
    assert torch.equal(logits(loaded), logits(model))
    unpatch(model.base_model.model)
    assert rotations(loaded) == 0
    assert torch.equal(logits(loaded), logits(model))


@models
def test_prepared_for_training(name: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    plain, model = small_model(name), small_model(name)
    patch(model)
    prepared = accelerator.prepare(model)
    accelerator.backward(prepared(input_ids=ids(), labels=ids()).loss)
    plain(input_ids=ids(), labels=ids()).loss.backward()
    for found, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert rotations(accelerator.unwrap_model(prepared)) == LAYERS


def to_disk(model: Any, folder: Path) -> None:
    accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


def to_cpu(model: Any, folder: Path) -> None:
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def dispatch(model: Any, folder: Path) -> None:
    accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


@models
@pytest.mark.parametrize("patched", ["before", "after"])
@pytest.mark.parametrize("place", [to_disk, to_cpu, dispatch])
def test_weights_elsewhere(name: str, patched: str, place: Callable[[Any, Path], None], tmp_path: Path) -> None:
    model = small_model(name)
    expected = logits(model)
    if patched == "before":
        patch(model)
    place(model, tmp_path)
    assert any(hasattr(module, "_hf_hook") for module in model.modules())
    if patched == "after":
        patch(model)
    assert rotations(model) == LAYERS
    assert torch.equal(logits(model), expected)
    unpatch(model)
    assert rotations(model) == 0
    assert torch.equal(logits(model), expected)
