"""Tests T5's relative position bias beside transformers' programs."""

import posembed as pe
import pytest
import torch
from support.refusals import refused

DISTANCES = torch.arange(-3000, 3001)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (64, 800), (8, 20), (320, 900)])
def test_buckets_are_those_of_t5(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    expected = t5.T5Attention._relative_position_bucket(DISTANCES, bidirectional, num_buckets, max_distance)
    found = pe.functional.relative_buckets(
        DISTANCES, num_buckets, max_distance=max_distance, bidirectional=bidirectional
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("decoder", [False, True])
def test_the_bias_of_a_t5_layer(decoder: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(num_layers=1, num_heads=4, d_model=16, d_kv=4, d_ff=8)
    config.is_decoder = decoder
    module = pytest.importorskip("transformers.models.t5.modeling_t5")
    layer = module.T5Attention(config, has_relative_attention_bias=True)
    bias = pe.RelativePositionBias(4, bidirectional=not decoder)
    bias.load_state_dict(layer.relative_attention_bias.state_dict())
    assert torch.equal(bias(9).unsqueeze(0), layer.compute_bias(9, 9))


def test_berts_rows_are_those_of_its_distances() -> None:
    """As BERT's position_embedding_type "relative_key" indexes its table: query - key."""
    positions = torch.arange(7)
    found = pe.functional.relative_buckets(positions - positions.unsqueeze(1), 2 * 5 - 1, kind="bert")
    assert torch.equal(found, (positions.unsqueeze(1) - positions).clamp(-4, 4) + 4)


def test_a_decoding_step_is_the_last_row() -> None:
    bias = pe.RelativePositionBias(2, bidirectional=False)
    assert torch.equal(bias(1, 9), bias(9)[:, -1:])
    assert torch.equal(bias(2, 9, query_offset=3), bias(9)[:, 3:5])


def test_packed_documents_padding_and_offsets() -> None:
    bias = pe.RelativePositionBias(3)
    packed = bias(9, cu_seqlens=torch.tensor([0, 4, 9]))
    expected = torch.full((3, 9, 9), -torch.inf)
    expected[:, :4, :4], expected[:, 4:, 4:] = bias(4), bias(5)
    assert torch.equal(packed, expected)
    shared = bias(9, cu_seqlens=torch.tensor([0, 4, 9]), apply_mask=False)
    assert torch.equal(shared, expected.masked_fill(expected.isinf(), 0))

    mask = torch.arange(6) >= torch.tensor([[2], [0]])
    padded = bias(6, attention_mask=mask)
    assert torch.equal(padded[0, :, 2:, 2:], bias(4))
    assert torch.equal(padded[1], bias(6))
    assert (padded[0, :, :, :2] == -torch.inf).all()

    visible = torch.tensor([0, 2, 3])
    holed = bias(4, attention_mask=torch.tensor([1, 0, 1, 1]))
    assert torch.equal(holed[:, visible][:, :, visible], bias(3))

    steps = bias(1, 9, query_offset=torch.tensor([8, 3]))
    assert torch.equal(steps[:, :, 0], torch.stack([bias(9)[:, 8], bias(9)[:, 3]]))
    positions = torch.tensor([3, 0, 40])
    found = bias(3, query_positions=positions, key_positions=positions)
    assert torch.equal(found, bias(41)[:, positions][:, :, positions])
    found.sum().backward()
    assert float(bias.weight.grad.sum()) == 27


def test_a_band_has_no_bias_outside() -> None:
    bias = pe.RelativePositionBias(2, num_buckets=3, buckets="band")
    apart = (torch.arange(5) - torch.arange(5).unsqueeze(1)).abs() > 1
    assert torch.equal(bias(5) == 0, apart.expand(2, 5, 5))
    assert torch.equal(bias(5, key_positions=torch.arange(5)), bias(5))


def test_empty_lengths() -> None:
    bias = pe.RelativePositionBias(3)
    for queries, keys in ((0, 0), (0, 5), (5, 0)):
        assert bias(queries, keys).shape == (3, queries, keys)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "num_heads: expected 0 or more", lambda: pe.RelativePositionBias(-1)),
        (ValueError, "an odd number for kind 'bert'", lambda: pe.RelativePositionBias(1, buckets="bert")),
        (ValueError, "buckets: expected 't5', 'bert', 'clipped', 'deberta', 'band' or 'grid', got 'log'", lambda: pe.RelativePositionBias(1, buckets="log")),
        (ValueError, r"weight: expected \[num_buckets, num_heads\]", lambda: pe.functional.relative_bias(torch.ones(32), 1, 1)),
        (TypeError, "weight: expected float32", lambda: pe.functional.relative_bias(torch.ones(32, 1).long(), 1, 1)),
        (TypeError, "distances: expected int32 or int64", lambda: pe.functional.relative_buckets(torch.ones(3))),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], message: str, call) -> None:
    refused((call, error, message))
