"""Tests memory of large results: kept when they are freed and reused, up to a limit."""

import itertools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import posembed as pe
import pytest
import torch
from support.refusals import refused
from torch import Tensor

MEBIBYTE = 1 << 20
LARGE = (8192, 2048)  # float32: 64 MiB
# What nobody has chosen: a small part of the machine.
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
ENCODE = pe.SinusoidalPositionalEmbedding(LARGE[1])


@pytest.fixture(autouse=True)
def empty_cache(fresh_memory: None) -> Iterator[None]:
    """Starts every test with nothing kept and the default limit."""
    before = pe.set_cache_limit(512 * MEBIBYTE)
    pe.empty_cache()
    yield
    pe.set_cache_limit(before)


def large_result(rows: int = LARGE[0]) -> Tensor:
    return ENCODE.encode(torch.arange(rows))


def test_a_freed_result_is_kept_and_serves_the_next() -> None:
    first = large_result()
    place, values = first.data_ptr(), first[::100].clone()
    del first
    second = large_result()
    assert second.data_ptr() == place
    assert torch.equal(second[::100], values)
    assert pe.empty_cache() == 0, "a result in use is not kept memory"
    del second
    assert pe.empty_cache() == 64 * MEBIBYTE
    assert pe.empty_cache() == 0


def test_results_alive_at_once_share_nothing() -> None:
    large_result()
    results = [large_result() for _ in range(3)]
    places = sorted(result.data_ptr() for result in results)
    assert all(b - a >= 64 * MEBIBYTE for a, b in itertools.pairwise(places))
    assert torch.equal(results[0], results[2])


def test_views_keep_their_memory() -> None:
    row = large_result()[17]
    expected = row.clone()
    other = large_result()
    other.fill_(3)
    assert torch.equal(row, expected)


def test_the_limit_holds_and_the_oldest_go_first() -> None:
    assert pe.set_cache_limit(130 * MEBIBYTE) == 512 * MEBIBYTE
    results = [large_result() for _ in range(4)]
    newest = [results[3].data_ptr(), results[2].data_ptr()]
    for i in range(4):
        results[i] = torch.empty(0)
    assert pe.set_cache_limit(130 * MEBIBYTE) == 130 * MEBIBYTE
    assert [large_result().data_ptr(), large_result().data_ptr()] == [newest[0]] * 2
    assert pe.empty_cache() == 128 * MEBIBYTE


def test_none_is_kept_under_a_limit_of_zero() -> None:
    pe.set_cache_limit(0)
    large_result()
    assert pe.empty_cache() == 0


def test_a_lower_limit_gives_memory_back_at_once() -> None:
    large_result()
    pe.set_cache_limit(0)
    pe.set_cache_limit(512 * MEBIBYTE)
    assert pe.empty_cache() == 0


def test_small_results_are_left_to_malloc() -> None:
    large_result(8)
    assert pe.empty_cache() == 0


def test_a_block_far_too_large_is_not_spent() -> None:
    large_result()
    small = large_result(rows=LARGE[0] // 2)
    assert small.untyped_storage().nbytes() == 32 * MEBIBYTE
    assert pe.empty_cache() >= 64 * MEBIBYTE


def test_a_result_may_be_resized() -> None:
    large_result()
    result = large_result()
    expected = result[:2].clone()
    result.resize_(3 * LARGE[0], LARGE[1])
    assert torch.equal(result[:2], expected)
    result.fill_(1)
    result.resize_(2, 2)
    assert result.sum() == 4


@pytest.mark.parametrize("gradient", ["dense", "rows"])
def test_tables_gradients_in_memory_full_of_other_values(gradient: str) -> None:
    token = pe.TokenEmbedding(*LARGE, gradient=gradient)
    ids = torch.randint(LARGE[0], (40, 3))
    for _ in range(2):
        large_result().fill_(float("nan"))
        token(ids).sum().backward()
        counts = torch.bincount(ids.flatten(), minlength=LARGE[0]).float()
        assert torch.equal(token.weight.grad.to_dense(), counts[:, None].expand(LARGE))
        token.weight.grad = None


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_strides_are_those_of_empty_like(order: tuple[int, ...]) -> None:
    query = torch.randn(4, 256, 128, 64).permute(order)
    packed = torch.randn(2, 1024, 3, 32, 64)[:, :, 1]
    rotary = pe.RotaryEmbedding(64)
    assert query.nbytes >= 4 * MEBIBYTE
    for tensor in (query, packed):
        assert rotary(tensor).stride() == torch.empty_like(tensor).stride()


def test_threads_may_make_and_free_results_together() -> None:
    expected = large_result(512)

    def work(seed: int) -> list[bool]:
        kept = [large_result(512 + 64 * ((seed + i) % 3)) for i in range(12)]
        return [result[:512].equal(expected) for result in kept]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(work, range(4)))
    assert found == [[True] * 12] * 4


def _child(connection: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    connection.send(large_result()[1000, :4].tolist())


def test_a_forked_process_goes_on() -> None:
    expected = large_result()[1000, :4].tolist()
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(child,))
    process.start()
    assert parent.poll(60)
    assert parent.recv() == expected
    process.join()
    assert process.exitcode == 0


ASK = "print(pe.set_cache_limit(5))"
ASK_A_CHILD = f"""
if os.fork() == 0:
    {ASK}
else:
    os.wait()
"""
# POSEMBED_CACHE_LIMIT, a program, and the limit that it sees; None: what nobody chose.
LIMITS = [
    *(("0", ASK, 0), ("1048576", ASK, MEBIBYTE), ("-3", ASK, 0)),
    *((None, ASK, None), ("1G", ASK, None), ("", ASK, None)),
    *((None, ASK_A_CHILD, 0), (None, f"pe.set_cache_limit(77){ASK_A_CHILD}", 77), ("1048576", ASK_A_CHILD, MEBIBYTE)),
]
# Each in a process of its own, which is forked where torch is imported, but not posembed.
RUN = """
import os, sys, torch
for number, (text, program, _) in enumerate(eval(sys.argv[1])):
    if os.fork() == 0:
        for name, place in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), place)
        os.environ.pop("POSEMBED_CACHE_LIMIT", None)
        os.environ.update({} if text is None else {"POSEMBED_CACHE_LIMIT": text})
        import posembed as pe
        exec(program)
        sys.exit()
    os.wait()
"""


def test_the_limit_of_a_new_process(tmp_path: Path) -> None:
    """What the environment or the program chose, in a forked child too; otherwise a small part of the memory."""
    subprocess.run([sys.executable, "-c", RUN, repr(LIMITS)], cwd=tmp_path, check=True)
    for number, (text, program, expected) in enumerate(LIMITS):
        limit, warnings = (tmp_path / f"{number}.{name}" for name in ("out", "err"))
        found = int(limit.read_text())
        if expected is None:
            assert 0 < found <= min(512 * MEBIBYTE, MACHINE // 64), text
        else:
            assert found == expected, (text, program)
        refused = text if expected is None else None
        wanted = "" if refused is None else f"expected a number of bytes, got '{refused}'"
        assert wanted in warnings.read_text() if wanted else warnings.read_text() == "", text


def test_a_negative_limit_is_refused() -> None:
    refused((lambda: pe.set_cache_limit(-1), ValueError, "bytes: expected none or more, got -1"))
