"""describe: writes all that a program has to know about a model's positions."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from posembed.commands import common
from posembed.models.description import describe

if TYPE_CHECKING:
    from posembed.commands.common import Commands


def add(commands: Commands) -> None:
    """Arguments of describe."""
    parser = common.add_command(
        commands,
        "describe",
        run,
        "write what a program has to know about a model's positions, as JSON",
        ["model_folder > positions.json", "model.gguf > positions.json"],
        always_json=True,
    )
    parser.add_argument("config", help="config.json, params.json, a GGUF file or a model's folder")
    common.add_rotation_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the document."""
    try:
        found = describe(arguments.config, **common.options_of(arguments))
    except ValueError as error:
        message = common.in_options(str(error)).removeprefix(f"{arguments.config}: ")
        raise ValueError(f"{arguments.config}: {message}") from error
    print(json.dumps(found, indent=1))
    return 0
