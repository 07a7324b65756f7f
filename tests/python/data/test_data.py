"""Tests that windows are views of files, and that masks have BERT's shares."""

import os
import pickle
from pathlib import Path

import numpy as np
import posembed as pe
import pytest
import torch
from support.refusals import refused
from support.resident import assert_little_is_left
from torch.utils.data import DataLoader

TYPES = {"uint16": torch.uint16, "int32": torch.int32, "int64": torch.int64}
types = pytest.mark.parametrize("name", TYPES)


def file_of(folder: Path, count: int, name: str) -> Path:
    path = folder / f"{name}.bin"
    np.arange(count, dtype=name).tofile(path)
    return path


@pytest.mark.parametrize(("length", "stride"), [(4, None), (4, 1), (4, 4), (3, 5), (19, 1)])
def test_windows_are_what_a_loop_cuts(length: int, stride: int | None) -> None:
    ids = torch.arange(20)
    inputs, targets = pe.data.windows(ids, length, stride)
    starts = range(0, 20 - length, stride or length)
    assert inputs.tolist() == [list(range(start, start + length)) for start in starts]
    assert torch.equal(targets, inputs + 1)


def test_windows_copy_nothing() -> None:
    ids = torch.arange(20)
    for part in pe.data.windows(ids, 6, 2):
        assert part.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()


@types
def test_windows_of_a_file(tmp_path: Path, name: str) -> None:
    path = file_of(tmp_path, 11, name)
    inputs, targets = pe.data.windows(path, 5, dtype=TYPES[name])
    assert inputs.dtype == TYPES[name]
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert targets.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert inputs.untyped_storage().data_ptr() == targets.untyped_storage().data_ptr()


def test_a_large_file_is_mapped_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2**30)  # a hole, which takes no space on disk
    kept = []

    def read() -> None:
        inputs, _ = pe.data.windows(path, 1024, 1, dtype=torch.uint16)
        assert len(inputs) == 2**29 - 1024
        assert int(inputs[-1].long().sum()) == 0
        kept.append(inputs)

    assert_little_is_left(read, 1, 2**26)


def of_numpy(kind: str, path: Path) -> np.ndarray:
    """The ids of a file as an array in memory, or mapped in a mode."""
    if kind == "array":
        return np.fromfile(path, dtype="uint16")
    return np.memmap(path, dtype="uint16", mode=kind)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["array", "r", "r+", "c"])
@pytest.mark.parametrize("step", [1, 2])
def test_windows_of_numpy_copy_nothing(tmp_path: Path, kind: str, step: int) -> None:
    ids = of_numpy(kind, file_of(tmp_path, 18, "uint16"))[::step]
    inputs, targets = pe.data.windows(ids, 4)
    assert inputs.data_ptr() == ids.ctypes.data
    assert inputs[1].tolist() == [4 * step, 5 * step, 6 * step, 7 * step]
    assert torch.equal(targets.int(), inputs.int() + step)
    dataset = pe.data.WindowDataset(ids, 4)
    assert dataset[0][0].tolist() == [0, step, 2 * step, 3 * step]
    assert dataset.inputs.data_ptr() == ids.ctypes.data


@pytest.mark.filterwarnings("error")
def test_files_are_closed(tmp_path: Path) -> None:
    path = file_of(tmp_path, 18, "int32")
    assert pe.data.open_ids(path, copy=True)[3] == 3
    dataset = pe.data.WindowDataset(path, 4)
    assert dataset[1][0].tolist() == [4, 5, 6, 7]
    with pytest.raises(TypeError, match="index: expected an integer for windows of a file"):
        dataset[0:2]
    del dataset
    assert str(path) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())


