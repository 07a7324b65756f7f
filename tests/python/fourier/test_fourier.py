"""Tests of Fourier features beyond the shared tests of operators."""

import itertools
import math
from typing import Any

import mpmath
import posembed as pe
import pytest
import torch
from posembed.functional import fourier_features
from support.case import FLOATING, TOLERANCE, assert_close
from support.refusals import refused
from torch import Tensor

TURNS = {"radian": lambda: 1 / (2 * mpmath.pi), "half_turn": lambda: mpmath.mpf(0.5), "turn": lambda: 1}
STAMPS = torch.tensor([[1_700_000_000], [1_700_000_001], [-1_234_567_891]])


def exact(coordinates: Tensor, frequencies: Tensor, unit: str, phases: Tensor | None = None) -> Tensor:
    """Sines, then cosines of angles [rows, n] to 60 digits, rounded once."""
    rows = []
    with mpmath.workdps(60):
        for place in coordinates.tolist():
            angles = []
            for i, rates in enumerate(frequencies.T.tolist()):
                turns = sum(mpmath.mpf(a) * mpmath.mpf(b) for a, b in zip(place, rates, strict=True))
                phase = 0 if phases is None else mpmath.mpf(phases[i].item())
                angles.append(turns * TURNS[unit]() * 2 * mpmath.pi + phase)
            rows.append([float(f(angle)) for f in (mpmath.sin, mpmath.cos) for angle in angles])
    return torch.tensor(rows, dtype=torch.float64)


def spread(shape: tuple[int, ...], low: int, high: int) -> Tensor:
    """Numbers of either sign whose powers of ten are uniform."""
    signs = torch.randint(0, 2, shape) * 2.0 - 1
    return signs * 10.0 ** (torch.rand(shape, dtype=torch.float64) * (high - low) + low)


