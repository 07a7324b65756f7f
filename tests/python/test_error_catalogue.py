"""Tests that users see the messages of the documentation's error catalogue."""

import re
from collections.abc import Callable
from pathlib import Path

import posembed as pe
import pytest
import torch
from posembed import _library
from torch import Tensor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "errors.md"
LLAMA = {"model_type": "llama", "head_dim": 64, "rope_theta": 1e4}
TYPES = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e3}}


def rotate(*shape: int, key: Tensor | None = None, **options: object) -> object:
    return pe.RotaryEmbedding(128)(torch.randn(*shape), key, **options)


def read(**fields: object) -> pe.RotarySpec:
    return pe.RotarySpec.from_huggingface({**LLAMA, **fields})


def overlapping() -> None:
    query = torch.randn(1, 4, 2, 128)
    pe.RotaryEmbedding(128).rotate_(query, query)


def in_training() -> None:
    pe.RotaryEmbedding(128).rotate_(torch.randn(1, 4, 2, 128, requires_grad=True))


def unknown_type() -> None:
    embed = pe.InputEmbedding(10, 8, positions=None, num_types=2)
    embed(torch.tensor([[1]]), types=torch.tensor([[2]]))


def axes(*shape: int, start: int = 0) -> Callable[[], object]:
    rope = pe.RotaryEmbedding(64, sections=pe.Sections((16, 8, 8)))
    positions = torch.arange(start, start + torch.Size(shape).numel()).view(shape)
    return lambda: rope(torch.randn(1, 4, 2, 64), positions=positions)


def file(ending: str, content: bytes) -> Callable[[Path], object]:
    def open_it(folder: Path) -> object:
        path = folder / f"vectors{ending}"
        path.write_bytes(content)
        return pe.pretrained.open_vectors(path).table()

    return open_it


def not_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "LIBRARY", folder / "libposembed.so")
    _library.load()


def other_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    _library.load()


def shortened(folder: Path) -> None:
    path = folder / "words.txt"
    path.write_text("the 0.5 0.25\n")
    words = pe.pretrained.open_vectors(path)
    path.write_text("")
    words.table()


