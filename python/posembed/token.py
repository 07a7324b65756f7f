"""TokenEmbedding: a table with one learned row for each id of a vocabulary."""

from __future__ import annotations

import math
import os
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posembed import _C, functional, pretrained
from posembed.functional import Gradient, Initialization
from posembed.scaling import finite, whole


class TokenEmbedding(nn.Embedding):
    """A ``torch.nn.Embedding`` with exact, repeatable gradients, a scale and a tied output head.

    Gradients are accumulated in float32 whatever the dtype, rounded once, and have the same bits
    for any number of threads.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq: As for
            ``torch.nn.Embedding``.
        sparse: The same as ``gradient="rows"``.
        scale: Multiplies every result; ``"sqrt_dim"`` is the square root of embedding_dim.
        gradient: "dense", or "rows" for a sparse ``weight.grad`` of the touched rows, each once,
            sorted by id, as ``torch.optim.SGD`` and ``SparseAdam`` take it.
        device, dtype: Of the table.

    Examples:
        >>> import torch, posembed as pe
        >>> token = pe.TokenEmbedding(30522, 768, padding_idx=0, scale="sqrt_dim")
        >>> token(torch.tensor([[101, 2023, 102]])).shape
        torch.Size([1, 3, 768])
    """

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
        scale: float | Literal["sqrt_dim"] = 1.0,
        gradient: Gradient = "dense",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        _weight: Tensor | None = None,
        _freeze: bool = False,
    ) -> None:
        check_sizes(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        check_table_options(num_embeddings, padding_idx, gradient)
        self.scale = _scale(scale, embedding_dim)
        self.gradient: Gradient = "rows" if sparse else gradient
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            self.gradient == "rows",
            _weight,
            _freeze,
            device,
            dtype,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        scale: float | Literal["sqrt_dim"] = 1.0,
        gradient: Gradient = "dense",
    ) -> TokenEmbedding:
        """A module over ``embeddings`` [num_embeddings, embedding_dim], which it shares.

        Args:
            embeddings: The table.
            freeze: Keep the table as it is: no gradient.
            padding_idx: A row that gets no gradient; its values are left as they are.
            max_norm: As for the constructor, like all that follow.
            norm_type: The p of that norm.
            scale_grad_by_freq: Divide a row's gradient by its id's count in the batch.
            sparse: The same as ``gradient="rows"``.
            scale: Multiplies every result.
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
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            scale=scale,
            gradient=gradient,
            _weight=embeddings,
            _freeze=freeze,
        )

    def reset_parameters(self) -> None:
        """N(0, 1), and zeros for padding_idx."""
        _C.prefer_huge_pages(self.weight)
        super().reset_parameters()

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        tensor: str | None = None,
        vocabulary: pretrained.Vocabulary | None = None,
        missing: pretrained.Missing = "mean",
        dtype: torch.dtype | None = None,
        freeze: bool = True,
        **options: Any,
    ) -> TokenEmbedding:
        r"""A module over a table of a file that :func:`posembed.pretrained.open_vectors` takes.

        Args:
            path: safetensors (or their index), word2vec, fastText .vec or GloVe.
            tensor: The table's name, in a file that has several.
            vocabulary: Words in the order of ids, or each word's id, or a tokenizer. None: all the
                file's rows.
            missing: What words without a row get: "mean" of the rows that were found, "zero", or
                "error".
            dtype: Convert to it while reading.
            freeze: Keep the table as it is: no gradient.
            options: Those of :meth:`from_pretrained`.

        Raises:
            FileFormatError: The file is broken.
            ValueError: Options do not fit the file.

        Examples:
            >>> import pathlib, tempfile, posembed as pe, torch
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "tiny.txt")
            ...     _ = path.write_text("the 0.5 0.25\ncat 1 2\n")
            ...     token = pe.TokenEmbedding.from_file(path, vocabulary=["cat", "the"])
            >>> token(torch.tensor([0]))
            tensor([[1., 2.]])
        """
        file = pretrained.open_vectors(path)
        if vocabulary is None:
            table = file.table(tensor, dtype)
        else:
            table = file.rows(vocabulary, tensor=tensor, dtype=dtype, missing=missing).vectors
        return cls.from_pretrained(table, freeze, **options)

    def forward(self, ids: Tensor) -> Tensor:
        """int32 or int64 [...] to [..., embedding_dim]; see :func:`functional.embedding`."""
        if self.max_norm is not None:
            with torch.no_grad():
                table = self.weight.detach()
                functional.embedding(ids, table[:, :1])  # refuses bad ids before any write
                known = ids.clamp(0, self.num_embeddings - 1).contiguous()
                torch.embedding_renorm_(table, known, self.max_norm, self.norm_type)
        return functional.embedding(
            ids,
            self.weight,
            padding_idx=self.padding_idx,
            scale=self.scale,
            scale_grad_by_freq=self.scale_grad_by_freq,
            gradient=self.gradient,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """The table as output head: [..., embedding_dim] -> [..., num_embeddings]."""
        return nn.functional.linear(hidden, self.weight)

    def resize(
        self,
        num_embeddings: int,
        initialization: Initialization | Tensor = "mean",
        *,
        optimizer: torch.optim.Optimizer | None = None,
        covariance_scale: float = 1e-9,
        generator: torch.Generator | None = None,
    ) -> None:
        """Makes the vocabulary longer or shorter, in place; rows that stay keep their bits.

        ``weight`` becomes a new parameter: make the optimizer afterwards, or give it here.

        Args:
            num_embeddings: Rows that the table has then.
            initialization: What new rows are, as for :func:`functional.embedding_resize`.
            optimizer: Takes the new parameter in the old one's place, and keeps what it knows of
                rows that stay (moments, momentum); new rows begin with zeros.
            covariance_scale: Of "mean-and-covariance".
            generator: Draws new rows.

        Raises:
            ValueError: ``padding_idx`` would be cut off, ``optimizer`` does not hold the table, or
                new rows have another shape.

        Examples:
            >>> import posembed as pe
            >>> token = pe.TokenEmbedding(30522, 768, padding_idx=0)
            >>> token.resize(30592, "mean-and-covariance")
            >>> token
            TokenEmbedding(30592, 768, padding_idx=0)
        """
        if self.padding_idx is not None and self.padding_idx >= num_embeddings:
            expected = f"expected more than padding_idx, {self.padding_idx}"
            raise ValueError(f"num_embeddings: {expected}, got {num_embeddings}")
        with torch.no_grad():
            table = functional.embedding_resize(
                self.weight,
                num_embeddings,
                initialization,
                covariance_scale=covariance_scale,
                generator=generator,
            )
        weight = nn.Parameter(table, requires_grad=self.weight.requires_grad)
        if optimizer is not None:
            replace_parameter(optimizer, self.weight, weight)
        self.weight = weight
        self.num_embeddings = num_embeddings

    def extra_repr(self) -> str:
        """The options, as the C++ module prints them."""
        parts = [f"{self.num_embeddings}, {self.embedding_dim}"]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if self.max_norm is not None:
            parts.append(f"max_norm={self.max_norm:g}")
        if self.norm_type != 2:
            parts.append(f"norm_type={self.norm_type:g}")
        if self.scale_grad_by_freq:
            parts.append("scale_grad_by_freq=True")
        if self.scale != 1:
            parts.append(f"scale={self.scale:g}")
        if self.gradient == "rows":
            parts.append("gradient='rows'")
        return ", ".join(parts)


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size that is none, by its argument's name."""
    for name, size in sizes.items():
        if whole(name, size) < 0:
            raise ValueError(f"{name}: expected 0 or more, got {size}")