@pytest.mark.parametrize("unit", TURNS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_angles_are_exact(unit: Any, kind: torch.dtype, device: torch.device) -> None:
    """Up to 1e9 turns of each axis, and beyond: float64 has no digit of 1e24 turns."""
    torch.manual_seed(3)
    for axes, low, high in ((1, -3, 9), (3, -30, 4), (2, 5, 14)):
        top = {torch.float32: 18, torch.float64: 18, torch.int32: 9, torch.int64: 18}[kind]
        coordinates = spread((12, axes), 0 if not kind.is_floating_point else -8, top).to(kind)
        frequencies, phases = spread((axes, 5), low, high), spread((5,), -2, 6)
        wanted = exact(coordinates, frequencies, unit, phases)
        given = [x.to(device) for x in (coordinates, frequencies, phases)]
        for dtype, limit in ((torch.float32, 2e-7), (torch.float64, 2e-15)):
            found = fourier_features(*given, unit=unit, dtype=dtype)
            assert_close(found, wanted, limit)


def test_tiny_and_whole_coordinates(device: torch.device) -> None:
    coordinates = torch.tensor([[0.0], [2.0**-149], [5e-324], [2.0**-70], [-(2.0**62)], [1.0]], dtype=torch.float64)  # fmt: skip
    frequencies = torch.tensor([[2.0**49, -(2.0**49) + 0.125, 1 / 3, 0.0]], dtype=torch.float64)
    wanted = exact(coordinates, frequencies, "turn")
    found = fourier_features(coordinates.to(device), frequencies.to(device), unit="turn")
    assert_close(found, wanted, 2e-15)


@pytest.mark.parametrize("count", [10, 16, 20, 50])
def test_octaves_are_exact(count: int, device: torch.device) -> None:
    points = torch.rand(20, 1, device=device) * 2 - 1
    rates = 2.0 ** torch.arange(count, dtype=torch.float64)[None]
    wanted = exact(points, rates, "half_turn")
    module = pe.FourierFeatures(octaves=count).to(device)
    assert_close(module(points), wanted, 2e-7)
    assert_close(module(points.double()), wanted, 2e-15)


def test_bands_have_more_digits_than_float64(device: torch.device) -> None:
    """The 60-digit bands; each rounded to float64 would be off by 2e-14."""
    points = torch.rand(20, 1, dtype=torch.float64, device=device) * 2 - 1
    rows = []
    with mpmath.workdps(60):
        bands = [1 + mpmath.mpf(i) * (mpmath.mpf(1120.05) - 1) / 63 for i in range(64)]
        for place in points.flatten().tolist():
            angles = [mpmath.mpf(place) * band * mpmath.pi for band in bands]
            rows.append([float(f(angle)) for f in (mpmath.sin, mpmath.cos) for angle in angles])
    module = pe.FourierFeatures(bands=(64, 2240.1)).to(device)
    assert_close(module(points), torch.tensor(rows, dtype=torch.float64), 2e-15)
    one = pe.functional.fourier_bands(3.0, 5.0, 1)
    assert one.tolist() == [[3.0], [0.0]]


# ------------------------------------------------------------------------------------------ programs


def nerf(points: Tensor) -> Tensor:
    """get_embedder(10) of nerf-pytorch."""
    columns = [points]
    for octave in range(10):
        columns += [torch.sin(points * 2.0**octave), torch.cos(points * 2.0**octave)]
    return torch.cat(columns, -1)


def test_nerf() -> None:
    points = torch.rand(2, 7, 3, dtype=torch.float64) * 2 - 1
    module = pe.FourierFeatures(preset="nerf")
    assert_close(module(points), nerf(points), 1e-13)
    assert module(points.float()).shape == (2, 7, 63)
    paper = pe.FourierFeatures(preset="nerf", unit="half_turn")
    assert_close(paper(points / math.pi)[..., 3:], nerf(points)[..., 3:], 1e-12)


def test_perceiver() -> None:
    perceiver = pytest.importorskip("transformers.models.perceiver.modeling_perceiver")
    points = torch.rand(5, 2, dtype=torch.float64) * 2 - 1
    wanted = perceiver.generate_fourier_features(points[None], 64, [224, 224])[0]
    found = pe.FourierFeatures(preset="perceiver")(points)
    assert_close(found, wanted, 1e-4)  # the program's bands are float32
    alike = pe.FourierFeatures(torch.linspace(1, 112, 64), unit="half_turn", include_input=True)
    assert_close(alike(points), wanted, 1e-12)


def test_sam() -> None:
    """The matrix is read; casts do not ruin it."""
    sam = pytest.importorskip("transformers.models.sam.modeling_sam")
    config = sam.SamPromptEncoderConfig()
    config.num_pos_feats, config.scale = 128, 32.0
    torch.manual_seed(0)
    program = sam.SamPositionalEmbedding(config)
    points = torch.rand(1, 1, 50, 2)
    wanted = program.double()(points.double())
    for name in ("positional_encoding_gaussian_matrix", "positional_embedding", "frequencies"):
        for assign in (False, True):
            module = pe.FourierFeatures(preset="sam")
            matrix = program.positional_embedding.float()
            module.load_state_dict({name: matrix}, assign=assign)
            assert module.frequencies.dtype == torch.float64
            assert_close(module(points), wanted, 1e-6)
            assert_close(module.bfloat16()(points), wanted, 1e-6)
            assert_close(module(points.double()), wanted, 1e-12)


def test_gaussian() -> None:
    module = pe.FourierFeatures(preset="gaussian")
    assert 12 < module.frequencies.std() < 20
    times = torch.rand(4, 1)
    angles = times.double() * module.frequencies * 2 * math.pi
    assert_close(module(times), torch.cat([angles.sin(), angles.cos()], -1), 2e-7)


def test_time2vec_of_time_stamps() -> None:
    """Kazemi's formula at seconds since 1970, whose float32 angles are off by radians."""
    module = pe.FourierFeatures(preset="time2vec", random=(1, 9, 1.0, 5))
    with torch.no_grad():
        module.phases.normal_(), module.linear_weight.fill_(1.0), module.linear_bias.fill_(-1.7e9)
    found = module(STAMPS)
    waves = exact(STAMPS, module.frequencies, "radian", module.phases)[:, :9]
    line = torch.tensor([[0.0], [1.0], [-2_934_567_891.0]], dtype=torch.float64)
    assert found.dtype == torch.float32
    assert torch.equal(found[:, :1], line.float())
    assert_close(found[:, 1:], waves, 2e-7)
    found.sum().backward()
    cosines = exact(STAMPS, module.frequencies, "radian", module.phases)[:, 9:]
    assert_close(module.frequencies.grad, (cosines * STAMPS).sum(0, keepdim=True), 1e-6)
    assert_close(module.linear_weight.grad, STAMPS.double().sum(0, keepdim=True), 1e-6)


# ------------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize("order", ["".join(o) for o in itertools.permutations("afw")])
@pytest.mark.parametrize("waves", ["sin_cos", "cos_sin", "sin", "cos"])
def test_every_order(order: str, waves: Any, device: torch.device) -> None:
    points = torch.rand(4, 2, dtype=torch.float64, device=device)
    rates = torch.tensor([1.0, 2.5, -7.0], dtype=torch.float64, device=device)
    angles = points[:, :, None] * rates
    columns = torch.stack([getattr(angles, wave)() for wave in waves.split("_")], -1)
    wanted = torch.einsum(f"zafw->z{order}", columns).flatten(1)
    assert_close(fourier_features(points, rates, waves=waves, order=order), wanted, 1e-14)
    phases = torch.tensor([0.5, 1.0, 1e6], dtype=torch.float64, device=device)
    summed = points @ torch.stack([rates, 2 * rates]) + phases
    columns = torch.stack([getattr(summed, wave)() for wave in waves.split("_")], -1)
    wanted = torch.einsum(f"zfw->z{order.replace('a', '')}", columns).flatten(1)
    found = fourier_features(points, torch.stack([rates, 2 * rates]), phases, waves=waves, order=order.replace("a", ""))
    assert_close(found, wanted, 1e-10)  # float64 angles of 1e6


@pytest.mark.parametrize("dtype", FLOATING)
def test_added_to_x(dtype: torch.dtype, device: torch.device) -> None:
    points = torch.rand(3, 5, 2, device=device)
    x = torch.randn(3, 5, 64, device=device).to(dtype)
    module = pe.FourierFeatures(random=(2, 32, 10.0, 1)).to(device)
    assert_close(module(points, x), x.double() + module(points.double()), TOLERANCE[dtype])
    assert module(points, x).dtype == dtype
    both = pe.FourierFeatures(octaves=3, include_input="last").to(device)
    y = torch.randn(3, 5, 14, device=device).to(dtype)
    assert_close(both(points, y), y.double() + both(points, dtype=dtype), TOLERANCE[dtype])
    assert torch.equal(both(points)[..., -2:], points)


def test_coordinates_without_an_angle(device: torch.device) -> None:
    """NaN, infinity, 2^63 and frequencies from 2^50 on have none; their neighbours have."""
    points = torch.tensor([[1.0], [math.nan], [math.inf], [2.0**63]], device=device)
    rates = torch.tensor([1.0, math.nan, -math.inf, 2.0**50], device=device)
    found = fourier_features(points, rates, order="awf").unflatten(-1, (2, 4))
    assert found[0, :, 0].isfinite().all()
    assert found[1:].isnan().all()
    assert found[:, :, 1:].isnan().all()
    phases = torch.tensor([0.0, math.nan, math.inf, 2.0**63], device=device)
    turned = fourier_features(points[:1], torch.ones(4, device=device), phases)
    assert turned.isnan().tolist() == [[False, True, True, True] * 2]
    lowest = torch.tensor([[-(2**63)], [2**63 - 1]], device=device)
    quarter = fourier_features(lowest, torch.tensor([0.25], device=device), unit="turn")
    assert_close(quarter, torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), 1e-7)


