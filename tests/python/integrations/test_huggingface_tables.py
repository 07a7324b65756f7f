"""Tests that patch puts tables of layers and of n-grams on the kernels, with equal bits."""

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import _instances as _tables
from posembed.integrations.huggingface import patch, unpatch
from posembed.integrations.huggingface._door import own_code
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")


def gemma() -> Any:
    sizes = {"vocab_size": 100, "vocab_size_per_layer_input": 90, "hidden_size": 32, "head_dim": 16}
    sizes |= {"hidden_size_per_layer_input": 7, "intermediate_size": 16, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_kv_shared_layers": 0}
    layers = ["sliding_attention", "full_attention"] * 2
    options = {"layer_types": layers, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 4}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**sizes, **options))


def qwen() -> Any:
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = modeling.Qwen4ExpTextConfig(vocab_size=100, ple_layer_ids=[1], ngram_vocab_size_base=40, eos_token_id=3)
    return nn.ModuleList([modeling.Qwen4ExpTextNGramEmbedding(config, 64, 0)])


class Cache:
    """The part of transformers' cache that keeps the tokens before."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def get_conv_state(self, layer: int, state_idx: int) -> Tensor | None:
        assert (layer, state_idx) == (0, 2)
        return self.kept

    def update_conv_state(self, ids: Tensor, layer: int, state_idx: int, conv_kernel_size: int) -> Tensor:
        assert (layer, state_idx) == (0, 2)
        joined = ids if self.kept is None else torch.cat([self.kept, ids], 1)
        last = joined[:, -conv_kernel_size:]
        if self.kept is None:
            self.kept = last.clone()
        else:
            self.kept.copy_(last)  # in place, as transformers does
        return joined


IDS = torch.tensor([[5, 7, 3, 9, 9, 64], [3, 3, 80, 1, 2, 5]])


def rows(memory: Any, *parts: tuple[int, int]) -> list[Tensor]:
    """Of the ids as a whole, and of columns that a cache joins, with what it keeps."""
    cache, ids = Cache(), IDS.to(next(memory.buffers()).device)
    found = [memory(ids, None), *(memory(ids[:, begin:end], cache) for begin, end in parts)]
    assert cache.kept is not None
    return [*found, cache.kept]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tables", ["stay", "host"])
def test_layers_of_gemma(tables: Any, dtype: torch.dtype, device: torch.device) -> None:
    model = gemma().to(device, dtype).eval()
    table = model.model.embed_tokens_per_layer
    ids = IDS.to(device)
    expected = table(ids)
    with torch.no_grad():
        logits = model(ids).logits
    report = patch(model, tables=tables)
    assert "one kernel; equal bits" in [row.action for row in report.patched]
    assert isinstance(table, _tables.Instance)
    assert isinstance(table, type(model.model.embed_tokens))
    assert not isinstance(model.model.embed_tokens, _tables.Instance)  # the head shares it
    assert torch.equal(table(ids), expected)
    assert table.weight.device.type == ("cpu" if tables == "host" else device.type)
    assert table.weight.requires_grad == (tables == "stay")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, logits)
    calls = {each.function: each.kernel for each in report.calls()}
    assert calls["forward"] == 2
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again.model.embed_tokens_per_layer(ids), expected)
    model.to(device)
    assert torch.equal(table(ids), expected)
    assert set(model.state_dict()) == set(gemma().state_dict())
    unpatch(model)
    assert type(table) is type(model.model.embed_tokens)
    assert table.weight.device.type == device.type
    assert torch.equal(table(ids), expected)


@pytest.mark.parametrize("tables", ["stay", "host"])
@pytest.mark.parametrize("first", [1, 2, 3, 5])
def test_ngrams_of_qwen(tables: Any, first: int, device: torch.device) -> None:
    model = qwen().to(device)
    memory, parts = model[0], ((0, first), (first, 6), (0, 1))
    expected = rows(memory, *parts)
    for _ in range(2):
        report = patch(model, tables=tables)
        assert [row.action for row in report.patched] == ["one kernel; equal bits"]
        assert isinstance(memory, _tables.Instance)
        assert all(map(torch.equal, rows(memory, *parts), expected))
        assert memory.ngram_embedding.weight.device.type == ("cpu" if tables == "host" else device.type)
    unpatch(model)
    assert type(memory.ngram_embedding) is nn.Embedding
    assert all(map(torch.equal, rows(memory, *parts), expected))


class Scaled(nn.Embedding):
    """Rows times a number, under another name than Gemma's."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.factor = 2.5

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.factor


class Shifted(Scaled):
    """Computes something else than rows times a number."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1


class Masked(Scaled):
    """Does more for one id, which is no sample."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).masked_fill((ids == 4097).unsqueeze(-1), 0.0)


