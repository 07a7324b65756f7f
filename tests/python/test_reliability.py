"""Threads, processes, memory, numbers at the edge and what an import does.

`make reliability` repeats the loops ten times as long or longer (POSEMBED_LONG).
"""

import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import posembed as pe
import pytest
import torch
from support import calls
from support.case import TOLERANCE, OperatorCase, Sample, as_tuple, assert_close
from support.families import cases
from support.modules import made
from support.resident import assert_little_is_left
from torch import Tensor, nn

LONG = 10 if os.environ.get("POSEMBED_LONG") == "1" else 1
CALLS = 2_000_000 if LONG > 1 else 20_000
MEBIBYTE = 1 << 20
KINDS = ["token", "bag", "learned", "sinusoidal", "rotary", "alibi", "relative-bias", "input"]

OPERATORS = cases()
every = pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)


def seeded(case: OperatorCase, seed: int, dtype: torch.dtype | None = None) -> Sample:
    torch.manual_seed(seed)
    return case.sample(2, 5, "cpu", dtype or case.dtypes[0])


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


# ---------------------------------------------------------------------------------- threads, processes


def test_eight_threads_while_settings_change() -> None:
    """Among them results of more than 4 MiB."""
    calls = [made(name, 4, 200) for name in KINDS] + [made("rotary", 4, 16384)]
    expected = [as_tuple(module.eval()(*given)) for module, given in calls]
    threads_before = torch.get_num_threads()
    wrong: list[nn.Module] = []
    finished = threading.Event()

    def work() -> None:
        for _ in range(20 * LONG):
            for (module, given), right in zip(calls, expected, strict=True):
                if not all(map(torch.equal, as_tuple(module(*given)), right)):
                    wrong.append(module)

    def change() -> None:
        count = 0
        while not finished.wait(0.001):
            count += 1
            torch.set_num_threads(1 + count % 3)
            pe.empty_cache()

    with ThreadPoolExecutor(9) as threads:  # whose result() raises what a thread has raised
        changer = threads.submit(change)
        workers = [threads.submit(work) for _ in range(8)]
        wait(workers)
        finished.set()
    for thread in (changer, *workers):
        thread.result()
    torch.set_num_threads(threads_before)
    assert wrong == []


def run_program(program: str, **variables: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **variables}, timeout=120
    )
    assert run.returncode == 0, f"exit code {run.returncode}: {run.stderr[-2000:]}"
    assert "Traceback" not in run.stderr, run.stderr[-2000:]  # of a thread or a destructor
    return run.stdout


USE = """
import os, sys, threading
import posembed as pe
import torch
rope, x = pe.RotaryEmbedding(128), torch.ones(4, 2048, 8, 128)
expected = rope(x)
"""


def test_a_child_that_is_forked_after_use() -> None:
    """With one thread: torch's own operators hang in a child that wants more (libgomp)."""
    program = """
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(rope(x), expected) else 1)
print(os.waitpid(child, 0)[1], torch.equal(rope(x), expected))
"""
    assert run_program(USE + program) == "0 True\n"


def test_workers_of_a_data_loader_after_use() -> None:
    program = """
class Rotated(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        return rope(x)[:, i]
loader = torch.utils.data.DataLoader(Rotated(), num_workers=2, multiprocessing_context="fork")
print(all(torch.equal(batch[0], expected[:, i]) for i, batch in enumerate(loader)))
"""
    assert run_program(USE + program) == "True\n"


def test_a_process_may_end_with_results_alive_and_kept() -> None:
    program = """
alive = [rope(x) for _ in range(3)]
kept = rope(x)
del kept
sys.modules["builtins"].still_alive = alive
threading.Thread(target=lambda: rope(x)).start()
print("end")
"""
    assert run_program(USE + program) == "end\n"