def test_sizes(device: torch.device) -> None:
    rates = torch.ones(3, device=device)
    for shape in ((0, 2), (2, 0), (4, 0, 1), (2,)):
        found = fourier_features(torch.rand(shape, device=device), rates)
        assert found.shape == (*shape[:-1], shape[-1] * 6)
    assert fourier_features(torch.rand(5, 2, device=device), torch.rand(2, 0, device=device)).shape == (5, 0)  # fmt: skip
    many = torch.rand(2, 1000, device=device)
    points = torch.rand(70, 2, device=device)
    whole, parts = fourier_features(points, many), fourier_features(points, many[:, 300:301])
    assert torch.equal(whole[:, 300::1000], parts)
    turned = torch.rand(2, 70, device=device).T
    assert torch.equal(fourier_features(turned, many), fourier_features(turned.contiguous(), many))


def test_normals_of_a_field(device: torch.device) -> None:
    """A loss of gradients by points, as for NeRF's normals: second derivatives in float32."""
    points = torch.rand(6, 3, device=device, requires_grad=True)
    module = pe.FourierFeatures(octaves=4).to(device)
    weight = torch.randn(24, device=device)
    (normal,) = torch.autograd.grad((module(points) @ weight).sum(), points, create_graph=True)
    (found,) = torch.autograd.grad(normal.square().sum(), points)
    wide = points.detach().double().requires_grad_()
    angles = wide[..., None] * 2.0 ** torch.arange(4, device=device) * math.pi
    field = torch.stack([angles.sin(), angles.cos()], 1).flatten(1) @ weight.double()
    (wanted,) = torch.autograd.grad(field.sum(), wide, create_graph=True)
    assert_close(normal, wanted, 1e-6)
    assert_close(found, torch.autograd.grad(wanted.square().sum(), wide)[0], 1e-6)
    assert normal.dtype == torch.float32


def test_gradients_under_autocast() -> None:
    points = torch.rand(6, 2, requires_grad=True)
    module = pe.FourierFeatures(random=(2, 8, 50.0, 3), learned=True)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = module(points)
            found.append(torch.autograd.grad(y.square().sum() + y.sum(), [points, module.frequencies]))
    for plain, cast in zip(*found, strict=True):
        assert torch.equal(plain, cast)


# --------------------------------------------------------------------------------------------- state


