"""explain: describes the rotation of a model's queries and keys."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from posembed.commands import common

if TYPE_CHECKING:
    from posembed.commands.common import Commands


def add(commands: Commands) -> None:
    """Arguments of explain."""
    parser = common.add_command(
        commands,
        "explain",
        run,
        "explain the rotary embedding of a model",
        ["config.json", "model_folder --seq-len 131072", "config.json --layer-type full_attention"],
    )
    parser.add_argument("config", help="a config.json, Meta's params.json, or a model's folder")
    common.add_length_option(parser)
    common.add_part_option(parser)
    common.add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the specification in words, or as JSON with its numbers."""
    spec = common.read_spec(arguments.config, arguments)
    if not arguments.json:
        print(spec.explain(arguments.seq_len))
        return 0
    resolved = spec if arguments.seq_len is None else spec.resolve(arguments.seq_len)
    common.print_json(
        {
            "specification": common.facts(resolved),
            "attention_factor": resolved.attention_factor,
            "frequencies": resolved.frequencies().tolist(),
            "wavelengths": resolved.wavelengths().tolist(),
        }
    )
    return 0