# In the order of the page.
PROVOKED: dict[type[Exception], tuple[Callable[..., object], ...]] = {
    IndexError: (
        lambda: pe.TokenEmbedding(4, 2)(torch.tensor([7])),
        unknown_type,
        lambda: pe.TokenBag(4, 2)(torch.arange(4), torch.tensor([0, 3, 2])),
        lambda: pe.LearnedPositionalEmbedding(512, 8)(torch.randn(1, 513, 8)),
        lambda: rotate(1, 4, 2, 128, positions=torch.tensor([0, 1, -2, 3])),
        axes(3, 1, 4, start=-1),
    ),
    TypeError: (
        lambda: rotate(1, 4, 2, 128, positions=[0, 1, 2, 3]),
        lambda: rotate(1, 4, 2, 128, offset=1.5),
        lambda: pe.RotaryEmbedding(128, bse=500000.0),
        lambda: rotate(1, 4, 2, 128, position_ids=torch.arange(4)),
        lambda: pe.InputEmbedding(9, 8, max_positions=4)(torch.ones(1, 3), torch.ones(1, 3)),
        lambda: pe.RotaryEmbedding(128)(torch.ones(1, 4, 2, 128).to_sparse()),
        lambda: rotate(1, 4, 2, 128, positions=torch.arange(4.0).bfloat16()),
        lambda: pe.LearnedPositionalEmbedding(9, 8)(torch.randn(1, 4, 8), torch.arange(4.0)),
        lambda: pe.TokenEmbedding(4, 2)(torch.tensor([1.0])),
        lambda: pe.RotaryEmbedding(128)(torch.ones(1, 4, 2, 128, dtype=torch.int32)),
        lambda: rotate(1, 4, 2, 128, key=torch.ones(1, 4, 2, 128, dtype=torch.bfloat16)),
    ),
    ValueError: (
        lambda: pe.RotaryEmbedding(128)(
            torch.empty(1, 4, 2, 128, device="meta"), positions=torch.arange(4)
        ),
        lambda: rotate(1, 4, 2, 64),
        lambda: rotate(4, 2, 128),
        lambda: pe.RotaryEmbedding(128, layout="bsdh"),
        lambda: rotate(2, 8, 10, 128, key=torch.randn(2, 2, 10, 128)),
        lambda: rotate(1, 4, 2, 128, key=torch.randn(1, 5, 2, 128)),
        lambda: pe.RotaryEmbedding(64, heads=8)(torch.ones(1, 8, 3, 64)),
        lambda: rotate(1, 4, 2, 128, positions=torch.arange(3)),
        axes(2, 1, 4),
        axes(3, 4),
        lambda: pe.RotaryEmbedding(64, layout="thd")(
            torch.randn(7, 2, 64), cu_seqlens=torch.tensor([0, 3, 5])
        ),
        lambda: pe.positions.mrope(
            torch.tensor([[1] + [151655] * 6]),
            rule="qwen2_vl",
            image_grids=torch.tensor([[1, 4, 4]]),
        ),
        lambda: pe.permute_rotary_weight(torch.randn(100, 4), 3, to="interleaved"),
        lambda: pe.functional.alibi_softmax(torch.randn(2, 4, 3, 3), torch.rand(2, 4)),
        lambda: pe.RotaryEmbedding(64, layout="thd")(
            torch.randn(7, 2, 64), cu_seqlens=torch.tensor([0, 3, 7]), offset=torch.arange(3)
        ),
        lambda: pe.data.windows(torch.arange(3), 4),
        lambda: rotate(1, 4, 2, 128, positions=torch.arange(4), offset=3),
        lambda: pe.RotaryEmbedding(64, scaling=pe.DynamicNtkScaling(2.0, 2048))(
            torch.randn(1, 4, 2, 64)
        ),
        lambda: rotate(1, 4, 2, 128, seq_len=4),
        lambda: pe.RotaryEmbedding(64, scaling=pe.DynamicNtkScaling(2.0, 2048))(
            torch.randn(1, 4, 2, 64), seq_len=3
        ),
        lambda: pe.RotarySpec(64, scaling="yarn"),
        lambda: pe.YarnScaling(8192, 4),
        lambda: pe.RotarySpec(64, rotary_dim=128),
        lambda: pe.RotarySpec(64, numerics="fast"),
        lambda: pe.SinusoidalPositionalEmbedding(8, preset="t5"),
        lambda: pe.InputEmbedding(10, 8, positions="learned"),
        overlapping,
        in_training,
        lambda: read(model_type="mine"),
        lambda: read(model_type="bert"),
        lambda: read(rope_theta=None),
        lambda: read(rope_parameters={"rope_type": "default", "rope_theta": 2e4}),
        lambda: read(rope_scaling={"rope_type": "linear", "factor": 2.0, "fctor": 2.0}),
        lambda: read(rope_theta=None, layer_types=[*TYPES], rope_parameters=TYPES),
        lambda: pe.RotarySpec.from_huggingface({"vision_config": LLAMA}, part="tower"),
    ),
    pe.FileFormatError: (file(".txt", b"the 0.5 0.25\ncat 1\n"), file(".safetensors", b"\x10" + bytes(7) + b"{}"), shortened),
    ImportError: (not_built, other_torch),
}  # fmt: skip


def texts() -> list[str]:
    return re.findall(r"^\| `([^`]* [^`]*)` \|", PAGE.read_text(), re.MULTILINE)


CASES = [(kind, call) for kind, calls in PROVOKED.items() for call in calls]


def test_every_line_is_provoked() -> None:
    assert len(texts()) == len(CASES)


@pytest.mark.parametrize(("text", "case"), list(zip(texts(), CASES, strict=False)), ids=texts())
def test_error_says_what_the_page_shows(
    text: str, case: tuple[type[Exception], Callable[..., object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, call = case
    given = {"folder": tmp_path, "monkeypatch": monkeypatch}
    names = call.__code__.co_varnames[: call.__code__.co_argcount]
    with pytest.raises(kind) as caught:
        call(*(given[name] for name in names))
    parts = [re.escape(part.strip()) for part in text.split("…")]
    assert re.search(".*".join(parts), str(caught.value), re.DOTALL), str(caught.value)
    assert type(caught.value) is kind
