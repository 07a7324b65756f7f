"""One rule for positions in all families: no 16-bit floating numbers, and what to do instead.

bfloat16 cannot represent 257, nor float16 2049: a program that casts its inputs moves tokens.
"""

from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from support.refusals import refused
from torch import Tensor

X = torch.randn(2, 3, 8)
ROWS = torch.randn(2, 3, 2, 8)
SCORES = torch.randn(2, 2, 3, 3)
SPEC = pe.RotarySpec(8)
SINUSOID = pe.SinusoidalSpec(8)
SLOPES = pe.functional.alibi_slopes(2)


def cache(positions: Tensor, name: str) -> Any:
    tokens, slots = ROWS[0], torch.arange(3)
    if name == "mla_rotary_cache_":
        given = (tokens.clone(), tokens[:, 0], tokens[:, 1], torch.zeros(1, 4, 16), slots)
        return pe.functional.mla_rotary_cache_(*given, positions, spec=SPEC)
    caches = torch.zeros(2, 1, 4, 2, 8).unbind()
    given = (tokens.clone(), tokens.clone(), tokens, *caches, slots)
    return pe.functional.rotary_cache_(*given, positions, spec=SPEC)


# Each takes positions [seq]. Whether floating positions of 32 bits are accepted: True.
CALLS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "RotaryEmbedding": (lambda p: pe.RotaryEmbedding(8)(ROWS, positions=p), True),
    "rotate_": (lambda p: pe.RotaryEmbedding(8).rotate_(ROWS.clone(), positions=p), True),
    "rerotate_": (lambda p: pe.functional.rerotate_(ROWS.clone(), torch.arange(3), p, spec=SPEC), True),
    "rotary": (lambda p: pe.functional.rotary(ROWS, positions=p, spec=SPEC), True),
    "rotary_": (lambda p: pe.functional.rotary_(ROWS.clone(), positions=p, spec=SPEC), True),
    "rotary_packed": (lambda p: pe.functional.rotary_packed(torch.randn(2, 3, 24), 1, positions=p, spec=SPEC), True),
    "norm_rotary": (lambda p: pe.functional.norm_rotary(ROWS, positions=p, spec=SPEC), True),
    "norm_rotary_": (lambda p: pe.functional.norm_rotary_(ROWS.clone(), positions=p, spec=SPEC), True),
    "mla_rotary": (lambda p: pe.functional.mla_rotary(ROWS, ROWS[:, :, 0], positions=p, spec=SPEC), True),
    "rotary_cache_": (lambda p: cache(p, "rotary_cache_"), True),
    "mla_rotary_cache_": (lambda p: cache(p, "mla_rotary_cache_"), True),
    "cpp.RotaryEmbedding": (lambda p: pe.cpp.RotaryEmbedding(8)(ROWS, positions=p), True),
    "SinusoidalPositionalEmbedding": (lambda p: pe.SinusoidalPositionalEmbedding(8)(X, positions=p), True),
    "sinusoidal of two axes": (lambda p: pe.SinusoidalPositionalEmbedding(8, preset="mae")(X, torch.stack([p, p])), True),
    "SinusoidalPositionalEmbedding.encode": (pe.SinusoidalPositionalEmbedding(8).encode, True),
    "encode of two axes": (lambda p: pe.SinusoidalPositionalEmbedding(8, preset="mae").encode(torch.stack([p, p])), True),
    "sinusoidal": (lambda p: pe.functional.sinusoidal(X, p, spec=SINUSOID), True),
    "sinusoidal_encode": (lambda p: pe.functional.sinusoidal_encode(p, spec=SINUSOID), True),
    "cpp.SinusoidalPositionalEmbedding": (lambda p: pe.cpp.SinusoidalPositionalEmbedding(8).encode(p), True),
    "LearnedPositionalEmbedding": (lambda p: pe.LearnedPositionalEmbedding(9, 8)(X, p), False),
    "LearnedPositionalEmbedding.encode": (pe.LearnedPositionalEmbedding(9, 8).encode, False),
    "learned_add": (lambda p: pe.functional.learned_add(X, torch.randn(9, 8), p), False),
    "cpp.LearnedPositionalEmbedding": (lambda p: pe.cpp.LearnedPositionalEmbedding(9, 8)(X, p), False),
    "InputEmbedding": (lambda p: pe.InputEmbedding(5, 8, positions="learned", max_positions=9)(torch.ones(2, 3, dtype=torch.int64), positions=p), False),
    "query_positions": (lambda p: pe.ALiBi(2).softmax(SCORES, query_positions=p), False),
    "key_positions": (lambda p: pe.ALiBi(2).softmax(SCORES, key_positions=p), False),
    "alibi_bias": (lambda p: pe.functional.alibi_bias(SLOPES, 3, 3, query_positions=p, key_positions=p), False),
    "cpp.ALiBi": (lambda p: pe.cpp.ALiBi(2).softmax(SCORES, key_positions=p), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_16_bits_are_refused_with_the_remedy(name: str) -> None:
    call, floating = CALLS[name]
    call(torch.arange(3))
    call(torch.arange(3, dtype=torch.int32))
    for dtype, first in ((torch.bfloat16, 257), (torch.float16, 2049)):
        with pytest.raises(TypeError) as error:
            call(torch.arange(3).to(dtype))
        text = str(error.value)
        assert "positions: expected int32" in text
        assert f"cannot represent {first}" in text
        assert "keep positions out of the cast" in text
    if floating:
        call(torch.arange(3.0))
        call(torch.arange(3.0, dtype=torch.float64))
    else:
        refused((lambda: call(torch.arange(3.0)), TypeError, "positions: expected int32 or int64, got float32"))  # fmt: skip


@pytest.mark.parametrize("name", ["sinusoidal", "rotary"])
def test_the_same_on_meta_and_under_autocast(name: str) -> None:
    """A cast that autocast makes is one of the data: positions keep their type."""
    call, _ = CALLS[name]
    with torch.autocast("cpu", torch.bfloat16):
        call(torch.arange(3.0))
    with pytest.raises(TypeError, match="cannot represent 257"), torch.device("meta"):
        pe.functional.sinusoidal_encode(torch.empty(3, dtype=torch.bfloat16), spec=SINUSOID)
