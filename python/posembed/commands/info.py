"""info: prints the facts that a bug report should contain."""

from __future__ import annotations

import argparse
import platform
from typing import Any

import torch

from posembed import build_info
from posembed.commands import common


def add(commands: common.Commands) -> None:
    """Arguments of info."""
    summary = "print versions, compiler, instruction set, CUDA architectures and device"
    common.add_command(commands, "info", run, summary, ["", "--json"])


def run(arguments: argparse.Namespace) -> int:
    """Prints facts of the build and of this machine."""
    known: dict[str, Any] = {
        **build_info(),
        "torch_in_use": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cuda_device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }
    if arguments.json:
        common.print_json(known)
        return 0
    for fact, value in known.items():
        text = " ".join(value) if isinstance(value, list) else str(value)
        print(f"{fact.replace('_', ' '):20}{text or 'none'}")
    return 0
