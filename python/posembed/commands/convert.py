"""convert: rewrites a checkpoint with the other pairing of queries and keys, scores unchanged.

It works tensor by tensor: a file's header does not change, because no shape changes, and only one
tensor is in memory at a time. Outputs are written completely or not at all, and only if a small
model of the same type gives the same outputs after the same conversion.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from posembed.commands import common, model_folder, verification
from posembed.commands.checkpoint import Checkpoint
from posembed.commands.model_folder import CONFIG
from posembed.commands.permutation import Pairing, Rows, Specs, check_direction, specs_of_kinds
from posembed.commands.small_model import UnverifiedError
from posembed.configuration import CONVERTED, file_of, load, select_part, typed
from posembed.pretrained import open_vectors

if TYPE_CHECKING:
    from posembed.commands.common import Commands

Count = Callable[[int], Any]  # receives the number of bytes written
Plan = dict[Path, dict[str, Rows | None]]  # files and their tensors: what is permuted of them


def add(commands: Commands) -> None:
    """Arguments of convert."""
    parser = common.add_command(
        commands,
        "convert",
        run,
        "rewrite a model for the other pairing of rotary components",
        [
            "llama llama-interleaved --to interleaved",
            "model.safetensors interleaved.safetensors --config config.json --to interleaved",
            "meta.safetensors hf.safetensors --config params.json --to half_split",
        ],
    )
    parser.add_argument("source", help="a model's folder, or a safetensors file")
    parser.add_argument("target", help="the folder or the file to write")
    parser.add_argument("--config", help="for a file: the model's config.json, or its folder")
    parser.add_argument("--to", required=True, choices=("interleaved", "half_split"))
    parser.add_argument("--force", action="store_true", help="overwrite a target that is a file")
    # Of former versions; the comparison takes a moment, so it is always made.
    parser.add_argument("--no-verify", action="store_true", help=argparse.SUPPRESS)
    common.add_rotation_options(parser)


# -------------------------------------------------------------------------------------------- files


@contextmanager
def opened(source: Path) -> Iterator[Any]:
    """A memory-mapped safetensors file; errors name the file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "convert needs safetensors and tqdm: python -m pip install safetensors tqdm"
        ) from error
    try:
        with safe_open(source, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{source}: {error}") from error


def shapes_of(source: Path) -> dict[str, list[int]]:
    """The shapes of a file's tensors, in byte order; checked against the index."""
    with opened(source) as tensors:
        names = list(tensors.offset_keys())
        shapes = {name: list(tensors.get_slice(name).get_shape()) for name in names}
    model_folder.check_index(source, names)
    return shapes


def copy_header(source: Path, target: BinaryIO) -> int:
    """Copies the header's length, little-endian in 8 bytes, and the header: JSON."""
    with source.open("rb") as file:
        length = file.read(8)
        return target.write(length + file.read(int.from_bytes(length, "little")))


def rewrite(
    source: Path, target: Path, names: dict[str, Rows | None], to: Pairing, count: Count
) -> None:
    """Writes all tensors in byte order, permuting the chosen ones."""
    tensors = open_vectors(source)  # copies: a memory map of a file that is shortened is fatal
    with target.open("wb") as file:
        count(copy_header(source, file))
        for name, rows in names.items():
            tensor = tensors.tensor(name, copy=True, progress=False)
            if rows is not None:
                tensor = rows.permuted(tensor, to)
            count(file.write(tensor.reshape(-1).view(torch.uint8).numpy().data))


def record(config: Path, target: Path, to: str) -> None:
    """Writes the configuration with the new pairing, which RotarySpec.from_huggingface reads."""
    fields = load(config)
    select_part(fields, None)[CONVERTED] = to
    target.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------ command


def configuration(arguments: argparse.Namespace) -> Path:
    """The configuration file that describes the source's rotation."""
    source = Path(arguments.source)
    if not source.is_dir():
        source.stat()  # raises if it does not exist
        if arguments.config is None:
            raise ValueError("--config: expected for a file, which does not say how it is rotated")
        return file_of(arguments.config)
    if arguments.config is not None:
        raise ValueError(f"--config: expected none for a folder, which has its {CONFIG}")
    if not (source / CONFIG).is_file():
        raise ValueError(f"{source}: expected a folder with {CONFIG}")
    model_folder.check_links(source)
    return source / CONFIG


def check_target(source: Path, target: Path, force: bool) -> None:
    """Raises ValueError if something would be overwritten."""
    common.check_target(target, folder=source.is_dir(), force=force)
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target}: expected another file than the source")


