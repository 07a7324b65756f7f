"""Tests of positions of grids, of packed documents and of their parts."""

from typing import Any

import numpy as np
import posembed as pe
import pytest
import torch
from support.refusals import refused


def test_grid_of_every_order_and_size() -> None:
    for order in ("thw", "hw", "wh", "w", "wth"):
        for sizes in ((2, 3, 4), (1, 1, 1), (1, 0, 3), (0, 2, 2)):
            lines = {"t": range(sizes[0]), "h": range(sizes[1]), "w": range(sizes[2])}
            tokens = [{"t": t, "h": h, "w": w} for t in lines["t"] for h in lines["h"] for w in lines["w"]]
            expected = torch.tensor([[token[axis] for token in tokens] for axis in order])
            result = pe.positions.grid(*sizes, order=order)
            assert result.dtype == torch.int64
            assert torch.equal(result, expected.long())


def test_squares_are_those_of_qwen2_vl() -> None:
    modeling = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    expected = modeling.get_vision_position_ids(torch.tensor([[2, 4, 6]]), 2)
    assert torch.equal(pe.positions.grid(2, 4, 6, order="hw", merge=2).T, expected)


def test_packed_grids_are_those_of_vision_towers() -> None:
    utilities = pytest.importorskip("transformers.vision_utils")
    generator = torch.Generator().manual_seed(0)
    for merge in (1, 2, 3):
        squares = torch.randint(0, 4, (60, 3), generator=generator)
        squares[::5, 0] = 1
        for count in (1, 2, 30, 60):
            grids = squares[:count] * torch.tensor([1, merge, merge])
            # transformers divides by the sizes of pictures without tokens.
            shown = grids[grids.prod(1) > 0]
            expected = utilities.get_vision_position_ids(shown, merge, True) if len(shown) else None
            found = pe.positions.packed_grids(grids, order="thw", merge=merge)
            assert found.dtype == torch.int64
            assert found.shape == (3, grids.prod(1).sum())
            assert expected is None or torch.equal(found.T, expected)
            columns = pe.positions.packed_grids(grids.int(), order="w", merge=merge)
            assert torch.equal(columns, found[2:])
    assert pe.positions.packed_grids(torch.zeros(0, 3).long()).shape == (2, 0)
    flat = torch.tensor([[2, 4], [1, 3]])  # height and width of single frames
    timed = torch.tensor([[1, 2, 4], [1, 1, 3]])
    assert torch.equal(pe.positions.packed_grids(flat), pe.positions.packed_grids(timed))


