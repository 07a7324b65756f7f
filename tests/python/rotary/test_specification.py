"""Tests RotarySpec: scalings against transformers' formulas, text, resolution, errors."""

import copy
import itertools
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import posembed as pe
import pytest
import torch
from support.case import assert_close
from support.refusals import refused
from support.resident import assert_little_is_left
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
def test_scalings_agree_with_transformers(scaling: Any, parameters: dict[str, Any], length: int | None) -> None:
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


@pytest.mark.parametrize("spec", SPECS)
def test_a_value(spec: pe.RotarySpec) -> None:
    for other in (pe.RotarySpec.from_json(spec.to_json()), pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert other == spec
        assert hash(other) == hash(spec)
        assert other.to_json() == spec.to_json()
    assert torch.ops.posembed.rotary_specification(spec.to_json()) == spec.to_json()
    assert len({*SPECS, spec}) == len(set(SPECS))
    with pytest.raises(AttributeError):
        spec.base = 1.0


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "dynamic" not in str(spec)])
def test_both_languages_print_the_same(spec: pe.RotarySpec) -> None:
    assert repr(pe.RotaryEmbedding(spec)) == repr(pe.cpp.RotaryEmbedding(spec))


def test_integers_and_floats_make_equal_specifications() -> None:
    assert pe.RotarySpec(8, base=10000) == pe.RotarySpec(8, base=10000.0)
    assert pe.RotarySpec(torch.tensor(8), interleaved=1) == pe.RotarySpec(8, interleaved=True)
    assert pe.LinearScaling(2) == pe.LinearScaling(2.0)
    assert pe.Sections((1, 1, 2)) == pe.Sections(axis_of_pair=[0, 1, 2, 2])


@pytest.mark.parametrize(
    "text",
    [
        "Sections((16, 24, 24))",
        "Sections((1, 1, 0))",
        "Sections((24, 20, 20), interleaved=True)",
        "Sections((16, 16), restart=True)",
        "Sections((24, 20, 20), within_axes=True)",
        "Sections((3, 3), interleaved=True, restart=True)",
        "Sections(axis_of_pair=(0, 1, 1, 0, 2))",
        "Sections(axis_of_pair=(0, 1, 1, 0), axes=3)",
        f"Sections(axis_of_pair={(0,) * 100_000})",
    ],
)
def test_sections_print_as_they_are_written(text: str) -> None:
    assert repr(eval(text, {"Sections": pe.Sections})) == text


def test_axes_without_a_pair_belong_to_the_specification() -> None:
    declared, used = pe.Sections((1, 1, 0)), pe.Sections((1, 1))
    assert (declared.axes, used.axes) == (3, None)
    assert declared != used
    assert declared == pe.Sections(axis_of_pair=[0, 1], axes=3)
    assert used == pe.Sections(axis_of_pair=[0, 1], axes=2)
    spec = pe.RotarySpec(4, sections=declared)
    assert pe.RotarySpec.from_json(spec.to_json()) == spec != pe.RotarySpec(4, sections=used)
    assert pe.Sections((1, 1, 0), interleaved=True) == declared
    assert pe.Sections((0, 0, 1), interleaved=True).axes == 3  # the pair is the first axis's turn
    config = {
        "model_type": "qwen2_vl_text",
        "hidden_size": 64,
        "num_attention_heads": 1,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 16, 0]},
    }
    assert pe.RotarySpec.from_huggingface(config).sections == pe.Sections((16, 16, 0))
    assert "axes" not in pe.RotarySpec(4, sections=used).to_json()
    torch.testing.assert_close(spec.frequencies(), pe.RotarySpec(4).frequencies(), rtol=0, atol=0)


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
    refused((lambda: rope(query), ValueError, "pass seq_len"))
    fixed = rope.spec.resolve(100)
    assert fixed == pe.RotarySpec(32, scaling=pe.NtkScaling(2.0 * 100 / 64 - 1.0))
    assert (rope.spec.is_dynamic, fixed.is_dynamic) == (True, False)
    assert fixed.resolve(5000) == fixed
    assert torch.equal(rope(query, seq_len=100), pe.functional.rotary(query, spec=fixed))
    assert rope.spec.resolve(64) == pe.RotarySpec(32)


