"""Tests the rules of the code's structure: the includes and imports that each layer may have."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "posembed"
BUILD = Path(os.environ.get("POSEMBED_BUILD", ROOT / "build" / "dev")) / "csrc"
TORCH = ("torch/", "ATen/", "c10/", "pybind11/")


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository, including new ones but not ignored ones."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("only a git checkout tells the project's files from others")
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def includes(source: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source.read_text(), re.MULTILINE)


def torch_free(source: Path) -> bool:
    """Whether a file belongs to the kernel layer: core/, and sources of the kernels' library."""
    listed = (CSRC / "CMakeLists.txt").read_text().partition("file(GLOB")[0]
    inside = source.relative_to(CSRC)
    return (
        inside.parts[0] == "core"
        or inside.name == f"{inside.parts[0]}.h"
        or inside.stem.endswith(("_cpu", "_cuda"))
        or inside.suffix == ".cu"
        or str(inside.with_suffix(".cpp")) in listed
    )


def broken(sources: list[Path], forbidden: tuple[str, ...]) -> list[str]:
    """Every include that starts with one of these, as 'file includes header'."""
    assert sources, "the rule looks at no file"
    return [
        f"{source.relative_to(ROOT)} includes {header}"
        for source in sources
        for header in includes(source)
        if header.startswith(forbidden)
    ]


def sources_of(room: str) -> list[Path]:
    return [
        file
        for file in tracked(f"csrc/{room}")
        if file.suffix in {".h", ".cpp", ".cu"} and file.is_relative_to(CSRC / room)
    ]


def test_kernels_know_no_torch() -> None:
    rooms = ("core", "pretrained", *FAMILIES)
    kernels = [file for room in rooms for file in sources_of(room) if torch_free(file)]
    assert broken(kernels, (*TORCH, "dispatcher/", "posembed/")) == []


def test_the_c_interface_knows_no_torch() -> None:
    rest = sorted(set(includes(CSRC / "include" / "posembed_kernels.h")))
    assert broken(sources_of("c_interface"), (*TORCH, "dispatcher/", "posembed/")) == []
    assert rest == ["stddef.h", "stdint.h"]


def test_only_posembed_cpp_needs_the_bindings() -> None:
    """The wheel for every torch and Python has no _C; make test-without-cpp runs the tests so."""
    sources = [file for file in tracked("python/posembed") if file.suffix == ".py"]
    named = re.compile(r"\bposembed\._C\b|\bbindings\(|import _C\b")
    users = {file.name for file in sources if named.search(file.read_text())}
    assert users == {"_library.py", "cpp.py"}


def test_core_knows_no_family() -> None:
    others = tuple(f"{family}/" for family in FAMILIES)
    assert broken(sources_of("core"), others) == []


def test_the_dispatcher_knows_no_family() -> None:
    others = tuple(f"{family}/" for family in FAMILIES)
    assert broken(sources_of("dispatcher"), others) == []


def test_users_headers_include_only_what_is_installed() -> None:
    inside = ("core/", "dispatcher/", "nlohmann/", "pretrained/", *(f"{family}/" for family in FAMILIES))
    assert broken(sources_of("include/posembed"), inside) == []


def test_bindings_use_what_users_use() -> None:
    """And the operators' headers, which name the values of enums."""
    inside = ("core/", "dispatcher/", "pretrained/")
    others = tuple(
        str(file.relative_to(CSRC))
        for family in FAMILIES
        for file in sources_of(family)
        if not file.name.endswith("_operator.h")
    )
    shared = ["csrc/binding/tables.cpp includes pretrained/source.h"]  # of both from_file
    assert broken(sources_of("binding"), (*inside, *others)) == shared


def test_headers_that_drag_in_all_of_torch_stay_out() -> None:
    sources = [file for file in tracked("csrc") if file.suffix in {".h", ".cpp", ".cu"}]
    heavy = ("torch/all.h", "torch/torch.h", "torch/script.h", "torch/extension.h")
    bindings = CSRC / "binding"  # bind_module is declared in torch/extension.h's neighbourhood only
    assert broken([file for file in sources if bindings not in file.parents], heavy) == []


def test_which_half_computes_is_asked_in_one_place() -> None:
    """Elsewhere make test-cuda-on-cpu would run CPU code. Numerics, and torch's products, follow the real device."""
    asked = sorted(
        str(file.relative_to(CSRC))
        for file in tracked("csrc")
        if file.suffix in {".cpp", ".h"} and "is_cuda()" in file.read_text()
    )
    followers = ["relative_logits/relative_logits_operator.cpp", "rotary/rotary_angles.cpp"]
    assert asked == ["dispatcher/cuda_scope.cpp", *followers]


def test_instruction_sets_share_no_function() -> None:
    """The linker keeps one copy of a function in several objects, so it must run anywhere."""
    objects = [*BUILD.glob("CMakeFiles/*_avx512.dir/**/*.o"), *BUILD.glob("**/*_avx2.dir/**/*.o")]
    if not objects or shutil.which("nm") is None:
        pytest.skip("needs nm, and the folder of a build with instruction sets")
    shared = [f"{file.relative_to(BUILD)}: {symbol}" for file in objects for symbol in weak_functions(file)]
    assert shared == []


def symbols(file: Path, kinds: str, *options: str) -> list[str]:
    """Names in an object or a library, of the kinds of nm."""
    table = subprocess.run(["nm", "--demangle", *options, file], capture_output=True, text=True, check=True)
    return re.findall(rf"^ *\w* [{kinds}] (.*)$", table.stdout, re.MULTILINE)


