"""Functional step of an optimizer."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from posembed.glue.gate import Pair, gated
from posembed.glue.sharding import refuse_sharded

StepRule = Literal["sgd", "rowwise_adagrad", "rowwise_adam", "adam"]
StepRounding = Literal["nearest", "stochastic", "remainder"]
_MERGED_ROWS = cast(Pair, gated(torch.ops.posembed.embedding_backward_rows.default))
_STEP_ROWS_ = gated(torch.ops.posembed.step_rows_.default)


def step_rows_(
    weight: Tensor,
    gradient: Tensor,
    ids: Tensor | None = None,
    *,
    rule: StepRule,
    lr: float,
    step: int = 1,
    first: Tensor | None = None,
    second: Tensor | None = None,
    owed: Tensor | None = None,
    remainder: Tensor | None = None,
    first_decay: float = 0.0,
    second_decay: float = 0.0,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    gradient_scale: float = 1.0,
    rounding: StepRounding = "nearest",
    seed: int = 0,
    first_row: int = 0,
) -> Tensor:
    """One step of an optimizer, in place, on the rows of a table that have a gradient.

    The optimizers of :mod:`posembed.optim` call it and keep its state. Rows are independent, so
    the number of threads changes no bit. With ``g = gradient_scale * gradient``, and a factor
    ``1 - lr * weight_decay`` for the weight (decoupled decay):

    - "sgd": ``first = first_decay * first + g; weight -= lr * first``, or ``lr * g`` without state.
    - "rowwise_adagrad": ``second += mean(g²); weight -= lr * g / (sqrt(second) + eps)``.
    - "rowwise_adam": Adam whose second moment is one number for each row, of ``mean(g²)``.
    - "adam": as :class:`torch.optim.SparseAdam`, with ``step`` of the whole table.

    Args:
        weight: float32, float64 or bfloat16 [rows, dim]; the rows may be strided.
        gradient: [count, dim] in the dtype of ``weight``, or in float32 for bfloat16.
        ids: int32 or int64 [count], ascending, each once; default: all rows.
        rule: What a step is.
        lr: Learning rate.
        step: Number of this step, from 1.
        first: [rows, dim]: the first moment; optional for "sgd". Like all state in float32
            (float64 for float64) and contiguous; written.
        second: [rows] for row-wise rules, [rows, dim] for "adam"; written.
        owed: [count, 3]: what skipped steps owe, paid first:
            ``weight = owed[0] * weight - owed[1] * first; first *= owed[2]``.
        remainder: int16 [rows, dim], zeros at first, for that ``rounding``; written.
        first_decay: Momentum of "sgd", first beta of Adam.
        second_decay: Second beta of Adam.
        eps: Outside of the root.
        weight_decay: See above.
        gradient_scale: Multiplies the gradient; -1 maximises.
        rounding: Of bfloat16: to "nearest"; "stochastic", whose mean is right; or "remainder", to
            nearest with the rest of a float32 number in ``remainder``.
        seed: Of stochastic rounding, whose bits depend on seed, step, row and column alone.
        first_row: The row of a vocabulary with which the table begins, for these bits.

    Returns:
        ``weight``.

    Raises:
        ValueError: Shapes, options or state do not fit the rule, or ids do not ascend.
        TypeError: A dtype; float16 has no number small enough for a small step.
        IndexError: An id is outside the table. On CUDA a row outside, or not above the one before,
            is left out, and :func:`posembed.check_errors` raises.

    Examples:
        >>> import torch, posembed as pe
        >>> table, sums = torch.ones(5, 2), torch.zeros(5)
        >>> pe.functional.step_rows_(
        ...     table,
        ...     torch.full((1, 2), 3.0),
        ...     torch.tensor([2]),
        ...     rule="rowwise_adagrad",
        ...     lr=0.5,
        ...     second=sums,
        ... )[1:4]
        tensor([[1.0000, 1.0000],
                [0.5000, 0.5000],
                [1.0000, 1.0000]])
    """
    refuse_sharded(weight=weight, gradient=gradient)
    with torch.no_grad():
        _STEP_ROWS_(
            weight, gradient, rule, lr, step, ids, first, second, owed, remainder, first_decay,
            second_decay, eps, weight_decay, gradient_scale, rounding, seed, first_row,
        )  # fmt: skip
    return weight


def merged_rows(rows: Tensor, ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Ids in ascending order, each once, and the sums of their rows [count, dim]."""
    return _MERGED_ROWS(rows, num_rows, ids)
