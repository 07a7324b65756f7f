"""Shared by commands: arguments, specifications from files, JSON, plots."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from posembed.models import reading
from posembed.models.files import file_of
from posembed.models.options import READING
from posembed.specifications import RotarySpec

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

FILES = "config.json, params.json, a GGUF file or a model's folder"

# Python argument names in messages, and the corresponding command-line options.
ARGUMENTS = {
    "pass base=": "pass --base",
    "interleaved=True": "--interleaved",
    "interleaved=False": "--half-split",
    "pass interleaved=": "pass --interleaved or --half-split",
    "pass ignore=": "pass --ignore with each of ",
    "layer_type: expected": "--layer-type: expected",
    "part: expected": "--part: expected",
    "pass read_module=True": "pass --read-module",
    "with trust_remote_code=True": "with --trust-remote-code",
}


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    examples: Sequence[str],
    *,
    always_json: bool = False,
) -> argparse.ArgumentParser:
    """Adds a command with examples in its help, and ``--json`` unless it prints nothing else."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lines = [f"  {parser.prog} {example}".rstrip() for example in examples]
    parser.epilog = "\n".join(["examples:", *lines])
    if not always_json:
        parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)
    return parser


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


# ----------------------------------------------------------------------------------- specifications


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for facts that a configuration may lack, and for the part and layers to read."""
    parser.add_argument(
        "--part",
        metavar="NAME",
        help="of a model made of several, such as vision_config (default: its text model)",
    )
    parser.add_argument(
        "--layer-type", metavar="TYPE", help="where layers differ: full_attention, ..."
    )
    add_rotation_options(parser)


def add_rotation_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for facts that a configuration may lack."""
    pairing = parser.add_mutually_exclusive_group()
    pairing.add_argument(
        "--interleaved",
        dest="interleaved",
        action="store_true",
        default=None,
        help="pairs (2i, 2i + 1), for model types that are not known",
    )
    pairing.add_argument(
        "--half-split",
        dest="interleaved",
        action="store_false",
        help="pairs (i, i + rotary_dim / 2), for model types that are not known",
    )
    parser.add_argument("--base", type=float, help="where the configuration has no rope_theta")
    parser.add_argument(
        "--ignore",
        metavar="KEY",
        action="append",
        default=[],
        help="an unknown key that does not concern positions; may be repeated",
    )
    parser.add_argument(
        "--read-module",
        action="store_true",
        help="without a rule for the model: run transformers' and read what its attention gets",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="also run the code in the model's folder"
    )


def add_rotary_options(parser: argparse.ArgumentParser) -> None:
    """Adds what describes rotations: by a configuration, or by numbers without one."""
    parser.add_argument("--head-dim", type=positive, help="without CONFIG: components of a head")
    parser.add_argument("--rotary-dim", type=positive, help="components that are rotated")
    add_length_option(parser)
    add_reading_options(parser)


def add_length_option(parser: argparse.ArgumentParser, purpose: str = "") -> None:
    """Adds the option for the length of sequences."""
    summary = f"length of the text, for frequencies that depend on it{purpose}"
    parser.add_argument("--seq-len", type=positive, help=summary)


def only_with(arguments: argparse.Namespace, wanted: str, *options: str) -> None:
    """Raises ValueError for options that would be ignored because another argument is missing."""
    for option in options:
        if getattr(arguments, option.removeprefix("--").replace("-", "_")) not in (None, False, []):
            raise ValueError(f"{option}: expected {wanted} only")


def options_of(arguments: argparse.Namespace) -> Any:
    """What readers of configurations take besides the kind of layers."""
    given = vars(arguments)
    return {name: given[name] for name in READING if name in given}


def read_spec(path: str, arguments: argparse.Namespace, *, compared: bool = False) -> RotarySpec:
    """The specification of a configuration; errors begin with its path.

    If several are compared, --layer-type does not apply to those with only one layer type.
    """
    file = file_of(path)

    def read(layer_type: str | None) -> RotarySpec:
        return RotarySpec.from_huggingface(file, layer_type, **options_of(arguments))

    with errors_of(file):
        try:
            return read(arguments.layer_type)
        except ValueError as error:
            if not (compared and str(error).startswith("layer_type: expected none:")):
                raise
            return read(None)


@contextlib.contextmanager
def errors_of(file: Any) -> Iterator[None]:
    """Errors begin with the path."""
    try:
        yield
    except ValueError as error:
        message = str(error).removeprefix(f"{file}: ")
        raise ValueError(f"{file}: {message}") from error


def read_kinds(
    path: str, arguments: argparse.Namespace, *, compared: bool = False
) -> dict[str, RotarySpec]:
    """The specification of each kind of layers, by name; "" if layers are alike or one is named."""
    try:
        return {"": read_spec(path, arguments, compared=compared)}
    except ValueError as error:
        if arguments.layer_type is not None or ": layer_type: " not in str(error):
            raise
        try:
            layers = reading.layers(file_of(path), **options_of(arguments))
        except ValueError:  # the configuration does not list them
            raise error from None
    found: dict[str, RotarySpec] = {}
    for layer in layers:
        if layer.rotary is not None:
            found.setdefault(str(layer.kind), layer.rotary)
    return found


def specs_of(paths: Sequence[str], arguments: argparse.Namespace) -> dict[str, RotarySpec]:
    """The specifications of configurations by path, or the one that options describe.

    If a length is given, specifications are resolved for it.
    """
    if paths:
        only_with(arguments, "without CONFIG", "--head-dim", "--rotary-dim")
        several = len(paths) > 1
        specs = {path: read_spec(path, arguments, compared=several) for path in paths}
    else:
        only_with(arguments, "with CONFIG", "--layer-type", "--part", "--ignore", "--read-module")
        if arguments.head_dim is None:
            raise ValueError("expected CONFIG or --head-dim")
        spec = RotarySpec(
            arguments.head_dim,
            base=10000.0 if arguments.base is None else arguments.base,
            rotary_dim=arguments.rotary_dim,
            interleaved=bool(arguments.interleaved),
        )
        specs = {f"head_dim {spec.describe()}": spec}
    if arguments.seq_len is None:
        return specs
    return {name: spec.resolve(arguments.seq_len) for name, spec in specs.items()}


def facts(spec: RotarySpec) -> dict[str, Any]:
    """The facts of a specification for JSON."""
    fields: dict[str, Any] = json.loads(spec.to_json())
    return fields


# ------------------------------------------------------------------------------------------- output


def print_json(value: dict[str, Any]) -> None:
    """Prints JSON, with null for numbers that are not finite."""
    print(json.dumps(without_infinity(value), indent=2))


def without_infinity(value: Any) -> Any:
    """The value with None for inf and NaN, at any depth."""
    if isinstance(value, dict):
        return {key: without_infinity(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_infinity(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
