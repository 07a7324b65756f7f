"""Runs operators on tensors of more than 2^31 elements, and compares their ends with small calls.

    python tests/gpu/large.py

Needs 60 GB of a GPU's memory.
"""

import sys
import time
import traceback
from collections.abc import Callable

import posembed as pe
import torch
from torch import Tensor

F = pe.functional
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
TOKENS = 560_000  # of 4,096 columns: 2.3e9 elements
TAIL = 64
CHECKS: list[Callable[[], tuple[Tensor, Tensor]]] = []


def check(function: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that gives a result's end and what it must be."""
    CHECKS.append(function)
    return function


def rows(count: int = TOKENS) -> Tensor:
    return torch.empty(count, 4096, **BF16).normal_()


@check
def rotary() -> tuple[Tensor, Tensor]:
    x, spec = rows().view(1, TOKENS, 32, 128), pe.RotarySpec(128)
    end = F.rotary(x, spec=spec)[:, -TAIL:].clone()
    return end, F.rotary(x[:, -TAIL:].clone(), offset=TOKENS - TAIL, spec=spec)


@check
def rotary_in_place_interleaved() -> tuple[Tensor, Tensor]:
    x, spec = rows().view(1, TOKENS, 32, 128), pe.RotarySpec(128, interleaved=True)
    expected = F.rotary(x[:, -TAIL:].clone(), offset=TOKENS - TAIL, spec=spec)
    return F.rotary_(x, spec=spec)[:, -TAIL:], expected


@check
def norm_rotary() -> tuple[Tensor, Tensor]:
    x, spec, weight = rows().view(1, TOKENS, 32, 128), pe.RotarySpec(128), torch.ones(128, **BF16)
    key = x[:, :, :1]
    end = F.norm_rotary(x, key, weight, weight, spec=spec)[0][:, -TAIL:].clone()
    few = x[:, -TAIL:].clone()
    options = {"offset": TOKENS - TAIL, "spec": spec}
    return end, F.norm_rotary(few, few[:, :, :1], weight, weight, **options)[0]


@check
def embedding() -> tuple[Tensor, Tensor]:
    weight, ids = rows(1000), torch.randint(1000, (TOKENS,), device="cuda")
    return F.embedding(ids, weight)[-TAIL:].clone(), weight[ids[-TAIL:]]


@check
def embedding_of_a_large_table() -> tuple[Tensor, Tensor]:
    weight, ids = rows(), torch.randint(TOKENS - 100, TOKENS, (TAIL,), device="cuda")
    return F.embedding(ids, weight), weight[ids]


@check
def embedding_backward() -> tuple[Tensor, Tensor]:
    gradient = rows()
    ids = torch.arange(TOKENS, device="cuda").flip(0)
    found = torch.ops.posembed.embedding_backward(gradient, TOKENS, ids)
    return found[-TAIL:].clone(), gradient[:TAIL].flip(0)


@check
def input_embedding() -> tuple[Tensor, Tensor]:
    token, position, weight = rows(1000), rows(), torch.ones(4096, **BF16)
    ids = torch.randint(1000, (1, TOKENS), device="cuda")

    def call(ids: Tensor, position: Tensor) -> Tensor:
        return F.input_embedding(ids, token, position, norm="rms", norm_weight=weight)

    return call(ids, position)[:, -TAIL:].clone(), call(ids[:, -TAIL:], position[-TAIL:])


@check
def learned_add() -> tuple[Tensor, Tensor]:
    x, weight = rows().view(2, -1, 4096), rows(TOKENS // 2)
    return F.learned_add(x, weight)[1, -TAIL:].clone(), x[1, -TAIL:] + weight[-TAIL:]


@check
def sinusoidal() -> tuple[Tensor, Tensor]:
    x, spec = rows().view(1, -1, 4096), pe.SinusoidalSpec(4096)
    end = F.sinusoidal(x, spec=spec)[:, -TAIL:].clone()
    return end, F.sinusoidal(x[:, -TAIL:].clone(), offset=TOKENS - TAIL, spec=spec)


@check
def token_bag() -> tuple[Tensor, Tensor]:
    weight = rows()
    ids = torch.randint(TOKENS - 100, TOKENS, (TAIL, 4), device="cuda")
    return F.token_bag(ids, weight), weight[ids].float().sum(1).bfloat16()


@check
def alibi_bias() -> tuple[Tensor, Tensor]:
    slopes = F.alibi_slopes(32, device="cuda")
    end = F.alibi_bias(slopes, 8300, 8300, dtype=torch.bfloat16)[..., -TAIL:, :].clone()
    return end, F.alibi_bias(slopes, TAIL, 8300, dtype=torch.bfloat16)


@check
def alibi_softmax() -> tuple[Tensor, Tensor]:
    slopes = F.alibi_slopes(32, device="cuda")
    scores = torch.empty(1, 32, 8300, 8300, **BF16).normal_()
    end = F.alibi_softmax(scores, slopes)[..., -TAIL:, :].clone()
    return end, F.alibi_softmax(scores[..., -TAIL:, :].clone(), slopes)


def main() -> None:
    failures, began = 0, time.monotonic()
    for function in CHECKS:
        try:
            found, expected = function()
            assert torch.equal(found, expected), (found - expected).abs().max().item()
            pe.check_errors()
        except Exception as error:
            failures += 1
            traceback.print_exc()
            print(f"FAILED {function.__name__}: {type(error).__name__} {error}", flush=True)
        torch.cuda.empty_cache()
    print(f"{len(CHECKS)} checks, {failures} failed, {time.monotonic() - began:.0f} s")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
