"""Cases of the input embedding, and its comparison with separate calls."""

import copy
from typing import Any

import posembed as pe
import torch
from torch import Tensor

from support.case import OperatorCase, Sample, assert_close, decomposed
from support.case import case as case_of
from support.learned import rows_for

ROWS, TYPES, COLUMNS = 7, 2, 5


def apart(embed: pe.InputEmbedding, ids: Tensor, types: Tensor | None, offset: int = 0) -> Tensor:
    """The result of separate calls of the submodules."""
    x = embed.token(ids)
    if embed.token_type is not None:
        x = x + embed.token_type(types)
    if embed.position is not None:
        x = embed.position(x, offset=offset)
    return x if embed.norm is None else embed.norm(x)


def assert_equals_calls(embed: pe.InputEmbedding, ids: Tensor, types: Tensor | None) -> None:
    """Compares values and every gradient with those of separate calls."""
    other = copy.deepcopy(embed)
    result, expected = embed(ids, types=types, offset=2), apart(other, ids, types, offset=2)
    assert_close(result, expected, 2e-6)
    gradient = torch.randn_like(result)
    result.backward(gradient), expected.backward(gradient)
    for (name, ours), theirs in zip(embed.named_parameters(), other.parameters(), strict=True):
        assert ours.grad is not None, name
        assert_close(ours.grad.to_dense(), theirs.grad.to_dense(), 4e-6)


def mask(shape: torch.Size, seed: Tensor | None, probability: float) -> Tensor | float:
    """Dropout's factors. The C++ tests check Philox against known answers."""
    if seed is None:
        return 1.0
    ones = torch.ones(shape, dtype=torch.float64, device=seed.device)
    return torch.ops.posembed.input_dropout(ones, seed, probability=probability)


def reference(*args: Any, dropout: float = 0.0, **options: Any) -> Tensor:
    x: Tensor = decomposed("input_embedding")(*args, **options)
    return x * mask(x.shape, args[8], dropout)


def sample(
    *,
    learned: bool = False,
    given: bool = False,
    types: bool | None = None,
    weight: bool = False,
    bias: bool = False,
    index: torch.dtype = torch.int64,
    **options: Any,
) -> Any:
    """Samples with those tables. types None: no table of types; False: no types given."""

    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        integers: dict[str, Any] = {"device": device, "dtype": index}
        return Sample(
            (
                torch.randn(ROWS, COLUMNS, **place),
                torch.randint(0, ROWS, (batch, seq), **integers),
                torch.randn(rows_for(seq), COLUMNS, **place) if learned else None,
                torch.randint(0, 15, (batch, seq), **integers) if given else None,
                torch.randn(TYPES, COLUMNS, **place) if types is not None else None,
                torch.randint(0, TYPES, (batch, seq), **integers) if types else None,
                torch.randn(COLUMNS, **place) if weight else None,
                torch.randn(COLUMNS, **place) if bias else None,
                torch.tensor([123456789], device=device) if "dropout" in options else None,
            ),
            options,
        )

    return make


SINUSOID = f'{{"embedding_dim":{COLUMNS}}}'


def case(name: str, **options: Any) -> OperatorCase:
    return case_of(f"input_embedding-{name}", sample(**options), reference)


def dropout_sample(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
    x = torch.randn(batch, seq, COLUMNS, device=device, dtype=dtype)
    return Sample((x, torch.tensor([5], device=device)), {"probability": 0.5})


def reference_dropout(x: Tensor, seed: Tensor, probability: float) -> Tensor:
    return x * mask(x.shape, seed, probability)


CASES = [
    case("token", scale=3.0, index=torch.int32),
    case("learned", learned=True, types=True, first_row=2, offset=3),
    case("bert", learned=True, types=True, weight=True, bias=True, norm="layer", eps=1e-12, dropout=0.3),
    case("rms", learned=True, given=True, weight=True, norm="rms", scale=2.0, index=torch.int32),
    case("plain-norm-dropout", types=False, norm="layer", dropout=0.5),
    case("sinusoidal", sinusoid=SINUSOID, norm="rms", weight=True, offset=2),
    case("sinusoidal-positions", sinusoid=SINUSOID, given=True),
    case_of("input_dropout", dropout_sample, reference_dropout),
]  # fmt: skip
