"""Tests the biases of windows beside transformers' Swin, SwinV2 and BEiT."""

from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
import torch._dynamo.testing
from support.refusals import refused
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

HEADS = 2


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module


@pytest.mark.parametrize("window", [(7, 7), (3, 5)])
def test_swin(window: tuple[int, int]) -> None:
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    theirs = filled(swin.SwinRelativePositionBias(HEADS, window))
    bias = pe.RelativePositionBias(HEADS, window=window)
    bias.load_state_dict({"weight": theirs.relative_position_bias_table.detach()})
    assert torch.equal(bias(), theirs()[0])


def test_beit_and_its_other_windows() -> None:
    beit = pytest.importorskip("transformers.models.beit.modeling_beit")
    config = beit.BeitConfig(image_size=20, patch_size=4, num_attention_heads=HEADS, hidden_size=8)
    theirs = filled(beit.BeitRelativePositionBias(config))
    bias = pe.RelativePositionBias(HEADS, window=(5, 5), class_token=True)
    bias.load_state_dict({"weight": theirs.relative_position_bias_table.detach()})
    for window in ((5, 5), (8, 6), (3, 9)):
        assert torch.equal(bias(window=window), theirs(window)[0])
    bias.extend((8, 6))
    assert torch.equal(bias(), theirs((8, 6))[0])
    assert bias.num_buckets == 15 * 11 + 3


@pytest.mark.parametrize("pretrained", [None, (6, 6)])
def test_swinv2(pretrained: tuple[int, int] | None) -> None:
    swinv2 = pytest.importorskip("transformers.models.swinv2.modeling_swinv2")
    config = swinv2.Swinv2Config()
    for window in ((4, 4), (8, 8)):
        theirs = swinv2.Swinv2SelfAttention(config, 8, HEADS, window, pretrained or [0, 0])
        theirs = filled(theirs)
        mlp = theirs.continuous_position_bias_mlp
        cells = window[0] * window[1]
        table = mlp(theirs.relative_coords_table).view(-1, HEADS)
        rows = table[theirs.relative_position_index.flatten()]
        expected = 16 * rows.view(cells, cells, HEADS).permute(2, 0, 1).sigmoid()
        bias = pe.RelativePositionBias(HEADS, window=(4, 4), mlp_dim=512, pretrained_window=pretrained)
        bias.mlp.load_state_dict(mlp.state_dict())
        torch.testing.assert_close(bias(window=window), expected, atol=3e-6, rtol=0.0)
        bias.extend(window)
        assert torch.equal(bias(), bias(window=window))


def test_video_swins_windows() -> None:
    """As Video Swin's relative_position_index, and one frame is a window in two dimensions."""
    window = 2, 3, 2
    axes = torch.meshgrid(*map(torch.arange, window), indexing="ij")
    cells = torch.stack(axes).flatten(1)
    t, y, x = cells[:, :, None] - cells[:, None]
    rows = (t + 1) * 5 * 3 + (y + 2) * 3 + x + 1
    bias = filled(pe.RelativePositionBias(HEADS, window=window, class_token=True))
    assert bias.num_buckets == 3 * 5 * 3 + 3
    assert torch.equal(bias()[:, 1:, 1:], bias.weight[rows].permute(2, 0, 1))
    flat = filled(pe.RelativePositionBias(HEADS, window=(3, 2)))
    frame = pe.RelativePositionBias(HEADS, window=(1, 3, 2))
    frame.load_state_dict(flat.state_dict())
    assert torch.equal(frame(), flat())
    assert repr(frame) == "RelativePositionBias(2, window=(1, 3, 2))"
    assert repr(pe.cpp.RelativePositionBias(HEADS, window=(1, 3, 2))) == repr(frame)


def test_timms_mlp() -> None:
    """RelPosMlp(mode="cr"): sign(d) ln(1 + |d|), two layers with biases, no sigmoid."""
    bias = filled(pe.RelativePositionBias(HEADS, window=(3, 4), mlp_dim=8, mlp_rule="cr"))
    y, x = torch.meshgrid(torch.arange(-2.0, 3), torch.arange(-3.0, 4), indexing="ij")
    distances = torch.stack([y, x], -1)
    logarithms = distances.sign() * torch.log(1 + distances.abs())
    expected = bias.mlp[2](bias.mlp[0](logarithms).relu()).view(-1, HEADS)
    torch.testing.assert_close(bias.table(), expected)
    assert bias.mlp[2].bias is not None
    assert bias.extra_repr() == "2, window=(3, 4), mlp_dim=8, mlp_rule='cr'"


def test_log_distances_in_every_dtype() -> None:
    exact = pe.functional.relative_log_distances((3, 5), (9, 9), dtype=torch.float64)
    y = torch.arange(-2.0, 3.0, dtype=torch.float64)[:, None].expand(5, 9)
    expected = y.sign() * torch.log2(y.abs() + 1) / 3
    torch.testing.assert_close(exact.view(5, 9, 2)[..., 0], expected, atol=1e-15, rtol=0.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = pe.functional.relative_log_distances((3, 5), (9, 9), dtype=dtype)
        tolerance = {torch.float32: 1e-6}.get(dtype, 2.0**-8)
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=0.0)
    assert not pe.functional.relative_log_distances((1, 1)).any()
    refused((lambda: pe.functional.relative_log_distances((3, 5), dtype=torch.int64), TypeError, "like: expected float32"))  # fmt: skip


