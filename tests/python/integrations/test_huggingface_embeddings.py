"""patch(model, numerics="exact"): input layers of the BERT family sum and normalize in one pass."""

from __future__ import annotations

import copy
import pickle
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")

from posembed.integrations.huggingface import patch, unpatch  # noqa: E402
from transformers.models.bert import modeling_bert  # noqa: E402

FAMILIES = ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "Electra", "Albert")
PADDING = 1
# The name of the argument in transformers up to 5.23, and since.
PAST = (
    {"past_key_values_length", "cache_length"}
    & {*signature(modeling_bert.BertEmbeddings.forward).parameters}
).pop()


def small(family: str = "Bert", **options: Any) -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": 96, "max_position_embeddings": 40, "pad_token_id": PADDING, **options}
    if family == "DistilBert":
        sizes.update(dim=32, hidden_dim=48, n_layers=1, n_heads=4)
    else:
        sizes.update(hidden_size=32, intermediate_size=48, num_attention_heads=4)
        sizes.update(num_hidden_layers=1)
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, f"{family}Model")(config).eval()


def ids(batch: int = 2, tokens: int = 7) -> Tensor:
    found = torch.randint(2, 96, (batch, tokens), generator=torch.Generator().manual_seed(5))
    found[0, :3] = found[-1, -1] = PADDING
    return found


def calls(family: str) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(8)
    places = torch.randint(30, (2, 7), generator=random)
    width = 128 if family in ("Electra", "Albert") else 32  # embedding_size of their defaults
    vectors = torch.randn(2, 7, width, generator=random)
    found: list[dict[str, Any]] = [
        {"input_ids": ids()},
        {"input_ids": ids(), "position_ids": places},
        {"input_ids": ids(), "position_ids": places[:1]},
        {"input_ids": None, "inputs_embeds": vectors},
        {"input_ids": None, "inputs_embeds": vectors, "position_ids": places},
    ]
    if family != "DistilBert":
        types = torch.zeros(2, 7, dtype=torch.int64)
        if family in ("Bert", "Electra", "Albert"):  # the others' tables have one row
            types[:, 3:] = 1
        found.append({"input_ids": ids(), "token_type_ids": types})
    if family not in ("DistilBert", "Albert"):
        found.append({"input_ids": ids(), PAST: 3})
    return found


def operators(call: Any) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()}


def one_pass(layer: nn.Module, **given: Any) -> bool:
    """Whether the layer runs the kernel and no norm of its own."""
    with torch.no_grad():
        ran = operators(lambda: layer(**given))
    fused, normed = "posembed::input_embedding" in ran, "aten::native_layer_norm" in ran
    assert fused != normed
    return fused


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_calling(family: str) -> None:
    model = small(family)
    layer, kind = model.embeddings, type(model.embeddings)
    with torch.no_grad():
        expected = [layer(**given) for given in calls(family)]
        (row,) = patch(model, numerics="exact").rows
        assert (row.patched, row.action) == (True, "sum and norm in one pass")
        assert row.classes == (kind.__name__,)
        for given, theirs in zip(calls(family), expected, strict=True):
            torch.testing.assert_close(layer(**given), theirs, rtol=0, atol=4e-6)
        assert one_pass(layer, input_ids=ids())
        unpatch(model)
        assert type(layer) is kind
        for given, theirs in zip(calls(family), expected, strict=True):
            assert torch.equal(layer(**given), theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models(family: str) -> None:
    model = small(family)
    with torch.no_grad():
        expected = model(ids()).last_hidden_state
        patch(model, numerics="exact")
        found = model(ids()).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_models_numerics_leave_it() -> None:
    model = small()
    kind = type(model.embeddings)
    report = patch(model)
    assert type(model.embeddings) is kind
    (row,) = report.left
    assert row.classes == ("BertEmbeddings",)
    assert row.action.endswith("has other bits (numerics='exact')")
    patch(model, numerics="exact")
    assert one_pass(model.embeddings, input_ids=ids())
    assert patch(model) == report
    assert not one_pass(model.embeddings, input_ids=ids())


def test_bfloat16_is_rounded_once() -> None:
    model = small().bfloat16()
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        expected = wide.embeddings(ids())
        before = (model.embeddings(ids()) - expected).abs().max()
        patch(model, numerics="exact")
        after = (model.embeddings(ids()) - expected).abs().max()
    assert after <= 2**-8 * expected.abs().max()  # half a step of bfloat16
    assert after < before


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_gradients(family: str) -> None:
    model = small(family)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model.embeddings(ids()).pow(3).sum().backward()
        return {name: p.grad.clone() for name, p in model.embeddings.named_parameters()}

    expected = gradients()
    patch(model, numerics="exact")
    for name, found in gradients().items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4)


def test_dropout_is_the_models() -> None:
    """With its random numbers."""
    model = small().train()
    torch.manual_seed(1)
    expected = model.embeddings(ids())
    patch(model, numerics="exact")
    assert model.embeddings.dropout.training
    torch.manual_seed(1)
    found = model.embeddings(ids())
    assert torch.equal(found == 0, expected == 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)