def test_lengths_that_do_not_fit_are_refused() -> None:
    rope = pe.RotaryEmbedding(32, scaling=pe.DynamicNtkScaling(2.0, 64))
    query, pair = torch.randn(1, 9, 2, 32), torch.randn(2, 9, 2, 32)
    bounds = torch.tensor([0, 3, 9])
    refused(
        (lambda: rope(query, seq_len=8), ValueError, "seq_len: expected at least 9, got 8"),
        (lambda: rope(query, offset=100, seq_len=99), ValueError, "seq_len: expected at least 109, got 99"),
        (lambda: rope(query, offset=np.int64(100), seq_len=99), ValueError, "seq_len: expected at least 109, got 99"),
        (lambda: rope(pair, offset=torch.tensor([100, 3]), seq_len=99), ValueError, "seq_len: expected at least 109, got 99"),
        (lambda: rope(query, positions=torch.arange(100, 109), seq_len=99), ValueError, "seq_len: expected at least 109, got 99"),
        (lambda: rope(query, cu_seqlens=bounds, seq_len=5), ValueError, "seq_len: expected at least 6, got 5"),
        (lambda: rope(query, cu_seqlens=bounds, offset=100, seq_len=99), ValueError, "seq_len: expected at least 106, got 99"),
        (lambda: rope(query, cu_seqlens=bounds, offset=torch.tensor([100, 3]), seq_len=99), ValueError, "seq_len: expected at least 103, got 99"),
        (lambda: rope(query, cu_seqlens=torch.tensor([0, 8]), seq_len=99), ValueError, "cu_seqlens: expected the number of tokens, 9, last, got 8"),
    )  # fmt: skip
    assert rope(query, cu_seqlens=bounds, seq_len=6).shape == query.shape
    for wrong in (12.5, True, "12", torch.tensor([12, 12])):
        refused(
            (lambda: rope.rotate_(query, seq_len=wrong), ValueError, "seq_len: expected a whole number"),
            (lambda: rope.rotate_packed(query.flatten(2), heads=2, key_heads=0, seq_len=wrong), ValueError, "seq_len: expected a whole number"),
            (lambda: rope.rerotate_(query, torch.arange(9), torch.arange(9), seq_len=wrong), ValueError, "seq_len: expected a whole number"),
            (lambda: rope.spec_for(wrong), ValueError, "seq_len: expected a whole number"),
        )  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_modules_take_the_length(dynamic: bool) -> None:
    """LongRoPE has two regimes; dynamic NTK has one per length, which breaks the graph."""
    query = torch.randn(1, 9, 2, 64)
    factors = [1.0 + i / 8 for i in range(32)]
    longrope = pe.RotaryEmbedding(64, scaling=pe.LongRopeScaling([1.0] * 32, factors, 64))
    ntk = pe.RotaryEmbedding(64, scaling=pe.DynamicNtkScaling(2.0, 64))
    options: dict[str, Any] = {"backend": "eager", "dynamic": dynamic}
    for rope, whole in ((longrope, True), (ntk, False)):
        torch._dynamo.reset()
        compiled = torch.compile(rope, fullgraph=whole, **options)
        for length in (64, 65, 200):
            expected = pe.functional.rotary(query, spec=rope.spec.resolve(length))
            assert torch.equal(compiled(query, seq_len=length), expected)
    torch._dynamo.reset()
    compiled = torch.compile(ntk.resolve(200), fullgraph=True, **options)
    assert torch.equal(compiled(query), ntk(query, seq_len=200))
    refused((lambda: torch.compile(ntk, fullgraph=True, **options)(query, seq_len=200), Exception, "compile module.resolve(seq_len)"))  # fmt: skip


def test_a_specification_assigned_later_counts() -> None:
    rope, dynamic = pe.RotaryEmbedding(32), pe.DynamicNtkScaling(2.0, 64)
    query = torch.randn(1, 5, 2, 32)
    rope.spec = pe.RotarySpec(32, scaling=dynamic)
    assert torch.equal(rope(query, seq_len=200), rope.resolve(200)(query))
    assert not torch.equal(rope(query, seq_len=200), rope(query, seq_len=64))


