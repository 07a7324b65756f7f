"""posembed's modules in optimizers and training libraries; the libraries by make test-stacks."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from support.case import assert_close
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

IDS = torch.tensor([[1, 5, 3, 3], [7, 0, 2, 1]])
Optimizer = Callable[[Any], torch.optim.Optimizer]


class Model(nn.Module):
    """Input layer, rotary attention, tied head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = pe.InputEmbedding(9, 16, positions=None, norm="rms", **options)
        self.rope = pe.RotaryEmbedding(8)
        self.project = nn.Linear(16, 48)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        query, key, value = self.project(x).unflatten(-1, (3, 2, 8)).unbind(2)
        query, key = self.rope(query, key)
        parts = (part.transpose(1, 2) for part in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.embed.token.logits(x + mixed.transpose(1, 2).flatten(-2))

    def loss(self, ids: Tensor) -> Tensor:
        logits = self(ids)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def twin(model: nn.Module) -> nn.Module:
    """The same model with torch's own table and norm, which a hook lets the input layer call."""
    other = copy.deepcopy(model)
    table = model.embed.token
    other.embed.token = nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False)
    other.embed.norm.register_forward_hook(lambda *_: None)
    other.embed.token.logits = lambda hidden: nn.functional.linear(hidden, other.embed.token.weight)
    return other


def train(model: nn.Module, make: Optimizer, steps: int = 3) -> list[float]:
    optimizer, losses = make(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(IDS)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
        lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adafactor(p, 1e-2),
        lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], 1e-2),
    ],
    ids=["fused-adamw", "foreach-adamw", "sgd", "adafactor", "muon"],
)
def test_optimizers(make: Optimizer) -> None:
    """The losses of torch's table, with clipped gradients."""
    model = Model()
    other = twin(model)
    losses = train(model, make)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(train(other, make), rel=1e-4)


def test_sparse_adam_on_clipped_rows() -> None:
    """Torch clips no sparse gradients; the values of rows have the norm of the dense gradient."""
    table = pe.TokenEmbedding(9, 4, gradient="rows")
    other = nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False)
    sparse = torch.optim.SparseAdam(table.parameters(), 0.1)
    for _ in range(2):
        sparse.zero_grad()
        table(IDS).square().sum().backward()
        other.weight.grad = None
        other.weight.data.copy_(table.weight)
        other(IDS).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        values = table.weight.grad._values()
        assert torch.nn.utils.get_total_norm([values]).item() == pytest.approx(norm.item())
        values.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        assert_close(table.weight.grad.to_dense(), other.weight.grad, 1e-6)
        before = table.weight.detach().clone()
        sparse.step()
        used = torch.zeros(9, dtype=torch.bool).index_fill(0, IDS.flatten(), True)
        assert torch.equal((table.weight != before).any(1), used)


def test_moving_averages() -> None:
    model = Model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    before = model.embed.token.weight.detach().clone()
    average.update_parameters(model)  # the first copies
    train(model, lambda p: torch.optim.SGD(p, 0.1), 1)
    average.update_parameters(model)
    expected = (before + model.embed.token.weight) / 2
    assert_close(average.module.embed.token.weight, expected, 1e-6)
    assert average(IDS).shape == (2, 4, 9)


def test_tables_of_tensor_subclasses() -> None:
    """They have look-ups of their own, which quantised tables need."""
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    halves = [torch.randn(9, 4, requires_grad=True) for _ in range(2)]
    table = pe.TokenEmbedding(9, 4, scale=2.0)
    table.weight = nn.Parameter(two_tensor.TwoTensor(*halves))
    rows = table(IDS)
    assert isinstance(rows, two_tensor.TwoTensor)
    assert torch.equal(rows.a, 2 * halves[0][IDS])
    assert torch.equal(rows.b, 2 * halves[1][IDS])
    with pytest.raises(ValueError, match="vocabulary_start: expected none for a TwoTensor, got 3"):
        pe.functional.embedding(IDS, table.weight, vocabulary_start=3)


# --------------------------------------------------------------------------------------- libraries


def test_torchao_quantises_tables() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    table = pe.TokenEmbedding(64, 32, scale="sqrt_dim")
    ids, exact = torch.arange(64).view(2, 32), table(torch.arange(64).view(2, 32))
    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=quantization.PerAxis(0))
    model = nn.Sequential(table)
    quantization.quantize_(model, config, lambda module, _: isinstance(module, nn.Embedding))
    assert type(table.weight) not in (Tensor, nn.Parameter)
    error = (model(ids) - exact).abs().max()
    assert 0 < error <= exact.abs().max() / 127  # a step of the largest row


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_lora_of_a_table_merges(scale: float) -> None:
    """PEFT scales an adapter's rows as the table's, by its attribute embed_scale."""
    peft = pytest.importorskip("peft")
    model = Model(scale=scale)
    before = model(IDS)
    config = peft.LoraConfig(r=2, target_modules=["token"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    assert wrapped.base_model.model.embed.token.base_layer.scale == scale
    loss = wrapped.base_model.model.embed(IDS).square().sum()
    loss.backward()
    trained = [name for name, p in wrapped.named_parameters() if p.grad is not None]
    assert trained
    assert all("lora_embedding" in name for name in trained)
    adapted = wrapped.base_model.model.embed(IDS)
    merged = wrapped.merge_and_unload()
    assert_close(merged.embed(IDS), adapted, 1e-5)
    assert not torch.allclose(merged(IDS), before)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, other = Model(), Model()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model.loss(IDS))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    train(other, lambda p: torch.optim.SGD(p, 0.1), 1)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(ours, theirs, 1e-6)


def test_accelerate_offloads(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    for offload in (
        lambda model: accelerate.disk_offload(model, tmp_path, execution_device="cpu"),
        lambda model: accelerate.cpu_offload(model, execution_device="cpu"),
    ):
        model = Model()
        offload(model)
        assert model.embed.token.weight.is_meta
        assert_close(model.embed(IDS), Model().embed(IDS), 1e-6)
        assert_close(model(IDS), Model()(IDS), 1e-6)  # the head reads the offloaded table too
        assert model.embed.token.weight.is_meta


def test_logits_of_a_table_without_values() -> None:
    table = pe.TokenEmbedding(9, 4, device="meta")
    with pytest.raises(ValueError, match="weight: expected it on cpu, got the meta device"):
        table.logits(torch.randn(2, 4))
    assert table.logits(torch.randn(2, 4, device="meta")).shape == (2, 9)


def test_lightning_resumes(tmp_path: Path) -> None:
    """Two epochs are one and another one after a restart."""
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.model.loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    loader = torch.utils.data.DataLoader([*IDS], batch_size=1)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "default_root_dir": tmp_path, "devices": 1}

    def fit(epochs: int, checkpoint: Path | None = None) -> Lit:
        lit, trainer = Lit(), lightning.Trainer(max_epochs=epochs, **options)
        trainer.fit(lit, loader, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return lit

    whole = fit(2)
    fit(1)
    resumed = fit(2, tmp_path / "1.ckpt")
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(whole.model.embed.token.weight, Model().embed.token.weight)
