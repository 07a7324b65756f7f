"""Tests the rows of relative positions beside the programs that models have."""

import posembed as pe
import pytest
import torch
from support.refusals import refused

AT = torch.arange(7)
DISTANCES = AT - AT.unsqueeze(1)  # key minus query
BACK = -DISTANCES
rows_of = pe.functional.relative_rows
buckets = pe.functional.relative_buckets


@pytest.mark.parametrize(
    ("rule", "count", "bidirectional", "expected"),
    [
        ("clipped", 7, True, DISTANCES.clamp(-3, 3) + 3),
        ("clipped", 4, False, DISTANCES.clamp(-3, 0) + 3),
        ("bert", 7, True, BACK.clamp(-3, 3) + 3),
        ("bert", 4, False, BACK.clamp(0, 3)),
        ("grid", 5, True, BACK.clamp(-2, 2) + 2),
        ("band", 4, False, torch.where((BACK >= 0) & (BACK < 4), BACK, -1)),
        ("band", 5, True, torch.where(BACK.abs() <= 2, BACK + 2, -1)),
    ],
)
def test_rules_of_one_row_for_each_distance(rule, count, bidirectional, expected) -> None:
    assert torch.equal(rows_of(7, 7, count, rule=rule, bidirectional=bidirectional), expected)


@pytest.mark.parametrize(("buckets_", "longest"), [(256, 512), (32, 128), (6, 9), (3, 5)])
def test_debertas_buckets_are_those_of_transformers(buckets_: int, longest: int) -> None:
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    distances = torch.arange(-3000, 3001)
    theirs = deberta.make_log_bucket_position(-distances, buckets_, longest).long()
    expected = (theirs + buckets_).clamp(0, 2 * buckets_ - 1)
    found = buckets(distances, 2 * buckets_, kind="deberta", max_distance=longest)
    assert torch.equal(found, expected)


def test_positions_documents_masks_and_offsets() -> None:
    cu_seqlens = torch.tensor([0, 3, 7])
    same = torch.bucketize(AT, cu_seqlens[1:], right=True)
    other = same != same.unsqueeze(1)
    packed = rows_of(7, 7, 7, cu_seqlens=cu_seqlens)
    assert torch.equal(packed, (DISTANCES.clamp(-3, 3) + 3).masked_fill(other, -2))
    unmasked = rows_of(7, 7, 7, cu_seqlens=cu_seqlens, apply_mask=False)
    assert torch.equal(unmasked == -1, other)

    positions = torch.tensor([[0, 2, 9], [5, 4, 3]])
    found = rows_of(3, 3, 41, rule="bert", query_positions=positions, key_positions=positions)
    expected = positions.unsqueeze(2) - positions.unsqueeze(1) + 20
    assert torch.equal(found, expected)

    offsets = rows_of(1, 7, 21, rule="bert", query_offset=torch.tensor([6, 4]))
    assert torch.equal(offsets, (torch.tensor([6, 4]).view(2, 1, 1) - AT) + 10)

    mask = torch.tensor([[False, False, True, True], [True] * 4])
    padded = rows_of(4, 4, 9, rule="bert", attention_mask=mask, positions_from_mask=True)
    assert torch.equal(padded[0, 2:, 2:], torch.tensor([[4, 3], [5, 4]]))
    assert (padded[0, :, :2] == -2).all()

    causal = rows_of(7, 7, 7, causal=True)
    assert torch.equal(causal, (DISTANCES.clamp(-3, 3) + 3).masked_fill(DISTANCES > 0, -2))


def test_axes_follow_one_another_and_a_grid_has_one_table() -> None:
    cells = torch.cartesian_prod(torch.arange(2), torch.arange(3)).T
    positions = {"query_positions": cells, "key_positions": cells}
    y, x = cells.unsqueeze(2) - cells.unsqueeze(1)
    added = rows_of(6, 6, (3, 5), rule="bert", **positions)
    assert torch.equal(added, torch.stack([y + 1, x + 2 + 3]).unsqueeze(1))
    swin = rows_of(6, 6, (3, 5), rule="grid", **positions)
    assert torch.equal(swin, (y + 1) * 5 + x + 2)
    ones = torch.arange(15.0).unsqueeze(1)
    bias = pe.functional.relative_window_bias(ones, (2, 3))[0]
    assert torch.equal(swin, bias.long())
    video = torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(2)).T
    three = {"query_positions": video, "key_positions": video}
    t, h, w = video.unsqueeze(2) - video.unsqueeze(1)
    found = rows_of(8, 8, (3, 3, 3), rule="grid", **three)
    assert torch.equal(found, (t + 1) * 9 + (h + 1) * 3 + w + 1)


def test_errors() -> None:
    cells = torch.zeros(3, 4).long()
    refused(
        (lambda: rows_of(4, 4, 6), ValueError, "num_buckets: expected an odd number for kind 'clipped', got 6"),
        (lambda: rows_of(4, 4, 7, rule="deberta"), ValueError, "num_buckets: expected an even number, 4 or more, for kind 'deberta', got 7"),
        (lambda: rows_of(4, 4, 8, rule="deberta", max_distance=3), ValueError, "max_distance: expected more than 3"),
        (lambda: rows_of(4, 4, 8, rule="deberta", bidirectional=False), ValueError, "bidirectional: expected True"),
        (lambda: rows_of(4, 4, ()), ValueError, "num_buckets: expected a number for each axis, got none"),
        (lambda: rows_of(4, 4, (3, 3)), ValueError, "query_positions: expected [2, length]"),
        (lambda: rows_of(4, 4, (3, 3), query_positions=cells, key_positions=cells), ValueError, "query_positions: expected [2, length]"),
        (lambda: rows_of(4, 4, 3, query_positions=cells[0].float()), TypeError, "query_positions: expected int32 or int64, got float32"),
        (lambda: rows_of(4, 4, 3, mask=cells), TypeError, "mask"),
        (lambda: rows_of(4, 4, 3, rule="log"), ValueError, "kind: expected 't5', 'bert', 'clipped', 'deberta', 'band' or 'grid', got 'log'"),
    )  # fmt: skip