def test_both_languages_resolve_and_move_keys() -> None:
    scaling = pe.DynamicNtkScaling(2.0, 64)
    ours, theirs = (pe.RotaryEmbedding(32, scaling=scaling), pe.cpp.RotaryEmbedding(32, scaling=scaling))
    query, places = torch.randn(1, 5, 2, 32), torch.arange(5)
    near, far = ours.resolve(64), ours.spec.resolve(200)
    assert repr(near) == repr(theirs.resolve(64))
    keys = near(query)
    moved = keys.clone()
    near.rerotate_(keys, places, places + 7, new_spec=far)
    theirs.resolve(64).rerotate_(moved, places, places + 7, new_spec=far)
    assert torch.equal(keys, moved)
    assert_close(keys, pe.functional.rotary(query.double(), positions=places + 7, spec=far), 1e-6)


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
        (lambda: pe.RotarySpec(8, scaling=pe.LinearScaling(0)), "LinearScaling.factor: expected a finite positive"),
        (lambda: pe.LinearScaling(math.nan), "factor: expected a finite number"),
        (lambda: pe.RotarySpec(2, scaling=pe.NtkScaling(2)), "NtkScaling: expected rotary_dim over 2"),
        (lambda: pe.RotarySpec(8, scaling=pe.DynamicNtkScaling(0.5, 64)), "DynamicNtkScaling.factor"),
        (lambda: pe.RotarySpec(8, scaling=pe.YarnScaling(2, 0)), "YarnScaling.original_max_positions"),
        (lambda: pe.RotarySpec(8, scaling=pe.YarnScaling(2, 64, beta_fast=1, beta_slow=2)), "YarnScaling.beta_fast"),
        (lambda: pe.RotarySpec(8, scaling=pe.Llama3Scaling(8, 4, 1, 64)), "Llama3Scaling.high_freq_factor"),
        (lambda: pe.RotarySpec(8, scaling=pe.ProportionalScaling(1.5)), "ProportionalScaling.proportion: expected 0 to 1"),
        (lambda: pe.RotarySpec(8, scaling=pe.LongRopeScaling([1] * 3, [1] * 4, 64)), "LongRopeScaling.short_factor: expected rotary_dim / 2 = 4 numbers, got 3"),
        (lambda: pe.RotarySpec(8, sections=pe.Sections((1, 1))), "sections: expected an axis for each of rotary_dim / 2 = 4 pairs, got 2"),
        (lambda: pe.RotarySpec(8, sections=pe.Sections(axis_of_pair=(0, 1, 2, 9))), "sections: expected axes 0 to 3, got 9"),
        (lambda: pe.Sections((1,), axis_of_pair=(0,)), "expected either sizes or axis_of_pair"),
        (lambda: pe.Sections((1,), axes=2), "axes: expected none beside sizes, got 2"),
        (lambda: pe.Sections(axis_of_pair=(0,), axes=1.5), "axes: expected a whole number, got 1.5"),
        (lambda: pe.RotarySpec(2, sections=pe.Sections((1, 0, 0, 0, 0))), "sections: expected axes of positions, 1 to 4, got 5"),
        (lambda: pe.RotarySpec(4, sections=pe.Sections(axis_of_pair=(0, 2), axes=2)), "sections: expected axes of positions, 3 to 4, got 2"),
        (lambda: pe.RotarySpec.from_json('{"head_dim":2,"sections":{"axis_of_pair":[0],"axes":1.5}}'), "sections: axes: expected a whole number, got 1.5"),
        (lambda: pe.RotarySpec(8, custom_frequencies=[1.0]), "custom_frequencies: expected rotary_dim / 2 = 4 numbers, got 1"),
        (lambda: pe.RotarySpec(2, custom_frequencies=[1.0], scaling=pe.LinearScaling(2)), "scaling: expected none beside custom_frequencies"),
        (lambda: pe.RotarySpec.from_json('{"head_dim":8,"scaling":{"type":"magic"}}'), "scaling.type: expected 'linear'"),
        (lambda: pe.RotarySpec.from_json('{"head_dim":8,"scaling":{"type":"linear","fctor":2}}'), "unknown key 'fctor'; known are: type, factor"),
        (lambda: pe.RotarySpec(None), "head_dim: expected a whole number, got None"),
        (lambda: pe.RotarySpec(8, base=None), "base: expected a number, got None"),
        (lambda: pe.RotarySpec(8, interleaved="no"), "interleaved: expected True or False, got 'no'"),
        (lambda: pe.RotarySpec(8, custom_frequencies=5), "custom_frequencies: expected numbers, got 5"),
        (lambda: pe.LinearScaling("2x"), "factor: expected a number, got '2x'"),
        (lambda: pe.LinearScaling(None), "factor: expected a number, got None"),
        (lambda: pe.YarnScaling(4, 4096.5), "original_max_positions: expected a whole number, got 4096.5"),
        (lambda: pe.YarnScaling(4, 64, truncate="no"), "truncate: expected True or False, got 'no'"),
        (lambda: pe.Sections((1.5, 2)), "sizes: expected a whole number, got 1.5"),
        (lambda: pe.Sections(axis_of_pair=(0.5,)), "axis_of_pair: expected a whole number, got 0.5"),
        (lambda: pe.RotarySpec.from_json('{"head_dim":8.5}'), "RotarySpec: head_dim: expected a whole number, got 8.5"),
        (lambda: pe.RotarySpec.from_json("[" * 100_000 + "]" * 100_000), "RotarySpec: expected JSON of at most 64 levels"),
        (lambda: pe.RotarySpec.from_json('{"head_dim":8,"base":null}'), "RotarySpec: base: expected a number, got null"),
        (lambda: pe.RotarySpec.from_json('{"head_dim":2,"sections":{"axis_of_pair":[0.5],"restart":false}}'), "sections: axis_of_pair: expected whole numbers, got [0.5]"),
        (lambda: pe.RotarySpec.from_json('{"head_dim":8,"scaling":{"type":"yarn","original_max_positions":"64"}}'), 'yarn: original_max_positions: expected a whole number, got "64"'),
    ],
)  # fmt: skip
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_explanation_tells_what_is_stretched() -> None:
    text = pe.RotarySpec(128, base=500000.0, scaling=pe.Llama3Scaling(8, 1, 4, 8192)).explain()
    assert text.splitlines()[0] == (
        "head of 128: component i turns together with i + 64; base 500,000; longest wavelength 20,473,564 positions"
    )
    assert re.search(r"float32 angles would be off by up to 0\.\d+ rad in 65536 positions", text)
    assert "pairs 0 to 28 as they are; pairs 29 to 63 stretched by up to 8x" in text
    first, last = text.splitlines()[-16], text.splitlines()[-1]
    assert re.fullmatch(r" +0 +1 +6\.28 +1x +4", first)
    assert last.split()[0] == "63"
    assert "8x" in last
    still = pe.RotarySpec(8, scaling=pe.ProportionalScaling(0.5)).explain()
    assert "pairs 0 to 1 as they are; pairs 2 to 3 stand still" in still
    assert still.endswith("stands still")
    assert "head of 8: no component is rotated" in pe.RotarySpec(8, rotary_dim=0).explain()


