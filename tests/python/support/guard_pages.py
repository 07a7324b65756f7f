"""Runs every family with tensors beside pages that nobody may touch.

A read or a write outside a tensor ends the process, and faulthandler prints where; a value that was
never written shows as a difference. Rows of each width up to 130 leave every remainder of a vector,
at every alignment.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import posembed as pe
import torch
from posembed import functional as f
from safetensors.torch import save_file
from torch import Tensor

from support import calls
from support.case import FLOATING, OperatorCase, Sample, samples

Call = Callable[..., "Tensor | tuple[Tensor, ...]"]
BESIDE = {"before a guard page": 1, "after a guard page": 2}
IDS, BIG_IDS = torch.tensor([[3, 1, 4], [1, 0, 2]]), torch.arange(7) % 5


def rotations(width: int) -> Iterator[tuple[str, Call, list[tuple[int, ...]]]]:
    """Rotations of windows that end with the row and of windows inside it."""
    for interleaved in (False, True):
        for start in (0, 3):
            spec = pe.RotarySpec(width + start, rotary_dim=width, rotary_start=start, interleaved=interleaved)
            heads, key, row = (2, 3, 2, width + start), (2, 3, 1, width + start), (width + start,)
            name = f"interleaved {interleaved} start {start}"
            yield f"rotary {name}", lambda q, k, s=spec: f.rotary(q, k, spec=s), [heads, key]
            yield (f"rotary_ {name}", lambda q, k, s=spec: f.rotary_(q.data, k.data, spec=s), [heads, key])
            yield (
                f"norm_rotary {name}",
                lambda q, k, a, b, s=spec: f.norm_rotary(q, k, a, b, spec=s),
                [heads, key, row, row],
            )
            yield (
                f"frequencies {name}",
                lambda q, w, s=spec: f.rotary(q, spec=s, frequencies=w.float()),
                [heads, (width // 2,)],
            )


def tables(width: int) -> Iterator[tuple[str, Call, list[tuple[int, ...]]]]:
    for interleaved in (False, True):
        yield (
            f"rotary_tables interleaved {interleaved}",
            lambda q, c, s, i=interleaved: f.rotary_tables(q, None, c, s, interleaved=i),
            [(2, 2, 3, width), (3, width), (3, width)],
        )


def caches(width: int) -> Iterator[tuple[str, Call, list[tuple[int, ...]]]]:
    slots = torch.tensor([5, 0, -1])
    spec = pe.RotarySpec(width)

    def write(*tensors: Tensor) -> tuple[Tensor, ...]:
        copies = [t.data for t in tensors]
        f.rotary_cache_(*copies, slots, spec=spec)
        return tuple(copies)

    heads, pages = (3, 2, width), (2, 4, 2, width)
    yield "rotary_cache", write, [heads, heads, heads, pages, pages]


def rows(width: int) -> Iterator[tuple[str, Call, list[tuple[int, ...]]]]:
    """Families of tables, whose rows have the width."""
    table, x, row = (5, width), (2, 3, width), (width,)
    yield "embedding", lambda w: f.embedding(IDS, w, scale=2.0), [table]
    for mode in ("sum", "mean", "max"):
        yield f"token_bag {mode}", lambda w, m=mode: f.token_bag(IDS, w, mode=m), [table]
    yield "learned_add", f.learned_add, [x, table]
    yield "learned_encode", lambda w: f.learned_encode(w, BIG_IDS), [table]
    sinusoid = pe.SinusoidalSpec(width)
    yield "sinusoidal", lambda x: f.sinusoidal(x, spec=sinusoid), [x]
    types = IDS % 2
    for norm in (None, "layer", "rms"):
        yield (
            f"input_embedding {norm}",
            lambda t, p, k, n=norm: f.input_embedding(IDS, t, p, None, k, types, norm=n),
            [table, table, (2, width)],
        )
    yield (
        "input_embedding affine",
        lambda t, w, b: f.input_embedding(IDS, t, None, None, None, None, w, b, norm="layer"),
        [table, row, row],
    )


def memories(width: int) -> Iterator[tuple[str, Call, list[tuple[int, ...]]]]:
    """Tables of codes and in files, whose rows have the width, and texts of that length."""
    for format in ("float8", "int8", *(("int4",) if width % 2 == 0 else ())):
        for block in {None, width // 2 if width % 4 == 0 else None}:

            def widened(w: Tensor, format: Any = format, block: int | None = block) -> Tensor:
                codes, scales, biases = f.quantize_rows(w, format, block)
                return f.embedding_quantized(IDS, codes, scales, biases, dtype=w.dtype)

            yield f"embedding_quantized {format} {block}", widened, [(5, width)]

    def stored(w: Tensor) -> Tensor:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "table.safetensors")
            save_file({"weight": w.detach()}, path)
            return pe.FileTable(path)(IDS)

    yield "file_rows", stored, [(5, width)]
    options = {"multipliers": (3, 5, 7), "moduli": ((11, 13), (17, 19))}
    yield ("ngram_ids", lambda x: f.ngram_ids((x.detach().float() * 99).long(), **options), [(2, width)])


def scores(width: int) -> Iterator[tuple[str, Call, list[tuple[int, ...]]]]:
    """ALiBi and relative biases, whose rows are keys."""
    slopes = f.alibi_slopes(2)
    shape = (1, 2, 3, width)
    for causal in (False, True):
        options = {"causal": causal, "query_offset": max(width - 3, 0)}
        yield f"alibi_add {causal}", lambda s, o=options: f.alibi_add(s, slopes, **o), [shape]
        yield (f"alibi_softmax {causal}", lambda s, o=options: f.alibi_softmax(s, slopes, **o), [shape])
        yield (f"alibi_bias {causal}", lambda s, o=options: f.alibi_bias(s, 3, width, dtype=s.dtype, **o), [(2,)])
    yield "relative_bias", lambda w: f.relative_bias(w, 3, width), [(32, 2)]


def calls_of(width: int) -> Iterator[tuple[str, Call, list[tuple[int, ...]]]]:
    """Names, functions and the shapes of their floating-point arguments."""
    yield from (*rows(width), *memories(width)) if width > 0 else ()
    yield from scores(width)
    if width > 0 and width % 2 == 0:
        yield from rotations(width)
        yield from tables(width)
        yield from caches(width)


class GuardPages:
    """Places tensors of the library that the C++ tests build."""

    def __init__(self, library: Path) -> None:
        self.place = ctypes.CDLL(str(library)).place_tensors
        self.checked = 0

    @contextlib.contextmanager
    def beside(self, placement: int) -> Iterator[None]:
        self.place(placement)
        try:
            yield
        finally:
            self.place(0)

    def check(self, name: str, call: Callable[..., Sequence[Tensor]], *given: Any) -> None:
        """The same bits as with memory from torch's own allocator."""
        expected = [bits(x) for x in call(*given)]
        for place, placement in BESIDE.items():
            with self.beside(placement):
                results = call(*given)
            found = [bits(x) for x in results]
            assert all(map(torch.equal, found, expected)), f"{name}, {place}: other values"
            self.checked += 1


