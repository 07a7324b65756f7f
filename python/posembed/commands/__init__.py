"""The command line: a module for each command, with ``add`` for its arguments and ``run``.

Exit codes: 0 success, 1 a failed check or a difference, 2 wrong usage or bad input.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence

from posembed import _library, build_info
from posembed.commands import check, common, describe, diagnose, diff, explain, golden, info, plot

COMMANDS = (info, describe, explain, diff, diagnose, golden, plot, check)

EXAMPLES = """examples:
  python -m posembed explain config.json            what a model's RoPE does to its heads
  python -m posembed describe folder > positions.json   what C++ programs read
  python -m posembed diagnose config.json --program engine.py:rotate   what a program does wrong
  python -m posembed diff old/config.json new/      whether two models rotate alike
  python -m posembed check                          whether posembed works on this machine
"""


def build_parser() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m posembed",
        description="Explain embeddings, and test posembed on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=build_info()["version"])
    parser.add_argument(
        "--cmake-dir",
        action="store_true",
        help="print the folder for cmake -DPosEmbed_DIR=$(python -m posembed --cmake-dir)",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    for command in COMMANDS:
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name and returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.cmake_dir:
        print(_library.LIBRARY.parent / "cmake" / "PosEmbed")
        return 0
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    return guarded(arguments.run, arguments)


def guarded(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Runs a command; user errors print one line and give exit code 2."""
    try:
        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe; suppress Python's error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError, TypeError, IndexError, ImportError) as error:
        print(f"posembed {arguments.command}: {in_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def in_one_line(error: Exception) -> str:
    """The error in one line, starting with the file if it is about a file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split())
    for argument, option in common.ARGUMENTS.items():
        message = re.sub(rf"(?<!-){argument}", option, message)
    return message
