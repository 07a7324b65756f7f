"""Input data for models: zero-copy windows over files of token ids, and masking.

The 80/10/10 masking rule is from Devlin et al., "BERT", arXiv:1810.04805.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from posembed.glue.validation import whole
from posembed.tables.file_format import FileFormatError, read_at

if TYPE_CHECKING:
    import numpy as np

__all__ = ["IdFile", "Ids", "WindowDataset", "mask_tokens", "open_ids", "save_ids", "windows"]


def __dir__() -> list[str]:
    """Public names."""
    return __all__


# Two bytes per id are enough for vocabularies up to 65,536.
ID_TYPES = (torch.uint16, torch.int32, torch.int64)

Ids: TypeAlias = "Tensor | np.ndarray[Any, Any] | str | os.PathLike[str]"


def check_id_type(dtype: torch.dtype) -> None:
    """Raises TypeError unless the dtype is supported for ids in a file."""
    if dtype not in ID_TYPES:
        raise TypeError(f"dtype: expected torch.uint16, torch.int32 or torch.int64, got {dtype}")


class Stored(NamedTuple):
    """Where a file has its ids, and in which dtype."""

    dtype: torch.dtype
    offset: int  # bytes
    ids: int


def stored(path: str | os.PathLike[str], dtype: torch.dtype | None) -> Stored:
    """What the ids of a file are: what an .npy file says, or the caller, or int32.

    TypeErrors and ValueErrors are those of :func:`open_ids`.
    """
    if dtype is not None:
        check_id_type(dtype)
    if os.fspath(path).endswith(".npy"):
        return _stored_array(path, dtype)
    size, guessed = Path(path).stat().st_size, torch.int32
    width = (dtype or guessed).itemsize
    if size == 0 or size % width:
        raise ValueError(f"{path}: expected ids of {width} bytes, found {size} bytes")
    found = Stored(dtype or guessed, 0, size // width)
    if dtype is None and found.ids >= 64:
        with open(path, "rb") as file:  # a map would end the process if the file is shortened
            first = file.read(1 << 18)
        if not any(any(first[byte::8]) for byte in range(4, 8)):
            raise ValueError(
                f"dtype: expected to be given for {path}, whose every second int32 is 0, as where "
                "ids are int64, numpy's default: dtype=torch.int64"
            )
    return found


def _stored_array(path: str | os.PathLike[str], dtype: torch.dtype | None) -> Stored:
    """:func:`stored` of an .npy file."""
    import numpy as np

    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (EOFError, ValueError) as error:
        raise FileFormatError(os.fspath(path), 0, str(error)) from None
    if not hasattr(array, "ndim"):
        raise FileFormatError(os.fspath(path), 0, "it has several arrays")
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{path}: expected an array [ids], got {list(array.shape)}")
    own = {"uint16": torch.uint16, "int32": torch.int32, "int64": torch.int64}.get(str(array.dtype))
    if own is None or not array.dtype.isnative:
        raise TypeError(f"{path}: expected uint16, int32 or int64, got {array.dtype}")
    if dtype not in (None, own):
        raise TypeError(f"dtype: expected {own}, which {path} says, got {dtype}")
    return Stored(own, array.offset, len(array))


class IdFile:
    """Ids that are read by system calls.

    If another process shortens the file, reading raises; touching a memory map would end this
    process with SIGBUS. A pickled object opens the file again.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: torch.dtype | None) -> None:
        self.path = os.fspath(path)
        self.dtype, self._begin, self.count = stored(path, dtype)
        self._descriptor = os.open(self.path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._descriptor)

    def read(self, begin: int, count: int) -> Tensor:
        """Ids [begin, begin + count); raises FileFormatError if the file is too short."""
        size = self.dtype.itemsize
        data = read_at(self._descriptor, self.path, self._begin + begin * size, count * size)
        return torch.frombuffer(data, dtype=self.dtype)

    def __reduce__(self) -> tuple[type[IdFile], tuple[str, torch.dtype]]:
        return IdFile, (self.path, self.dtype)


