"""Patched models of transformers give the bits of unpatched ones, in every use of a model."""

import copy
import gc
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from posembed.integrations.huggingface import Report, RotaryPosEmb, apply_rotary_pos_emb, patch, unpatch  # noqa: E402
from support.transformers_small import CAUSAL, MODELS, ids, small_model, vision_tower  # noqa: E402

# PyTorch's product of complex numbers rounds otherwise in the remainder of a vector.
COMPLEX = {"deepseek_v2", "llama4"}
EOS = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}


def logits(model: Any, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**{"input_ids": ids(), **given}).logits


def equal(name: str, first: torch.Tensor, second: torch.Tensor) -> bool:
    if name in COMPLEX and first.dtype == torch.float32:
        return torch.allclose(first, second, rtol=0, atol=1e-6)
    return torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, dtype: torch.dtype) -> None:
    model = small_model(name).to(dtype)
    keys, kinds = list(model.state_dict()), list(map(type, model.modules()))
    expected, numbers = logits(model), torch.get_rng_state()
    report = patch(model)
    assert patch(model) == report
    assert report.patched
    assert report.left == ()
    assert torch.equal(torch.get_rng_state(), numbers)
    assert list(model.state_dict()) == keys
    assert list(map(type, model.modules())) == kinds
    assert equal(name, logits(model), expected)
    calls = report.calls()
    assert any(each.kernel for each in calls)
    assert not any(each.own for each in calls)
    copied = copy.deepcopy(model)
    unpatch(model)
    unpatch(model)
    assert torch.equal(logits(model), expected)
    assert equal(name, logits(copied), expected)


LEARNED = [*((name, "model", False) for name in MODELS), ("llama", "exact", False)]
LEARNED += [("llama", numerics, True) for numerics in ("model", "exact")]


@pytest.mark.parametrize(("name", "numerics", "checkpoints"), LEARNED)
def test_gradients(name: str, numerics: Any, checkpoints: bool) -> None:
    model = small_model(name).train(checkpoints)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids()).logits.float().pow(2).mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, report = gradients(), patch(model, numerics=numerics)
    if checkpoints:
        model.gradient_checkpointing_enable()
    for found, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-6)
    assert any(each.exact for each in report.calls()) == (numerics == "exact")


WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "no cache": {"use_cache": False},
    "left padding": {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])},
    "assisted": {"prompt_lookup_num_tokens": 3, "input_ids": torch.tensor([[5, 6, 7, 5, 6, 7, 5]])},
}
GENERATIONS = [(name, "dynamic", "model") for name in CAUSAL]
GENERATIONS += [("llama", way, numerics) for way in WAYS for numerics in ("model", "exact")]
GENERATIONS += [("gemma3", way, "exact") for way in ("dynamic", "static", "beams", "left padding")]


@pytest.mark.parametrize(("name", "way", "numerics"), list(dict.fromkeys(GENERATIONS)))
def test_generation(name: str, way: str, numerics: Any) -> None:
    model = small_model(name)
    given = {"input_ids": ids(), "max_new_tokens": 5, **EOS, **WAYS[way]}
    expected = model.generate(**given)
    report = patch(model, numerics=numerics)
    assert torch.equal(model.generate(**given), expected)
    assert any(each.exact for each in report.calls()) == (numerics == "exact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vision_tower(dtype: torch.dtype) -> None:
    model = vision_tower().to(dtype)
    pixels = torch.randn(16, 3 * 2 * 4 * 4, dtype=dtype)
    given = {"hidden_states": pixels, "grid_thw": torch.tensor([[1, 4, 4]])}
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        report = patch(model)
        assert [row.function for row in report.patched] == ["apply_rotary_pos_emb_vision"]
        assert torch.equal(model(**given).last_hidden_state, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_outputs_besides_logits(attention: str) -> None:
    model = small_model("llama", attn_implementation=attention)
    options = {"output_hidden_states": True, "output_attentions": attention == "eager"}
    expected = model(ids(), **options)
    patch(model)
    found = model(ids(), **options)
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
    if attention == "eager":
        assert len(found.attentions) == 2
        assert all(map(torch.equal, found.attentions, expected.attentions))
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model), logits(small_model("llama", attn_implementation="eager")))


