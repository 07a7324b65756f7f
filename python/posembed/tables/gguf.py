"""GGUF files: what their metadata say, and their token table (docs/gguf.md of ggml-org/ggml).

The header is read by system calls, and each of its counts is held against the bytes that follow:
a file that is shortened, or lies about a size, raises. The gguf package of llama.cpp's authors
turns codes into numbers, a part at a time.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor

from posembed.glue.memory import prefer_huge_pages
from posembed.glue.validation import shown
from posembed.tables.code_formats import gguf_types
from posembed.tables.file_format import (
    MOST_HEADER_BYTES,
    MOST_LEVELS,
    PART,
    FileFormatError,
    in_dtype,
    on_cpu,
    read_at,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
TABLE = "token_embd.weight"
ALIGNMENT = 32
MOST_DIMENSIONS = 4

# Tensors that change the rotation, which are keys of a configuration.
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# The types of values by their numbers, as the struct module names them.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
TEXT, ARRAY = 8, 9

# Types of tensors that torch has, too.
OWN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def is_gguf(path: str | bytes | os.PathLike[str]) -> bool:
    """Whether a path is a GGUF file, by its first bytes."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file, with its shape in torch's order.

    ``kind`` is the name of its type, and ``number`` its number; ``block`` are the numbers of a
    block, in ``block_bytes`` bytes; its data ``begin`` there in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    block: int
    block_bytes: int
    number: int
    begin: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.shape[-1] // self.block * self.block_bytes

    @property
    def rows(self) -> int:
        """Rows of its last dimension."""
        return math.prod(self.shape[:-1])


