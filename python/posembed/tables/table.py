"""Tables that are kept elsewhere or otherwise than as a parameter, ``weight``."""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from posembed import functional
from posembed.functional import BagMode
from posembed.functional._stored import mapped
from posembed.glue.tracers import Leaf
from posembed.tables.ahead import Ahead


class Hosted(nn.Module):
    """A module that can keep its tensors in the host's memory, where devices read them."""

    on_host = False
    _mapped: dict[str, tuple[Tensor, Tensor]]  # tensors by their names, and views on a device

    def keep_on_host(
        self, device: torch.device | str | int | None = None, *, trainable: bool | None = None
    ) -> None:
        """Moves the table to pinned memory of the host, where CUDA kernels read it.

        A look-up with ids on a CUDA device then moves the rows that it needs through the bus, and
        no others. ``to(device)`` leaves the table where it is. A table with ``gradient="rows"``
        can learn there: the rows of its gradient move to the host, where :mod:`posembed.optim`
        steps on them. Other tables are frozen.

        Args:
            device: The device that ids will be on; default: the current CUDA device, if there is
                one.
            trainable: Whether the table learns; default: if it has ``gradient="rows"`` and did.

        Raises:
            ValueError: The memory cannot be pinned, or the table cannot learn.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        weight = self._parameters.get("weight")
        learned = weight is not None and getattr(self, "gradient", "dense") == "rows"
        if trainable and not learned:
            raise ValueError("trainable: expected a weight with gradient='rows' to learn, got none")
        if trainable is None:
            trainable = learned and weight is not None and weight.requires_grad
        for name in self.host_names():
            tensor = getattr(self, name)
            if tensor is not None:
                tensor.requires_grad_(trainable and tensor is weight)
                tensor.data = tensor.data.cpu().contiguous()
        self.on_host = True
        self._mapped = {}
        at = torch.empty(0, device=device)
        for name in self.host_names():
            self.near(name, at)  # pins it now

    def host_names(self) -> tuple[str, ...]:
        """The tensors that may be on the host."""
        return (*self._parameters, *self._buffers)

    def near(self, name: str, ids: Tensor) -> Any:
        """A tensor where ids are, by its name."""
        tensor = getattr(self, name)
        if not self.on_host or tensor is None or tensor.device == ids.device:
            return tensor
        kept, view = self._mapped.get(name, (None, None))
        if kept is not tensor or view is None or view.device != ids.device:
            view = mapped(tensor.detach(), ids.device)
            self._mapped[name] = tensor, view
        if tensor.requires_grad and torch.is_grad_enabled():
            return _OnDevice.apply(tensor, view)  # type: ignore[no-untyped-call]
        return view

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Converts tensors on the host where they are."""
        if self.on_host:
            move, self._mapped = fn, {}

            def fn(tensor: Tensor) -> Tensor:
                return tensor.to(move(tensor.new_empty(0)).dtype)

        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        """Refuses to convert codes, which are numbers of one byte: their bits are what counts."""
        refused = []
        for name, tensor in {**self._parameters, **self._buffers}.items():
            given = state_dict.get(prefix + name)
            if tensor is None or not isinstance(given, Tensor) or given.dtype == tensor.dtype:
                continue
            if 1 in (given.itemsize, tensor.itemsize):
                refused.append(f"{prefix}{name}: expected {tensor.dtype}, got {given.dtype}")
        if refused and not local_metadata.get("assign_to_params_buffers"):
            others[-1].extend(refused)
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes views of its own."""
        return {**self.__dict__, "_mapped": {}} if self.on_host else self.__dict__


class _OnDevice(torch.autograd.Function):
    """A table on the host as a device's kernels read it; its gradient's rows move to the host."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, view: Tensor) -> Tensor:
        ctx.device = table.device
        return view.view_as(view)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.device), None


class Table(Leaf, nn.Module, abc.ABC):
    """A frozen table that looks up rows by a rule of its own."""

    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where results are."""
        return next(iter(self.buffers())).device

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Looks up ids: int32 or int64 [...] -> [..., embedding_dim].

        Args:
            ids: Each from 0 to num_embeddings - 1.
            scale: Multiplies the result.

        Raises:
            IndexError: An id is outside the table.
        """
        return self.rows(ids, scale, self.dtype)

    @abc.abstractmethod
    def rows(self, ids: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """:meth:`forward` with results in ``dtype``."""

    def part(self, ids: Tensor, index: int, parts: int, scale: float) -> Tensor:
        """Part ``index`` of ``parts`` of :meth:`forward`, without reading the others if possible.

        Args:
            ids: int32 or int64 [...].
            index: From 0 to parts - 1.
            parts: A divisor of embedding_dim.
            scale: Multiplies the result.
        """
        return self(ids, scale).chunk(parts, -1)[index]  # type: ignore[no-any-return]

    def prefetch(self, ids: Tensor, scale: float = 1.0) -> Ahead:
        """Asks for the rows of ids, which the handle's ``take()`` returns.

        From a file, rows are read ahead in the background. On a CUDA device they are gathered on a
        stream of their own.

        Raises:
            IndexError: An id is outside a table in a file.
        """
        self.read_ahead(ids)
        return Ahead(ids, lambda ids: self(ids, scale))

    def read_ahead(self, ids: Tensor) -> None:
        """Says which ids will be looked up."""

    def pooled(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        padding: int,
        include_last_offset: bool,
        mode: BagMode,
        weights: Tensor | None,
    ) -> Tensor:
        """One vector for each bag of ids, as :func:`posembed.functional.token_bag`.

        Rows are summed in float32 and rounded once.
        """
        # The rows of all ids become a table of their own, with one more row for padding.
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        flat = ids.reshape(-1)
        rows = self.rows(torch.cat([flat, flat.new_zeros(1)]), 1.0, wide)
        places = torch.arange(flat.shape[0], device=ids.device)
        places = torch.where(flat == padding, flat.shape[0], places).view(ids.shape)
        found: Tensor = functional.token_bag(
            places,
            rows,
            offsets,
            None if weights is None else weights.to(wide),
            mode=mode,
            padding_idx=flat.shape[0],
            include_last_offset=include_last_offset,
        )
        return found.to(self.dtype)

    def dequantize(self) -> Tensor:
        """The whole table [num_embeddings, embedding_dim] as numbers."""
        ids = torch.arange(self.num_embeddings, device=self.device)
        return self.rows(ids, 1.0, self.dtype)

    def memory(self) -> dict[str, int]:
        """The bytes of the table in each place: ``{"cpu": 1024}``."""
        return bytes_of(self.buffers())


def bytes_of(tensors: Iterable[Tensor]) -> dict[str, int]:
    """The bytes of tensors on each device."""
    found: dict[str, int] = collections.Counter()
    for tensor in tensors:
        found[str(tensor.device)] += tensor.nbytes
    return dict(found)
