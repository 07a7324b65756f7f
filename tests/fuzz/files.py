"""Broken files for the readers in Python: whatever they hold, an answer or an error that names the file.

Each input takes no more memory and time than its bytes justify, as tests/fuzz/readers/budget.h has
it. python tests/fuzz/files.py gguf formats configurations --runs 2000 --seed 1
"""

import argparse
import contextlib
import json
import random
import re
import shutil
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import posembed as pe
import torch
from safetensors import safe_open
from safetensors.torch import save_file

FREE_BYTES, BYTES_PER_BYTE = 4 << 20, 1024
FREE_SECONDS, SECONDS_PER_BYTE = 0.5, 0.001
MOST_PER_BYTE = 64  # bytes of a table: 20 for GGUF's types of the fewest bits

HERE = Path(__file__).parent
FORMATS = HERE.parent / "python" / "pretrained" / "formats"
CORPUS = HERE / "readers" / "corpus"
LIMITS = (0, 1, 2, 16, 255, 2**16, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63, 2**64)
TEXTS = (b"{", b"[", b'"', b"[" * 5000, b'{"a":' * 5000, b"null", b"-", b"1e999", b"NaN", b"\xff")
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8,
          torch.uint8, torch.int32, torch.uint32, torch.int64, torch.bool, torch.complex64)  # fmt: skip


@contextlib.contextmanager
def budget(size: int) -> Iterator[None]:
    """Raises AssertionError where an input of ``size`` bytes takes too much."""
    tracemalloc.reset_peak()
    before, begin = tracemalloc.get_traced_memory()[0], time.process_time()
    yield
    used, seconds = tracemalloc.get_traced_memory()[1] - before, time.process_time() - begin
    assert used <= FREE_BYTES + BYTES_PER_BYTE * size, f"{used} bytes for an input of {size}"
    assert seconds <= FREE_SECONDS + SECONDS_PER_BYTE * size, f"{seconds} s for {size} bytes"


def answer(folder: Path, read: Callable[[Path], torch.Tensor | None]) -> str:
    """Calls ``read``; which kind of answer it gave."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    with budget(size):
        try:
            table = read(folder)
        except (ValueError, TypeError) as error:
            check(error, folder)
            return type(error).__name__
    if table is not None:
        assert table.nbytes <= MOST_PER_BYTE * size, f"a table of {table.shape} of {size} bytes"
    return "read"


def check(error: Exception, folder: Path) -> None:
    """Raises AssertionError unless an error is one of ours, short, and says where."""
    message = str(error)
    assert type(error) in (ValueError, TypeError, pe.FileFormatError), repr(error)
    assert len(message) < 2000, message
    if isinstance(error, pe.FileFormatError):
        assert message.startswith(str(folder)), message
    elif (folder / "model.safetensors").is_file() or (folder / "m.gguf").is_file():
        assert message.startswith((str(folder), "tensor", "scales:", "embeddings:")), message
    else:  # the key of a configuration
        assert ": " in message, message


# ---------------------------------------------------------------------------------------- mutations


def of_bytes(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed: numbers at limits, cuts, bits."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, way = draw.randrange(len(data) + 1), draw.randrange(5)
        if way == 0:
            data = data[:at]
        elif way == 1:
            width = draw.choice((1, 2, 4, 8))
            number = (draw.choice(LIMITS) + draw.choice((-1, 0, 1))) % 2 ** (8 * width)
            data = data[:at] + number.to_bytes(width, "little") + data[at + width :]
        elif way == 2:
            data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
        elif way == 3:
            data = data[:at] + draw.choice(TEXTS) + data[at:]
        else:
            data = data[:at] + data[draw.randrange(len(data) + 1) :]
        if not data:
            break
    return data


def of_text(data: bytes, draw: random.Random) -> bytes:
    """A number of a text replaced, or a value, or bytes."""
    numbers = list(re.finditer(rb"-?\d+", data))
    if not numbers or draw.random() < 0.3:
        return of_bytes(data, draw)
    found = draw.choice(numbers)
    number = str(draw.choice(LIMITS) * draw.choice((1, 1, -1)) + draw.choice((-1, 0, 1))).encode()
    new = draw.choice((number, number, number + b".5", b'"4"', b"null", b"true", b"[]", b"{}"))
    return data[: found.start()] + new + data[found.end() :]


def of_tensors(path: Path, draw: random.Random) -> None:
    """A tensor of another shape or dtype, or none; other metadata."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice(list(tensors))
        way = draw.randrange(5)
        if way == 0 and len(tensors) > 1:
            del tensors[name]
        elif way == 1:
            shape = [draw.choice((0, 1, 2, 5, 6, 16, 64)) for _ in range(draw.randrange(4))]
            tensors[name] = torch.randint(0, 3, shape).to(draw.choice(DTYPES))
        elif way == 2 and tensors[name].dim():
            tensors[name] = tensors[name][: draw.randrange(tensors[name].shape[0] + 1)].clone()
        elif way == 3 and metadata:
            key = draw.choice(list(metadata))
            metadata[key] = of_text(metadata[key].encode(), draw).decode(errors="replace")
        elif tensors[name].dtype == torch.uint8 and tensors[name].dim() == 1:
            data = of_text(bytes(tensors[name].tolist()), draw)
            tensors[name] = torch.tensor(list(data), dtype=torch.uint8)
    save_file(tensors, path, metadata)


