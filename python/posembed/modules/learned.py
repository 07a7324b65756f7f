"""LearnedPositionalEmbedding: a table with a learned row for each position.

Gehring et al., "Convolutional Sequence to Sequence Learning", arXiv:1705.03122; BERT, GPT-2, OPT,
RoBERTa. Of the patches of a picture: Dosovitskiy et al., "An Image is Worth 16x16 Words"
(ViT), arXiv:2010.11929.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posembed import functional, pretrained
from posembed.functional import Device, ResamplingMethod
from posembed.functional._learned import Grid, added, checked_grid, same_grid
from posembed.functional._offset import additive_layout, positions_from, sequence_first
from posembed.functional._options import AdditiveLayout
from posembed.glue.gate import check_tensors
from posembed.glue.memory import prefer_huge_pages
from posembed.glue.sharding import zero_row
from posembed.glue.tracers import Leaf
from posembed.glue.validation import flag, not_negative, one_of, whole, written
from posembed.modules.token import check_computed, check_sizes

# How programs name tables of positions in their checkpoints.
TABLE_NAMES = (
    "position_embeddings",
    "position_embedding",
    "position_embedding.weight",
    "pos_embed",
    "positional_embedding",
)


class LearnedPositionalEmbedding(Leaf, nn.Module):
    """Adds a learned vector for each position.

    ``weight`` is [first_row + max_positions, embedding_dim], initialised from N(0, 0.02) as
    in BERT and GPT-2.

    With ``grid``, the table belongs to the patches of a picture, row by row, after those of
    ``prefix_tokens``. It is resampled to the grid of another picture, at a call or once by
    :meth:`extend`, as ``torch.nn.functional.interpolate`` does. Its own grid is not resampled.

    Args:
        max_positions: Positions 0 to max_positions - 1 have a row; None: those of ``grid``.
        embedding_dim: Components of a row.
        first_row: The row of position 0: 2 for OPT, padding_idx + 1 for RoBERTa. Those
            models give padding negative positions, which select the rows before it.
        grid: Rows and columns of patches.
        prefix_tokens: Tokens before the patches that have a position, such as a class token.
        resampling: "bicubic" or "bilinear".
        align_corners: The corners of both grids are the same points.
        antialias: Average over all patches that a smaller grid merges.
        scale_offset: The scale is ``(new size + scale_offset) / size``: 0.1 in DINO and in DINOv2's
            own program, 0 in transformers.
        layout: Order of x's dimensions: "bsd" [batch, seq, embedding_dim], or "sbd" [seq, batch,
            embedding_dim], the default of ``torch.nn.Transformer``.
        device, dtype: Device and dtype of the table.

    Raises:
        ValueError: A size is negative, both or none of ``max_positions`` and ``grid`` are given, or
            an option is unknown.

    Examples:
        >>> import torch, posembed as pe
        >>> position = pe.LearnedPositionalEmbedding(512, 768)
        >>> position(torch.zeros(2, 16, 768)).shape
        torch.Size([2, 16, 768])
        >>> vit = pe.LearnedPositionalEmbedding(grid=(14, 14), prefix_tokens=1, embedding_dim=768)
        >>> vit(torch.zeros(2, 1 + 20 * 30, 768), grid=(20, 30)).shape
        torch.Size([2, 601, 768])
    """

    # Defaults of modules that were saved before there were grids.
    grid: Grid | None = None
    prefix_tokens: int = 0
    resampling: ResamplingMethod = "bicubic"
    align_corners: bool = False
    antialias: bool = False
    scale_offset: float = 0.0
    layout: AdditiveLayout = "bsd"

    def __init__(
        self,
        max_positions: int | None = None,
        embedding_dim: int | None = None,
        *,
        first_row: int = 0,
        grid: Grid | None = None,
        prefix_tokens: int = 0,
        resampling: ResamplingMethod = "bicubic",
        align_corners: bool = False,
        antialias: bool = False,
        scale_offset: float = 0.0,
        layout: AdditiveLayout = "bsd",
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        _padding_row: int | None = None,
    ) -> None:
        super().__init__()
        if embedding_dim is None:
            raise ValueError("embedding_dim: expected a whole number, got None")
        if (max_positions is None) == (grid is None):
            raise ValueError(f"max_positions: expected either it or grid, got {max_positions}")
        check_sizes(prefix_tokens=prefix_tokens, embedding_dim=embedding_dim, first_row=first_row)
        if grid is None and prefix_tokens != 0:
            raise ValueError(f"prefix_tokens: expected 0 without a grid, got {prefix_tokens}")
        self.grid = None if grid is None else checked_grid("grid", grid)
        if self.grid is not None:
            max_positions = prefix_tokens + self.grid[0] * self.grid[1]
        assert max_positions is not None
        check_sizes(max_positions=max_positions)
        self.max_positions = max_positions
        self.embedding_dim = embedding_dim
        self.first_row = first_row
        self.prefix_tokens = prefix_tokens
        one_of("resampling", resampling, "bicubic", "bilinear")
        self.resampling = resampling
        self.align_corners = flag("align_corners", align_corners)
        self.antialias = flag("antialias", antialias)
        self.scale_offset = not_negative("scale_offset", scale_offset)
        self.layout = additive_layout(layout)
        self._padding_row = _padding_row
        rows = first_row + max_positions
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, *, grid: Grid, freeze: bool = True, **options: Any
    ) -> LearnedPositionalEmbedding:
        """A table of a grid that shares a checkpoint's tensor.

        Args:
            embeddings: Floating-point [tokens, embedding_dim], as ViT, CLIP, SigLIP and DINOv2 have
                it, or [rows, columns, embedding_dim], as SAM has it; both also after a dimension of
                1.
            grid: Rows and columns of the last tokens; those before them are prefix tokens.
            freeze: Freeze the table: no gradient.
            options: How to resample it: options of the class.

        Raises:
            ValueError: The tensor has another shape.
            TypeError: It has another dtype.

        Examples:
            >>> import torch, posembed as pe
            >>> table = torch.zeros(1, 197, 768)
            >>> pe.LearnedPositionalEmbedding.from_pretrained(table, grid=(14, 14))
            LearnedPositionalEmbedding(197, 768, grid=(14, 14), prefix_tokens=1)
        """
        rows, columns = checked_grid("grid", grid)
        check_tensors(embeddings=embeddings)
        shape = list(embeddings.shape)
        check_computed("embeddings", embeddings)
        table = embeddings
        if table.dim() > 2 and shape[0] == 1:
            table = table.squeeze(0)
        if table.dim() == 3 and tuple(table.shape[:2]) == (rows, columns):
            table = table.flatten(0, 1)
        if table.dim() != 2 or len(table) < rows * columns:
            raise ValueError(
                f"embeddings: expected [tokens, embedding_dim] with at least the cells of grid "
                f"({rows}, {columns}), or [rows, columns, embedding_dim], got {shape}"
            )
        made = cls(
            grid=grid,
            prefix_tokens=len(table) - rows * columns,
            embedding_dim=table.shape[1],
            device="meta",
            **options,
        )
        made.weight = nn.Parameter(table.detach(), requires_grad=not flag("freeze", freeze))
        return made

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        grid: Grid,
        tensor: str | None = None,
        dtype: torch.dtype | None = None,
        freeze: bool = True,
        **options: Any,
    ) -> LearnedPositionalEmbedding:
        """A table of a grid from a checkpoint: safetensors, or their index.

        Args:
            path: The file.
            grid: Rows and columns of the table's last tokens; those before them are prefix tokens.
            tensor: Name of the table; default: the only tensor whose name ends in
                ``position_embeddings``, ``position_embedding.weight``, ``pos_embed`` or
                ``positional_embedding``.
            dtype: Dtype of the table; default: the file's.
            freeze: Freeze the table: no gradient.
            options: Options of :meth:`from_pretrained`.

        Raises:
            FileFormatError: The file is broken.
            ValueError: No name or several names fit; or the table has another shape.

        Examples:
            >>> import pathlib, tempfile, posembed as pe, safetensors.torch, torch
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "model.safetensors")
            ...     state = {"vit.embeddings.position_embeddings": torch.zeros(1, 197, 768)}
            ...     safetensors.torch.save_file(state, path)
            ...     pe.LearnedPositionalEmbedding.from_file(path, grid=(14, 14))
            LearnedPositionalEmbedding(197, 768, grid=(14, 14), prefix_tokens=1)
        """
        file = pretrained.open_vectors(path)
        if tensor is None:
            names = [name for name in file.names if name.endswith(TABLE_NAMES)]
            if len(names) != 1:
                known = f"several with usual names: {', '.join(names)}" if names else "none of them"
                raise ValueError(
                    f"tensor: expected the name of the table in {file.path}, which has {known}"
                )
            tensor = names[0]
        table = file.tensor(tensor, dtype, copy=True)
        return cls.from_pretrained(table, grid=grid, freeze=freeze, **options)

    def reset_parameters(self) -> None:
        """Draws the table from N(0, 0.02); zeroes the padding row of an InputEmbedding."""
        prefer_huge_pages(self.weight)
        nn.init.normal_(self.weight, std=0.02)
        if self._padding_row is not None:
            zero_row(self.weight, self._padding_row)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        grid: Grid | None = None,
    ) -> Tensor:
        """Adds the rows of the positions to x, which has the module's layout.

        Args:
            x: The embeddings to add to.
            positions: int32 or int64 [seq] or [batch, seq]; None: ``offset``, ``offset + 1``, and
                so on.
            offset: Position of the first token if ``positions`` is None; int32 or int64 [batch]:
                one per sample. ``prefix_tokens`` if x has the patches alone.
            cu_seqlens: int32 or int64 [documents + 1], where the batch is 1: the boundaries of
                packed documents. Positions restart in each, at ``offset`` or, if that is
                [documents], at its own.
            grid: Rows and columns of patches that the table is resampled to; default: its own.

        Raises:
            ValueError: ``grid`` is not a grid, or the table has none.
            IndexError: A position is out of range; the message names it.
        """
        if self.layout == "sbd" and x.dim() == 3:
            positions, offset = sequence_first(x, positions, offset, cu_seqlens), 0
        elif isinstance(offset, Tensor) or cu_seqlens is not None:
            positions = positions_from(offset, positions, x, cu_seqlens=cu_seqlens)
            offset = 0
        weight: Tensor = self._parameter("weight") if grid is None else self.resampled(grid)
        padding = self._padding_row
        if padding is not None and weight.requires_grad:  # the padding row gets no gradient
            rows = [weight[:padding], weight[padding : padding + 1].detach(), weight[padding + 1 :]]
            weight = torch.cat(rows)
        return added(x, weight, positions, offset, self.first_row)

    def resampled(self, grid: Grid) -> Tensor:
        """The table for another grid: [first_row + prefix_tokens + rows * columns, embedding_dim].

        Gradients flow to ``weight``.

        Examples:
            >>> import torch, posembed as pe
            >>> position = pe.LearnedPositionalEmbedding(grid=(16, 16), embedding_dim=8)
            >>> position.resampled((4, 6)).shape
            torch.Size([24, 8])
        """
        if self.grid is None:
            raise ValueError(f"grid: expected None, because the table has none, got {grid}")
        weight: Tensor = self._parameter("weight")
        # Symbolic sizes are resampled, which changes nothing without an offset.
        if tuple(grid) == self.grid if self.scale_offset else same_grid(grid, self.grid):
            return weight
        return functional.learned_resample(weight, self.grid, grid, **self._resampling())

    def packed(self, grids: Tensor, *, merge: int = 1, num_tokens: int | None = None) -> Tensor:
        """The rows of pictures of any sizes that are packed one after another.

        Args:
            grids: int32 or int64 [pictures, 3]: frames, rows and columns of patches, as
                ``image_grid_thw`` of processors; or [pictures, 2].
            merge: The tokens of a frame are ordered by squares of ``merge`` x ``merge``, which a
                vision tower merges later.
            num_tokens: The number of tokens, if known; otherwise it is read, for which a GPU is
                waited for and which a compiled program does not know.

        Returns:
            [tokens, embedding_dim], without prefix tokens. Gradients flow to ``weight``.

        Raises:
            ValueError: The table has no grid or averages (``antialias``), or ``grids`` do not fit
                ``merge`` or ``num_tokens`` (checked on the CPU).
            IndexError: On CUDA, ``grids`` do not fit.

        Examples:
            >>> import torch, posembed as pe
            >>> position = pe.LearnedPositionalEmbedding(grid=(16, 16), embedding_dim=8)
            >>> grids = torch.tensor([[1, 4, 6], [3, 10, 8]])  # a picture, and a video of 3 frames
            >>> position.packed(grids, merge=2).shape
            torch.Size([264, 8])
        """
        if self.grid is None:
            raise ValueError("grids: expected none, because the table has no grid")
        options = {"merge": merge, "num_tokens": num_tokens, **self._resampling()}
        return functional.learned_packed(self._parameter("weight"), self.grid, grids, **options)

    def _resampling(self) -> dict[str, Any]:
        return {
            "method": self.resampling,
            "align_corners": self.align_corners,
            "antialias": self.antialias,
            "scale_offset": self.scale_offset,
        }

    def encode(self, positions: Tensor) -> Tensor:
        """Looks up rows by position: int32 or int64 [...] -> [..., embedding_dim]."""
        return functional.learned_encode(self.weight, positions, first_row=self.first_row)

    def extend(
        self,
        max_positions: int | Grid,
        method: Literal["linear", "cubic", "repeat"] | ResamplingMethod | None = None,
        *,
        from_grid: Grid | None = None,
    ) -> None:
        """Lengthens the table, or resamples its grid, in place. Create the optimizer afterwards.

        Args:
            max_positions: The new number of positions; for a grid, its new rows and columns, which
                may be fewer.
            method: "linear" (default) or "cubic" interpolates: the first and last rows stay the
                first and last, so each trained row keeps its relative place. "repeat" repeats the
                rows, so trained positions keep their rows. Rows before position 0 do not change.
                For a grid: "bicubic" or "bilinear"; default: ``resampling``.
            from_grid: Rows and columns of the last rows of a table that was made without a grid;
                those before them become prefix tokens.

        Raises:
            ValueError: ``max_positions`` is less than before, or is not a grid where the table has
                one; or the method is unknown.

        Examples:
            >>> import posembed as pe
            >>> position = pe.LearnedPositionalEmbedding(512, 768)
            >>> position.extend(1024, "repeat")
            >>> position
            LearnedPositionalEmbedding(1024, 768)
            >>> position = pe.LearnedPositionalEmbedding(197, 768)
            >>> position.extend((16, 16), "bicubic", from_grid=(14, 14))
            >>> position
            LearnedPositionalEmbedding(257, 768, grid=(16, 16), prefix_tokens=1)
        """
        grid = self.grid if from_grid is None else checked_grid("from_grid", from_grid)
        with torch.no_grad():
            if grid is None:
                max_positions = whole("max_positions", max_positions)
                table = functional.learned_extend(
                    self.weight,
                    max_positions,
                    first_row=self.first_row,
                    method=method or "linear",  # type: ignore[arg-type]
                )
            else:
                new_grid = checked_grid("max_positions", max_positions)
                options = {**self._resampling(), "method": method or self.resampling}
                table = functional.learned_resample(self.weight, grid, new_grid, **options)
                cells = new_grid[0] * new_grid[1]
                prefix_tokens = len(table) - self.first_row - cells
                if prefix_tokens < 0:
                    raise ValueError(
                        f"from_grid: expected at most {self.max_positions} cells, the positions of "
                        f"the table, got {grid}"
                    )
                self.grid, self.prefix_tokens = new_grid, prefix_tokens
                max_positions = prefix_tokens + cells
        self.weight = nn.Parameter(table, requires_grad=self.weight.requires_grad)
        self.max_positions = max_positions

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        first = written(self, f"{self.max_positions}, {self.embedding_dim}", first_row=0)
        usual: dict[str, Any] = {"grid": None, "prefix_tokens": 0}
        if self.grid is not None:
            usual |= {"resampling": "bicubic", "align_corners": False, "antialias": False}
            usual["scale_offset"] = 0.0
        return written(self, first, **usual, layout="bsd")
