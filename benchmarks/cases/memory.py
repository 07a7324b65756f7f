"""Tables as memory: hashed n-grams beside transformers' module, and rows of codes."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import posembed as pe
import torch
from measure import Case, Goal
from plan import Plan, plan
from posembed.glue.memory import prefer_huge_pages
from safetensors.torch import save_file
from setting import Setting
from torch import Tensor, nn

try:
    from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen
except ImportError:
    qwen = None

try:
    from fbgemm_gpu import split_embedding_configs as fbgemm_options
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
except (ImportError, OSError):  # OSError: one for another torch
    fbgemm = None

VOCABULARY, BOUNDARY, ROWS, DIM = 50257, 50256, 100_000, 2048
CODE_ROWS, CODE_DIM, TOKENS = 1_000_000, 256, 8192
MANY_ROWS = 100_000_000
FILE_ROWS, FILE_DIM = 250_000, 256
STEP_ROWS, STEP_DIM, STEP_IDS = 1_000_000, 128, 16_384
Call = Callable[[], object]


class Eager(nn.Module):
    """nn.Embedding with ids by torch's own operators, as transformers writes them."""

    def __init__(self, memory: pe.NgramEmbedding) -> None:
        super().__init__()
        config = qwen.Qwen4ExpTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=DIM,
            ple_layer_ids=[1],
            ngram_vocab_size_base=ROWS,
            eos_token_id=BOUNDARY,
        )
        self.module = qwen.Qwen4ExpTextNGramEmbedding(config, DIM, 0)
        self.module.ngram_embedding.weight = memory.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.module(ids, None)  # type: ignore[no-any-return]


def ngrams(name: str, batch: int, seq: int, setting: Setting) -> Case:
    spec = pe.NgramSpec.qwen4_exp(VOCABULARY, BOUNDARY, rows=ROWS)
    ours = pe.NgramEmbedding(spec, DIM, device=setting.device).requires_grad_(False)
    ids = torch.randint(VOCABULARY, (batch, seq), device=setting.device)
    numbers = torch.ops.posembed.ngram_ids.default
    candidates = {
        "posembed": lambda: ours(ids),
        "posembed, ids alone": lambda: numbers(ids, *spec.arguments),
    }
    if qwen is not None:
        eager = Eager(ours).to(setting.device)
        candidates["transformers"] = torch.no_grad()(lambda: eager(ids))
        return Case(name, candidates, goals=(Goal("posembed", "transformers", 3.0),))
    return Case(name, candidates)


def codes(name: str, format: str, dtype: torch.dtype, setting: Setting) -> Case:
    weight = torch.randn(CODE_ROWS, CODE_DIM, dtype=dtype, device=setting.device)
    table = pe.QuantizedTable.quantize(weight, format, block=128)
    ids = torch.randint(CODE_ROWS, (TOKENS,), device=setting.device)
    plain, moved = table.codes[:TOKENS].clone(), torch.empty_like(table.codes[:TOKENS])
    result = torch.empty(TOKENS, CODE_DIM, dtype=dtype, device=setting.device)

    def copy() -> None:  # the bytes that a look-up reads, and those that it writes
        moved.copy_(plain)
        result.fill_(0)

    return Case(
        name,
        {
            "copy_ of the codes, fill_ of the result": copy,
            "posembed": torch.no_grad()(lambda: table(ids)),
            "F.embedding of the table before": torch.no_grad()(
                lambda: nn.functional.embedding(ids, weight)
            ),
        },
        "copy_ of the codes, fill_ of the result",
    )


def available_memory() -> int:
    """The bytes that a program can have without swapping."""
    (line,) = (x for x in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in x)
    return int(line.split()[1]) << 10


def many_codes(name: str, setting: Setting) -> Case:
    """Rows of a table of 6.4 GB, of which no cache holds a part worth speaking of."""
    numbers = torch.empty(MANY_ROWS, 64, dtype=torch.uint8, device=setting.device)
    prefer_huge_pages(numbers)
    numbers.random_()
    scales = torch.rand(MANY_ROWS, 1, device=setting.device)
    table = pe.QuantizedTable(numbers, scales, torch.rand_like(scales))
    ids = torch.randint(MANY_ROWS, (TOKENS,), device=setting.device)
    return Case(
        name,
        {
            "posembed": lambda: table(ids),
            "the bytes alone, index_select": lambda: numbers.index_select(0, ids),
        },
    )


PREADS = """
#include <stdint.h>
#include <unistd.h>
int64_t preads(int file, int64_t begin, int64_t size, const int64_t* ids, int64_t count,
               char* out) {
  for (int64_t i = 0; i < count; ++i)
    if (pread(file, out + i * size, size, begin + ids[i] * size) != size) return i;
  return count;
}
"""


@functools.cache
def preads() -> Callable[..., int] | None:
    """As many system calls as a look-up makes, in a loop in C; None without a compiler."""
    folder = Path(tempfile.mkdtemp())
    (folder / "preads.c").write_text(PREADS)
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", folder / "preads.so", folder / "preads.c"]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    function = ctypes.CDLL(str(folder / "preads.so")).preads
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (ctypes.c_int, size, size, pointer, size, pointer)
    function.restype = size
    return function  # type: ignore[no-any-return]


