"""SinusoidalPositionalEmbedding: sines and cosines of the position, added to embeddings.

Vaswani et al., "Attention Is All You Need", arXiv:1706.03762.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posembed import functional
from posembed.functional import Device
from posembed.functional._offset import additive_layout, positions_from, sequence_first
from posembed.functional._options import AdditiveLayout
from posembed.functional._sinusoidal import cells, waved
from posembed.glue.tracers import Leaf
from posembed.glue.validation import flag, written
from posembed.specifications import SinusoidalSpec


class SinusoidalPositionalEmbedding(Leaf, nn.Module):
    """Adds sinusoidal encodings of positions. Its only tensor is a learned scale, if any.

    There is no table and no maximum position; positions may be fractional. Errors are below 1.5e-7
    up to position ``2 ** 31`` and grow beyond it; use float64 data there.

    Args:
        embedding_dim, base, cos_first, shift, scale, position_scale, padding_idx: See
            :class:`posembed.SinusoidalSpec`.
        preset: For sequences or for grids. ``"vaswani"``: sine and cosine interleaved, frequency
            ``base ** (-2i / dim)``.
            ``"marian"``: the same frequencies, sines in the first half, cosines in the second.
            ``"tensor2tensor"``, ``"ddpm"``: halves, frequency ``base ** (-i / (dim / 2 - 1))``.
            ``"fairseq"``: the same, with padding_idx 1 (M2M100, NLLB).
            Two axes, rows and columns: ``"detr"``, ``"sam2"``: "vaswani" of the rows, then of the
            columns, positions from 1 scaled to 2 pi. ``"mae"``: "marian" of the columns, then of
            the rows, positions from 0. ``"sd3"``: the same in the middle of 192 x 192 cells, scaled
            to 64. ``"pixart"``: the same, scaled to 32. Three axes: ``"cogvideox"``: "marian" of
            frames (a quarter of the components), columns and rows, which are divided by 1.875.
        axes, widths, start, length, interpolation_scale, max_size: Blocks of columns, and the
            positions of a grid's cells; see :class:`posembed.SinusoidalSpec`. Default: the
            preset's.
        layout: Order of x's dimensions: "bsd" [batch, seq, embedding_dim], or "sbd" [seq, batch,
            embedding_dim], the default of ``torch.nn.Transformer``.
        learned_scale: Train the scale: the attribute ``scale`` is then a parameter [1] initialised
            to the argument. Otherwise the attribute is None, and the number is ``spec.scale``.
        device, dtype: Device and dtype of the learned scale.

    Examples:
        >>> import torch, posembed as pe
        >>> position = pe.SinusoidalPositionalEmbedding(512)
        >>> y = position(torch.randn(2, 16, 512), offset=100)
        >>> ids = torch.tensor([[5, 6, 1]])  # 1 is padding
        >>> places = pe.functional.fairseq_positions(ids, padding_idx=1)
        >>> pe.SinusoidalPositionalEmbedding(4, preset="fairseq").encode(places)[0, 2].abs()
        tensor([0., 0., 0., 0.])
        >>> first = pe.SinusoidalPositionalEmbedding(512, layout="sbd")
        >>> layer = torch.nn.TransformerEncoderLayer(512, 8)  # without batch_first
        >>> y = layer(first(torch.randn(16, 2, 512)))
        >>> patches = pe.SinusoidalPositionalEmbedding(768, preset="mae")
        >>> y = patches(torch.randn(2, 14 * 14, 768), grid=(14, 14))
    """

    layout: AdditiveLayout = "bsd"  # of modules that an earlier version has pickled

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
        axes: Sequence[int] | None = None,
        widths: Sequence[int] | None = None,
        start: float | None = None,
        length: float | None = None,
        interpolation_scale: Sequence[float] | None = None,
        max_size: int | None = None,
        layout: AdditiveLayout = "bsd",
        learned_scale: bool = False,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        spec = SinusoidalSpec(
            embedding_dim,
            base=base,
            preset=preset,
            cos_first=cos_first,
            shift=shift,
            scale=scale,
            position_scale=position_scale,
            padding_idx=padding_idx,
            axes=axes,
            widths=widths,
            start=start,
            length=length,
            interpolation_scale=interpolation_scale,
            max_size=max_size,
        )
        self.initial_scale = spec.scale
        self.layout = additive_layout(layout)
        self.scale: nn.Parameter | None = None
        if flag("learned_scale", learned_scale):
            spec = dataclasses.replace(spec, scale=1.0)
            # One element, because FSDP cannot shard a scalar.
            self.scale = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.spec = spec
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets a learned scale to its initial value, ``scale``."""
        if self.scale is not None:
            nn.init.constant_(self.scale, self.initial_scale)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        grid: Sequence[int] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Adds encodings to x; see :func:`posembed.functional.sinusoidal`.

        ``offset`` may be int32 or int64 [batch]: the position of each sample's first token; beside
        ``cu_seqlens`` also [documents]: that of each document's. With several axes, ``grid`` and
        ``mask`` give the positions; see :func:`posembed.functional.sinusoidal_grid_positions`.
        """
        if grid is not None:
            if positions is not None:
                raise ValueError("positions: expected None beside a grid")
            positions = cells(x, grid, mask, self.spec.text)
        elif mask is not None:
            raise ValueError("mask: expected None without a grid")
        elif self.spec.block_texts and positions is not None and positions.dim() == 2:
            positions = positions.unsqueeze(1)
        if self.layout == "sbd" and x.dim() == 3:
            if not self.spec.block_texts:
                positions = sequence_first(x, positions, offset, cu_seqlens)
                offset, cu_seqlens = 0, None
            elif positions is not None:  # [axes, batch or 1, seq]
                positions = positions.transpose(-1, -2).expand(-1, -1, x.shape[1])
        if isinstance(offset, Tensor) or cu_seqlens is not None:
            positions = positions_from(offset, positions, x, cu_seqlens=cu_seqlens)
            offset = 0
        return waved(x, self.spec.text, positions, offset, self.scale)

    def encode(self, positions: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """The encodings of positions; see :func:`posembed.functional.sinusoidal_encode`."""
        return functional.sinusoidal_encode(positions, self.scale, spec=self.spec, dtype=dtype)

    def encode_grid(
        self,
        grid: Sequence[int],
        mask: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: Device | None = None,
    ) -> Tensor:
        """The encodings of a grid's cells, [1 or batch, cells, embedding_dim].

        Arguments are as in :func:`posembed.functional.sinusoidal_grid_positions`.

        Examples:
            >>> import torch, posembed as pe
            >>> detr = pe.SinusoidalPositionalEmbedding(256, preset="detr")
            >>> detr.encode_grid((25, 34)).shape
            torch.Size([1, 850, 256])
        """
        positions = functional.sinusoidal_grid_positions(grid, mask, spec=self.spec, device=device)
        return self.encode(positions, dtype=dtype)

    def shift_matrix(self, distance: float) -> Tensor:
        """The matrix M with ``encode(p + distance) == encode(p) @ M.T``, except for padding.

        See :func:`posembed.functional.sinusoidal_shift_matrix`.
        """
        return functional.sinusoidal_shift_matrix(distance, spec=self.spec)

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        spec = dataclasses.replace(self.spec, scale=self.initial_scale)
        text = f"{spec.embedding_dim}, base={spec.base:g}, preset={spec.preset!r}"
        usual: dict[str, Any] = {"cos_first": None, "shift": None, "scale": 1.0}
        text = written(spec, text, **usual, position_scale=1, padding_idx=None)
        text += ", learned_scale=True" * (self.scale is not None)
        grids = ("axes", "widths", "start", "length", "interpolation_scale", "max_size")
        return written(self, written(spec, text, **dict.fromkeys(grids)), layout="bsd")