class Long(Scaled):
    """Does more for long rows."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (0.5 if ids.shape[-1] > 300 else 1)


class Counting(Scaled):
    """Has an effect, so that it may not be run."""

    count = 0

    def forward(self, ids: Tensor) -> Tensor:
        Counting.count += 1
        return super().forward(ids)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((Masked, "it uses masked_fill"), (Long, "it branches on"), (Counting, "it uses count")),
        (Shifted, "it computes something else than rows times a number"),
    ],
)
def test_tables_whose_code_does_more_stay(kind: type[Scaled], reason: str) -> None:
    model = nn.ModuleList([kind(8192, 4)])
    (row,) = patch(model).left
    assert row.action.startswith(reason)
    assert not row.rotates
    assert type(model[0]) is kind
    assert Counting.count == 0


class Rounding(nn.Embedding):
    """Rounds its factor to the dtype of the table."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.factor = 2.50390625 + 2**-12

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * torch.tensor(self.factor, dtype=self.weight.dtype)


def test_a_table_is_compared_at_the_first_call_of_each_kind() -> None:
    """Converted to bfloat16, the code rounds a factor that the kernel does not."""
    model, ids = nn.ModuleList([Rounding(64, 32)]), torch.arange(64)
    report = patch(model)
    model[0](ids)
    assert [(each.kernel, each.own) for each in report.calls()] == [(1, 0)]
    model.bfloat16()
    assert torch.equal(model[0](ids), Rounding.forward(model[0], ids))
    assert [(each.kernel, each.own) for each in report.calls()] == [(1, 1)]
    assert report.rows[0].state.endswith("other bits for int64 [64]")


class Bigrams(nn.Module):
    """As qwen4_exp's, with other names, one size of n-grams and another state of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.begins = nn.Buffer(torch.tensor([0, 31]))
        self.primes = nn.Buffer(torch.tensor([31, 37]))
        self.odd = nn.Buffer(torch.tensor([7, 11]))
        self.rows = nn.Embedding(70, 4)
        self.stop = 3

    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        before = None if cache is None else cache.get_conv_state(0, state_idx=2)
        if before is None:
            before = ids.new_full((len(ids), 1), self.stop)
        before = before.clone()  # the cache writes in place
        if cache is not None:
            cache.update_conv_state(ids, 0, state_idx=2, conv_kernel_size=1)
        previous = torch.cat([before, ids], 1)[:, :-1]
        mixed = (ids * self.odd[0]) ^ (previous * self.odd[1])
        return self.rows(mixed[..., None] % self.primes + self.begins).flatten(-2)


def test_ngrams_of_any_name(device: torch.device) -> None:
    model, parts = nn.ModuleList([Bigrams()]).to(device), ((0, 2), (2, 4), (4, 6))
    expected = rows(model[0], *parts)
    assert [row.action for row in patch(model).patched] == ["one kernel; equal bits"]
    assert isinstance(model[0], _tables.Instance)
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, rows(again[0], *parts), expected))


def test_ngrams_that_differ_run_the_models_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of each kind is compared, with a cache and without."""
    model, right, parts = nn.ModuleList([Bigrams()]), _tables.hashed, ((0, 3), (3, 6))
    expected, report = rows(model[0], *parts), patch(model)
    monkeypatch.setattr(_tables, "hashed", lambda *given: right(*given).roll(1, 1))
    assert all(map(torch.equal, rows(model[0], *parts), expected))
    assert [(each.kernel, each.own) for each in report.calls()] == [(0, 3)]
    assert "other bits for int64 [2, " in report.rows[0].state


def test_own_code_is_that_of_tables_too() -> None:
    model, ids = nn.ModuleList([Scaled(64, 4), Bigrams()]), torch.arange(6)[None]
    report = patch(model)
    with own_code():
        model[0](ids)
        model[1](ids, None)
    assert [(each.kernel, each.own) for each in report.calls()] == [(0, 0), (0, 0)]


def test_other_hashes_stay() -> None:
    model = qwen()
    modeling = importlib.import_module(type(model[0]).__module__)

    class Other(modeling.Qwen4ExpTextNGramEmbedding):  # type: ignore[misc, name-defined]
        """Its boundary is no boundary of words."""

        def _shift_right_ignore_eos(self, token_ids: Tensor, shift: int) -> Tensor:
            return token_ids.roll(shift, 1)

    model[0].__class__ = Other
    report = patch(model)
    assert [row.action for row in report.left] == ["it computes other rows than those of hashed n-grams"]
    assert type(model[0]) is Other


def test_an_empty_table_stays() -> None:
    model = nn.ModuleList([Shifted(5, 4), nn.Embedding(5, 4)])
    model[0].weight.data.zero_()
    (row,) = patch(model).left
    assert row.action == "its table is empty, so that its scale cannot be seen"