def open_ids(
    path: str | os.PathLike[str], dtype: torch.dtype | None = None, *, copy: bool = False
) -> Tensor:
    """Memory-maps a file of ids; they are read on use and never copied as a whole.

    Do not truncate or rewrite the file in place while it is mapped: reading a page that it no
    longer has ends the process.

    Args:
        path: A file of ids in native byte order, as ``numpy.ndarray.tofile`` writes it, or an .npy
            file, which needs numpy.
        dtype: torch.uint16, torch.int32 or torch.int64; default: what an .npy file says, otherwise
            int32.
        copy: Read into memory, so that the result does not depend on the file.

    Returns:
        [ids]. Writes to it do not change the file.

    Raises:
        TypeError: The dtype is not one of these, or not that of an .npy file.
        ValueError: The file is empty, or its size is not a multiple of the id size; or ``dtype`` is
            missing and the ids look like int64.
        FileFormatError: An .npy file is broken, or its ids have no aligned memory without ``copy``.
    """
    if copy:
        file = IdFile(path, dtype)
        try:
            return file.read(0, file.count)
        finally:
            file.close()
    own, offset, count = stored(path, dtype)
    if offset % own.itemsize:
        reason = f"ids of {own.itemsize} bytes at a multiple of their size are expected; copy=True"
        raise FileFormatError(os.fspath(path), offset, f"{reason} reads others")
    skipped = offset // own.itemsize  # .npy files align their data to 64 bytes
    every = torch.from_file(os.fspath(path), shared=False, size=skipped + count, dtype=own)
    return every[skipped:]


def save_ids(
    path: str | os.PathLike[str],
    parts: Iterable[Sequence[int] | Tensor],
    dtype: torch.dtype = torch.int32,
) -> int:
    """Writes ids to a file, part by part, for :func:`open_ids`; returns their count.

    Args:
        path: The file; it is overwritten.
        parts: The ids of each text in turn, for example from a tokenizer.
        dtype: torch.uint16, torch.int32 or torch.int64.

    Raises:
        TypeError: The dtype is not one of these.
        ValueError: An id does not fit the dtype.

    Examples:
        >>> import os, tempfile, torch, posembed as pe
        >>> path = os.path.join(tempfile.mkdtemp(), "ids.bin")
        >>> pe.data.save_ids(path, [[1, 2, 3], [4, 5]], torch.uint16)
        5
        >>> pe.data.open_ids(path, torch.uint16).tolist()
        [1, 2, 3, 4, 5]
    """
    check_id_type(dtype)
    limits, count = torch.iinfo(dtype), 0
    with open(path, "wb") as file:
        for part in parts:
            ids = torch.as_tensor(part, dtype=torch.int64, device="cpu")
            if ids.numel() and not (limits.min <= ids.min() and ids.max() <= limits.max):
                raise ValueError(
                    f"parts: expected ids from {limits.min} to {limits.max} for {dtype}, got "
                    f"{int(ids.min())} to {int(ids.max())}"
                )
            file.write(ids.to(dtype).numpy().tobytes())
            count += ids.numel()
    return count


def tensor_of(ids: Ids, dtype: torch.dtype | None) -> Tensor:
    """The ids as a tensor over the same memory, or over the file at a path."""
    if isinstance(ids, Tensor):
        return ids
    if isinstance(ids, (str, os.PathLike)):
        return open_ids(ids, dtype)
    if not hasattr(ids, "__array_interface__"):  # the package does not need numpy
        found = type(ids).__name__
        remedy = "; torch.tensor(ids)" if isinstance(ids, (list, tuple)) else ""
        raise TypeError(f"ids: expected a tensor, a numpy array or a path, got {found}{remedy}")
    with warnings.catch_warnings():
        # Allow read-only arrays: windows are only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(ids)


