"""describe: writes all that a program needs to know about a model's positions."""

from __future__ import annotations

import argparse
import json

from posembed.commands import common
from posembed.models.description import describe


def add(commands: common.Commands) -> None:
    """Arguments of describe."""
    summary = "write what a program needs to know about a model's positions, as JSON"
    examples = ["model_folder > positions.json", "model.gguf > positions.json"]
    parser = common.add_command(commands, "describe", run, summary, examples, always_json=True)
    parser.add_argument("config", help=common.FILES)
    common.add_rotation_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the document."""
    with common.errors_of(arguments.config):
        found = describe(arguments.config, **common.options_of(arguments))
    print(json.dumps(found, indent=1))
    return 0
