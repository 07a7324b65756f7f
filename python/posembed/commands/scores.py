"""scores: attention scores by distance, for several models side by side."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from posembed import analysis
from posembed.commands import common
from posembed.specification import RotarySpec

if TYPE_CHECKING:
    from posembed.commands.common import Commands


def add(commands: Commands) -> None:
    """Arguments of scores."""
    parser = common.add_command(
        commands,
        "scores",
        run,
        "print the attention score of a query and a key of ones by their distance",
        [
            "--head-dim 256",
            "llama/config.json qwen/config.json --distances 65535",
            "phi3/config.json --seq-len 131072",
            "--head-dim 256 --distances 65535 --log --plot scores.png",
        ],
    )
    parser.add_argument("configs", nargs="*", metavar="config", help="configurations to compare")
    parser.add_argument(
        "--distances", type=common.positive, default=512, help="the farthest (default: 512)"
    )
    common.add_length_option(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw them as well: .png, .svg, .pdf")
    parser.add_argument("--log", action="store_true", help="draw distances logarithmically")
    common.add_number_options(parser)
    common.add_part_option(parser)
    common.add_reading_options(parser)


def read_specs(arguments: argparse.Namespace) -> dict[str, RotarySpec]:
    """The specifications by column name."""
    specs = common.specs_of(arguments.configs, arguments)
    for name, spec in specs.items():
        if spec.is_dynamic:
            raise ValueError(
                f"{name}: its frequencies depend on the length of the sequence: pass --seq-len"
            )
    return specs


def shown_distances(farthest: int) -> list[int]:
    """0, the powers of two, and the farthest."""
    powers = [2**i for i in range(farthest.bit_length())]
    return sorted({0, *powers, farthest})


def run(arguments: argparse.Namespace) -> int:
    """Prints scores at some distances, or all of them as JSON."""
    if arguments.plot is None:
        common.only_with(arguments, "with --plot", "--log")
    specs = read_specs(arguments)
    farthest = arguments.distances
    scores = {
        name: analysis.scores_by_distance(spec, farthest).tolist() for name, spec in specs.items()
    }
    if arguments.plot:
        from posembed import plot

        axes = plot.scores_by_distance(specs, farthest, log=arguments.log)
        common.save_picture(axes, arguments.plot)
    if arguments.json:
        numbers = {"distances": list(range(farthest + 1)), "scores": scores}
        common.print_json({"output": arguments.plot, **numbers})
    else:
        rows = (
            [str(at), *(f"{column[at]:.4f}" for column in scores.values())]
            for at in shown_distances(farthest)
        )
        common.print_table(["distance", *scores], rows)
        if arguments.plot:
            print(arguments.plot)
    return 0
