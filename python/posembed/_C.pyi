from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.cpp import ModuleWrapper

from posembed.ngram import NgramSpec
from posembed.pretrained import Format
from posembed.specification import RotarySpec

def open_vectors(
    path: str | bytes | PathLike[str], words: list[str], check_utf8: bool, on_bad_row: str
) -> OpenFile: ...
def rowwise_codes(packed: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]: ...
def table_formats() -> str: ...

_Progress = Callable[[int, int], None] | None

class Vocabulary:
    def __init__(self, words: list[str]) -> None: ...

class VectorFile:
    def format(self) -> Format: ...
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> list[int]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def words(self) -> list[str]: ...
    def skipped(self) -> tuple[int, list[tuple[int, int, str, str]]]: ...
    def tensor(
        self, name: str, dtype: torch.dtype | None, progress: _Progress, copy: bool
    ) -> Tensor: ...
    def table(self, tensor: str, dtype: torch.dtype | None, progress: _Progress) -> Tensor: ...
    def token_rows(
        self, tensor: str, dtype: torch.dtype | None, by_word: bool
    ) -> Tensor | None: ...
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

class OpenFile(VectorFile):
    def codes(self, tensor: str) -> tuple[str, str, str, dict[str, str], str] | None: ...

class FileRows:
    def __init__(self, path: str | bytes | PathLike[str], tensors: Sequence[str]) -> None: ...
    def num_embeddings(self) -> int: ...
    def embedding_dim(self) -> int: ...
    def dtype(self) -> torch.dtype: ...
    def bytes_in_files(self) -> int: ...
    def bytes_in_memory(self) -> int: ...
    def codes(self) -> tuple[Tensor, Tensor, int, int]: ...
    def split(self, parts: int) -> FileRows | None: ...
    def prefetch(self, ids: Tensor) -> None: ...
    def misses(self) -> int: ...
    def handle(self) -> int: ...