def windows(
    ids: Ids, length: int, stride: int | None = None, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Windows over ids as inputs, and over the next ids as targets; both are views.

    Args:
        ids: [ids] of any dtype and device, a numpy array such as a ``numpy.memmap``, or the path of
            a file for :func:`open_ids`. Do not write to windows over a read-only array.
        length: Number of ids in a window.
        stride: Distance between the starts of windows; default: length, so that no id is read
            twice.
        dtype: Dtype of the ids in a file, as in :func:`open_ids`.

    Returns:
        Inputs and targets, [windows, length] each. Ids at the end that do not fill a window are
        omitted.

    Raises:
        ValueError: Too few ids for one window, or sizes below 1; or a file whose ids look like
            int64 without ``dtype``.
        TypeError: ``ids`` is of another type, or an array whose dtype torch does not support.

    Examples:
        >>> import torch, posembed as pe
        >>> inputs, targets = pe.data.windows(torch.arange(9), length=4, stride=2)
        >>> inputs.tolist()
        [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
        >>> targets[0].tolist()
        [1, 2, 3, 4]
    """
    ids = tensor_of(ids, dtype)
    length = whole("length", length, 1)
    stride = length if stride is None else whole("stride", stride, 1)
    if ids.dim() != 1 or len(ids) <= length:
        raise ValueError(f"ids: expected [count] with more than {length}, got {list(ids.shape)}")
    return ids[:-1].unfold(0, length, stride), ids[1:].unfold(0, length, stride)


class WindowDataset(Dataset[tuple[Tensor, Tensor]]):
    """Windows and their next-token targets for a ``torch.utils.data.DataLoader``.

    Stores a view of the ids. A file is read window by window, and raises FileFormatError if it was
    shortened meanwhile. Arguments are those of :func:`windows`.

    Examples:
        >>> import torch, posembed as pe
        >>> dataset = pe.data.WindowDataset(torch.arange(101, dtype=torch.int32), length=10)
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
        >>> inputs, targets = next(iter(loader))
        >>> inputs.shape, targets.dtype
        (torch.Size([4, 10]), torch.int64)
    """

    def __init__(
        self, ids: Ids, length: int, stride: int | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        inputs, targets = windows(ids, length, stride, dtype=dtype)
        step = length if stride is None else stride
        self._starts = range(0, len(inputs) * step, step)
        self._length, self._file = length, None
        if isinstance(ids, (str, os.PathLike)):
            self._file = IdFile(ids, dtype)
        else:
            self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [length], in int64 as losses require."""
        if self._file is None:
            return self.inputs[index].long(), self.targets[index].long()
        start = self._starts[index]
        if isinstance(start, range):
            raise TypeError(f"index: expected an integer for windows of a file, got {index}")
        ids = self._file.read(start, self._length + 1).long()
        return ids[:-1], ids[1:].clone()


def mask_tokens(
    ids: Tensor,
    *,
    mask_id: int,
    num_embeddings: int,
    special_ids: Iterable[int] = (),
    probability: float = 0.15,
    ignore_index: int = -100,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Masks ids as in BERT training; the original ids are the targets.

    Of the chosen ids, 80 % become ``mask_id``, 10 % become a random id, and 10 % do not change.

    Args:
        ids: int32 or int64 [...].
        mask_id: The id of the mask token.
        num_embeddings: Exclusive upper bound of random ids.
        special_ids: Ids that are never chosen, such as padding and separators.
        probability: Fraction of the other ids to choose.
        ignore_index: Target for ids that were not chosen, as in ``cross_entropy``.
        generator: Random generator on the device of the ids; default: torch's default generator.

    Returns:
        Inputs [...] in the dtype of the ids, and targets [...] in int64.

    Raises:
        ValueError: ``probability`` is not between 0 and 1.

    Examples:
        >>> import torch, posembed as pe
        >>> ids = torch.tensor([101, 2023, 2003, 102])
        >>> inputs, targets = pe.data.mask_tokens(
        ...     ids, mask_id=103, num_embeddings=30522, special_ids=(101, 102), probability=1.0)
        >>> targets.tolist()
        [-100, 2023, 2003, -100]
    """
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"probability: expected 0 to 1, got {probability}")

    def draw() -> Tensor:
        return torch.rand(ids.shape, device=ids.device, generator=generator)

    special = torch.isin(ids, torch.tensor([*special_ids], dtype=ids.dtype, device=ids.device))
    chosen = (draw() < probability) & ~special
    fate = draw()
    any_id = torch.randint(
        num_embeddings, ids.shape, dtype=ids.dtype, device=ids.device, generator=generator
    )
    inputs = torch.where(chosen & (fate < 0.8), mask_id, ids)
    inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), any_id, inputs)
    return inputs, torch.where(chosen, ids.long(), ignore_index)
