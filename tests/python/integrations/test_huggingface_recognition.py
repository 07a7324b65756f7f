"""Functions are recognised by what they compute; others stay."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")

from posembed.integrations.huggingface import _shadow, patch, unpatch  # noqa: E402
from posembed.integrations.huggingface._recognition import recognise  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

HALF, FIRST = "half-split", "first part of the head"


@pytest.mark.parametrize(
    ("model", "function", "rule"),
    [
        ("llama", "apply_rotary_pos_emb", HALF),
        ("gpt_neox", "apply_rotary_pos_emb", f"{HALF}, {FIRST}"),
        ("nanochat", "apply_rotary_pos_emb", f"{HALF}, backwards"),
        ("modernbert", "apply_rotary_pos_emb", f"{HALF}, float32"),
        ("qwen2_vl", "apply_rotary_pos_emb_vision", f"{HALF}, float32"),
        ("gptj", "apply_rotary_pos_emb", "interleaved, half tables"),
        ("cohere", "apply_rotary_pos_emb", "interleaved, float32"),
        ("glm", "apply_rotary_pos_emb", f"interleaved, first half tables, {FIRST}"),
        (
            "deepseek_v3",
            "apply_rotary_pos_emb_interleave",
            "adjacent pairs to halves, first half tables",
        ),
        (
            "deepseek_v4",
            "apply_rotary_pos_emb",
            "interleaved, half tables, last part of the head, float32",
        ),
        ("deepseek_v2", "apply_rotary_emb", "interleaved, complex, float32"),
        ("llama4", "vision_apply_rotary_emb", "interleaved, complex, float32"),
        ("pe_audio", "apply_rotary_pos_emb", "interleaved, first half tables"),
        ("clvp", "apply_rotary_pos_emb", HALF),
        ("dinov3_vit", "apply_rotary_pos_emb", f"{HALF}, last tokens"),
        ("sam3", "apply_rotary_pos_emb_2d", "interleaved, float32"),
        ("gpt_oss", "apply_rotary_pos_emb", f"{HALF}, half tables"),
    ],
)
def test_functions_of_transformers(model: str, function: str, rule: str) -> None:
    code = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    rotation = recognise(getattr(code, function), "")
    assert rotation is not None
    assert str(rotation.rule) == rule


def turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: float = 1.0) -> Any:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
    return (q, k) if scale == 1.0 else (q * scale, k)


def flip(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Almost a rotation."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos - turned(q) * sin, k * cos + turned(k) * sin


def in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q.copy_(q * cos.unsqueeze(1) + turned(q) * sin.unsqueeze(1))
    k.copy_(k * cos.unsqueeze(1) + turned(k) * sin.unsqueeze(1))
    return q, k


class Attention(nn.Module):
    """Rotates with a function of its module, given by name."""

    def __init__(self, function: str, **options: Any) -> None:
        super().__init__()
        self.function = function
        self.options = options

    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Any:
        if self.function == "rotate":
            return rotate(q, q, cos, sin, **self.options)
        return flip(q, q, cos, sin)


@pytest.mark.parametrize("function", [flip, in_place, turned, torch.cat, Attention])
def test_what_is_no_known_rotation(function: Any) -> None:
    assert recognise(function, "") is None


def arguments(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    angles = torch.rand(2, 5, 4).repeat(1, 1, 2)
    return torch.randn(2, 3, 5, 8, dtype=dtype), angles.cos(), angles.sin()


def test_a_users_own_module() -> None:
    """Not of transformers; what it cannot replace is left, with file and line."""
    model = nn.Sequential(Attention("rotate"), Attention("flip"))
    given = arguments()
    expected = [module(*given) for module in model]
    report = patch(model)
    assert [row.function for row in report.patched] == ["rotate"]
    (left,) = report.left
    assert left.function == "flip"
    assert left.action == "computes no known rotation"
    assert left.location == f"{__file__}:{flip.__code__.co_firstlineno}"
    for module, results in zip(model, expected, strict=True):
        assert all(map(torch.equal, module(*given), results))
    unpatch(model)
    assert type(model[0]) is Attention


@pytest.mark.parametrize(
    ("options", "dtype"), [({"scale": 2.0}, torch.float32), ({}, torch.float64)]
)
def test_other_arguments_run_the_function(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = Attention("rotate", **options)
    given = arguments(dtype)
    expected = model(*given)
    patch(model)
    assert all(map(torch.equal, model(*given), expected))


def test_tables_that_do_not_repeat_values_run_the_function() -> None:
    """Found at the first call with a shape."""
    model = Attention("rotate")
    query, angles = torch.randn(2, 3, 6, 8), torch.rand(2, 6, 8)
    expected = model(query, angles.cos(), angles.sin())
    patch(model)
    assert all(map(torch.equal, model(query, angles.cos(), angles.sin()), expected))


class Recorded(modeling_llama.LlamaModel):
    """Rotates in the class whose forward records outputs, which transformers finds by its name."""

    def rotated(self, *given: Tensor) -> Any:
        return rotate(*given)


def test_outputs_of_a_patched_class_are_recorded() -> None:
    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 1}
    model = Recorded(transformers.LlamaConfig(**sizes)).eval()
    given = {"input_ids": torch.arange(5)[None], "output_hidden_states": True}
    expected = model(**given).hidden_states
    patch(model)
    assert type(model) is not Recorded
    found = model(**given).hidden_states
    assert len(found) == len(expected) == 3
    assert all(map(torch.equal, found, expected))
    unpatch(model)
    assert len(model(**given).hidden_states) == 3


def test_errors_are_the_functions_own() -> None:
    model = Attention("rotate")
    query, cos, sin = arguments()
    patch(model)
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(query, cos[:, :3], sin[:, :3])


def test_shadows_are_modules() -> None:
    model = Attention("rotate")
    patch(model)
    shadow = importlib.import_module(type(model).__module__)
    assert shadow.__name__ == _shadow.PREFIX + Attention.__module__
    assert shadow.Attention is type(model)
    assert type(model).forward.__globals__ is vars(shadow)
