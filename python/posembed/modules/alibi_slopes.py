"""ALiBi slopes inside a module: learned, or derived from options on the module's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from posembed import functional
from posembed.functional import Device
from posembed.glue.sharding import set_values
from posembed.glue.tracers import Leaf
from posembed.glue.validation import finite, flag, positive, whole


class AlibiSlopes(Leaf, nn.Module):
    """Holds the slopes of :class:`posembed.ALiBi` and takes its arguments.

    Only learned slopes are in the ``state_dict``. Others are recomputed when the module moves; they
    are not a buffer, because casts and checkpoints would change it.
    """

    slopes: Tensor
    """float32 [num_heads], or [2, num_heads]; learned slopes are the parameter."""
    _is_replica = False  # torch sets it in DataParallel's replicas of this module

    def __init__(
        self,
        num_heads: int,
        slopes: str | Tensor,
        max_bias: float,
        total_heads: int | None,
        head_start: int,
        factor: float,
        train_length: int | None,
        learned: bool,
        device: Device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if isinstance(slopes, str) and slopes not in ("paper", "geometric"):
            raise ValueError(f"slopes: expected 'paper', 'geometric' or a tensor, got {slopes!r}")
        self.num_heads = whole("num_heads", num_heads)
        self.total_heads = None if total_heads is None else whole("total_heads", total_heads)
        self.head_start, self.learned = whole("head_start", head_start), flag("learned", learned)
        self.max_bias, self.factor = finite("max_bias", max_bias), finite("factor", factor)
        self.train_length = None if train_length is None else positive("train_length", train_length)
        self.kind = slopes if isinstance(slopes, str) else "given"
        self._given = [] if isinstance(slopes, str) else self._numbers(slopes)
        self._follow(torch.empty(0, device=device, dtype=dtype))
        if self.learned:
            self.slopes = nn.Parameter(self._derived.to(self._dtype, copy=True))

    def _numbers(self, slopes: Tensor) -> list[float]:
        total = self.num_heads if self.total_heads is None else self.total_heads
        slopes = torch.as_tensor(slopes, device="cpu")  # even if the default device is meta
        if tuple(slopes.shape) not in ((total,), (2, total)):
            raise ValueError(
                f"slopes: expected [{total}] or [2, {total}], got {list(slopes.shape)}"
            )
        return [float(slope) for slope in slopes.detach().double().flatten().tolist()]

    def _derived_slopes(self, device: torch.device) -> Tensor:
        return functional.alibi_slopes(
            self.num_heads,
            kind="paper" if self.kind == "given" else self.kind,
            max_bias=self.max_bias,
            total_heads=self.total_heads,
            head_start=self.head_start,
            values=self._given,
            factor=self.factor,
            device=device,
        )

    def _follow(self, like: Tensor) -> None:
        """Computes the slopes on the device of ``like``, once and not in each call."""
        self._device, self._dtype = like.device, like.dtype
        with torch.inference_mode(False):
            self._derived = self._derived_slopes(self._device)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        """Moves slopes to the device of assigned tensors, which move a module off meta."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if self._derived.is_meta and local_metadata.get("assign_to_params_buffers", False):
            found = next((x for x in state_dict.values() if isinstance(x, Tensor)), None)
            device = torch.get_default_device() if found is None else found.device
            self._follow(torch.empty(0, device=device, dtype=self._dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts the module, and recomputes slopes that are not learned."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        try:
            like = fn(torch.empty(0, device=self._device, dtype=self._dtype))
        except NotImplementedError:  # copying from meta, which has no data
            like = fn(torch.empty(0, device="cpu", dtype=self._dtype))
        self._follow(like)
        return self

    def reset_parameters(self) -> None:
        """Resets learned slopes to those of the options."""
        if self.learned:
            set_values(self.slopes, self._derived)

    def _slopes(self, scores: Tensor | None = None, key_length: int | None = None) -> Tensor:
        """The module's own tensor, which must not be returned to users, or slopes for a key count.

        By default the key count is the last dimension of the scores; the operators check its shape.
        """
        slopes = self.slopes if self.learned else self._derived
        if not self.learned and (slopes.is_meta or self._is_replica):
            device = self._elsewhere(scores)
            if device != slopes.device:
                slopes = self._derived_slopes(device)
        if self.train_length is None:
            return slopes
        if key_length is None:
            key_length = scores.shape[-1] if scores is not None and scores.dim() > 0 else 0
        return functional.alibi_scaled_slopes(slopes, key_length, self.train_length)

    def _elsewhere(self, scores: Tensor | None) -> torch.device:
        """The device where slopes are needed, if not the module's own.

        torch.func.functional_call may run a module on meta with tensors on another device, and
        DataParallel copies only parameters and buffers to each device.
        """
        if scores is not None:
            return scores.device
        if self._is_replica and self._derived.is_cuda:
            return torch.device("cuda", torch.cuda.current_device())
        return self._derived.device

    def __getattr__(self, name: str) -> Any:
        """Returns slopes that are not learned; a property would stop FSDP from replacing others."""
        if name == "slopes" and not self.learned:
            return self._derived.clone()
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "slopes" and not self.learned:
            raise AttributeError("slopes: they follow from the options unless learned=True")
        super().__setattr__(name, value)
