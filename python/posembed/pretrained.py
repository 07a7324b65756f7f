"""Files of pretrained vectors: safetensors, word2vec binary and text, fastText .vec, GloVe text.

A file's format is detected from its first bytes. Opening a file reads only names and shapes.
Reading needs little memory besides the result.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from posembed.glue.validation import one_of, shown, whole
from posembed.tables import code_formats
from posembed.tables.file_format import FileFormatError as FileFormatError
from posembed.tables.files import OpenFile, Words

__all__ = [
    "Coverage",
    "FileFormatError",
    "Format",
    "Missing",
    "OnBadRow",
    "Rows",
    "Skipped",
    "SkippedRow",
    "Tokenizer",
    "VectorFile",
    "Vocabulary",
    "open_vectors",
]


def __dir__() -> list[str]:
    """Public names."""
    return __all__


Format = Literal["safetensors", "word2vec-binary", "word2vec-text", "glove"]
Missing = Literal["mean", "zero", "random", "error"]
OnBadRow = Literal["raise", "skip"]

# Rows without a word that a mapping may leave between its words; tokenizers leave a few. Each takes
# memory for a row of the result.
MOST_GAPS = 1 << 18

# Smaller files load so fast that they get no progress bar.
BAR_FROM_BYTES = 64 << 20


class Tokenizer(Protocol):
    """Anything with a vocabulary, such as the tokenizers of transformers and tokenizers."""

    def get_vocab(self) -> dict[str, int]:
        """Tokens and their ids."""
        ...


Vocabulary = Sequence[str] | Mapping[str, int] | Tokenizer


class Coverage(NamedTuple):
    """Which words of a vocabulary a file has.

    Args:
        found: The number of words with a row.
        missing: The words without a row.
        duplicate: The words with several rows; the first row is used.
    """

    found: int
    missing: list[str]
    duplicate: list[str]


class Rows(NamedTuple):
    """Rows for the words of a vocabulary.

    Args:
        vectors: [vocabulary, dim].
        coverage: Which words the file has.
    """

    vectors: Tensor
    coverage: Coverage


class SkippedRow(NamedTuple):
    """A row that was skipped.

    Args:
        row: Its number in the file, from 1.
        offset: Byte offset of the error.
        word: The word at its start.
        reason: What is wrong.
    """

    row: int
    offset: int
    word: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Skipped:
    """The skipped rows of a file.

    Args:
        count: Number of skipped rows.
        rows: The first 100 of them.
    """

    count: int
    rows: list[SkippedRow]


@contextmanager
def unpacked(path: str | bytes | os.PathLike[str]) -> Iterator[str | bytes | os.PathLike[str]]:
    """The path of a file; of a gzip archive, that of a temporary file with what it holds."""
    # Other kinds of files, such as pipes, are refused where they are opened.
    if not os.path.isfile(path):
        yield path
        return
    with open(path, "rb") as packed:
        if packed.read(2) != b"\x1f\x8b":
            yield path
            return
        packed.seek(0)
        with tempfile.TemporaryDirectory(prefix="posembed-") as folder:
            name = os.path.basename(os.fsdecode(path)).removesuffix(".gz")
            found = os.path.join(folder, name)
            try:
                with open(found, "wb") as file:
                    shutil.copyfileobj(gzip.GzipFile(fileobj=packed), file, 1 << 20)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                reason = f"a gzip archive that is malformed: {error}"
                raise FileFormatError(os.fsdecode(path), 0, reason) from None
            yield found


def distinct_of(words: list[str], others: Mapping[str, str]) -> list[str]:
    """The words by which rows are read, if they are not ``words`` themselves."""
    return [*dict.fromkeys(others.get(word, word) for word in words)] if others else []


def coverage_of(words: list[str], others: Mapping[str, str], found: Coverage) -> Coverage:
    """The coverage of words from that of the words by which rows are read."""
    if not others:
        return found
    lost = {*found.missing, ""}
    missing = [word for word in words if word and others.get(word, word) in lost]
    return Coverage(sum(map(bool, words)) - len(missing), missing, found.duplicate)


class VectorFile:
    """An open file of vectors, as :func:`open_vectors` returns it.

    A file of words has one table, named "vectors".
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike[str],
        words: Vocabulary | None = None,
        unicode_errors: Literal["strict", "replace"] = "strict",
        on_bad_row: OnBadRow = "raise",
    ) -> None:
        one_of("unicode_errors", unicode_errors, "strict", "replace")
        self.path = os.fsdecode(path)
        given = [] if words is None else words_of(words, "words", may_share=True)
        self._first = first_words(words, given)
        strict = unicode_errors == "strict"
        with unpacked(path) as found:
            self._file = OpenFile(found, given, strict, on_bad_row)
            self._size = os.path.getsize(found)  # now: the file may be moved while it is in use

    @property
    def format(self) -> Format:
        """The file's format; fastText's .vec is "word2vec-text"."""
        return cast(Format, self._file.call("format"))

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in the file's order."""
        return cast(list[str], self._file.call("names"))

    def shape(self, name: str = "vectors") -> tuple[int, ...]:
        """A tensor's shape, without reading the tensor; a GloVe file's lines are counted once.

        Two 4-bit numbers are one element, as in torch.
        """
        return tuple(self._file.call("shape", name))

    def dtype(self, name: str = "vectors") -> torch.dtype:
        """A tensor's dtype in the file; text is read as float32 by default."""
        return cast(torch.dtype, getattr(torch, self._file.call("dtype", name)))

    def words(self) -> list[str]:
        """The word of each row; of words that share a row, the first."""
        return self._file.words()

    def skipped(self) -> Skipped:
        """The skipped rows of a file that was opened with ``on_bad_row="skip"``."""
        count, rows = json.loads(self._file.call("skipped"))
        return Skipped(count, [SkippedRow(*row) for row in rows])

    def tensor(
        self,
        name: str | None = None,
        dtype: torch.dtype | None = None,
        *,
        copy: bool = False,
        progress: bool | None = None,
    ) -> Tensor:
        """Reads a whole tensor.

        From safetensors, in the file's own dtype, the result is a memory-mapped view of the file:
        pages are loaded when they are read, and writes are copy-on-write and never change the file.
        Do not truncate or rewrite the file in place while a view is in use: reading a page that the
        file no longer has ends the process.

        Args:
            name: One of :attr:`names`; default: "vectors", or the only one.
            dtype: Dtype of the result; default: the file's.
            copy: Read into memory, so that the result does not depend on the file.
            progress: Show a progress bar; default: for a large file, on a terminal.

        Raises:
            FileFormatError: The file is malformed or was shortened, or a finite number is not
                finite in ``dtype``.
        """
        if name is None:
            names = self.names
            name = names[0] if len(names) == 1 else "vectors"
        with self._bar(progress) as advance:
            return cast(Tensor, self._file.read("tensor", advance, name, dtype, copy))

    def table(
        self,
        tensor: str | None = None,
        dtype: torch.dtype | None = None,
        *,
        progress: bool | None = None,
    ) -> Tensor:
        """Reads a whole table [rows, dim] as a copy.

        Codes become numbers with the scales that stand beside them, a part at a time; the
        documentation of tables lists the formats. Of float8 and int8 codes, there may be a scale
        for all, for each row, for groups of columns or for blocks of 128 x 128.

        Args:
            tensor: Name of the table, or of its module, for files with several.
            dtype: Dtype of the result; default: the file's, float32 with scales.
            progress: Show a progress bar; default: for a large file, on a terminal.

        Raises:
            FileFormatError: The file is malformed, or a finite number is not finite in ``dtype``.
            TypeError: The table has codes of a format that is not read, which the message names.
        """
        codes = code_formats.find(self, tensor)
        if codes is not None:
            return codes.numbers(dtype)
        with self._bar(progress) as advance:
            return cast(Tensor, self._file.read("table", advance, tensor or "", dtype))

    def rows(
        self,
        vocabulary: Vocabulary,
        *,
        tensor: str | None = None,
        dtype: torch.dtype | None = None,
        missing: Missing = "mean",
        fallback: Callable[[str], str] | None = None,
        progress: bool | None = None,
    ) -> Rows:
        """Reads the rows for the words of a vocabulary, and no others.

        Args:
            vocabulary: Words in row order, a dict from words to rows, or a tokenizer. Words are
                compared verbatim: not lowercased, and with markers kept.
            tensor: Name of the table, for files with several.
            dtype: Dtype of the result; default: the file's, float32 with scales.
            missing: For words that are not in the file: "mean" of the rows that were found,
                "zero", "random" with the mean and the spread of those rows, from torch's default
                generator, or "error". Rows without a word are filled in the same way.
            fallback: Gives another word for a word that is not in the file, such as ``str.lower``,
                whose row is taken if the file has it. The file's words are then read twice.
            progress: Show a progress bar; default: for a large file, on a terminal.

        Raises:
            FileFormatError: The file is malformed, or a finite number is not finite in ``dtype``.
            ValueError: A word is given twice, or words are missing and ``missing`` is "error".
            TypeError: ``fallback`` gives something else than a word.
        """
        words, others = self._words(vocabulary, fallback, progress)
        distinct = distinct_of(words, others)
        known = Words(distinct or words)
        if not distinct:
            words.clear()  # they take memory
        with self._bar(progress) as advance:
            given = (known.held, tensor or "", dtype, missing)
            vectors: Tensor = self._file.read("rows", advance, *given)
        coverage = Coverage(*known.coverage())
        if distinct:
            index = {word: i for i, word in enumerate(distinct)}
            vectors = vectors[[index[others.get(word, word)] for word in words]]
        return Rows(vectors, coverage_of(words, others, coverage))

    def coverage(
        self,
        vocabulary: Vocabulary,
        *,
        fallback: Callable[[str], str] | None = None,
        progress: bool | None = None,
    ) -> Coverage:
        """The coverage that :meth:`rows` would return; reads only the words.

        Arguments and errors are those of :meth:`rows`.
        """
        words, others = self._words(vocabulary, fallback, progress)
        known = Words(distinct_of(words, others) or words)
        if not others:
            words.clear()
        with self._bar(progress) as advance:
            self._file.read("look_up", advance, known.held)
        return coverage_of(words, others, Coverage(*known.coverage()))

    def _words(
        self, vocabulary: Vocabulary, fallback: Callable[[str], str] | None, progress: bool | None
    ) -> tuple[list[str], dict[str, str]]:
        """The words, and the other words by which the rows of some are read."""
        words = words_of(vocabulary, "vocabulary")
        others = self._first
        if fallback is not None:
            others = {**others, **self._found_instead(words, fallback, progress)}
        if others:
            count = collections.Counter(filter(None, words))
            for word, times in count.most_common(1):
                if times > 1:
                    raise ValueError(
                        f"vocabulary: expected each word once, got {shown(word)} twice"
                    )
        return words, others

    def _found_instead(
        self, words: list[str], fallback: Callable[[str], str], progress: bool | None
    ) -> dict[str, str]:
        """For words that the file lacks, what the fallback gives, if the file has that."""
        given = {word: fallback(word) for word in words if word}
        for other in given.values():
            if not isinstance(other, str):
                kind = type(other).__name__
                raise TypeError(f"fallback: expected a function from words to words, got a {kind}")
        every = [*dict.fromkeys([*given, *filter(None, given.values())])]
        lost = {*self.coverage(every, progress=progress).missing, ""}
        return {
            word: self._first.get(other, other)
            for word, other in given.items()
            if word in lost and other not in lost
        }

    def __repr__(self) -> str:
        return f"VectorFile({self.path!r}, format={self.format!r}, {len(self.names)} tensors)"

    @contextmanager
    def _bar(self, wanted: bool | None) -> Iterator[Callable[[int, int], None] | None]:
        """Yields a function that reports progress to a bar, or None without a bar."""
        if wanted is False or (wanted is None and self._size < BAR_FROM_BYTES):
            yield None
            return
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            if wanted:
                raise
            yield None
            return
        silent = None if wanted is None else False  # None: tqdm checks for a terminal
        with tqdm(
            unit="B", unit_scale=True, desc=os.path.basename(self.path), disable=silent
        ) as bar:

            def advance(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield advance


def open_vectors(
    path: str | bytes | os.PathLike[str],
    *,
    words: Vocabulary | None = None,
    unicode_errors: Literal["strict", "replace"] = "strict",
    on_bad_row: OnBadRow = "raise",
) -> VectorFile:
    r"""Opens a file of vectors, or the index (.json) of sharded safetensors.

    Args:
        path: The file. A gzip archive of one is unpacked to a temporary file, which is removed with
            the result; errors of its text have the name without ".gz".
        words: The word of each row, for safetensors, which store no words: the model's tokenizer or
            its vocabulary. Rows can then be selected by word. In a mapping, words may share a row.
        unicode_errors: For words that are not valid UTF-8: "strict" raises, "replace" replaces
            invalid bytes with U+FFFD.
        on_bad_row: What to do with a row that has too few or too many numbers, a number that is not
            finite or not a number at all, or a word that is not valid UTF-8: "raise" an error when
            it is read, or "skip" it; :meth:`VectorFile.skipped` lists skipped rows. Skipping reads
            the file a second time, and counts lines of text whatever the header says.

    Raises:
        FileFormatError: The format is unknown, or the part that was read is malformed.
        OSError: The file cannot be read.

    Examples:
        >>> import pathlib, tempfile, posembed as pe
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "tiny.txt")
        >>> _ = path.write_text("the 0.5 0.25\ncat 1 2\n")
        >>> file = pe.pretrained.open_vectors(path)
        >>> file.format, file.shape()
        ('glove', (2, 2))
        >>> file.rows(["cat", "dog"], missing="zero")
        Rows(vectors=tensor([[1., 2.],
                [0., 0.]]), coverage=Coverage(found=1, missing=['dog'], duplicate=[]))
        >>> folder.cleanup()
    """
    return VectorFile(path, words, unicode_errors, on_bad_row)


def token_rows(
    file: VectorFile, tensor: str | None, dtype: torch.dtype | None, *, by_word: bool
) -> Tensor | None:
    """The rows of a model2vec file by token id, table[mapping] * weights; None for other files.

    ``by_word``: rows are wanted by words, which name rows of the table: a ValueError if the rows
    have weights by token id.
    """
    found = file._file.call("token_rows", tensor or "", dtype, by_word)
    return cast(Tensor | None, found)


def words_of(vocabulary: Vocabulary, argument: str, may_share: bool = False) -> list[str]:
    """The word of each row; an empty string if a mapping has none for it.

    Of words that share a row, the first, if they may.
    """
    if isinstance(vocabulary, Sequence) and not isinstance(vocabulary, (str, bytes)):
        words = list(vocabulary)
    elif isinstance(vocabulary, Mapping):
        words = _by_row(vocabulary, argument, may_share)
    elif hasattr(vocabulary, "get_vocab"):
        words = _by_row(vocabulary.get_vocab(), argument, may_share)
    else:
        expected = "expected words in order, a mapping or a tokenizer"
        hint = "; of a file, open(path).read().splitlines()" * isinstance(vocabulary, str)
        raise TypeError(f"{argument}: {expected}, got one {type(vocabulary).__name__}{hint}")
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"{argument}: expected words, got {shown(word)}")
    return words


def first_words(vocabulary: Vocabulary | None, words: list[str]) -> dict[str, str]:
    """For mappings in which words share rows: the first word of each word's row; else nothing."""
    if vocabulary is not None and hasattr(vocabulary, "get_vocab"):
        vocabulary = vocabulary.get_vocab()
    if not isinstance(vocabulary, Mapping) or len(vocabulary) == sum(map(bool, words)):
        return {}
    return {word: words[row] for word, row in vocabulary.items()}


def _by_row(rows: Mapping[str, int], argument: str, may_share: bool) -> list[str]:
    for word, row in rows.items():
        if whole(argument, row) < 0:
            raise ValueError(f"{argument}: expected rows from 0, got {row} for {shown(word)}")
    count = max(rows.values(), default=-1) + 1
    if count - len(rows) > MOST_GAPS:
        gaps = f"at most {MOST_GAPS} rows without a word"
        raise ValueError(f"{argument}: expected {gaps}, got {len(rows)} words for {count} rows")
    words = [""] * count
    for word, row in rows.items():
        if words[row] and may_share:
            continue
        if words[row]:
            both = f"{shown(words[row])} and to {shown(word)}"
            raise ValueError(f"{argument}: row {row} is given to {both}")
        words[row] = word
    return words
