"""Files of pretrained vectors: safetensors, word2vec binary and text, fastText .vec, GloVe text.

A file's format is told by its first bytes. Files are memory-mapped: opening one reads names and
shapes only, and reading takes little memory beside the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from posembed import _C
from posembed.scaling import whole

Format = Literal["safetensors", "word2vec-binary", "word2vec-text", "glove"]
Missing = Literal["mean", "zero", "error"]

# A file that is read in less time than a bar takes to notice gets none.
BAR_FROM_BYTES = 64 << 20


class FileFormatError(ValueError):
    """A file that is not what it should be: cut off, contradicting itself, not a number.

    Args:
        path: The file.
        offset: The byte where it shows.
        reason: What is wrong.
    """

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(path, offset, reason)
        self.path = path
        self.offset = offset
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: byte {self.offset}: {self.reason}"


class Tokenizer(Protocol):
    """What knows its vocabulary, as the tokenizers of transformers and tokenizers do."""

    def get_vocab(self) -> dict[str, int]:
        """Tokens and their ids."""
        ...


Vocabulary = Sequence[str] | Mapping[str, int] | Tokenizer


class Coverage(NamedTuple):
    """What became of a vocabulary's words.

    Args:
        found: How many have a row.
        missing: Those that have none.
        duplicate: Those that have several, of which the first was taken.
    """

    found: int
    missing: list[str]
    duplicate: list[str]


class Rows(NamedTuple):
    """Rows for the words of a vocabulary.

    Args:
        vectors: [vocabulary, dim].
        coverage: What became of the words.
    """

    vectors: Tensor
    coverage: Coverage


class VectorFile:
    """An open file of vectors; :func:`open_vectors` makes it.

    A file of words has one table, named "vectors".
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        words: Vocabulary | None = None,
        unicode_errors: Literal["strict", "replace"] = "strict",
    ) -> None:
        if unicode_errors not in ("strict", "replace"):
            raise ValueError(
                f"unicode_errors: expected 'strict' or 'replace', got {unicode_errors!r}"
            )
        self.path = os.fspath(path)
        given = [] if words is None else words_of(words, "words")
        self._file = _C.open_vectors(self.path, given, unicode_errors == "strict")

    @property
    def format(self) -> Format:
        """The file's format; fastText's .vec is "word2vec-text"."""
        return self._file.format()

    @property
    def names(self) -> list[str]:
        """The tables' names, in the file's order."""
        return self._file.names()

    def shape(self, name: str = "vectors") -> tuple[int, ...]:
        """A tensor's shape, without reading it; GloVe's lines are counted at the first call."""
        return tuple(self._file.shape(name))

    def dtype(self, name: str = "vectors") -> torch.dtype:
        """A tensor's dtype in the file; text reads as float32 unless asked otherwise."""
        return self._file.dtype(name)

    def words(self) -> list[str]:
        """The word of each row."""
        return [word.decode(errors="replace") for word in self._file.words()]

    def tensor(
        self,
        name: str = "vectors",
        dtype: torch.dtype | None = None,
        *,
        progress: bool | None = None,
    ) -> Tensor:
        """A whole tensor.

        From safetensors, in the file's own dtype, it is a view of the file: memory is taken as it
        is touched, writing to it copies the page and never changes the file. Do not shorten or
        rewrite the file in place while a view is in use.

        Args:
            name: One of :attr:`names`.
            dtype: Convert to it while reading.
            progress: Draw a bar; None: for a long file, on a terminal.

        Raises:
            FileFormatError: The file is broken.
        """
        with self._bar(progress) as advance:
            return self._file.tensor(name, dtype, advance)

    def table(
        self,
        tensor: str | None = None,
        dtype: torch.dtype | None = None,
        *,
        progress: bool | None = None,
    ) -> Tensor:
        """A whole table [rows, dim] as memory of its own.

        Args:
            tensor: Its name, in a file that has several tables.
            dtype: Convert to it while reading.
            progress: Draw a bar; None: for a long file, on a terminal.

        Raises:
            FileFormatError: The file is broken.
        """
        with self._bar(progress) as advance:
            return self._file.table(tensor or "", dtype, advance)

    def rows(
        self,
        vocabulary: Vocabulary,
        *,
        tensor: str | None = None,
        dtype: torch.dtype | None = None,
        missing: Missing = "mean",
        progress: bool | None = None,
    ) -> Rows:
        """Rows for the words of a vocabulary; only their numbers are read.

        Args:
            vocabulary: Words in the order of the rows, or each word's row, or a tokenizer. Words
                are compared as they stand: nothing is lowercased, no marker removed.
            tensor: The table's name, in a file that has several.
            dtype: Convert to it while reading.
            missing: What words without a row get: the mean of the rows that were found, zeros, or
                an error. Rows that no word names are filled alike.
            progress: Draw a bar; None: for a long file, on a terminal.

        Raises:
            FileFormatError: The file is broken.
            ValueError: A word is given twice; words are missing and ``missing`` does not allow it.
        """
        words = words_of(vocabulary, "vocabulary")
        with self._bar(progress) as advance:
            vectors, coverage = self._file.rows(words, tensor or "", dtype, missing, advance)
        return Rows(vectors, Coverage(*coverage))

    def coverage(self, vocabulary: Vocabulary, *, progress: bool | None = None) -> Coverage:
        """What :meth:`rows` would find; reads words only.

        Args:
            vocabulary: As for :meth:`rows`.
            progress: Draw a bar; None: for a long file, on a terminal.

        Raises:
            FileFormatError: The file is broken.
        """
        words = words_of(vocabulary, "vocabulary")
        with self._bar(progress) as advance:
            return Coverage(*self._file.coverage(words, advance))

    def __repr__(self) -> str:
        return f"VectorFile({self.path!r}, format={self.format!r}, {len(self.names)} tensors)"

    @contextmanager
    def _bar(self, wanted: bool | None) -> Iterator[Callable[[int, int], None] | None]:
        """What reports progress to a bar; None where there is none."""
        total = os.path.getsize(self.path)
        if wanted is False or (wanted is None and total < BAR_FROM_BYTES):
            yield None
            return
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            if wanted:
                raise
            yield None
            return
        silent = None if wanted is None else False  # None: tqdm looks for a terminal
        with tqdm(
            unit="B", unit_scale=True, desc=os.path.basename(self.path), disable=silent
        ) as bar:

            def advance(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield advance


def open_vectors(
    path: str | os.PathLike[str],
    *,
    words: Vocabulary | None = None,
    unicode_errors: Literal["strict", "replace"] = "strict",
) -> VectorFile:
    r"""Opens a file of vectors, or the index (.json) of safetensors in several files.

    Args:
        path: The file.
        words: The word of each row of a table, for safetensors, which have none: the model's
            tokenizer, or its vocabulary. Then rows can be chosen by words.
        unicode_errors: "strict" refuses a file with a word that is not UTF-8, "replace" takes it
            with U+FFFD for what is not.

    Raises:
        FileFormatError: The file is none of the formats, or broken where it was looked at.
        OSError: It cannot be read.

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
    return VectorFile(path, words, unicode_errors)


def words_of(vocabulary: Vocabulary, argument: str) -> list[str]:
    """The word of each row; an empty one where a mapping names none."""
    if isinstance(vocabulary, Sequence) and not isinstance(vocabulary, (str, bytes)):
        words = list(vocabulary)
    elif isinstance(vocabulary, Mapping):
        words = _by_row(vocabulary, argument)
    elif hasattr(vocabulary, "get_vocab"):
        words = _by_row(vocabulary.get_vocab(), argument)
    else:
        expected = "expected words in order, a mapping or a tokenizer"
        raise TypeError(f"{argument}: {expected}, got one {type(vocabulary).__name__}")
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"{argument}: expected words, got {word!r}")
    return words


def _by_row(rows: Mapping[str, int], argument: str) -> list[str]:
    for word, row in rows.items():
        if whole(argument, row) < 0:
            raise ValueError(f"{argument}: expected rows from 0, got {row} for {word!r}")
    words = [""] * (max(rows.values(), default=-1) + 1)
    for word, row in rows.items():
        if words[row]:
            raise ValueError(f"{argument}: row {row} is given to {words[row]!r} and to {word!r}")
        words[row] = word
    return words