def test_a_short_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may read less than it is asked for, and end within an id."""
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: read(file, [parts[0][:7]], at))
    path = file_of(tmp_path, 101, "int32")
    assert pe.data.open_ids(path, copy=True).tolist() == list(range(101))
    dataset = pe.data.WindowDataset(path, 10)
    assert dataset[9][1].tolist() == list(range(91, 101))


def test_writing_does_not_reach_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, 4, "int32")
    pe.data.open_ids(path)[0] = 7
    assert pe.data.open_ids(path).tolist() == [0, 1, 2, 3]


@types
def test_ids_there_and_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ids.bin"
    parts = [[1, 2], torch.tensor([3, 65535 if name == "uint16" else 2**31 - 1]), []]
    assert pe.data.save_ids(path, parts, TYPES[name]) == 4
    assert pe.data.open_ids(path, TYPES[name]).tolist() == [1, 2, 3, int(parts[1][1])]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda p: pe.data.windows(torch.arange(5), 5), ValueError, r"ids: expected [count] with more than 5"),
        (lambda p: pe.data.windows(torch.zeros(2, 9), 5), ValueError, r"got \[2, 9\]"),
        (lambda p: pe.data.windows(torch.arange(5), 0), ValueError, "length: expected 1 or more, got 0"),
        (lambda p: pe.data.windows(torch.arange(5), 2, 0), ValueError, "stride: expected 1 or more, got 0"),
        (lambda p: pe.data.windows([1, 2, 3], 2), TypeError, "ids: expected a tensor, a numpy array or a path, got list"),
        (lambda p: pe.data.open_ids(p / "odd"), ValueError, "expected ids of 4 bytes, found 7"),
        (lambda p: pe.data.open_ids(p / "empty"), ValueError, "expected ids of 4 bytes, found 0"),
        (lambda p: pe.data.open_ids(p / "odd", torch.float32), TypeError, "dtype: expected torch"),
        (lambda p: pe.data.open_ids(p / "none"), FileNotFoundError, "none"),
        (lambda p: pe.data.save_ids(p / "x", [[70000]], torch.uint16), ValueError, "0 to 65535"),
        (lambda p: pe.data.save_ids(p / "x", [[-1]], torch.uint16), ValueError, "got -1 to -1"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, call: object, kind: type, message: str) -> None:
    (tmp_path / "odd").write_bytes(bytes(7))
    (tmp_path / "empty").touch()
    refused((call, kind, message), given=(tmp_path,))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gives_every_window_once(tmp_path: Path, workers: int) -> None:
    path = file_of(tmp_path, 101, "uint16")
    dataset = pe.data.WindowDataset(path, 10, dtype=torch.uint16)
    assert len(dataset) == 10
    seen = []
    for inputs, targets in DataLoader(dataset, 4, shuffle=True, num_workers=workers):
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)
        seen += inputs.flatten().tolist()
    assert sorted(seen) == list(range(100))


def test_ids_of_a_dataset_go_into_a_model(tmp_path: Path) -> None:
    dataset = pe.data.WindowDataset(file_of(tmp_path, 33, "uint16"), 8, dtype=torch.uint16)
    token = pe.TokenEmbedding(33, 4)
    inputs, targets = next(iter(DataLoader(dataset, 4)))
    loss = torch.nn.functional.cross_entropy(token.logits(token(inputs)).transpose(1, 2), targets)
    assert loss.isfinite()


# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_masks_have_their_shares(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.arange(1000, device=device, dtype=dtype).repeat(400)
    special = range(10)
    inputs, targets = pe.data.mask_tokens(
        ids, mask_id=5000, num_embeddings=4000, special_ids=special, generator=generator
    )
    assert inputs.dtype == dtype
    assert targets.dtype == torch.int64
    chosen = targets != -100
    assert torch.equal(targets[chosen], ids[chosen].long())
    assert torch.equal(inputs[~chosen], ids[~chosen])
    assert not chosen[torch.isin(ids, torch.arange(10, device=device, dtype=dtype))].any()

    # Shares of n draws deviate from p by 5 sqrt(p (1 - p) / n) once in a million times.
    def near(share: torch.Tensor, expected: float, draws: int) -> bool:
        return abs(share.item() - expected) < 5 * (expected * (1 - expected) / draws) ** 0.5

    eligible, number = 396_000, int(chosen.sum())
    assert near(chosen.sum() / eligible, 0.15, eligible)
    masked = inputs[chosen] == 5000
    kept = inputs[chosen] == ids[chosen]
    assert near(masked.double().mean(), 0.8, number)
    assert near(kept.double().mean(), 0.1 + 0.1 / 4000, number)
    other = inputs[chosen][~masked & ~kept]
    assert other.min() < 40
    assert 3960 < other.max() < 4000


def test_masks_repeat_with_their_generator() -> None:
    ids = torch.arange(200).view(2, 100)
    options = {"mask_id": 0, "num_embeddings": 200}
    one, two = (pe.data.mask_tokens(ids, **options, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    other = pe.data.mask_tokens(ids, **options, generator=torch.Generator().manual_seed(4))
    assert not torch.equal(one[1], other[1])


def test_masks_of_nothing_and_of_all() -> None:
    ids = torch.arange(50)
    inputs, targets = pe.data.mask_tokens(ids, mask_id=0, num_embeddings=50, probability=0.0)
    assert torch.equal(inputs, ids)
    assert (targets == -100).all()
    _, targets = pe.data.mask_tokens(
        ids, mask_id=0, num_embeddings=50, probability=1.0, special_ids=[7], ignore_index=-1
    )
    assert targets.tolist() == [-1 if i == 7 else i for i in range(50)]
    refused((lambda: pe.data.mask_tokens(ids, mask_id=0, num_embeddings=50, probability=1.5), ValueError, "probability: expected 0 to 1, got 1.5"))  # fmt: skip


def test_the_dtype_of_an_array_file_is_its_own(tmp_path: Path) -> None:
    for name, dtype in TYPES.items():
        path = tmp_path / f"{name}.npy"
        np.save(path, np.arange(100, dtype=name))
        assert torch.equal(pe.data.open_ids(path), torch.arange(100).to(dtype))
        assert torch.equal(pe.data.open_ids(path, dtype, copy=True), torch.arange(100).to(dtype))
        inputs, targets = pe.data.windows(path, 8)
        assert inputs.dtype == dtype
        assert targets.long()[2].tolist() == [*range(17, 25)]
        dataset = pickle.loads(pickle.dumps(pe.data.WindowDataset(path, 8)))
        assert torch.equal(dataset[3][0], torch.arange(24, 32))
    with pytest.raises(TypeError, match=r"^dtype: expected torch.int64, which .*npy says, got torch.int32"):
        pe.data.open_ids(tmp_path / "int64.npy", torch.int32)
    for array in (np.arange(9.0), np.arange(9, dtype=">i4"), np.arange(9, dtype="uint32")):
        np.save(tmp_path / "other.npy", array)
        refused((lambda: pe.data.open_ids(tmp_path / "other.npy"), TypeError, "expected uint16, int32 or int64, got"))  # fmt: skip
    (tmp_path / "broken.npy").write_bytes(b"no array")
    refused((lambda: pe.data.open_ids(tmp_path / "broken.npy"), pe.FileFormatError, "broken.npy: byte 0"))  # fmt: skip
    (tmp_path / "broken.npy").write_bytes(b"")
    np.save(tmp_path / "empty.npy", np.arange(0))
    for name in ("broken.npy", "empty.npy"):
        refused((lambda: pe.data.open_ids(tmp_path / name), ValueError, name))
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }\n"
    data = np.arange(5, 7).tobytes()
    odd = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data
    assert (len(odd) - 16) % 8 != 0
    (tmp_path / "odd.npy").write_bytes(odd)
    assert pe.data.open_ids(tmp_path / "odd.npy", copy=True).tolist() == [5, 6]
    refused((lambda: pe.data.open_ids(tmp_path / "odd.npy"), pe.FileFormatError, "copy=True"))


def test_ids_of_another_dtype_are_refused_unless_it_is_said(tmp_path: Path) -> None:
    """int64, numpy's default, read as int32 has a 0 between all ids, which is a valid id."""
    path = tmp_path / "ids.bin"
    np.arange(1, 33).tofile(path)  # 64 numbers of 32 bits
    for read in (pe.data.open_ids, lambda p: pe.data.windows(p, 8), lambda p: pe.data.WindowDataset(p, 8)):
        with pytest.raises(ValueError, match=r"^dtype: expected to be given .* dtype=torch.int64"):
            read(path)
    assert pe.data.open_ids(path, torch.int64).tolist() == [*range(1, 33)]
    assert pe.data.open_ids(path, torch.int32)[:4].tolist() == [1, 0, 2, 0]  # the caller is believed
    np.arange(1, 32).tofile(path)
    assert len(pe.data.open_ids(path)) == 62
    np.array([7, 0] * 31 + [7, 1], dtype=np.int32).tofile(path)
    assert len(pe.data.open_ids(path)) == 64
