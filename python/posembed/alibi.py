"""ALiBi: attention with linear biases instead of position embeddings.

Press, Smith, Lewis, "Train Short, Test Long", arXiv:2108.12409.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from posembed import functional


class ALiBi(nn.Module):
    """Biases of attention scores: minus a slope for each head times the distance of query and key.

    Slopes come from the options each time they are used; only learned ones are state.

    Args:
        num_heads: Heads of this module.
        slopes: ``"press"``: the paper's series, interleaved where heads are no power of two.
            ``"geometric"``: one ratio for every head count. Or the slopes themselves: a tensor
            [total_heads], or [2, total_heads] for keys left and right of the query.
        max_bias: The last of a power of two of heads has slope ``2 ** -max_bias``.
        causal: Bias ``-slope * (i - j)``, and -inf for keys after the query; otherwise
            ``-slope * abs(i - j)``.
        total_heads: Heads of the whole model, where this module has a part of them.
        head_start: The first head of this module among them.
        learned: Slopes are a parameter, ``slopes``.
        device, dtype: Of learned slopes, and of the bias that :meth:`forward` returns.

    Raises:
        ValueError: No heads; heads outside total_heads; slopes of another number.

    Example:
        >>> import torch, posembed as pe
        >>> alibi = pe.ALiBi(8)
        >>> query, key, value = torch.randn(3, 2, 8, 16, 64)
        >>> y = torch.nn.functional.scaled_dot_product_attention(query, key, value, alibi(16))
    """

    _like: Tensor

    def __init__(
        self,
        num_heads: int,
        *,
        slopes: str | Tensor = "press",
        max_bias: float = 8.0,
        causal: bool = True,
        total_heads: int | None = None,
        head_start: int = 0,
        learned: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(slopes, str) and slopes not in ("press", "geometric"):
            raise ValueError(f"slopes: expected 'press', 'geometric' or a tensor, got {slopes!r}")
        self.num_heads, self.max_bias, self.causal = num_heads, float(max_bias), causal
        self.total_heads, self.head_start, self.learned = total_heads, head_start, learned
        self.kind = slopes if isinstance(slopes, str) else "given"
        self._given = [] if isinstance(slopes, str) else self._numbers(torch.as_tensor(slopes))
        # Without elements: follows the module to devices and dtypes, and has nothing to lose there.
        like = torch.empty(0, device=device, dtype=dtype)
        self.register_buffer("_like", like, persistent=False)
        initial = self._derived_slopes()
        if learned:
            self._parameters["slopes"] = nn.Parameter(initial.to(like.dtype))

    def _numbers(self, slopes: Tensor) -> list[float]:
        total = self.num_heads if self.total_heads is None else self.total_heads
        if tuple(slopes.shape) not in ((total,), (2, total)):
            raise ValueError(
                f"slopes: expected [{total}] or [2, {total}], got {list(slopes.shape)}"
            )
        return [float(slope) for slope in slopes.detach().double().flatten().tolist()]

    def _derived_slopes(self) -> Tensor:
        return functional.alibi_slopes(
            self.num_heads,
            kind="press" if self.kind == "given" else self.kind,
            max_bias=self.max_bias,
            total_heads=self.total_heads,
            head_start=self.head_start,
            values=self._given,
            device=self._like.device,
        )

    def reset_parameters(self) -> None:
        """Learned slopes as the options give them."""
        if self.learned:
            with torch.no_grad():
                self.slopes.copy_(self._derived_slopes())

    @property
    def slopes(self) -> Tensor:
        """float32 [num_heads], or [2, num_heads]; the parameter where they are learned."""
        parameter = self._parameters.get("slopes")
        return self._derived_slopes() if parameter is None else parameter

    def forward(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        query_offset: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The bias that SDPA takes as ``attn_mask``; see :func:`posembed.functional.alibi_bias`.

        Args:
            query_length: Queries.
            key_length: Keys; default: as many.
            query_offset: Position of the first query among the keys; default: the last query stands
                at the last key.
            dtype: Default: the module's.

        Returns:
            [num_heads, query_length, key_length].
        """
        return functional.alibi_bias(
            self.slopes,
            query_length,
            query_length if key_length is None else key_length,
            query_offset=query_offset,
            causal=self.causal,
            dtype=self._like.dtype if dtype is None else dtype,
        )

    def add_(self, scores: Tensor, *, query_offset: int | None = None) -> None:
        """Adds the bias to scores [batch, num_heads, query, key] in place, for inference."""
        functional.alibi_add_(scores, self.slopes, query_offset=query_offset, causal=self.causal)

    def score_mod(self, *, query_offset: int = 0) -> Callable[..., Tensor]:
        """The bias for ``torch.nn.attention.flex_attention``: made in the kernel, never in memory.

        Args:
            query_offset: Position of the first query among the keys. Lengths are not known here:
                for ends aligned, as :meth:`forward` has it, pass keys - queries.

        Example:
            >>> from torch.nn.attention.flex_attention import flex_attention
            >>> import torch, posembed as pe
            >>> query, key, value = torch.randn(3, 1, 8, 16, 64)
            >>> y = flex_attention(query, key, value, score_mod=pe.ALiBi(8).score_mod())
        """
        slopes, causal = self.slopes, self.causal
        before, after = (slopes[0], slopes[1]) if slopes.dim() == 2 else (slopes, slopes)

        def bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = query + query_offset - key
            past = score - before[head] * distance
            future = float("-inf") if causal else score + after[head] * distance
            return torch.where(distance >= 0, past, future)

        return bias

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_offset: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Softmax(query key^T scale + bias) value, by the best means at hand.

        On CUDA, slopes that are not learned go through flex attention and no bias is made;
        elsewhere SDPA takes the bias as its mask.

        Args:
            query: [batch, num_heads, seq, head_dim].
            key: [batch, num_heads or a divisor of it, keys, head_dim].
            value: As key.
            query_offset: Position of the first query among the keys; default: the last query stands
                at the last key.
            scale: Default: ``head_dim ** -0.5``.

        Returns:
            [batch, num_heads, seq, head_dim].
        """
        # A branch, because the compiler compares symbols, and SDPA takes a bool.
        grouped = True if query.shape[-3] != key.shape[-3] else False  # noqa: SIM210
        if query.is_cuda and not self.learned:
            offset = key.shape[-2] - query.shape[-2] if query_offset is None else query_offset
            mod = self.score_mod(query_offset=offset)
            result: Tensor = _flex()(
                query, key, value, score_mod=mod, scale=scale, enable_gqa=grouped
            )
            return result
        bias = self(query.shape[-2], key.shape[-2], query_offset=query_offset, dtype=query.dtype)
        return F.scaled_dot_product_attention(
            query, key, value, bias, scale=scale, enable_gqa=grouped
        )

    def extra_repr(self) -> str:
        """The options, as the C++ module prints them."""
        given = "given" if self.kind == "given" else f"{self.kind!r}, max_bias={self.max_bias:g}"
        parts = [f"{self.num_heads}, slopes={given}"]
        if not self.causal:
            parts.append("causal=False")
        if self.total_heads is not None:
            parts.append(f"total_heads={self.total_heads}, head_start={self.head_start}")
        if self.learned:
            parts.append("learned=True")
        return ", ".join(parts)


@functools.cache
def _flex() -> Any:
    """Flex attention, compiled: uncompiled, it would make the scores in memory."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
