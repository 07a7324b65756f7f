"""Planted mistakes are named, alone and two at once, and what is no known mistake is not guessed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.diagnosis import Recorded
from published.rotary_programs import (
    CHATGLM,
    COGVIDEO,
    GEMMA3,
    LLAMA,
    LLAMA31,
    QWEN2_VL,
    QWEN3_VL,
    QWEN_YARN,
    WAN,
    adjacent,
    axial,
    by,
    deepseek_yarn,
    halves,
    meta_scaled,
    mrope,
    repeated,
    series,
)
from support.refusals import refused
from torch import Tensor

Program = Callable[[Tensor, Tensor], Any]
PLAIN, SCALED = series(128, 5e5), meta_scaled(series(128, 5e5), 8, 8192)
YARN, FACTOR = deepseek_yarn(128, 1e6, 4.0, 32768), pe.YarnScaling(4.0, 32768)
FACTOR = pe.RotarySpec(128, scaling=FACTOR).attention_factor
DYNAMIC = {"model_type": "llama", "head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 2048, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}  # fmt: skip
LINEAR2 = {"model_type": "llama", "head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}  # fmt: skip
RIGHT = by(SCALED, halves)


def at(program: Program, change: Callable[[Tensor], Tensor]) -> Program:
    """The program at other positions."""
    return lambda x, positions: program(x, change(positions))


def window(program: Program, start: int) -> Program:
    """Rotates only the components from ``start`` on."""
    return lambda x, positions: torch.cat((x[..., :start], program(x[..., start:], positions)), -1)


def in_16_bits(frequencies: Tensor, dtype: torch.dtype = torch.bfloat16) -> Program:
    """All numbers of the angle have the dtype."""

    def program(x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.outer(positions.to(dtype), frequencies.to(dtype))
        return halves(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))

    return program


def rounded_tables(x: Tensor, positions: Tensor) -> Tensor:
    angles = torch.outer(positions.float(), SCALED)
    return halves(x, angles.cos().bfloat16().float(), angles.sin().bfloat16().float())


def short(rows: int) -> Program:
    """A table that raises beyond its end."""
    angles = torch.outer(torch.arange(rows).float(), SCALED)
    return lambda x, positions: halves(x, angles.cos()[positions], angles.sin()[positions])


def twice(program: Program) -> Program:
    return lambda x, positions: program(program(x, positions), positions)


def dynamic(length: Callable[[int], int]) -> Program:
    """Frequencies by the length of the call, which may be taken wrong."""

    def program(x: Tensor, positions: Tensor) -> Tensor:
        tokens = max(length(int(positions.max()) + 1), 2048)
        base = 1e4 * (4.0 * tokens / 2048 - 3) ** (64 / 62)
        return by(series(64, base), halves)(x, positions)

    return program


ALIKE = {"alike": True}  # each of the names is a mistake with the same outputs
# A mistake, or two; the configuration; options; a program that makes it.
PLANTED: list[tuple[tuple[str, ...], Any, dict[str, Any], Program]] = [
    (("scaling ignored",), LLAMA31, {}, by(PLAIN, halves)),
    (("scaling ignored",), QWEN_YARN, {}, by(series(128, 1e6), halves)),
    (("frequencies not scaled, though the attention factor is there",), QWEN_YARN, {}, by(series(128, 1e6), halves, scale=FACTOR)),
    (("all frequencies divided by 4, as linear scaling does",), QWEN_YARN, {}, by(series(128, 1e6) / 4, halves)),
    (("theta ignored, 10,000 instead",), LLAMA, {}, by(series(128, 1e4), halves)),
    (("theta is 1e+06, not 500000",), LLAMA, {}, by(series(128, 1e6), halves)),
    (("all frequencies divided by 4",), LLAMA, {}, by(PLAIN / 4, halves)),
    (("turned twice",), QWEN_YARN, {}, twice(by(YARN, halves, scale=FACTOR))),
    (("not turned at all",), LLAMA, {}, lambda x, positions: x),
    (("pairs interleaved (2i, 2i + 1), not split in halves",), LLAMA31, {}, by(SCALED, adjacent)),
    (("pairs split in halves, not interleaved (2i, 2i + 1)",), COGVIDEO, {}, axial([16, 24, 24], 1e4, halves)),
    (("turned backwards",), LLAMA31, {}, by(-SCALED, halves)),
    (("attention factor missing",), QWEN_YARN, {}, by(YARN, halves)),
    (("attention factor applied twice",), QWEN_YARN, {}, by(YARN, halves, scale=FACTOR**2)),
    (("frequencies rounded to 16 bits (bfloat16)",), LLAMA31, {}, by(SCALED.bfloat16().float(), halves)),
    (("frequencies rounded to 16 bits (float16)",), LLAMA, {}, by(PLAIN.half().float(), halves)),
    (("frequencies rounded to 16 bits (bfloat16)",), LLAMA31, {"dtype": torch.bfloat16}, by(SCALED.bfloat16().float(), lambda x, *t: halves(x.float(), *t).to(x.dtype))),
    (("positions rounded to 16 bits (bfloat16)",), LLAMA31, {}, at(RIGHT, lambda p: p.bfloat16())),
    (("positions, frequencies, angles, cosines and sines rounded to 16 bits (bfloat16)",), LLAMA, {}, in_16_bits(PLAIN)),
    (("cosines and sines rounded to 16 bits (bfloat16)",), LLAMA31, {}, rounded_tables),
    (("partial window at the wrong end: the last 64 components, not the first",), CHATGLM, {}, window(repeated(64), 64)),
    (("the whole head rotates, not 64 components",), CHATGLM, {}, repeated(128)),
    (("theta is 100, not 10000", "frequencies of 128 components, not of the 64 that rotate"), CHATGLM, ALIKE, by(series(128)[:32], adjacent, width=64)),
    (("axes exchanged: (0, 2, 1), not in order",), WAN, {}, at(axial([44, 42, 42], 1e4, adjacent), lambda p: p[[0, 2, 1]])),
    (("all pairs turn by the first axis",), QWEN2_VL, {}, at(mrope([16, 24, 24], 1e6, in_turns=False), lambda p: p[[0, 0, 0]])),
    (("pairs of an axis lie together, not in turns",), QWEN3_VL, {}, mrope([24, 20, 20], 1e6, in_turns=False)),
    (("positions off by one: late",), LLAMA31, {}, at(RIGHT, lambda p: p + 1)),
    (("positions off by one: early",), LLAMA31, {}, at(RIGHT, lambda p: p - 1)),
    (("table too short: 5000 rows, the last stands for later positions",), LLAMA31, {}, at(RIGHT, lambda p: p.clamp(max=4999))),
    (("table too short: 5000 rows, which begin again for later positions",), LLAMA31, {}, at(RIGHT, lambda p: p % 5000)),
    (("rotates as layers of kind 'sliding_attention' do",), GEMMA3, {"layer_type": "full_attention"}, by(series(256, 1e4), halves)),
    (("scaling ignored", "scaling by 8192 as the original length, not 2048", "frequencies of the original length at every length"), DYNAMIC, {"max_position": 8191, **ALIKE}, dynamic(lambda n: 2048)),
    (("frequencies change one position late",), DYNAMIC, {"max_position": 8191}, dynamic(lambda n: n - 1)),
    # Two at once.
    (("theta ignored, 10,000 instead", "scaling ignored"), LLAMA31, {}, by(series(128, 1e4), halves)),
    (("pairs interleaved (2i, 2i + 1), not split in halves", "attention factor missing"), QWEN_YARN, {}, by(YARN, adjacent)),
    (("turned backwards", "positions off by one: late"), LLAMA31, {}, at(by(-SCALED, halves), lambda p: p + 1)),
    (("turned twice", "scaling ignored"), LLAMA31, {}, twice(by(PLAIN, halves))),
    (("partial window at the wrong end: the last 64 components, not the first", "pairs split in halves, not interleaved (2i, 2i + 1)"), CHATGLM, {}, window(by(series(64), halves), 64)),
    (("pairs interleaved (2i, 2i + 1), not split in halves", "table too short: 5000 rows, the last stands for later positions"), LLAMA31, {}, at(by(SCALED, adjacent), lambda p: p.clamp(max=4999))),
]  # fmt: skip


@pytest.mark.parametrize(("mistakes", "config", "options", "program"), PLANTED, ids=[" and ".join(row[0]) for row in PLANTED])  # fmt: skip
def test_mistakes_are_named(mistakes: Any, config: Any, options: Any, program: Program) -> None:
    options = dict(options)
    alike = options.pop("alike", False)
    found = pe.diagnose(program, config, heads=2, **options)
    assert found.verdict == "wrong"
    assert found.mistakes == (tuple((name,) for name in mistakes) if alike else (mistakes,))
    assert str(found).startswith((", or " if alike else " and ").join(mistakes))
    assert found.worst.error > found.worst.bound


def test_a_table_that_raises() -> None:
    found = pe.diagnose(short(5000), LLAMA31, heads=2)
    ((mistake,),) = found.mistakes
    assert mistake.startswith("table too short: position 5000 raises IndexError: ")
    both = pe.diagnose(lambda x, p: short(5000)(twice(RIGHT)(x, p), p), LLAMA, heads=2)
    assert both.verdict == "unknown"
    assert any(note.startswith("positions from 5000 on are not compared") for note in both.notes)


def test_mistakes_that_fit_alike_are_all_named() -> None:
    """Twice half the frequency is the frequency."""
    found = pe.diagnose(by(series(64), halves), LINEAR2, heads=2)
    assert {names[0] for names in found.mistakes} >= {"scaling ignored", "turned twice"}
    assert "scaling ignored, or " in found.headline() or ", or scaling ignored" in found.headline()


@pytest.mark.parametrize(
    ("program", "read"),
    [
        (by(series(128, 5e5) ** 1.1 + 0.01, halves), {"read radians per position": "1.01, "}),
        (by(SCALED, lambda x, c, s: torch.cat((x[..., :64] * c + x[..., 64:] * s, x[..., 64:] * c + x[..., :64] * s), -1)), {"read amplitude": "1 to 1"}),
        (lambda x, p: RIGHT(x / x.norm(dim=-1, keepdim=True), p), {"read": "outputs for random vectors are not sums"}),
        (lambda x, p: RIGHT(x, p) * 1.001, {"read amplitude": "1.001 to 1.001"}),
        (lambda x, p: RIGHT(x, p) * (1.0 if (x != 0).all() else 1.01), {"read amplitude": "1.01 to 1.01"}),
        (lambda x, p: x * torch.nan, {}),
    ],
)  # fmt: skip
def test_what_is_unknown_is_not_guessed(program: Program, read: dict[str, str]) -> None:
    found = pe.diagnose(program, LLAMA31, heads=2)
    assert str(found).startswith("unknown: ")
    assert (found.mistakes, found.right) == ((), False)
    assert all(str(found.read[name]).startswith(text) for name, text in read.items())


def test_positions_are_on_both_sides_of_changes() -> None:
    """And at 0, at odd numbers beyond 8 bits, and at the last position; other ones on each axis."""
    seen: list[Tensor] = []

    def program(x: Tensor, positions: Tensor) -> Tensor:
        seen.append(positions)
        return x

    scaling = {**LLAMA31["rope_scaling"], "original_max_position_embeddings": 5000}
    pe.diagnose(program, {**LLAMA31, "rope_scaling": scaling}, max_position=100000)
    assert {0, 1, 4999, 5000, 5001, 65537 - 2, 100000} <= set(seen[0].tolist())
    pe.diagnose(program, {**DYNAMIC, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, max_position=9999)  # fmt: skip
    lengths = {int(positions.max()) + 1 for positions in seen}
    assert {2048, 2049, 4096, 10000} <= lengths
    pe.diagnose(program, WAN)
    assert seen[-2].shape[0] == 3
    assert all(not torch.equal(seen[-2][0], seen[-2][axis]) for axis in (1, 2))


def test_heads_that_differ() -> None:
    def program(x: Tensor, positions: Tensor) -> Tensor:
        out = RIGHT(x, positions)
        out[:, 2] = by(SCALED, adjacent)(x[:, 2:3], positions)[:, 0]
        return out

    found = pe.diagnose(program, LLAMA31, heads=4)
    assert found.headline() == "heads differ"
    assert found.heads[0] == found.heads[3] == "right"
    assert found.heads[2] == "pairs interleaved (2i, 2i + 1), not split in halves"


def test_what_16_bits_hide_is_said() -> None:
    """At few positions, cosines rounded to 8 bits do not show which way YaRN is blended."""
    program = lambda x, p: by(YARN, halves, scale=FACTOR)(x.float(), p).to(x.dtype)  # noqa: E731
    found = pe.diagnose(program, QWEN_YARN, heads=2, dtype=torch.bfloat16, max_position=3)
    (note,) = (note for note in found.notes if note.startswith("not seen at these positions: "))
    assert found.right
    assert "limits of YaRN's blend not rounded to whole pairs" in note
    assert "turned backwards" not in note


def test_recorded_tensors_have_other_positions_and_values() -> None:
    spec = pe.RotarySpec.from_huggingface(LLAMA31)
    x, positions = torch.randn(2, 3, 40, 128), torch.randint(0, 9000, (40,))
    right = Recorded(x, positions, RIGHT(x, positions))
    assert pe.diagnose(right, LLAMA31).right
    wrong = dataclasses.replace(right, output=by(PLAIN, halves)(x, positions))
    assert pe.diagnose(wrong, spec).mistakes == (("scaling ignored",),)
    assert pe.diagnose([right, wrong], LLAMA31).verdict == "unknown"
    refused((lambda: pe.diagnose(dataclasses.replace(right, positions=positions[1:]), LLAMA31), ValueError, "positions: expected [40], got [39]"))  # fmt: skip