def bits(x: Tensor) -> Tensor:
    return x.detach().to_dense().contiguous().view(-1).view(torch.uint8)


def with_gradients(call: Call, given: list[Tensor]) -> list[Tensor]:
    """The results of a call with copies, and the gradients of its arguments."""
    leaves = [x.clone().requires_grad_() for x in given]
    results = call(*leaves)
    found = results if isinstance(results, tuple) else (results,)
    roots = [x for x in found if x.requires_grad]
    if not roots:
        return list(found)
    ramps = [torch.arange(x.numel()).view(x.shape).remainder(7).to(x.dtype) for x in roots]
    gradients = torch.autograd.grad(roots, leaves, ramps, allow_unused=True)
    return [*found, *(g for g in gradients if g is not None)]


def check_widths(pages: GuardPages, widths: range) -> None:
    for width in widths:
        for name, call, shapes in calls_of(width):
            for dtype in FLOATING:
                given = [torch.randn(shape).to(dtype) for shape in shapes]
                title = f"{name}, width {width}, {dtype}"
                pages.check(title, with_gradients, call, given)


def called_on_copies(case: OperatorCase, sample: Sample) -> list[Tensor]:
    """The results of a call whose tensors are in new memory, with the same strides."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.numel() == 0:
            return x
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        return x.as_strided((last + 1,), (1,)).clone().as_strided(x.shape, x.stride())

    args = tuple(copy(x) for x in sample.args)
    results = case(Sample(args, {name: copy(x) for name, x in sample.kwargs.items()}))
    return [x for x in results if isinstance(x, Tensor)]


def check_operators(pages: GuardPages, sizes: range) -> None:
    """Every operator, as its own tests call it or as calls.py does."""
    for case, dtype, size, sample in samples(calls.every(), [(2, size) for size in sizes]):
        pages.check(f"{case.name}, {size}, {dtype}", called_on_copies, case, sample)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path, help="tests/cpp/libguard_pages.so of a build folder")
    parser.add_argument("--step", type=int, default=1, help="of widths and sizes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pages = GuardPages(options.library)
    check_widths(pages, range(0, 131, options.step))
    check_operators(pages, range(0, 131, 10 * options.step))
    print(pages.checked, pe.build_info()["instruction_set"])


if __name__ == "__main__":
    faulthandler.enable()
    main()
