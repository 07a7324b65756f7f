"""RotarySpec: scalings against transformers' formulas, text, resolution, refusals."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import posembed as pe
import pytest
import torch
from support.case import assert_close
from support.scalings import SCALINGS

IDS = [f"{scaling.kind}-{i}" for i, (scaling, _, _) in enumerate(SCALINGS)]

SPECS = [
    pe.RotarySpec(128),
    pe.RotarySpec(128, base=1e16, rotary_dim=64, rotary_start=2, interleaved=True, reverse=True),
    *(pe.RotarySpec(128, base=1 / 3 + 1e4, scaling=scaling) for scaling, _, _ in SCALINGS),
    pe.RotarySpec(128, scaling=pe.NtkScaling(1e-5 + 2)),
    pe.RotarySpec(128, sections=pe.Sections((24, 20, 20), interleaved=True)),
    pe.RotarySpec(128, scaling=pe.XPosScaling(scale_base=1 / 3, center=-2.5)),
    pe.RotarySpec(128, numerics="float32_product"),
    pe.RotarySpec(8, custom_frequencies=[1e-9, 2.5e22, -3.0, 0.0]),
]


@pytest.mark.parametrize(("scaling", "parameters", "length"), SCALINGS, ids=IDS)
def test_scalings_agree_with_transformers(
    scaling: Any, parameters: dict[str, Any], length: int | None
) -> None:
    transformers = pytest.importorskip("transformers")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config = transformers.LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        max_position_embeddings=2048 if parameters["rope_type"] == "dynamic" else 131072,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )
    theirs, attention_factor = functions[parameters["rope_type"]](config, "cpu", seq_len=length)
    spec = pe.RotarySpec(128, scaling=scaling)
    if length is not None:
        spec = spec.resolve(length)
    # Their arithmetic is float32: relative to the frequency before it was divided.
    plain = pe.RotarySpec(128).frequencies()
    assert float(((spec.frequencies() - theirs) / plain).abs().max()) < 3e-7
    assert math.isclose(spec.attention_factor, attention_factor, rel_tol=1e-12)


def test_ntk_stretches_the_longest_wavelength_alone() -> None:
    plain = pe.RotarySpec(64).wavelengths()
    scaled = pe.RotarySpec(64, scaling=pe.NtkScaling(8.0)).wavelengths()
    ratio = scaled / plain
    assert math.isclose(float(ratio[0]), 1.0, rel_tol=1e-12)
    assert math.isclose(float(ratio[-1]), 8.0, rel_tol=1e-12)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: str(hash(spec)))
def test_a_value(spec: pe.RotarySpec) -> None:
    for other in (
        pe.RotarySpec.from_json(spec.to_json()),
        pickle.loads(pickle.dumps(spec)),
        copy.deepcopy(spec),
    ):
        assert other == spec
        assert hash(other) == hash(spec)
        assert other.to_json() == spec.to_json()
    assert torch.ops.posembed.rotary_specification(spec.to_json()) == spec.to_json()
    assert len({*SPECS, spec}) == len(set(SPECS))
    with pytest.raises(AttributeError):
        spec.base = 1.0


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if "dynamic" not in str(spec)], ids=lambda s: str(hash(s))
)
def test_both_languages_print_the_same(spec: pe.RotarySpec) -> None:
    assert repr(pe.RotaryEmbedding(spec)) == repr(pe.cpp.RotaryEmbedding(spec))


def test_integers_and_floats_make_equal_specifications() -> None:
    assert pe.RotarySpec(8, base=10000) == pe.RotarySpec(8, base=10000.0)
    assert pe.LinearScaling(2) == pe.LinearScaling(2.0)
    assert pe.Sections((1, 1, 2)) == pe.Sections(axis_of_pair=[0, 1, 2, 2])


def test_attention_factor_multiplies_and_its_inverse_divides(device: torch.device) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 5, 2, 32, dtype=torch.float64, device=device, requires_grad=True)
    spec = pe.RotarySpec(32, scaling=pe.YarnScaling(1.0, 64, attention_factor=1.5))
    plain = pe.functional.rotary(query, spec=pe.RotarySpec(32))
    rotated = pe.functional.rotary(query, spec=spec)
    assert_close(rotated, plain * 1.5, 1e-14)
    assert_close(pe.functional.rotary(rotated, spec=spec, inverse=True), query, 1e-14)
    (gradient,) = torch.autograd.grad(rotated, query, rotated)
    assert_close(gradient, query * 1.5**2, 1e-14)


def test_a_dynamic_specification_is_resolved_or_refused() -> None:
    rope = pe.RotaryEmbedding(32, scaling=pe.DynamicNtkScaling(2.0, 64))
    query = torch.randn(1, 100, 2, 32)
    with pytest.raises(ValueError, match="pass seq_len"):
        rope(query)
    fixed = rope.spec.resolve(100)
    assert fixed.scaling is None
    assert fixed.resolve(5000) == fixed
    assert torch.equal(rope(query, seq_len=100), pe.functional.rotary(query, spec=fixed))
    assert rope.spec.resolve(64) == pe.RotarySpec(32)


def test_long_sequences_have_their_own_attention_factor() -> None:
    scaling = pe.LongRopeScaling([1.0], [2.0], 64, attention_factor=1.1, long_attention_factor=1.3)
    spec = pe.RotarySpec(2, scaling=scaling)
    assert [spec.resolve(n).attention_factor for n in (63, 64, 65)] == [1.1, 1.1, 1.3]
    assert [float(spec.frequencies(n)) for n in (63, 64, 65)] == [1.0, 1.0, 0.5]


def test_restarted_sections_have_a_series_each() -> None:
    spec = pe.RotarySpec(12, sections=pe.Sections((2, 4), restart=True))
    expected = [*pe.RotarySpec(4).frequencies().tolist(), *pe.RotarySpec(8).frequencies().tolist()]
    assert spec.frequencies().tolist() == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: pe.RotarySpec(8, scaling=pe.LinearScaling(0)),
            "LinearScaling.factor: expected a finite positive",
        ),
        (lambda: pe.LinearScaling(math.nan), "factor: expected a finite number"),
        (
            lambda: pe.RotarySpec(2, scaling=pe.NtkScaling(2)),
            "NtkScaling: expected rotary_dim over 2",
        ),
        (
            lambda: pe.RotarySpec(8, scaling=pe.DynamicNtkScaling(0.5, 64)),
            "DynamicNtkScaling.factor",
        ),
        (
            lambda: pe.RotarySpec(8, scaling=pe.YarnScaling(2, 0)),
            "YarnScaling.original_max_positions",
        ),
        (
            lambda: pe.RotarySpec(8, scaling=pe.YarnScaling(2, 64, beta_fast=1, beta_slow=2)),
            "YarnScaling.beta_fast",
        ),
        (
            lambda: pe.RotarySpec(8, scaling=pe.Llama3Scaling(8, 4, 1, 64)),
            "Llama3Scaling.high_freq_factor",
        ),
        (
            lambda: pe.RotarySpec(8, scaling=pe.ProportionalScaling(1.5)),
            "ProportionalScaling.proportion: expected 0 to 1",
        ),
        (
            lambda: pe.RotarySpec(8, scaling=pe.LongRopeScaling([1] * 3, [1] * 4, 64)),
            "LongRopeScaling.short_factor: expected rotary_dim / 2 = 4 numbers, got 3",
        ),
        (
            lambda: pe.RotarySpec(8, sections=pe.Sections((1, 1))),
            "sections: expected an axis for each of rotary_dim / 2 = 4 pairs, got 2",
        ),
        (
            lambda: pe.RotarySpec(8, sections=pe.Sections(axis_of_pair=(0, 1, 2, 9))),
            "sections: expected axes 0 to 3, got 9",
        ),
        (lambda: pe.Sections((1,), axis_of_pair=(0,)), "expected either sizes or axis_of_pair"),
        (
            lambda: pe.RotarySpec(8, custom_frequencies=[1.0]),
            "custom_frequencies: expected rotary_dim / 2 = 4 numbers, got 1",
        ),
        (
            lambda: pe.RotarySpec(2, custom_frequencies=[1.0], scaling=pe.LinearScaling(2)),
            "scaling: expected none beside custom_frequencies",
        ),
        (
            lambda: pe.RotarySpec.from_json('{"head_dim":8,"scaling":{"type":"magic"}}'),
            "scaling.type: expected 'linear'",
        ),
        (
            lambda: pe.RotarySpec.from_json('{"head_dim":8,"scaling":{"type":"linear","fctor":2}}'),
            "unknown key 'fctor'; known are: type, factor",
        ),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_explanation_tells_what_is_stretched() -> None:
    text = pe.RotarySpec(128, base=500000.0, scaling=pe.Llama3Scaling(8, 1, 4, 8192)).explain()
    assert "64 pairs of halves (i, i + 64)" in text
    assert "float32 angles at position 65536" in text
    first, last = text.splitlines()[4], text.splitlines()[-1]
    assert "1x" in first
    assert "8x" in last
    assert "stands still" in pe.RotarySpec(8, scaling=pe.ProportionalScaling(0.5)).explain()


def test_differences_in_words() -> None:
    plain = pe.RotarySpec(8)
    assert plain.diff(pe.RotarySpec(8)) == "equal"
    text = plain.diff(pe.RotarySpec(8, base=10001.0))
    assert "base: 10000.0 against 10001.0" in text
    position = int(text.split("position ")[1].split()[0])
    gap = (plain.frequencies() - pe.RotarySpec(8, base=10001.0).frequencies()).abs().max()
    assert gap * position >= 1e-3 > gap * (position - 1)
    assert "from position 1" in plain.diff(pe.RotarySpec(8, interleaved=True))
