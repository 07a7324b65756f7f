"""Other rows for a table: what happens to its output layer and to its optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posembed.glue.sharding import is_sharded, with_rows
from posembed.glue.validation import wholes

# The ids of rows, in the forms that users have.
Rows = Tensor | Iterable[int]


def row_ids(rows: Rows, count: int) -> Tensor:
    """Ids of rows of a table of ``count`` rows: int64 [...], on the CPU; errors say why not."""
    if isinstance(rows, Tensor):
        if rows.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"rows: expected int32 or int64, got {rows.dtype}")
        if rows.dim() != 1:
            raise ValueError(f"rows: expected [rows], got {list(rows.shape)}")
        ids = rows.detach().cpu().long()
    else:
        ids = torch.tensor(wholes("rows", rows), dtype=torch.int64, device="cpu")
    outside = ((ids < 0) | (ids >= count)).nonzero().flatten()
    if outside.numel() > 0:
        at = int(outside[0])
        raise IndexError(
            f"rows: expected 0 to {count - 1}, a row of the table of {count}, got {int(ids[at])} "
            f"at index {at}"
        )
    return ids


def taken(values: Tensor, rows: Tensor) -> Tensor:
    """Rows of a table, or elements of a bias, that may be a DTensor."""
    if is_sharded(values):
        return with_rows(lambda local: taken(local, rows), values)
    return values.detach().index_select(0, rows.to(values.device))


def check_head(head: nn.Linear, num_embeddings: int) -> None:
    """Raises an error if ``head`` is no output layer of a vocabulary of that size."""
    if not isinstance(head, nn.Linear):
        raise TypeError(f"head: expected a torch.nn.Linear, got a {type(head).__name__}")
    if head.weight.shape[0] != num_embeddings:
        expected = f"expected {num_embeddings} outputs, one for each row of the table"
        raise ValueError(f"head: {expected}, got {head.weight.shape[0]}")


def change_rows(
    token: nn.Embedding,
    table: Callable[[Tensor], Tensor],
    others: Callable[[Tensor], Tensor],
    sources: Tensor,
    head: nn.Linear | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Gives a module, its output layer and its optimizer other rows, all or none of them.

    ``table`` makes the new table of the old one, and ``others`` the other parameters: the head's
    weight, unless it is the table, and bias. ``sources`` has the old row of each new one; -1: there
    is none.
    """

    def changed(values: Tensor, change: Callable[[Tensor], Tensor]) -> nn.Parameter:
        with torch.no_grad():
            return nn.Parameter(change(values), values.requires_grad)

    if head is not None:
        check_head(head, token.num_embeddings)
    catch_up(optimizer)
    new = {token.weight: changed(token.weight, table)}
    if head is not None and head.weight is not token.weight:
        new[head.weight] = changed(head.weight, others)
    if head is not None and head.bias is not None:
        new[head.bias] = changed(head.bias, others)
    if optimizer is not None:
        replace_parameters(optimizer, new, sources)
    if head is not None:
        head.weight = new[head.weight]
        head.bias = None if head.bias is None else new[head.bias]
        head.out_features = len(sources)
    token.weight = new[token.weight]
    token.num_embeddings = len(sources)


def catch_up(optimizer: torch.optim.Optimizer | None) -> None:
    """Lets an optimizer of tables do what it owes them: see :mod:`posembed.optim`."""
    pay = getattr(optimizer, "catch_up", None)
    if pay is not None:
        pay()


def replace_parameters(
    optimizer: torch.optim.Optimizer, new: Mapping[Tensor, nn.Parameter], sources: Tensor
) -> None:
    """Replaces parameters by others, whose rows come from rows ``sources``, or -1 for new rows.

    Raises ValueError and changes nothing if the optimizer's state is not per row.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for old in new:
        if old not in groups:
            raise ValueError("optimizer: expected one that holds the table, got one that does not")
        # LBFGS keeps one state for all parameters, under the first one.
        owners = optimizer.state if isinstance(optimizer, torch.optim.LBFGS) else [old]
        for owner in owners:
            _check_state(optimizer, optimizer.state.get(owner, {}), old.shape)
    for group in optimizer.param_groups:
        # Each once: trained_rows.py may give back a table that the optimizer still holds.
        group["params"][:] = dict.fromkeys(new.get(each, each) for each in group["params"])
    for old, replacement in new.items():
        if old not in optimizer.state:
            continue
        state = optimizer.state.pop(old)
        optimizer.state[replacement] = {
            name: _of_sources(value, sources, _initial(optimizer, name, groups[old]))
            if isinstance(value, Tensor) and value.dim() > 0
            else value
            for name, value in state.items()
        }


def _check_state(optimizer: torch.optim.Optimizer, state: Any, shape: torch.Size) -> None:
    """Raises ValueError for state that is neither a number nor per row or element of the table."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            known = value.dim() == 0 or value.shape in (shape, shape[:1])
        else:
            known = value is None or isinstance(value, (int, float, str))
        if not known:
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"optimizer: expected a state of numbers and tensors of shape {list(shape)}, got "
                f"{type(optimizer).__name__} with {name!r} of {found}"
            )


def _initial(optimizer: torch.optim.Optimizer, name: str, group: dict[str, Any]) -> float:
    """The initial value of an optimizer's state: zero, except Rprop's step."""
    steps = isinstance(optimizer, torch.optim.Rprop) and name == "step_size"
    return float(group["lr"]) if steps else 0.0


def _of_sources(state: Tensor, sources: Tensor, initial: float) -> Tensor:
    """An optimizer's state for rows that come from rows ``sources``, or -1."""
    if is_sharded(state):
        return with_rows(lambda local: _of_sources(local, sources, initial), state)
    sources = sources.to(state.device)
    if state.is_sparse:  # one more row, of zeros, for new ones
        state = state.coalesce()
        more = (state.shape[0] + 1, *state.shape[1:])
        given = state.indices(), state.values(), more
        # As an argument, False would warn.
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            wider = torch.sparse_coo_tensor(*given, device=state.device, is_coalesced=True)
        rows = torch.where(sources < 0, state.shape[0], sources)
        return wider.index_select(0, rows).coalesce()
    known = sources >= 0
    result = state.new_full((len(sources), *state.shape[1:]), initial)
    result[known] = state.index_select(0, sources[known])
    return result
