"""patch(model, numerics="exact"): exact angles where tables arrive untouched."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.0")

from posembed.integrations.huggingface import _instances, _rotation, patch, unpatch  # noqa: E402
from support.transformers_small import MODELS, ids, small_model  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

EXACT = "; exact angles"
# Their tables are not made by a module from positions alone, or their code moves them.
TABLES = {"gptj", "codegen", "roformer", "deepseek_v2", "llama4"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 32},
    "dynamic": {"factor": 2.0},
    "longrope": {**LONGROPE, "original_max_position_embeddings": 32},
}


def logits(model: Any, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(**{"input_ids": ids(), **given}).logits


def near(found: Tensor, expected: Tensor, relative: float = 2e-6) -> bool:
    """Angles differ by the rounding of float32, about 1e-7 at the positions of a short text."""
    return bool((found - expected).abs().max() <= relative * expected.abs().max())


def patched(name: str = "llama", **options: Any) -> Any:
    model = small_model(name, **options)
    (row,) = patch(model, numerics="exact").rows
    assert EXACT in row.action
    return model


def exactly(report: Any) -> list[tuple[int, int]]:
    """Calls by exact angles, and all calls of the kernel."""
    return [(each.exact, each.kernel) for each in report.calls()]


@pytest.mark.parametrize("name", sorted(set(MODELS) - TABLES))
def test_logits(name: str) -> None:
    model = small_model(name)
    expected = logits(model)
    report = patch(model, numerics="exact")
    found = logits(model)
    assert near(found, expected)
    assert sum(exact for exact, _ in exactly(report)) > 0
    assert all(exact == kernel for exact, kernel in exactly(report))
    assert torch.equal(logits(copy.deepcopy(model)), found)
    patch(model)
    assert torch.equal(logits(model), expected)
    unpatch(model)
    assert not any(isinstance(module, _instances.Instance) for module in model.modules())


def test_other_models_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an exact model lives, their bits stay, and one operator call rotates by their tables."""
    exact, model = small_model("llama"), small_model("llama")
    expected, report = logits(model), patch(exact, numerics="exact")
    logits(exact)
    assert torch.equal(logits(model), expected)
    assert exactly(report) == [(2, 4)]
    assert torch.equal(logits(model), expected)  # proved, and planned

    def long_way(*_: Any, **__: Any) -> Any:
        raise AssertionError("planned again")

    monkeypatch.setattr(_rotation.Rotation, "__call__", long_way)
    assert torch.equal(logits(model), expected)
    with pytest.raises(AssertionError, match="planned again"):
        logits(exact)
    assert exactly(report) == [(2, 8)]


@pytest.mark.parametrize("name", sorted(TABLES))
def test_tables_that_are_changed_or_have_no_module(name: str) -> None:
    """Their code moves tables, or makes them otherwise: the model's bits."""
    model = small_model(name)
    expected, report = logits(model), patch(model, numerics="exact")
    assert near(logits(model), expected)
    for exact, kernel in exactly(report):
        assert exact == 0 < kernel
    assert not any(EXACT in row.action for row in report.patched)


@pytest.mark.parametrize("name", ["llama", "modernbert", "deepseek_v3"])
def test_bfloat16(name: str) -> None:
    """A cast of the model rounds its frequencies to 16 bits, and the specification's stay."""
    model, wide = small_model(name).bfloat16(), small_model(name)
    with torch.no_grad():
        for mine, other in zip(wide.parameters(), model.parameters(), strict=True):
            mine.copy_(other)
    patch(model, numerics="exact")
    found = logits(model)
    assert found.dtype == torch.bfloat16
    assert near(found.float(), logits(wide), 0.05)  # some steps of bfloat16 in two layers


@pytest.mark.parametrize("scaling", SCALED)
def test_scalings(scaling: str) -> None:
    """Frequencies that depend on the length keep their tables."""
    parameters = {"rope_theta": 10000.0, "rope_type": scaling, **SCALED[scaling]}
    model = small_model("llama", rope_parameters=parameters)
    expected = logits(model)
    report = patch(model, numerics="exact")
    found = logits(model)
    if scaling in ("dynamic", "longrope"):
        assert any("depend on the length" in row.action for row in report.left)
        assert torch.equal(found, expected)
        assert exactly(report) == [(0, 2)]
    else:
        assert near(found, expected)
        assert exactly(report) == [(2, 2)]