def test_explanation_has_no_column_without_a_difference() -> None:
    plain = pe.RotarySpec(16, rotary_dim=8, rotary_start=4, interleaved=True)
    lines = plain.explain().splitlines()
    assert lines[0] == (
        "head of 16, of which components 4 to 11 are rotated: components 2i and 2i + 1 turn "
        "together, counted from the first of them; base 10,000; longest wavelength 6,283 positions"
    )
    header = "pair  radians/position    wavelength  positions to half a turn"
    assert lines[2] == header
    assert len(lines) == 3 + 4
    axes = pe.RotarySpec(8, sections=pe.Sections((2, 2)), scaling=pe.LinearScaling(4.0))
    header = "pair  axis  radians/position    wavelength  stretched  positions to half a turn"
    assert header in axes.explain().splitlines()


def test_notebooks_show_the_explanation() -> None:
    spec = pe.RotarySpec(8, score_scale=pe.ScoreScale(2.0, source="<key>"))
    page = spec._repr_html_()
    assert page.startswith("<p>head of 8: component i turns together with i + 4; base 10,000")
    assert "score scale: 2 (&lt;key&gt;)" in page


def float32_error(spec: pe.RotarySpec, length: int) -> float:
    """The largest error at all positions, of the operator that reproduces transformers."""
    parts = torch.arange(length).split(1 << 13)
    return max(float(pe.analysis.angle_error(spec, part).max()) for part in parts)


def test_explanation_of_an_error_is_of_the_asked_length() -> None:
    """The largest error within the text, whatever length the scaling was made for."""
    spec = pe.RotarySpec(128, base=500000.0, scaling=pe.Llama3Scaling(8, 1, 4, 8192))
    error = float32_error(spec, 1 << 17)
    assert f"off by up to {error:.2g} rad in 131072 positions" in spec.explain(1 << 17)