def test_results_may_be_freed_on_other_threads() -> None:
    rope, x = pe.RotaryEmbedding(128), torch.randn(2, 1024, 8, 128)
    expected = rope(x)
    results: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def make() -> None:
        for _ in range(10 * LONG):
            results.put(rope(x))

    def free() -> int:
        return sum(torch.equal(results.get(timeout=60), expected) for _ in range(10 * LONG))

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(call) for call in (make, make, free, free)]
    assert [call.result() for call in calls] == [None, None, 10 * LONG, 10 * LONG]
    assert torch.equal(rope(x), expected)


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("name", KINDS)
def test_calls_leave_no_memory_behind(name: str) -> None:
    module, given = made(name)
    with torch.no_grad():
        assert_little_is_left(lambda: module(*given), CALLS, 4 * MEBIBYTE)
    if any(True for _ in module.parameters()):
        assert_little_is_left(lambda: module(*given).sum().backward(), 2_000 * LONG, 4 * MEBIBYTE)


def test_many_specifications_leave_no_memory_behind() -> None:
    """Each specification is read once and remembered; the memory of this is bounded."""
    # Of this width, each takes kilobytes: those of all calls would be more than the test allows.
    x, place = torch.randn(1, 2, 1, 128), torch.zeros(1, 2, 128)
    numbers = iter(range(10**9))

    def another() -> None:
        base = 10_000.0 + next(numbers)
        pe.functional.rotary(x, spec=pe.RotarySpec(128, base=base))
        pe.SinusoidalPositionalEmbedding(128, base=base)(place)

    for _ in range(600):  # fills what is remembered
        another()
    assert_little_is_left(another, 2_000 * LONG, 4 * MEBIBYTE)


@pytest.mark.usefixtures("fresh_memory")
def test_large_results_of_many_sizes_reach_an_end() -> None:
    """What is kept stays within the limit, whatever the sizes; each result has more than 32 MiB."""
    rope, limit = pe.RotaryEmbedding(128), 128 * MEBIBYTE
    before = pe.set_cache_limit(limit)
    pe.empty_cache()

    def call() -> None:
        for i in range(12):
            rope(torch.zeros(1, 4097 + 128 * i, 16, 128))

    for _ in range(3):
        call()
    assert_little_is_left(call, 4 * LONG, 64 * MEBIBYTE)
    assert 0 < pe.empty_cache() <= limit
    pe.set_cache_limit(before)


def test_an_allocation_that_fails_raises_and_changes_nothing() -> None:
    program = """
import resource
import posembed as pe
import torch
f = pe.functional
spec, sinusoid, slopes = pe.RotarySpec(8), pe.SinusoidalSpec(8), f.alibi_slopes(2)
table, ids, x = torch.ones(5, 8), torch.tensor([[1, 4]]), torch.ones(1, 2, 2, 8)
CALLS = {
    "embedding": lambda n: f.embedding(ids.expand(n, 2), table),
    "token_bag": lambda n: f.token_bag(ids.expand(n, 2), table),
    "learned_add": lambda n: f.learned_add(x[:, 0].expand(n, 2, 8), table),
    "sinusoidal": lambda n: f.sinusoidal(x[:, 0].expand(n, 2, 8), spec=sinusoid),
    "rotary": lambda n: f.rotary(x.expand(n, 2, 2, 8), spec=spec),
    "rotary, key": lambda n: f.rotary(*[x.expand(n, 2, 2, 8)] * 2, spec=spec)[1],
    "norm_rotary": lambda n: f.norm_rotary(x.expand(n, 2, 2, 8), x.expand(n, 2, 2, 8), *table[:2], spec=spec)[0],
    "rotary_tables": lambda n: f.rotary_tables(x.expand(n, 2, 2, 8), None, table[:2], table[:2]),
    "alibi_bias": lambda n: f.alibi_bias(slopes, 4, n, query_offset=0),
    "alibi_softmax": lambda n: f.alibi_softmax(x[:, :, :1, :1].expand(1, 2, 4, n), slopes, query_offset=0),
    "relative_bias": lambda n: f.relative_bias(torch.ones(32, 2), 4, n),
    "input_embedding": lambda n: f.input_embedding(ids.expand(n, 2), table, table, norm="layer"),
}
expected = {name: call(3) for name, call in CALLS.items()}
large = lambda: CALLS["rotary"](2**17)  # from the memory that is kept
expected_large = large()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)
for name, call in CALLS.items():
    try:
        call(2**28)
    except RuntimeError as error:
        assert "memory" in str(error), error
    else:
        raise AssertionError(name)
    assert torch.equal(call(3), expected[name]), name
    assert torch.equal(large(), expected_large), name
print(len(CALLS))
"""
    assert run_program(program) == "12\n"


