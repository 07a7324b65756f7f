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
    arguments = parser.parse_args()

    if arguments.cmake_dir:
        print(_library.PACKAGE / "lib" / "cmake" / "PosEmbed")
    elif arguments.command == "info":
        print_info()
    else:
        parser.print_help()


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
