"""Tests of sinusoidal modules and specifications beyond the shared tests of operators."""

import json
import math

import mpmath
import posembed as pe
import pytest
import torch
import torch._dynamo.testing
from support.case import FLOATING, TOLERANCE, assert_close
from support.refusals import refused

PRESETS = ["vaswani", "marian", "tensor2tensor", "ddpm", "fairseq"]


def published(preset: str, dim: int, cos_first: bool) -> torch.Tensor:
    """The first 100 rows as the presets' code bases compute them, scale 1."""
    even = preset in ("tensor2tensor", "ddpm", "fairseq")  # an odd column is zero
    pairs = dim // 2 if even else (dim + 1) // 2
    span = max(pairs - 1, 1) if even else dim / 2
    rates = 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / span)
    angles = torch.outer(torch.arange(100).double() + 2 * (preset == "fairseq"), rates)
    waves = [angles.cos(), angles.sin()] if cos_first else [angles.sin(), angles.cos()]
    columns = torch.stack(waves, -1).flatten(-2) if preset == "vaswani" else torch.cat(waves, -1)
    return torch.nn.functional.pad(columns, (0, dim - columns.shape[-1]))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 7, 64, 513])
@pytest.mark.parametrize("cos_first", [None, True, False])
def test_presets(preset: str, dim: int, cos_first: bool | None, device: torch.device) -> None:
    module = pe.SinusoidalPositionalEmbedding(dim, preset=preset, cos_first=cos_first)
    positions = torch.arange(100, device=device)
    expected = published(preset, dim, json.loads(module.spec.text).get("cos_first", False))
    for dtype in FLOATING:
        found = module.encode(positions, dtype=dtype)
        assert found.dtype == dtype
        assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("position", [1000, 2**17 + 1, 2**20, 1234.5678, -77.25])
def test_float64_is_exact(position: float, device: torch.device) -> None:
    positions = torch.tensor([position], dtype=torch.float64, device=device)
    found = pe.SinusoidalPositionalEmbedding(32).encode(positions)[0]
    assert found.dtype == torch.float64
    assert_close(found, exact(position, 32), 1e-15)


def exact(position: float, dim: int) -> torch.Tensor:
    """The encoding, computed to 50 digits and rounded once."""
    with mpmath.workdps(50):
        values = []
        for pair in range(dim // 2):
            angle = mpmath.mpf(position) * mpmath.mpf(10000) ** (-mpmath.mpf(2 * pair) / dim)
            values += [float(mpmath.sin(angle)), float(mpmath.cos(angle))]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", FLOATING)
def test_scale_may_be_any_nan(dtype: torch.dtype, device: torch.device) -> None:
    """CUDA's own NaN has a payload that rounding to bfloat16 must not carry into the sign."""
    scale = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=device).view(torch.float32)
    x = torch.ones(2, 3, 70, dtype=dtype, device=device)
    assert pe.functional.sinusoidal(x, scale=scale, spec=pe.SinusoidalSpec(70)).isnan().all()


@pytest.mark.parametrize("exponent", [31, 40, 48, 60])
def test_errors_at_huge_positions(exponent: int) -> None:
    """The error of 64-bit turns grows with the position, as the documentation says."""
    position = 2**exponent - 1
    grown = 2 * math.pi * 2.0**-65 * position
    for dtype, bound in ((torch.float32, 1.5e-7 + grown), (torch.float64, 1e-14)):
        spec = pe.SinusoidalSpec(64)
        found = pe.functional.sinusoidal_encode(torch.tensor(position), spec=spec, dtype=dtype)
        with mpmath.workprec(200):
            angles = [mpmath.power(10000, -mpmath.mpf(i) / 32) * position for i in range(32)]
            waves = [f(angle) for angle in angles for f in (mpmath.sin, mpmath.cos)]
            error = max(abs(w - f) for w, f in zip(waves, found.tolist(), strict=True))
        assert error < bound


