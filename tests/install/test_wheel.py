"""Wheels: contents and requirements, and use on a machine without a compiler.

The wheel for every torch and Python holds the library for the installed torch alone here; `make
test-wheel` tries others.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import posembed
import pytest
import torch
from support.build_folder import BUILD, ROOT, used_alone

sys.path.insert(0, str(ROOT / "scripts"))
import build_wheel

SITE = Path(sysconfig.get_path("purelib"))
QUICKSTART = ROOT / "examples/cpp/quickstart"


pytestmark = pytest.mark.program  # minutes

MINOR = ".".join(torch.__version__.split(".")[:2])


def built(folder: Path, torches: str) -> Path:
    """Built in the folder of the tests' own build, where nothing is compiled again."""
    with used_alone():
        wheel = build_wheel.build(
            folder, POSEMBED_BUILD=str(BUILD), POSEMBED_TORCHES=torches, CMAKE_ARGS="-DPOSEMBED_WARNINGS_AS_ERRORS=ON"
        )
    return build_wheel.repair(wheel, folder / "repaired")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"), f"{MINOR}={Path(torch.__file__).parent}")


@pytest.fixture(scope="module")
def wheel(file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def python(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment: this one's torch, and the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    site.joinpath("torch").symlink_to(Path(torch.__file__).parent)
    site.joinpath("others.pth").write_text(str(SITE))
    install = [sys.executable, "-m", "pip", "--python", python, "install"]
    run(*install, "--no-deps", "--no-index", "--target", site, file)
    return python


def run(*command: object, **environment: str) -> str:
    """Runs a command without this repository's package; its output is the message of a failure."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=inherited | environment
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_it_is_a_python_package_and_a_cpp_package(wheel: zipfile.ZipFile) -> None:
    assert {
        "posembed/__init__.py",
        "posembed/include/posembed/rotary.h",
        "posembed/include/posembed/version.h",
        f"posembed/lib/torch{MINOR}/cmake/PosEmbed/LibTorch.cmake",
        f"posembed/lib/torch{MINOR}/cmake/PosEmbed/PosEmbedConfig.cmake",
        f"posembed/lib/torch{MINOR}/libposembed.so",
        "posembed/lib/libposembed_kernels.so",
        "posembed/py.typed",
    } <= set(wheel.namelist())


def libraries(wheel: zipfile.ZipFile) -> set[str]:
    return {name.removeprefix("posembed/") for name in wheel.namelist() if ".so" in name}


def required_torch(wheel: zipfile.ZipFile) -> list[str]:
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return re.findall(r"Requires-Dist: (torch\W.*)", wheel.read(metadata).decode())


def test_it_brings_no_other_library(wheel: zipfile.ZipFile) -> None:
    assert libraries(wheel) == {"lib/libposembed_kernels.so", f"lib/torch{MINOR}/libposembed.so"}


def test_it_fits_every_python_where_torch_runs(file: Path) -> None:
    assert "-py3-none-manylinux_2_" in file.name
    assert file.name.endswith(f"manylinux_2_28_{os.uname().machine}.whl")


def test_it_replaces_no_torch(wheel: zipfile.ZipFile) -> None:
    assert required_torch(wheel) == ["torch>=2.11"]


def test_it_finds_torch_beside_itself(wheel: zipfile.ZipFile) -> None:
    library = wheel.read(f"posembed/lib/torch{MINOR}/libposembed.so")
    assert re.search(rb"\0\$ORIGIN/\.\./?:\$ORIGIN/\.\./\.\./\.\./torch/lib\0", library)


def test_the_wheel_of_one_python_has_the_cpp_modules(tmp_path: Path) -> None:
    """So it fits one torch, too, and says so."""
    file = built(tmp_path, "")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-manylinux_2_" in file.name
    with zipfile.ZipFile(file) as wheel:
        extension = sysconfig.get_config_var("EXT_SUFFIX")
        assert libraries(wheel) == {"lib/libposembed.so", "lib/libposembed_kernels.so", f"_C{extension}"}
        assert required_torch(wheel) == [f"torch=={MINOR}.*"]
        assert b"\0$ORIGIN/:$ORIGIN/../../torch/lib\0" in wheel.read("posembed/lib/libposembed.so")


def test_it_names_no_folder_of_the_machine_that_built_it(wheel: zipfile.ZipFile) -> None:
    for folder in (ROOT, BUILD, Path(torch.__file__).parent):
        assert [n for n in wheel.namelist() if os.fsencode(folder) in wheel.read(n)] == []


def test_python_uses_it_without_a_compiler(python: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = "\n".join(blocks)
    program = tmp_path / "program.py"
    program.write_text(f"{code}\nprint(pe.__file__, pe.build_info()['instruction_sets'])\n")
    printed = run(python, program, PATH=str(python.parent))
    facts = printed.splitlines()[-1]
    assert facts.startswith(str(python.parents[1]))
    assert all(known in facts for known in posembed.build_info()["instruction_sets"])


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on this machine")
def test_cpp_uses_it(python: Path, tmp_path: Path) -> None:
    package = run(python, "-m", "posembed", "--cmake-dir").strip()
    run("cmake", "-S", QUICKSTART, "-B", tmp_path, "-G", "Ninja", f"-DPosEmbed_DIR={package}")
    run("cmake", "--build", tmp_path)
    assert run(tmp_path / "quickstart") == "[2, 128, 768] [2, 128, 32, 128] [2, 128, 8, 128]\n"
