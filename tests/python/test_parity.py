"""Tests that Python modules and their C++ twins agree: values, state_dict, repr, results."""

import dataclasses
from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from support.refusals import refused
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Twins:
    """A module's name, the arguments that build it in both languages, and a call that both take."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Callable[[Any], Any]

    def build(self) -> tuple[nn.Module, nn.Module]:
        modules = []
        for namespace in (pe, pe.cpp):
            torch.manual_seed(7)
            modules.append(getattr(namespace, self.name)(*self.args, **self.kwargs))
        return modules[0], modules[1]


def twins(name: str, *args: Any, call: Callable[[Any], Any], **kwargs: Any) -> Any:
    options = ",".join([*map(str, args), *(f"{k}={v}" for k, v in kwargs.items())])
    return pytest.param(Twins(name, args, kwargs, call), id=f"{name}({options})")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(0))


def look_up(module: Any) -> Any:
    return module.forward(ids(2, 5)), module.logits(numbers(2, 8))


def train(module: Any) -> Any:
    """Dropout draws from torch's generator in both languages."""
    torch.manual_seed(11)
    module.train()
    return module.forward(ids(2, 5), types=ids(2, 5) % 2, offset=2)


def drop_second_half(module: Any) -> Any:
    """Drops the second of two rows of tokens with the mask of the whole batch."""
    module.train()
    return module.forward(ids(1, 4), seed=torch.tensor([42]), first_token=4)


def put_features(module: Any) -> Any:
    places = torch.tensor([[False, True, True, False], [False, False, False, True]])
    return module.with_embeddings(ids(2, 4).masked_fill(places, -1), numbers(3, 8), places)


def rotate_pair(module: Any) -> Any:
    return module.forward(numbers(2, 5, 4, 8), numbers(2, 5, 1, 8), offset=3)


def grow(module: Any) -> Any:
    """Adds the same new rows from the same generator, then removes some."""
    module.resize(300, "mean-and-covariance", generator=torch.Generator().manual_seed(3))
    grown = module.forward(torch.arange(300))
    module.resize(10)
    module.resize(11, torch.ones(1, 8))
    return grown, module.forward(torch.arange(11))


def extend(module: Any) -> Any:
    module.extend(13, "cubic")
    return module.forward(numbers(2, 13, 8))


def resample(module: Any) -> Any:
    module.extend((5, 2))
    return module.forward(numbers(2, 10, 8))


def extend_plain(module: Any) -> Any:
    module.extend((6, 5), from_grid=(4, 4))
    return module.resampled((3, 3))


def sequence_first(module: Any) -> Any:
    x, documents = numbers(5, 2, 8), {"cu_seqlens": torch.tensor([0, 2, 5]), "offset": 4}
    calls = ({"offset": 3}, {"offset": torch.tensor([3, 7])}, {"positions": ids(2, 5)}, {"positions": ids(5)})
    return (*(module.forward(x, **call) for call in calls), module.forward(x[:, :1], **documents))


def encode(module: Any) -> Any:
    points = numbers(2, 5, 2)
    encoded = module.forward(points)
    added = module.forward(points, numbers(*encoded.shape))
    return encoded, added, module.forward(ids(5, 2), dtype=torch.float64)


def enlarge(module: Any) -> Any:
    module.extend((4, 3))
    return module.of_window()


