"""Plants the faults of faults.json one by one: the test that a fault names must fail.

    python tests/faults/plant.py                 # all; those in C++ are built (hours)
    python tests/faults/plant.py --python        # those that need no build
    python tests/faults/plant.py --only files    # those whose name contains a word

Works on a copy in build/faults, with the options and the library of build/dev.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("faults.json")
LIBRARY = ("python/posembed/lib", "python/posembed/_C.*.so", "build/dev/tests/cpp/libguard_pages.so")
SECONDS = 600  # a test that takes longer hangs, and has failed


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault in words, the text that it replaces, and the test that must fail.

    ``test`` is a test of pytest, or a program of tests/cpp and a filter of its tests. ``target`` is
    what is built for it.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    target: str = ""

    def is_rotten(self, tree: Path) -> str:
        """Why the fault cannot be planted; empty if it can."""
        path = tree / self.file
        count = path.read_text().count(self.old) if path.exists() else 0
        if count != 1:
            return f"{self.file}: expected the text once, found it {count} times"
        file = tree / self.test.partition("::")[0]
        if self.is_program or file.exists():
            return ""
        return f"{self.test}: no such test"

    @property
    def is_program(self) -> bool:
        return not self.test.startswith("tests/")


def faults() -> list[Fault]:
    """The table."""
    return [Fault(**row) for row in json.loads(TABLE.read_text())]


class Tree:
    """A copy of the sources, in which faults are planted and built."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.build = folder, folder / "build" / "dev"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(folder / "python"),
            "POSEMBED_BUILD": str(self.build),
            "OMP_WAIT_POLICY": "passive",
        }

    def copy_sources(self) -> None:
        """Copies what differs, so that little is built again."""
        command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        wanted = {Path(name) for name in listed.decode().split("\0") if name}
        wanted = {path for path in wanted if (ROOT / path).is_file()}
        for path in wanted:
            here, there = ROOT / path, self.folder / path
            if not there.exists() or here.read_bytes() != there.read_bytes():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(here, there)
                there.touch()

    def copy_library(self) -> None:
        """The library as it is built for the sources."""
        for path in (path for pattern in LIBRARY for path in ROOT.glob(pattern)):
            there = self.folder / path.relative_to(ROOT)
            there.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, there, **({"dirs_exist_ok": True} if path.is_dir() else {}))

    def configure(self) -> None:
        """With the options of the user's build, and tests."""
        lines = (ROOT / "build" / "dev" / "CMakeCache.txt").read_text().splitlines()
        own = ("POSEMBED_", "CMAKE_INSTALL_LIBDIR", "CMAKE_BUILD_TYPE", "CMAKE_CUDA_ARCH")
        options = [f"-D{line}" for line in lines if line.startswith(own)]
        options += ["-DPOSEMBED_TESTS=ON", "--log-level=WARNING"]
        self.run("cmake", "-S", ".", "-B", self.build, "-G", "Ninja", *options, check=True)

    def make(self, targets: str) -> bool:
        """Whether the targets can be built; installs the library if it is one."""
        if not (self.build / "build.ninja").exists():
            self.configure()
        built = self.run("cmake", "--build", self.build, "--target", *targets.split())
        if built.returncode == 0 and "posembed" in targets.split():
            install = ("cmake", "--install", self.build, "--prefix", "python/posembed")
            built = self.run(*install)
        return built.returncode == 0

    def passes(self, test: str) -> bool:
        """Whether a test of pytest, or those of a program, pass."""
        if test.startswith("tests/"):
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            return self.run(*command, test).returncode == 0
        program, _, chosen = test.partition(" ")
        found = next(path for path in self.build.rglob(program) if path.is_file())
        return self.run(found, f"--gtest_filter={chosen or '*'}").returncode == 0

    def run(self, *command: str | Path, check: bool = False) -> subprocess.CompletedProcess[bytes]:
        """A command in the copy, whose output is shown only if it had to succeed."""
        limit = SECONDS if command[0] == sys.executable else None
        try:
            done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124)
        if check and done.returncode != 0:
            sys.exit((done.stdout + done.stderr).decode())
        return done

    def try_fault(self, fault: Fault) -> str:
        """What became of a planted fault: "caught" is well."""
        path = self.folder / fault.file
        whole = path.read_text()
        path.write_text(whole.replace(fault.old, fault.new))
        try:
            if fault.target and not self.make(fault.target):
                return "does not build"
            return "missed" if self.passes(fault.test) else "caught"
        finally:
            path.write_text(whole)


def outcomes(tree: Tree, chosen: Sequence[Fault]) -> Iterator[tuple[Fault, str]]:
    """Tries each fault, after its test has passed without it."""
    healthy: dict[tuple[str, str], bool] = {}
    for fault in sorted(chosen, key=lambda fault: (fault.target, fault.test)):
        reason = fault.is_rotten(tree.folder)
        if not reason:
            key = (fault.target, fault.test)
            if key not in healthy:
                built = not fault.target or tree.make(fault.target)
                healthy[key] = built and tree.passes(fault.test)
            if not healthy[key]:
                reason = "the test fails without it"
        yield fault, reason or tree.try_fault(fault)


def main() -> int:
    """Prints a line for each fault; the status is 1 unless all were caught."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="faults with these in their names")
    parser.add_argument("--python", action="store_true", help="faults that need no build")
    parser.add_argument("--tree", type=Path, help="plant in this copy, with a build of its own")
    options = parser.parse_args()
    tree = Tree((options.tree or ROOT / "build" / "faults").resolve())
    if tree.folder == ROOT:
        parser.error("--tree: expected a copy, got the sources of this script")
    if options.tree is None:
        tree.copy_sources()
        tree.copy_library()
    chosen = [f for f in faults() if any(word in f.name for word in options.only)]
    chosen = [f for f in chosen if not (options.python and f.target)]
    counts: dict[str, int] = {}
    for fault, outcome in outcomes(tree, chosen):
        print(f"{outcome:<12} {fault.name} [{fault.test}]", flush=True)
        counts[outcome] = counts.get(outcome, 0) + 1
    print(f"{len(chosen)} faults: {counts}")
    return int(counts.get("caught", 0) != len(chosen))


if __name__ == "__main__":
    sys.exit(main())