def check_table_options(num_embeddings: int, padding_idx: int | None, gradient: str) -> None:
    """Raises ValueError for a padding row outside the table, or an unknown form of gradient."""
    if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
        allowed = f"{-num_embeddings} to {num_embeddings - 1}"
        raise ValueError(f"padding_idx: expected {allowed}, got {padding_idx}")
    if gradient not in ("dense", "rows"):
        raise ValueError(f"gradient: expected 'dense' or 'rows', got {gradient!r}")


def replace_parameter(optimizer: torch.optim.Optimizer, old: Tensor, new: nn.Parameter) -> None:
    """Puts ``new`` in the place of ``old``, which has another number of rows."""
    places = [
        (group["params"], i)
        for group in optimizer.param_groups
        for i, parameter in enumerate(group["params"])
        if parameter is old
    ]
    if not places:
        raise ValueError("optimizer: expected one that holds the table, got one that does not")
    for parameters, i in places:
        parameters[i] = new
    if old in optimizer.state:
        state = optimizer.state.pop(old)
        optimizer.state[new] = {
            name: _with_rows(value, new.shape[0])
            if isinstance(value, Tensor) and value.shape == old.shape
            else value
            for name, value in state.items()
        }


def _with_rows(state: Tensor, rows: int) -> Tensor:
    """What an optimizer knows of each element: rows that stay, then zeros."""
    kept = min(rows, state.shape[0])
    if state.is_sparse:
        state = state.coalesce()
        stays = state.indices()[0] < kept
        return torch.sparse_coo_tensor(
            state.indices()[:, stays],
            state.values()[stays],
            (rows, state.shape[1]),
            check_invariants=False,  # they hold
            is_coalesced=True,
        )
    result = state.new_zeros(rows, state.shape[1])
    result[:kept] = state[:kept]
    return result


def _scale(scale: float | str, embedding_dim: int) -> float:
    if scale == "sqrt_dim":
        return math.sqrt(embedding_dim)
    if isinstance(scale, str):
        raise ValueError(f"scale: expected a number or 'sqrt_dim', got {scale!r}")
    return finite("scale", scale)