def test_packed_grids_compile_without_reading_them() -> None:
    torch._dynamo.reset()
    function = torch.compile(pe.positions.packed_grids, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ([[1, 2, 4], [3, 4, 2]], [[2, 6, 6]], [[1, 2, 2]] * 3):
        grids = torch.tensor(sizes)
        tokens = int(grids.prod(1).sum())
        found = function(grids, merge=2, num_tokens=tokens)
        assert torch.equal(found, pe.positions.packed_grids(grids, merge=2))
        # What does not fit becomes positions that rotations reject.
        assert (function(grids, merge=2, num_tokens=tokens + 1) < -1).all()
    assert (function(torch.tensor([[1, 4, 1]]), merge=2, num_tokens=4) < -1).all()
    wraps = torch.tensor([[2**32, 2**32, 2**32], [1, 2, 2]])
    assert (function(wraps, merge=2, num_tokens=4) < -1).all()


@pytest.mark.parametrize(
    ("grids", "options", "message"),
    [
        (torch.tensor([[1, 4]]), {"merge": 2}, "merge 2 divides, and no size below 0, got 1 x 4"),
        (torch.tensor([[1, 2, 2], [1, 4, -4]]), {"merge": 2}, "got 4 x -4 for picture 1"),
        (torch.tensor([[1, 2, 2]]), {"num_tokens": 5}, "grids: expected 5 tokens, num_tokens, got 4"),
        (torch.tensor([[1, 2, 2]]), {"num_tokens": -1}, "num_tokens: expected 0 to"),
        (torch.tensor([[1, 2, 2]]), {"merge": 0}, "merge: expected 1 or more, got 0"),
        (torch.zeros(1, 3).long(), {"merge": 2**32}, "merge: expected 0 to"),
        # 4 tokens, by products that wrap
        (torch.tensor([[2**32, 2**32, 2**32], [1, 2, 2]]), {"num_tokens": 4}, "grids: expected fewer than 2^53 tokens"),
        (torch.tensor([[2**31, 2**32, 1], [2**31, 2**32, 1], [1, 2, 2]]), {"num_tokens": 4}, "grids: expected fewer than 2^53 tokens"),
        (torch.tensor([[1, 2, 2]]), {"order": "hh"}, "order: expected 't', 'h' and 'w'"),
        (torch.tensor([1, 2, 2]), {}, r"grids: expected \[items, 3\] or \[items, 2\], got \[3\]"),
    ],
)  # fmt: skip
def test_packed_grids_refuse(grids: torch.Tensor, options: dict[str, Any], message: str) -> None:
    refused((lambda: pe.positions.packed_grids(grids, **options), ValueError, message))
    refused((lambda: pe.positions.packed_grids(grids.float()), TypeError, "grids: expected int32 or int64, got float32"))  # fmt: skip


def test_floating_grids() -> None:
    centred = pe.positions.grid(1, 4, 3, centred=True, order="hw")
    assert centred.dtype == torch.float32
    assert centred[0, ::3].tolist() == [-1.5, -0.5, 0.5, 1.5]
    assert centred[1, :3].tolist() == [-1.0, 0.0, 1.0]
    scaled = pe.positions.grid(3, 1, 1, scale=(0.5, 1, 1), offset=np.int64(10), order="t")
    assert scaled.tolist() == [[10.0, 10.5, 11.0]]
    # An integer -1 would leave tokens unrotated.
    below = pe.positions.grid(1, 4, 1, offset=(0, -2, 0), order="h")
    assert below.dtype == torch.float32
    rope = pe.RotaryEmbedding(8, layout="thd")
    query = torch.ones(4, 1, 8)
    assert not torch.equal(rope(query, positions=below[0])[1], query[1])
    assert pe.positions.grid(1, 4, 1, offset=(0, 2, 0), order="h").tolist() == [[2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": -1}, "height: expected 0 to"),
        ({"order": "hx"}, "order: expected 't', 'h' and 'w'"),
        ({"order": ""}, "order: expected 't', 'h' and 'w'"),
        ({"merge": 3}, "merge: expected a divisor of height 4"),
        ({"scale": (1, 2)}, "scale: expected a number, or one each"),
        ({"offset": float("nan")}, "offset: expected finite numbers"),
        ({"offset": 1e300}, "offset: expected at most"),
        ({"offset": (0, 2.0**63, 0)}, "offset: expected at most"),
        ({"offset": 1e39, "centred": True}, "offset: expected at most"),
        ({"scale": 1e38}, "scale: expected at most"),
        ({"merge": 2**32}, "merge: expected 0 to"),
        ({"frames": 2**31 - 1, "height": 2**31 - 1, "width": 2**31 - 1}, "frames: expected"),
    ],
)  # fmt: skip
def test_grid_refuses(options: dict[str, object], message: str) -> None:
    refused((lambda: pe.positions.grid(**{"frames": 1, "height": 4, "width": 4, **options}), ValueError, message))  # fmt: skip


def test_packed(device: torch.device) -> None:
    lengths = [3, 0, 5, 1]
    expected = torch.cat([torch.arange(length) for length in lengths])
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0)
    for dtype in (torch.int32, torch.int64):
        assert pe.positions.packed(boundaries.to(dtype)).tolist() == expected.tolist()
        assert pe.positions.packed(boundaries.to(dtype), num_tokens=9).tolist() == expected.tolist()
    documents = torch.tensor([[4, 4, 7, 7, 7, -1], [1, 2, 2, 1, 1, 1]], device=device)
    result = pe.positions.packed(documents=documents)
    assert result.tolist() == [[0, 1, 0, 1, 2, -1], [0, 0, 1, 0, 1, 2]]
    assert pe.positions.packed(torch.tensor([0], device=device)).numel() == 0


