"""vectors: lists a file of pretrained vectors, checks its words, and converts it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from torch import Tensor

from posembed._validation import shown
from posembed.commands import common
from posembed.pretrained import VectorFile, Vocabulary, first_words, open_vectors, words_of

if TYPE_CHECKING:
    from posembed.commands.common import Commands

MISSING_SHOWN = 10
FORMAT_OF_ENDING = {
    ".safetensors": "safetensors",
    ".bin": "word2vec-binary",
    ".vec": "word2vec-text",
    ".txt": "glove",
}

# word2vec's first line: the number of rows, and the number of values per row.
LIKE_HEADER = re.compile(rb"-?\d+ -?\d+\n")


def add(commands: Commands) -> None:
    """Arguments of vectors."""
    parser = common.add_command(
        commands,
        "vectors",
        run,
        "list a file of vectors, count the words it covers, convert it to another format",
        [
            "model.safetensors",
            "glove.txt --coverage tokenizer.json",
            "GoogleNews.bin --output vectors.safetensors --vocabulary words.txt",
        ],
    )
    parser.add_argument("file", help="safetensors, word2vec text or binary, fastText .vec, GloVe")
    parser.add_argument(
        "--coverage",
        metavar="VOCABULARY",
        help="tell which words have a row: a file with a word in each line, a vocab.json or a "
        "tokenizer.json",
    )
    parser.add_argument("--output", metavar="FILE", help="write the table there")
    parser.add_argument(
        "--format",
        choices=sorted(FORMAT_OF_ENDING.values()),
        help="of the output (default: by its ending, .safetensors, .bin, .vec or .txt)",
    )
    parser.add_argument(
        "--vocabulary", help="write rows for these words; words without one get the mean"
    )
    parser.add_argument("--words", metavar="VOCABULARY", help="the words of a safetensors table")
    parser.add_argument("--tensor", help="the table, in a file that has several")
    parser.add_argument("--force", action="store_true", help="overwrite the output")


def read_vocabulary(path: str) -> list[str] | dict[str, int]:
    """Words from lines, or a mapping of words to rows from JSON."""
    try:
        # Editors may write a byte order mark.
        text = Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error}") from error
    if not path.endswith(".json"):
        # Do not use splitlines: it splits at U+2028, a token of some tokenizers.
        return text.removesuffix("\n").split("\n") if text else []
    try:
        fields: Any = json.loads(text)
        fields = fields.get("model", fields) if "vocab" not in fields else fields
        vocabulary = fields.get("vocab", fields)
        if isinstance(vocabulary, list):  # Unigram: a word and its score
            vocabulary = {word: row for row, (word, _) in enumerate(vocabulary)}
        return {str(word): int(row) for word, row in vocabulary.items()}
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected words and their rows: {error}") from error


# ------------------------------------------------------------------------------------------ formats


def lines_of(words: Sequence[str], vectors: Tensor) -> Iterator[bytes]:
    """Lines of a word and its numbers, with enough digits to round-trip float32."""
    for word, row in zip(words, vectors.float(), strict=True):
        numbers = " ".join(f"{number:.9g}" for number in row.tolist())
        yield f"{word} {numbers}\n".encode()


def binary_rows(words: Sequence[str], vectors: Tensor) -> Iterator[bytes]:
    """Rows of a word and its float32 numbers, little-endian."""
    numbers = vectors.float().numpy().astype("<f4", copy=False)
    for word, row in zip(words, numbers, strict=True):
        yield word.encode() + b" " + row.tobytes() + b"\n"


def write_words(
    file: BinaryIO, kind: str, words: Sequence[str], vectors: Tensor, quiet: bool
) -> None:
    """Writes word2vec's formats, or GloVe's, which has no header."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("vectors needs tqdm: python -m pip install tqdm") from error
    broken = [word for word in words if not word or len(word.split()) != 1]
    if broken:
        raise ValueError(f"{kind}: cannot hold words with blanks, such as {shown(broken[0])}")
    if kind == "glove" and words and LIKE_HEADER.fullmatch(next(lines_of(words[:1], vectors[:1]))):
        raise ValueError(
            f"{kind}: has no header, so that its first row, {shown(words[0])} and one number, "
            "would be read as one: pass --format word2vec-text"
        )
    if kind != "glove":
        file.write(f"{len(words)} {vectors.shape[1]}\n".encode())
    rows = binary_rows if kind == "word2vec-binary" else lines_of
    bar = tqdm(rows(words, vectors), total=len(words), unit="row", disable=True if quiet else None)
    for row in bar:
        file.write(row)


