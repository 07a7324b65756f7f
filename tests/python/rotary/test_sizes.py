"""Tests extreme sizes: 0 and 1 in every dimension, and beyond 32-bit indices and grids."""

import itertools

import posembed as pe
import pytest
import torch
from support.case import TOLERANCE, assert_close
from support.rotary import rotate


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_zero_and_one(layout: str, device: torch.device) -> None:
    for sizes in itertools.product((0, 1, 3), repeat=3):
        for head_dim, rotary_dim in ((1, 0), (2, 2), (3, 2), (5, 0)):
            spec = pe.RotarySpec(head_dim, rotary_dim=rotary_dim)
            shape = (*sizes[layout == "thd" :], head_dim)
            query = torch.randn(shape, device=device, dtype=torch.float64)
            wanted = rotate(query, spec.text, layout=layout, offset=2)
            options = {"spec": spec, "layout": layout, "offset": 2}
            assert_close(pe.functional.rotary(query, **options), wanted, 1e-14)
            out = torch.empty_like(query)
            assert_close(pe.functional.rotary(query, out=out, **options), wanted, 1e-14)
            pe.functional.rotary_(query, **options)
            assert_close(query, wanted, 1e-14)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_maps_of_nothing(layout: str) -> None:
    """A merged size of 0 does not determine the sizes it came from."""
    rope = pe.RotaryEmbedding(4, layout=layout)
    for shape in ((3, 0, 2, 5, 4), (3, 2, 0, 5, 4), (3, 2, 5, 0, 4), (0, 2, 3, 5, 4)):
        assert torch.func.vmap(rope)(torch.randn(shape)).shape == shape
    query = torch.randn(2, 0, 5, 4)
    assert torch.func.jacrev(rope)(query).shape == query.shape * 2
    slopes = pe.functional.alibi_slopes(4).expand(0, 4)
    assert torch.func.vmap(lambda s: pe.functional.alibi_bias(s, 2, 3))(slopes).shape[0] == 0


@pytest.mark.parametrize("shape", [(70_001, 1, 4), (1, 70_001, 4)], ids=["tokens", "heads"])
def test_more_than_a_grid_dimension(shape: tuple[int, ...], device: torch.device) -> None:
    query = torch.randn(shape, device=device)
    rope = pe.RotaryEmbedding(4, layout="thd")
    wanted = rotate(query.double(), rope.spec.text, layout="thd", offset=9)
    assert_close(rope(query, offset=9), wanted, TOLERANCE[torch.float32])
    key = query[:, :1].clone()
    assert_close(rope(query, key, offset=9)[1], wanted[:, :1], TOLERANCE[torch.float32])


@pytest.mark.no_stand_in
def test_more_than_two_billion_elements(device: torch.device) -> None:
    """Four gibibytes of addresses, of which only three rows are touched; all other tokens stay."""
    tokens = 2**24 + 3
    query = torch.empty(tokens, 1, 128, dtype=torch.bfloat16, device=device)
    positions = torch.full((tokens,), -1, dtype=torch.int32, device=device)
    positions[-3:] = torch.tensor([5, 100, 3])
    query[-3:] = last = torch.randn(3, 1, 128, device=device).bfloat16()
    rope = pe.RotaryEmbedding(128, layout="thd")
    rope.rotate_(query, positions=positions)
    assert torch.equal(query[-3:], rope(last, positions=positions[-3:]))
