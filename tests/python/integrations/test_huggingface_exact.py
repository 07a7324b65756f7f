"""patch(model, numerics="exact"): exact angles without tables, in every use of a model."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")

from posembed.integrations.huggingface import _patch, patch, unpatch  # noqa: E402
from support.transformers_small import MODELS, ids, small_model, vision_tower  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402
from transformers.utils.import_utils import is_kernels_available  # noqa: E402

EXACT = "; exact angles"
# Their tables are not made by a module from positions alone, or their code moves them.
TABLES = {"gptj", "codegen", "roformer", "deepseek_v2", "llama4"}
EOS = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def logits(model: Any, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(**{"input_ids": ids(), **given}).logits


def near(found: Tensor, expected: Tensor, relative: float = 2e-6) -> bool:
    """Angles differ by the rounding of float32, about 1e-7 at the positions of a short text."""
    return bool((found - expected).abs().max() <= relative * expected.abs().max())


def patched(name: str = "llama", **options: Any) -> Any:
    model = small_model(name, **options)
    for row in patch(model, numerics="exact").rows:
        assert EXACT in row.action
    return model


def operators(call: Any) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("name", sorted(set(MODELS) - TABLES))
def test_logits(name: str) -> None:
    model = small_model(name)
    expected = logits(model)
    assert all(EXACT in row.action for row in patch(model, numerics="exact").rows)
    assert near(logits(model), expected)
    ran = operators(lambda: logits(model))
    assert not ran & {"aten::cos", "aten::sin"}
    assert ran & {"posembed::rotary_pair", "posembed::rotary", "posembed::norm_rotary"}
    unpatch(model)
    assert torch.equal(logits(model), expected)
    assert not any("posembed_specifications" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", sorted(TABLES))
def test_tables_stay(name: str) -> None:
    model = small_model(name)
    expected = logits(model)
    (row,) = patch(model, numerics="exact").patched
    assert "tables" in row.action
    assert "stay: " in row.action
    assert near(logits(model), expected)


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
    parameters = {"rope_theta": 10000.0, **SCALED[scaling]}
    model = small_model("llama", rope_parameters=parameters)
    expected = logits(model)
    assert EXACT in patch(model, numerics="exact").patched[0].action
    assert near(logits(model), expected)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0}),
        (
            "llama",
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_frequencies_that_depend_on_the_length(model: str, parameters: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10000.0, **parameters}
    made = small_model(model, rope_parameters=parameters)
    expected = logits(made)
    (row,) = patch(made, numerics="exact").patched
    assert "its frequencies depend on the length of the sequence" in row.action
    assert torch.equal(logits(made), expected)


def test_types_of_layers() -> None:
    """Local and global layers have their own bases."""
    model = patched("gemma3", layer_types=["sliding_attention", "full_attention"])
    (texts,) = [
        vars(module)["posembed_specifications"]
        for module in model.modules()
        if "posembed_specifications" in vars(module)
    ]
    assert set(texts) == {"sliding_attention", "full_attention"}
    assert texts["sliding_attention"] != texts["full_attention"]


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


def test_gradients() -> None:
    def gradients(model: Any) -> list[Tensor]:
        model.zero_grad()
        model(ids()).logits.pow(2).mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected, model = gradients(small_model("llama")), patched()
    for found, theirs in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-6)
    plain = gradients(model)
    model.train().gradient_checkpointing_enable()
    for found, theirs in zip(gradients(model), plain, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])},
    ],
    ids=["dynamic", "static", "beams", "left padding"],
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generation(name: str, options: dict[str, Any]) -> None:
    given = {"input_ids": ids(), "max_new_tokens": 6, **EOS, **options}
    expected = small_model(name).generate(**given)
    assert torch.equal(patched(name).generate(**given), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere", "deepseek_v3"])
def test_compiles_whole(name: str) -> None:
    model = patched(name)
    torch.compiler.reset()  # all models share wrappers, and code is compiled eight times at most
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits(compiled), logits(model))
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
    config = getattr(code, f"{name}Config")(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
        },
    )
    model = getattr(code, f"{name}Model")(config).eval()
    steps = torch.randint(1, 9, (4, 2, 7), generator=torch.Generator().manual_seed(1))
    every = steps.cumsum(-1)  # with four axes, the text's lead
    taken = [every, every[1:], every[1:, :1], every[1:2], every[1:2, :1], every[1], every[1, :1]]
    calls = [{}, *[{"position_ids": positions} for positions in taken]]
    with torch.no_grad():
        expected = [model(ids(), **given).last_hidden_state for given in calls]
        report = patch(model, numerics="exact")
        assert EXACT in report.patched[0].action
        for given, theirs in zip(calls, expected, strict=True):
            assert near(model(ids(), **given).last_hidden_state, theirs, 1e-5)
    assert [(each.kernel, each.own) for each in report.calls()] == [(2 * len(calls), 0)]


def runs_like(model: Any, expected: Any) -> None:
    """Raises unless the model gives what it did, with the hidden states that it records."""
    with torch.no_grad():
        found = model(ids(), output_hidden_states=True)
    assert near(found.logits, expected.logits)
    assert len(found.hidden_states) == len(expected.hidden_states)


@pytest.mark.parametrize(
    "steps",
    [("exact",), ("model", "exact"), ("exact", "model"), ("exact", "exact"), ("exact", None)],
    ids=str,
)
def test_the_model_runs_between_the_steps_of_a_patch(
    steps: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does on another thread: a call may begin before or after any module changes."""
    model = small_model("llama")
    with torch.no_grad():
        expected = model(ids(), output_hidden_states=True)
    changes = 0

    def become(module: nn.Module, cls: type) -> None:
        nonlocal changes
        other = type(module) is not cls
        change(module, cls)
        if other:
            runs_like(model, expected)
            changes += 1

    change = _patch._become
    monkeypatch.setattr(_patch, "_become", become)
    for numerics in steps:
        patch(model, numerics=numerics) if numerics else unpatch(model)
    assert changes >= 3  # two attention layers and the rotary module


