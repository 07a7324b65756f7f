"""golden: writes inputs and right outputs, by which programs test themselves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from posembed.commands import common
from posembed.diagnosis.golden import golden
from posembed.models import catalogue


def add(commands: common.Commands) -> None:
    """Arguments of golden."""
    summary = (
        "write inputs and right outputs of a model's rotations, for programs to test themselves"
    )
    examples = ["model_folder -o golden.safetensors", "--all -o folder"]
    parser = common.add_command(commands, "golden", run, summary, examples)
    parser.add_argument("config", nargs="?", help=common.FILES)
    every = "every model type whose defaults are known, with these"
    parser.add_argument("--all", action="store_true", help=every)
    where = "a .safetensors file; a folder with --all"
    parser.add_argument("-o", "--output", required=True, help=where)
    parser.add_argument("--max-position", type=common.positive, help="the last position")
    common.add_rotation_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes the files and says what they have."""
    if arguments.all == (arguments.config is not None):
        raise ValueError("expected CONFIG or --all")
    if arguments.all:
        return _write_all(Path(arguments.output), arguments)
    options = common.options_of(arguments)
    found = golden(arguments.config, max_position=arguments.max_position, **options)
    found.save(arguments.output)
    entries = json.loads(found.metadata["entries"])
    if arguments.json:
        common.print_json({"entries": entries})
    else:
        names = ", ".join(name or "all layers" for name in entries)
        print(f"{arguments.output}: {names}")
    return 0


def _write_all(folder: Path, arguments: argparse.Namespace) -> int:
    """A file for each model type, and refused.json with the reasons of the others."""
    folder.mkdir(parents=True, exist_ok=True)
    refused: dict[str, Any] = {}
    written = []
    for model_type in sorted(catalogue.types()):
        try:
            found = golden({"model_type": model_type}, max_position=arguments.max_position)
        except ValueError as error:
            refused[model_type] = str(error)
            continue
        found.save(folder / f"{model_type}.safetensors")
        written.append(model_type)
    (folder / "refused.json").write_text(json.dumps(refused, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        common.print_json({"written": written, "refused": refused})
    else:
        print(f"{folder}: {len(written)} model types; {len(refused)} refused, see refused.json")
    return 0
