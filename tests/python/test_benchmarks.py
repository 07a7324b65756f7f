"""The benchmark program imports all of its cases."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import posembed as pe
import pytest
import torch

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"


def test_cases_on_cuda_have_names_of_their_own_and_sources() -> None:
    """--stale asks for the sources of each case's kernels."""
    for options in ([], ["--stale"]):
        command = [sys.executable, str(PROGRAM.with_name("cuda.py")), "--list", *options]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert len(set(names)) == len(names) > 25


def test_names_are_known_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process, whose imports take longest."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    run = importlib.import_module("run")
    listed = []
    for options in ([], ["--case", "rotary forward ["]):
        monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--list", *options])
        run.main()
        listed.append(capsys.readouterr().out.splitlines())
    names, some = listed
    assert len(set(names)) == len(names) > 50
    assert some == [name for name in names if "rotary forward [" in name] != []


def test_peers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """All timed rotations do the same work; without other libraries torch's own remains."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    peers = importlib.import_module("cases.peers")
    query, key = torch.randn(1, 6, 8, 16), torch.randn(1, 6, 2, 16)
    half, pairs = (pe.RotaryEmbedding(16, interleaved=kind)(query, key)[0] for kind in (False, True))
    for label, call in peers.all_of(query, key).items():
        result = call()[0]
        result = result.transpose(1, 2) if result.shape[1] == 8 else result
        assert min((result - expected).abs().max() for expected in (half, pairs)) < 1e-4, label
    monkeypatch.setattr(peers, "imported", lambda module: None)
    assert list(peers.all_of(query, key)) == ["complex numbers"]


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    facts = dict.fromkeys(("date", "device", "instruction set", "torch", "posembed", "peers"), "known")
    for threads, seconds in (("1", 2e-3), ("2", 1e-3)):
        result = {
            "name": "a case",
            "best": {"clone": 4e-3, "posembed": seconds},
            "goals": [f"posembed: 3 x the speed of clone; reached {4e-3 / seconds}, **not met**"],
        }
        run = {"facts": facts | {"threads": threads, "allocator": "reusing"}, "results": [result]}
        (tmp_path / f"{threads}.json").write_text(json.dumps(run))
    program = PROGRAM.with_name("call_table.py")
    command = [sys.executable, str(program), *map(str, sorted(tmp_path.iterdir()))]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| call | 1 thread, reusing | 2 threads, reusing |" in printed
    assert "| posembed | 2.000 ms | 1.000 ms |" in printed
    assert "| clone | 2.00 | 4.00 |" in printed
    assert printed.count("not met") == 2


def test_kernel_tables_keep_the_best_of_several_runs(tmp_path: Path) -> None:
    """A program gets slower while its limit gets faster, then the reverse."""
    best, program = tmp_path / "best.json", tmp_path / "program"
    for speed, limit, expected in ((20.0, 40.0, "0.50"), (10.0, 25.0, "0.50"), (32.0, 30.0, "0.80")):
        case = {"name": "in_place/bf16/warm", "GB/s": speed, "limit GB/s": limit, "ratio": 0.0}
        output = {"context": {"instruction_set": "avx2"}, "benchmarks": [case]}
        program.write_text(f"#!/bin/sh\necho '{json.dumps(output)}'\n")
        program.chmod(0o755)
        script = PROGRAM.with_name("kernel_table.py")
        command = [sys.executable, str(script), str(program), "--best", str(best)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "| in_place/bf16/warm | 40.0 | " in printed
        assert expected in printed