def weak_functions(file: Path) -> list[str]:
    """Functions that an object defines and shares with others of that name."""
    found = symbols(file, "W")
    return [symbol for symbol in found if "::avx2::" not in symbol and "::avx512::" not in symbol]


def test_the_kernels_library_needs_no_torch() -> None:
    """And shows no symbol but posembed's: none of the CUDA runtime, no copy of a kernel for one instruction set."""
    library = BUILD / "libposembed_kernels.so"
    if not library.is_file() or shutil.which("nm") is None:
        pytest.skip("needs nm, and the folder of a build")
    needed = re.findall(rb"lib([a-z_+]+)[-.\w]*\.so\.\d", subprocess.check_output(["readelf", "-d", library]))
    assert {*needed} <= {b"stdc++", b"m", b"gcc_s", b"c", b"dl", b"pthread", b"rt", b"ld"}
    assert [name for name in symbols(library, "Uw", "-D") if re.search(r"\b(c10|at|torch|GOMP\w*)\b", name)] == []
    shown = symbols(library, "A-Zuv", "-D", "--defined-only")
    assert [name for name in shown if not re.match(r"posembed(::|_)|POSEMBED_", name)] == []
    assert [name for name in shown if re.search("::(baseline|avx2|avx512)::", name)] == []
    assert symbols(library, "u", "-D") == []  # of which a process has one, whatever the build


def test_operators_call_the_kernels_of_their_own_build() -> None:
    """A version of the symbols, which the loader compares. A weak symbol would be null where there is none."""
    library = BUILD / "libposembed.so"
    if not library.is_file() or shutil.which("nm") is None:
        pytest.skip("needs nm, and the folder of a build")
    assert [name for name in symbols(library, "wv", "-D") if "posembed" in name] == []
    called = [name for name in symbols(library, "U", "-D") if name.startswith("posembed::")]
    shown = symbols(BUILD / "libposembed_kernels.so", "A-Zuv", "-D", "--defined-only")
    (version,) = {name.partition("@")[2] for name in called}
    assert version.startswith("POSEMBED_")
    assert "posembed::rotary::rotate_cpu" in {name.partition("@")[0] for name in called}
    assert {name.replace("@", "@@") for name in called} <= {*shown}


def comment_blocks(text: str) -> list[list[tuple[int, str]]]:
    """Blocks of lines that contain only a comment, each line with its number from 0."""
    blocks: list[list[tuple[int, str]]] = []
    for number, line in enumerate(text.splitlines()):
        if line.lstrip().startswith("//"):
            if not blocks or blocks[-1][-1][0] != number - 1:
                blocks.append([])
            blocks[-1].append((number, line))
    return blocks


def comment_words(line: str) -> list[str]:
    return line.lstrip(" /").split()


def orphans(block: list[tuple[int, str]]) -> list[int]:
    """Lines that clang-format has split from the previous line and not joined with the next."""
    found = []
    for (_, before), (number, line), (_, after) in zip(block, block[1:], block[2:], strict=False):
        words, next_words = comment_words(line), comment_words(after)
        if not words or not next_words or next_words[0].startswith("@"):
            continue
        overflowed = len(f"{before} {words[0]}") > 100
        # A person would have put the next line's first words here.
        unfilled = len(f"{line} {next_words[0]}") < 75 and not line.endswith((".", ":", ";"))
        if overflowed and unfilled and not re.match(r"\s*///?\s+[-*] ", after):
            found.append(number + 1)
    return found


def flush_after_tag(block: list[tuple[int, str]]) -> list[int]:
    """Lines of an @param or another tag that are indented like the text."""
    found, tagged = [], False
    for number, line in block:
        text = line.lstrip().lstrip("/")
        if text.startswith(" @") or not text.strip():
            tagged = bool(text.strip())
        elif tagged and not text.startswith("     "):
            found.append(number + 1)
    return found


def test_no_comment_is_broken_by_the_formatter() -> None:
    """clang-format does not join the rest of an overlong line with the next: wrap by hand."""
    sources = [file for file in tracked("csrc", "tests/cpp") if file.suffix in {".h", ".cpp", ".cu"}]
    assert sources
    broken_lines = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in sources
        for block in comment_blocks(file.read_text())
        for number in (*orphans(block), *flush_after_tag(block))
    ]
    # A declaration whose name is alone on the line of its comment.
    broken_lines += [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in sources
        for line in re.findall(r"^\s+\w+(?: = [^;]+)?;\s+///<.*", file.read_text(), re.MULTILINE)
    ]
    assert broken_lines == []


# Python.


def test_only_the_operators_faces_call_operators() -> None:
    """Modules use functional, which uses specifications; the rest is registration."""
    faces = {"_library.py", "conversion.py", "diffusers.py"}
    faces.add("_rotation.py")  # of patched models, where every step of a call counts
    folders = {"functional", "glue", "decompositions", "sharding", "vmap", "specifications"}
    modules = [
        file for file in tracked("python/posembed/*.py") if file.name not in faces and file.parent.name not in folders
    ]
    assert modules
    callers = [file.name for file in modules if "torch.ops.posembed" in file.read_text()]
    assert callers == []


def test_devices_may_be_all_that_torch_takes() -> None:
    hints = {
        hint
        for file in tracked("python/posembed/*.py")
        for hint in re.findall(r"^ +device: (.*) = None,$", file.read_text(), re.MULTILINE)
    }
    assert hints == {"Device | None"}


def test_no_file_names_a_place_of_one_machine() -> None:
    places = re.compile(r"(?<![\w.$}/-])/(home|root|work|tmp|Users)/\w")
    named = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in tracked()
        if file.suffix not in {".ipynb", ".png"}
        for line in file.read_text(errors="ignore").splitlines()
        if places.search(line)
    ]
    assert named == []
