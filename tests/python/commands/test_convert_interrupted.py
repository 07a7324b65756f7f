"""Commands that write and are killed, meet a full disk or each other, or must not overwrite."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from posembed.commands import common, main

safetensors = pytest.importorskip("safetensors.torch")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "rope_theta": 10000.0,
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A conversion of 64 MiB to other.safetensors."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names = [f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(8) for p in "qk"]
    source = tmp_path / "model.safetensors"
    safetensors.save_file({name: torch.randn(1024, 1024) for name in names}, source)
    paths = [source, tmp_path / "other.safetensors", "--config", tmp_path / "config.json"]
    options = ["--to", "interleaved", "--force"]
    return [sys.executable, "-m", "posembed", "convert", *map(str, paths), *options]


def test_killed_at_any_moment_the_target_is_whole_or_what_it_was(
    command: list[str], tmp_path: Path
) -> None:
    """And the next command goes on. `make reliability` kills 100 commands, make test two."""
    target, part = tmp_path / "other.safetensors", tmp_path / "other.safetensors.part"
    assert main(command[3:]) == 0
    whole = target.read_bytes()
    draw = random.Random(0)
    rounds = [(None, signal.SIGTERM), (b"what was there before", signal.SIGKILL)]
    cut_off = 0
    for old, number in rounds * (50 if os.environ.get("POSEMBED_LONG") else 1):
        target.unlink(missing_ok=True)
        if old is not None:
            target.write_bytes(old)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while not list(part.glob(target.name)) and process.poll() is None:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.08) if cut_off else 0)
        process.send_signal(number)
        _, error = process.communicate()
        assert process.returncode in (0, -number), error
        cut_off += part.exists()
        assert (target.read_bytes() if target.exists() else None) in (old, whole)
    assert cut_off > 0, "no conversion was killed while it wrote"
    assert main(command[3:]) == 0
    assert target.read_bytes() == whole
    assert not part.exists()


def limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write() fails instead, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_a_full_disk_leaves_the_old_file(command: list[str], tmp_path: Path) -> None:
    target = tmp_path / "other.safetensors"
    target.write_bytes(b"what was there before")
    run = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit_files)
    assert run.returncode != 0
    assert "File too large" in run.stderr
    assert target.read_bytes() == b"what was there before"
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("folder", [False, True])
def test_the_second_of_two_writers_is_refused(folder: bool, tmp_path: Path) -> None:
    """It may not remove what the first one writes, either."""
    target = tmp_path / "target"
    with common.whole_or_not_at_all(target, folder=folder) as part:
        file = part / "x" if folder else part
        file.write_text("first")
        with (
            pytest.raises(ValueError, match=r"target\.part: another command writes it"),
            common.whole_or_not_at_all(target, folder=folder),
        ):
            pass
        assert file.read_text() == "first"
    assert (target / "x" if folder else target).read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_many_writers_at_once(tmp_path: Path) -> None:
    """Each has the folder for itself or is refused, also while another one takes it away."""
    target = tmp_path / "target"

    def write(writer: int) -> int:
        count = 0
        for _ in range(100):
            with (
                suppress(ValueError),
                common.whole_or_not_at_all(target, force=True) as part,
            ):
                assert not part.exists()
                part.write_text(str(writer))
                assert part.read_text() == str(writer)
                count += 1
        return count

    with ThreadPoolExecutor(4) as writers:
        counts = list(writers.map(write, range(4)))
    assert sum(counts) > 0
    assert target.read_text() in {"0", "1", "2", "3"}
    assert list(tmp_path.iterdir()) == [target]


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path) -> None:
    """The one who held it is done, and the next may have made another."""
    path = tmp_path / common.LOCK
    with path.open("ab") as file:
        assert common.lock(file, path, new=False)
        path.unlink()
        assert not common.lock(file, path, new=False)
        path.touch()
        assert not common.lock(file, path, new=False)


def test_a_target_that_comes_while_it_is_written(tmp_path: Path) -> None:
    target = tmp_path / "target"
    writing = common.whole_or_not_at_all(target)
    writing.__enter__().write_text("ours")
    target.write_text("theirs")
    with pytest.raises(ValueError, match="target: exists; --force overwrites it"):
        writing.__exit__(None, None, None)
    assert target.read_text() == "theirs"


@pytest.mark.parametrize("files", [(), (common.LOCK,), (common.LOCK, "target", "more")])
def test_what_a_killed_command_left_is_removed(files: tuple[str, ...], tmp_path: Path) -> None:
    part = tmp_path / "target.part"
    part.mkdir()
    for name in files:
        (part / name).write_text("half")
    with common.whole_or_not_at_all(tmp_path / "target") as file:
        assert [path.name for path in part.iterdir()] == [common.LOCK]
        file.write_text("whole")
    assert list(tmp_path.iterdir()) == [tmp_path / "target"]


def make_folder_of_others(part: Path) -> None:
    part.mkdir()
    (part / "thesis.txt").write_text("mine")


def make_link(part: Path) -> None:
    part.with_name("elsewhere").mkdir()
    part.symlink_to(part.with_name("elsewhere"))


def make_of_another_user(part: Path) -> None:
    part.mkdir()
    try:
        os.chown(part, 12345, -1)
    except PermissionError:
        pytest.skip("only root gives folders away")


@pytest.mark.parametrize(
    "make", [make_folder_of_others, make_of_another_user, make_link, Path.touch]
)
def test_what_no_command_left_is_kept(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "target.part")
    before = sorted(tmp_path.rglob("*"))
    with (
        pytest.raises(ValueError, match=r"\.part: exists, and no command of posembed made it"),
        common.whole_or_not_at_all(tmp_path / "target"),
    ):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who makes the folder has it; a killed command's stays."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    test_the_second_of_two_writers_is_refused(False, tmp_path)


# ---------------------------------------------------------------------------------- loss of power


def content(path: Path) -> bytes | list[str]:
    return sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path, Any]]:
    """What is synced with what it holds then, and what is renamed, in order."""
    events = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("sync", path, content(path)))
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        events.append(("rename", Path(source), Path(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return events


@pytest.mark.parametrize("command", ["convert a file", "convert a folder", "vectors"])
def test_all_is_on_disk_before_the_rename_and_the_rename_at_the_end(
    command: str, tmp_path: Path, events: list[tuple[str, Path, Any]]
) -> None:
    """A file system may write the rename first, and after a loss of power the target is empty."""
    model, target = tmp_path / "model", tmp_path / "target.safetensors"
    (model / "tokenizer").mkdir(parents=True)
    config, weights = model / "config.json", model / "model.safetensors"
    config.write_text(json.dumps(CONFIG))
    (model / "tokenizer" / "vocab.json").write_text('{"a": 0}')
    safetensors.save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(1024, 1)}, weights)
    argv = {
        "convert a file": ["convert", weights, target, "--config", config],
        "convert a folder": ["convert", model, target],
        "vectors": ["vectors", weights, "--output", target],
    }[command]
    options = ["--to", "interleaved"] if argv[0] == "convert" else []
    assert main([*map(str, argv), *options]) == 0
    (rename,) = (i for i, event in enumerate(events) if event[0] == "rename")
    _, source, renamed = events[rename]
    assert renamed == target
    synced = {path: held for _, path, held in events[:rename]}
    for path in (target, *target.rglob("*")):
        assert synced[source / path.relative_to(target)] == content(path), path
    assert any(path == tmp_path and target.name in held for _, path, held in events[rename + 1 :])


# ------------------------------------------------------------------------- targets that are no files


def link_to_a_file(target: Path) -> None:
    target.with_name("file").write_text("mine")
    target.symlink_to("file")


def dangling_link(target: Path) -> None:
    target.symlink_to("nothing")


def device(target: Path) -> None:
    try:
        os.mknod(target, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("make", [link_to_a_file, dangling_link, device, os.mkfifo])
def test_a_target_that_is_no_regular_file_is_refused(
    make: Callable[[Path], None],
    force: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target, config = (tmp_path / name for name in ("a.safetensors", "b", "c.json"))
    config.write_text(json.dumps(CONFIG))
    safetensors.save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(1024, 1)}, source)
    make(target)
    before = {path: (path.lstat().st_ino, path.lstat().st_size) for path in tmp_path.iterdir()}
    convert = ["convert", source, target, "--config", config, "--to", "interleaved"]
    vectors = ["vectors", source, "--output", target, "--format", "safetensors"]
    for argv in (convert, vectors):
        assert main([*map(str, argv), *force]) == 2
        assert f"{target}: expected a regular file or none" in capsys.readouterr().err
    after = {path: (path.lstat().st_ino, path.lstat().st_size) for path in tmp_path.iterdir()}
    assert after == before
