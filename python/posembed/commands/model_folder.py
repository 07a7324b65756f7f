"""A model folder in Hugging Face layout: config.json, safetensors files and their index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from posembed._validation import shown

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"

# Weights in other formats, which are not rewritten: next to converted ones they would be wrong.
WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
)


def shards(folder: Path) -> list[Path]:
    """The model's safetensors files; checks that all exist.

    Raises:
        ValueError: One is missing, as after an interrupted download, or there are none.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise ValueError(f"{folder}: expected {SINGLE} or {INDEX}")
        return [folder / SINGLE]
    names = sorted(set(weight_map(folder).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder / INDEX}: names {shown(missing)}, which are not there")
    return [folder / name for name in names]


def weight_map(folder: Path) -> dict[str, str]:
    """Each tensor's file according to the index; empty if there is no index."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        found: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): str(name) for tensor, name in found.items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{index}: expected a weight_map of tensors and files") from error
    outside = sorted({name for name in files.values() if Path(name).name != name})
    if outside:
        raise ValueError(f"{index}: expected names of files beside it, got {shown(outside)}")
    return files


def check_index(shard: Path, names: list[str]) -> None:
    """Raises ValueError unless a file has the tensors that the index lists for it."""
    stated = {tensor for tensor, name in weight_map(shard.parent).items() if name == shard.name}
    different = sorted(stated.symmetric_difference(names))
    if stated and different:
        raise ValueError(f"{shard}: {shown(different)} are only here or only in {INDEX}")


def is_hidden(file: Path) -> bool:
    """Whether a relative path has a part that begins with a dot, such as .git."""
    return any(part.startswith(".") for part in file.parts)


def companions(folder: Path) -> list[Path]:
    """Files of the model besides weights: tokenizer, code, the index; not config.json.

    Paths are relative to the folder; hidden files and folders are skipped.
    """
    files = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [
        file
        for file in files
        if file.suffix not in WEIGHTS and file != Path(CONFIG) and not is_hidden(file)
    ]


def is_inside(folder: Path, file: Path) -> bool:
    """Whether a real path is in the folder, or in the Hugging Face cache that the folder is of.

    The cache has the files in models--<name>/blobs and links to them in
    models--<name>/snapshots/<commit>.
    """
    homes = [folder]
    for parent in folder.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            homes.append(parent.parent / "blobs")
    return any(home in file.parents for home in homes)


def check_links(folder: Path) -> None:
    """Raises ValueError for a link that would bring in what is not part of the model.

    Otherwise a folder from somewhere else could have a link to a private file of this machine,
    which would be copied into the converted model. Links of files that are not used may stay.
    """
    used = shards(folder)
    for path in sorted(folder.rglob("*")):
        file = path.relative_to(folder)
        unused = is_hidden(file) or (file.suffix in WEIGHTS and path not in used)
        if unused or not path.is_symlink():
            continue
        real = path.resolve()
        if not real.is_file():
            raise ValueError(f"{path}: a link to {real}, which is no file")
        if not is_inside(folder.resolve(), real):
            raise ValueError(
                f"{path}: a link to {real}, which is outside the model's folder: put the file "
                "itself in its place if it is part of the model"
            )


def copy(files: list[Path], source: Path, target: Path) -> None:
    """Copies files to the same relative paths in another folder."""
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / file, target / file)
