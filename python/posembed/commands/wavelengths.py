"""wavelengths: the distances that each pair of components can distinguish."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from posembed import analysis
from posembed.commands import common

if TYPE_CHECKING:
    from posembed.commands.common import Commands

HEAD = ("pair", "radians/position", "wavelength", "half", "longest context")


def add(commands: Commands) -> None:
    """Arguments of wavelengths."""
    parser = common.add_command(
        commands,
        "wavelengths",
        run,
        "print frequency, wavelength and longest context of each pair",
        ["--head-dim 16", "config.json --seq-len 131072", "config.json --plot wavelengths.png"],
    )
    parser.add_argument("config", nargs="?", help="a config.json, or a model's folder")
    common.add_length_option(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw them as well: .png, .svg, .pdf")
    common.add_number_options(parser)
    common.add_part_option(parser)
    common.add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the table."""
    paths = [] if arguments.config is None else [arguments.config]
    (spec,) = common.specs_of(paths, arguments).values()
    table = analysis.wavelengths(spec)
    columns = {
        "frequencies": table.frequencies.tolist(),
        "wavelengths": table.wavelengths.tolist(),
        "half_wavelengths": table.half_wavelengths.tolist(),
        "contexts": table.contexts.tolist(),
    }
    if arguments.plot:
        from posembed import plot

        common.save_picture(plot.wavelengths(spec), arguments.plot)
    if arguments.json:
        numbers = {"specification": common.facts(spec), **columns}
        common.print_json({"output": arguments.plot, **numbers})
    else:
        print(f"head_dim {spec.describe()}")
        rows = zip(*columns.values(), strict=True)
        common.print_table(HEAD, (row(pair, *cells) for pair, cells in enumerate(rows)))
        if arguments.plot:
            print(arguments.plot)
    return 0


def row(pair: int, frequency: float, wavelength: float, half: float, context: int) -> list[str]:
    """One line of the table."""
    if math.isinf(wavelength):
        return [str(pair), "0", "stands still", "", ""]
    return [str(pair), f"{frequency:.8g}", f"{wavelength:.3f}", f"{half:.4f}", str(context)]
