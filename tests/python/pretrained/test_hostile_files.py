"""Paths that are no files, files without end, files that are shortened, names and counts without limit."""

import contextlib
import errno
import gc
import json
import os
import resource
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.pretrained import open_vectors
from safetensors.torch import save_file
from support.refusals import refused
from support.vector_files import entry, safetensors

TEBIBYTE = 1 << 40
REFUSED = (ValueError, OSError)  # FileFormatError is a ValueError


def read_all(path: Path | str) -> None:
    """Everything that a caller may ask of a file."""
    file = open_vectors(path)
    file.table()
    file.words()


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """In less than a second of this process, however busy the machine is."""
    gc.freeze()  # what other tests made is not walked now
    begin = time.process_time()
    yield
    gc.unfreeze()
    assert time.process_time() - begin < 1


def refuses_soon(path: Path | str, message: str) -> None:
    with soon(), pytest.raises(REFUSED, match=message):
        read_all(path)


# ----------------------------------------------------------------------------- paths that are no files


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_devices(path: str) -> None:
    refuses_soon(path, "expected the path of a regular file")


@pytest.mark.parametrize("name", ["pipe", "pipe.safetensors", "pipe.json"])
def test_pipes(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    refuses_soon(tmp_path / name, "expected the path of a regular file")


def test_folders(tmp_path: Path) -> None:
    refuses_soon(tmp_path, "Is a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.touch(mode=0)
    refuses_soon(path, "Permission denied")


# --------------------------------------------------------------------------------- files of a tebibyte

BEGINNINGS = {
    "zeros.vec": (b"", "the first line is no word with numbers"),
    "word.txt": (b"a 1 2", "the first line is no word with numbers|bytes without the end"),
    "rows.txt": (b"a 1 2\nb 1 2\nc", "bytes without the end of a word or a line"),
    "text.vec": (b"9 2\na 1 2\nb", "bytes without the end of a word or a line"),
    "binary.bin": (b"9 2\n", "bytes without the end of a word or a line"),
    "zeros.safetensors": (b"", "expected a header that begins with"),
    "header.safetensors": (struct.pack("<Q", TEBIBYTE - 8) + b"{", "at most 100000000 are allowed"),
    "hole.safetensors": (struct.pack("<Q", 2) + b"{}", "bytes after the last tensor"),
    "model.safetensors.index.json": (b"{}", "at most 100000000 are allowed"),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_sparse_files(name: str, tmp_path: Path) -> None:
    beginning, message = BEGINNINGS[name]
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(TEBIBYTE)
    refuses_soon(path, message)


def test_a_header_of_no_rows_promises_no_width(tmp_path: Path) -> None:
    """Skipping bad rows takes memory for one of this width."""
    path = tmp_path / "words.vec"
    path.write_bytes(b"0 4611686018427387904\n")
    for on_bad_row in ("raise", "skip"):
        refused((lambda: open_vectors(path, on_bad_row=on_bad_row), pe.FileFormatError, "the header says 0 rows of 46116860184273879"))  # fmt: skip


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "tebibyte"])
def test_configurations(kind: str, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "tebibyte":
        with path.open("wb") as file:
            file.truncate(TEBIBYTE)
    with soon(), pytest.raises(REFUSED, match="expected"):
        pe.RotarySpec.from_huggingface(path)


# -------------------------------------------------------------------------- what the fuzzers began with

CORPUS = Path(__file__).resolve().parents[2] / "fuzz" / "readers" / "corpus"
NAMES = {"safetensors": "m.safetensors", "index": "m.safetensors.index.json", "words": "v.vec"}


@pytest.mark.parametrize("case", [f"{f}/{p.name}" for f in NAMES for p in (CORPUS / f).iterdir()])
def test_inputs_of_the_fuzzers_are_read_or_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / NAMES[case.partition("/")[0]]
    path.write_bytes((CORPUS / case).read_bytes())
    for on_bad_row in ("raise", "skip") if path.suffix == ".vec" else ("raise",):
        try:
            file = open_vectors(path, on_bad_row=on_bad_row)
            for name in file.names:
                file.table(name)
        except ValueError as error:  # FileFormatError, and that a tensor is no table
            assert str(tmp_path) in str(error) or str(error).startswith("tensor: ")  # noqa: PT017


@pytest.mark.parametrize("name", [path.name for path in (CORPUS / "specification").iterdir()])
def test_specifications_of_the_fuzzers_are_read_or_refused(name: str) -> None:
    text = (CORPUS / "specification" / name).read_text()
    try:
        spec = torch.ops.posembed.rotary_specification.default(text)
    except ValueError as error:
        assert ":" in str(error)  # noqa: PT017
    else:
        assert torch.ops.posembed.rotary_specification.default(spec) == spec


# ------------------------------------------------------------------------------ files that are shortened


def tensors(path: Path, rows: int) -> Path:
    data = rows * 4096 * 4
    entry = {"dtype": "F32", "shape": [rows, 4096], "data_offsets": [0, data]}
    header = json.dumps({"t": entry}).encode()
    header += b" " * (-len(header) % 8)  # aligned: tensor() is a view
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + data)
    return path


def words(path: Path) -> Path:
    path.write_bytes(b"".join(b"word%d 1 2\n" % i for i in range(500_000)))
    return path


def test_words_of_a_file_that_is_shortened(tmp_path: Path) -> None:
    path = words(tmp_path / "vectors.txt")
    file = open_vectors(path)
    os.truncate(path, 5_000_000)
    for read in (file.table, file.words, lambda: file.coverage(["word1"])):
        refused((read, pe.FileFormatError, "byte 5000000: the file was shortened"))


def test_words_of_a_file_that_is_emptied(tmp_path: Path) -> None:
    path = words(tmp_path / "vectors.txt")
    file = open_vectors(path, on_bad_row="skip")
    path.write_bytes(b"")
    refused((file.table, pe.FileFormatError, "byte 0: the file was shortened"))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_of_a_file_that_is_shortened(dtype: torch.dtype | None, tmp_path: Path) -> None:
    path = tensors(tmp_path / "m.safetensors", rows=600)
    file = open_vectors(path, words=["a"])
    os.truncate(path, 8192)
    for read in (lambda: file.table("t", dtype), lambda: file.tensor("t", dtype)):
        refused((read, pe.FileFormatError, "byte 8192: the file was shortened"))


def test_rows_of_many_parts_are_those_of_the_file(tmp_path: Path) -> None:
    """Rows lie across the parts in which a file is loaded, and parts that are released."""
    path = tmp_path / "vectors.txt"
    path.write_text("".join(f"w{i} {i} {i / 2} {-i}\n" for i in range(1_000_000)))
    assert path.stat().st_size > 5 * (1 << 22)
    table = open_vectors(path).table()
    numbers = torch.arange(1_000_000, dtype=torch.float32)
    assert torch.equal(table, torch.stack([numbers, numbers / 2, -numbers], dim=1))


IN_USE = """
import json, os, sys
from pathlib import Path
import torch
import posembed as pe
from posembed.models import input_families

folder = Path(sys.argv[1])
model = folder / "model.safetensors"

def refused(read):
    try:
        read()
    except pe.FileFormatError as error:
        return str(error).removeprefix(str(folder))
    return "read"

file = pe.pretrained.open_vectors(model)
copy = file.tensor("wte.weight", copy=True)
parameters = input_families.of_folder(folder).parameters
embed = pe.InputEmbedding.from_huggingface(folder)
ids = folder / "ids.bin"
pe.data.save_ids(ids, [range(100_000)])
dataset = pe.data.WindowDataset(ids, 10)
loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1)
first = next(iter(loader))[0].tolist()
copied = pe.data.open_ids(ids, copy=True)
for path in (model, ids):
    os.truncate(path, 4096)
print(json.dumps([
    float(copy.sum() + sum(each.double().sum() for each in parameters.values())),
    float(embed.token.weight.double().sum()),
    int(copied.sum()), first, dataset[1][0].tolist(),
    refused(lambda: dataset[5000]), refused(lambda: file.tensor("wte.weight")),
]))
"""


def gpt2(folder: Path) -> float:
    """A model's folder; the sum of its tables."""
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    tensors = {"wte.weight": torch.ones(5000, 8), "wpe.weight": torch.ones(3000, 8)}
    save_file(tensors, folder / "model.safetensors")
    return float(sum(each.sum() for each in tensors.values()))


def run(program: str, *arguments: object, **options: Any) -> str:
    """The output of a program in a process of its own, which a signal may end."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout


def test_files_that_are_shortened_while_in_use(tmp_path: Path) -> None:
    """In a process of its own, which SIGBUS would end."""
    both = gpt2(tmp_path)
    found = json.loads(run(IN_USE, tmp_path))
    shortened = "byte 4096: the file was shortened while it was read"
    assert found == [
        both + 40_000,
        40_000,
        sum(range(100_000)),
        list(range(10)),
        list(range(10, 20)),
        f"/ids.bin: {shortened.replace('4096', '200000')}",
        f"/model.safetensors: {shortened}",
    ]


def test_configurations_that_are_shortened_while_they_are_read(tmp_path: Path) -> None:
    """The size of a file in sysfs is a page, and reading it gives less."""
    short = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not short.is_file():
        pytest.skip("needs sysfs")
    gpt2(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to(short)
    refused(
        (lambda: pe.InputEmbedding.from_huggingface(tmp_path), ValueError, "config.json: byte 0: the file: expected JSON: "),
        (lambda: pe.RotarySpec.from_huggingface(tmp_path), ValueError, "config.json: byte 0: the file: expected JSON: "),
    )  # fmt: skip


# ---------------------------------------------------------------------------------- models of many files


def many_shards(folder: Path, count: int) -> Path:
    for i in range(count):
        shard = safetensors({f"t{i}": entry([2], 0, 8)}, struct.pack("<ff", i, 2 * i))
        (folder / f"{i}.safetensors").write_bytes(shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(count)}}))
    return index


MANY = """
import os, resource, sys
import posembed as pe

file = pe.pretrained.open_vectors(sys.argv[1])
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
views = {name: file.tensor(name) for name in file.names}
for name, view in views.items():
    i = int(name[1:])
    assert view.tolist() == file.tensor(name, copy=True).tolist() == [i, 2 * i]
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    file.tensor("t7", copy=True)
except OSError as error:
    for each in taken:
        os.close(each)
    print(error.errno, error.filename)
"""


def test_a_model_of_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """And what the system refuses keeps its number and its path."""
    index = many_shards(tmp_path, 300)
    assert run(MANY, index).split() == [str(errno.EMFILE), str(tmp_path / "7.safetensors")]


def test_a_shard_that_is_replaced_is_read_as_it_is_now(tmp_path: Path) -> None:
    index = many_shards(tmp_path, 2)
    file = open_vectors(index)
    assert file.tensor("t1").tolist() == [1, 2]
    header = {"t1": entry([1], 4, 8), "t0": entry([1], 0, 4)}
    (tmp_path / "new").write_bytes(safetensors(header, struct.pack("<ff", 5, 6)))
    (tmp_path / "new").rename(tmp_path / "1.safetensors")
    assert file.tensor("t1").tolist() == [6]


# ----------------------------------------------------------------------------------------- long messages

LONG = "x" * 1_000_000


def of_tensor(name: str, **changes: object) -> bytes:
    return safetensors({name: {**entry([1], 0, 4), **changes}}, b"abcd")


LONG_FILES: dict[str, tuple[str, bytes]] = {
    "name of a tensor": ("m.safetensors", of_tensor(LONG, shape=[2])),
    "name twice": ("m.safetensors", safetensors(f'{{"{LONG}": 1, "{LONG}": 1}}'.encode())),
    "dtype": ("m.safetensors", of_tensor("t", dtype=LONG)),
    "shape": ("m.safetensors", of_tensor("t", shape=[LONG])),
    "no number": ("m.safetensors", of_tensor("t").replace(b"[1]", b"[" + b"1" * 90 + b"]")),
    "no JSON": ("m.safetensors", safetensors(f'{{"{LONG}'.encode())),
    "name of a shard": ("m.json", json.dumps({"weight_map": {"t": LONG}}).encode()),
    "number for a shard": ("m.json", json.dumps({"weight_map": {LONG: 1}}).encode()),
    "tensor without shard": ("m.json", json.dumps({"weight_map": {LONG: "none"}}).encode()),
    "word": ("v.txt", b"a 1 2\n" + LONG.encode() + b" 1\n"),
    "word in its row": ("v.txt", b"a 1 2\n" + LONG.encode() + b" 1 \xff\n"),
    "text in place of a number": ("v.txt", b"a 1 2\nb 1 " + LONG.encode() + b"\n"),
    "long number": ("v.txt", b"a 1 2\nb 1 1" + b"0" * 1_000_000 + b"\n"),
    "binary": ("v.bin", b"2 1\n" + LONG.encode()),
    "header": ("v.vec", b"1 " + b"9" * 30 + b"\n" + LONG.encode()),
    "one word": ("v.vec", LONG.encode()),
}


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises((ValueError, TypeError, OSError)) as raised:
        read()
    message = str(raised.value)
    assert len(message) < 1500, len(message)
    return message


@pytest.mark.parametrize("case", LONG_FILES)
def test_messages_about_long_names_are_short(case: str, tmp_path: Path) -> None:
    name, data = LONG_FILES[case]
    path = tmp_path / name
    path.write_bytes(data)

    def read() -> None:
        file = open_vectors(path)
        for each in file.names:
            file.table(each)

    message = refusal(read)
    assert message.startswith(str(path)) or message.startswith("[Errno")


def test_messages_about_long_words_and_tensors_are_short(tmp_path: Path) -> None:
    words, model = tmp_path / "v.txt", tmp_path / "m.safetensors"
    words.write_bytes(b"a 1 2\n")
    model.write_bytes(of_tensor(LONG, shape=[1, 1]))
    assert "xxx" in refusal(lambda: open_vectors(words).rows([LONG], missing="error"))
    assert "xxx" in refusal(lambda: open_vectors(words).rows([LONG, LONG]))
    assert "xxx" in refusal(lambda: open_vectors(words).rows({LONG: -1}))
    assert "xxx" in refusal(lambda: open_vectors(words).rows({LONG: 0, LONG + "y": 0}))
    assert "xxx" in refusal(lambda: open_vectors(words).tensor(LONG))
    assert "xxx" in refusal(lambda: open_vectors(model).tensor("none"))
    assert open_vectors(model).table(LONG).shape == (1, 1)
    cut = open_vectors(words, on_bad_row="skip")
    words.write_bytes(b"a 1 2\n" + LONG.encode() + b" 1\n")
    cut = open_vectors(words, on_bad_row="skip")
    assert all(len(each.word) <= 40 and len(each.reason) < 1000 for each in cut.skipped().rows)


LLAMA = {"hidden_size": 64, "num_attention_heads": 8, "rope_theta": 1e4, "num_hidden_layers": 2}
LONG_CONFIGURATIONS: dict[str, dict[str, object]] = {
    "model_type": {**LLAMA, "model_type": LONG},
    "key": {**LLAMA, "model_type": "llama", f"rope_{LONG}": 1},
    "nested key": {**LLAMA, "model_type": "llama", "rope_parameters": {LONG: 1}},
    "text for a number": {**LLAMA, "model_type": "llama", "head_dim": LONG},
    "list for a number": {**LLAMA, "model_type": "llama", "head_dim": [1] * 300_000},
    "number": {**LLAMA, "model_type": "llama", "head_dim": 10**4000},
    "rope_type": {**LLAMA, "model_type": "llama", "rope_scaling": {"rope_type": LONG, "factor": 2.0}},
    "many keys": {**LLAMA, "model_type": "llama", **{f"rope_x{i}": i for i in range(5000)}},
    "architecture": {"general.architecture": LONG, f"{LONG}.rope.freq_base": 1e4},
    "key of GGUF": {"general.architecture": "llama", f"llama.rope.{LONG}": 1, "llama.attention.head_count": 8, "llama.embedding_length": 64, "llama.rope.freq_base": 1e4},
    "params": {"dim": 64, "n_heads": 8, "rope_theta": 1e4, f"rope_{LONG}": 1},
    "alibi": {"model_type": "mpt", "attn_config": {"alibi": True, f"alibi_{LONG}": 1}, "n_heads": 8},
    "ALiBi of no model": {"model_type": LONG, "n_heads": 8},
}  # fmt: skip


@pytest.mark.parametrize("case", LONG_CONFIGURATIONS)
def test_messages_about_long_configurations_are_short(case: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with decimal_digits(5000):
        path.write_text(json.dumps(LONG_CONFIGURATIONS[case]))
    for read in (pe.RotarySpec.from_huggingface, pe.RotarySpec.for_layers, pe.ALiBi.from_config):
        refusal(lambda read=read: read(path))  # type: ignore[misc]


def test_messages_about_long_texts_are_short(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in (f'{{"{LONG}', f'{{"a": {LONG}}}', f'["{LONG}"]', '{"a": ' + "1" * 100_000 + "}"):
        path.write_text(text)
        assert "config" in refusal(lambda: pe.RotarySpec.from_huggingface(path))
        refusal(lambda text=text: torch.ops.posembed.rotary_specification.default(text))  # type: ignore[misc]
    for fields in ({LONG: 1}, {"head_dim": LONG}, {"head_dim": 8, "scaling": {"type": LONG}}):
        text = json.dumps(fields)
        refusal(lambda text=text: torch.ops.posembed.rotary_specification.default(text))  # type: ignore[misc]


# -------------------------------------------------------------------------------------- counts without limit

GGUF = {
    "general.architecture": "llama",
    "llama.attention.head_count": 8,
    "llama.embedding_length": 64,
    "llama.rope.freq_base": 1e4,
}
BLOOM = {"model_type": "bloom", "hidden_size": 64}
COUNTED: dict[str, tuple[dict[str, object], str]] = {
    "layers": ({**LLAMA, "model_type": "llama", "num_hidden_layers": 10**8}, "num_hidden_layers"),
    "labels": ({**LLAMA, "model_type": "llama", "num_labels": 10**8}, "num_labels"),
    "layers of a part": ({"model_type": "qwen2_vl", "text_config": {**LLAMA, "num_hidden_layers": 2**40}}, "num_hidden_layers"),
    "layers of a class that lists them": ({**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 10**8}, "num_hidden_layers"),
    "layers of params": ({"dim": 64, "n_heads": 8, "rope_theta": 1e4, "n_layers": 2**31}, "n_layers"),
    "layers of GGUF": ({**GGUF, "llama.block_count": 10**8}, "llama.block_count"),
    "heads": ({**LLAMA, "model_type": "llama", "num_attention_heads": 2**62}, "num_attention_heads"),
    "width": ({**LLAMA, "model_type": "efficientloftr", "hidden_size": 2**60, "partial_rotary_factor": 1.0}, "rotary_dim"),
    "width of a head": ({**LLAMA, "model_type": "dinov3_vit", "hidden_size": 2**60, "image_size": 64, "patch_size": 16}, "rotary_dim"),
    "sections": ({**LLAMA, "model_type": "qwen2_vl_text", "rope_scaling": {"type": "default", "mrope_section": [2**62, 2**62, 2**62]}}, "mrope_section"),
    "sections in all": ({**LLAMA, "model_type": "qwen2_vl_text", "rope_scaling": {"type": "default", "mrope_section": [60_000] * 1000}}, "sections"),
}  # fmt: skip


@contextlib.contextmanager
def decimal_digits(most: int) -> Iterator[None]:
    """Python writes integers of so many digits."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(most)
    yield
    sys.set_int_max_str_digits(before)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """At most 64 MiB of Python's memory, and 256 MiB of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    yield
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 256 << 10


@pytest.mark.parametrize("case", COUNTED)
def test_counts_of_configurations_have_limits(case: str, tmp_path: Path) -> None:
    fields, name = COUNTED[case]
    path = tmp_path / "config.json"
    pe.RotarySpec.from_huggingface({**LLAMA, "model_type": "llama"})  # reads the tables
    path.write_text(json.dumps(fields))
    with little_memory():
        for read in (pe.RotarySpec.from_huggingface, pe.RotarySpec.for_layers):
            with pytest.raises(ValueError, match=f"^{name}"):
                read(path)


def test_views_of_layers_have_a_limit() -> None:
    """Each layer sees a copy of the configuration."""
    fields = {**LLAMA, "model_type": "llama", "num_hidden_layers": 1000}
    large = {**fields, "quantization_config": {"ignore": ["x"] * 200_000}}
    with pytest.raises(ValueError, match=r"^config: expected at most 268435456 bytes in the views"):
        pe.RotarySpec.for_layers(large)


@pytest.mark.parametrize("heads", [65537, 2**27, 2**62, 2**63 - 1])
def test_heads_have_a_limit(heads: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BLOOM, "n_head": heads}))
    with little_memory():
        refused(
            (lambda: pe.ALiBi.from_config(tmp_path), ValueError, "n_head: expected at most 65536"),
            (lambda: torch.ops.posembed.alibi_slopes(heads), ValueError, "num_heads: expected at most 65536"),
            (lambda: torch.ops.posembed.alibi_slopes(1, total_heads=heads), ValueError, "total_heads: expected at most 65536"),
        )  # fmt: skip


def test_rows_of_a_vocabulary_have_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_bytes(b"a 1 2\nb 3 4\n")
    file = open_vectors(path)
    assert file.rows({"a": 0, "b": 200_000}).vectors.shape == (200_001, 2)
    with little_memory(), pytest.raises(ValueError, match="got 2 words for 100000001 rows"):
        file.rows({"a": 0, "b": 100_000_000})


def test_widths_of_an_input_layer_must_agree(tmp_path: Path) -> None:
    """Each table fits the file; the rows of one with the width of the other are 40 GB."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tensors = {"wte.weight": torch.ones(100_000, 1), "wpe.weight": torch.ones(1, 100_000)}
    save_file(tensors, tmp_path / "model.safetensors")
    message = r"wte.weight: expected \[100000, 100000\], got \[100000, 1\]"
    with little_memory(), pytest.raises(ValueError, match=message):
        pe.InputEmbedding.from_huggingface(tmp_path)


# ------------------------------------------------------------------------------------------ fuzzers in Python

FUZZER = CORPUS.parents[1] / "files.py"


def test_no_broken_file_takes_more_than_its_bytes_justify() -> None:
    """A short run of the fuzzer of readers in Python."""
    command = [sys.executable, FUZZER, "--runs", "150"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [next(iter(json.loads(line).values())) for line in done.stdout.splitlines()]
    assert len(answers) == 3
    assert all(each["read"] > 0 and sum(each.values()) == 150 for each in answers)
