"""Command line: python -m posembed."""

import argparse

import torch

import posembed
from posembed import _library


def main() -> None:
    """Runs the command that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m posembed", description=posembed.__doc__)
    parser.add_argument(
        "--cmake-dir",
        action="store_true",
        help="print the folder for cmake -DPosEmbed_DIR=$(python -m posembed --cmake-dir)",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("info", help="print versions, compiler, CUDA architectures")
    explain = commands.add_parser("explain", help="explain the rotary embedding of a model")
    explain.add_argument("config", help="a config.json, or Meta's params.json")
    explain.add_argument("--layer-type", help="where layers differ: full_attention, ...")
    explain.add_argument("--seq-len", type=int, help="length, where frequencies depend on it")
    explain.add_argument("--against", metavar="CONFIG", help="tell what differs from another model")
    arguments = parser.parse_args()

    if arguments.cmake_dir:
        print(_library.PACKAGE / "lib" / "cmake" / "PosEmbed")
    elif arguments.command == "info":
        print_info()
    elif arguments.command == "explain":
        try:
            print_explanation(arguments)
        except (OSError, ValueError) as error:
            parser.exit(1, f"{arguments.config}: {error}\n")
    else:
        parser.print_help()


def print_explanation(arguments: argparse.Namespace) -> None:
    """Prints what a model's configuration does to its queries and keys."""
    spec = posembed.RotarySpec.from_huggingface(arguments.config, arguments.layer_type)
    if arguments.against is None:
        print(spec.explain(arguments.seq_len))
    else:
        other = posembed.RotarySpec.from_huggingface(arguments.against, arguments.layer_type)
        print(spec.diff(other))


def print_info() -> None:
    """Prints what a bug report should contain."""
    for fact, value in posembed.build_info().items():
        text = " ".join(value) if isinstance(value, list) else value
        print(f"{fact.replace('_', ' '):20}{text or 'none'}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"{'torch in use':20}{torch.__version__}")
    print(f"{'CUDA device':20}{device}")


if __name__ == "__main__":
    main()