class ALiBi(ModuleWrapper):
    def __init__(
        self,
        num_heads: int,
        *,
        slopes: str | Tensor = "paper",
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
    def forward(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        query_offset: int | Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        apply_mask: bool = True,
        sample_slopes: Tensor | None = None,
    ) -> Tensor: ...
    def add_(
        self,
        scores: Tensor,
        *,
        scale: float | None = None,
        query_offset: int | Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        apply_mask: bool = True,
        sample_slopes: Tensor | None = None,
    ) -> Tensor: ...
    def softmax(
        self,
        scores: Tensor,
        *,
        scale: float | None = None,
        query_offset: int | Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        apply_mask: bool = True,
        sample_slopes: Tensor | None = None,
    ) -> Tensor: ...
    def softmax_(
        self,
        scores: Tensor,
        *,
        scale: float | None = None,
        query_offset: int | Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        apply_mask: bool = True,
        sample_slopes: Tensor | None = None,
    ) -> Tensor: ...
    def lse_correction(
        self, query_length: int, *, query_start: int, key_start: int, form: str = "distance"
    ) -> Tensor: ...
    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        query_offset: int | Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        apply_mask: bool = True,
        sample_slopes: Tensor | None = None,
    ) -> Tensor: ...

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
        eps: float | None = None,
        dropout: float = 0.0,
        padding_idx: int | None = None,
        position_rule: str = "consecutive",
        token_dim: int | None = None,
        output_dim: int | None = None,
        gradient: str = "dense",
    ) -> None: ...
    def forward(
        self,
        ids: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        offset: int | Tensor = 0,
        attention_mask: Tensor | None = None,
        seed: Tensor | None = None,
        first_token: int = 0,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor: ...
    def with_embeddings(self, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor: ...

class LearnedPositionalEmbedding(ModuleWrapper):
    def __init__(
        self,
        max_positions: int | None = None,
        embedding_dim: int | None = None,
        *,
        first_row: int = 0,
        grid: tuple[int, int] | None = None,
        prefix_tokens: int = 0,
        resampling: str = "bicubic",
        align_corners: bool = False,
        antialias: bool = False,
        scale_offset: float = 0.0,
        layout: str = "bsd",
    ) -> None: ...
    @staticmethod
    def from_file(
        path: str | bytes | PathLike[str],
        *,
        grid: tuple[int, int],
        tensor: str = "",
        freeze: bool = True,
        resampling: str = "bicubic",
        align_corners: bool = False,
        antialias: bool = False,
        scale_offset: float = 0.0,
    ) -> LearnedPositionalEmbedding: ...
    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        grid: tuple[int, int] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor: ...
    def resampled(self, grid: tuple[int, int]) -> Tensor: ...
    def encode(self, positions: Tensor) -> Tensor: ...
    @overload
    def extend(self, max_positions: int, method: str = "linear") -> None: ...
    @overload
    def extend(
        self, grid: tuple[int, int], *, from_grid: tuple[int, int] | None = None
    ) -> None: ...

class RelativePositionBias(ModuleWrapper):
    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        buckets: str = "t5",
        window: tuple[int, ...] | None = None,
        class_token: bool = False,
        mlp_dim: int = 0,
        mlp_rule: str = "swin",
        pretrained_window: tuple[int, ...] | None = None,
        resampling: str = "bilinear",
        align_corners: bool = False,
        antialias: bool = False,
    ) -> None: ...
    def forward(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        query_offset: int | Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        apply_mask: bool = True,
    ) -> Tensor: ...
    def of_window(self, window: tuple[int, ...] | None = None) -> Tensor: ...
    def table(self, window: tuple[int, ...] | None = None) -> Tensor: ...
    def extend(self, window: tuple[int, ...]) -> None: ...

class RelativeLogits(ModuleWrapper):
    def __init__(
        self,
        num_buckets: int | Sequence[int],
        head_dim: int,
        *,
        num_heads: int | None = None,
        buckets: str = "clipped",
        max_distance: int = 128,
        bidirectional: bool = True,
        causal: bool = False,
        by: str = "query",
        scale: float = 1.0,
    ) -> None: ...
    def forward(
        self,
        query: Tensor,
        other_length: int | None = None,
        *,
        scores: Tensor | None = None,
        query_offset: int | Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        apply_mask: bool = True,
    ) -> Tensor: ...
    def add_(
        self,
        scores: Tensor,
        query: Tensor,
        *,
        query_offset: int | Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        apply_mask: bool = True,
    ) -> Tensor: ...

class RotaryEmbedding(ModuleWrapper):
    def __init__(
        self,
        spec_or_head_dim: RotarySpec | int,
        *,
        layout: str = "bshd",
        learned_frequencies: bool = False,
        frequency_sizes: Sequence[int] = (),
        heads: int | None = None,
        key_heads: int | None = None,
        **spec_options: Any,
    ) -> None: ...
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        inverse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def rotate_(
        self,
        query: Tensor,
        key: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        inverse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def rerotate_(
        self,
        key: Tensor,
        old_positions: Tensor,
        new_positions: Tensor,
        *,
        new_spec: RotarySpec | None = None,
    ) -> Tensor: ...
    def resolve(self, seq_len: int) -> RotaryEmbedding: ...

class FourierFeatures(ModuleWrapper):
    def __init__(
        self,
        frequencies: Tensor | None = None,
        *,
        preset: str | None = None,
        octaves: int | None = None,
        bands: tuple[int, float] | None = None,
        random: tuple[int, int, float, int | None] | None = None,
        phases: Tensor | None = None,
        learned: bool | None = None,
        linear: bool | None = None,
        include_input: str | None = None,
        unit: str | None = None,
        waves: str | None = None,
        order: str | None = None,
        centred: bool | None = None,
    ) -> None: ...
    def forward(
        self, coordinates: Tensor, x: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor: ...

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
        position_scale: int = 1,
        padding_idx: int | None = None,
        learned_scale: bool = False,
        axes: Sequence[int] | None = None,
        widths: Sequence[int] | None = None,
        start: float | None = None,
        length: float | None = None,
        interpolation_scale: Sequence[float] | None = None,
        max_size: int | None = None,
        layout: str = "bsd",
    ) -> None: ...
    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        grid: Sequence[int] | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor: ...
    def encode_grid(
        self,
        grid: Sequence[int],
        mask: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor: ...
    def encode(self, positions: Tensor, *, dtype: torch.dtype | None = None) -> Tensor: ...
    def shift_matrix(self, distance: float) -> Tensor: ...

class NgramEmbedding(ModuleWrapper):
    def __init__(
        self,
        spec: NgramSpec,
        embedding_dim: int,
        *,
        summed: bool = False,
        gradient: str = "dense",
    ) -> None: ...
    def quantize(self, format: str = "float8", block: int = 0) -> None: ...
    def memory(self) -> int: ...
    def forward(
        self,
        ids: Tensor,
        history: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor: ...
    def next_history(
        self,
        ids: Tensor,
        history: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor: ...

class PerLayerEmbedding(ModuleWrapper):
    def __init__(
        self,
        num_embeddings: int,
        num_layers: int,
        layer_dim: int,
        *,
        scale: float | str = 1.0,
    ) -> None: ...
    def quantize(self, format: str = "float8", block: int = 0) -> None: ...
    def memory(self) -> int: ...
    def forward(self, ids: Tensor) -> Tensor: ...
    def layer(self, ids: Tensor, index: int) -> Tensor: ...

class FileTable(ModuleWrapper):
    def __init__(self, rows: FileRows, dtype: torch.dtype | None = None) -> None: ...
    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor: ...
    def prefetch(self, ids: Tensor, scale: float = 1.0) -> RowsAhead: ...

class RowsAhead:
    def take(self) -> Tensor: ...

class QuantizedTable(ModuleWrapper):
    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        biases: Tensor | None = None,
        *,
        block_rows: int = 1,
        block_columns: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None: ...
    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor: ...
    def dequantize(self) -> Tensor: ...

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
    def quantize(self, format: str = "float8", block: int = 0) -> None: ...
    def memory(self) -> int: ...
    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor: ...

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
        gradient: str | None = None,
    ) -> None: ...
    def quantize(self, format: str = "float8", block: int = 0) -> None: ...
    def memory(self) -> int: ...
    def forward(self, ids: Tensor) -> Tensor: ...
    @staticmethod
    def from_file(
        path: str | bytes | PathLike[str],
        *,
        tensor: str = "",
        vocabulary: list[str] | None = None,
        missing: str = "mean",
        dtype: torch.dtype | None = None,
        freeze: bool = True,
        on_bad_row: str = "raise",
    ) -> TokenEmbedding: ...
    def resize(
        self,
        num_embeddings: int,
        initialization: str | Tensor = "mean",
        *,
        pad_to_multiple_of: int = 1,
        covariance_scale: float = 1e-9,
        generator: torch.Generator | None = None,
    ) -> None: ...
    def select(self, rows: Tensor) -> None: ...
    def train_rows(self, rows: Tensor | None = None) -> None: ...
    def freeze_rows(self, rows: Tensor) -> None: ...
    def with_embeddings(self, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