def progress(sources: Iterable[Path], quiet: bool) -> Any:
    """A progress bar over the files' bytes, on a terminal."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    total = sum(source.stat().st_size for source in sources)
    # disable=None asks whether stderr is a terminal.
    return tqdm(total=total, unit="B", unit_scale=True, disable=True if quiet else None)


def look_through(source: Path, checkpoint: Checkpoint) -> Plan:
    """The files and their tensors; all errors are raised before anything is written."""
    files = model_folder.shards(source) if source.is_dir() else [source]
    plan = {
        file: {name: checkpoint.rows(name, shape) for name, shape in shapes_of(file).items()}
        for file in files
    }
    if not any(any(names.values()) for names in plan.values()):
        raise ValueError(f"{source}: no tensor is a projection to queries or keys that rotate")
    return plan


def write(plan: Plan, target: Path, to: Pairing, quiet: bool) -> None:
    """Writes the files, into the target if it is a folder, with one progress bar."""
    with progress(plan, quiet) as bar:
        for file, names in plan.items():
            rewrite(file, target / file.name if target.is_dir() else target, names, to, bar.update)


def read(config: Path, arguments: argparse.Namespace) -> tuple[dict[str, Any], Specs]:
    """The whole configuration, and the rotations of its text model; errors begin with the path."""
    try:
        whole = load(config)
        fields = typed(whole, None)
        specs = specs_of_kinds(fields, arguments.interleaved, arguments.base, arguments.ignore)
    except ValueError as error:
        raise ValueError(f"{config}: {common.in_options(str(error))}") from error
    check_direction(specs, fields, arguments.to)
    return whole, specs


def planned(
    source: Path, whole: dict[str, Any], specs: Specs, arguments: argparse.Namespace
) -> Plan:
    """What is permuted, as a small model of the same type shows, on which it is verified."""
    fields = typed(whole, None)
    model_type = str(fields.get("model_type", ""))

    def of_small(small: dict[str, Any]) -> Specs:
        return specs_of_kinds(small, arguments.interleaved, None, arguments.ignore)

    try:
        trial = verification.try_on(whole, fields, specs, of_small)
        plan = look_through(source, trial.checkpoint)
        verification.verify(trial, arguments.to, model_type)
    except UnverifiedError as error:
        raise ValueError(f"model_type {model_type!r} cannot be converted: {error}") from error
    return plan


def run(arguments: argparse.Namespace) -> int:
    """Writes the target and reports what was permuted."""
    source, target = Path(arguments.source), Path(arguments.target)
    check_target(source, target, arguments.force)
    config = configuration(arguments)
    whole, specs = read(config, arguments)
    companions = model_folder.companions(source) if source.is_dir() else []
    try:
        plan = planned(source, whole, specs, arguments)
    except verification.CorruptionError as error:
        print(f"posembed convert: {error}; nothing was written", file=sys.stderr)
        return 1
    with common.whole_or_not_at_all(target, folder=source.is_dir(), force=arguments.force) as part:
        write(plan, part, arguments.to, quiet=arguments.json)
        if source.is_dir():
            model_folder.copy(companions, source, part)
            record(config, part / CONFIG, arguments.to)
    report(plan, arguments)
    return 0


def report(plan: Plan, arguments: argparse.Namespace) -> None:
    """Reports what was permuted, and whether it was verified."""
    permuted = sorted(name for names in plan.values() for name in names if names[name])
    if arguments.json:
        known = {"target": arguments.target, "to": arguments.to, "verified": True}
        common.print_json({**known, "permuted": permuted})
        return
    tensors = f"{len(permuted)} tensors have {arguments.to} pairs now"
    print(f"{arguments.target}: {tensors} (verified on a small model)")