def write_safetensors(path: Path, vectors: Tensor) -> None:
    """Writes one tensor named "vectors"."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("vectors needs safetensors: python -m pip install safetensors") from error
    save_file({"vectors": vectors.contiguous()}, path)


# ------------------------------------------------------------------------------------------ command


def selected(file: VectorFile, arguments: argparse.Namespace) -> tuple[list[str], Tensor]:
    """The words and rows to write: all, or those of a vocabulary."""
    if arguments.vocabulary is None:
        has_words = arguments.words is not None or file.format != "safetensors"
        words = file.words() if has_words else []
        every = read_vocabulary(arguments.words) if arguments.words is not None else words
        if len(first_words(every, words)) == 0:
            return words, file.table(arguments.tensor)
        vocabulary: Vocabulary = [*every]  # words that share rows, each with a row of its own
    else:
        vocabulary = read_vocabulary(arguments.vocabulary)
    rows = file.rows(vocabulary, tensor=arguments.tensor)
    return words_of(vocabulary, "vocabulary"), rows.vectors


def format_of(path: Path, arguments: argparse.Namespace) -> str:
    """The output format: as requested, or from the file extension."""
    kind = arguments.format or FORMAT_OF_ENDING.get(path.suffix)
    if kind is None:
        raise ValueError(
            f"{path}: expected an ending of {', '.join(FORMAT_OF_ENDING)}, or --format"
        )
    return str(kind)


def check_free(path: Path, arguments: argparse.Namespace) -> None:
    """Raises ValueError if something would be overwritten."""
    common.check_target(path, force=arguments.force)
    if path.exists() and path.samefile(arguments.file):
        raise ValueError(f"{path}: expected another file than the one that is read")


def write(file: VectorFile, arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the output and returns facts about it.

    safetensors cannot store words, so they are written to a second file, which --words reads.
    """
    path = Path(arguments.output)
    kind = format_of(path, arguments)
    words, vectors = selected(file, arguments)
    if kind != "safetensors" and not words:
        raise ValueError(f"{kind}: needs words, which {arguments.file} does not have: pass --words")
    written = {"output": str(path), "format": kind, "shape": list(vectors.shape)}
    words_path = path.with_suffix(".words.txt")
    beside = kind == "safetensors" and bool(words)
    for output in (path, words_path) if beside else (path,):
        check_free(output, arguments)
    with common.whole_or_not_at_all(path, force=arguments.force) as part:
        if kind == "safetensors":
            write_safetensors(part, vectors)
        else:
            with part.open("wb") as target:
                write_words(target, kind, words, vectors, quiet=arguments.json)
        if beside:  # words first: vectors without their words would be useless
            with common.whole_or_not_at_all(words_path, force=arguments.force) as words_part:
                words_part.write_text("\n".join(words) + "\n", encoding="utf-8")
            written["words"] = str(words_path)
    return written


def listing(file: VectorFile) -> list[dict[str, Any]]:
    """Name, shape and dtype of every table."""
    return [
        {
            "name": name,
            "shape": list(file.shape(name)),
            "dtype": str(file.dtype(name)).removeprefix("torch."),
        }
        for name in file.names
    ]


def run(arguments: argparse.Namespace) -> int:
    """Lists, counts or converts, as requested."""
    if arguments.output is None:
        common.only_with(
            arguments, "with --output", "--vocabulary", "--format", "--tensor", "--force"
        )
    words = None if arguments.words is None else read_vocabulary(arguments.words)
    file = open_vectors(arguments.file, words=words)
    known: dict[str, Any] = {"file": arguments.file, "format": file.format}
    if arguments.coverage is not None:
        known["coverage"] = file.coverage(read_vocabulary(arguments.coverage))._asdict()
    if arguments.output is not None:
        known["written"] = write(file, arguments)
    if arguments.coverage is None and arguments.output is None:
        known["tables"] = listing(file)
    if arguments.json:
        common.print_json(known)
    else:
        show(known)
    return 0


def show(known: dict[str, Any]) -> None:
    """Prints the facts as text."""
    print(f"{known['file']}: {known['format']}")
    if "tables" in known:
        rows = ([t["name"], str(tuple(t["shape"])), t["dtype"]] for t in known["tables"])
        common.print_table(("table", "shape", "dtype"), rows)
    if "coverage" in known:
        found, missing, duplicate = known["coverage"].values()
        print(f"{found} of {found + len(missing)} words have a row; {len(duplicate)} have several")
        if missing:
            more = " ..." if len(missing) > MISSING_SHOWN else ""
            print(f"without: {' '.join(missing[:MISSING_SHOWN])}{more}")
    if "written" in known:
        written = known["written"]
        print(f"{written['output']}: {written['format']}, {tuple(written['shape'])}")
        if "words" in written:
            print(f"{written['words']}: its words, for --words")
