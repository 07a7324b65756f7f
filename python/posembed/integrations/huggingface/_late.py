"""Norms of query and key that wait for the rotation, so that one kernel does both.

A late norm returns a placeholder. A rotation takes it in its own pass; for every other use the
placeholder becomes the tensor that the model's norm returns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from posembed.functional._rotary_norm import _NORM_ROTARY, no_key

NORM = "posembed_norm"
METADATA = {"shape", "dtype", "device", "ndim", "size", "dim", "numel", "requires_grad"}
OPERATORS = (
    "getitem add radd sub rsub mul rmul truediv rtruediv pow matmul rmatmul neg len iter "
    "eq ne lt le gt ge setitem iadd isub imul itruediv"
)


class NormOptions(NamedTuple):
    """What ``norm_rotary`` takes for a norm, besides its weight and bias.

    Args:
        eps: Added to the mean square or to the variance.
        weight_offset: Added to the weights.
        centred: Whether it is a LayerNorm, which subtracts the mean.
        head_dim: Components of a head; None if the rotation's tables decide.
        parameters: How many of weight and bias it has.
        size: Components that it normalises; None: any number.
        dtypes: Those for which it is verified.
    """

    eps: float
    weight_offset: float
    centred: bool
    head_dim: int | None
    parameters: int
    size: int | None
    dtypes: tuple[torch.dtype, ...]

    @property
    def shared(self) -> tuple[float, float, bool, int | None]:
        """What one call has for query and key."""
        return self[:4]


class LateNorm:
    """Base class of norms that return a :class:`Late`; ``posembed_norm`` has their options."""

    def forward(self, x: Tensor) -> Any:
        """The placeholder, or the normalised tensor where the kernel cannot take it."""
        options: NormOptions | None = self.__dict__.get(NORM)
        if options is None or hooked(self) or not _fits(x, parts_of(self), options):
            return super().forward(x)  # type: ignore[misc]
        return Late(self, options, x, x, (), [])

    def own(self, x: Tensor) -> Tensor:
        """What the model's norm returns."""
        result: Tensor = super().forward(x)  # type: ignore[misc]
        return result


class LateRMSNorm(LateNorm, nn.RMSNorm):
    """PyTorch's own RMSNorm."""


class LateLayerNorm(LateNorm, nn.LayerNorm):
    """PyTorch's own LayerNorm."""


