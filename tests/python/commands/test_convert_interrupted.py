"""Conversion that is killed, that meets a full disk, or that two commands make at once."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from posembed.commands import common

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
    options = ["--to", "interleaved", "--no-verify", "--force"]
    return [sys.executable, "-m", "posembed", "convert", *map(str, paths), *options]


def test_killed_at_any_moment_the_target_is_whole_or_what_it_was(
    command: list[str], tmp_path: Path
) -> None:
    """`make reliability` kills 100 commands, make test two."""
    target, part = tmp_path / "other.safetensors", tmp_path / "other.safetensors.part"
    subprocess.run(command, check=True, capture_output=True)
    whole = target.read_bytes()
    draw = random.Random(0)
    cut_off = 0
    for old in (None, b"what was there before") * (50 if os.environ.get("POSEMBED_LONG") else 1):
        target.unlink(missing_ok=True)
        if old is not None:
            target.write_bytes(old)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not part.exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.08) if cut_off else 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        cut_off += part.exists()
        found = target.read_bytes() if target.exists() else None
        assert found in (old, whole)
        part.unlink(missing_ok=True)
    assert cut_off > 0, "no conversion was killed while it wrote"


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
            pytest.raises(ValueError, match="another command writes it, or was cut off"),
            common.whole_or_not_at_all(target, folder=folder),
        ):
            pass
        assert file.read_text() == "first"
    assert (target / "x" if folder else target).read_text() == "first"
