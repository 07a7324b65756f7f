"""TokenBag: the rows of several ids added, averaged or compared to one vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posembed import _C, functional
from posembed.functional import BagMode, Gradient
from posembed.token import check_sizes, check_table_options


class TokenBag(nn.EmbeddingBag):
    """A ``torch.nn.EmbeddingBag`` that is exact, repeatable and checked.

    Rows are added in float32 whatever the dtype and rounded once, gradients have the same bits for
    any number of threads, and empty bags give zeros. torch's default mode is "mean".

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Components of a row.
        mode: "sum", "mean" or "max"; weights go with sums.
        padding_idx: An id that is left out of every bag; its row starts as zeros.
        include_last_offset: Offsets have one more element: the number of ids.
        gradient: "dense", or "rows" for a sparse ``weight.grad`` of the touched rows, each once,
            sorted by id.
        device, dtype: Of the table.

    Examples:
        >>> import torch, posembed as pe
        >>> bag = pe.TokenBag(30522, 384, padding_idx=0)
        >>> ids = torch.tensor([[2023, 2003, 0], [2023, 0, 0]])
        >>> tf_idf = torch.tensor([[0.1, 0.7, 0.0], [0.4, 0.0, 0.0]])
        >>> bag(ids, weights=tf_idf).shape
        torch.Size([2, 384])
    """

    mode: BagMode

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: BagMode = "sum",
        padding_idx: int | None = None,
        *,
        include_last_offset: bool = False,
        gradient: Gradient = "dense",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        _weight: Tensor | None = None,
        _freeze: bool = False,
    ) -> None:
        check_sizes(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        check_table_options(num_embeddings, padding_idx, gradient)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode: expected 'sum', 'mean' or 'max', got {mode!r}")
        self.gradient: Gradient = gradient
        super().__init__(
            num_embeddings,
            embedding_dim,
            mode=mode,
            sparse=gradient == "rows",  # what DistributedDataParallel asks for
            _weight=_weight,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
            device=device,
            dtype=dtype,
        )
        self.weight.requires_grad_(not _freeze)

    def reset_parameters(self) -> None:
        """N(0, 1), and zeros for padding_idx."""
        _C.prefer_huge_pages(self.weight)
        super().reset_parameters()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        mode: BagMode = "sum",
        padding_idx: int | None = None,
        *,
        include_last_offset: bool = False,
        gradient: Gradient = "dense",
    ) -> TokenBag:
        """A module over ``embeddings`` [num_embeddings, embedding_dim], which it shares.

        Args:
            embeddings: The table; ``token.weight`` of a TokenEmbedding, say.
            freeze: Keep the table as it is: no gradient.
            mode: As for the constructor, like all that follow.
            padding_idx: An id that is left out; the values of its row are left as they are.
            include_last_offset: Offsets have one more element.
            gradient: "dense" or "rows".

        Raises:
            ValueError: ``embeddings`` is not a matrix.
        """
        if embeddings.dim() != 2:
            shape = list(embeddings.shape)
            raise ValueError(f"embeddings: expected [num_embeddings, embedding_dim], got {shape}")
        rows, columns = embeddings.shape
        return cls(
            rows,
            columns,
            mode,
            padding_idx,
            include_last_offset=include_last_offset,
            gradient=gradient,
            _weight=embeddings,
            _freeze=freeze,
        )

    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Ids [bags, size], or [count] and offsets, to [bags, embedding_dim].

        Args:
            ids: int32 or int64.
            offsets: Where each bag of one-dimensional ids begins.
            weights: Factors of the rows of a sum, shaped as ``ids``.

        Raises:
            IndexError: An id is outside the table, or an offset does not fit; see
                :func:`functional.token_bag` for other errors.
        """
        return functional.token_bag(
            ids,
            self.weight,
            offsets,
            weights,
            mode=self.mode,
            padding_idx=self.padding_idx,
            include_last_offset=self.include_last_offset,
            gradient=self.gradient,
        )

    def extra_repr(self) -> str:
        """The options, as the C++ module prints them."""
        parts = [f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if self.include_last_offset:
            parts.append("include_last_offset=True")
        if self.gradient == "rows":
            parts.append("gradient='rows'")
        return ", ".join(parts)