INDUCTOR = pytest.param("llama", "inductor", marks=[pytest.mark.slow, pytest.mark.program])
EAGER = [(name, "eager") for name in ("llama", "gpt_neox", "cohere", "deepseek_v3")]


@pytest.mark.parametrize(("name", "backend"), [*EAGER, INDUCTOR])
def test_compiles_whole(name: str, backend: str) -> None:
    model = small_model(name, num_hidden_layers=1)
    patch(model)
    expected = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found = logits(compiled)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert backend == "inductor" or torch.equal(found, expected)
    logits(model)  # counts calls
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(logits(compiled), found)


def test_save_and_load(tmp_path: Path) -> None:
    model = small_model("llama")
    patch(model)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.model.layers[0].self_attn).__module__.startswith("transformers.")
    assert torch.equal(logits(loaded), expected)
    patch(loaded)
    assert torch.equal(logits(loaded), expected)


def test_pickles_need_no_posembed(tmp_path: Path) -> None:
    """They have the model alone, which another process may patch again."""
    models = [small_model(name) for name in ("llama", "roformer")]
    expected = [logits(model) for model in models]
    for model in models:
        patch(model, numerics="exact")
    torch.save([models, expected], tmp_path / "models.pt")
    assert b"posembed" not in pickle.dumps(models)
    code = f"""
import sys, torch
models, results = torch.load({str(tmp_path / "models.pt")!r}, weights_only=False)
ids = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(5))
for model, expected in zip(models, results, strict=True):
    assert torch.equal(model(ids).logits, expected)
assert "posembed" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_of_a_family_share_the_patch() -> None:
    """The last unpatch ends it; a model that is no more does not count."""
    first, second, plain = (small_model("llama") for _ in range(3))
    expected, report = logits(plain), patch(first)
    patch(second)
    kernel = [2, 4, 4]
    assert torch.equal(logits(plain), expected)
    assert report.calls()[0].kernel == kernel[0]
    unpatch(first)
    assert torch.equal(logits(plain), expected)
    assert report.calls()[0].kernel == kernel[1]
    del second
    gc.collect()
    unpatch(plain)
    assert torch.equal(logits(plain), expected)
    assert report.calls()[0].kernel == kernel[2]


def test_a_subclass_calls_its_parent_and_a_hook_a_stored_method() -> None:
    """super() of the user's class reaches the patched method of the library's class.

    No module names this class, as those that PyTorch's fully_shard makes; accelerate stores methods
    of models on several devices.
    """
    from transformers.models.llama.modeling_llama import LlamaAttention

    class Attention(LlamaAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = small_model("llama")
    expected = logits(model)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Attention
    attention = model.model.layers[0].self_attn
    attention._old_forward = attention.forward
    report = patch(model)
    assert torch.equal(logits(model), expected)
    assert [(each.kernel, each.own) for each in report.calls()] == [(2, 0)]
    assert attention._old_forward.__func__ is Attention.forward


def test_the_report_is_a_table() -> None:
    report = patch(small_model("llama"))
    assert isinstance(report, Report)
    (row,) = report.patched
    assert (row.function, row.modules, row.classes) == ("apply_rotary_pos_emb", 2, ("LlamaAttention",))
    assert "modeling_llama.py:" in row.location
    line, where, versions = str(report).splitlines()
    assert line == "apply_rotary_pos_emb: half-split; 0 of your calls"
    assert re.search(r"2 x LlamaAttention, transformers/models/llama/modeling_llama\.py:\d+$", where)
    installed = f"transformers {transformers.__version__}"
    assert versions == f"{installed} (posembed is tested with 5.23 and 5.24)"
    cells = re.findall(r"<td>(.*?)</td>", report._repr_html_())
    assert cells[:2] == ["apply_rotary_pos_emb", "half-split; 0 of your calls"]
    assert report._repr_html_().endswith(f"<p>{versions}</p>")
    assert all(len(x) <= 100 for x in str(patch(small_model("deepseek_v3"))).splitlines())
    assert not patch(torch.nn.Linear(2, 2))


def test_calls_since_the_patch() -> None:
    model = small_model("llama")
    report = patch(model)
    assert [(each.kernel, each.own) for each in report.calls()] == [(0, 0)]
    logits(model)
    again = patch(model)
    logits(model)
    assert [(each.kernel, each.own) for each in report.calls()] == [(4, 0)]
    assert [(each.kernel, each.own) for each in again.calls()] == [(2, 0)]
    attention = sys.modules[type(model.model.layers[0].self_attn).__module__]
    x, tables = torch.rand(2, 1, 3, 8), torch.rand(2, 3, 8)
    attention.apply_rotary_pos_emb(x, x, tables, tables.half())  # tables of several dtypes
    assert [(each.function, each.kernel, each.own) for each in again.calls()] == [("apply_rotary_pos_emb", 2, 1)]


@pytest.mark.parametrize("value", [False, True])
def test_rotated_values(value: bool) -> None:
    """RoFormer's function takes values too, which a model may leave out."""
    model = small_model("roformer", rotary_value=value)
    expected = logits(model)
    report = patch(model)
    assert torch.equal(logits(model), expected)
    assert [(each.kernel, each.own) for each in report.calls()] == [(2, 0)]


