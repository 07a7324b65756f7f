"""diff: shows whether two models rotate alike, and from which position they differ."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from posembed.commands import common

if TYPE_CHECKING:
    from posembed.commands.common import Commands


def add(commands: Commands) -> None:
    """Arguments of diff."""
    parser = common.add_command(
        commands,
        "diff",
        run,
        "compare the rotary embeddings of two models; exit code 1 where they differ",
        ["before/config.json after/config.json", "model_a model_b --json"],
    )
    parser.add_argument("a", help="a config.json, or a model's folder")
    parser.add_argument("b", help="another one")
    common.add_part_option(parser)
    common.add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the differences."""
    a, b = (common.read_spec(path, arguments, compared=True) for path in (arguments.a, arguments.b))
    if arguments.json:
        differences = [] if a == b else a.diff(b).splitlines()
        common.print_json(
            {
                "equal": a == b,
                "differences": differences,
                "a": common.facts(a),
                "b": common.facts(b),
            }
        )
    else:
        print(a.diff(b))
    return int(a != b)