def test_patch_while_another_thread_runs_the_model() -> None:
    model = small_model("llama")
    with torch.no_grad():
        expected = model(ids(), output_hidden_states=True)
    done = threading.Event()

    def runs() -> int:
        count = 0
        while not done.is_set() or not count:
            runs_like(model, expected)
            count += 1
        return count

    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(runs) for _ in range(2)]
        for _ in range(5):
            patch(model, numerics="exact")
            patch(model)
        done.set()
        assert all(result.result() for result in results)


def test_vision_towers_stay() -> None:
    """Their tables have no dimension of the batch."""
    model = vision_tower()
    given = {
        "hidden_states": torch.randn(16, 3 * 2 * 4 * 4),
        "grid_thw": torch.tensor([[1, 4, 4]]),
    }
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        (row,) = patch(model, numerics="exact").patched
        assert "tables of Qwen2VLVisionRotaryEmbedding stay: " in row.action
        assert torch.equal(model(**given).last_hidden_state, expected)


def test_either_numerics_after_the_other() -> None:
    model = small_model("llama")
    expected = logits(model)
    patch(model)
    report = patch(model, numerics="exact")
    exact = logits(model)
    assert patch(model, numerics="exact") == report
    assert torch.equal(logits(model), exact)
    assert not torch.equal(exact, expected)
    assert patch(model).patched[0].action == "half-split"
    assert torch.equal(logits(model), expected)


def test_state_and_kind_stay() -> None:
    model = small_model("llama")
    keys, kind = list(model.state_dict()), type(model.model.rotary_emb)
    patch(model, numerics="exact")
    assert list(model.state_dict()) == keys
    assert isinstance(model.model.rotary_emb, kind)
    assert type(model.model.rotary_emb).__name__ == kind.__name__
    copied = copy.deepcopy(model)
    unpatch(model)
    assert type(model.model.rotary_emb) is kind
    assert not operators(lambda: logits(copied)) & {"aten::cos", "aten::sin"}


@pytest.mark.skipif(is_kernels_available(), reason="kernels wraps functions in local classes")
def test_pickle_in_another_process(tmp_path: Path) -> None:
    model = patched("gemma3")
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    torch.save(logits(model), tmp_path / "logits.pt")
    code = f"""
import pickle, pathlib, torch
folder = pathlib.Path({str(tmp_path)!r})
model = pickle.loads((folder / "model.pickle").read_bytes())
ids = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(5))
with torch.no_grad():
    assert torch.equal(model(ids).logits, torch.load(folder / "logits.pt"))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Rotary(modeling_llama.LlamaRotaryEmbedding):
    """The user's own, with the parent's tables."""


class Stretched(modeling_llama.LlamaRotaryEmbedding):
    """Not what its configuration says."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return super().forward(x, position_ids * 2)