def test_axes_that_turn_components_of_a_pair_apart() -> None:
    """HunYuan-VL's tables have equal halves for text, and others for pictures."""
    from transformers.models.hunyuan_vl import HunYuanVLTextConfig, HunYuanVLTextModel

    torch.manual_seed(11)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"vocab_size": 96, "intermediate_size": 48, "num_hidden_layers": 2}
    parameters = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}
    model = HunYuanVLTextModel(HunYuanVLTextConfig(**sizes, rope_parameters=parameters)).eval()
    steps = torch.randint(1, 9, (3, 2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for numerics in ("model", "exact"):
            unpatch(model)
            calls = [{}, {"position_ids": steps.cumsum(-1)}]
            expected = [model(ids(), **given).last_hidden_state for given in calls]
            report = patch(model, numerics=numerics)
            found = [model(ids(), **given).last_hidden_state for given in calls]
            assert all(map(torch.equal, found, expected))
            assert [(each.kernel, each.own) for each in report.calls()] == [(4, 0)]
    assert (report.calls()[0].exact, report.patched[0].action) == (0, "half-split, float32")


def test_what_is_no_model_or_option() -> None:
    for call in (patch, unpatch):
        with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module or .*, got str"):
            call("llama")
    for option, known in (("numerics", "'model' or 'exact'"), ("tables", "'stay' or 'host'")):
        with pytest.raises(ValueError, match=f"{option}: expected {known}, got 'fast'"):
            patch(small_model("llama"), **{option: "fast"})


@pytest.mark.parametrize("dim", [1, 2, -2, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("apart", [False, True])  # halves of tables, as those of HunYuan-VL
def test_the_function_and_the_layer_alone(dim: int, dtype: torch.dtype, apart: bool) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as theirs

    shape = (2, 4, 5, 8) if dim in (1, -3) else (2, 5, 4, 8)
    angles = torch.rand(2, 5, 8) if apart else torch.rand(2, 5, 4).repeat(1, 1, 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    given = *torch.randn(2, *shape, dtype=dtype), *tables
    expected = theirs(*given, dim)
    for function in (apply_rotary_pos_emb, RotaryPosEmb()):
        assert all(map(torch.equal, function(*given, dim), expected))
    mapped, expected = (
        torch.vmap(function, in_dims=(0, 0, 0, 0, None))(*(x[None] for x in given), dim)
        for function in (apply_rotary_pos_emb, theirs)
    )
    assert all(map(torch.equal, mapped, expected))