def file_rows(name: str, count: int, setting: Setting) -> Case:
    """Random rows of a table of 256 MB, which the page cache holds."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name, "table.safetensors")
    weight = torch.randn(FILE_ROWS, FILE_DIM)
    save_file({"weight": weight}, path)
    table, ids = pe.FileTable(path), torch.randint(FILE_ROWS, (count,))
    out = torch.empty(count, FILE_DIM)
    file, size = os.open(path, os.O_RDONLY), FILE_DIM * 4
    begin = path.stat().st_size - weight.nbytes
    candidates: dict[str, Callable[[], object]] = {"posembed": lambda: table(ids)}
    loop = preads()
    if loop is not None:
        arguments = (file, begin, size, ids.data_ptr(), count, out.data_ptr())
        candidates["preads in C"] = lambda: loop(*arguments)
    candidates["F.embedding of the table in memory"] = lambda: nn.functional.embedding(ids, weight)
    vars(table)["kept"] = folder, out  # until the case ends
    return Case(name, candidates, goals=(Goal("posembed", "preads in C", 0.8),) * bool(loop))


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], int]] = {
    "SGD": (pe.optim.SGD, 1),
    "SGD with momentum": (lambda p: pe.optim.SGD(p, momentum=0.9), 2),
    "RowwiseAdagrad": (pe.optim.RowwiseAdagrad, 1),
    "RowwiseAdam": (pe.optim.RowwiseAdam, 2),
    "Adam": (pe.optim.Adam, 3),
}


def steps(name: str, kind: str, setting: Setting) -> Case:
    """A step on the rows of a gradient, beside a copy of these rows in each table it touches."""
    make, tables = OPTIMIZERS[kind]
    ids = torch.randint(STEP_ROWS, (STEP_IDS,), device=setting.device)
    table = pe.TokenEmbedding(STEP_ROWS, STEP_DIM, gradient="rows", device=setting.device)
    table(ids).sum().backward()
    weight = table.weight
    assert weight.grad is not None
    rows = weight.grad._indices()[0]
    kept = [weight.detach(), *(torch.empty_like(weight.detach()) for _ in range(tables - 1))]
    for other in kept[1:]:
        prefer_huge_pages(other)
        other.zero_()
    ours, theirs = make([weight]), torch.optim.SparseAdam([weight])
    return Case(
        name,
        {
            "copies of the rows": lambda: [pe.functional.embedding(rows, each) for each in kept],
            "posembed": ours.step,
            "torch.optim.SparseAdam": theirs.step,
        },
        "copies of the rows",
        goals=(Goal("posembed", "torch.optim.SparseAdam", 8.0),),
    )


def learned(optimizer: Callable[..., torch.optim.Optimizer], ids: Tensor, gradient: Tensor) -> Call:
    """Look-up, backward pass and step of a table."""
    table = pe.TokenEmbedding(STEP_ROWS, STEP_DIM, gradient="rows", device=ids.device)
    made = optimizer(table.parameters())

    def step() -> None:
        table(ids).backward(gradient)
        made.step()
        made.zero_grad()

    return step


def learned_by_fbgemm(ids: Tensor, gradient: Tensor) -> Call:
    """The same; FBGEMM steps in the backward pass. Its bags have one id each."""
    place, device = ("HOST", "CPU") if ids.device.type == "cpu" else ("DEVICE", "CUDA")
    places = fbgemm.EmbeddingLocation[place], fbgemm.ComputeDevice[device]
    table = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(STEP_ROWS, STEP_DIM, *places)],
        optimizer=fbgemm_options.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        device=ids.device,
    )
    offsets = torch.arange(STEP_IDS + 1, device=ids.device)
    return lambda: table(ids, offsets).backward(gradient)


def whole_step(name: str, setting: Setting) -> Case:
    ids = torch.randint(STEP_ROWS, (STEP_IDS,), device=setting.device)
    gradient = torch.randn(STEP_IDS, STEP_DIM, device=setting.device)
    candidates = {
        "posembed": learned(pe.optim.RowwiseAdagrad, ids, gradient),
        "SparseAdam": learned(torch.optim.SparseAdam, ids, gradient),
    }
    goals = [Goal("posembed", "SparseAdam", 8.0)]
    if fbgemm is not None:
        candidates["FBGEMM"] = learned_by_fbgemm(ids, gradient)
        goals.append(Goal("posembed", "FBGEMM", 3.0))
    return Case(name, candidates, goals=tuple(goals))


def plans(setting: Setting) -> Iterator[Plan]:
    for batch, seq in ((1, 1), (32, 1), (1, 4096)):
        yield plan(f"ngram rows, {batch} x {seq} tokens", ngrams, batch, seq, setting)
    dtypes = (torch.float32, torch.bfloat16)
    for format, dtype in itertools.product(("float8", "int8", "int4"), dtypes):
        kind = str(dtype).removeprefix("torch.")
        name = f"rows of codes, {TOKENS} x {CODE_DIM} {format} to {kind}"
        yield plan(name, codes, format, dtype, setting)
    for kind in OPTIMIZERS:
        yield plan(f"step of {kind}, {STEP_IDS} ids of 10^6 x {STEP_DIM}", steps, kind, setting)
    yield plan(f"whole step of a table, {STEP_IDS} ids of 10^6 x {STEP_DIM}", whole_step, setting)
    if available_memory() > 12 << 30:
        yield plan(f"rows of codes, {TOKENS} x 128 4-bit numbers of 10^8", many_codes, setting)
    if setting.device == "cpu":
        for count in (16, 1024, 65536):
            yield plan(
                f"rows of a file in the page cache, {count} x 1 KiB", file_rows, count, setting
            )