@pytest.mark.parametrize("class_token", [False, True])
def test_gradients_reach_the_table(class_token: bool) -> None:
    bias = pe.RelativePositionBias(HEADS, window=(2, 3), class_token=class_token, dtype=torch.float64)

    def resampled(weight: Tensor) -> Tensor:
        return torch.func.functional_call(bias, {"weight": weight}, (), {"window": (3, 2)})

    assert torch.autograd.gradcheck(resampled, bias.weight)
    bias().sum().backward()
    assert float(bias.weight.grad.sum()) == HEADS * (6 + class_token) ** 2


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"window": (4, 4)}, 16),
        ({"window": (3, 5), "class_token": True}, 16),
        ({"window": (4, 4), "mlp_dim": 8}, 16),
        ({"window": (2, 3, 2), "class_token": True}, 13),
    ],
)
def test_score_mod_of_a_window(options: dict[str, Any], tokens: int) -> None:
    bias = filled(pe.RelativePositionBias(HEADS, **options))
    query, key, value = torch.randn(3, 2, HEADS, tokens, 16)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, bias())
    found = flex_attention(query, key, value, score_mod=bias.score_mod())
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0.0)


@pytest.mark.parametrize("queries", [3, 7, 11])
def test_score_mod_of_distances(queries: int) -> None:
    bias = filled(pe.RelativePositionBias(HEADS, num_buckets=8, max_distance=6))
    query, key = torch.randn(1, HEADS, queries, 16), torch.randn(1, HEADS, 7, 16)
    for offset in (None, 2):
        expected = nn.functional.scaled_dot_product_attention(query, key, key, bias(queries, 7, query_offset=offset))
        score_mod = bias.score_mod(queries, 7, query_offset=offset)
        found = flex_attention(query, key, key, score_mod=score_mod)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0.0)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("window: expected the numbers of rows and columns", lambda: pe.RelativePositionBias(2, window=(0, 2))),
        ("window: expected one beside class_token", lambda: pe.RelativePositionBias(2, class_token=True)),
        ("class_token: expected False beside mlp_dim", lambda: pe.RelativePositionBias(2, window=(2, 2), class_token=True, mlp_dim=4)),
        ("pretrained_window: expected None without mlp_dim", lambda: pe.RelativePositionBias(2, window=(2, 2), pretrained_window=(2, 2))),
        ("mlp_dim: expected 0 or more", lambda: pe.RelativePositionBias(2, window=(2, 2), mlp_dim=-1)),
        ("resampling: expected 'bicubic' or 'bilinear'", lambda: pe.RelativePositionBias(2, window=(2, 2), resampling="area")),
        ("mlp_rule: expected 'swin' or 'cr', got 'sin'", lambda: pe.RelativePositionBias(2, window=(2, 2), mlp_dim=4, mlp_rule="sin")),
        ("mlp_rule: expected 'swin' without mlp_dim", lambda: pe.RelativePositionBias(2, window=(2, 2), mlp_rule="cr")),
        ("window: expected the numbers of rows and columns", lambda: pe.RelativePositionBias(2, window=(2, 2, 2), mlp_dim=4)),
        ("window: expected the numbers of rows and columns", lambda: pe.RelativePositionBias(2, window=(2, 2, 2)).table((3, 2, 2))),
        ("window: expected the numbers of", lambda: pe.functional.relative_window_bias(torch.zeros(8, 2), (2**20, 2**20, 2**20))),
        ("query_length: expected None for a window", lambda: pe.RelativePositionBias(2, window=(2, 2))(4)),
        ("query_length: expected a length", lambda: pe.RelativePositionBias(2)()),
        # 0 rows, and -8589934591, by products that wrap
        ("window: expected the numbers of rows and columns, each 1 to", lambda: pe.functional.relative_window_bias(torch.zeros(1, 2), (2**63 - 1, 2**32))),
        ("window: expected the numbers of rows and columns, each 1 to", lambda: pe.functional.relative_window_bias(torch.zeros(8, 2), (2**32, 2**31))),
        ("new_window: expected the numbers of rows and columns, each 1 to", lambda: pe.functional.relative_window_resample(torch.zeros(9, 2), (2, 2), (2**32, 2**31))),
        ("query_offset: expected -2^62 to 2^62", lambda: pe.functional.relative_bias(torch.zeros(32, 2), 4, 4, query_offset=-(2**63))),
        ("window: expected a bias with a window", lambda: pe.RelativePositionBias(2).table()),
        ("weight: expected 9 rows for the window", lambda: pe.functional.relative_window_bias(torch.zeros(8, 2), (2, 2))),
        ("weight: expected 12 rows for the window", lambda: pe.functional.relative_window_bias(torch.zeros(9, 2), (2, 2), class_token=True)),
        ("weight: expected 9 rows for the window", lambda: pe.functional.relative_window_resample(torch.zeros(10, 2), (2, 2), (3, 3))),
        ("new_window: expected the numbers of rows", lambda: pe.functional.relative_window_resample(torch.zeros(9, 2), (2, 2), (3,))),
        ("method: expected 'bicubic' or 'bilinear'", lambda: pe.functional.relative_window_resample(torch.zeros(9, 2), (2, 2), (3, 3), method="area")),
    ],
)  # fmt: skip
def test_errors(message: str, call: Callable[[], Any]) -> None:
    refused((call, ValueError, message))
