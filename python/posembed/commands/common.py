"""Shared by commands: arguments, specifications from files, tables, JSON, plots."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from posembed.configuration import file_of, load, select_part
from posembed.specification import RotarySpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

# Python argument names in messages, and the corresponding command-line options.
ARGUMENTS = {
    "pass base=": "pass --base",
    "interleaved=True": "--interleaved",
    "interleaved=False": "--half-split",
    "pass interleaved=": "pass --interleaved or --half-split",
    "pass ignore=": "pass --ignore with each of ",
    "layer_type: expected": "--layer-type: expected",
    "part: expected": "--part: expected",
}


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    examples: Sequence[str],
) -> argparse.ArgumentParser:
    """Adds a command with examples in its help, and ``--json``."""
    lines = [f"  python -m posembed {name} {example}".rstrip() for example in examples]
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    """Adds options for facts that a configuration may lack, and for the layers to read."""
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


def add_part_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that selects a nested configuration."""
    parser.add_argument(
        "--part",
        metavar="NAME",
        help="of a model made of several, such as vision_config (default: its text model)",
    )


def add_number_options(parser: argparse.ArgumentParser) -> None:
    """Adds options that define a specification by numbers instead of a configuration."""
    parser.add_argument("--head-dim", type=positive, help="without CONFIG: components of a head")
    parser.add_argument("--rotary-dim", type=positive, help="components that are rotated")


def add_length_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the length of sequences."""
    parser.add_argument("--seq-len", type=positive, help="length, where frequencies depend on it")


def only_with(arguments: argparse.Namespace, wanted: str, *options: str) -> None:
    """Raises ValueError for options that would be ignored because another argument is missing."""
    for option in options:
        if getattr(arguments, option.removeprefix("--").replace("-", "_")) not in (None, False, []):
            raise ValueError(f"{option}: expected {wanted} only")


def read_spec(path: str, arguments: argparse.Namespace, *, compared: bool = False) -> RotarySpec:
    """The specification of a configuration; errors begin with its path.

    If several are compared, --layer-type does not apply to those with only one layer type.
    """
    file = file_of(path)

    def read(layer_type: str | None) -> RotarySpec:
        return RotarySpec.from_huggingface(
            file,
            layer_type,
            part=getattr(arguments, "part", None),
            interleaved=arguments.interleaved,
            base=arguments.base,
            ignore=arguments.ignore,
        )

    try:
        try:
            return read(arguments.layer_type)
        except ValueError as error:
            if not (compared and str(error).startswith("layer_type: expected none:")):
                raise
            return read(None)
    except ValueError as error:
        message = in_options(str(error)).removeprefix(f"{file}: ")
        raise ValueError(f"{file}: {message}") from error


def read_kinds(
    path: str, arguments: argparse.Namespace, *, compared: bool = False
) -> dict[str, RotarySpec]:
    """The specification of each kind of layers, by name; "" if layers are alike or one is named."""
    try:
        return {"": read_spec(path, arguments, compared=compared)}
    except ValueError as error:
        if arguments.layer_type is not None or ": --layer-type: " not in str(error):
            raise
        refused = error
    fields = select_part(load(file_of(path)), getattr(arguments, "part", None))
    named = (*(fields.get("layer_types") or ()), *(fields.get("rope_parameters") or ()))
    found = {}
    for kind in dict.fromkeys((*named, "full_attention", "sliding_attention")):
        one = argparse.Namespace(**{**vars(arguments), "layer_type": kind})
        with suppress(ValueError):  # layers of this kind do not rotate
            found[str(kind)] = read_spec(path, one)
    if not found:
        raise refused
    return found


def in_options(message: str) -> str:
    """The message with Python argument names replaced by command-line options."""
    for argument, option in ARGUMENTS.items():
        message = message.replace(argument, option)
    return message


def specs_of(paths: Sequence[str], arguments: argparse.Namespace) -> dict[str, RotarySpec]:
    """The specifications of configurations by path, or the one that options describe.

    If a length is given, specifications are resolved for it.
    """
    if paths:
        only_with(arguments, "without CONFIG", "--head-dim", "--rotary-dim")
        several = len(paths) > 1
        specs = {path: read_spec(path, arguments, compared=several) for path in paths}
    else:
        only_with(arguments, "with CONFIG", "--layer-type", "--part", "--ignore")
        spec = spec_from_numbers(arguments)
        specs = {f"head_dim {spec.describe()}": spec}
    if arguments.seq_len is None:
        return specs
    return {name: spec.resolve(arguments.seq_len) for name, spec in specs.items()}


def spec_from_numbers(arguments: argparse.Namespace) -> RotarySpec:
    """The specification that the options describe."""
    if arguments.head_dim is None:
        raise ValueError("expected CONFIG or --head-dim")
    return RotarySpec(
        arguments.head_dim,
        base=10000.0 if arguments.base is None else arguments.base,
        rotary_dim=arguments.rotary_dim,
        interleaved=bool(arguments.interleaved),
    )


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


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints columns as wide as their contents; all but the first are right-aligned."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def save_picture(axes: Axes, path: str) -> None:
    """Writes the plot in the format of the path's extension."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.savefig(path)