# ------------------------------------------------------------------------------------ numbers at the edge

EDGES = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, -1e-40, 1e-310]
NEAR_ZERO = {dtype: [-0.0, 0.3 * torch.finfo(dtype).tiny, -torch.finfo(dtype).smallest_normal] for dtype in TOLERANCE}


def with_value(sample: Sample, value: float) -> Sample:
    """The sample with one other element in its first tensor."""
    first, *rest = (t.clone(memory_format=torch.contiguous_format) for t in sample.tensors())
    if first.numel() > 0:
        first.view(-1)[first.numel() // 2] = torch.tensor(value).to(first.dtype)
    return sample.replace([first, *rest])


with_tensors = pytest.mark.parametrize(
    "case", [case for case in OPERATORS if seeded(case, 3).tensors()], ids=lambda case: case.name
)


@with_tensors
def test_nan_and_infinity_are_those_of_float64(case: OperatorCase) -> None:
    if case.name.startswith("sinusoidal_encode"):
        pytest.skip("NaN is no position: an error")
    if case.name.startswith("rotary_frequencies_backward-"):
        pytest.skip("the reference is a product with a Jacobian, whose zeros times NaN are NaN")
    for value in EDGES[:3]:
        for dtype in case.dtypes:
            sample = with_value(seeded(case, 3, dtype), value)
            expected = case.expected(sample)
            for actual, wanted in zip(case(sample), expected, strict=True):
                if actual.is_floating_point():
                    assert_close(actual, wanted, TOLERANCE[actual.dtype])


# Sums of zeros, which have the sign that the order of their terms gives.
SUMS = (
    "alibi",
    "learned_packed",
    "sinusoidal",
    "rotary_tangent",
    "rotary_packed_backward",
    "norm_rotary_-all-heads",  # LayerNorm
)


@with_tensors
def test_numbers_near_zero_are_those_of_float64(case: OperatorCase) -> None:
    """The first tensor has nothing else, so that its part of a result is not lost in the error."""
    if case.name == "fourier_features-derivative":
        pytest.skip("sines alone, of angles that float32 results take to 2^-32 of a turn")
    for dtype in case.dtypes:
        for value in NEAR_ZERO[dtype]:
            first, *rest = (t.clone() for t in seeded(case, 3, dtype).tensors())
            sample = seeded(case, 3, dtype).replace([first.fill_(value), *rest])
            expected = case.expected(sample)
            for actual, wanted in zip(case(sample), expected, strict=True):
                if actual.is_floating_point():
                    found = actual.detach().double()
                    assert_near_zero(found, wanted.double(), actual.dtype)
                    zero = (wanted == 0) & (found == 0)
                    same = found[zero].signbit() == wanted[zero].signbit()
                    assert same.all() or case.name.startswith(SUMS)


def assert_near_zero(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """As exact as elsewhere, and to some steps of denormals."""
    steps = 4 if dtype.itemsize == 2 else 256
    finite = wanted.isfinite()
    assert torch.equal(found[~finite], wanted[~finite])
    scale = float(wanted[finite].abs().max()) if finite.any() else 0.0
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (found[finite] - wanted[finite]).abs()
    assert (error <= TOLERANCE[dtype] * scale + steps * step).all()


@every
def test_numbers_that_are_not_denormal_do_not_depend_on_flushing(case: OperatorCase) -> None:
    """Denormals themselves may become 0."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    torch.set_flush_denormal(False)
    for dtype in case.dtypes:
        # In-place operators write their samples.
        samples, others = (
            [with_value(seeded(case, 3, dtype), value) for value in (1.0, -1e-40, 1e-310)] for _ in range(2)
        )
        exact = [case(sample) for sample in others]
        try:
            torch.set_flush_denormal(True)
            flushed = [case(sample) for sample in samples]
        finally:
            torch.set_flush_denormal(False)
        assert all(map(torch.equal, map(bits, flushed[0]), map(bits, exact[0])))
        for found, wanted in zip(flushed[1:], exact[1:], strict=True):
            for one, other in zip(found, wanted, strict=True):
                if one.is_floating_point():
                    assert_close(one, other.double(), TOLERANCE[one.dtype])


@pytest.mark.parametrize("value", EDGES)
def test_rows_and_their_gradients_at_the_edge_are_those_of_torch(value: float) -> None:
    ids = torch.tensor([[2, 0], [1, 2]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        results = []
        for look_up in (pe.functional.embedding, torch.nn.functional.embedding):
            weight = torch.ones(5, 3, dtype=dtype)
            weight[2, 1] = weight[4, 0] = value  # no id names row 4
            weight.requires_grad_()
            rows = look_up(ids, weight)
            gradient = torch.ones_like(rows)
            gradient[1, 0, 2] = value
            rows.backward(gradient)
            results.append((rows.detach(), weight.grad))
        for found, wanted in zip(*results, strict=True):
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(bits(found.nan_to_num()), bits(wanted.nan_to_num()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_of_16_bits_passes_unchanged(dtype: torch.dtype) -> None:
    """By an angle of zero beside a zero, and from a table; of NaN only that it is one."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    pairs = torch.stack([patterns, torch.zeros_like(patterns)], dim=1)
    rope, count = pe.RotaryEmbedding(2), len(patterns)
    rotated = rope(pairs.view(1, -1, 1, 2), positions=torch.zeros(count, dtype=torch.int64))
    looked_up = pe.functional.embedding(torch.arange(count), pairs)
    for result in (rotated.view(-1, 2)[:, 0], looked_up[:, 0]):
        assert torch.equal(result.isnan(), patterns.isnan())
        numbers = ~patterns.isnan()
        assert torch.equal(bits(result[numbers]), bits(patterns[numbers]))


# Prints a digest of each operator's results, under an instruction set and with a number of threads.
PARITY = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import torch
from support import calls
from support.case import samples

def digest(case):
    found = hashlib.sha256()
    for _, _, _, sample in samples([case], [(2, 5), (3, 67)]):
        for result in case(sample):
            if isinstance(result, torch.Tensor):
                result = result.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            found.update(result if isinstance(result, bytes) else repr(result).encode())
    return found.hexdigest()

torch.set_num_threads(int(sys.argv[2]))
for case in calls.every():
    if case.name not in calls.OF_THE_PROCESS:
        print(case.operator._opname, case.name, digest(case))
"""
# Sums of exponentials, which each instruction set adds in the order of its vectors; torch's attention.
DEPENDS_ON_VECTORS = {"alibi_softmax", "alibi_softmax_", "alibi_attention"}


def digests(threads: int, instruction_set: str) -> list[str]:
    program = PARITY.replace("sys.argv[1]", repr(str(Path(__file__).parent)))
    program = program.replace("sys.argv[2]", str(threads))
    return run_program(program, POSEMBED_INSTRUCTION_SET=instruction_set).splitlines()


def test_same_bits_with_every_instruction_set_and_number_of_threads() -> None:
    """`make test` builds them all."""
    known = pe.build_info()
    own = digests(1, known["instruction_set"])
    assert len(own) == len(calls.every()) - len(calls.OF_THE_PROCESS)
    assert digests(8, known["instruction_set"]) == own
    everywhere = [line for line in own if line.split()[0] not in DEPENDS_ON_VECTORS]
    assert len(everywhere) > 0.9 * len(own)
    for narrower in known["instruction_sets"]:
        assert set(everywhere) <= set(digests(2, narrower)), narrower


# ---------------------------------------------------------------------------------------------- import

HOOKED = """
import sys
import torch
seen = []
def hook(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3 != 0
    network = event.startswith(("socket.", "urllib.", "http.", "ftplib."))
    others = ("pickle.find_class", "os.mkdir", "os.remove", "os.rename", "os.system",
              "subprocess.Popen", "marshal.load", "shutil.move")
    if writes or network or event in others:
        seen.append(event)
sys.dont_write_bytecode = True
sys.addaudithook(hook)
{work}
print(seen)
"""


def test_an_import_opens_no_connection_writes_no_file_and_unpickles_nothing() -> None:
    assert run_program(HOOKED.format(work="import posembed, posembed.pretrained")) == "[]\n"