def test_drawn_frequencies_follow_the_seed() -> None:
    first = pe.FourierFeatures(random=(2, 64, 10.0, 42))
    torch.manual_seed(1)
    again = pe.FourierFeatures(random=(2, 64, 10.0, 42))
    bound = pe.cpp.FourierFeatures(random=(2, 64, 10.0, 42))
    points = torch.rand(5, 2)
    assert torch.equal(first(points), again(points))
    assert torch.equal(first(points), bound.forward(points))
    generator = torch.Generator().manual_seed(42)
    drawn = torch.randn(2, 64, generator=generator, dtype=torch.float64) * 10
    assert torch.equal(first.frequencies, drawn)
    assert not torch.equal(pe.FourierFeatures(random=(2, 64, 10.0)).frequencies, drawn)


def test_learned_frequencies_are_parameters() -> None:
    module = pe.FourierFeatures(bands=(5, 12.0), learned=True)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {"frequencies": (1, 5), "phases": (5,)}  # fmt: skip
    start = module.frequencies.detach().clone()
    module(torch.rand(7, 3)).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())
    with torch.no_grad():
        module.frequencies.zero_()
    module.reset_parameters()
    assert torch.equal(module.frequencies, start)
    assert module.half().frequencies.dtype == torch.float16


def test_refusals() -> None:
    points, rates = torch.rand(4, 2), torch.rand(2, 3)
    make = pe.FourierFeatures
    refused(
        (make, ValueError, "frequencies: expected one of frequencies, octaves, bands and random, got \\[\\]"),
        (lambda: make(rates, octaves=3), ValueError, "frequencies: expected one of frequencies, octaves, bands and random, got \\['frequencies', 'octaves'\\]"),
        (lambda: make(preset="ner"), ValueError, "preset: expected one of 'nerf', 'perceiver', 'sam', 'gaussian', 'time2vec', got 'ner'"),
        (lambda: make([1.0]), TypeError, "frequencies: expected a Tensor, got a list"),
        (lambda: make(octaves=3, include_input="middle"), ValueError, "include_input: expected 'first' or 'last', got 'middle'"),
        (lambda: make(octaves=3, order="fw"), ValueError, "order: expected the letters a, f and w, got 'fw'"),
        (lambda: make(rates, phases=torch.rand(2)), ValueError, "phases: expected n 3, got 2"),
        (lambda: fourier_features(points, rates, unit="degree"), ValueError, "unit: expected one of 'radian', 'half_turn', 'turn', got 'degree'"),
        (lambda: fourier_features(points, rates, waves="tan"), ValueError, "waves: expected one of 'sin_cos', 'cos_sin', 'sin', 'cos', got 'tan'"),
        (lambda: fourier_features(points, rates, order="ff"), ValueError, "order: expected .*, got 'ff'"),
        (lambda: fourier_features(points[:, :1], rates), ValueError, "frequencies: expected axes 1, got 2"),
        (lambda: fourier_features(points, rates, torch.rand(2)), ValueError, "phases: expected n 3, got 2"),
        (lambda: fourier_features(points, rates, None, torch.rand(4, 5)), ValueError, "x: expected [4, 6], got [4, 5]"),
        (lambda: fourier_features(points, rates, None, torch.rand(4, 6), dtype=torch.float64), TypeError, "dtype: expected that of x, float32, got float64"),
        (lambda: fourier_features(points.half(), rates), TypeError, "coordinates: expected int32, int64, float32 or float64, got float16"),
        (lambda: fourier_features(points, rates.long()), TypeError, "frequencies: expected float32, float64, bfloat16 or float16, got int64"),
        (lambda: fourier_features(points[0, 0], rates), ValueError, "coordinates: expected [..., axes], got a scalar"),
        (lambda: pe.functional.fourier_bands(math.nan, 1.0, 3), ValueError, "first: expected finite numbers first and last, got nan and 1"),
        (lambda: pe.functional.fourier_bands(0.0, 1.0, 0), ValueError, "count: expected 1 to 65536, got 0"),
    )  # fmt: skip


@pytest.mark.parametrize("preset", ["nerf", "gaussian"])
def test_programs_give_no_dtype_that_is_the_operators_own(preset: str) -> None:
    """AOTInductor of torch 2.11 misreads dtypes: pytorch/pytorch#169157."""
    options: dict[str, Any] = {"octaves": 2} if preset == "nerf" else {"random": (2, 3, 1.0, 0)}
    module = pe.FourierFeatures(preset=preset, **options)
    program = torch.export.export(module, (torch.randn(4, 2),))
    (call,) = (node for node in program.graph.nodes if "fourier_features" in str(node.target))
    assert torch.float32 not in call.args
    assert module(torch.randn(4, 2)).dtype == torch.float32