def sync(*paths: Path) -> None:
    """Waits until files' contents, or folders' entries, are on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_target(target: Path, *, folder: bool = False, force: bool = False) -> None:
    """Raises ValueError if a rename to the target would destroy something.

    Links and devices are refused even with ``force``: a rename replaces the link, not what it
    leads to.
    """
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise ValueError(f"{target}: expected a regular file or none, got a link to another path")
    if folder or stat.S_ISDIR(mode):
        raise ValueError(f"{target}: exists; a folder is not overwritten")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{target}: expected a regular file or none, got a device or a pipe")
    if not force:
        raise ValueError(f"{target}: exists; --force overwrites it")


LOCK = ".posembed-lock"


def is_left_behind(folder: Path) -> bool:
    """Whether a path is this user's folder, and empty or made by a command to write in."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    names = os.listdir(folder)
    return not names or LOCK in names


def lock(file: BinaryIO, path: Path, *, new: bool) -> bool:
    """Takes the lock on an open file until it is closed; False if another command has it.

    The system ends a lock with its process, even a killed one. Where the file system has no locks,
    the command that made the folder has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The command that had it may have removed the file since it was opened.
        return os.path.samefile(path, file.fileno())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return new


def clear(folder: Path) -> None:
    """Removes everything in a folder but the lock."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


@contextmanager
def folder_of_one_writer(folder: Path) -> Iterator[None]:
    """Makes an empty folder for the block, which no other command uses, and removes it.

    What a killed command left in it is removed first.

    Raises:
        ValueError: Another command uses it, or it was not made here.
    """
    in_use = ValueError(f"{folder}: another command writes it")
    try:
        folder.mkdir()
        new = True
    except FileExistsError:
        new = False
    path = folder / LOCK
    try:
        if not (new or is_left_behind(folder)):
            raise ValueError(f"{folder}: exists, and no command of posembed made it: remove it")
        file = path.open("ab")
    except FileNotFoundError:  # the other command is done now
        raise in_use from None
    with file:
        if not lock(file, path, new=new):
            raise in_use
        try:
            clear(folder)
            yield
        finally:
            # The lock goes last: what is left without one is taken for somebody else's.
            with suppress(OSError):
                clear(folder)
                path.unlink()
                folder.rmdir()


@contextmanager
def whole_or_not_at_all(
    target: Path, *, folder: bool = False, force: bool = False
) -> Iterator[Path]:
    """A path to write to, which becomes the target if the block ends without an error.

    If the command or the machine stops at any moment, the target is either unchanged or complete,
    and the next command can write it. If two commands write the same target, the first to begin
    wins.
    """
    part = target.with_name(target.name + ".part")
    if folder:
        target.parent.mkdir(parents=True, exist_ok=True)
    with folder_of_one_writer(part):
        check_target(target, folder=folder, force=force)
        whole = part / target.name
        if folder:
            whole.mkdir()
        yield whole
        sync(*whole.rglob("*"), whole)
        check_target(target, folder=folder, force=force)  # it may have come meanwhile
        os.replace(whole, target)
        sync(target.absolute().parent)
