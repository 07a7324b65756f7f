"""A token table of which only some rows learn: they are a parameter of their own.

An optimizer so sees no other row, and changes none by weight decay, momentum or rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from posembed import functional
from posembed.functional import Device
from posembed.glue.sharding import is_sharded, refuse_sharded
from posembed.modules.token import TokenEmbedding, among, check_mask, product
from posembed.tables.table import Table
from posembed.tables.vocabulary import Rows, catch_up, replace_parameters, row_ids, taken


class PartlyTrainedEmbedding(TokenEmbedding):
    """What a :class:`TokenEmbedding` is after :meth:`TokenEmbedding.train_rows`.

    ``trained`` [rows, embedding_dim] is the parameter that learns. ``weight`` is the whole table,
    with the values that the rows have now; it is frozen. A ``state_dict`` has the whole table, like
    that of a TokenEmbedding.
    """

    trained: nn.Parameter
    rows: Tensor  # the ids of its rows, ascending, on the CPU
    trained_rows: Tensor  # the same beside the table

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The whole table, a frozen parameter with the learned values."""
        table: Tensor = self._parameters["weight"]
        if not is_sharded(table) and not is_sharded(self.trained):
            table.data.index_copy_(0, self.trained_rows, self.trained.detach())
        return table

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up ids: int32 or int64 [...] -> [..., embedding_dim]."""
        trained = self.trained if self.scale == 1.0 else self.trained * self.scale
        return functional.embedding_with_features(
            ids, self._parameters["weight"], trained, self.places(ids), scale=self.scale
        )

    def places(self, ids: Tensor) -> Tensor:
        """The row of ``trained`` for each id; -1: it is frozen."""
        rows = self.trained_rows
        if rows.shape[0] == 0:
            return torch.full_like(ids, -1)
        found = torch.searchsorted(rows, ids.long()).clamp(max=rows.shape[0] - 1)
        return torch.where(rows[found] == ids, found, -1)

    def with_embeddings(self, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """As :meth:`TokenEmbedding.with_embeddings`."""
        check_mask(ids, mask)
        return among(self(ids.masked_fill(mask, 0)), features, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """As :meth:`TokenEmbedding.logits`; gradients reach the rows that learn."""
        scores = product(hidden, self._parameters["weight"])
        learned = nn.functional.linear(hidden, self.trained)
        return scores.index_copy_(-1, self.trained_rows, learned)

    def reset_parameters(self) -> None:
        """Draws the whole table."""
        super().reset_parameters()
        nn.init.normal_(self.trained)

    def use_table(self, table: Table) -> None:
        """Refused: see :meth:`TokenEmbedding.train_rows`."""
        self._refuse()

    def keep_on_host(self, device: Device | int | None = None, **options: Any) -> None:
        """Refused: see :meth:`TokenEmbedding.train_rows`."""
        self._refuse()

    def _refuse(self) -> None:
        raise ValueError(
            f"weight: expected a table whose rows learn together, got one of which "
            f"{len(self.rows)} learn: train_rows(None) first"
        )

    def _check_numbers(self) -> None:
        self._refuse()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.trained_rows = self.rows.to(self.trained_rows.device)  # to_empty has no values
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        whole = not is_sharded(self.weight)  # which has the learned values now
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if whole:
            del destination[prefix + "trained"]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        name = prefix + "trained"
        given: Any = state_dict.get(prefix + "weight")
        whole = name not in state_dict and getattr(given, "shape", None) == self.weight.shape
        if whole:
            state_dict[name] = taken(given, self.rows)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        if whole:
            del state_dict[name]

    def extra_repr(self) -> str:
        """The options, and how many rows learn."""
        return f"{super().extra_repr()}, trained_rows={len(self.rows)}"


def train_rows(
    token: TokenEmbedding, rows: Rows | None, optimizer: torch.optim.Optimizer | None
) -> None:
    """:meth:`TokenEmbedding.train_rows`."""
    ids = None
    _check(token)
    if rows is not None:
        learns = torch.zeros(token.num_embeddings, dtype=torch.bool, device="cpu")
        learns[row_ids(rows, token.num_embeddings)] = True
        if token.padding_idx is not None:
            learns[token.padding_idx] = False
        ids = learns.nonzero().flatten()
    catch_up(optimizer)
    table: Any = token.weight  # with the learned values
    old, sources = table, torch.arange(token.num_embeddings, device="cpu")
    if isinstance(token, PartlyTrainedEmbedding):
        old = token.trained
        sources = torch.full_like(sources, -1)
        sources[token.rows] = torch.arange(len(token.rows), device="cpu")
    new = table if ids is None else nn.Parameter(taken(table, ids))
    if optimizer is not None and new is not old:
        replace_parameters(optimizer, {old: new}, sources if ids is None else sources[ids])
    token.__dict__.pop("rows", None)
    token._parameters.pop("trained", None)
    token._buffers.pop("trained_rows", None)
    token.__class__ = TokenEmbedding
    table.requires_grad_(ids is None)
    if ids is not None:
        table.grad = None
        token.__class__ = PartlyTrainedEmbedding
        token.rows = ids
        token.register_buffer("trained_rows", ids.to(table.device), persistent=False)
        token.register_parameter("trained", new)


def _check(token: TokenEmbedding) -> None:
    """Raises an error for a table of which a part cannot learn."""
    if token._parameters.get("weight") is None:
        raise TypeError("weight: expected a table of numbers, got none")
    if type(token) not in (TokenEmbedding, PartlyTrainedEmbedding):
        raise TypeError(f"rows: expected none for a {type(token).__name__}")
    refuse_sharded(weight=token.weight)
    for name in ("max_norm", "scale_grad_by_freq", "on_host"):
        if value := getattr(token, name):
            raise ValueError(f"{name}: expected none where a part of a table learns, got {value}")