# ------------------------------------------------------------------------------------------- targets


def gguf(folder: Path, draw: random.Random) -> None:
    """A GGUF file."""
    seed = draw.choice(sorted((CORPUS / "gguf").iterdir())).read_bytes()
    (folder / "m.gguf").write_bytes(b"GGUF" + of_bytes(seed[4:], draw))


def read_gguf(folder: Path) -> torch.Tensor:
    """Its metadata and its table."""
    with contextlib.suppress(ValueError):
        pe.RotarySpec.from_gguf(folder / "m.gguf")
    return pe.TokenEmbedding.from_file(folder / "m.gguf", progress=False).weight


def formats(folder: Path, draw: random.Random) -> None:
    """A table of codes, and the config.json beside it."""
    seed = draw.choice(sorted(path for path in FORMATS.iterdir() if path.is_dir()))
    shutil.copyfile(seed / "model.safetensors", folder / "model.safetensors")
    beside = seed / "config.json"
    if beside.is_file():
        (folder / "config.json").write_bytes(of_text(beside.read_bytes(), draw))
    if not beside.is_file() or draw.random() < 0.6:
        of_tensors(folder / "model.safetensors", draw)


def read_formats(folder: Path) -> torch.Tensor:
    """Its only table, as codes and as numbers."""
    path = folder / "model.safetensors"
    with contextlib.suppress(ValueError, TypeError):
        pe.TokenEmbedding.from_file(path, keep="codes")
    return pe.TokenEmbedding.from_file(path, progress=False).weight


def configurations(folder: Path, draw: random.Random) -> None:
    """A config.json."""
    seeds = sorted((CORPUS / "configurations").iterdir())
    (folder / "config.json").write_bytes(of_text(draw.choice(seeds).read_bytes(), draw))


def read_configurations(folder: Path) -> None:
    """The rotation of each layer, and the whole document."""
    pe.RotarySpec.for_layers(folder / "config.json")
    pe.describe(folder / "config.json")


TARGETS = {
    "gguf": (gguf, read_gguf),
    "formats": (formats, read_formats),
    "configurations": (configurations, read_configurations),
}


def warm_up() -> None:
    """Imports what readers import at their first use."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("q8_0", "f32"):
            shutil.copyfile(CORPUS / "gguf" / name, Path(folder, "m.gguf"))
            read_gguf(Path(folder))
        seed = CORPUS / "configurations" / "configuration_0"
        shutil.copyfile(seed, Path(folder, "config.json"))
        with contextlib.suppress(ValueError):
            read_configurations(Path(folder))


def run(target: str, runs: int, seed: int) -> Counter[str]:
    """Answers to ``runs`` inputs; an input that breaks a rule is kept, and its folder named."""
    make, read = TARGETS[target]
    answers: Counter[str] = Counter()
    warnings.simplefilter("ignore")  # of numbers that overflow
    warm_up()
    tracemalloc.start()
    for number in range(seed, seed + runs):
        folder = Path(tempfile.mkdtemp())
        make(folder, random.Random(number))
        try:
            answers[answer(folder, read)] += 1
        except BaseException:
            print(f"failed: {target} --runs 1 --seed {number}, kept in {folder}", file=sys.stderr)
            raise
        shutil.rmtree(folder)
    tracemalloc.stop()
    return answers


def main() -> None:
    """Runs the targets that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--runs", type=int, default=2000, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for target in options.targets:
        print(json.dumps({target: run(target, options.runs, options.seed)}), flush=True)


if __name__ == "__main__":
    main()