class GgufFile:
    """An open GGUF file; a FileFormatError if it is malformed."""

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        self.path = os.fsdecode(path)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        with open(self._file, "rb", closefd=False) as file:
            self._metadata, self._tensors = _Header(self.path, file).read()

    def metadata(self) -> dict[str, Any]:
        """The keys about the model, with the tensors that change its rotation."""
        frequencies = [name for name in FREQUENCIES if name in self._tensors]
        numbers = {name: self._numbers(self._tensors[name], None) for name in frequencies}
        return {**self._metadata, **{name: each.tolist() for name, each in numbers.items()}}

    def table(self, name: str | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The token table, or another one by name: [rows, dim].

        ``dtype`` is that of the result; default: the file's, float32 for codes, which need the gguf
        package. Errors are a ValueError if there is no such table, a TypeError for a type that is
        not read, and FileFormatErrors of the file.
        """
        return self._numbers(self._table(name), dtype)

    def codes(self, name: str | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The codes of a table in Q8_0, Q4_0 or Q4_1, and scales and biases [rows, dim / 32].

        A table of another type is a TypeError.
        """
        tensor = self._table(name)
        heads = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2}  # float16 numbers before the codes of a block
        if tensor.kind not in heads:
            expected = "expected a table in Q8_0, Q4_0 or Q4_1 to keep its codes"
            raise TypeError(f"{self.path}: {tensor.name}: {expected}, got {tensor.kind}")
        head = 2 * heads[tensor.kind]
        blocks = self._bytes(tensor, 0, tensor.rows).view(tensor.rows, -1, tensor.block_bytes)
        numbers = blocks[..., :head].contiguous().view(torch.float16).float()
        scales, codes = numbers[..., 0].contiguous(), blocks[..., head:]
        if tensor.kind == "Q8_0":
            return codes.contiguous().view(torch.int8).flatten(1), scales, None
        # The lower halves of the bytes are the first numbers of a block.
        halves = torch.cat([codes & 15, codes >> 4], -1)
        pairs = halves[..., ::2] | (halves[..., 1::2] << 4)
        biases = -8 * scales if head == 2 else numbers[..., 1].contiguous()
        return pairs.flatten(1), scales, biases

    def _table(self, name: str | None) -> GgufTensor:
        name = TABLE if name is None else name
        if name not in self._tensors:
            known = shown(sorted(self._tensors))
            raise ValueError(f"tensor: expected one of {known}, got {name!r}")
        tensor = self._tensors[name]
        if len(tensor.shape) != 2:
            raise ValueError(f"tensor: expected a table, got {name!r} of {list(tensor.shape)}")
        return tensor

    @on_cpu
    def _numbers(self, tensor: GgufTensor, dtype: torch.dtype | None) -> Tensor:
        """A tensor as a copy, converted in parts."""
        if tensor.number not in gguf_types():  # whose size in the file is unknown
            raise TypeError(f"{self.path}: {tensor.name}: {tensor.kind} is not read")
        dtype = OWN.get(tensor.kind, torch.float32) if dtype is None else dtype
        result = torch.empty(tensor.rows, tensor.shape[-1], dtype=dtype)
        prefer_huge_pages(result)
        step = max(1, PART // tensor.shape[-1])
        for begin in range(0, tensor.rows, step):
            end = min(tensor.rows, begin + step)
            part = self._widened(tensor, self._bytes(tensor, begin, end))
            result[begin:end] = in_dtype(self.path, tensor.name, part, dtype)
        return result.view(tensor.shape)

    def _bytes(self, tensor: GgufTensor, begin: int, end: int) -> Tensor:
        """The bytes of some rows: uint8 [rows, bytes]."""
        offset, count = tensor.begin + begin * tensor.row_bytes, (end - begin) * tensor.row_bytes
        data = read_at(self._file, self.path, offset, count)
        return torch.frombuffer(data, dtype=torch.uint8).view(end - begin, tensor.row_bytes)

    def _widened(self, tensor: GgufTensor, rows: Tensor) -> Tensor:
        """Rows of bytes as numbers."""
        if tensor.kind in OWN:
            return rows.view(OWN[tensor.kind])
        try:
            import gguf
        except ImportError as error:
            raise ImportError(
                f"{self.path}: tables in {tensor.kind} need the gguf package: "
                "python -m pip install gguf"
            ) from error
        import numpy as np

        try:
            with np.errstate(all="ignore"):  # scales of a broken file may be infinite
                kind = gguf.GGMLQuantizationType(tensor.number)
                return torch.from_numpy(gguf.dequantize(rows.numpy(), kind)).float()
        except (NotImplementedError, ValueError) as error:
            refused = f"{self.path}: {tensor.name}: {tensor.kind} is not read"
            raise TypeError(refused) from error


class _Header:
    """Reads a header from its beginning."""

    def __init__(self, path: str, file: Any) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """The keys about the model, and all tensors."""
        if self.take(len(MAGIC)) != MAGIC:
            self.fail("expected a GGUF file")
        version = self.number("I")
        if version not in VERSIONS:
            swapped = version in (each << 24 for each in VERSIONS)
            self.fail(f"expected version 2 or 3, got {'a big-endian file' if swapped else version}")
        # A tensor has at least a name's length, a count of dimensions, a type and an offset; a key
        # a length, a type and a byte.
        tensors, keys = self.count(24, "tensors"), self.count(13, "keys")
        alignment, metadata = ALIGNMENT, {}
        seen: set[str] = set()
        for _ in range(keys):
            name = self.text()
            if name in seen:
                self.fail(f"key {name!r:.60} is given twice")
            seen.add(name)
            is_kept = "." in name and not name.startswith("tokenizer.")
            value = self.value(self.number("I"), is_kept, 0)
            if is_kept:
                metadata[name] = value
            if name == "general.alignment":
                alignment = value
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            self.fail(f"general.alignment: expected a number of bytes, got {alignment!r:.60}")
        entries = [self.entry() for _ in range(tensors)]
        begin = -(-self.at // alignment) * alignment
        found = {entry[0]: self.tensor(entry, begin) for entry in entries}
        if len(found) < tensors:
            self.fail("expected tensors of different names")
        return metadata, found

    def entry(self) -> tuple[str, list[int], int, int]:
        """A tensor's name, sizes, type and offset."""
        name, dimensions = self.text(), self.number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            self.fail(f"tensor {name!r:.60}: expected 1 to 4 dimensions, got {dimensions}")
        sizes = [self.number("Q") for _ in range(dimensions)]
        return name, sizes, self.number("I"), self.number("Q")

    def tensor(self, entry: tuple[str, list[int], int, int], begin: int) -> GgufTensor:
        """A tensor whose data lie in the file, which begin at ``begin``."""
        name, sizes, number, offset = entry
        types = gguf_types()
        kind, block, block_bytes = types.get(number, (f"type {number}", 1, 1))
        if min(sizes) < 1 or sizes[0] % block:
            self.fail(f"tensor {name!r:.60}: {kind} of {sizes}: expected blocks of {block} numbers")
        size = math.prod(sizes) // block * block_bytes
        if number in types and begin + offset + size > self.size:
            self.fail(f"tensor {name!r:.60}: {size} bytes from {offset} are not in the file")
        return GgufTensor(
            name, tuple(reversed(sizes)), kind, block, block_bytes, number, begin + offset
        )

    def value(self, kind: int, is_kept: bool, level: int) -> Any:
        """A value, which is passed over if it is not kept."""
        if kind == TEXT and is_kept:
            return self.text()
        if kind == TEXT:
            self.skip(self.count(1, "bytes"))
            return None
        if kind == ARRAY:
            return self.array(is_kept, level + 1)
        if kind not in SCALARS:
            self.fail(f"expected a type of values, got {kind}")
        return self.number(SCALARS[kind])

    def array(self, is_kept: bool, level: int) -> list[Any] | None:
        """The values of an array."""
        if level > MOST_LEVELS:
            self.fail(f"expected at most {MOST_LEVELS} lists within lists")
        kind = self.number("I")
        if kind not in SCALARS:  # a text has at least a length, an array a type and a length
            count = self.count(12 if kind == ARRAY else 8, "values")
            values = [self.value(kind, is_kept, level) for _ in range(count)]
            return values if is_kept else None
        size = struct.calcsize(SCALARS[kind])
        count = self.count(size, "values")
        if not is_kept:
            self.skip(count * size)
            return None
        return list(struct.unpack(f"<{count}{SCALARS[kind]}", self.take(count * size)))

    def text(self) -> str:
        """A text."""
        data = self.take(self.count(1, "bytes"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail(f"expected UTF-8, got {data[:40]!r}")

    def number(self, kind: str) -> Any:
        """A number, by the struct module's name of its type."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, least: int, what: str) -> int:
        """How many things follow, of at least so many bytes each."""
        count = self.number("Q")
        if count * least > self.left:
            self.fail(f"{count} {what} in a header of which {self.left} bytes are left")
        return count  # type: ignore[no-any-return]

    @property
    def left(self) -> int:
        """Bytes that may still belong to the header."""
        return min(self.size, MOST_HEADER_BYTES) - self.at

    def take(self, count: int) -> bytes:
        """The next bytes."""
        data: bytes = self.file.read(count) if count <= self.left else b""
        if len(data) < count:
            self.fail(f"expected a GGUF file with {count} more bytes of its header: it is cut off")
        self.at += count
        return data

    def skip(self, count: int) -> None:
        """Passes over bytes, which were counted."""
        self.at += count
        self.file.seek(self.at)

    def fail(self, reason: str) -> NoReturn:
        """Raises FileFormatError for what was read last."""
        raise FileFormatError(self.path, self.at, reason)