def test_later_hooks_run_the_models_code() -> None:
    model = small()
    with torch.no_grad():
        expected = model.embeddings(ids())
        patch(model, numerics="exact")
        seen: list[Any] = []
        hook = model.embeddings.LayerNorm.register_forward_hook(lambda *given: seen.append(given))
        assert torch.equal(model.embeddings(ids()), expected)
        assert len(seen) == 1
    hook.remove()
    assert one_pass(model.embeddings, input_ids=ids())


def test_another_part_runs_the_models_code() -> None:
    class Adapter(nn.Embedding):
        def forward(self, given: Tensor) -> Tensor:
            return super().forward(given) * 2

    model = small()
    patch(model, numerics="exact")
    model.embeddings.word_embeddings.__class__ = Adapter
    with torch.no_grad():
        found = model.embeddings(ids())
        unpatch(model)
        assert torch.equal(found, model.embeddings(ids()))


def test_errors_are_the_models_own() -> None:
    layer = small("Albert").embeddings
    patch(layer, numerics="exact")
    assert one_pass(layer, input_ids=ids())
    with pytest.raises(TypeError, match="unexpected keyword argument 'past_key_values_length'"):
        layer(ids(), past_key_values_length=3)


def test_autocast_runs_the_models_code() -> None:
    model = small()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model.embeddings(ids())
        report = patch(model, numerics="exact")
        found = model.embeddings(ids())
    assert torch.equal(found, expected)
    assert [(each.kernel, each.own) for each in report.calls()] == [(0, 1)]
    model.embeddings(ids())
    assert [(each.kernel, each.own) for each in report.calls()] == [(1, 1)]


class Renamed(modeling_bert.BertEmbeddings):
    """Arguments in another order and under other names; one has no effect on the result."""

    def forward(self, tokens: Tensor, vectors: Any = None, before: int = 0, rows: Any = None,
                kinds: Any = None, unused: Any = None) -> Any:  # fmt: skip
        return super().forward(tokens, kinds, rows, vectors, before)


def test_names_of_arguments_are_not_used() -> None:
    model = small()
    model.embeddings.__class__ = Renamed
    patch(model, numerics="exact")
    kinds, rows = torch.ones(2, 7, dtype=torch.int64), torch.arange(7).flip(0).expand(2, 7)
    assert model.embeddings.posembed_roles == {
        "tokens": "ids",
        "vectors": "vectors",
        "before": "past",
        "rows": "positions",
        "kinds": "types",
        "unused": "",
    }
    given: dict[str, Any]
    for given in ({}, {"before": 2}, {"rows": rows}, {"kinds": kinds, "rows": rows}):
        expected = Renamed.forward(model.embeddings, ids(), **given)
        assert one_pass(model.embeddings, tokens=ids(), **given)
        found = model.embeddings(ids(), **given)
        torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)
    assert not one_pass(model.embeddings, tokens=ids(), unused=1)


class Scaled(modeling_bert.BertEmbeddings):
    """Not a sum and a norm alone."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past: int = 0,
    ) -> Any:
        given = (token_type_ids, position_ids, inputs_embeds, past)
        return super().forward(input_ids, *given) * 2


def test_what_stays() -> None:
    models = [small(), small(), small().to("meta")]
    models[0].embeddings.__class__ = Scaled
    models[1].embeddings.LayerNorm.register_forward_hook(lambda *given: None)
    reasons = [
        "it computes something else than sum and norm",
        "one of its parts has hooks, another type or an option that the kernel lacks",
        "its tables are not there yet (meta device)",
    ]
    for model, reason in zip(models, reasons, strict=True):
        kind = type(model.embeddings)
        (row,) = patch(model, numerics="exact").left
        assert row.action == reason
        assert type(model.embeddings) is kind


@pytest.mark.parametrize("family", ["GPT2", "OPT", "Bloom", "Mpt"])
def test_families_that_stay(family: str) -> None:
    """Sums in the middle of a method, and builders of biases."""
    model = getattr(transformers, f"{family}Model")(
        getattr(transformers, f"{family}Config")(
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            pad_token_id=1,
        )
    ).eval()
    kinds = [type(module) for module in model.modules()]
    report = patch(model, numerics="exact")
    assert report.patched == ()
    assert [type(module) for module in model.modules()] == kinds
    builders = [row for row in report.left if "alibi" in row.function]
    assert len(builders) == (family in ("Bloom", "Mpt"))
    assert all(row.action.startswith("it makes one row for each head") for row in builders)


def test_copies_and_compiled_models() -> None:
    model = small("Roberta")
    keys = list(model.state_dict())
    patch(model, numerics="exact")
    assert list(model.state_dict()) == keys
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = model(ids()).last_hidden_state
        assert torch.equal(copied(ids()).last_hidden_state, expected)
        assert torch.equal(compiled(ids()).last_hidden_state, expected)
    assert one_pass(copied.embeddings, input_ids=ids())
    torch.compiler.reset()