def rotated(model: Any, position: int, query: Tensor) -> Tensor:
    """A query of one token, rotated as the model's code does at that position."""
    tables = model.model.rotary_emb(query, torch.tensor([[position]]))
    modeling = sys.modules[type(model.model.layers[0].self_attn).__module__]
    return modeling.apply_rotary_pos_emb(query, query, *tables)[0]


def test_far_positions() -> None:
    """At a million the model's float32 results are off by 0.01, and the exact ones are not."""
    model = small_model("llama", num_attention_heads=2, num_key_value_heads=2)
    query = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(3))
    position = 1_000_003
    angle = position * 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angle = torch.cat((angle, angle)).view(1, 1, 1, 16)
    half = modeling_llama.rotate_half(query.double())
    expected = query.double() * angle.cos() + half * angle.sin()
    assert (rotated(model, position, query) - expected).abs().max() > 5e-3
    patch(model, numerics="exact")
    assert (rotated(model, position, query) - expected).abs().max() < 1e-6


def moved(tables: Any) -> Any:
    return tuple(x.clone() for x in tables)


def scaled(tables: Any) -> Any:
    tables[0].mul_(1.0)  # the same object and numbers, another version
    return tables


# What makes a model keep its tables, and why a row says so.
KEEPS: dict[str, tuple[Any, str]] = {
    "hook moves": (lambda r: r.register_forward_hook(lambda *x: moved(x[-1])), ""),
    "hook writes": (lambda r: r.register_forward_hook(lambda *x: scaled(x[-1])), ""),
    # Its weights are not those that the model's function rotates.
    "other pairing": (lambda r: setattr(r.config, "posembed_rotary_pairs", "interleaved"), ""),
    "other numbers": (lambda r: r.inv_freq.mul_(2), "inv_freq differs from that of its config"),
}


@pytest.mark.parametrize("why", KEEPS)
def test_tables_that_say_something_else_are_used(why: str) -> None:
    model, (change, reason) = small_model("llama"), KEEPS[why]
    change(model.model.rotary_emb)
    expected, report = logits(model), patch(model, numerics="exact")
    assert torch.equal(logits(model), expected)
    assert exactly(report) == [(0, 2)]
    assert [reason in row.action for row in report.left] == [True] * bool(reason)


def test_inference_mode_and_compiled_code_use_tables() -> None:
    """There are no versions that tell whether tables were changed."""
    model = small_model("llama")
    expected = logits(model)
    report = patch(model, numerics="exact")
    with torch.inference_mode():
        assert torch.equal(model(ids()).logits, expected)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits(compiled), expected)
    assert exactly(report) == [(0, 2)]
    torch.compiler.reset()


SEVERAL_AXES = {
    "qwen2_vl": "Qwen2VLText",
    "qwen2_5_vl": "Qwen2_5_VLText",
    "qwen3_vl": "Qwen3VLText",
    "qwen3_vl_moe": "Qwen3VLMoeText",
    "glm4v": "Glm4vText",
}


@pytest.mark.parametrize("family", SEVERAL_AXES)
def test_several_axes(family: str) -> None:
    """Positions of time, height and width, in every shape that the models take."""
    code, name = getattr(transformers.models, family), SEVERAL_AXES[family]
    torch.manual_seed(11)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    rope = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}
    config = getattr(code, f"{name}Config")(**sizes, rope_parameters=rope)
    model = getattr(code, f"{name}Model")(config).eval()
    steps = torch.randint(1, 9, (4, 2, 7), generator=torch.Generator().manual_seed(1))
    every = steps.cumsum(-1)  # with four axes, the text's lead
    taken = [every, every[1:], every[1:, :1], every[1:2], every[1:2, :1], every[1], every[1, :1]]
    calls = [{}, *[{"position_ids": positions} for positions in taken]]
    with torch.no_grad():
        expected = [model(ids(), **given).last_hidden_state for given in calls]
        report = patch(model, numerics="exact")
        for given, theirs in zip(calls, expected, strict=True):
            assert near(model(ids(), **given).last_hidden_state, theirs, 1e-5)
    assert exactly(report) == [(2 * len(calls), 2 * len(calls))]


def test_negative_positions() -> None:
    model = patched()
    query = torch.randn(1, 4, 1, 8)
    assert torch.equal(rotated(model, -1, query), query)
    with pytest.raises(IndexError):
        rotated(model, -2, query)
