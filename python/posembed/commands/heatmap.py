"""heatmap: draws sinusoidal encodings, optionally beside binary codes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from posembed import analysis
from posembed.commands import common
from posembed.specification import SinusoidalSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from posembed.commands.common import Commands


def add(commands: Commands) -> None:
    """Arguments of heatmap."""
    parser = common.add_command(
        commands,
        "heatmap",
        run,
        "draw sinusoidal encodings of positions",
        [
            "",
            "--base 1000000 --output million.svg",
            "--dim 128 --binary --bits 16",
            "--json --positions 4",
        ],
    )
    parser.add_argument("--positions", type=common.positive, default=100, help="default: 100")
    parser.add_argument("--dim", type=common.positive, default=512, help="default: 512")
    parser.add_argument("--base", type=float, default=10000.0, help="default: 10000")
    parser.add_argument(
        "--preset", default="vaswani", help="vaswani, marian, tensor2tensor, ddpm, fairseq"
    )
    parser.add_argument("--binary", action="store_true", help="draw binary codes beside them")
    parser.add_argument(
        "--bits", type=common.positive, help="of a binary code (default: as many as are needed)"
    )
    parser.add_argument(
        "--output", metavar="FILE", help=".png, .svg, .pdf (default: heatmap.png; with --json none)"
    )


def draw(spec: SinusoidalSpec, arguments: argparse.Namespace) -> Axes:
    """Draws the heat map, and the binary codes if requested."""
    from posembed import plot

    positions = arguments.positions
    if not arguments.binary:
        return plot.heat_map(spec, positions)
    left, right = plot.side_by_side((2, 1))
    plot.heat_map(spec, positions, axes=left)
    return plot.binary_codes(positions, arguments.bits, axes=right)


def run(arguments: argparse.Namespace) -> int:
    """Writes the plot, or prints the numbers."""
    if not arguments.binary:
        common.only_with(arguments, "with --binary", "--bits")
    spec = SinusoidalSpec(arguments.dim, base=arguments.base, preset=arguments.preset)
    output = arguments.output or (None if arguments.json else "heatmap.png")
    if output is not None:
        common.save_picture(draw(spec, arguments), output)
    if arguments.json:
        values = {"values": analysis.heat_map(spec, arguments.positions).tolist()}
        if arguments.binary:
            values["binary"] = analysis.binary_codes(arguments.positions, arguments.bits).tolist()
        common.print_json({"output": output, **values})
    else:
        print(output)
    return 0