def test_explanation_takes_the_length_of_the_configuration() -> None:
    llama = {"model_type": "llama", "head_dim": 128, "rope_theta": 5e5}
    assert "rad in" not in pe.RotarySpec.from_huggingface(llama).explain()
    long = pe.RotarySpec.from_huggingface({**llama, "max_position_embeddings": 131072})
    assert (long.max_positions, long) == (131072, pe.RotarySpec(128, base=5e5))
    assert "off by up to 0.0093 rad in 131072 positions" in long.explain()
    assert "rad in 99 positions" in long.explain(99)
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    scaled = {**llama, "rope_scaling": stretched}
    assert "rad in 16384 positions" in pe.RotarySpec.from_huggingface(scaled).explain()
    scaled["max_position_embeddings"] = 131072
    assert "rad in 131072 positions" in pe.RotarySpec.from_huggingface(scaled).explain()
    for wrong in ("131072", 1.5, 0, -1):
        with pytest.raises(ValueError, match=r"^seq_len: expected"):
            long.explain(wrong)  # type: ignore[arg-type]


def test_explanation_of_a_length() -> None:
    spec = pe.RotarySpec(64, scaling=pe.DynamicNtkScaling(2.0, 100))
    assert "beyond, frequencies depend on the sequence's length" in spec.explain()
    assert "resolved for sequences of 300 positions" in spec.explain(300)
    column = [float(line.split()[2]) for line in spec.explain(300).splitlines()[-16:]]
    shown = [round(i * 31 / 15) for i in range(16)]
    expected = spec.wavelengths(300)[shown]
    assert torch.allclose(torch.tensor(column).double(), expected, atol=0.005)


@pytest.mark.parametrize("length", [100, 131072, 150_000])
def test_error_of_float32_angles_as_explained(length: int) -> None:
    """The largest of all positions: at a power of two, rounding is kinder than elsewhere."""
    spec = pe.RotarySpec(128, base=500000.0)
    error, position = pe.analysis.float32_error(spec, length)
    assert error == pytest.approx(float32_error(spec, length), abs=2e-7)
    at = pe.analysis.angle_error(spec, torch.tensor([position, 2 ** int(math.log2(length - 1))]))
    assert at[1].max() < at[0].max() == pytest.approx(error, abs=2e-7)
    assert f"off by up to {error:.2g} rad in {length} positions" in spec.explain(length)


def test_differences_in_words() -> None:
    plain = pe.RotarySpec(8)
    assert plain.diff(pe.RotarySpec(8)) == "equal"
    text = plain.diff(pe.RotarySpec(8, base=10001.0))
    assert "base: 10000.0 against 10001.0" in text
    position = int(text.split("position ")[1].split()[0])
    gap = (plain.frequencies() - pe.RotarySpec(8, base=10001.0).frequencies()).abs().max()
    assert gap * position >= 1e-3 > gap * (position - 1)
    assert "from position 1" in plain.diff(pe.RotarySpec(8, interleaved=True))
    assert "from position 1" in plain.diff(pe.RotarySpec(8, sections=pe.Sections((2, 2))))
    same = pe.RotarySpec(8, custom_frequencies=plain.frequencies().tolist())
    assert plain.diff(same).endswith("angles are equal")
    assert "4 numbers" not in plain.diff(same)
    factor = plain.diff(pe.RotarySpec(8, scaling=pe.YarnScaling(1.0, 64, attention_factor=1.5)))
    assert "attention factor: 1 against 1.5" in factor
    own = pe.RotarySpec(8, custom_frequencies=[1.0] * 4, custom_attention_factor=1.5)
    assert "custom_attention_factor: null against 1.5" in plain.diff(own)
    assert "custom_attention_factor: 1.5 against null" in own.diff(plain)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_growing_generation_keeps_few_specifications() -> None:
    """Dynamic NTK has a new specification at each length: 10,000 of them."""
    rope = pe.RotaryEmbedding(64, scaling=pe.DynamicNtkScaling(2.0, 16))
    query, lengths = torch.randn(1, 1, 2, 64), itertools.count(17)
    assert_little_is_left(lambda: rope(query, seq_len=next(lengths)), 10000, 8 << 20)
    assert torch.equal(rope(query, seq_len=12016), rope.resolve(12016)(query))