def test_positions_that_are_none_give_nan(device: torch.device) -> None:
    positions = torch.tensor([1.0, float("nan"), float("inf"), 2.0], device=device)
    if device.type == "cpu":
        waves = pe.SinusoidalPositionalEmbedding(8)
        for call in (waves.encode, lambda places: waves(torch.ones(1, 4, 8), places)):
            refused((lambda: call(positions), IndexError, "positions: expected finite positions, got nan at"))  # fmt: skip
        return
    found = pe.SinusoidalPositionalEmbedding(7, preset="marian").encode(positions)
    assert found.isnan().any(-1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cos_first", [True, False])
def test_shift_matrix(preset: str, cos_first: bool) -> None:
    module = pe.SinusoidalPositionalEmbedding(16, preset=preset, cos_first=cos_first, scale=0.5)
    positions = torch.tensor([0.0, 3.0, 1e5, 0.125], dtype=torch.float64)
    for distance in (7, -3.5, 1000):
        matrix = module.shift_matrix(distance)
        assert matrix.dtype == torch.float64
        assert_close(module.encode(positions + distance), module.encode(positions) @ matrix.T, 1e-14)
        assert_close(matrix @ module.shift_matrix(-distance), torch.eye(16), 1e-14)


def test_product_of_encodings_depends_on_distance_alone() -> None:
    module = pe.SinusoidalPositionalEmbedding(64)
    starts = torch.tensor([3, 100, 2**31 - 100])
    near, far = (module.encode(starts + k, dtype=torch.float64) for k in (0, 7))
    products = (near * far).sum(-1)
    assert_close(products, products[:1].expand(3), 1e-11)
    assert_close(near.square().sum(-1), torch.full((3,), 32.0), 1e-14)


def test_deep_json_is_refused() -> None:
    """The parser's values are printed by recursion, which ended the process."""
    refused((lambda: pe.SinusoidalSpec.from_json('{"embedding_dim":' + "[" * 100_000 + "]" * 100_000 + "}"), ValueError, "SinusoidalSpec: expected JSON of at most 64 levels"))  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m, x: m(x[0, 0]), ValueError, r"x: expected \[batch, seq, embedding_dim\] or \[seq, embedding_dim\], got \[8\]"),
        (lambda m, x: m(x, torch.zeros(3, 3)), ValueError, "positions: expected batch 1 or 2, got 3"),
        (lambda m, x: m(x, torch.zeros(1, 2, 3)), ValueError, r"positions: expected \[seq\] or \[batch, seq\], got \[1, 2, 3\]"),
        (lambda m, x: m(x, torch.arange(3) > 1), TypeError, "positions: expected int32, int64, float32"),
        (lambda m, x: m(x, torch.arange(3), offset=1), ValueError, "offset: expected 0 where positions are given, got 1"),
        (lambda m, x: m(x, torch.arange(3, device="meta")), ValueError, "positions: expected the device of x, cpu, got meta"),
        (lambda m, x: m.encode(torch.arange(3), dtype=torch.int64), TypeError, "dtype: expected float32"),
        (lambda m, x: pe.functional.sinusoidal(x, spec=8), TypeError, "spec: expected a SinusoidalSpec, got int"),
        (lambda m, x: m.shift_matrix(float("inf")), ValueError, "distance: expected a finite number"),
        (lambda m, x: pe.SinusoidalPositionalEmbedding(7).shift_matrix(1), ValueError, "expected an even embedding_dim, .*, got 7"),
        (lambda m, x: pe.SinusoidalPositionalEmbedding(8, base=0.5), ValueError, "base: expected a finite number of at least 1, got 0.5"),
        (lambda m, x: pe.SinusoidalPositionalEmbedding(8, padding_idx=-1), ValueError, "padding_idx: expected 0 to 2147483647, got -1"),
        (lambda m, x: pe.SinusoidalPositionalEmbedding(8, padding_idx=1.5), ValueError, "padding_idx: expected a whole number, got 1.5"),
        (lambda m, x: pe.SinusoidalSpec.from_json('{"embedding_dim":8,"padding_idx":1.5}'), ValueError, "padding_idx: expected a whole number, got 1.5"),
        (lambda m, x: pe.SinusoidalPositionalEmbedding(8, scale=float("inf")), ValueError, "scale: expected a finite number, got inf"),
        (lambda m, x: pe.SinusoidalSpec(8, base=None), ValueError, "base: expected a number, got None"),
        (lambda m, x: pe.SinusoidalSpec(8, shift="x"), ValueError, "shift: expected a number, got 'x'"),
        (lambda m, x: pe.SinusoidalSpec.from_json('{"embedding_dim":4.5}'), ValueError, "embedding_dim: expected a whole number, got 4.5"),
        (lambda m, x: pe.SinusoidalSpec.from_json('{"embedding_dim":8,"theta":1}'), ValueError, "unknown key 'theta'"),
        (lambda m, x: pe.SinusoidalSpec.from_json("[]"), ValueError, "SinusoidalSpec: expected JSON text"),
    ],
)  # fmt: skip
def test_errors(call, error, text) -> None:
    x = torch.randn(2, 3, 8)
    before = x.clone()
    refused((call, error, text), given=(pe.SinusoidalPositionalEmbedding(8), x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positions_just_below_a_whole_number(dtype: torch.dtype) -> None:
    """The fraction rounds to one, which must carry."""
    encoded = pe.SinusoidalPositionalEmbedding(4, dtype=dtype).encode(torch.tensor([-1e-20], dtype=dtype))
    assert_close(encoded, torch.tensor([[0.0, 1.0, 0.0, 1.0]]), 1e-7)


@pytest.mark.parametrize("dtype", FLOATING)
def test_learned_scale(dtype: torch.dtype, device: torch.device) -> None:
    """A parameter that starts at ``scale``, multiplies the encodings, and learns."""
    options = {"scale": 0.5, "dtype": dtype, "device": device}
    module = pe.SinusoidalPositionalEmbedding(8, learned_scale=True, **options)
    plain = pe.SinusoidalPositionalEmbedding(8, **options)
    x = torch.randn(2, 5, 8, dtype=dtype, device=device)
    assert list(module.state_dict()) == ["scale"]
    assert torch.equal(module(x, offset=3), plain(x, offset=3))
    places = torch.arange(5, device=device)
    assert torch.equal(module.encode(places), plain.encode(places))
    wanted = x + 3 * plain.encode(places, dtype=dtype)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        (module(x) - wanted).float().pow(2).sum().backward()
        optimizer.step()
    assert abs(float(module.scale) - 1.5) < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_derivatives_by_float_positions_are_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    """Terms, sums or tangents of positions may overflow the data's dtype."""
    spec = pe.SinusoidalSpec(512, scale=1e3)
    positions = torch.arange(8.0, device=device, requires_grad=True)
    exact = positions.detach().double().requires_grad_()
    x = torch.zeros(64, 8, 512, device=device, dtype=dtype)
    for places in (positions, exact):
        data = x if places is positions else x.double()
        pe.functional.sinusoidal(data, places, spec=spec).backward(torch.full_like(data, 40.0))
    assert_close(positions.grad, exact.grad, 1e-5)
    _, tangent = torch.func.jvp(
        lambda p: pe.functional.sinusoidal_encode(p, spec=spec, dtype=dtype),
        (positions.detach(),),
        (torch.full_like(positions, 1e-7),),
    )
    assert_close(tangent[:, 0].double() * 1e4, exact.detach().cos(), 2 * TOLERANCE[dtype])


def test_scale_is_checked() -> None:
    spec = pe.SinusoidalSpec(4)
    refused(
        (lambda: pe.functional.sinusoidal(torch.zeros(3, 4), scale=torch.ones(2), spec=spec), ValueError, "scale: expected one number, got [2]"),
        (lambda: pe.functional.sinusoidal_encode(torch.arange(3), torch.ones((), dtype=torch.int32), spec=spec), TypeError, "scale: expected float32"),
        (lambda: pe.SinusoidalPositionalEmbedding(4, learned_scale="no"), ValueError, "learned_scale: expected True or False, got 'no'"),
    )  # fmt: skip


@pytest.mark.parametrize("dim", [7, 8])
@pytest.mark.parametrize("cos_first", [False, True])
def test_permutation_between_presets(dim: int, cos_first: bool) -> None:
    if dim % 2 and cos_first:
        pytest.skip("an odd row drops a cosine, or a sine where cosines come first")
    spec = pe.SinusoidalSpec(dim, scale=0.5)
    other = pe.SinusoidalSpec(dim, preset="marian", scale=0.5, cos_first=cos_first)
    positions = torch.arange(50)
    encode = pe.functional.sinusoidal_encode
    for a, b in ((spec, other), (other, spec)):
        order = a.permutation_to(b)
        assert torch.equal(encode(positions, spec=a)[:, order], encode(positions, spec=b))


def test_permutation_refuses_other_values() -> None:
    spec = pe.SinusoidalSpec(8)
    for other in (
        pe.SinusoidalSpec(8, preset="ddpm"),
        pe.SinusoidalSpec(8, base=100.0),
        pe.SinusoidalSpec(8, scale=2.0),
        pe.SinusoidalSpec(10),
        pe.SinusoidalSpec(8, padding_idx=1),
    ):
        refused((lambda: spec.permutation_to(other), ValueError, "other: expected the frequencies, the scale and the"))  # fmt: skip
    refused((lambda: pe.SinusoidalSpec(7).permutation_to(pe.SinusoidalSpec(7, preset="marian", cos_first=True)), ValueError, "other: expected"))  # fmt: skip


# ------------------------------------------------------------------------------------------ fairseq


@pytest.mark.parametrize("dim", [8, 9, 64])
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_m2m100s_positions(dim: int, padding: int, device: torch.device) -> None:
    """Padding has zeros, and tokens among it are counted from the row after it."""
    m2m_100 = pytest.importorskip("transformers.models.m2m_100.modeling_m2m_100")
    theirs = m2m_100.M2M100SinusoidalPositionalEmbedding(20, dim, padding)
    ids = torch.randint(6, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    ids[0, 6:] = ids[1, :3] = ids[2, 4] = padding
    position = pe.SinusoidalPositionalEmbedding(dim, preset="fairseq", padding_idx=padding)
    for past in (0, 3):
        places = pe.functional.roberta_positions(ids, padding, past_length=past).to(device)
        found = position.encode(places)
        assert_close(found, theirs(ids, past_key_values_length=past), 4e-6)  # float32 angles
        assert not found[places == -1].any()
        x = torch.randn(4, 9, dim, device=device)
        counted = theirs(inputs_embeds=x.cpu(), past_key_values_length=past).to(device)
        assert_close(position(x, offset=past), x + counted, 4e-6)


@pytest.mark.parametrize("preset", ["vaswani", "marian", "fairseq"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_padding_of_any_preset(preset: str, dtype: torch.dtype, device: torch.device) -> None:
    """Floating positions too; the sum with padding is the input."""
    padded = pe.SinusoidalPositionalEmbedding(70, preset=preset, padding_idx=4, scale=2.0)
    other = "tensor2tensor" if preset == "fairseq" else preset
    plain = pe.SinusoidalPositionalEmbedding(70, preset=other, scale=2.0)
    positions = torch.tensor([0.0, -1.0, 2.5, -0.5, 7.0, -1.0], device=device)
    x = torch.randn(3, 6, 70, device=device, dtype=dtype)
    expected = plain(x, positions + 5)
    expected[:, positions == -1] = x[:, positions == -1]
    assert torch.equal(padded(x, positions), expected)
    assert torch.equal(padded(x, offset=-1)[:, 1:], plain(x[:, 1:], offset=5))
    assert torch.equal(padded(x, offset=-1)[:, 0], x[:, 0])


def test_fairseqs_padding_is_1() -> None:
    fairseq, given = pe.SinusoidalSpec(8, preset="fairseq"), pe.SinusoidalSpec(8, padding_idx=1)
    assert fairseq.padding_idx is None
    assert pe.SinusoidalSpec.from_json(given.to_json()) == given != pe.SinusoidalSpec(8)
    encode = pe.functional.sinusoidal_encode
    same = pe.SinusoidalSpec(8, preset="ddpm", padding_idx=1)
    assert torch.equal(encode(torch.arange(-2, 5), spec=fairseq), encode(torch.arange(-2, 5), spec=same))
    assert fairseq.permutation_to(same).tolist() == list(range(8))


def test_derivatives_of_padding_are_zero(device: torch.device) -> None:
    spec = pe.SinusoidalSpec(8, preset="fairseq")
    positions = torch.tensor([3.0, -1.0], dtype=torch.float64, device=device, requires_grad=True)
    encoded = pe.functional.sinusoidal_encode(positions, spec=spec)
    (first,) = torch.autograd.grad(encoded.sum(), positions, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), positions)
    assert first[0] != 0
    assert second[0] != 0
    assert first[1] == second[1] == 0


@pytest.mark.parametrize(("flip", "shift"), [(True, 0), (False, 1), (True, 1)])
def test_timesteps_of_a_unet(flip: bool, shift: int) -> None:
    """As get_timestep_embedding of diffusers 0.42.0, models/embeddings.py:27-78."""
    unet = {"_class_name": "UNet2DConditionModel", "block_out_channels": [32, 64]}
    unet |= {"flip_sin_to_cos": flip, "freq_shift": shift}
    spec = pe.SinusoidalSpec.from_huggingface(unet)
    assert spec == pe.SinusoidalSpec(32, preset="ddpm", cos_first=flip, shift=shift)


def test_unets_that_state_less_or_something_else() -> None:
    unet = {"_class_name": "UNet2DModel", "block_out_channels": [224]}
    read = pe.SinusoidalSpec.from_huggingface
    assert read(unet) == read({**unet, "flip_sin_to_cos": True, "freq_shift": 0})
    refused(
        (lambda: read({**unet, "time_embedding_type": "fourier"}), ValueError, "time_embedding_type: expected 'positional'"),
        (lambda: read({"_class_name": "UNet9"}), ValueError, "_class_name: expected one of"),
        (lambda: read({"_class_name": "UNet2DModel"}), ValueError, "block_out_channels: expected a value"),
    )  # fmt: skip
