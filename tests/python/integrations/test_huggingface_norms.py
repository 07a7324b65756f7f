"""patch(model, numerics="exact"): norms of query and key in the kernel of the rotation."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
import transformers
from posembed.integrations.huggingface import _late, patch, unpatch
from torch import Tensor

FUSED = "half-split; exact angles; norms that it takes whole, in the same pass"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = torch.arange(18).view(2, 9)


def make(family: str) -> Any:
    torch.manual_seed(0)
    if family == "qwen3":
        config: Any = transformers.Qwen3Config(**SIZES, head_dim=32)
        model: Any = transformers.Qwen3ForCausalLM(config)
    elif family == "gemma3":
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, head_dim=32))
    else:
        model = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SIZES))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.0 if family == "gemma3" else 1.0, 0.3)
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def attention_of(model: Any) -> Any:
    return model.model.layers[0].self_attn


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_one_pass_has_the_results_and_gradients(family: str, fused: list[bool]) -> None:
    model = make(family)
    expected = logits(model)
    model(IDS).logits.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    (row,) = patch(model, numerics="exact").patched
    assert row.action == FUSED
    found = logits(model)
    assert fused == [True]
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    model(IDS).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        slack = 1e-4 * gradients[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=slack)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), found)
    assert torch.equal(logits(copy.deepcopy(model)), found)
    patch(model)
    assert torch.equal(logits(model), expected)
    patch(model, numerics="exact")
    unpatch(model)
    norm = attention_of(model).q_norm
    assert type(norm).__module__.startswith("transformers.")
    assert not [name for name in vars(norm) if name.startswith("posembed")]


def test_generation_and_narrow_types(fused: list[bool]) -> None:
    model = make("qwen3").bfloat16()
    expected = logits(model)
    patch(model, numerics="exact")
    assert (logits(model) - expected).abs().max() <= 2**-6 * expected.abs().max()
    model.generate(IDS[:1], max_new_tokens=3, do_sample=False)
    assert len(fused) == 4
    assert all(fused)


def test_hooks_that_are_added_later_get_the_norm(fused: list[bool]) -> None:
    model = make("qwen3")
    expected = logits(model)
    patch(model, numerics="exact")
    seen: list[Any] = []
    handle = attention_of(model).q_norm.register_forward_hook(lambda *x: seen.append(x[-1]))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert type(seen[0]) is Tensor
    handle.remove()
    logits(model)
    assert fused[-1]


class Scaled(torch.nn.Module):
    """Something else in place of a norm."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_other_norms_stay_with_a_reason(fused: list[bool]) -> None:
    model = make("qwen3")
    attention_of(model).q_norm.register_forward_hook(lambda *x: None)
    (row,) = patch(model, numerics="exact").patched
    assert "q_norm stays: it has hooks or another forward" in row.action
    model = make("qwen3")
    with torch.no_grad():
        attention_of(model).q_norm.variance_epsilon = 2.0
    (row,) = patch(model, numerics="exact").patched
    assert "q_norm stays: it computes something else" in row.action
    model = make("qwen3")
    attention_of(model).q_norm = Scaled()
    expected = logits(model)
    patch(model, numerics="exact")
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


def test_any_other_use_normalises_at_once() -> None:
    model = make("qwen3")
    x, norm = torch.randn(2, 3, 4, 32), attention_of(model).q_norm
    with torch.no_grad():
        expected = norm(x)
        patch(model, numerics="exact")
        late = norm(x)
        assert isinstance(late, _late.Late)
        moved = late.transpose(1, 2)
        uses = [
            (late + 1, expected + 1),
            (2 * late, 2 * expected),
            (x @ late.mT, x @ expected.mT),
            (torch.cat((late, x)), torch.cat((expected, x))),
            (late[..., :7], expected[..., :7]),
            (moved.flatten(2), expected.transpose(1, 2).flatten(2)),
            (late.transpose(-1, 0), expected.transpose(-1, 0)),
            (late.view(2, -1), expected.view(2, -1)),
            (late.to(torch.float64), expected.to(torch.float64)),
            (torch.nn.functional.silu(moved), torch.nn.functional.silu(expected.transpose(1, 2))),
        ]
    assert all(torch.equal(found, wanted) for found, wanted in uses)
    assert isinstance(moved, _late.Late)
    assert isinstance(late.to(late.dtype), _late.Late)
    assert isinstance(late.transpose(-1, 0), Tensor)  # the normalised one has moved
    assert late.shape == x.shape


def rotate(model: Any, position: int, q: Tensor, k: Tensor) -> Any:
    """Query and key [batch, 1, heads, head_dim], normalised and rotated as the model's code does."""
    attention = attention_of(model)
    tables = model.model.rotary_emb(q, torch.tensor([[position]]))
    query, key = attention.q_norm(q).transpose(1, 2), attention.k_norm(k).transpose(1, 2)
    return sys.modules[type(attention).__module__].apply_rotary_pos_emb(query, key, *tables)


def test_query_and_key_of_two_dtypes(fused: list[bool]) -> None:
    """One call cannot take them."""
    model, q = make("qwen3"), torch.randn(1, 1, 4, 32)
    attention_of(model).k_norm.bfloat16()
    given = q, torch.randn(1, 1, 2, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = rotate(model, 5, *given)
        patch(model, numerics="exact")
        found = rotate(model, 5, *given)
    assert [x.dtype for x in found] == [torch.float32, torch.bfloat16]
    for x, y, slack in zip(found, expected, (1e-5, 0.03), strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=slack, atol=slack)
    assert fused == [False]


def test_negative_positions(fused: list[bool]) -> None:
    """At -1 a token is normalised alone."""
    model = make("qwen3")
    attention, q, k = attention_of(model), torch.randn(1, 1, 4, 32), torch.randn(1, 1, 2, 32)
    with torch.no_grad():
        expected = attention.q_norm(q).transpose(1, 2)
        patch(model, numerics="exact")

        def rotated(position: int) -> Any:
            return rotate(model, position, q, k)[0]

        torch.testing.assert_close(rotated(-1), expected, rtol=0, atol=1e-6)
        assert fused == [True]
        with pytest.raises(IndexError):
            rotated(-2)


def test_compiled_code_fuses(fused: list[bool]) -> None:
    model = make("qwen3")
    patch(model, numerics="exact")
    expected = logits(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