def test_zigzag_covers_each_document_once(device: torch.device) -> None:
    world_size, lengths = 3, [6, 18, 0, 12]
    boundaries = torch.tensor([0, *lengths], device=device, dtype=torch.int32).cumsum(0).int()
    parts = [pe.positions.zigzag(boundaries, rank, world_size) for rank in range(world_size)]
    assert torch.cat([part.indices for part in parts]).sort()[0].tolist() == list(range(36))
    whole = pe.positions.packed(boundaries)
    for rank, part in enumerate(parts):
        assert torch.equal(part.positions, whole[part.indices])
        assert part.cu_seqlens.tolist() == [0, 2, 8, 8, 12]
        assert part.cu_seqlens.dtype == torch.int32
        for number, length in enumerate(lengths):  # each document: chunks r and 2n - 1 - r
            chunks = torch.arange(length).chunk(2 * world_size) if length else []
            mine = [chunks[rank], chunks[2 * world_size - 1 - rank]] if length else []
            own = part.positions[part.cu_seqlens[number] : part.cu_seqlens[number + 1]]
            assert own.tolist() == [place for chunk in mine for place in chunk.tolist()]


def test_zigzag_of_one_document_is_that_of_context_part() -> None:
    from posembed.integrations.distributed import context_part

    class Mesh:
        ndim, device_type = 1, "cpu"

        def size(self) -> int:
            return 2

    for rank in range(2):
        part = context_part(16, Mesh(), zigzag=True, rank=rank)  # type: ignore[arg-type]
        assert torch.equal(pe.positions.zigzag(16, rank, 2).indices, part.indices)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 6], "multiples of 2 . world_size, 4, got 6 for document 0"),
        ([0, 8, 4], "expected numbers that do not decrease"),
        ([4, 8], "expected 0 to 8, got 4 to 8"),
        ([], r"expected \[documents \+ 1\]"),
    ],
)
def test_zigzag_refuses(boundaries: list[int], message: str) -> None:
    with pytest.raises(ValueError, match="cu_seqlens: .*" + message):
        pe.positions.zigzag(torch.tensor(boundaries, dtype=torch.int64), 0, 2)


def test_other_refusals() -> None:
    boundaries = torch.tensor([0, 4])
    refused(
        (lambda: pe.positions.zigzag(boundaries, 2, 2), ValueError, "rank: expected 0 to 1, got 2"),
        (lambda: pe.positions.packed(boundaries.float()), TypeError, "cu_seqlens: expected int32 or int64"),
        (lambda: pe.positions.packed(boundaries, num_tokens=5), ValueError, "cu_seqlens: expected 0 to 5, got 0 to 4"),
        (pe.positions.packed, ValueError, "expected either cu_seqlens or documents"),
    )  # fmt: skip


def test_compiled_for_every_length() -> None:
    def run(boundaries: torch.Tensor, documents: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        return [
            pe.positions.packed(boundaries, num_tokens=tokens),
            pe.positions.packed(documents=documents),
            *pe.positions.zigzag(boundaries, 1, 2, num_tokens=tokens),
            pe.positions.grid(1, tokens, 3, centred=True),
        ]

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([4, 8], [12, 0, 4]):
        boundaries = torch.tensor([0, *lengths]).cumsum(0)
        arguments = boundaries, torch.randint(0, 2, (2, sum(lengths))), sum(lengths)
        for result, wanted in zip(compiled(*arguments), run(*arguments), strict=True):
            assert torch.equal(result, wanted)
