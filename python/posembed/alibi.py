"""ALiBi: attention with linear biases instead of position embeddings.

Press, Smith, Lewis, "Train Short, Test Long", arXiv:2108.12409.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from posembed import _attention, configuration, functional
from posembed._sharding import set_values
from posembed._validation import finite, flag, whole
from posembed.configuration import alibi as presets
from posembed.functional import Device

# What families of models change of the paper's form. Falcon has its own in from_preset.
_PRESETS: dict[str, dict[str, Any]] = {
    "bloom": {},
    "mpt": {},
    "falcon": {},
    "baichuan": {},
    "jais": {},
    "mosaicbert": {"causal": False},
}


class Places(TypedDict, total=False):
    """Positions of queries and keys, and which keys are visible: arguments of all ALiBi methods.

    Attributes:
        query_offset: Position of the first query among the keys; default: the last query is at the
            last key.
        query_positions: Positions of the queries, int32 or int64 [query] or [batch, query].
        key_positions: Those of the keys, [key] or [batch, key].
        cu_seqlens: Boundaries [documents + 1] of documents packed one after the other; keys of
            other documents are hidden.
        attention_mask: bool or integers [key] or [batch, key]: keys with 0 are hidden. Without
            positions of queries or keys, only visible keys are counted, as in Bloom; functions
            such as :func:`posembed.functional.alibi_bias` count all.
        hide: Hidden keys get -inf, whatever their score; False: nothing is added to them.
    """

    query_offset: int | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    cu_seqlens: Tensor | None
    attention_mask: Tensor | None
    hide: bool


class ALiBi(nn.Module):
    """Biases of attention scores: minus a slope for each head times the distance of query and key.

    Only learned slopes are state; others are made from the options, again when the module moves.

    Args:
        num_heads: Heads of this module.
        slopes: ``"press"``: the paper's series, interleaved if heads are no power of two.
            ``"geometric"``: one ratio for any number of heads. Or the slopes themselves: a tensor
            [total_heads], or [2, total_heads] for keys left and right of the query.
        max_bias: With a power of two of heads, the last has slope ``2 ** -max_bias``.
        causal: Bias ``-slope * (i - j)``, and keys after the query are hidden; otherwise
            ``-slope * abs(i - j)``.
        total_heads: Heads of the whole model, if this module has a part of them.
        head_start: The index of this module's first head in the whole model.
        factor: Slopes are divided by it (``alibi_scaling={"factor": …}`` of JAIS).
        train_length: Slopes are divided by ``key_length / train_length`` if there are more keys
            than that (``alibi_scaling={"train_seq_len": …}`` of JAIS).
        learned: Slopes are a parameter, ``slopes``.
        device, dtype: Of learned slopes, and of the bias that :meth:`forward` returns.

    Raises:
        ValueError: No heads, heads outside total_heads, or a wrong number of slopes.

    Examples:
        >>> import torch, posembed as pe
        >>> alibi = pe.ALiBi(8)
        >>> query, key, value = torch.randn(3, 2, 8, 16, 64)
        >>> y = torch.nn.functional.scaled_dot_product_attention(query, key, value, alibi(16))
    """

    slopes: Tensor
    """float32 [num_heads], or [2, num_heads]; the parameter where they are learned."""
    _is_replica = False  # torch sets it in the modules that DataParallel makes of this one

    def __init__(
        self,
        num_heads: int,
        *,
        slopes: str | Tensor = "press",
        max_bias: float = 8.0,
        causal: bool = True,
        total_heads: int | None = None,
        head_start: int = 0,
        factor: float = 1.0,
        train_length: int | None = None,
        learned: bool = False,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(slopes, str) and slopes not in ("press", "geometric"):
            raise ValueError(f"slopes: expected 'press', 'geometric' or a tensor, got {slopes!r}")
        if train_length is not None and whole("train_length", train_length) <= 0:
            raise ValueError(f"train_length: expected a positive number, got {train_length}")
        self.num_heads, self.causal = whole("num_heads", num_heads), flag("causal", causal)
        self.total_heads = None if total_heads is None else whole("total_heads", total_heads)
        self.head_start, self.learned = whole("head_start", head_start), flag("learned", learned)
        self.max_bias, self.factor = finite("max_bias", max_bias), finite("factor", factor)
        self.train_length = train_length
        self.kind = slopes if isinstance(slopes, str) else "given"
        self._given = [] if isinstance(slopes, str) else self._numbers(slopes)
        self._follow(torch.empty(0, device=device, dtype=dtype))
        if self.learned:
            self.slopes = nn.Parameter(self._derived.to(self._dtype, copy=True))

    @classmethod
    def from_preset(
        cls, name: str, num_heads: int, *, head_dim: int | None = None, **options: Any
    ) -> ALiBi:
        """ALiBi as a family of models uses it.

        Args:
            name: "bloom", "mpt" (give ``max_bias=alibi_bias_max``), "baichuan" (13B), "jais" (give
                ``factor`` or ``train_length`` of its ``alibi_scaling``), "mosaicbert" (symmetric),
                or "falcon": bfloat16 slopes, and bias added before scores are scaled, so that
                here, where scores are scaled first, slopes are divided by ``sqrt(head_dim)``.
            num_heads: As in ALiBi.
            head_dim: Needed for "falcon".
            **options: As in ALiBi.

        Raises:
            ValueError: An unknown name, or "falcon" without head_dim.

        Examples:
            >>> import posembed as pe
            >>> pe.ALiBi.from_preset("mosaicbert", 12)
            ALiBi(12, slopes='press', max_bias=8, causal=False)
        """
        if name not in _PRESETS:
            known = ", ".join(repr(preset) for preset in _PRESETS)
            raise ValueError(f"name: expected one of {known}, got {name!r}")
        options = {**_PRESETS[name], **options}
        if name == "falcon":
            if head_dim is None:
                raise ValueError("head_dim: expected a number for 'falcon', got None")
            heads = options.get("total_heads") or num_heads
            options["slopes"] = functional.alibi_slopes(heads, device="cpu").bfloat16().float()
            options["factor"] = math.sqrt(head_dim)
        return cls(num_heads, **options)

    @classmethod
    def from_config(cls, config: Any, *, num_heads: int | None = None, **options: Any) -> ALiBi:
        """ALiBi of a model's configuration: Bloom, MPT, Falcon-RW, Baichuan-13B or JAIS.

        Args:
            config: A dict, a ``PretrainedConfig``, or the path of a config.json or of its folder.
            num_heads: Heads of this module, if it has a part of the model's.
            **options: As in ALiBi; ``head_start`` selects the part.

        Raises:
            ValueError: The model type is unknown, the model does not use ALiBi, or a key about it
                is missing or unknown.
            TypeError: ``config`` is none of these.

        Examples:
            >>> import posembed as pe
            >>> pe.ALiBi.from_config({"model_type": "bloom", "n_head": 16})
            ALiBi(16, slopes='press', max_bias=8)
        """
        preset = presets.read(configuration.load(config))
        if num_heads is not None:
            options["total_heads"] = preset.num_heads
        heads = preset.num_heads if num_heads is None else num_heads
        return cls.from_preset(preset.name, heads, **preset.options, **options)

    def _numbers(self, slopes: Tensor) -> list[float]:
        total = self.num_heads if self.total_heads is None else self.total_heads
        slopes = torch.as_tensor(slopes, device="cpu")  # also where the default device is meta
        if tuple(slopes.shape) not in ((total,), (2, total)):
            raise ValueError(
                f"slopes: expected [{total}] or [2, {total}], got {list(slopes.shape)}"
            )
        return [float(slope) for slope in slopes.detach().double().flatten().tolist()]

    def _derived_slopes(self, device: torch.device) -> Tensor:
        return functional.alibi_slopes(
            self.num_heads,
            kind="press" if self.kind == "given" else self.kind,
            max_bias=self.max_bias,
            total_heads=self.total_heads,
            head_start=self.head_start,
            values=self._given,
            factor=self.factor,
            device=device,
        )

    def _follow(self, like: Tensor) -> None:
        """Makes the slopes on the device of ``like``, once instead of in each call."""
        self._device, self._dtype = like.device, like.dtype
        with torch.inference_mode(False):
            self._derived = self._derived_slopes(self._device)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        """Tensors that are assigned bring a module out of meta: slopes follow the model's."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if self._derived.is_meta and local_metadata.get("assign_to_params_buffers", False):
            found = next((x for x in state_dict.values() if isinstance(x, Tensor)), None)
            device = torch.get_default_device() if found is None else found.device
            self._follow(torch.empty(0, device=device, dtype=self._dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ALiBi:
        """Moves and casts the module; slopes that are not learned are made again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        try:
            like = fn(torch.empty(0, device=self._device, dtype=self._dtype))
        except NotImplementedError:  # a copy out of meta, but there is nothing to copy
            like = fn(torch.empty(0, device="cpu", dtype=self._dtype))
        self._follow(like)
        return self

    def reset_parameters(self) -> None:
        """Sets learned slopes to those of the options."""
        if self.learned:
            set_values(self.slopes, self._derived)

    def _slopes(self, key_length: int, scores: Tensor | None = None) -> Tensor:
        """The slopes for a number of keys: the module's own tensor, which callers must not get."""
        slopes = self.slopes if self.learned else self._derived
        if not self.learned and (slopes.is_meta or self._is_replica):
            device = self._elsewhere(scores)
            if device != slopes.device:
                slopes = self._derived_slopes(device)
        if self.train_length is None or key_length <= self.train_length:
            return slopes
        return slopes / (key_length / self.train_length)

    def _elsewhere(self, scores: Tensor | None) -> torch.device:
        """Where slopes are needed, if not on the module's own device.

        torch.func.functional_call may run a module on meta with tensors from elsewhere, and
        DataParallel copies to each device what is a parameter or a buffer, which these are not.
        """
        if scores is not None:
            return scores.device
        if self._is_replica and self._derived.is_cuda:
            return torch.device("cuda", torch.cuda.current_device())
        return self._derived.device

    def __getattr__(self, name: str) -> Any:
        """Slopes that are not learned: a property would keep FSDP from replacing learned ones."""
        if name == "slopes" and not self.learned:
            return self._derived.clone()
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "slopes" and not self.learned:
            raise AttributeError("slopes: they follow from the options unless learned=True")
        super().__setattr__(name, value)

    def alibi_slopes(self, batch_size: int | None = None, key_length: int | None = None) -> Tensor:
        """Slopes for ``flash_attn_func(…, alibi_slopes=…)`` of FlashAttention-2.

        Positive, and without a factor for the scale of scores: FlashAttention-2 adds
        ``-slope * abs(i + key_length - query_length - j)`` to scaled scores. No gradient reaches
        learned slopes through it.

        Args:
            batch_size: Default: none.
            key_length: Needed with train_length.

        Returns:
            float32 [num_heads], or [batch_size, num_heads].

        Raises:
            ValueError: Slopes with two sides.
        """
        if self._derived.dim() != 1:
            raise ValueError(
                "alibi_slopes: FlashAttention-2 takes one slope for each head, got "
                f"{list(self._derived.shape)}"
            )
        if self.train_length is not None and key_length is None:
            raise ValueError("key_length: expected a number with train_length, got None")
        slopes = self._slopes(0 if key_length is None else key_length).detach().float()
        return slopes.clone() if batch_size is None else slopes.repeat(batch_size, 1)

    def forward(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        **places: Unpack[Places],
    ) -> Tensor:
        """The bias that SDPA takes as ``attn_mask``; see :func:`posembed.functional.alibi_bias`.

        Args:
            query_length: Number of queries.
            key_length: Number of keys; default: as many as queries.
            dtype: Default: that of the module, or of out.
            out: Memory for the result, for inference.
            **places: Offset, positions, documents, mask: see :class:`Places`.

        Returns:
            [num_heads, query_length, key_length], after a batch dimension if positions or mask have
            one.
        """
        keys = query_length if key_length is None else key_length
        slopes = self._slopes(keys)
        # Said only where it must be: AOTInductor hands dtypes on to operators with other numbers.
        if dtype is None and out is None and self._dtype != slopes.dtype:
            dtype = self._dtype
        return functional.alibi_bias(
            slopes,
            query_length,
            keys,
            causal=self.causal,
            dtype=dtype,
            out=out,
            **_complete(places, query_length, keys),
        )

    def add_(self, scores: Tensor, *, scale: float = 1.0, **places: Unpack[Places]) -> Tensor:
        """Scores [batch, num_heads, query, key] times scale plus bias, in place, for inference.

        Args:
            scores: Any strides, but a contiguous last dimension.
            scale: Multiplies the scores, not the bias.
            **places: See :class:`Places`.

        Returns:
            ``scores``.

        Raises:
            ValueError, TypeError, IndexError: As :func:`posembed.functional.alibi_add_`.

        Examples:
            >>> import torch, posembed as pe
            >>> pe.ALiBi(2).add_(torch.zeros(1, 2, 1, 3)).flatten(0, 2)
            tensor([[-0.1250, -0.0625,  0.0000],
                    [-0.0078, -0.0039,  0.0000]])
        """
        queries, keys = _lengths(scores)
        return functional.alibi_add_(
            scores,
            self._slopes(keys, scores),
            scale=scale,
            causal=self.causal,
            **_complete(places, queries, keys),
        )

    def softmax(self, scores: Tensor, *, scale: float = 1.0, **places: Unpack[Places]) -> Tensor:
        """Attention weights: the softmax of scores * scale + bias, in one pass over memory.

        Args:
            scores: [batch, num_heads, query, key] or [num_heads, query, key].
            scale: Multiplies the scores, not the bias.
            **places: See :class:`Places`.

        Returns:
            Shape and dtype of scores. A query that sees no key has weights 0.

        Raises:
            ValueError, TypeError, IndexError: As :func:`posembed.functional.alibi_softmax`.

        Examples:
            >>> import torch, posembed as pe
            >>> pe.ALiBi(2).softmax(torch.zeros(2, 1, 3)).flatten(0, 1)
            tensor([[0.3127, 0.3329, 0.3544],
                    [0.3320, 0.3333, 0.3346]])
        """
        queries, keys = _lengths(scores)
        return functional.alibi_softmax(
            scores,
            self._slopes(keys, scores),
            scale=scale,
            causal=self.causal,
            **_complete(places, queries, keys),
        )

    def softmax_(self, scores: Tensor, *, scale: float = 1.0, **places: Unpack[Places]) -> Tensor:
        """:meth:`softmax` in place, for inference.

        Args:
            scores: Any strides, but a contiguous last dimension.
            scale: Multiplies the scores, not the bias.
            **places: See :class:`Places`.

        Returns:
            ``scores``.

        Raises:
            ValueError, TypeError, IndexError: As :func:`posembed.functional.alibi_softmax_`.
        """
        queries, keys = _lengths(scores)
        return functional.alibi_softmax_(
            scores,
            self._slopes(keys, scores),
            scale=scale,
            causal=self.causal,
            **_complete(places, queries, keys),
        )

    def lse_correction(
        self, query_length: int, *, query_start: int, key_start: int, form: str = "distance"
    ) -> Tensor:
        """The correction of a block's log-sum-exp whose biases were made from local indices.

        Args:
            query_length: Queries of the block.
            query_start: Position of the first of them.
            key_start: Position of the block's first key.
            form: See :func:`posembed.functional.alibi_lse_correction`.

        Returns:
            [num_heads, query_length], to add before blocks are merged.

        Raises:
            ValueError: An unknown form.

        Examples:
            >>> import posembed as pe
            >>> pe.ALiBi(8).lse_correction(2, query_start=4, key_start=2)[0]
            tensor([-1., -1.])
        """
        return functional.alibi_lse_correction(
            self._slopes(0),
            query_length,
            query_start=query_start,
            key_start=key_start,
            form=form,
            causal=self.causal,
        )

    def score_mod(
        self, *, query_offset: int = 0, key_length: int | None = None
    ) -> Callable[..., Tensor]:
        """The bias for ``torch.nn.attention.flex_attention``, computed in its kernel.

        Args:
            query_offset: Position of the first query among the keys. The default of
                :meth:`forward` is keys - queries, but lengths are not known here.
            key_length: Needed with train_length.

        Examples:
            >>> from torch.nn.attention.flex_attention import flex_attention
            >>> import torch, posembed as pe
            >>> query, key, value = torch.randn(3, 1, 8, 16, 64)
            >>> y = flex_attention(query, key, value, score_mod=pe.ALiBi(8).score_mod())
        """
        if self.train_length is not None and key_length is None:
            raise ValueError("key_length: expected a number with train_length, got None")
        slopes, causal = self._slopes(0 if key_length is None else key_length), self.causal
        before, after = (slopes[0], slopes[1]) if slopes.dim() == 2 else (slopes, slopes)

        def bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = query + query_offset - key
            past = score - before[head] * distance
            future = float("-inf") if causal else score + after[head] * distance
            return torch.where(distance >= 0, past, future)

        return bias

    def attention_backend(
        self,
        query: Tensor,
        key: Tensor,
        *,
        dropout: float = 0.0,
        **places: Unpack[Places],
    ) -> str:
        """The backend that :meth:`attention` uses for these arguments.

        Args:
            query: As in :meth:`attention`.
            key: As in :meth:`attention`.
            dropout: As in :meth:`attention`.
            **places: See :class:`Places`.

        Returns:
            "flash": FlashAttention-2 with slopes, where that package is installed. "flex": a
            compiled flex attention, from head_dim 16 on. "fused": scores in memory, and one kernel
            for scale, bias, mask and softmax; it alone takes everything.
        """
        return _attention.backend_for(self, query, dropout, places)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: str | None = None,
        **places: Unpack[Places],
    ) -> Tensor:
        """Softmax(query key^T scale + bias) value, by the best means at hand.

        Args:
            query: [batch, num_heads, seq, head_dim].
            key: [batch, num_heads or a divisor of it, keys, head_dim].
            value: [batch, heads of key, keys, value_dim].
            scale: Default: ``head_dim ** -0.5``.
            dropout: Probability with which weights are zeroed, in evaluation too, as with torch's
                function: pass ``dropout=p if self.training else 0.0``.
            backend: Default: :meth:`attention_backend`.
            **places: See :class:`Places`.

        Returns:
            [batch, num_heads, seq, value_dim].

        Raises:
            ValueError: Another backend, or shapes do not fit.
            TypeError: Dtypes differ, outside autocast.

        Examples:
            >>> import torch, posembed as pe
            >>> query, key = torch.randn(2, 8, 1, 64), torch.randn(2, 4, 100, 64)
            >>> pe.ALiBi(8).attention(query, key, key).shape  # a step of generation
            torch.Size([2, 8, 1, 64])
        """
        _attention.check(query, key, value, dropout)
        if backend is None:
            backend = self.attention_backend(query, key, dropout=dropout, **places)
        if scale is None:
            scale = query.shape[-1] ** -0.5
        if backend == "fused":
            return _attention.fused(self, query, key, value, scale, dropout, places)
        if backend == "flex":
            return _attention.flex(self, query, key, value, scale, places.get("query_offset"))
        if backend == "flash":
            return _attention.flash(self, query, key, value, scale, dropout)
        raise ValueError(f"backend: expected 'flash', 'flex' or 'fused', got {backend!r}")

    def extra_repr(self) -> str:
        """The options, as the C++ module prints them."""
        given = "given" if self.kind == "given" else f"{self.kind!r}, max_bias={self.max_bias:g}"
        parts = [f"{self.num_heads}, slopes={given}"]
        if not self.causal:
            parts.append("causal=False")
        if self.total_heads is not None:
            parts.append(f"total_heads={self.total_heads}, head_start={self.head_start}")
        if self.factor != 1.0:
            parts.append(f"factor={self.factor:g}")
        if self.train_length is not None:
            parts.append(f"train_length={self.train_length}")
        if self.learned:
            parts.append("learned=True")
        return ", ".join(parts)


def _lengths(scores: Tensor) -> torch.Size:
    """Numbers of queries and keys."""
    if scores.dim() not in (3, 4):
        raise ValueError(
            "scores: expected [batch, heads, query_length, key_length] or [heads, query_length, "
            f"key_length], got {list(scores.shape)}"
        )
    return scores.shape[-2:]


def _complete(places: Places, queries: int, keys: int) -> Places:
    """With a mask and no positions: those that count visible keys only."""
    mask = places.get("attention_mask")
    given = (places.get("query_positions"), places.get("key_positions"))
    if mask is None or any(positions is not None for positions in given):
        return places
    if mask.dim() == 0 or mask.shape[-1] != keys:
        return places  # the operator says what is wrong
    positions = functional.alibi_positions(mask)
    offset = places.get("query_offset")
    first = keys - queries if offset is None else offset
    if first < 0 or first + queries > keys:
        return {**places, "key_positions": positions}
    return {
        **places,
        "query_offset": None,
        "query_positions": positions.narrow(-1, first, queries),
        "key_positions": positions,
    }
