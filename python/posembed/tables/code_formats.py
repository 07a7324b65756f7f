"""Tables of codes in safetensors, as their programs store them, turned into numbers.

csrc/pretrained/table_formats.json says which tensors of a file are one table. Here stands how each
program packs its codes; every format becomes values, scales, zero points and biases.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from posembed.glue.memory import prefer_huge_pages
from posembed.tables.file_format import (
    PART,
    FileFormatError,
    in_dtype,
    json_file,
    json_object,
    on_cpu,
)
from posembed.tables.files import table_formats

if TYPE_CHECKING:
    from posembed.pretrained import VectorFile

# The numbers of a four-bit float, e2m1, by its codes: a sign, two bits of exponent and one more.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# The dtypes of scales, zero points and biases.
NUMBERS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
           torch.float8_e5m2, torch.float8_e8m0fnu, torch.int8, torch.uint8, torch.int16,
           torch.int32, torch.int64)  # fmt: skip

# What the kernel has: codes, scales and biases.
Kept = tuple[Tensor, Tensor, Tensor | None]


@functools.cache
def formats() -> dict[str, dict[str, Any]]:
    """The rows of table_formats.json by the names of their formats."""
    return {row["name"]: row for row in table_formats()["formats"]}


@functools.cache
def gguf_types() -> dict[int, tuple[str, int, int]]:
    """GGUF's types by number: name, numbers of a block, bytes of a block."""
    types = table_formats()["gguf"]["types"]
    return {int(number): tuple(row) for number, row in types.items()}