NGRAMS = pe.NgramSpec.qwen4_exp(12, boundary=2, layer=1, rows=9, heads=2, divisor=8)
MODULES = [
    twins("TokenEmbedding", 12, 8, call=look_up),
    twins("TokenEmbedding", 12, 8, 3, 1.5, 1.0, True, scale=0.5, gradient="rows", call=look_up),
    twins("TokenEmbedding", 12, 8, padding_idx=-1, sparse=True, scale="sqrt_dim", call=look_up),
    twins("TokenEmbedding", 12, 8, padding_idx=3, call=grow),
    twins("TokenEmbedding", 12, 8, scale=2.0, call=lambda m: (put_features(m), m.quantize("int8") or put_features(m))),
    twins("TokenEmbedding", 12, 8, call=lambda m: m.train_rows(torch.tensor([3])) or put_features(m)),
    twins("TokenBag", 12, 8, call=lambda m: m.forward(ids(2, 5), weights=numbers(2, 5))),
    twins("TokenBag", 12, 8, "mean", -1, include_last_offset=True, gradient="rows", call=lambda m: m.forward(ids(7), torch.tensor([0, 3, 3, 7]))),
    twins("TokenBag", 12, 8, mode="max", call=lambda m: m.forward(ids(7), torch.tensor([0, 3]))),
    twins("NgramEmbedding", NGRAMS, 12, call=lambda m: (m.forward(ids(2, 5)), m.forward(ids(5)))),
    twins("NgramEmbedding", pe.NgramSpec.blt(2, (2, 3), 7), 6, summed=True, gradient="rows", call=lambda m: m.forward(ids(2, 5), m.next_history(ids(2, 1)), torch.tensor([0, 5]))),
    twins("NgramEmbedding", pe.NgramSpec.longcat(12, ngram_size=3, heads=2, ratio=1.3), 8, call=lambda m: m.forward(ids(2, 5))),
    twins("QuantizedTable", *pe.functional.quantize_rows(numbers(12, 8), "int4", 4), call=lambda m: (m.forward(ids(2, 5)), m.forward(ids(3), 2.0), m.dequantize())),
    twins("QuantizedTable", *pe.functional.quantize_rows(numbers(12, 8), "float8"), dtype=torch.bfloat16, call=lambda m: m.forward(ids(2, 5))),
    twins("PerLayerEmbedding", 12, 3, 4, scale="sqrt_dim", call=lambda m: (m.forward(ids(2, 5)), m.layer(ids(5), -1))),
    twins("LearnedPositionalEmbedding", 9, 8, call=lambda m: m.forward(numbers(2, 5, 8), offset=3)),
    twins("LearnedPositionalEmbedding", 13, 8, first_row=2, call=lambda m: (m.forward(numbers(2, 5, 8), ids(5)), m.encode(ids(2, 3) - 2))),
    twins("InputEmbedding", 12, 8, max_positions=9, num_types=2, norm="layer", eps=1e-12, dropout=0.25, padding_idx=0, call=train),
    twins(
        "InputEmbedding",
        12,
        8,
        positions="sinusoidal",
        padding_idx=3,
        position_rule="roberta",
        scale="sqrt_dim",
        call=lambda m: (m.forward(ids(2, 5)), m.forward(inputs_embeds=numbers(2, 5, 8), offset=2)),
    ),
    twins("InputEmbedding", 12, 8, max_positions=9, num_types=2, dropout=0.5, call=drop_second_half),
    twins("InputEmbedding", 12, 8, max_positions=9, scale=2.0, call=put_features),
    twins("InputEmbedding", 12, 8, max_positions=9, padding_idx=7, position_rule="roberta", call=put_features),
    twins("InputEmbedding", 12, 8, max_positions=9, token_dim=4, call=lambda m: m.forward(inputs_embeds=numbers(2, 5, 4))),
    twins("InputEmbedding", 12, 8, positions="sinusoidal", norm="rms", scale="sqrt_dim", gradient="rows", call=lambda m: m.forward(ids(2, 5), positions=ids(2, 5))),
    twins("InputEmbedding", 12, 8, positions=None, call=lambda m: m.forward(ids(2, 5))),
    twins("InputEmbedding", 12, 8, max_positions=9, padding_idx=3, position_rule="roberta", norm="layer", output_dim=6, call=lambda m: m.forward(ids(2, 5), offset=1)),
    twins("InputEmbedding", 12, 8, max_positions=9, position_rule="opt", token_dim=4, scale=2.0, call=lambda m: m.forward(ids(2, 5), attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 1]]))),
    twins("InputEmbedding", 12, 8, positions=None, token_dim=4, scale="sqrt_dim", call=lambda m: m.forward(ids(2, 5))),
    twins(
        "LearnedPositionalEmbedding",
        embedding_dim=8,
        grid=(3, 4),
        prefix_tokens=1,
        resampling="bilinear",
        antialias=True,
        call=lambda m: (m.forward(numbers(2, 11, 8), grid=(5, 2)), m.forward(numbers(2, 13, 8))),
    ),
    twins("LearnedPositionalEmbedding", embedding_dim=8, grid=(3, 4), align_corners=True, scale_offset=0.5, call=resample),
    twins("LearnedPositionalEmbedding", 17, 8, call=extend_plain),
    twins("RelativePositionBias", 4, call=lambda m: m.forward(3, 5)),
    twins("RelativePositionBias", 4, call=lambda m: m.forward(4, 6, query_positions=ids(2, 4), attention_mask=ids(2, 6) > 3, key_positions=ids(2, 6))),
    twins("RelativePositionBias", 2, call=lambda m: m.forward(5, cu_seqlens=torch.tensor([0, 2, 5]))),
    twins("RelativePositionBias", 2, window=(2, 3), class_token=True, resampling="bicubic", align_corners=True, call=lambda m: (m.of_window(), m.of_window((4, 3)), m.table((4, 3)), enlarge(m))),
    twins("RelativePositionBias", 2, window=(2, 3), mlp_dim=8, pretrained_window=(4, 4), call=lambda m: (m.of_window(), m.of_window((4, 3)))),
    twins("RelativePositionBias", 2, window=(2, 3), mlp_dim=8, mlp_rule="cr", call=lambda m: (m.of_window(), m.of_window((4, 3)))),
    twins("RelativePositionBias", 2, window=(2, 1, 3), call=lambda m: m.of_window()),
    twins(
        "SinusoidalPositionalEmbedding",
        16,
        preset="detr",
        start=0.5,
        call=lambda m: (
            m.forward(numbers(2, 6, 16), grid=(2, 3)),
            m.forward(numbers(2, 6, 16), grid=(2, 3), mask=ids(2, 2, 3) < 7),
            m.encode_grid((2, 3), dtype=torch.float64),
        ),
    ),
    twins(
        "SinusoidalPositionalEmbedding",
        9,
        axes=(2, 0, 1),
        widths=(4, 2, 3),
        length=2.5,
        interpolation_scale=(1.0, 2.0, 4.5),
        max_size=7,
        call=lambda m: (m.encode(numbers(3, 5)), m.forward(numbers(1, 6, 9), grid=(1, 2, 3))),
    ),
    twins("RelativePositionBias", 2, num_buckets=9, bidirectional=False, buckets="bert", call=lambda m: m.forward(3, 5, query_offset=1)),
    twins("RelativeLogits", 7, 8, call=lambda m: m.forward(numbers(2, 3, 4, 8), 5)),
    twins("RelativeLogits", 5, 8, scale=0.5, call=torch.no_grad()(lambda m: m.add_(torch.ones(2, 3, 4, 4), numbers(2, 3, 4, 8)))),
    twins("RelativeLogits", 3, 8, buckets="band", bidirectional=False, call=lambda m: m.forward(numbers(1, 1, 4, 8), cu_seqlens=torch.tensor([0, 1, 4]))),
    twins(
        "RelativeLogits",
        (3, 5),
        8,
        num_heads=3,
        buckets="bert",
        causal=True,
        by="key",
        scale=0.5,
        call=lambda m: m.forward(
            numbers(2, 3, 4, 8),
            scores=numbers(2, 3, 4, 4),
            query_positions=ids(2, 4),
            key_positions=ids(2, 4),
        ),
    ),
    twins("RelativeLogits", 8, 8, buckets="deberta", max_distance=9, call=lambda m: m.forward(numbers(2, 3, 4, 8), 6, query_offset=torch.tensor([2, 1]), apply_mask=True)),
    twins("ALiBi", 12, call=lambda m: m.forward(3, 5)),
    twins("ALiBi", 4, slopes="geometric", max_bias=4.5, causal=False, total_heads=9, head_start=5, call=lambda m: m.forward(5, query_offset=2, dtype=torch.bfloat16)),
    twins("ALiBi", 3, slopes=torch.tensor([[0.3, 0.2, 0.1], [0.7, 0.5, 0.25]]), causal=False, learned=True, call=lambda m: m.attention(numbers(1, 3, 4, 8), numbers(1, 1, 6, 8), numbers(1, 1, 6, 8))),
    twins("ALiBi", 6, slopes="geometric", factor=2.0, train_length=4, call=lambda m: m.softmax(numbers(2, 6, 3, 5), scale=0.5, attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]]))),
    twins("ALiBi", 9, total_heads=66, head_start=63, train_length=3, call=lambda m: (m.alibi_slopes(2, 16), m.attention(*[numbers(2, 9, 5, 8)] * 3, scale=0.125))),
    twins("TokenEmbedding", 12, 8, max_norm=0.5, call=lambda m: (m.forward(ids(2, 5)), m.weight)),
    twins("TokenEmbedding", 12, 0, max_norm=0.5, call=lambda m: m.forward(ids(2, 5))),
    twins("ALiBi", 4, causal=False, call=lambda m: m.lse_correction(3, query_start=8, key_start=4, form="key")),
    twins("SinusoidalPositionalEmbedding", 8, call=lambda m: m.forward(numbers(2, 5, 8), offset=3)),
    twins("SinusoidalPositionalEmbedding", 7, preset="ddpm", cos_first=True, base=100.0, scale=0.5, call=lambda m: m.encode(numbers(2, 5))),
    twins("SinusoidalPositionalEmbedding", 7, preset="fairseq", padding_idx=3, call=lambda m: (m.forward(numbers(2, 5, 7), ids(5) - 1), m.encode(ids(2, 5) - 1))),
    twins("SinusoidalPositionalEmbedding", 6, preset="marian", shift=0.5, cos_first=False, call=lambda m: m.shift_matrix(2.5)),
    twins("SinusoidalPositionalEmbedding", 8, scale=0.5, learned_scale=True, call=lambda m: (m.forward(numbers(2, 5, 8), offset=3), m.encode(numbers(2, 5)))),
    twins("FourierFeatures", numbers(2, 3), unit="turn", waves="cos", call=encode),
    twins("FourierFeatures", numbers(3), phases=numbers(3), include_input="last", call=encode),
    twins("FourierFeatures", preset="nerf", call=encode),
    twins("FourierFeatures", preset="perceiver", bands=(3, 10.5), learned=True, call=encode),
    twins("FourierFeatures", preset="sam", random=(2, 8, 1.0, 3), call=encode),
    twins("FourierFeatures", preset="gaussian", random=(2, 8, 16.0, None), call=encode),
    twins("FourierFeatures", preset="time2vec", random=(2, 3, 1.0, 3), call=encode),
    twins("LearnedPositionalEmbedding", 9, 8, first_row=2, call=extend),
    twins("LearnedPositionalEmbedding", 10, 8, first_row=1, layout="sbd", call=lambda m: m.forward(numbers(5, 2, 8), offset=3)),
    twins("SinusoidalPositionalEmbedding", 8, layout="sbd", call=sequence_first),
    twins("RotaryEmbedding", 8, call=rotate_pair),
    twins("RotaryEmbedding", 8, base=500000.0, interleaved=True, call=rotate_pair),
    twins("RotaryEmbedding", 8, rotary_dim=4, rotary_start=2, reverse=True, call=rotate_pair),
    twins("RotaryEmbedding", 8, scaling=pe.XPosScaling(center=2.5), call=lambda m: (*rotate_pair(m), m.forward(numbers(2, 5, 4, 8)))),
    twins("RotaryEmbedding", 8, sections=pe.Sections((1, 3, 0)), call=lambda m: (m.forward(numbers(2, 3, 2, 8), positions=ids(3, 2, 3)), m.forward(numbers(2, 3, 2, 8), positions=ids(3, 2, 3)[:2]))),
    twins("RotaryEmbedding", 8, learned_frequencies=True, frequency_sizes=(2, 3), call=lambda m: m.forward(numbers(2, 5, 3, 8), positions=ids(2, 1, 5))),
    twins("RotaryEmbedding", 8, numerics="float32", call=rotate_pair),
    twins("RotaryEmbedding", 8, call=lambda m: m.forward(numbers(2, 5, 3, 8), positions=numbers(2, 5))),
    twins("RotaryEmbedding", 12, sections=pe.Sections((2, 4), within_axes=True), call=lambda m: m.forward(numbers(1, 5, 2, 12), positions=ids(2, 1, 5))),
    twins("RotaryEmbedding", 8, base=300.0, learned_frequencies=True, call=rotate_pair),
    twins("RotaryEmbedding", 8, layout="thd", call=lambda m: m.forward(numbers(7, 2, 8), cu_seqlens=torch.tensor([0, 3, 7]))),
    twins("RotaryEmbedding", 8, base=1e6, layout="bhsd", call=lambda m: m.forward(numbers(2, 3, 5, 8), inverse=True)),
]  # fmt: skip


