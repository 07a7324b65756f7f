"""Cases of the optimizer's step for the shared tests, and its formula in torch's own operators."""

from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample, in_schema_order
from support.case import case as case_of

ROWS = 80  # more than twice any batch
BETAS = {"first_decay": 0.8, "second_decay": 0.9}


def formula(
    weight: Tensor,
    gradient: Tensor,
    rule: str,
    lr: float,
    step: int = 1,
    ids: Tensor | None = None,
    first: Tensor | None = None,
    second: Tensor | None = None,
    owed: Tensor | None = None,
    remainder: Tensor | None = None,
    first_decay: float = 0.0,
    second_decay: float = 0.0,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    gradient_scale: float = 1.0,
    **_: Any,
) -> tuple[Tensor, ...]:
    """What the floating arguments contain after a step, in the order of the schema."""
    if weight.shape[1] == 0:  # nothing changes; a mean of no squares is not a number
        return tuple(x for x in (weight, gradient, first, second, owed) if x is not None)
    rows = torch.arange(weight.shape[0], device=weight.device) if ids is None else ids.long()
    left, m, v = weight.clone(), first, second
    w, g, direction = weight[rows], gradient_scale * gradient, gradient_scale * gradient
    if owed is not None:
        w = owed[:, :1] * w
        if m is not None:
            w = w - owed[:, 1:2] * m[rows]
            m = m.index_put((rows,), owed[:, 2:] * m[rows])
    w = (1 - lr * weight_decay) * w
    adam = rule in ("adam", "rowwise_adam")
    if m is not None:
        direction = first_decay * m[rows] + (1 - first_decay if adam else 1.0) * g
        m = m.index_put((rows,), direction)
    if adam:
        direction = direction / (1 - first_decay**step)
    if v is not None:
        squares = g * g if rule == "adam" else (g * g).mean(1)
        old = second_decay * v[rows] + (1 - second_decay) * squares
        v = v.index_put((rows,), old if adam else v[rows] + squares)
        below = v[rows] if rule == "adam" else v[rows][:, None]
        correction = 1 - second_decay**step if adam else 1.0
        if rule == "adam":  # eps before the correction, as torch's SparseAdam
            direction = direction * correction**0.5 / (below.sqrt() + eps)
        else:
            direction = direction / ((below / correction).sqrt() + eps)
    left[rows] = w - lr * direction
    return tuple(each for each in (left, gradient, m, v, owed) if each is not None)


def state(rule: str, rows: int, dim: int, **place: Any) -> dict[str, Tensor]:
    """State in the type of the arithmetic, not zeros."""
    place["dtype"] = torch.float64 if place.get("dtype") == torch.float64 else torch.float32
    made = {}
    if rule != "rowwise_adagrad":
        made["first"] = torch.randn(rows, dim, **place)
    if rule != "sgd":
        made["second"] = torch.rand((rows, dim) if rule == "adam" else (rows,), **place)
    return made


def case(name: str, rule: str, *, everywhere: bool = False, **options: Any) -> OperatorCase:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        count, dim = batch, seq
        rows = count if everywhere else ROWS
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        values = state(rule, rows, dim, **place)
        like = next(iter(values.values()))
        owed = {} if everywhere else {"owed": like.new_empty(count, 3).uniform_(0.5, 1.0)}
        ids = {} if everywhere else {"ids": 2 * torch.arange(count, device=device) + 1}
        given = {
            "weight": torch.randn(rows, dim, **place),
            "gradient": torch.randn(count, dim, **place),
            **ids,
            **values,
            **owed,
        }
        return Sample((), {**given, "rule": rule, "lr": 0.3, **options})

    floats = (torch.float32, torch.float64, torch.bfloat16)
    return case_of(f"step_rows_-{name}", make, formula, mutates=True, vmap=False, dtypes=floats)


CASES = in_schema_order(
    [
        case("sgd", "sgd", first_decay=0.7, weight_decay=0.2),
        case("sgd-all", "sgd", everywhere=True),
        case("rowwise_adagrad", "rowwise_adagrad", gradient_scale=-2.0, weight_decay=0.2),
        case("rowwise_adam", "rowwise_adam", step=3, **BETAS),
        case("adam", "adam", step=3, weight_decay=0.2, **BETAS),
        case("adam-all", "adam", everywhere=True, **BETAS),
    ]
)