@dataclasses.dataclass
class Codes:
    """A table whose numbers are (value - zero) * scale + bias.

    Args:
        packed: What the file stores: [rows, ...].
        values: From some rows of ``packed`` to their values, [rows, columns], without a scale.
        columns: Columns of the table.
        scales, zeros, biases: float32 [rows, groups] for groups of columns.
        group_of: The group of each column; default: even groups in order.
        kept: What a table of codes takes, if the kernel has such codes.
    """

    packed: Tensor
    values: Callable[[Tensor], Tensor]
    columns: int
    scales: Tensor
    zeros: Tensor | None = None
    biases: Tensor | None = None
    group_of: Tensor | None = None
    kept: Kept | None = None

    def numbers(self, path: str, name: str, dtype: torch.dtype | None) -> Tensor:
        """The table as numbers, made of a part of the rows at a time."""
        rows = len(self.packed)
        result = torch.empty(rows, self.columns, dtype=dtype or torch.float32)
        prefer_huge_pages(result)
        if result.numel() == 0:
            return result
        step = max(1, PART // self.columns)
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            result[part] = in_dtype(path, name, self._rows(part), dtype)
        return result

    def _rows(self, part: slice) -> Tensor:
        numbers = self.values(self.packed[part]).float()
        if self.zeros is not None:
            numbers = numbers - self._by_column(self.zeros[part])
        numbers = numbers * self._by_column(self.scales[part])
        return numbers if self.biases is None else numbers + self._by_column(self.biases[part])

    def _by_column(self, of_groups: Tensor) -> Tensor:
        """[rows, groups] -> [rows, columns]."""
        if self.group_of is not None:
            return of_groups[:, self.group_of]
        return of_groups.repeat_interleave(self.columns // of_groups.shape[1], 1)


def find(file: VectorFile, tensor: str | None) -> StoredCodes | None:
    """The codes of a table, if a reader below turns them into numbers; None for all others."""
    if file.format != "safetensors":
        return None
    found = file._file.codes(tensor or "")
    if found is None:
        return None
    codes = StoredCodes(file, *found)
    # C++ reads, or refuses by the format's name, what is left.
    is_elsewhere = codes.read == "" or (codes.read == "rows" and "zeros" not in codes.parts)
    return None if is_elsewhere else codes


class StoredCodes:
    """The tensors of a table of codes.

    ``format`` is a name in table_formats.json, and ``read`` its reader; ``table`` the name of the
    codes, ``parts`` those of the other tensors by what they hold; ``metadata`` what safetensors say
    of the table.
    """

    def __init__(
        self,
        file: VectorFile,
        format: str,
        read: str,
        table: str,
        parts: dict[str, str],
        metadata: str,
    ) -> None:
        self.file, self.format, self.read = file, format, read
        self.table, self.parts, self.metadata = table, parts, metadata

    def codes(self) -> Codes:
        """What the file stores, checked; a TypeError for a form that is not read."""
        return READERS[self.read](self)

    @on_cpu
    def numbers(self, dtype: torch.dtype | None) -> Tensor:
        """The table as numbers; see :meth:`Codes.numbers`."""
        return self.codes().numbers(self.file.path, self.table, dtype)

    @on_cpu
    def kept(self) -> Kept:
        """What a table of codes takes; a TypeError if the kernel has no such codes."""
        kept = self.codes().kept
        if kept is None:
            self.refuse("no table of such codes exists here; keep='numbers' widens them")
        return kept

    def packed(self) -> Tensor:
        """The tensor of the codes."""
        return self.file.tensor(self.table, copy=True)

    def part(self, role: str) -> Tensor:
        """Another tensor."""
        return self.file.tensor(self.parts[role], copy=True)

    def floats(self, role: str) -> Tensor:
        """Another tensor's numbers in float32."""
        given = self.part(role)
        if given.dtype not in NUMBERS:
            self.fail(f"expected numbers in {self.parts[role]!r:.120}, got {given.dtype}")
        return given.float()

    def grid(self, role: str, rows: int, columns: int) -> Tensor:
        """Numbers for all, for each row or for groups of columns: float32 [rows, groups]."""
        given = self.floats(role)
        if given.numel() == 1:
            return given.view(1, 1).expand(rows, 1)
        if given.dim() == 1:
            given = given.unsqueeze(1)
        fits = given.dim() == 2 and given.shape[0] == rows and given.shape[1] > 0
        if not fits or columns % given.shape[1] != 0:
            self.fail(
                f"expected {role} for all, for {rows} rows or for groups of {columns} columns, "
                f"{self.parts[role]!r:.120} has the shape {list(given.shape)}"
            )
        return given

    def setting(self, *keys: str) -> dict[str, Any]:
        """An object of the config.json beside the file, by the keys that lead to it; or nothing."""
        path = Path(self.file.path).parent / "config.json"
        found: Any = json_file(path) if path.is_file() else {}
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    def fail(self, reason: str) -> NoReturn:
        """Raises FileFormatError."""
        raise FileFormatError(self.file.path, 0, f"{self.table}: {reason}")

    def refuse(self, reason: str) -> NoReturn:
        """Raises TypeError for a form of the format that is not read."""
        raise TypeError(f"{self.file.path}: {self.table} has codes of {self.format}: {reason}")


# ------------------------------------------------------------------------------------------- codes


def fields(data: Tensor, bits: int, count: int) -> Tensor:
    """Codes that lie one after the other, the lower bits first: uint8 [rows, bytes] -> int32."""
    first = torch.arange(count) * bits
    wide = torch.nn.functional.pad(data.int(), (0, 1))
    pairs = wide[:, first // 8] | (wide[:, first // 8 + 1] << 8)
    return (pairs >> (first % 8).int()) & ((1 << bits) - 1)


def fields_of_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes that lie in words of 32 bits and never in two of them: int32 [rows, words] -> int32."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :count]


def words_for(count: int, bits: int, dense: bool) -> int:
    """Words of 32 bits for so many codes, which may lie in two words if ``dense``."""
    return -(-count * bits // 32) if dense else -(-count // (32 // bits))


def as_signed(data: Tensor) -> Tensor:
    """Codes 0 to 255 as -128 to 127, which the kernel has."""
    return data.bitwise_xor(128).view(torch.int8)


# ----------------------------------------------------------------------------------------- readers


def _bytes(stored: StoredCodes) -> Codes:
    """A byte for each number."""
    packed = stored.packed()
    rows, columns = packed.shape
    if "biases" in stored.parts:
        stored.refuse(f"{stored.parts['biases']!r:.120} beside zero points")
    if "layout" in stored.parts and bool(stored.part("layout").ne(0).any()):
        stored.refuse("expected the layout of rows, 0")
    scales = stored.grid("scales", rows, columns) / formats()[stored.format].get("divisor", 1)
    zeros = stored.grid("zeros", rows, columns) if "zeros" in stored.parts else None
    return _of_bytes(packed, scales, zeros)


def _of_bytes(packed: Tensor, scales: Tensor, zeros: Tensor | None) -> Codes:
    has_kernel = packed.dtype in (torch.int8, torch.float8_e4m3fn)
    biases = None if zeros is None else -zeros * scales
    if zeros is not None and biases is not None and scales.shape != biases.shape:
        has_kernel = False
    kept = (packed, scales.contiguous(), biases) if has_kernel else None
    return Codes(packed, lambda part: part, packed.shape[1], scales, zeros, kept=kept)


def _torchao(stored: StoredCodes) -> Codes:
    """A byte for each number, in groups that the file's metadata name."""
    packed = stored.packed()
    rows, columns = packed.shape
    if not stored.metadata:
        stored.fail("expected torchao's metadata of its weight, a.b.weight for a.b, got none")
    told = json_object(stored.file.path, stored.metadata, f"torchao's metadata of {stored.table}")
    data = told.get("_data")
    block = data.get("block_size") if isinstance(data, dict) else None
    if block is None:
        stored.fail("expected torchao's metadata of its weight with a block_size, got none")
    if "outer" in stored.parts:
        stored.refuse(f"{stored.parts['outer']!r:.120}")
    scales = stored.floats("scales")
    groups = scales.numel() // max(1, rows)
    is_one = scales.numel() == 1 and block == [rows, columns]
    is_even = groups > 0 and scales.numel() == rows * groups and columns % groups == 0
    if not is_one and not (is_even and block == [1, columns // groups]):
        stored.refuse(
            f"expected scales for rows or groups of columns, got {list(scales.shape)} for "
            f"{[rows, columns]} with blocks of {block!r:.60}"
        )
    scales = scales.view(1, 1).expand(rows, 1) if is_one else scales.view(rows, groups)
    zeros = None
    if "zeros" in stored.parts:
        zeros = stored.floats("zeros")
        if zeros.numel() not in (1, scales.numel()):
            stored.fail(f"expected a zero point for each scale, got {list(zeros.shape)}")
        zeros = zeros.view(-1, scales.shape[1]).expand(scales.shape)
    return _of_bytes(packed, scales, zeros if zeros is not None and bool(zeros.any()) else None)


def _words(stored: StoredCodes) -> Codes:
    """compressed-tensors: signed codes of 2 to 8 bits in words, the lower bits first.

    Its releases before 0.20 leave the bits of a word that are no whole code empty.
    """
    words, shape = stored.packed(), stored.part("shape").flatten().tolist()
    if not all(type(size) is int for size in shape):
        stored.fail(f"expected whole numbers for the shape, got {shape!r:.60}")
    if len(shape) != 2 or shape[0] != len(words) or not 0 < shape[1] <= 32 * words.shape[1]:
        stored.fail(f"expected words for a table of {shape!r:.60}, got {list(words.shape)}")
    rows, columns = int(shape[0]), int(shape[1])
    bits, dense = _bits_of_words(stored, words.shape[1], columns)

    def unpacked(data: Tensor, count: int) -> Tensor:
        data = data.contiguous()
        found = fields(data.view(torch.uint8), bits, count) if dense else None
        return (fields_of_words(data, bits, count) if found is None else found) - (1 << (bits - 1))

    scales = stored.grid("scales", rows, columns)
    zeros = None
    if "zeros" in stored.parts:
        zeros = _zeros_of_words(stored, scales, words_for(rows, bits, dense), unpacked)
    group_of = stored.floats("groups").long().flatten() if "groups" in stored.parts else None
    if group_of is not None and bool(group_of.eq(-1).any()):
        group_of = None  # not set
    if group_of is not None and not (
        len(group_of) == columns and bool(((group_of >= 0) & (group_of < scales.shape[1])).all())
    ):
        stored.fail(f"expected the group of each of {columns} columns, from 0 on")
    kept: Kept | None = None
    if bits in (4, 8) and group_of is None and words.shape[1] * 32 == columns * bits:
        data, shifts = words.view(torch.uint8), 0.0 if zeros is None else zeros
        low = 8.0 if bits == 4 else 0.0
        biases = -(shifts + low) * scales
        kept = (data if bits == 4 else as_signed(data), scales.contiguous(), biases)
    return Codes(words, lambda part: unpacked(part, columns), columns, scales, zeros, None,
                 group_of, kept)  # fmt: skip


def _bits_of_words(stored: StoredCodes, words: int, columns: int) -> tuple[int, bool]:
    """The bits of a code, and whether codes lie in two words."""
    groups = stored.setting("quantization_config", "config_groups").values()
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    told = [each.get("num_bits") for each in weights if isinstance(each, dict)]
    fitting = [
        (bits, dense)
        for bits in range(2, 9)
        for dense in (True, False)
        if (not told or bits in told)
        and words_for(columns, bits, dense) == words
        # Where all codes of a row lie in one word, or fill words, both are the same.
        and (dense or not (32 % bits == 0 or columns <= 32 // bits))
    ]
    if len(fitting) != 1:
        source = "that its config.json states" if told else "2 to 8, which a config.json states"
        shown = told or sorted({bits for bits, _ in fitting})
        stored.fail(
            f"expected codes of the bits {source}, got {words} words for {columns} columns and "
            f"bits {shown!r:.60}"
        )
    return fitting[0]


def _zeros_of_words(
    stored: StoredCodes, scales: Tensor, words: int, unpacked: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Zero points, which are packed along rows, or not packed."""
    given = stored.part("zeros")
    if given.dtype != torch.int32:
        return stored.grid("zeros", *scales.shape)
    rows, groups = scales.shape
    if list(given.shape) != [words, groups]:
        stored.fail(f"expected {words} words of zero points for scales of {list(scales.shape)}, "
                    f"got {list(given.shape)}")  # fmt: skip
    return unpacked(given.t(), rows).t().float()


def _mlx(stored: StoredCodes) -> Codes:
    """MLX: codes of 2 to 8 bits without gaps; config.json says how many, and the group's size."""
    settings = stored.setting("quantization")
    own = settings.get(stored.table.removesuffix(".weight"))
    told = {**settings, **(own if isinstance(own, dict) else {})}
    bits, mode = told.get("bits"), told.get("mode", "affine")
    if mode != "affine":
        stored.refuse(f"mode {mode!r:.40}")
    if type(bits) is not int or bits not in (2, 3, 4, 5, 6, 8):
        stored.fail("expected a config.json beside the file whose quantization has the bits, "
                    f"got {bits!r:.40}")  # fmt: skip
    words = stored.packed()
    rows, columns = len(words), words.shape[1] * 32 // bits
    scales, biases = (stored.floats(role) for role in ("scales", "biases"))
    groups = scales.shape[-1] if scales.dim() == 2 else 0
    fits = groups > 0 and columns % groups == 0 and words.shape[1] * 32 == columns * bits
    if not fits or list(scales.shape) != [rows, groups] or scales.shape != biases.shape:
        stored.fail(f"expected scales and biases for groups of {columns} columns, got "
                    f"{list(scales.shape)} and {list(biases.shape)}")  # fmt: skip
    size = told.get("group_size", 64)  # MLX's own default
    if size != columns // groups:
        stored.fail(f"expected groups of {size!r:.40} columns, as config.json says, got scales for "
                    f"groups of {columns // groups}")  # fmt: skip
    data = words.view(torch.uint8)
    kept: Kept | None = None
    if bits == 4:
        kept = data, scales, biases
    elif bits == 8:
        kept = as_signed(data), scales, biases + 128 * scales
    return Codes(data, lambda part: fields(part, bits, columns), columns, scales, None, biases,
                 kept=kept)  # fmt: skip


def _nibbles(stored: StoredCodes) -> Codes:
    """NVFP4 and MXFP4: two e2m1 numbers in a byte, the first in the lower half."""
    packed, scales = stored.packed(), stored.part("scales")
    columns, group = 2 * packed.shape[1], formats()[stored.format]["group"]
    if list(scales.shape) != [len(packed), columns // group] or columns % group:
        stored.fail(f"expected scales for groups of {group} of {columns} columns, got "
                    f"{list(scales.shape)}")  # fmt: skip
    expected = torch.float8_e4m3fn if group == 16 else torch.float8_e8m0fnu
    if scales.dtype == torch.uint8:
        scales = scales.view(expected)
    if scales.dtype != expected:
        stored.fail(f"expected scales in {expected}, got {scales.dtype}")
    numbers = scales.float()
    for role in ("divisor", "factor"):
        if role in stored.parts:
            whole = stored.floats(role)
            if whole.numel() != 1:
                stored.fail(f"expected one {role} for all, got {list(whole.shape)}")
            numbers = numbers / whole if role == "divisor" else numbers * whole
    values = torch.tensor(E2M1)
    return Codes(packed, lambda part: values[fields(part, 4, columns)], columns, numbers)


def _blocks(stored: StoredCodes) -> Codes:
    """bitsandbytes: 4 bits that name a number of a map, the first in the upper half of a byte."""
    state = stored.part("state")
    if state.dtype != torch.uint8:
        stored.fail(f"expected the state's bytes, got {state.dtype}")
    told = json_object(stored.file.path, bytes(state.flatten().tolist()), f"{stored.table}'s state")
    shape: Any = told.get("shape")
    size: Any = told.get("blocksize")
    packed, values = stored.packed().flatten(), stored.floats("values").flatten()
    plain = isinstance(shape, list) and len(shape) == 2 and all(type(x) is int for x in shape)
    if not plain or type(size) is not int or size < 1 or len(values) != 16:
        stored.fail("expected a state with the shape of a table and a blocksize, and a map of 16 "
                    f"numbers, got {shape!r:.40}, {size!r:.40} and {len(values)}")  # fmt: skip
    rows, columns = shape
    if rows < 0 or columns < 1 or rows * columns != 2 * len(packed):
        stored.fail(f"expected {2 * len(packed)} numbers, got a shape of {shape!r:.40}")
    if columns % size:
        stored.refuse(f"expected rows of whole blocks of {size}, got {columns} columns")
    scales = _scales_of_blocks(stored, told, rows * columns // size)
    swapped = (packed << 4) | (packed >> 4)
    return Codes(
        swapped.view(rows, columns // 2),
        lambda part: values[fields(part, 4, columns)],
        columns,
        scales.view(rows, columns // size),
    )


def _scales_of_blocks(stored: StoredCodes, told: dict[str, Any], count: int) -> Tensor:
    """The scales of blocks, which may be codes themselves."""
    if "outer_scales" not in stored.parts:
        given = stored.floats("scales").flatten()
        if len(given) != count:
            stored.fail(f"expected {count} scales, got {len(given)}")
        return given
    given, outer = stored.part("scales").flatten(), stored.floats("outer_scales").flatten()
    has_values = "outer_values" in stored.parts
    values = stored.floats("outer_values").flatten() if has_values else outer.new_empty(0)
    size: Any = told.get("nested_blocksize")
    offset: Any = told.get("nested_offset")
    plain = type(size) is int and size > 0 and type(offset) is float
    fits = plain and given.dtype == torch.uint8 and len(given) == count and len(values) == 256
    if not fits or len(outer) != -(-count // size):
        stored.fail("expected scales that are codes, a map of 256 numbers and a scale for each "
                    f"nested block of {size!r:.40}, got {given.dtype} [{len(given)}], "
                    f"{len(values)} and {len(outer)}, with the offset {offset!r:.40}")  # fmt: skip
    block = torch.arange(count) // min(size, max(1, count))
    widened: Tensor = values[given.long()] * outer[block] + offset
    return widened


READERS: dict[str, Callable[[StoredCodes], Codes]] = {
    "blocks": _blocks,
    "bytes": _bytes,
    "mlx": _mlx,
    "nibbles": _nibbles,
    "rows": _bytes,  # with zero points; C++ reads the others
    "torchao": _torchao,
    "words": _words,
}
