"""TokenBag: one vector for several ids: the sum, mean or maximum of their rows."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from posembed.functional import BagMode, Device, Gradient
from posembed.functional._bag import pooled
from posembed.functional._token import padding_row
from posembed.glue.tracers import Leaf
from posembed.glue.validation import flag, one_of, written
from posembed.modules.token import (
    Keep,
    TableOptions,
    check_matrix,
    check_sizes,
    check_table_options,
    kept_table,
    over_table,
    table_from_file,
)
from posembed.tables.owner import TableOwner


class TokenBag(Leaf, TableOwner, nn.EmbeddingBag):
    """``torch.nn.EmbeddingBag`` with checked ids and reproducible gradients.

    Rows of every dtype are summed in float32 and rounded once. Gradients are bitwise identical for
    any number of threads. Empty bags give zeros. The default mode is "sum"; torch's is "mean".

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Components of a row.
        mode: "sum", "mean" or "max"; only sums take weights.
        padding_idx: The id to skip in every bag; its row starts as zeros.
        include_last_offset: Offsets have one more element: the number of ids.
        gradient: "dense", or "rows" for a sparse ``weight.grad`` with each row that was looked up,
            once.
        device, dtype: Device and dtype of the table.

    Raises:
        ValueError: A negative size, a ``padding_idx`` outside the table, or an unknown ``mode`` or
            ``gradient``.

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
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        _weight: Tensor | None = None,
        _freeze: bool = False,
    ) -> None:
        check_sizes(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        check_table_options(num_embeddings, padding_idx, gradient)
        one_of("mode", mode, "sum", "mean", "max")
        self.gradient: Gradient = gradient
        super().__init__(
            num_embeddings,
            embedding_dim,
            mode=mode,
            sparse=gradient == "rows",  # read by DistributedDataParallel
            _weight=_weight,
            include_last_offset=flag("include_last_offset", include_last_offset),
            padding_idx=padding_idx,
            device=device,
            dtype=dtype,
        )
        self.weight.requires_grad_(not _freeze)

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
        """A module that shares ``embeddings`` [num_embeddings, embedding_dim].

        Args:
            embeddings: The table, for instance ``token.weight`` of a TokenEmbedding.
            freeze: Freeze the table: no gradient.
            mode: "sum", "mean" or "max".
            padding_idx: The id to skip; the values of its row do not change.
            include_last_offset: Offsets have one more element: the number of ids.
            gradient: "dense" or "rows".

        Raises:
            ValueError: ``embeddings`` is not a matrix.
        """
        check_matrix(embeddings)
        rows, columns = embeddings.shape
        return cls(
            rows,
            columns,
            mode,
            padding_idx,
            include_last_offset=include_last_offset,
            gradient=gradient,
            _weight=embeddings,
            _freeze=flag("freeze", freeze),
        )

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        mode: BagMode = "sum",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        gradient: Gradient = "dense",
        freeze: bool = True,
        keep: Keep = "numbers",
        **reading: Unpack[TableOptions],
    ) -> TokenBag:
        r"""A module with vectors from a file; see :meth:`posembed.TokenEmbedding.from_file`.

        Args:
            path: safetensors (or their index), word2vec, fastText .vec or GloVe.
            mode: "sum", "mean" or "max".
            padding_idx: The id to skip; the values of its row do not change.
            include_last_offset: Offsets have one more element: the number of ids.
            gradient: "dense" or "rows".
            freeze: Freeze the table: no gradient.
            keep: As in :meth:`posembed.TokenEmbedding.from_file`.
            **reading: ``tensor``, ``vocabulary``, ``words``, ``unicode_errors``, ``on_bad_row``,
                ``missing``, ``fallback``, ``dtype`` and ``progress`` of
                :meth:`posembed.TokenEmbedding.from_file`.

        Raises:
            FileFormatError: The file is broken.
            ValueError: Options do not match the file.

        Examples:
            >>> import pathlib, tempfile, posembed as pe, torch
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "tiny.txt")
            ...     _ = path.write_text("the 0.5 0.25\ncat 1 2\n")
            ...     bag = pe.TokenBag.from_file(path, mode="mean")
            >>> bag(torch.tensor([[0, 1]]))
            tensor([[0.7500, 1.1250]])
        """

        def made(weight: Tensor) -> TokenBag:
            return cls.from_pretrained(
                weight,
                freeze,
                mode,
                padding_idx,
                include_last_offset=include_last_offset,
                gradient=gradient,
            )

        others = {name: reading.get(name) for name in ("vocabulary", "words", "fallback")}
        kept = kept_table(path, keep, reading.get("tensor"), reading.get("dtype"), freeze, **others)
        return made(table_from_file(path, **reading)) if kept is None else over_table(made, kept)

    def forward(  # type: ignore[override]
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pools the rows of each bag: [bags, embedding_dim].

        Args:
            ids: int32 or int64 [bags, size], or [count] with ``offsets``.
            offsets: int32 or int64 [bags]: the start of each bag.
            weights: Per-id weights for ``mode="sum"``, in the shape of ``ids``.
            per_sample_weights: ``weights`` under the name that ``torch.nn.EmbeddingBag`` uses.

        Raises:
            ValueError: ``weights`` are passed under both names; see :func:`functional.token_bag`.
            IndexError: An id is outside the table, or an offset is invalid.
        """
        if per_sample_weights is not None:
            if weights is not None:
                raise ValueError("per_sample_weights: expected none beside weights")
            weights = per_sample_weights
        weight: Tensor | None = self._parameter("weight")
        if weight is None:
            padding = -1 if self.padding_idx is None else self.padding_idx
            return self.table.pooled(
                ids, offsets, padding, self.include_last_offset, self.mode, weights
            )
        padding = padding_row(self.padding_idx, weight)
        table = self.near("weight", ids) if self.on_host else weight
        options = (self.include_last_offset, self.mode, weights, self.gradient)
        return pooled(table, ids, offsets, padding, *options)

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        first = f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"
        options = {"padding_idx": None, "include_last_offset": False, "gradient": "dense"}
        return written(self, first, **options)
