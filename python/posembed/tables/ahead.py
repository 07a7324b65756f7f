"""Ahead: rows that were asked for before they are needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor


class Ahead:
    """The result of a call that ``prefetch`` asked for, which :meth:`take` returns.

    It belongs to its call alone: dropping it asks for nothing and leaves nothing behind.

    Examples:
        >>> import torch, posembed as pe
        >>> table = pe.TokenEmbedding(10, 4)
        >>> ahead = table.prefetch(torch.tensor([3, 5]))
        >>> ahead.take().shape
        torch.Size([2, 4])
    """

    def __init__(self, rows: Tensor, look_up: Callable[[Tensor], Tensor]) -> None:
        # The caller may write to the ids before the rows are looked up.
        rows = rows.clone()
        self._take: Callable[[], Tensor] | None = lambda: look_up(rows)
        if rows.is_cuda:
            self._take = _gathered(rows, look_up)

    def take(self) -> Tensor:
        """The result, once; a RuntimeError if it was taken before."""
        take, self._take = self._take, None
        if take is None:
            raise RuntimeError("take: expected one call for each prefetch, got another")
        return take()

    def __reduce__(self) -> NoReturn:
        """Rows on their way have no copy."""
        raise TypeError("Ahead: cannot be copied or pickled; take() the rows first")


def _gathered(rows: Tensor, look_up: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    """Looks up rows on a stream of their own, for which the result's caller waits."""
    device = rows.device
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    rows.record_stream(side)
    with torch.cuda.stream(side):
        found, arrived = look_up(rows), side.record_event()

    def take() -> Tensor:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(arrived)
        found.record_stream(stream)
        return found

    return take


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which rows are gathered ahead."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
