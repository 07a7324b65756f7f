"""ALiBi: attention with linear biases instead of position embeddings.

Press, Smith, Lewis, "Train Short, Test Long", arXiv:2108.12409.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from posembed import functional
from posembed.functional import Device
from posembed.functional._alibi import bias as score_bias
from posembed.functional._alibi import check_attention, score_options
from posembed.glue.gate import check_tensors
from posembed.glue.validation import flag, one_of, written
from posembed.modules import attention
from posembed.modules.alibi_slopes import AlibiSlopes
from posembed.specifications.score_positions import ScorePositions

# Options of model families that differ from the paper. Falcon's are in from_preset. Refact's bias,
# slope * (j + 1), differs from the paper's by a constant per row, which softmax ignores.
# Sources: modeling_gpt_refact.py of smallcloudai/Refact-1_6B-fim, modeling_btlm.py of
# cerebras/btlm-3b-8k-base, modeling_bert.py of jinaai/jina-bert-implementation.
_PRESETS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("bloom", "mpt", "falcon", "baichuan", "jais", "btlm", "refact")},
    **{name: {"causal": False} for name in ("mosaicbert", "jina")},
}


class ALiBi(AlibiSlopes):
    """Adds a bias to attention scores: minus the head's slope times the query-key distance.

    Only learned slopes are in the ``state_dict``; other slopes are recomputed from the options
    whenever the module moves.

    Args:
        num_heads: Number of heads in this module.
        slopes: ``"paper"``: the paper's series, interleaved if the number of heads is not a power
            of two. ``"geometric"``: one ratio for any number of heads. Or the slopes themselves: a
            tensor [total_heads]; without ``causal`` also [2, total_heads], for keys left and right
            of the query. Slopes of each sample are an argument of calls, ``sample_slopes``.
        max_bias: If the number of heads is a power of two, the last slope is ``2 ** -max_bias``.
            For the two series alone.
        causal: The bias is ``-slope * (i - j)``, and keys after the query are masked; otherwise
            it is ``-slope * abs(i - j)``.
        total_heads: Number of heads in the whole model, if this module has only some of them.
        head_start: Index of this module's first head in the whole model. If equal shards do not
            divide the heads, the last one is padded with slopes of 0.
        factor: Divides the slopes (``alibi_scaling={"factor": …}`` of JAIS and BTLM).
        train_length: With more keys than this, slopes are divided by ``key_length / train_length``
            (``alibi_scaling={"train_seq_len": …}`` of JAIS and BTLM).
        learned: Make the slopes a trainable parameter, ``slopes``.
        device, dtype: Device and dtype of learned slopes and of the bias that :meth:`forward`
            returns.

    Raises:
        ValueError: No heads, heads outside total_heads, or a wrong number of slopes.

    Examples:
        >>> import torch, posembed as pe
        >>> alibi = pe.ALiBi(8)
        >>> query, key, value = torch.randn(3, 2, 8, 16, 64)
        >>> y = torch.nn.functional.scaled_dot_product_attention(query, key, value, alibi(16))
    """

    def __init__(
        self,
        num_heads: int,
        *,
        slopes: str | Tensor = "paper",
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
        of_heads = (num_heads, slopes, max_bias, total_heads, head_start)
        super().__init__(*of_heads, factor, train_length, learned, device, dtype)
        self.causal = flag("causal", causal)
        if self.causal and self._derived.dim() == 2:
            total = num_heads if total_heads is None else total_heads
            raise ValueError(
                f"slopes: expected [{total}] with causal=True, which hides keys right of the "
                f"query, got [2, {total}]; slopes of two samples are sample_slopes of a call"
            )

    def _of_samples(
        self, sample_slopes: Tensor | None, scores: Tensor | None, key_length: int | None = None
    ) -> Tensor:
        """The slopes of a call: those of each sample [batch, 1 or 2, heads], if there are any."""
        if sample_slopes is None:
            return self._slopes(scores, key_length)
        check_tensors(sample_slopes=sample_slopes)
        heads, shape = self.num_heads, list(sample_slopes.shape)
        if shape[-1:] != [heads] or not (len(shape) == 2 or (len(shape) == 3 and shape[1] == 2)):
            raise ValueError(
                f"sample_slopes: expected [batch, {heads}] or [batch, 2, {heads}], got {shape}"
            )
        return sample_slopes.unsqueeze(1) if len(shape) == 2 else sample_slopes

    @classmethod
    def from_preset(
        cls, name: str, num_heads: int, *, head_dim: int | None = None, **options: Any
    ) -> ALiBi:
        """ALiBi with the options of a model family.

        Args:
            name: "bloom", "refact", "baichuan" (13B): as in the paper. "mpt": pass
                ``max_bias=alibi_bias_max``. "jais", "btlm": pass ``factor`` or ``train_length``
                from their ``alibi_scaling``; with ``mup_scale_qk_dot_by_d`` these models scale
                scores by ``1 / head_dim``, so pass that as ``scale`` to :meth:`attention`.
                "mosaicbert", "jina" (jina-embeddings-v2): symmetric. "falcon": bfloat16 slopes,
                divided by ``sqrt(head_dim)``, because Falcon adds the bias before scaling.
            num_heads: As in ALiBi.
            head_dim: Needed for "falcon".
            **options: As in ALiBi.

        Raises:
            ValueError: An unknown name, or "falcon" without head_dim.

        Examples:
            >>> import posembed as pe
            >>> pe.ALiBi.from_preset("mosaicbert", 12)
            ALiBi(12, slopes='paper', max_bias=8, causal=False)
        """
        one_of("name", name, *_PRESETS)
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
        """ALiBi from a model's configuration.

        Supported models: Bloom, MPT, Falcon-RW, Baichuan-13B, JAIS, BTLM, Refact, MosaicBERT and
        jina-embeddings-v2; and GGUF metadata of those that llama.cpp runs: all but Falcon-RW, BTLM
        and MosaicBERT.

        Args:
            config: A dict, a ``PretrainedConfig``, or the path of a config.json, of its folder or
                of a GGUF file.
            num_heads: Number of heads in this module, if it has only some of the model's.
            **options: As in ALiBi; ``head_start`` says which heads.

        Raises:
            ValueError: The model type is unknown, the model does not use ALiBi, or a key for ALiBi
                is missing or unknown.
            TypeError: ``config`` is of another type.

        Examples:
            >>> import posembed as pe
            >>> pe.ALiBi.from_config({"model_type": "bloom", "n_head": 16})
            ALiBi(16, slopes='paper', max_bias=8)
        """
        from posembed.models import reading

        preset = reading.alibi_preset(config)
        if num_heads is not None:
            options["total_heads"] = preset.num_heads
        heads = preset.num_heads if num_heads is None else num_heads
        return cls.from_preset(preset.name, heads, **preset.options, **options)

    def alibi_slopes(self, batch_size: int | None = None, key_length: int | None = None) -> Tensor:
        """Slopes for ``flash_attn_func(…, alibi_slopes=…)`` of FlashAttention-2.

        They are positive and do not include the attention scale: FlashAttention-2 adds
        ``-slope * abs(i + key_length - query_length - j)`` to scaled scores. They are
        detached: learned slopes get no gradient.

        Args:
            batch_size: Repeats the slopes for each sample; default: no batch dimension.
            key_length: Required with train_length.

        Returns:
            float32 [num_heads], or [batch_size, num_heads].

        Raises:
            ValueError: The slopes differ for keys left and right of the query.
        """
        if self._derived.dim() != 1:
            raise ValueError(
                "alibi_slopes: FlashAttention-2 takes one slope for each head, got "
                f"{list(self._derived.shape)}"
            )
        if self.train_length is not None and key_length is None:
            raise ValueError("key_length: expected a number with train_length, got None")
        slopes = self._slopes(None, key_length).detach().float()
        return slopes.clone() if batch_size is None else slopes.repeat(batch_size, 1)

    def forward(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        sample_slopes: Tensor | None = None,
        **positions: Unpack[ScorePositions],
    ) -> Tensor:
        """The bias that SDPA takes as ``attn_mask``; see :func:`posembed.functional.alibi_bias`.

        Args:
            query_length: Number of queries.
            key_length: Number of keys; default: ``query_length``.
            dtype: Default: that of ``out`` or the module.
            out: Output tensor, for inference.
            sample_slopes: Slopes of each sample in place of the module's, as they are: floating
                [batch, num_heads]; without ``causal`` also [batch, 2, num_heads], for keys left and
                right of the query. Gradients flow to them.
            **positions: See :class:`posembed.specifications.score_positions.ScorePositions`.

        Returns:
            [num_heads, query_length, key_length], with a leading batch dimension if slopes,
            positions or mask have one.
        """
        keys = query_length if key_length is None else key_length
        slopes = self._of_samples(sample_slopes, None, keys)
        # Pass a dtype only if necessary: AOTInductor passes wrong dtype numbers to operators.
        if dtype is None and out is None and self._dtype != slopes.dtype:
            dtype = self._dtype
        options = score_options(self.causal, True, **positions)
        return score_bias(slopes, query_length, keys, dtype, out, options)

    def add_(
        self,
        scores: Tensor,
        *,
        scale: float = 1.0,
        sample_slopes: Tensor | None = None,
        **positions: Unpack[ScorePositions],
    ) -> Tensor:
        """Computes scores * scale + bias in place, for inference: [batch, num_heads, query, key].

        Args:
            scores: Any strides, but the last dimension must be contiguous.
            scale: Multiplies the scores, not the bias.
            sample_slopes: As in :meth:`forward`.
            **positions: See :class:`posembed.specifications.score_positions.ScorePositions`.

        Returns:
            ``scores``.

        Raises:
            ValueError, TypeError, IndexError: See :func:`posembed.functional.alibi_add_`.

        Examples:
            >>> import torch, posembed as pe
            >>> pe.ALiBi(2).add_(torch.zeros(1, 2, 1, 3)).flatten(0, 2)
            tensor([[-0.1250, -0.0625,  0.0000],
                    [-0.0078, -0.0039,  0.0000]])
        """
        slopes = self._of_samples(sample_slopes, scores)
        return functional.alibi_add_(
            scores, slopes, scale=scale, causal=self.causal, positions_from_mask=True, **positions
        )

    def softmax(
        self,
        scores: Tensor,
        *,
        scale: float = 1.0,
        sample_slopes: Tensor | None = None,
        **positions: Unpack[ScorePositions],
    ) -> Tensor:
        """Attention weights: the softmax of scores * scale + bias, in one pass over memory.

        Args:
            scores: [batch, num_heads, query, key] or [num_heads, query, key].
            scale: Multiplies the scores, not the bias.
            sample_slopes: As in :meth:`forward`.
            **positions: See :class:`posembed.specifications.score_positions.ScorePositions`.

        Returns:
            Shape and dtype of scores. If all keys of a query are masked, its weights are 0.

        Raises:
            ValueError, TypeError, IndexError: See :func:`posembed.functional.alibi_softmax`.

        Examples:
            >>> import torch, posembed as pe
            >>> pe.ALiBi(2).softmax(torch.zeros(2, 1, 3)).flatten(0, 1)
            tensor([[0.3127, 0.3329, 0.3544],
                    [0.3320, 0.3333, 0.3346]])
        """
        slopes = self._of_samples(sample_slopes, scores)
        return functional.alibi_softmax(
            scores, slopes, scale=scale, causal=self.causal, positions_from_mask=True, **positions
        )

    def softmax_(
        self,
        scores: Tensor,
        *,
        scale: float = 1.0,
        sample_slopes: Tensor | None = None,
        **positions: Unpack[ScorePositions],
    ) -> Tensor:
        """In-place :meth:`softmax` for inference; returns ``scores``.

        Errors are those of :func:`posembed.functional.alibi_softmax_`.
        """
        slopes = self._of_samples(sample_slopes, scores)
        return functional.alibi_softmax_(
            scores, slopes, scale=scale, causal=self.causal, positions_from_mask=True, **positions
        )

    def lse_correction(
        self, query_length: int, *, query_start: int, key_start: int, form: str = "distance"
    ) -> Tensor:
        """Correction for a block's log-sum-exp whose bias was computed from block-local indices.

        Args:
            query_length: Number of queries in the block.
            query_start: Position of the block's first query.
            key_start: Position of the block's first key.
            form: See :func:`posembed.functional.alibi_lse_correction`.

        Returns:
            [num_heads, query_length]; add it before merging blocks.

        Raises:
            ValueError: An unknown form.

        Examples:
            >>> import posembed as pe
            >>> pe.ALiBi(8).lse_correction(2, query_start=4, key_start=2)[0]
            tensor([-1., -1.])
        """
        return functional.alibi_lse_correction(
            self._slopes(None, 0),
            query_length,
            query_start=query_start,
            key_start=key_start,
            form=form,
            causal=self.causal,
        )

    def score_mod(
        self,
        *,
        query_offset: int | Tensor = 0,
        key_length: int | None = None,
        sample_slopes: Tensor | None = None,
    ) -> Callable[..., Tensor]:
        """A ``score_mod`` for ``torch.nn.attention.flex_attention``, which fuses the bias.

        Args:
            query_offset: Position of the first query among the keys. Lengths are unknown here, so
                it does not default to keys - queries as in :meth:`forward`. int32 or int64 [batch]:
                that of each sample's.
            key_length: Required with train_length.
            sample_slopes: As in :meth:`forward`.

        Examples:
            >>> from torch.nn.attention.flex_attention import flex_attention
            >>> import torch, posembed as pe
            >>> query, key, value = torch.randn(3, 1, 8, 16, 64)
            >>> y = flex_attention(query, key, value, score_mod=pe.ALiBi(8).score_mod())
        """
        if self.train_length is not None and key_length is None:
            raise ValueError("key_length: expected a number with train_length, got None")
        slopes, causal = self._of_samples(sample_slopes, None, key_length), self.causal
        if causal and slopes.dim() == 3 and slopes.shape[1] == 2:
            raise ValueError(
                f"sample_slopes: expected [batch, {self.num_heads}] with causal=True, which hides "
                f"keys right of the query, got {list(slopes.shape)}"
            )
        several = slopes.dim() > 1
        before, after = (slopes.select(-2, 0), slopes.select(-2, -1)) if several else (slopes,) * 2
        of_samples, offsets = sample_slopes is not None, isinstance(query_offset, Tensor)

        def bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = (batch, head) if of_samples else (head,)
            first = query_offset[batch] if offsets else query_offset  # type: ignore[index]
            distance = query + first - key
            past = score - before[place] * distance
            future = float("-inf") if causal else score + after[place] * distance
            return torch.where(distance >= 0, past, future)

        return bias

    def attention_backend(
        self,
        query: Tensor,
        key: Tensor,
        *,
        dropout: float = 0.0,
        sample_slopes: Tensor | None = None,
        **positions: Unpack[ScorePositions],
    ) -> str:
        """The backend that :meth:`attention` uses for these arguments.

        Args:
            query: As in :meth:`attention`.
            key: As in :meth:`attention`.
            dropout: As in :meth:`attention`.
            sample_slopes: As in :meth:`forward`.
            **positions: See :class:`posembed.specifications.score_positions.ScorePositions`.

        Returns:
            "flash": FlashAttention-2 with slopes, if that package is installed. "flex": compiled
            flex attention, for head_dim 16 or more. "fused": writes the scores to memory and
            fuses scale, bias, mask and softmax in one kernel; only it supports all arguments.
        """
        if sample_slopes is not None:
            return "fused"
        two_sided = self._derived.dim() == 2
        return attention.backend_for(query, two_sided, self.learned, dropout, positions)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: str | None = None,
        sample_slopes: Tensor | None = None,
        **positions: Unpack[ScorePositions],
    ) -> Tensor:
        """Computes softmax(query key^T scale + bias) value with the fastest available backend.

        Args:
            query: [batch, num_heads, seq, head_dim].
            key: [batch, num_heads or a divisor of it, keys, head_dim].
            value: [batch, heads of key, keys, value_dim].
            scale: Default: ``head_dim ** -0.5``.
            dropout: Probability of zeroing a weight. As in torch's SDPA, it applies in eval mode
                too: pass ``dropout=p if self.training else 0.0``.
            backend: Default: :meth:`attention_backend`.
            sample_slopes: As in :meth:`forward`.
            **positions: See :class:`posembed.specifications.score_positions.ScorePositions`.

        Returns:
            [batch, num_heads, seq, value_dim].

        Raises:
            ValueError: The backend is unknown, or shapes are incompatible.
            TypeError: Dtypes differ outside autocast.

        Examples:
            >>> import torch, posembed as pe
            >>> query, key = torch.randn(2, 8, 1, 64), torch.randn(2, 4, 100, 64)
            >>> pe.ALiBi(8).attention(query, key, key).shape  # a step of generation
            torch.Size([2, 8, 1, 64])
        """
        check_tensors(query=query, key=key)
        if backend is None:
            backend = self.attention_backend(
                query, key, dropout=dropout, sample_slopes=sample_slopes, **positions
            )
        keys = key.shape[-2] if key.dim() == 4 else 0  # the operators reject other keys
        if backend == "fused":
            return functional.alibi_attention(
                query,
                key,
                value,
                self._of_samples(sample_slopes, query, keys),
                scale=scale,
                dropout=dropout,
                causal=self.causal,
                positions_from_mask=True,
                **positions,
            )
        one_of("backend", backend, "flash", "flex", "fused")
        check_attention(query, key, value, dropout)
        attention.check_backend(backend, query, sample_slopes, positions)
        if scale is None:
            scale = query.shape[-1] ** -0.5
        if backend == "flex":
            offset = positions.get("query_offset")
            first = keys - query.shape[-2] if offset is None else offset
            bias = self.score_mod(query_offset=first, key_length=keys, sample_slopes=sample_slopes)
            return attention.flex(query, key, value, bias, scale)
        slopes = self._of_samples(sample_slopes, query, keys)
        slopes = slopes.squeeze(1) if slopes.dim() == 3 else slopes
        if slopes.dim() != (1 if sample_slopes is None else 2):
            raise ValueError("backend: expected 'flex' or 'fused' for slopes of two sides")
        return attention.flash(query, key, value, slopes, self.causal, scale, dropout)

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        given = "given" if self.kind == "given" else f"{self.kind!r}, max_bias={self.max_bias:g}"
        usual: dict[str, Any] = {"causal": True}
        if self.total_heads is not None:
            usual |= {"total_heads": None, "head_start": None}
        usual |= {"factor": 1.0, "train_length": None, "learned": False}
        return written(self, f"{self.num_heads}, slopes={given}", **usual)