def hooked(norm: Any) -> bool:
    """Whether hooks see what a norm returns, or gradients of it."""
    own = norm._forward_hooks or norm._backward_hooks or norm._backward_pre_hooks
    return bool(own) or bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def parts_of(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a norm, each None if it has none."""
    parameters = norm._parameters
    return parameters.get("weight"), parameters.get("bias")


def _fits(x: Any, parts: tuple[Tensor | None, Tensor | None], options: NormOptions) -> bool:
    """Whether the kernel takes a tensor, and gives it the dtype that the model gives it."""
    weight, bias = parts
    if not isinstance(x, Tensor) or x.dim() not in (3, 4) or x.dtype not in options.dtypes:
        return False
    if options.size is not None and x.shape[-1] != options.size:
        return False
    if (weight is not None) + (bias is not None) != options.parameters:
        return False
    if (options.centred or weight is None) and torch.is_autocast_enabled(x.device.type):
        return False  # LayerNorms may give float32
    return all(p is None or (p.dtype == x.dtype and p.device == x.device) for p in parts)


class Late:
    """A tensor that is not normalised yet.

    Args:
        norm: The norm.
        options: Its options.
        raw: What it was given.
        rows: The same after the moves.
        moves: Methods that change only the shape, with their arguments.
        made: What the model's norm has returned, if it has run: all uses share it, since a use may
            write to it.
    """

    def __init__(
        self,
        norm: Any,
        options: NormOptions,
        raw: Tensor,
        rows: Tensor,
        moves: tuple[Any, ...],
        made: list[Tensor],
    ) -> None:
        self.made = made
        self.norm = norm
        self.options = options
        self.raw = raw
        self.rows = rows
        self.moves = moves

    def transpose(self, first: int, second: int) -> Any:
        """Two dimensions exchanged, if the last is not one of them."""
        last = self.rows.dim() - 1
        if {first % (last + 1), second % (last + 1)} & {last}:
            return self.tensor().transpose(first, second)
        return self._moved(self.rows.transpose(first, second), ("transpose", (first, second)))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The same, if it has that dtype already."""
        if args == (self.rows.dtype,) and not kwargs:
            return self
        return self.tensor().to(*args, **kwargs)

    def view(self, *shape: Any) -> Any:
        """Heads split off the last dimension, which a norm over all heads has."""
        return self._split("view", shape)

    def reshape(self, *shape: Any) -> Any:
        """The same as ``view``."""
        return self._split("reshape", shape)

    def unflatten(self, dim: int, sizes: Any) -> Any:
        """The same for one dimension."""
        return self._split("unflatten", (dim, sizes))

    def _split(self, name: str, arguments: tuple[Any, ...]) -> Any:
        rows = getattr(self.rows, name)(*arguments)
        if rows.dim() != 4 or rows.shape[:-2] != self.rows.shape[:-1]:
            return getattr(self.tensor(), name)(*arguments)
        return self._moved(rows, (name, arguments))

    @property
    def over_all_heads(self) -> bool:
        """Whether heads were split off after the norm."""
        return self.rows.dim() > self.raw.dim()

    def _moved(self, rows: Tensor, move: tuple[str, Any]) -> Late:
        return Late(self.norm, self.options, self.raw, rows, (*self.moves, move), self.made)

    def tensor(self) -> Tensor:
        """The normalised tensor, by the model's norm."""
        if not self.made:
            self.made.append(self.norm.own(self.raw))
        result: Tensor = self.made[0]
        for name, arguments in self.moves:
            result = getattr(result, name)(*arguments)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows if name in METADATA else self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls a function with tensors in place of placeholders."""
        return function(*tensors_of(args), **tensors_of(kwargs or {}))


def _operator(name: str) -> Any:
    def operator(self: Late, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*tensors_of(args))

    return operator


for _name in OPERATORS.split():
    setattr(Late, f"__{_name}__", _operator(f"__{_name}__"))


def tensors_of(value: Any) -> Any:
    """A value with tensors in place of placeholders."""
    if isinstance(value, Late):
        return value.tensor()
    if type(value) in (tuple, list):
        return type(value)(map(tensors_of, value))
    return {k: tensors_of(v) for k, v in value.items()} if type(value) is dict else value


def rows_of(slots: list[Any]) -> list[Tensor] | None:
    """What the norms of placeholders were given; None if one call cannot normalise them all."""
    if not 0 < len(slots) <= 2 or not all(isinstance(x, Late) and not x.made for x in slots):
        return None
    first, last = slots[0], slots[-1]
    if first.options.shared != last.options.shared or first.over_all_heads != last.over_all_heads:
        return None
    rows = [x.rows for x in slots]
    head_dim = first.options.head_dim
    heads_apart = all(x.dim() == 4 and head_dim in (None, x.shape[-1]) for x in rows)
    return rows if heads_apart and rows[0].dtype == rows[-1].dtype else None


def normed_and_rotated(
    slots: list[Any],
    spec: str,
    layout: str,
    positions: Tensor | None,
    tables: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, ...] | None:
    """Query, and key if there is one, normalised and rotated; None if one call cannot do it."""
    rows = rows_of(slots)
    if rows is None:
        return None
    first, both = slots[0], len(slots) == 2
    weight, bias = parts_of(first.norm)
    key_weight, key_bias = parts_of(slots[-1].norm) if both else (None, None)
    options = first.options
    more: tuple[Any, ...] = ()
    if first.over_all_heads or options.centred or tables is not None:
        more = (options.centred, first.over_all_heads, bias, key_bias, *(tables or ()))
        more += ("float32_product",) if tables else ()
    results = _NORM_ROTARY(
        rows[0],
        rows[1] if both else no_key(rows[0], layout),
        weight,
        key_weight,
        spec,
        positions,
        layout,
        0,
        options.eps,
        options.weight_offset,
        *more,
    )
    return tuple(results[: len(slots)])


def looks_like_norm(cls: type) -> bool:
    """Whether a class may be a norm."""
    return issubclass(cls, torch.nn.Module) and "Norm" in cls.__name__
