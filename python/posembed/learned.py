"""LearnedPositionalEmbedding: a table with a learned row for each position.

Gehring et al., "Convolutional Sequence to Sequence Learning", arXiv:1705.03122; BERT, GPT-2, OPT,
RoBERTa.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from posembed import functional
from posembed._leaf import Leaf
from posembed._memory import prefer_huge_pages
from posembed._offset import positions_from
from posembed._validation import whole
from posembed.functional import Device
from posembed.functional._learned import added
from posembed.sharding import zero_row
from posembed.token import check_sizes


class LearnedPositionalEmbedding(Leaf, nn.Module):
    """Adds a learned vector for each position.

    ``weight`` is [first_row + max_positions, embedding_dim], initialised from N(0, 0.02) as
    in BERT and GPT-2.

    Args:
        max_positions: Positions 0 to max_positions - 1 have a row.
        embedding_dim: Components of a row.
        first_row: The row of position 0: 2 for OPT, padding_idx + 1 for RoBERTa. Those
            models give padding negative positions, which select the rows before it.
        device, dtype: Device and dtype of the table.

    Examples:
        >>> import torch, posembed as pe
        >>> position = pe.LearnedPositionalEmbedding(512, 768)
        >>> position(torch.zeros(2, 16, 768)).shape
        torch.Size([2, 16, 768])
    """

    def __init__(
        self,
        max_positions: int,
        embedding_dim: int,
        *,
        first_row: int = 0,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        _padding_row: int | None = None,
    ) -> None:
        super().__init__()
        check_sizes(max_positions=max_positions, embedding_dim=embedding_dim, first_row=first_row)
        self.max_positions = max_positions
        self.embedding_dim = embedding_dim
        self.first_row = first_row
        self._padding_row = _padding_row
        rows = first_row + max_positions
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table from N(0, 0.02); zeroes the padding row of an InputEmbedding."""
        prefer_huge_pages(self.weight)
        nn.init.normal_(self.weight, std=0.02)
        if self._padding_row is not None:
            zero_row(self.weight, self._padding_row)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, *, offset: int | Tensor = 0
    ) -> Tensor:
        """Adds the rows of the positions to x [batch, seq, embedding_dim].

        Args:
            x: The embeddings to add to.
            positions: int32 or int64 [seq] or [batch, seq]; None: ``offset``, ``offset + 1``, and
                so on.
            offset: Position of the first token if ``positions`` is None; int32 or int64 [batch]:
                one per sample.

        Raises:
            IndexError: A position is out of range; the message names it.
        """
        if isinstance(offset, Tensor):
            positions = positions_from(offset, positions, x)
            offset = 0
        weight: Tensor = self._parameter("weight")
        padding = self._padding_row
        if padding is not None and weight.requires_grad:  # the padding row gets no gradient
            rows = [weight[:padding], weight[padding : padding + 1].detach(), weight[padding + 1 :]]
            weight = torch.cat(rows)
        return added(x, weight, positions, offset, self.first_row)

    def encode(self, positions: Tensor) -> Tensor:
        """Looks up rows by position: int32 or int64 [...] -> [..., embedding_dim]."""
        return functional.learned_encode(self.weight, positions, first_row=self.first_row)

    def extend(
        self, max_positions: int, method: Literal["linear", "cubic", "repeat"] = "linear"
    ) -> None:
        """Lengthens the table in place. Create the optimizer afterwards.

        Args:
            max_positions: The new number of positions.
            method: "linear" or "cubic" interpolates: the first and last rows stay the first and
                last, so each trained row keeps its relative place. "repeat" repeats the rows, so
                trained positions keep their rows. Rows before position 0 do not change.

        Raises:
            ValueError: ``max_positions`` is less than before, or the method is unknown.

        Examples:
            >>> import posembed as pe
            >>> position = pe.LearnedPositionalEmbedding(512, 768)
            >>> position.extend(1024, "repeat")
            >>> position
            LearnedPositionalEmbedding(1024, 768)
        """
        max_positions = whole("max_positions", max_positions)
        with torch.no_grad():
            longer = functional.learned_extend(
                self.weight, max_positions, first_row=self.first_row, method=method
            )
        self.weight = nn.Parameter(longer, requires_grad=self.weight.requires_grad)
        self.max_positions = max_positions

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        parts = [f"{self.max_positions}, {self.embedding_dim}"]
        if self.first_row:
            parts.append(f"first_row={self.first_row}")
        return ", ".join(parts)
