"""plot: draws wavelengths, attention scores by distance, or sinusoidal encodings."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from posembed import analysis
from posembed.commands import common
from posembed.specifications import SinusoidalSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = dict[str, Any]
# Its numbers; and its picture, drawn by functions of posembed.plot.
Drawn = tuple[Callable[[], Numbers], Callable[[Any], "Axes"]]


def add(commands: common.Commands) -> None:
    """Arguments of plot, for each kind."""
    examples = ["wavelengths config.json", "scores --head-dim 256 --log", "heatmap --json"]
    summary = "draw what a model does with positions, or print its numbers"
    parser = common.add_command(commands, "plot", run, summary, examples)
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)

    def add_kind(summary: str, draw: Callable[..., Drawn], *examples: str) -> Any:
        name = draw.__name__
        kind = common.add_command(kinds, name, run, summary, examples)
        where = f".png, .svg, .pdf (default: {name}.png; with --json none)"
        kind.add_argument("--output", metavar="FILE", help=where)
        kind.set_defaults(draw=draw)
        return kind

    kind = add_kind("draw the wavelength of each pair", wavelengths, "config.json", "--head-dim 16")
    kind.add_argument("config", nargs="?", help="a config.json, or a model's folder")
    common.add_rotary_options(kind)

    summary = "draw the attention score of a query and a key of ones by their distance"
    kind = add_kind(summary, scores, "llama/config.json qwen/config.json --distances 65535 --log")
    kind.add_argument("config", nargs="*", help="configurations to compare")
    kind.add_argument("--distances", type=common.positive, default=512, help="farthest: 512")
    kind.add_argument("--log", action="store_true", help="draw distances logarithmically")
    common.add_rotary_options(kind)

    kind = add_kind("draw sinusoidal encodings", heatmap, "--dim 128 --binary --bits 16")
    kind.add_argument("--positions", type=common.positive, default=100, help="default: 100")
    kind.add_argument("--dim", type=common.positive, default=512, help="default: 512")
    kind.add_argument("--base", type=float, default=10000.0, help="default: 10000")
    presets = "vaswani, marian, tensor2tensor, ddpm, fairseq"
    kind.add_argument("--preset", default="vaswani", help=presets)
    kind.add_argument("--binary", action="store_true", help="draw binary codes beside them")
    kind.add_argument("--bits", type=common.positive, help="of a code (default: as few as fit)")


def run(arguments: argparse.Namespace) -> int:
    """Writes the picture, or prints the numbers."""
    output = arguments.output or (None if arguments.json else f"{arguments.kind}.png")
    numbers, picture = arguments.draw(arguments)
    if output is not None:
        from posembed import plot

        figure = picture(plot).get_figure(root=True)
        assert figure is not None
        figure.savefig(output)
    if arguments.json:
        common.print_json({"output": output, **numbers()})
    else:
        print(output)
    return 0


def wavelengths(arguments: argparse.Namespace) -> Drawn:
    """Numbers and picture of the wavelengths of one specification."""
    paths = [] if arguments.config is None else [arguments.config]
    (spec,) = common.specs_of(paths, arguments).values()

    def numbers() -> Numbers:
        columns = vars(analysis.wavelengths(spec))
        return {"specification": common.facts(spec), **{k: x.tolist() for k, x in columns.items()}}

    return numbers, lambda plot: plot.wavelengths(spec)


def scores(arguments: argparse.Namespace) -> Drawn:
    """Numbers and picture of scores, of one specification or several."""
    specs, farthest = common.specs_of(arguments.config, arguments), arguments.distances
    for name, spec in specs.items():
        if spec.is_dynamic:
            raise ValueError(
                f"{name}: its frequencies depend on the length of the sequence: pass --seq-len"
            )

    def numbers() -> Numbers:
        found = {k: analysis.scores_by_distance(x, farthest).tolist() for k, x in specs.items()}
        return {"distances": list(range(farthest + 1)), "scores": found}

    return numbers, lambda plot: plot.scores_by_distance(specs, farthest, log=arguments.log)


def heatmap(arguments: argparse.Namespace) -> Drawn:
    """Numbers and picture of sinusoids, and of binary codes if requested."""
    if not arguments.binary:
        common.only_with(arguments, "with --binary", "--bits")
    spec = SinusoidalSpec(arguments.dim, base=arguments.base, preset=arguments.preset)
    positions, bits = arguments.positions, arguments.bits

    def numbers() -> Numbers:
        values = {"values": analysis.heat_map(spec, positions).tolist()}
        if arguments.binary:
            values["binary"] = analysis.binary_codes(positions, bits).tolist()
        return values

    def picture(plot: Any) -> Axes:
        if not arguments.binary:
            return plot.heat_map(spec, positions)  # type: ignore[no-any-return]
        left, right = plot.side_by_side((2, 1))
        plot.heat_map(spec, positions, axes=left)
        return plot.binary_codes(positions, bits, axes=right)  # type: ignore[no-any-return]

    return numbers, picture
