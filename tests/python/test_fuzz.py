"""A short run of the fuzzer of operators, and what longer ones have found."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import posembed as pe
import pytest
import torch
from support.refusals import refused

FUZZER = Path(__file__).resolve().parents[1] / "fuzz" / "operators.py"


def test_no_call_crashes_or_writes_outside() -> None:
    command = [sys.executable, FUZZER, "--calls", "1000", "--seed", "50000"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(re.search(r"'returned': (\d+)", run.stdout)[1]) > 200


@pytest.mark.parametrize("start", [2**63 - 1, 2**63 - 8, 3])
def test_a_window_past_the_head_is_refused(start: int) -> None:
    """The sum of start and width overflowed, and the rotation wrote outside the head."""
    x, table = torch.randn(1, 2, 3, 10), torch.rand(3, 8)
    refused((lambda: pe.functional.rotary_tables(x, None, table, table, start=start), ValueError, "query: expected head_dim of at least start"))  # fmt: skip


def test_the_order_of_a_derivative_is_bounded() -> None:
    """A step for each order would never end."""
    spec = '{"embedding_dim":6}'
    encode = torch.ops.posembed.sinusoidal_encode.default
    assert encode(torch.ones(2), spec, None, 1000).isfinite().all()
    refused((lambda: encode(torch.ones(2), spec, None, 2**63 - 1), ValueError, "order: expected 0 to 1000, got 9223372036854775807"))  # fmt: skip


WIDE = 2**41 + 1  # times 2^21 rows of float32, this is 2^64 bytes and 8 MiB
TOO_LARGE: dict[str, tuple[str, Callable[[torch.device], object]]] = {
    "embedding_backward": ("num_embeddings", lambda device: OPS.embedding_backward(wide(1, device), 2**21, ids(device))),
    "embedding_backward_rows": ("num_embeddings", lambda device: OPS.embedding_backward_rows(wide(1, device), 2**21, ids(device))),
    "token_bag_backward": ("num_embeddings", lambda device: OPS.token_bag_backward(wide(1, device), 2**21, ids(device).view(1, 1))),
    "learned_backward": ("num_rows", lambda device: OPS.learned_backward(wide(1, device)[None], 2**21)),
    "learned_extend": ("max_positions", lambda device: OPS.learned_extend(torch.ones(1, 8, device=device), 2**58)),
    "embedding_resize": ("num_embeddings", lambda device: OPS.embedding_resize(torch.ones(1, 8, device=device), 2**58)),
    "alibi_bias": ("key_length", lambda device: OPS.alibi_bias(torch.ones(2, device=device), 2**31 - 1, 2**31 - 1)),
    "relative_bias": ("query_length", lambda device: OPS.relative_bias(torch.ones(8, 2, device=device), 2**31 - 1, 2**31 - 1)),
    "learned_resample": ("new_grid", lambda device: OPS.learned_resample(torch.ones(4, 8, device=device), [2, 2], [2**58, 1])),
    "relative_window_bias": ("window", lambda device: OPS.relative_window_bias(torch.ones(1, 1, device=device).expand(2**32 - 1, 1), [2**31, 1])),
    "sinusoidal_grid_positions": ("grid", lambda device: OPS.sinusoidal_grid_positions(torch.ones(1, device=device), '{"embedding_dim":8,"preset":"mae"}', [2**31, 2**31])),
    "fourier_features": ("frequencies", lambda device: OPS.fourier_features(torch.ones(1, 1, device=device).expand(2**31, 2**31), torch.ones(1, 1, device=device).expand(1, 2**31), order="fwa")),
    "rotary": ("result", lambda device: OPS.rotary(torch.ones(1, 1, 1, 8, device=device).expand(2**29, 2**29, 1, 8), '{"head_dim":8}')),
}  # fmt: skip
OPS = torch.ops.posembed


def wide(rows: int, device: torch.device | str) -> torch.Tensor:
    return torch.ones(rows, 1, device=device).expand(rows, WIDE)


def ids(device: torch.device | str) -> torch.Tensor:
    return torch.ones(1, dtype=torch.int64, device=device)


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_result_whose_bytes_cannot_be_counted_is_refused(name: str, device: str) -> None:
    """The product of its sizes once overflowed, and the result was larger than its memory."""
    argument, call = TOO_LARGE[name]
    if argument == "result" and device == "meta":  # torch's own check of Meta tensors
        refused((lambda: call(torch.device(device)), RuntimeError, "overflow"))
        return
    if name == "embedding_backward_rows" and device == "meta":
        pytest.skip("its sizes depend on values: the Meta rule allocates no table")
    with pytest.raises(ValueError, match=rf"^{argument}: expected "):
        call(torch.device(device))


def test_counts_that_would_take_all_memory_are_refused() -> None:
    """They gave whole messages of "vector::reserve" and "std::bad_alloc"."""
    for size in (2**40, 2**62):
        refused(
            (lambda: pe.SinusoidalPositionalEmbedding(size), ValueError, "embedding_dim: expected 1 to 65536, got"),
            (lambda: OPS.rotary_sections([1, size], False), ValueError, "sections: expected at most 512 pairs in all"),
            (lambda: OPS.relative_bias(torch.ones(8, 2), size, 1), ValueError, "query_length: expected 0 to 2147483647, got"),
        )  # fmt: skip


def test_a_long_text_is_cut_in_a_message() -> None:
    x = torch.ones(1, 1, 2, 8)
    for text in ("b" * 100_000, "é" * 100_000, "b" + "é" * 100_000):
        for call in (
            lambda text: OPS.rotary(x, '{"head_dim":8}', None, text),
            lambda text: OPS.rotary(x, text),
            lambda text: OPS.rotary(x, f'{{"head_dim":8,"{text}":1}}'),
            lambda text: OPS.sinusoidal_frequencies(f'{{"embedding_dim":8,"preset":"{text}"}}'),
            lambda text: OPS.embedding(x.view(2, 8), ids("cpu"), gradient=text),
            lambda text: OPS.token_bag(x.view(2, 8), ids("cpu").view(1, 1), mode=text),
            lambda text: OPS.alibi_slopes(2, text),
            lambda text: OPS.learned_extend(x.view(2, 8), 4, 0, text),
            lambda text: OPS.learned_resample(x.view(2, 8), [1, 2], [2, 2], text),
        ):
            with pytest.raises(ValueError, match=r"\.\.\.") as raised:
                call(text)
            assert len(str(raised.value).partition("\n")[0]) < 500