@pytest.mark.parametrize("case", MODULES)
def test_twins(case: Twins) -> None:
    python, cpp = case.build()
    # Newer torch prints its LayerNorm's bias; Sequential has another name in C++.
    if getattr(python, "mlp", None) is None:
        assert repr(python).replace("affine=True, bias=True", "affine=True") == repr(cpp)
    # state_dict() of a bound module lacks its submodules; its parameters' names include them.
    names = cpp.cpp_module.named_parameters(True).keys() + cpp.cpp_module.named_buffers(True).keys()
    assert list(python.state_dict()) == names
    for ours, theirs in zip(python.parameters(), cpp.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert ours.requires_grad == theirs.requires_grad
    python.eval(), cpp.eval()
    results = [
        module_result if isinstance(module_result, tuple) else (module_result,)
        for module_result in (case.call(python), case.call(cpp))
    ]
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_every_module_has_a_twin() -> None:
    ours = {
        name for name in pe.__all__ if isinstance(getattr(pe, name), type) and issubclass(getattr(pe, name), nn.Module)
    }
    assert ours == set(pe.cpp.__all__)
    # FileTable needs a file: token/test_file_table.py.
    assert ours == {*(parameter.values[0].name for parameter in MODULES), "FileTable"}


# What both languages refuse, from a namespace of modules, and what the message names.
REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda m: m.TokenEmbedding(5, 8, padding_idx=5), ValueError, "padding_idx: got 5"),
    (lambda m: m.TokenEmbedding(-1, 8), ValueError, "num_embeddings: got -1"),
    (lambda m: m.TokenEmbedding(5, 8).forward(numbers(2)), TypeError, "ids: got float32"),
    (lambda m: m.TokenEmbedding(5, 8).forward(torch.tensor([0, 5, -1])), IndexError, "ids: got 5 at index 1"),
    (lambda m: m.TokenBag(5, 8, padding_idx=5), ValueError, "padding_idx: got 5"),
    (lambda m: m.TokenBag(-1, 8), ValueError, "num_embeddings: got -1"),
    (lambda m: m.TokenBag(5, 8).forward(ids(6)), ValueError, "ids: [bags, size]"),
    (lambda m: m.TokenBag(5, 8).forward(ids(6) % 5, torch.tensor([1, 2])), IndexError, "offsets: got 1"),
    (lambda m: m.TokenBag(5, 8).forward(torch.tensor([[0, 5]])), IndexError, "ids: got 5 at index 1"),
    (lambda m: m.NgramEmbedding(NGRAMS, 13), ValueError, "embedding_dim: 13"),
    (lambda m: m.LearnedPositionalEmbedding(grid=(0, 4), embedding_dim=8), ValueError, "grid: got"),
    (lambda m: m.LearnedPositionalEmbedding(17, 8).resampled((4, 4)), ValueError, "grid: None"),
    (lambda m: m.InputEmbedding(11, 8), ValueError, "max_positions: got"),
    (lambda m: m.InputEmbedding(11, 8, positions=None, max_positions=3), ValueError, "max_positions: got"),
    (lambda m: m.InputEmbedding(11, 8, positions=None, dropout=2.0), ValueError, "dropout: got 2"),
    (lambda m: m.InputEmbedding(11, 8, positions=None, eps=1e-12), ValueError, "eps: got"),
    (lambda m: m.InputEmbedding(11, 8, positions=None).forward(ids(4)), ValueError, "ids: [batch, seq]"),
    (lambda m: m.InputEmbedding(11, 8, positions=None).forward(ids(2, 4) + 11), IndexError, "ids: 10"),
    (lambda m: m.InputEmbedding(12, 8, max_positions=6).forward(ids(2, 4), offset=3), IndexError, "position table of 6"),
    (lambda m: m.InputEmbedding(12, 8, positions=None, dropout=0.5).forward(ids(2, 4), seed=torch.tensor([7]), first_token=-1), ValueError, "first_token"),
    (lambda m: m.InputEmbedding(12, 8, positions=None).with_embeddings(ids(2, 4), numbers(2, 8), ids(2, 4) > 8), ValueError, "features"),
    (lambda m: m.InputEmbedding(12, 8, positions=None).with_embeddings(ids(2, 4), numbers(2, 8), ids(2, 4)), TypeError, "mask"),
    (lambda m: m.ALiBi(0), ValueError, "num_heads: got 0"),
    (lambda m: m.ALiBi(4, total_heads=6, head_start=3), ValueError, "head_start: got"),
    (lambda m: m.ALiBi(4, slopes=numbers(3)), ValueError, "slopes: got [3]"),
    (lambda m: m.ALiBi(2, slopes=torch.tensor([0.5, -0.25])), ValueError, "slopes: -0.25"),
    (lambda m: m.ALiBi(2, slopes=torch.tensor([0.5, float("nan")])), ValueError, "slopes: nan"),
    (lambda m: m.ALiBi(4).forward(-1), ValueError, "query_length: got -1"),
    (lambda m: m.ALiBi(4).forward(10, 4), ValueError, "query_offset"),
    (lambda m: m.ALiBi(4).forward(3, dtype=torch.int32), TypeError, "dtype: int32"),
    (lambda m: m.ALiBi(4).add_(numbers(2, 3, 4, 4)), ValueError, "scores: heads 4, got 3"),
    (lambda m: m.RelativePositionBias(8, num_buckets=5), ValueError, "num_buckets: got 5"),
    (lambda m: m.RelativePositionBias(8, max_distance=8), ValueError, "max_distance: got 8"),
    (lambda m: m.RelativePositionBias(8, num_buckets=4, buckets="bert"), ValueError, "num_buckets: got 4"),
    (lambda m: m.RelativePositionBias(8).forward(-1), ValueError, "query_length: got -1"),
    (lambda m: m.RelativePositionBias(2, window=(2, 3, 2)).table((3, 3, 2)), ValueError, "window"),
    (lambda m: m.RelativeLogits(4, 8), ValueError, "num_buckets: got 4"),
    (lambda m: m.RelativeLogits(5, 0), ValueError, "0"),
    (lambda m: m.RelativeLogits(5, 8).forward(numbers(1, 4, 8)), ValueError, "query: got [1, 4, 8]"),
    (lambda m: m.RelativeLogits(5, 8).forward(numbers(1, 1, 4, 8).double()), TypeError, "dtype"),
    (lambda m: m.SinusoidalPositionalEmbedding(8).forward(numbers(8)), ValueError, "x: got [8]"),
    (lambda m: m.SinusoidalPositionalEmbedding(8).forward(ids(1, 3, 8)), TypeError, "x: got int64"),
    (lambda m: m.SinusoidalPositionalEmbedding(8).forward(numbers(1, 3, 8), numbers(4)), ValueError, "positions: seq 3, got 4"),
    (lambda m: m.SinusoidalPositionalEmbedding(0), ValueError, "embedding_dim: got 0"),
    (lambda m: m.SinusoidalPositionalEmbedding(8, preset="bert"), ValueError, "preset: 'bert'"),
    (lambda m: m.SinusoidalPositionalEmbedding(8, shift=4), ValueError, "shift: 4"),
    (lambda m: m.SinusoidalPositionalEmbedding(8, layout="sbd").forward(numbers(5, 2, 8), ids(2)), ValueError, "positions: expected [5] or [2, 5] .* got [2]"),
    (lambda m: m.SinusoidalPositionalEmbedding(8, layout="sb"), ValueError, "layout: expected 'bsd' or 'sbd', got 'sb'"),
    (lambda m: m.LearnedPositionalEmbedding(20, 8, layout="bds"), ValueError, "layout: expected 'bsd' or 'sbd', got 'bds'"),
    (lambda m: m.LearnedPositionalEmbedding(20, 8, layout="sbd").forward(numbers(5, 2, 8), offset=16), IndexError, "20"),
    (lambda m: m.FourierFeatures(), ValueError, "frequencies"),
    (lambda m: m.FourierFeatures(octaves=51), ValueError, "octaves: expected 1 to 50, got 51"),
    (lambda m: m.FourierFeatures(octaves=3, include_input="x"), ValueError, "include_input: 'x'"),
    (lambda m: m.FourierFeatures(octaves=3, order="wf"), ValueError, "order: 'wf'"),
    (lambda m: m.FourierFeatures(octaves=3, linear=True), ValueError, "linear"),
    (lambda m: m.FourierFeatures(numbers(1, 1, 1)), ValueError, "frequencies: got [1, 1, 1]"),
    (lambda m: m.FourierFeatures(preset="fourier"), ValueError, "preset: 'fourier'"),
    (lambda m: m.FourierFeatures(preset="sam").forward(numbers(4, 1)), ValueError, "frequencies: got 2"),
    (lambda m: m.FourierFeatures(preset="sam").forward(numbers(4, 2).half()), TypeError, "coordinates: float16"),
    (lambda m: m.RotaryEmbedding(7), ValueError, "rotary_dim: got 7"),
    (lambda m: m.RotaryEmbedding(8).forward(numbers(3, 2, 8)), ValueError, "query: got [3, 2, 8]"),
    (lambda m: m.RotaryEmbedding(8).forward(ids(1, 3, 2, 8)), TypeError, "query: got int64"),
    (lambda m: m.RotaryEmbedding(8).forward(numbers(1, 3, 2, 8), positions=torch.tensor([0, -5, 2])), IndexError, "positions: got -5"),
]  # fmt: skip


@pytest.mark.no_stand_in
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_both_refuse(case: int) -> None:
    call, error, text = REFUSED[case]
    for namespace in (pe, pe.cpp):
        refused((call, error, text), given=(namespace,))
