"""Tests of posembed_kernels.h: a C program without torch, the structs' layouts, and what only C can get wrong."""

import ctypes
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import posembed as pe
import posembed_kernels as kernels
import posembed_kernels.numpy as pn
import pytest
import torch
from support.documentation import DOCS, ROOT, blocks

HEADER = ROOT / "csrc" / "include"
STRICT = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror")


def compiled(source: Path, program: Path, *options: object) -> list[str]:
    """Runs a C program; its lines."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    command = ["gcc", *STRICT, source, f"-I{HEADER}", *options, "-o", program]
    made = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    shown = subprocess.run([program], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.splitlines()


def test_the_example_runs(tmp_path: Path) -> None:
    library = kernels.library_path()
    printed = subprocess.run([sys.executable, "-m", "posembed_kernels"], capture_output=True, text=True, check=True)
    assert printed.stdout.split() == [str(kernels.include_dir()), str(library.parent)]
    options = (f"-L{library.parent}", "-lposembed_kernels", f"-Wl,-rpath,{library.parent}")
    lines = compiled(ROOT / "examples" / "c" / "rotate.c", tmp_path / "rotate", *options)
    shown, on_cuda = blocks(DOCS / "start/without_torch.md", "c")
    assert textwrap.indent(shown, "  ") in (ROOT / "examples" / "c" / "rotate.c").read_text()
    assert lines[0].startswith("moved by up to 6.")
    assert float(lines[1].rpartition(" ")[2]) < 1e-6
    assert lines[2] == "refused: offset: expected 0 or more, got -1"
    source, given = tmp_path / "on_cuda.c", "void* stream = NULL; posembed_gather call = {.size = sizeof call};"
    source.write_text(
        f'#include "posembed_kernels.h"\n#include <stdio.h>\nint main(void) {{ {given}\n{on_cuda}return 0; }}\n'
    )
    assert compiled(source, tmp_path / "on_cuda", *options) == ["weight: expected a tensor, got NULL"]


NAMES = {
    "posembed_rotary_series": "posembed_rotary_series",
    "posembed_rotary": "posembed_rotation",
    "posembed_sinusoidal": "posembed_sinusoid",
    "posembed_alibi_bias": "posembed_alibi",
    "posembed_embedding": "posembed_gather",
}


@pytest.mark.parametrize("dlpack", [False, True])
def test_structs_are_those_of_the_header(dlpack: bool, tmp_path: Path) -> None:
    structs: list[tuple[str, Any]] = [(NAMES[name], kind) for name, kind in kernels.STRUCTS.items()]
    structs.append(("posembed_threads", kernels.Threads))
    places = [(name, field[0], kind) for name, kind in structs for field in kind._fields_]
    offsets = [(f"offsetof({name}, {field})", getattr(kind, field).offset) for name, field, kind in places]
    nested = {"device_type": "device", "device_id": "device", "code": "dtype", "bits": "dtype", "lanes": "dtype"}
    for field, _ in kernels.Tensor._fields_:
        path = f"{nested[field]}.{field}" if field in nested else field
        offsets.append((f"offsetof(posembed_tensor, {path})", getattr(kernels.Tensor, field).offset))
    sizes = [(f"sizeof({name})", ctypes.sizeof(kind)) for name, kind in [*structs, ("posembed_tensor", kernels.Tensor)]]
    include = '#include "ATen/dlpack.h"\n' if dlpack else ""  # the users' header, as torch ships it
    prints = "".join(f'printf("%zu\\n", (size_t){text});' for text, _ in [*offsets, *sizes])
    source = tmp_path / "layout.c"
    source.write_text(f'{include}#include "posembed_kernels.h"\n#include <stdio.h>\nint main(void) {{ {prints} }}\n')
    lines = compiled(source, tmp_path / "layout", f"-isystem{Path(torch.__file__).parent / 'include'}")
    assert [int(line) for line in lines] == [number for _, number in [*offsets, *sizes]]


def tensor(array: Any, **changes: Any) -> Any:
    made = pn._tensor(array)
    for field, value in changes.items():
        setattr(made, field, value)
    return made


WEIGHT, IDS = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([2, 1])
SIZES = ctypes.c_int64 * 3


def gathered(**changes: Any) -> Any:
    """Gathers rows with some of the call changed; the result, or the status and the text of the refusal."""
    out = np.full((2, 3), 7, np.float32)
    tensors = {"weight": tensor(WEIGHT), "ids": tensor(IDS), "out": tensor(out)}
    tensors |= {name: made(out) for name, made in changes.items() if name in tensors}
    fields = {name: each if each is None else ctypes.addressof(each) for name, each in tensors.items()}
    call = kernels.struct("posembed_embedding", fields)
    call.size += changes.get("grown", 0)
    status = kernels.library().posembed_embedding(changes.get("call", ctypes.byref(call)), changes.get("threads"))
    if status == 0:
        return out.tolist()
    assert (out == 7).all(), "written although refused"
    return status, kernels.library().posembed_last_error().decode()


def test_what_dlpack_leaves_to_the_caller() -> None:
    rows = [[6, 7, 8], [3, 4, 5]]
    assert gathered() == rows
    assert gathered(weight=lambda _: tensor(WEIGHT, strides=None)) == rows
    assert gathered(grown=-8) == rows  # an older header, without the scale
    assert gathered(weight=lambda _: tensor(WEIGHT[:3], byte_offset=12)) == [[9, 10, 11], [6, 7, 8]]
    assert gathered(weight=lambda _: tensor(WEIGHT, device_type=3)) == rows


BAD: list[tuple[int, str, dict[str, Any]]] = [
    (1, "gather: expected a struct, got NULL", {"call": None}),
    (1, "gather.size: expected its sizeof", {"grown": 8}),
    (1, "gather.size: expected its sizeof", {"grown": -40}),
    (1, "weight: expected a tensor, got NULL", {"weight": lambda _: None}),
    (1, "weight.data: expected memory, got NULL", {"weight": lambda _: tensor(WEIGHT, data=None)}),
    (1, "ids.shape: expected sizes, got NULL", {"ids": lambda _: tensor(IDS, shape=None)}),
    (1, "weight: expected [rows, embedding_dim], got [12]", {"weight": lambda _: tensor(WEIGHT.reshape(12))}),
    (1, "weight: expected at most 8 dimensions, got 9", {"weight": lambda _: tensor(WEIGHT, ndim=9)}),
    (1, "weight: expected sizes of 0 or more", {"weight": lambda _: tensor(WEIGHT, shape=SIZES(-4, 3))}),
    (1, "weight: expected no negative stride, got -3", {"weight": lambda _: tensor(WEIGHT, strides=SIZES(-3, 1))}),
    (
        1,
        "weight: expected a contiguous last dimension, got stride 2",
        {"weight": lambda _: tensor(WEIGHT, strides=SIZES(3, 2))},
    ),
    (1, "weight: expected memory aligned to float32", {"weight": lambda _: tensor(WEIGHT, byte_offset=2)}),
    (1, "weight: its shape has too many elements", {"weight": lambda _: tensor(WEIGHT, shape=SIZES(2**62, 3))}),
    (1, "weight: expected memory of the CPU or of CUDA", {"weight": lambda _: tensor(WEIGHT, device_type=4)}),
    (1, "out: shares memory with weight", {"weight": lambda out: tensor(out)}),
    (1, "ids, out: expected contiguous", {"ids": lambda _: tensor(IDS, strides=SIZES(2))}),
    (
        2,
        "weight: expected float32, float64, bfloat16 or float16, got int32",
        {"weight": lambda _: tensor(WEIGHT, code=0)},
    ),
    (2, "got float32x2", {"weight": lambda _: tensor(WEIGHT, lanes=2)}),
    (2, "out: expected the dtype of weight, float32, got int32", {"out": lambda out: tensor(out, code=0)}),
    (2, "ids: expected int32 or int64, got uint64", {"ids": lambda _: tensor(IDS, code=1)}),
    (3, "ids: expected 0 to 3, a row of weight, got 4 at index 0", {"ids": lambda _: tensor(IDS + 2)}),
    (1, "threads.size: expected its sizeof", {"threads": ctypes.byref(kernels.Threads())}),
]


@pytest.mark.parametrize(("status", "words", "changes"), BAD, ids=[words for _, words, _ in BAD])
def test_refusals(status: int, words: str, changes: dict[str, Any]) -> None:
    got = gathered(**changes)
    assert got[0] == status
    assert words in got[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory is the CPU's")
def test_cuda_is_refused_where_there_is_none() -> None:
    def on_cuda(array: Any) -> Any:
        return lambda out: tensor(out if array is None else array, device_type=2)

    status, text = gathered(weight=on_cuda(WEIGHT), ids=on_cuda(IDS), out=on_cuda(None))
    if pe.build_info()["cuda_version"]:
        assert status == 4
        assert "CUDA kernels of posembed need an NVIDIA driver that is R" in text
    else:
        assert status == 1
        assert "weight: expected memory of the CPU" in text
        assert "this build has no CUDA kernels" in text
    assert kernels.library().posembed_check_errors(1) == 0


def test_threads_have_errors_of_their_own() -> None:
    assert gathered(call=None)[0] == 1
    texts: list[bytes] = []
    worker = Thread(target=lambda: texts.append(kernels.library().posembed_last_error()))
    worker.start()
    worker.join()
    assert texts == [b""]
