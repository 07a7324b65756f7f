from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.nn.cpp import ModuleWrapper

from posembed._build_info import BuildInfo
from posembed.pretrained import Format
from posembed.specification import RotarySpec

def build_info() -> BuildInfo: ...
def empty_cache() -> int: ...
def prefer_huge_pages(table: Tensor) -> None: ...
def set_cache_limit(bytes: int) -> int: ...
def rotary(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    spec: str,
    layout: str,
    offset: int,
    inverse: bool,
    frequencies: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def rotary_(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    spec: str,
    layout: str,
    offset: int,
    inverse: bool,
    frequencies: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None: ...
def open_vectors(
    path: str | bytes | PathLike[str], words: list[str], check_utf8: bool
) -> VectorFile: ...

_Progress = Callable[[int, int], None] | None

class Vocabulary:
    def __init__(self, words: list[str]) -> None: ...

class VectorFile:
    def format(self) -> Format: ...
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> list[int]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def words(self) -> list[str]: ...
    def tensor(self, name: str, dtype: torch.dtype | None, progress: _Progress) -> Tensor: ...
    def table(self, tensor: str, dtype: torch.dtype | None, progress: _Progress) -> Tensor: ...
    def rows(
        self,
        vocabulary: Vocabulary,
        tensor: str,
        dtype: torch.dtype | None,
        missing: str,
        progress: _Progress,
    ) -> tuple[Tensor, tuple[int, list[str], list[str]]]: ...
    def coverage(
        self, vocabulary: Vocabulary, progress: _Progress
    ) -> tuple[int, list[str], list[str]]: ...

def rotary_out(
    query_out: Tensor,
    key_out: Tensor | None,
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    spec: str,
    layout: str,
    offset: int,
    inverse: bool,
    frequencies: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None: ...

class ALiBi(ModuleWrapper):
    def __init__(
        self,
        num_heads: int,
        *,
        slopes: str | Tensor = "press",
        max_bias: float = 8.0,
        causal: bool = True,
        total_heads: int | None = None,
        head_start: int = 0,
        factor: float = 1.0,
        train_length: int | None = None,
        learned: bool = False,
    ) -> None: ...
    @staticmethod
    def from_preset(name: str, num_heads: int, *, head_dim: int | None = None) -> ALiBi: ...
    def alibi_slopes(
        self, batch_size: int | None = None, key_length: int | None = None
    ) -> Tensor: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def add_(self, *args: Any, **kwargs: Any) -> None: ...
    def softmax(self, *args: Any, **kwargs: Any) -> Any: ...
    def softmax_(self, *args: Any, **kwargs: Any) -> None: ...
    def lse_correction(self, *args: Any, **kwargs: Any) -> Any: ...
    def attention(self, *args: Any, **kwargs: Any) -> Any: ...

class InputEmbedding(ModuleWrapper):
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        positions: str | None = "learned",
        max_positions: int | None = None,
        num_types: int = 0,
        scale: float | str = 1.0,
        norm: str | None = None,
        eps: float = 1e-5,
        dropout: float = 0.0,
        padding_idx: int | None = None,
        gradient: str = "dense",
    ) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...

class LearnedPositionalEmbedding(ModuleWrapper):
    def __init__(self, max_positions: int, embedding_dim: int, *, first_row: int = 0) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def encode(self, positions: Tensor) -> Any: ...

class RotaryEmbedding(ModuleWrapper):
    def __init__(
        self,
        spec_or_head_dim: RotarySpec | int,
        *,
        layout: str = "bshd",
        learned_frequencies: bool = False,
        **spec_options: Any,
    ) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def rotate_(self, *args: Any, **kwargs: Any) -> None: ...
    def rerotate_(
        self,
        key: Tensor,
        old_positions: Tensor,
        new_positions: Tensor,
        *,
        new_spec: RotarySpec | None = None,
    ) -> None: ...
    def resolve(self, seq_len: int) -> RotaryEmbedding: ...

class SinusoidalPositionalEmbedding(ModuleWrapper):
    def __init__(
        self,
        embedding_dim: int,
        *,
        base: float = 10000.0,
        preset: str = "vaswani",
        cos_first: bool | None = None,
        shift: float | None = None,
        scale: float = 1.0,
    ) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def encode(self, *args: Any, **kwargs: Any) -> Any: ...
    def shift_matrix(self, distance: float) -> Any: ...

class TokenBag(ModuleWrapper):
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "sum",
        padding_idx: int | None = None,
        *,
        include_last_offset: bool = False,
        gradient: str = "dense",
    ) -> None: ...
    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Any: ...

class TokenEmbedding(ModuleWrapper):
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        scale: float | str = 1.0,
        gradient: str = "dense",
    ) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    @staticmethod
    def from_file(
        path: str | bytes | PathLike[str],
        *,
        tensor: str = "",
        vocabulary: list[str] | None = None,
        missing: str = "mean",
        dtype: torch.dtype | None = None,
        freeze: bool = True,
    ) -> TokenEmbedding: ...
    def resize(
        self,
        num_embeddings: int,
        initialization: str | Tensor = "mean",
        *,
        covariance_scale: float = 1e-9,
        generator: torch.Generator | None = None,
    ) -> None: ...
    def logits(self, hidden: Tensor) -> Any: ...
