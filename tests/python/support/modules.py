"""A module of every kind, with arguments of any batch and length, for tests of all modules."""

from collections.abc import Callable
from typing import Any, NamedTuple

import posembed as pe
import torch
from torch import Tensor, nn


class Call(nn.Module):
    """A module whose forward is a function of another one and of a tensor."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.module, x)


class Row(NamedTuple):
    """How a module is made, and its arguments: numbers depend on the length alone."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Any, ...]]


def ids(batch: int, seq: int) -> tuple[Tensor]:
    return (torch.randint(0, 9, (batch, seq)),)


def vectors(batch: int, seq: int) -> tuple[Tensor]:
    return (torch.randn(batch, seq, 8),)


def heads(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, seq, 4, 8), torch.randn(batch, seq, 2, 8)


def packed(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    return ids(1, batch * seq)[0][0], torch.arange(batch + 1) * seq


def scores(batch: int, seq: int) -> tuple[Tensor]:
    return (torch.randn(batch, 4, seq, seq + 2),)


def cells(batch: int, seq: int) -> tuple[Tensor]:
    return (torch.randn(batch, seq, seq + 2, 8),)


def quantized() -> nn.Module:
    rows = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    return pe.QuantizedTable(*pe.functional.quantize_rows(rows, "int4", 4))


def of(make: Callable[[], nn.Module], function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Call(make(), function)


def on_cells(make: Callable[[], nn.Module], masked: bool = False) -> Callable[[], nn.Module]:
    """Pictures [batch, rows, columns, dim]: the grid depends on the picture."""

    def call(module: Any, x: Tensor) -> Tensor:
        mask = {"mask": x[..., 0] < 1} if masked else {}
        return module(x.flatten(1, 2), grid=(x.shape[1], x.shape[2]), **mask)  # type: ignore[no-any-return]

    return of(make, call)


NGRAMS = pe.NgramSpec.qwen4_exp(12, boundary=2, layer=1, rows=9, heads=2, divisor=8)
MODULES = {
    "token": Row(lambda: pe.TokenEmbedding(9, 8, padding_idx=0, scale=2.0), ids),
    "token-rows": Row(lambda: pe.TokenEmbedding(9, 8, gradient="rows"), ids),
    "token-max-norm": Row(lambda: pe.TokenEmbedding(9, 8, max_norm=1.0), ids),
    "bag": Row(lambda: pe.TokenBag(9, 8, padding_idx=0), ids),
    "bag-offsets": Row(lambda: pe.TokenBag(9, 8, "mean", gradient="rows", include_last_offset=True), packed),
    "ngram": Row(lambda: pe.NgramEmbedding(NGRAMS, 12), ids),
    "per-layer": Row(lambda: pe.PerLayerEmbedding(9, 3, 4), ids),
    "quantized": Row(quantized, ids),
    "learned": Row(lambda: pe.LearnedPositionalEmbedding(2000, 8), vectors),
    "learned-grid": Row(on_cells(lambda: pe.LearnedPositionalEmbedding(grid=(3, 4), embedding_dim=8)), cells),
    "learned-antialias": Row(on_cells(lambda: pe.LearnedPositionalEmbedding(grid=(3, 4), embedding_dim=8, antialias=True).requires_grad_(False)), cells),
    "sinusoidal": Row(lambda: pe.SinusoidalPositionalEmbedding(8), vectors),
    "sinusoidal-sequence-first": Row(lambda: pe.SinusoidalPositionalEmbedding(8, layout="sbd"), vectors),
    "sinusoidal-scaled": Row(lambda: pe.SinusoidalPositionalEmbedding(8, learned_scale=True), vectors),
    "sinusoidal-grid": Row(on_cells(lambda: pe.SinusoidalPositionalEmbedding(8, preset="detr")), cells),
    "sinusoidal-mask": Row(on_cells(lambda: pe.SinusoidalPositionalEmbedding(8, preset="detr", learned_scale=True), masked=True), cells),
    "fourier": Row(lambda: pe.FourierFeatures(preset="nerf", octaves=2), vectors),
    "fourier-random": Row(lambda: pe.FourierFeatures(random=(8, 4, 10.0, 3)), vectors),
    "fourier-time2vec": Row(lambda: pe.FourierFeatures(preset="time2vec", random=(8, 3, 1.0, 2)), vectors),
    "rotary": Row(lambda: pe.RotaryEmbedding(8), heads),
    "rotary-yarn": Row(lambda: pe.RotaryEmbedding(8, scaling=pe.YarnScaling(4.0, original_max_positions=128)), heads),
    "rotary-xpos": Row(lambda: pe.RotaryEmbedding(8, scaling=pe.XPosScaling()), heads),
    "rotary-learned": Row(lambda: pe.RotaryEmbedding(8, learned_frequencies=True), heads),
    "alibi": Row(of(lambda: pe.ALiBi(4), lambda m, x: m.softmax(x)), scores),
    "alibi-learned": Row(of(lambda: pe.ALiBi(4, causal=False, learned=True), lambda m, x: x + m(x.shape[-2], x.shape[-1])), scores),
    "alibi-attention": Row(of(lambda: pe.ALiBi(4, train_length=6), lambda m, q: m.attention(q, q, q)), lambda batch, seq: (torch.randn(batch, 4, seq, 8),)),
    "relative-bias": Row(of(lambda: pe.RelativePositionBias(4), lambda m, x: x + m(x.shape[-2], x.shape[-1])), scores),
    "relative-logits": Row(lambda: pe.RelativeLogits(5, 8, num_heads=4), lambda batch, seq: (torch.randn(batch, 4, seq, 8),)),
    "relative-window": Row(of(lambda: pe.RelativePositionBias(4, window=(3, 3), class_token=True), lambda m, x: m(window=(x.shape[1], 5))), vectors),
    "input": Row(lambda: pe.InputEmbedding(9, 8, max_positions=2000, num_types=2, norm="layer", dropout=0.5), ids),
    "input-roberta": Row(lambda: pe.InputEmbedding(9, 8, max_positions=2000, padding_idx=1, position_rule="roberta", token_dim=4), ids),
    "input-vectors": Row(of(lambda: pe.InputEmbedding(9, 8, max_positions=2000, norm="layer"), lambda m, x: m(inputs_embeds=x)), vectors),
    "input-sinusoidal": Row(lambda: pe.InputEmbedding(9, 8, positions="sinusoidal", norm="rms", gradient="rows"), ids),
}  # fmt: skip


def made(name: str, batch: int = 2, seq: int = 5) -> tuple[nn.Module, tuple[Any, ...]]:
    """A module and its arguments, the same each time."""
    torch.manual_seed(0)
    row = MODULES[name]
    return row.make(), row.inputs(batch, seq)