class Looking(modeling_llama.LlamaAttention):
    """Does more with its tables than to rotate."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **rest: Any) -> Any:
        cos, _ = position_embeddings
        hidden_states = hidden_states * cos.mean()
        return super().forward(hidden_states, position_embeddings=position_embeddings, **rest)


class Named(modeling_llama.LlamaDecoderLayer):
    """Finds its tables by name among others."""

    def forward(self, hidden_states: Tensor, **rest: Any) -> Any:
        cos, sin = rest.pop("position_embeddings")
        return super().forward(hidden_states, position_embeddings=(cos * 1, sin * 1), **rest)


def helper(tables: Any) -> Any:
    return tables[0] + 0.0, tables[1]


class Helped(modeling_llama.LlamaAttention):
    """Gives its tables to a function."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **rest: Any) -> Any:
        tables = helper(tables=position_embeddings)
        return super().forward(hidden_states, position_embeddings=tables, **rest)


def of_a_function() -> type[nn.Module]:
    class Local(modeling_llama.LlamaAttention):
        """Rotates in a class that no module has: its code stays."""

        def forward(self, hidden_states: Tensor, position_embeddings: Any, **rest: Any) -> Any:
            cos, sin = position_embeddings
            turned, _ = apply_rotary_pos_emb(
                hidden_states[..., :8], hidden_states[..., :8], cos, sin, 0
            )
            hidden_states = hidden_states + turned.mean()
            return super().forward(hidden_states, position_embeddings=position_embeddings, **rest)

    return Local


@pytest.mark.parametrize(
    ("path", "cls", "reason"),
    [
        ("rotary_emb", Rotary, ""),
        ("rotary_emb", Stretched, "does not rotate as its configuration says"),
        ("layers.1.self_attn", Looking, "has 'cos.mean'"),
        ("layers.1", Named, "has the name 'position_embeddings' as a string"),
        ("layers.0.self_attn", Helped, "has 'helper(tables=position_embeddings)'"),
        ("layers.0.self_attn", of_a_function(), "Local.forward, line "),
    ],
)
def test_code_of_the_user(path: str, cls: type[nn.Module], reason: str) -> None:
    """Tables stay where they are used otherwise, and no model fails."""
    model = small_model("llama")
    model.model.get_submodule(path).__class__ = cls
    expected = logits(model)
    (row,) = patch(model, numerics="exact").patched
    assert (reason in row.action) if reason else EXACT in row.action
    assert near(logits(model), expected)


def test_other_numbers_than_those_of_the_configuration() -> None:
    model = small_model("llama")
    model.model.rotary_emb.inv_freq *= 2
    expected = logits(model)
    (row,) = patch(model, numerics="exact").patched
    assert "its inv_freq differs from that of its configuration" in row.action
    assert torch.equal(logits(model), expected)


def test_other_heads_than_those_of_the_configuration() -> None:
    """Where a part of the head turns, the specification says which."""
    model = small_model("glm")
    model.model.layers[0].self_attn.head_dim = 16
    (row,) = patch(model, numerics="exact").patched
    assert row.action.endswith("heads have [8, 16] components, not 8")


def test_two_names_of_one_module() -> None:
    """A use by either name counts."""
    model = small_model("llama")
    model.model.another = model.model.rotary_emb
    (row,) = patch(model, numerics="exact").patched
    assert row.action.endswith("its tables reach no rotation that is called by name")


def test_hooks_get_tables() -> None:
    model = small_model("llama")
    seen: list[Any] = []
    model.model.rotary_emb.register_forward_hook(lambda module, given, out: seen.append(out))
    (row,) = patch(model, numerics="exact").patched
    assert "it has hooks or parameters" in row.action
    logits(model)
    assert all(isinstance(table, Tensor) for table in seen[0])


def test_rotary_modules_with_parameters_stay() -> None:
    """They may learn something else than their configuration says."""
    model = small_model("llama")
    model.model.rotary_emb.scale = nn.Parameter(torch.ones(()))
    (row,) = patch(model, numerics="exact").patched
    assert "it has hooks or parameters" in row.action


def test_later_hooks_get_positions() -> None:
    model = patched()
    seen: list[Any] = []
    model.model.rotary_emb.register_forward_hook(lambda module, given, out: seen.append(out))
    logits(model)
    cos, sin = seen[0]
    assert cos is sin
    assert torch.equal(cos.positions, torch.arange(7)[None])


def test_negative_positions() -> None:
    model = patched()
    query = torch.randn(1, 4, 1, 8)
    assert torch.equal(rotated(model, -1, query), query)
    with pytest.raises(IndexError):
        rotated(model, -2, query)


def test_unknown_numerics() -> None:
    with pytest.raises(ValueError, match="numerics: expected 'model' or 'exact', got 'fast'"):
        patch(small_model("llama"), numerics="fast")  # type: ignore[arg-type]
