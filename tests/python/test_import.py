"""Tests that ``import posembed`` loads only what models need and shows only public names."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import posembed
import pytest
from posembed import _library
from support.build_folder import BUILD

PROGRAM = """
import sys

import torch

before = set(sys.modules)
import posembed

print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
print("torch._dynamo" in set(sys.modules) - before)
"""


def test_import_loads_neither_the_compiler_nor_optional_packages() -> None:
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    packages, compiler = printed.splitlines()
    assert "posembed" in packages.split()
    assert not {"transformers", "matplotlib", "sklearn", "tqdm", "safetensors"} & set(packages.split())
    assert compiler == "False"


def test_a_free_threaded_python_stays_so() -> None:
    """Importing a module that does not say that it needs no GIL turns it on."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this Python has a GIL")
    assert not getattr(sys, "_is_gil_enabled", lambda: True)()


def test_dir_shows_what_users_are_meant_to_find() -> None:
    shown = {name for name in dir(posembed) if not name.startswith("__")}
    modules = {"scaling", "analysis", "cpp", "data", "optim", "plot"}
    assert shown == {*posembed.__all__, *modules, "patch", "unpatch"}
    assert "__version__" in dir(posembed)
    assert all(hasattr(posembed, name) for name in shown)


PATCH = """
import sys
import posembed

assert not any(name.startswith("posembed.integrations.huggingface") for name in sys.modules)
patch = posembed.patch
from posembed.integrations import diffusers, timm, transformers

assert patch is transformers.patch is diffusers.patch is timm.patch
assert posembed.unpatch is transformers.unpatch is diffusers.unpatch is timm.unpatch
assert not {"transformers", "diffusers", "timm"} & sys.modules.keys()
"""


def test_patch_is_imported_at_first_use_without_the_libraries() -> None:
    subprocess.run([sys.executable, "-c", PATCH], check=True)


WITHOUT_BINDINGS = r"""
import os, sys

sys.modules["posembed._C"] = None  # as in a wheel, which fits every Python

import posembed as pe
import torch
from safetensors.torch import save_file


def raised(kind, call):
    try:
        call()
    except kind as error:
        return error
    sys.exit(f"no {kind}")


query = torch.randn(1, 3, 2, 8)
pe.RotaryEmbedding(8)(query)
pe.InputEmbedding(5, 8, max_positions=4)(torch.tensor([[1, 2]])).sum().backward()

# Files: words with characters of several bytes, a path that is not UTF-8, errors, a file table.
folder = os.fsencode(sys.argv[1])
path = os.path.join(folder, b"x\xff.vec")
with open(path, "wb") as file:
    file.write("a\u00e9 1.0 2.0\n\U0001f600 3.0 4.0\nz 5.0 6.0\n".encode())
words = ["z", "\U0001f600", "none", "a\u00e9"]
vectors = pe.pretrained.open_vectors(path)
assert vectors.words() == ["a\u00e9", "\U0001f600", "z"]
rows, coverage = vectors.rows(words, missing="zero")
assert rows.tolist() == [[5.0, 6.0], [3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]
assert tuple(coverage) == (3, ["none"], [])
with open(path, "ab") as file:
    file.write(b"short 1.0\n")
error = raised(pe.FileFormatError, pe.pretrained.open_vectors(path).table)
assert error.path == os.fsdecode(path) and error.offset > 0, error
missing = os.fsdecode(os.path.join(folder, b"\xfe"))
assert raised(FileNotFoundError, lambda: pe.FileTable(missing)).filename == missing
path = os.path.join(folder, b"t.safetensors")
save_file({"weight": torch.arange(12.0).view(6, 2)}, os.fsdecode(path))
assert pe.FileTable(os.fsdecode(path))(torch.tensor([5])).tolist() == [[10.0, 11.0]]
packed = torch.ops.quantized.embedding_bag_byte_prepack(torch.ones(2, 4))
assert pe.QuantizedTable.from_rowwise(packed).dequantize().tolist() == [[1.0] * 4] * 2
print(raised(ImportError, lambda: pe.cpp.RotaryEmbedding))
"""


def test_all_but_cpp_needs_no_bindings(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_BINDINGS, tmp_path]
    printed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    (line,) = printed.stdout.splitlines()
    assert line.startswith("posembed.cpp needs posembed._C, which this build lacks for Python")
    assert "python -m pip install" in line


def test_a_build_for_a_better_processor_is_an_import_error(tmp_path: Path) -> None:
    """A library whose kernels need AVX-512, in a process whose processor seems to lack it."""
    built = BUILD / "tests/cpp/lesser_processor/libposembed.so"
    if not built.is_file():
        pytest.skip("make build-tests links it")
    package, lib = Path(posembed.__file__).parent, tmp_path / "posembed/lib"
    lib.mkdir(parents=True)
    shutil.copy(built, lib)
    shutil.copy(package / "lib/build.json", lib)
    for name in ("__init__.py", "_library.py"):
        shutil.copy(package / name, tmp_path / "posembed")
    program = """
import torch
for _ in range(2):
    try:
        import posembed
    except ImportError as error:
        print(error)
try:
    torch.ops.posembed.embedding.default(torch.ones(2, 3), torch.tensor([1]))
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert run.returncode == 0, run.stderr[-2000:]
    first, second, call = run.stdout.splitlines()
    assert first == second
    assert first.startswith("This posembed was built for processors with avx512, which this one")
    assert "make build CMAKE_ARGS=-DPOSEMBED_INSTRUCTION_SETS=all" in first
    assert call.startswith("posembed: its CPU kernels need avx512, which this processor lacks")


@pytest.mark.parametrize(("integration", "missing"), [("torchrec", "torchrec"), ("torchtitan", "spmd_types")])
def test_integrations_say_what_to_install(integration: str, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import posembed.integrations.{integration}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: posembed.integrations.{integration} ")
    assert f"{missing} is missing: python -m pip install {integration}" in last


WITHOUT_LIBTORCH_CUDA = """
import ctypes, importlib.util, sys
from pathlib import Path

torch = Path(importlib.util.find_spec("torch").origin).parent / "lib"
for library in (torch / "libc10.so", torch / "libtorch_cpu.so", Path(sys.argv[1])):
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
loaded = Path("/proc/self/maps").read_text()
print([name for name in ("libtorch_cuda", "libc10_cuda", "libposembed.so") if name in loaded])
"""


def test_one_library_serves_torch_with_and_without_cuda() -> None:
    """Its operators are registered in a process that has torch's libraries for the CPU alone."""
    command = [sys.executable, "-c", WITHOUT_LIBTORCH_CUDA, _library.LIBRARY]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == "['libposembed.so']\n"
