"""Tests of tables that stay in their file: FileTable, and modules that use one."""

import copy
import errno
import io
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from safetensors.torch import save_file
from support.refusals import refused
from torch import Tensor

pytestmark = pytest.mark.no_stand_in  # files are read on the CPU
ROWS, COLUMNS = 500, 64
IDS = torch.tensor([[3, 499, 0], [7, 7, 256]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.safetensors"


def evict(path: Path) -> None:
    """Removes a file's pages from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def tells_misses(path: Path) -> bool:
    """Whether the file system tells what the page cache has, and evicts it."""
    evict(path)
    with open(path, "rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(256)], path.stat().st_size // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def bytes_read() -> int:
    """What the process has read from files so far, whether from the disk or from the page cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows(path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(ROWS, COLUMNS).to(dtype)
    save_file({"weight": weight}, path)
    table = pe.FileTable(path)
    assert (table.num_embeddings, table.embedding_dim, table.dtype) == (ROWS, COLUMNS, dtype)
    for ids in (IDS, IDS.int(), IDS.t(), IDS[:0], torch.tensor(5), torch.randint(ROWS, (3000,))):
        assert torch.equal(table(ids), weight[ids.long()])
    assert torch.equal(table(IDS, 8.0), pe.functional.embedding(IDS, weight, scale=8.0))
    for other in (torch.float32, torch.float64):
        assert torch.equal(pe.FileTable(path, dtype=other)(IDS), weight.to(other)[IDS])
    assert torch.equal(table.dequantize(), weight)
    assert table.memory() == {"file": weight.nbytes}


def test_a_number_too_large_for_the_dtype_raises(path: Path) -> None:
    save_file({"weight": torch.full((3, 4), 65520.0)}, path)
    table = pe.FileTable(path, dtype=torch.float16)
    refused((lambda: table(torch.tensor([1])), ValueError, "dtype: expected one in which the rows are finite"))  # fmt: skip


CODES: dict[str, Callable[[], tuple[Tensor, Tensor, int, int]]] = {
    "blocks of 128 x 128": lambda: (torch.randn(ROWS, 200).to(torch.float8_e4m3fn), torch.rand(4, 2) + 0.5, 128, 128),
    "rows": lambda: (torch.randint(-128, 128, (ROWS, 64)).char(), torch.rand(ROWS, 1), 1, 64),
    "a column": lambda: (torch.randint(-128, 128, (ROWS, 64)).char(), torch.rand(ROWS), 1, 64),
    "groups": lambda: (torch.randn(ROWS, 64).to(torch.float8_e4m3fn), torch.rand(ROWS, 4), 1, 16),
    "one": lambda: (torch.randn(ROWS, 64).to(torch.float8_e4m3fn), torch.tensor([0.5]), ROWS, 64),
    "16 bits": lambda: (torch.randn(ROWS, 64).to(torch.float8_e4m3fn), torch.rand(ROWS, 4).bfloat16(), 1, 16),
    "exponents": lambda: (torch.randn(ROWS, 64).to(torch.float8_e4m3fn), (torch.rand(ROWS, 4) + 0.5).to(torch.float8_e8m0fnu), 1, 16),
}  # fmt: skip


@pytest.mark.parametrize("kind", CODES)
def test_codes(path: Path, kind: str) -> None:
    """The same bits as a table of codes in memory, and as the widened table."""
    codes, scales, rows, columns = CODES[kind]()
    save_file({"t.weight": codes, "t.weight_scale": scales}, path)
    grid = scales if scales.dim() == 2 else scales.view(-1, 1)
    grid = grid if grid.dtype == torch.float8_e8m0fnu else grid.float()
    kept = pe.QuantizedTable(codes, grid, block_rows=rows, block_columns=columns)
    read = pe.QuantizedTable.from_file(path)
    assert torch.equal(read.codes.view(torch.uint8), codes.view(torch.uint8))
    for dtype in (torch.float32, torch.bfloat16):
        table = pe.FileTable(path, "t.weight", dtype=dtype)
        for ids in (IDS, IDS.int()):
            assert torch.equal(table(ids), kept.to(dtype)(IDS))
            assert torch.equal(table(ids), read.to(dtype)(IDS))
            assert torch.equal(table(ids, 2.0), 2 * kept(IDS))
    whole = pe.TokenEmbedding.from_file(path, tensor="t.weight")
    assert torch.equal(pe.FileTable(path)(IDS), whole(IDS))
    places = pe.FileTable(path).memory()
    assert set(places) == ({"file"} if rows == 1 else {"file", "cpu"})
    table = pe.FileTable(path)
    table.prefetch(IDS)
    assert table(IDS).dtype == torch.float32


def test_a_layer_of_a_table_reads_its_part_of_each_row(path: Path) -> None:
    """The bits of the whole row, from a table in the file."""
    weight = torch.randn(ROWS, COLUMNS)
    save_file({"weight": weight}, path)
    layers = pe.PerLayerEmbedding.from_file(path, num_layers=4, keep="file", scale=3.0)
    for layer in range(-4, 4):
        for ids in (IDS, IDS.int(), IDS[:0]):
            assert torch.equal(layers.layer(ids, layer), layers(ids)[..., layer, :])
    assert torch.equal(copy.deepcopy(layers).layer(IDS, 2), layers.layer(IDS, 2))
    refused((lambda: layers.layer(torch.tensor([ROWS]), 0), IndexError, "ids: expected 0 to"))


def test_a_layer_reads_no_other_layers_rows(path: Path) -> None:
    if not Path("/proc/self/io").exists():
        pytest.skip("this system does not count what a process reads")
    save_file({"weight": torch.randn(64, 4 * 4096)}, path)
    layers = pe.PerLayerEmbedding.from_file(path, num_layers=4, keep="file")
    ids = torch.tensor([60, 5, 33] * 20)
    for layer in range(4):
        before = bytes_read()
        layers.layer(ids, layer)
        # Python and pytest may read a little meanwhile; whole rows would be four times as much.
        assert 1 <= (bytes_read() - before) / (ids.numel() * 4096 * 4) < 1.5


@pytest.mark.parametrize("kind", [kind for kind in CODES if kind != "blocks of 128 x 128"])
def test_a_layer_of_codes_in_a_file(path: Path, kind: str) -> None:
    codes, scales, _, _ = CODES[kind]()
    save_file({"t.weight": codes, "t.weight_scale": scales}, path)
    for keep in ("file", "codes"):
        layers = pe.PerLayerEmbedding.from_file(path, num_layers=4, keep=keep)
        for layer in range(4):
            for ids in (IDS, IDS.int()):
                assert torch.equal(layers.layer(ids, layer), layers(IDS)[..., layer, :])
        if keep == "file":
            assert layers.table._shorter[4] is not None
            layers.table._shorter[4].prefetch(4 * IDS)


@pytest.mark.parametrize("seed", range(60))
def test_scales_of_any_shape_are_those_of_the_widened_table(path: Path, seed: int) -> None:
    """A file whose scales fit no rule raises for both, and is never read otherwise."""
    rng = random.Random(seed)
    rows, columns = rng.choice((1, 3, 128, 129, 300)), rng.choice((1, 2, 48, 128, 130, 256))
    code = rng.choice((torch.float8_e4m3fn, torch.int8, torch.uint8))
    counts = (1, 2, 3, rows, columns, -(-rows // 128), -(-columns // 128))
    shape = [rng.choice(counts) for _ in range(rng.randrange(4))]
    kinds = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.int32)
    scales = (torch.rand(shape) + 0.5).to(rng.choice(kinds))
    name = "t" + rng.choice((".weight_scale_inv", ".weight_scale", ".scales", ".scale"))
    codes = (torch.randn(rows, columns) * 4).to(code)
    save_file({"t.weight": codes, name: scales}, path)
    ids = torch.randint(rows, (7,))
    outcomes: list[Any] = []
    for read in (
        lambda: pe.TokenEmbedding.from_file(path, tensor="t.weight", dtype=torch.float32)(ids),
        lambda: pe.FileTable(path, "t.weight", dtype=torch.float32)(ids),
    ):
        try:
            outcomes.append(read())
        except (ValueError, TypeError) as error:
            outcomes.append(str(error))
    if any(isinstance(each, str) for each in outcomes):
        assert all(isinstance(each, str) for each in outcomes), outcomes
    else:
        assert torch.equal(*outcomes)


def test_parts(tmp_path: Path) -> None:
    """A table in shards of several files, as of qwen4_exp."""
    weight = torch.randn(ROWS, COLUMNS)
    parts = {f"ngram_embedding.shard_{i}.weight": weight[at : at + 200].clone()
             for i, at in enumerate((0, 200, 400))}  # fmt: skip
    files = {name: f"{i}.safetensors" for i, name in enumerate(parts)}
    for name, file in files.items():
        save_file({name: parts[name]}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert torch.equal(pe.FileTable(index, list(parts)).dequantize(), weight)
    spec = pe.NgramSpec((3, 5), ((240, 251),), num_embeddings=ROWS)
    for keep in ("numbers", "file"):
        memory = pe.NgramEmbedding.from_file(index, spec, keep=keep)
        assert torch.equal(memory(IDS), pe.NgramEmbedding.from_pretrained(weight, spec)(IDS))
    save_file({"b": torch.zeros(2, 3), "a": torch.zeros(2, 4)}, tmp_path / "two.safetensors")
    refused((lambda: pe.FileTable(tmp_path / "two.safetensors", ["a", "b"]), ValueError, "tensors: expected parts of one width and dtype"))  # fmt: skip


def test_modules(path: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    save_file({"weight": weight}, path)
    token = pe.TokenEmbedding.from_file(path, keep="file", scale=3.0, padding_idx=1)
    assert torch.equal(token(IDS), 3 * weight[IDS])
    assert token.memory() == {"file": weight.nbytes}
    assert not list(token.parameters())
    assert torch.equal(token.prefetch(IDS).take(), token(IDS))
    bag = pe.TokenBag.from_file(path, mode="mean", keep="file", padding_idx=7)
    plain = pe.TokenBag.from_pretrained(weight, mode="mean", padding_idx=7)
    assert torch.equal(bag(IDS), plain(IDS))
    layers = pe.PerLayerEmbedding.from_file(path, num_layers=4, keep="file", scale="sqrt_dim")
    assert torch.equal(layers(IDS), 4 * weight[IDS].view(2, 3, 4, 16))
    spec = pe.NgramSpec((3, 5), ((240, 251),), num_embeddings=ROWS)
    for summed in (False, True):
        memory = pe.NgramEmbedding.from_file(path, spec, tensor="weight", keep="file", summed=summed)
        plain = pe.NgramEmbedding.from_pretrained(weight, spec, summed=summed)
        assert torch.equal(memory.prefetch(IDS).take(), plain(IDS))


def test_prefetch_brings_rows_and_misses_are_counted(path: Path) -> None:
    weight = torch.randn(40_000, COLUMNS)
    save_file({"weight": weight}, path)
    if not tells_misses(path):
        pytest.skip("this file system does not tell what the page cache has")
    ids = torch.randperm(len(weight))[:300]
    for _ in range(10):  # the system may keep pages that it is still writing or reading
        evict(path)
        table = pe.FileTable(path)
        assert torch.equal(table(ids), weight[ids])
        if table.misses > 100:  # neighbours share a page
            break
        time.sleep(0.1)
    else:
        pytest.fail("no row was counted as missed")
    for seconds in (0.2, 1, 2, 4, 8):  # a busy system may need longer, or take pages away again
        evict(path)
        table.prefetch(ids)
        time.sleep(seconds)
        before = table.misses
        assert torch.equal(table(ids), weight[ids])
        if table.misses == before:
            break
    else:
        pytest.fail("rows that were asked for were missed")


def test_a_handle_has_the_rows_of_its_call(path: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    save_file({"weight": weight}, path)
    ids = IDS.clone()
    for table in (pe.FileTable(path), pe.TokenEmbedding.from_file(path, keep="file")):
        first, second = table.prefetch(ids), table.prefetch(IDS.flip(0))
        ids.zero_()  # the caller's memory is its own again
        refused((lambda: table.prefetch(IDS + ROWS), IndexError, "ids: expected 0 to"))
        copies = [copy.deepcopy(table), pickle.loads(pickle.dumps(table))]
        assert torch.equal(second.take(), weight[IDS.flip(0)])
        assert torch.equal(first.take(), weight[IDS])
        for each in copies:  # none has what was asked of the original
            assert torch.equal(each.prefetch(IDS[0]).take(), weight[IDS[0]])
        refused((lambda: first.take(), RuntimeError, "take: expected one call for each prefetch"))
        for take_along in (copy.copy, copy.deepcopy, pickle.dumps):
            refused((lambda: take_along(second), TypeError, "Ahead: cannot be copied or pickled"))
        ids.copy_(IDS)
    assert torch.equal(pe.FileTable(path).prefetch(IDS, 3.0).take(), 3 * weight[IDS])


def test_threads_take_their_own_rows(path: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    save_file({"weight": weight}, path)
    token = pe.TokenEmbedding.from_file(path, keep="file")
    wrong: list[int] = []

    def work(number: int) -> None:
        for step in range(50):
            ids = torch.tensor([number, step])
            ahead = token.prefetch(ids)
            time.sleep(0)
            if not torch.equal(ahead.take(), weight[ids]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_prefetch_where_the_system_gives_no_thread(path: Path) -> None:
    """Or a first thread but no second, which must not take what the first one uses along."""
    save_file({"weight": torch.arange(float(ROWS)).view(ROWS, 1).repeat(1, COLUMNS)}, path)
    program = """
import os, resource, sys, threading, time, torch, posembed as pe
torch.set_num_threads(1)
table, ids = pe.FileTable(sys.argv[1]), torch.arange(300)
table(ids)
for spare in range(2 << 20, 40 << 20, 4 << 20):  # a thread needs 8 MiB for its stack
    child = os.fork()
    if child == 0:
        for _ in range(8):  # these take the stacks of the parent's threads
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + spare
        resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
        for _ in range(3):
            ahead = table.prefetch(ids)
            time.sleep(0.01)
        os._exit(not torch.equal(ahead.take()[:, 0], ids.float()))
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{spare} bytes: the child failed")
"""
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=120)


def test_a_shortened_file_raises_and_names_the_file(path: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    save_file({"weight": weight}, path)
    table, twin = pe.FileTable(path), pe.cpp.FileTable(path, [])
    os.truncate(path, path.stat().st_size - 256)
    assert torch.equal(table(IDS[:, :1]), weight[IDS[:, :1]])
    table.prefetch(torch.tensor([499]))  # asks for what is not there, which is no error
    torch._dynamo.reset()
    for look_up in (
        table,
        torch.compile(table, fullgraph=True, backend="aot_eager"),
        lambda ids: torch.ops.posembed.file_rows(ids, table.handle),
        lambda ids: table.prefetch(ids).take(),
        twin.forward,
    ):
        with pytest.raises(pe.FileFormatError, match="the file was shortened") as caught:
            look_up(IDS)
        assert caught.value.path == str(path)
        assert caught.value.offset > 0
    os.truncate(path, 0)
    with pytest.raises(pe.FileFormatError, match="the file was shortened while it was read"):
        table(torch.randint(ROWS, (4000,)))  # on several threads


def test_what_the_system_refuses_is_an_os_error(path: Path) -> None:
    save_file({"weight": torch.randn(ROWS, COLUMNS)}, path)
    table = pe.FileTable(path)
    # A descriptor that was opened for writing alone cannot be read.
    descriptors = Path("/proc/self/fd")
    (own,) = [each for each in descriptors.iterdir() if each.resolve() == path.resolve()]
    unreadable = os.open(path, os.O_WRONLY)
    os.dup2(unreadable, int(own.name))
    os.close(unreadable)
    for look_up in (table, lambda ids: torch.ops.posembed.file_rows(ids, table.handle)):
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            look_up(IDS)
        assert (caught.value.errno, caught.value.filename) == (errno.EBADF, str(path))


def test_other_threads_of_python_go_on(path: Path) -> None:
    save_file({"weight": torch.randn(20_000, COLUMNS)}, path)
    table = pe.FileTable(path)
    ids = torch.randint(20_000, (400_000,))
    counted = [0]
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1

    other = threading.Thread(target=count)
    other.start()
    during = []
    try:
        for _ in range(5):  # a busy system may give the other thread no processor
            time.sleep(0.05)
            before = counted[0]
            table(ids)
            during.append(counted[0] - before)
    finally:
        done.set()
        other.join()
    assert max(during) > 1000  # with Python's lock held, none


def test_a_forked_child_prefetches(path: Path) -> None:
    save_file({"weight": torch.randn(40_000, COLUMNS)}, path)
    if not tells_misses(path):
        pytest.skip("this file system does not tell what the page cache has")
    program = """
import os, sys, time, torch, posembed as pe
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: torch alone hangs with them
table = pe.FileTable(sys.argv[1])
ids = torch.randperm(40_000)[:300]
table.prefetch(ids)
child = os.fork()
if child:
    sys.exit(os.waitpid(child, 0)[1] != 0)
for seconds in (0.2, 1, 5):
    with open(sys.argv[1], "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    table.prefetch(ids)
    time.sleep(seconds)
    before = table.misses
    table(ids)
    if table.misses - before < 100:  # without prefetch, more, as the test above shows
        os._exit(0)
os._exit(1)
"""
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=120)


def test_copies_open_the_file_again(path: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    save_file({"weight": weight}, path)
    token = pe.TokenEmbedding.from_file(path, keep="file")
    file = io.BytesIO()
    torch.save(token, file)
    file.seek(0)
    copies = [copy.deepcopy(token), torch.load(file, weights_only=False)]
    handle = token.table.handle
    del token
    for each in copies:
        assert torch.equal(each(IDS), weight[IDS])
        assert torch.equal(each.bfloat16()(IDS), weight.bfloat16()[IDS])
    refused((lambda: torch.ops.posembed.file_rows(IDS, handle), ValueError, f"file: expected the handle of an open .* got {handle}"))  # fmt: skip


def test_a_program_of_another_process_finds_no_table(path: Path, tmp_path: Path) -> None:
    save_file({"weight": torch.randn(ROWS, COLUMNS)}, path)
    table, program = pe.FileTable(path), tmp_path / "program.pt2"
    torch.export.save(torch.export.export(table, (IDS,)), program)
    code = """
import sys, torch, posembed as pe
tables = [pe.FileTable(sys.argv[1]) for _ in range(200)]
program = torch.export.load(sys.argv[2]).module()
try:
    program(torch.tensor([[3, 499, 0], [7, 7, 256]]))
except ValueError as error:
    sys.exit("file: expected the handle of an open table" not in str(error))
sys.exit("it read a table")
"""
    subprocess.run([sys.executable, "-c", code, path, program], check=True, timeout=120)
    assert len({pe.FileTable(path).handle for _ in range(100)}) == 100


def test_the_cpp_module_is_its_twin(path: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    save_file({"a": weight, "b": weight + 1}, path)
    for dtype in (None, torch.bfloat16):
        ours = pe.FileTable(path, "a", dtype=dtype)
        theirs = pe.cpp.FileTable(path, ["a"], dtype)
        assert repr(theirs) == repr(ours)
        assert torch.equal(theirs.forward(IDS, 2.0), ours(IDS, 2.0))
        ahead = theirs.prefetch(IDS, 2.0)
        assert torch.equal(ahead.take(), ours(IDS, 2.0))
        refused((lambda: ahead.take(), RuntimeError, "take: expected one call for each prefetch"))


def test_tracers(path: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    save_file({"weight": weight}, path)
    table = pe.FileTable(path)
    torch.library.opcheck(torch.ops.posembed.file_rows.default, (IDS, table.handle))
    torch._dynamo.reset()
    compiled = torch.compile(table, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(IDS), weight[IDS])
    assert torch.equal(torch.export.export(table, (IDS,)).module()(IDS), weight[IDS])
    assert torch.equal(torch.vmap(table)(IDS), weight[IDS])
    assert table(IDS.to("meta")).shape == (2, 3, COLUMNS)


def of(**tensors: Tensor) -> Callable[[Path], pe.FileTable]:
    def make(path: Path) -> pe.FileTable:
        save_file(tensors, path)
        return pe.FileTable(path, dtype=torch.float32)

    return make


def text(path: Path) -> pe.FileTable:
    path.write_text("the 0.5 0.25\ncat 1 2\n")
    return pe.FileTable(path.rename(path.with_suffix(".txt")))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (of(a=torch.zeros(3, 4), b=torch.zeros(3, 4)), ValueError, "tensor: expected the name of"),
        (of(a=torch.zeros(3)), ValueError, "tensor: expected a name"),
        (of(a=torch.zeros(3, 4).to(torch.float8_e5m2)), TypeError, "tensors: expected float32"),
        (of(a=torch.zeros(3, 4).to(torch.float8_e5m2), a_scale=torch.ones(3)), TypeError, "codes"),
        (text, ValueError, "path: expected safetensors, whose rows can be read .* is glove"),
        (lambda p: of(a=torch.zeros(3, 4))(p)(torch.tensor([3])), IndexError, "ids: expected 0 to"),
        (lambda p: of(a=torch.zeros(3, 4))(p).prefetch(torch.tensor([-1])), IndexError, "ids: expected 0 to 2"),
        (lambda p: of(a=torch.zeros(3, 4))(p)(torch.ones(1)), TypeError, "ids: expected int32 or"),
        (lambda p: of(a=torch.zeros(3, 4))(p).rows(IDS, 1, torch.int8), TypeError, "dtype: exp"),
        (lambda p: pe.FileTable(p), OSError, "No such file"),
        (lambda p: pe.TokenEmbedding.from_file(p, keep="disk"), ValueError, "keep: expected 'num"),  # type: ignore[arg-type]
        (lambda p: pe.TokenEmbedding.from_file(p, keep="file", freeze=False), ValueError, "freeze: expected True with keep='file', got False"),
        (lambda p: pe.TokenBag.from_file(p, keep="file", vocabulary=["a"]), ValueError, "vocabulary: expected none with keep='file'"),
        (lambda p: (of(a=torch.zeros(3, 4))(p), pe.QuantizedTable.from_file(p)), TypeError, "tensors: expected codes with scales, got float32"),
        (lambda p: (of(a=torch.zeros(3, 4))(p), pe.TokenEmbedding.from_file(p, keep="file", max_norm=1.0)), ValueError, "max_norm: expected none for a frozen table, got 1"),
    ],
)  # fmt: skip
def test_bad_arguments(path: Path, make: Any, error: type[Exception], message: str) -> None:
    refused((make, error, message), given=(path,))
