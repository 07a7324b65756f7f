"""Tests gradient="rows" of the input embedding: the bits equal those of two operators."""

import posembed as pe
import pytest
import torch
from support.case import FLOATING
from support.halves import CUDA_ON_CPU
from support.refusals import refused
from torch import Tensor

ROWS, SEQ = 500, 40
IDS = {
    "uniform": lambda: torch.randint(ROWS, (6, SEQ)),
    "frequent": lambda: (torch.rand(6, SEQ) ** 6 * ROWS).long(),
    "equal": lambda: torch.full((6, SEQ), 7),
    "different": lambda: torch.randperm(ROWS)[: 6 * SEQ].view(6, SEQ).int(),
    "empty": lambda: torch.zeros(0, SEQ, dtype=torch.long),
    "large": lambda: torch.randint(ROWS, (6, 1500)),  # written past the caches
}
OPTIONS = [
    {"norm": "layer"},
    {"norm": "layer", "padding_idx": 7, "types": 2},
    {"norm": "rms", "sinusoidal": True},
    {"norm": "layer", "dropout": 0.3},
    {"norm": "none", "dropout": 0.3},
    {"norm": "none"},
    {"norm": "rms", "scale": 3.0},
    {"norm": "layer", "given": True, "types": 20},
]


def bits(tensor: Tensor) -> Tensor:
    """The bits, in which -0 differs from 0."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def arguments(
    ids: Tensor, dim: int, dtype: torch.dtype, device: torch.device | str, options: dict
) -> tuple[list[Tensor | None], dict]:
    """Arguments of input_embedding, with every table that the options require."""
    options = {"norm": "none", "dropout": 0.0, **options}
    sinusoidal, given = options.pop("sinusoidal", False), options.pop("given", False)
    num_types = options.pop("types", 0)
    place = {"dtype": dtype, "device": device}
    normed = options["norm"] != "none"
    tensors = [
        torch.randn(ROWS, dim, **place),
        ids.to(device),
        None if sinusoidal else torch.randn(1600, dim, **place),
        torch.randint(1600, ids.shape, device=device) if given else None,
        torch.randn(num_types, dim, **place) if num_types else None,
        torch.randint(num_types, ids.shape, device=device) if num_types else None,
        torch.randn(dim, **place) if normed else None,
        torch.randn(dim, **place) if options["norm"] == "layer" else None,
        torch.tensor([5], device=device) if options["dropout"] else None,
    ]
    if sinusoidal:
        options["sinusoid"] = pe.SinusoidalSpec(dim).to_json()
    return tensors, options


def small_and_zero(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gradients, some of which vanish or become -0 when rounded."""
    tokens = (*shape[:2], 1)
    sizes = 10.0 ** torch.randint(-8, 1, tokens, device=device)
    some = torch.randint(0, 2, tokens, device=device)
    return (torch.randn(shape, device=device) * sizes * some).to(dtype)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", IDS)
def test_bits_of_the_operators_one_after_the_other(
    dtype: torch.dtype, options: dict, kind: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    operators = torch.ops.posembed
    for dim in (83, 256):
        ids = IDS[kind]()
        args, more = arguments(ids, dim, dtype, device, options)
        _, mean, rstd = operators.input_embedding_forward(*args, **more)
        gradient = small_and_zero((*ids.shape, dim), dtype, device)
        sum_gradient, *others = operators.input_embedding_backward(gradient, mean, rstd, *args, **more)
        row_ids, rows = operators.embedding_backward_rows(
            gradient if sum_gradient.numel() == 0 else sum_gradient,
            ROWS,
            args[1],
            padding_idx=more.get("padding_idx", -1),
            scale=more.get("scale", 1.0),
        )
        found = operators.input_embedding_backward_rows(gradient, mean, rstd, *args, **more)
        assert torch.equal(found[0], row_ids)
        for mine, theirs in zip(found[1:], (rows, *others), strict=True):
            assert torch.equal(bits(mine), bits(theirs))
        if args[1].device.type == "cpu" and not CUDA_ON_CPU:  # only the rows are kept alive
            assert found[1].untyped_storage().nbytes() == found[1].nbytes


def make(**options: object) -> pe.InputEmbedding:
    torch.manual_seed(0)
    usual = {"max_positions": 100, "norm": "layer", "gradient": "rows"}
    return pe.InputEmbedding(ROWS, 64, **usual | options)


@pytest.mark.no_stand_in
def test_the_module_has_no_gradient_of_the_sum() -> None:
    """Outputs and touched rows are the largest memory of a step."""
    embed, ids = make(), torch.randperm(ROWS)[:400].view(4, 100)
    result = embed(ids)
    with torch.profiler.profile() as profile:
        result.sum().backward()
    names = {event.name for event in profile.events()}
    assert "posembed::input_embedding_backward_rows" in names
    assert "posembed::embedding_backward_rows" not in names


@pytest.mark.parametrize(
    "options", [{}, {"scale": 2.0}, {"num_types": 2, "padding_idx": 7}, {"norm": None}, {"num_types": 20}], ids=str
)
def test_rows_equal_dense_gradients(options: dict, device: torch.device) -> None:
    ids = torch.randint(50, (6, SEQ), device=device)
    gradient = torch.randn(6, SEQ, 64, device=device)
    found = []
    for form in ("dense", "rows"):
        embed = make(**options, gradient=form).to(device)
        embed(ids).backward(gradient)
        found.append([p.grad.to_dense() for p in embed.parameters()])
    for dense, rows in zip(*found, strict=True):
        assert torch.equal(dense, rows)


def test_frozen_tokens_and_given_positions() -> None:
    """If the rows are not needed, or the gradient of the sum is needed too."""
    ids, positions = torch.randint(ROWS, (6, SEQ)), torch.randint(100, (6, SEQ))
    for frozen in (True, False):
        found = []
        for form in ("dense", "rows"):
            embed = make(gradient=form)
            embed.token.weight.requires_grad_(not frozen)
            embed(ids, positions=positions).square().sum().backward()
            found.append([p.grad.to_dense() for p in embed.parameters() if p.requires_grad])
        for dense, rows in zip(*found, strict=True):
            assert torch.equal(dense, rows)


def test_second_derivatives_are_refused_for_rows_alone() -> None:
    embed = make().double()
    ids = torch.randint(ROWS, (3, SEQ))
    of_token, of_norm = torch.autograd.grad(
        embed(ids).pow(3).sum(), (embed.token.weight, embed.norm.weight), create_graph=True
    )
    (second,) = torch.autograd.grad(of_norm.sum(), embed.norm.weight, retain_graph=True)
    assert second.any()
    refused((of_token.to_dense().sum().backward, NotImplementedError, "gradient='dense'"))
