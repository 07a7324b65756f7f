"""RotaryEmbedding: rotates query and key by angles that grow with position (RoPE).

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from typing_extensions import Self, Unpack

from posembed import functional
from posembed.functional import Device, Layout, PackedOrder
from posembed.functional._offset import INTEGERS, LAYOUTS, of_layout
from posembed.functional._options import rotary_text
from posembed.functional._rotary import ROTARY, ROTARY_PAIR, rotated, rotated_in_place
from posembed.functional._rotary_packed import rotated_packed, rotated_packed_in_place
from posembed.glue.other_names import check_options
from posembed.glue.sharding import set_values
from posembed.glue.tracers import Leaf
from posembed.glue.validation import flag, one_of, positive, whole, wholes
from posembed.models.options import READING, Reading
from posembed.specifications import Numerics, RotaryFields, RotarySpec
from posembed.specifications.scaling import DynamicNtkScaling, LongRopeScaling

torch.fx.wrap("rotated_in_place")


def _size(tensor: Tensor, dimension: int) -> int | None:
    """The size of a dimension; None if there is none."""
    try:
        return tensor.size(dimension)
    except (AttributeError, IndexError, TypeError):
        return None


def _is_readable(positions: Tensor) -> bool:
    """Whether positions can be read without waiting for a device or breaking a traced program."""
    plain = type(positions) is Tensor and positions.device.type == "cpu" and positions.numel() > 0
    traced = is_compiling() or torch._C._get_tracing_state() is not None
    return plain and not traced and not torch._C._functorch.is_batchedtensor(positions)


def check_length(seq_len: Any) -> None:
    """Raises ValueError for what is no whole number; a symbolic one stays symbolic."""
    if not isinstance(seq_len, torch.SymInt):
        whole("seq_len", seq_len)


def regimes(spec: RotarySpec) -> tuple[RotarySpec, RotarySpec | None, int] | None:
    """Specifications within and beyond the original context (LongRoPE), and where it ends."""
    match spec.scaling:
        case DynamicNtkScaling(original_max_positions=original):
            return spec.resolve(original), None, original
        case LongRopeScaling(original_max_positions=original):
            return spec.resolve(original), spec.resolve(original + 1), original
    return None


def refuse_narrow(frequencies: Tensor) -> None:
    """Raises TypeError for learned frequencies that a wrapper cast to 16 bits."""
    if frequencies.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"frequencies: expected float32 or float64, got {frequencies.dtype}: positions would "
            "multiply the rounding error. Where FSDP casts parameters, shard this module by itself "
            "before the model: fully_shard(rope), without mp_policy"
        )


class ModuleOptions(TypedDict, total=False):
    """Options of :class:`RotaryEmbedding` beside those of its specification."""

    layout: Layout
    learned_frequencies: bool
    frequency_sizes: Sequence[int]
    heads: int | None
    key_heads: int | None
    device: Device | None
    dtype: torch.dtype | None


class FromConfig(Reading, ModuleOptions, total=False):
    """Options of :meth:`RotaryEmbedding.from_config`."""


class Placed(TypedDict, total=False):
    """Where the tokens of a call are."""

    offset: int | Tensor
    cu_seqlens: Tensor | None
    inverse: bool


class At(Placed, total=False):
    """The same, with one length or that of each sample."""

    seq_len: int | Tensor | None


class AtOne(Placed, total=False):
    """The same, with one length."""

    seq_len: int | None


class SizedOptions(ModuleOptions, RotaryFields, total=False):
    """Options of :class:`RotaryEmbedding` beside head_dim."""


def _specification(
    head_dim: int | RotarySpec | None, spec: RotarySpec | None, options: dict[str, Any]
) -> RotarySpec:
    """The specification that the arguments of :class:`RotaryEmbedding` describe."""
    known = ("head_dim", "spec", *SizedOptions.__annotations__)
    check_options("RotaryEmbedding", options, known)
    if (head_dim is None) == (spec is None):
        got = "neither" if spec is None else "both"
        raise TypeError(f"head_dim: expected it or a RotarySpec, got {got}")
    if isinstance(head_dim, RotarySpec):
        spec = head_dim
    if spec is None:
        return RotarySpec(head_dim, **options)  # type: ignore[arg-type]
    rotary_text(spec)  # raises for another type
    if options:
        raise ValueError(f"{next(iter(options))}: expected none beside a RotarySpec; set it there")
    return spec


class RotaryEmbedding(Leaf, nn.Module):
    """Rotates query and key by their positions.

    Without learned frequencies the module has no parameters or buffers, so there is nothing to
    cast, move or save. Learned frequencies are a parameter, initialised from the specification.
    They stay in float32 when the model is cast, for example to bfloat16, because positions would
    multiply the rounding error.

    Args:
        head_dim: Components of one head; or a :class:`RotarySpec`, which may also be passed as
            ``spec``.
        spec: A specification, instead of head_dim and ``options``.
        layout: Order of dimensions: "bshd" [batch, seq, heads, head_dim], "bhsd", "sbhd", or
            "thd" [tokens, heads, head_dim].
        numerics: How angles and products are rounded; see :class:`RotarySpec`. Default: the
            specification's, which is "exact" unless set.
        learned_frequencies: Make the frequencies a trainable parameter, ``frequencies``
            [rotary_dim / 2], in radians per position. Requires numerics "exact".
        frequency_sizes: Sizes of learned frequencies before rotary_dim / 2: (heads,), if each head
            has its own, or (axes, heads), if angles are also summed over the axes of positions.
            All begin with the values of the specification.
        heads: The number of heads that each query must have, or a divisor of it, as under tensor
            parallelism. Default: any number. A layout that does not fit is then noticed.
        key_heads: Heads of a key, in as many parts as the query's; or keys have as many heads as
            the query, if they are repeated. Default: any number.
        device: Device of learned frequencies.
        dtype: float64 for learned frequencies in float64; with any other dtype they are float32.
        **options: Fields of :class:`RotarySpec`.

    Raises:
        ValueError: A field, layout or numerics value is unknown; ``options`` are passed together
            with a specification; or learned frequencies are requested for a specification that
            depends on the sequence length, or with numerics other than "exact"; or
            ``frequency_sizes`` are not one or two positive numbers beside learned frequencies; or
            heads are not positive.
        TypeError: ``options`` contains a name that is not a field of :class:`RotarySpec`; or
            neither head_dim nor a specification is passed, or both.

    Examples:
        >>> import torch, posembed as pe
        >>> rope = pe.RotaryEmbedding(128, base=500000.0)
        >>> query, key = torch.randn(2, 16, 32, 128), torch.randn(2, 16, 8, 128)
        >>> query, key = rope(query, key)
        >>> checked = pe.RotaryEmbedding(128, heads=32, key_heads=8)
        >>> query, key = checked(query, key)
        >>> pe.RotaryEmbedding(8, learned_frequencies=True).bfloat16().frequencies.dtype
        torch.float32
    """

    frequencies: nn.Parameter | None
    # Of modules that an earlier version has pickled:
    frequency_sizes: tuple[int, ...] = ()
    heads: int | None = None
    key_heads: int | None = None

    @overload
    def __init__(self, head_dim: int, **options: Unpack[SizedOptions]) -> None: ...

    @overload
    def __init__(
        self,
        head_dim: RotarySpec,
        *,
        numerics: Numerics | None = None,
        **options: Unpack[ModuleOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        spec: RotarySpec,
        numerics: Numerics | None = None,
        **options: Unpack[ModuleOptions],
    ) -> None: ...

    def __init__(
        self,
        head_dim: int | RotarySpec | None = None,
        *,
        spec: RotarySpec | None = None,
        layout: Layout = "bshd",
        numerics: Numerics | None = None,
        learned_frequencies: bool = False,
        frequency_sizes: Sequence[int] = (),
        heads: int | None = None,
        key_heads: int | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.heads = None if heads is None else positive("heads", heads)
        self.key_heads = None if key_heads is None else positive("key_heads", key_heads)
        if heads is None and key_heads is not None:
            raise ValueError(f"key_heads: expected none without heads, got {key_heads}")
        self.spec = _specification(head_dim, spec, options)
        if numerics is not None:
            self.spec = dataclasses.replace(self.spec, numerics=numerics)
        one_of("layout", layout, *LAYOUTS)
        self.layout = layout
        self.register_parameter("frequencies", None)
        sizes = self.frequency_sizes = wholes("frequency_sizes", frequency_sizes)
        learned = flag("learned_frequencies", learned_frequencies)
        if len(sizes) > 2 or any(size <= 0 for size in sizes):
            raise ValueError(
                f"frequency_sizes: expected none, (heads,) or (axes, heads), got {sizes}"
            )
        if sizes and not learned:
            raise ValueError(
                f"frequency_sizes: expected none without learned_frequencies, got {sizes}"
            )
        if learned:
            if self.spec.is_dynamic:
                raise ValueError(
                    "learned_frequencies: expected a specification whose frequencies do not depend "
                    "on the length of the sequence: pass spec.resolve(seq_len)"
                )
            if self.spec.numerics != "exact":
                raise ValueError(
                    "numerics: expected 'exact' for learned frequencies, got "
                    f"{self.spec.numerics!r}"
                )
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            pairs = len(self.spec.frequencies())
            empty = torch.empty(*sizes, pairs, device=device, dtype=wide)
            self.frequencies = nn.Parameter(empty)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets learned frequencies to those of the specification."""
        if self.frequencies is not None:
            set_values(self.frequencies, self.spec.frequencies().expand(self.frequencies.shape))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts like ``to`` and ``half``, but never casts frequencies to 16 bits."""

        def keep_wide(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            narrow = result.dtype not in (torch.float32, torch.float64)
            return tensor.to(result.device) if narrow else result

        super()._apply(keep_wide, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Widens frequencies that ``load_state_dict(…, assign=True)`` would assign unchanged."""
        name = f"{prefix}frequencies"
        given = state_dict.get(name)
        if isinstance(given, Tensor) and given.dtype in (torch.bfloat16, torch.float16):
            state_dict = {**state_dict, name: given.detach().float()}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def spec(self) -> RotarySpec:
        """The specification of the rotation."""
        return self._spec

    @spec.setter
    def spec(self, spec: RotarySpec) -> None:
        self._spec = spec
        self._text = self._with_heads(spec.text)
        self._regimes = regimes(spec)

    def _with_heads(self, text: str) -> str:
        """The text of a specification as operators take it, which check the heads in front."""
        return text if self.heads is None else f"heads {self.heads} {self.key_heads or 0} {text}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of a module that an earlier version has pickled."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.spec = self._spec

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self._spec.head_dim

    @classmethod
    def from_config(
        cls,
        config: Any,
        layer_type: str | None = None,
        *,
        numerics: Numerics | None = None,
        **options: Unpack[FromConfig],
    ) -> Self:
        """Builds the module from a model's configuration; see :meth:`RotarySpec.from_huggingface`.

        Args:
            config: A dict, a ``PretrainedConfig``, or the path of a config.json or of its folder.
            layer_type: Needed if layers differ: "full_attention", "sliding_attention", and so on.
            numerics: As in the module.
            **options: ``part``, ``interleaved``, ``base``, ``ignore``, ``read_module`` and
                ``trust_remote_code`` of :meth:`RotarySpec.from_huggingface`; ``layout``,
                ``learned_frequencies``, ``device`` and ``dtype``. transformers' models have the
                layout "bhsd". ``heads`` and ``key_heads`` are the configuration's,
                if it states them; ``heads=None``: any number.

        Examples:
            >>> import torch, posembed as pe
            >>> config = {"model_type": "llama", "head_dim": 64, "rope_theta": 1e4,
            ...           "num_attention_heads": 8, "num_key_value_heads": 2}
            >>> rope = pe.RotaryEmbedding.from_config(config, layout="bhsd")
            >>> query, key = rope(torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64))
        """
        check_options("RotaryEmbedding.from_config", options, FromConfig.__annotations__)
        given: Any = dict(options)
        facts = {name: given.pop(name) for name in READING if name in given}
        if "heads" not in given:
            from posembed.models import reading

            sizes = reading.sizes_of(config, facts.get("part"))
            given["heads"] = sizes.heads
            given.setdefault("key_heads", None if sizes.heads is None else sizes.key_heads)
        spec = RotarySpec.from_huggingface(config, layer_type, **facts)
        return cls(spec, numerics=numerics, **given)

    def spec_for(self, seq_len: int | None) -> RotarySpec:
        """The specification, resolved if its frequencies depend on the length.

        LongRoPE has two resolved forms, so a compiled program has two graphs. Dynamic NTK has a
        different form for each length beyond the original context, which causes a graph break; to
        avoid it, compile the module that :meth:`resolve` returns.
        """
        if seq_len is None or self._regimes is None:
            return self._spec
        if type(seq_len) is not int:
            check_length(seq_len)
        near, far, original = self._regimes
        if seq_len <= original:
            return near
        if far is not None:
            return far
        if is_compiling():
            from posembed.specifications.uncompiled import resolved

            return resolved(self._spec, int(seq_len))  # type: ignore[no-any-return]
        return self._spec.resolve(int(seq_len))

    def _text_for(self, seq_len: int | None, query: Tensor, *where: Any) -> str:
        """The text of :meth:`spec_for`, in one step where each length has its own."""
        if seq_len is None:
            return self._text
        self._check_length(seq_len, query, *where)
        grows = self._regimes is not None and self._regimes[1] is None
        if not grows or seq_len <= self._regimes[2] or is_compiling():  # type: ignore[index]
            return self._with_heads(self.spec_for(seq_len).text)
        return self._with_heads(self._spec.resolved_text(int(seq_len)))

    def resolve(self, seq_len: int) -> RotaryEmbedding:
        """A module with the frequencies for one sequence length.

        Learned frequencies do not depend on the length and are shared with this module.
        """
        module = RotaryEmbedding(
            self.spec.resolve(seq_len),
            layout=self.layout,
            heads=self.heads,
            key_heads=self.key_heads,
        )
        module.frequencies = self.frequencies
        module.frequency_sizes = self.frequency_sizes
        return module

    def _frequencies(self) -> Tensor | None:
        """``self.frequencies``, which must be wide."""
        frequencies: Tensor | None = self._parameter("frequencies")
        if frequencies is not None:
            refuse_narrow(frequencies)
        return frequencies

    def _check_length(
        self,
        seq_len: int,
        query: Tensor,
        positions: Tensor | None,
        offset: int | Tensor,
        cu_seqlens: Tensor | None,
    ) -> None:
        """Raises ValueError for a length without effect, or smaller than the sequence."""
        if type(seq_len) is not int:
            check_length(seq_len)
        if self._regimes is None:
            raise ValueError(
                f"seq_len: expected none, because the frequencies do not depend on the length of "
                f"the sequence, got {seq_len}"
            )
        tokens = _size(query, LAYOUTS[self.layout][1])
        if tokens is None:
            return
        least = 0
        if cu_seqlens is None and not isinstance(offset, Tensor):
            counted = positions is None and isinstance(offset, (int, Integral))
            least = tokens + offset if counted else 0
        elif _is_readable(offset if cu_seqlens is None else cu_seqlens):  # type: ignore[arg-type]
            positions = of_layout(offset, positions, query, self.layout, cu_seqlens)
        if positions is not None and _is_readable(positions):
            last = positions.max().item()
            if not math.isfinite(last):
                raise ValueError(f"positions: expected finite numbers, got {last}")
            least = int(last) + 1
        if seq_len < least:
            raise ValueError(f"seq_len: expected at least {least}, got {seq_len}")

    @overload
    def forward(
        self, query: Tensor, key: None = None, positions: Tensor | None = None, **at: Unpack[At]
    ) -> Tensor: ...

    @overload
    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None, **at: Unpack[At]
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        inverse: bool = False,
        seq_len: int | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotated query, or (query, key); see :func:`posembed.functional.rotary`.

        ``offset`` may be int32 or int64 [batch]: the position of each sample's first token; beside
        ``cu_seqlens`` [documents]: that of each document's.
        ``seq_len`` is the length of the whole sequence; specifications whose frequencies depend on
        it (dynamic NTK, LongRoPE) need it. All calls that share a key cache must use the same
        resolved specification. For LongRoPE it may be int32 or int64 [batch], or [tokens] in layout
        "thd": the length of each sample. Both forms of the rotation are then computed.
        """
        if isinstance(seq_len, Tensor):
            where = (offset, inverse, self._frequencies(), cu_seqlens)
            return self._by_length(seq_len, query, key, positions, *where)
        if (  # nothing special: in one-token decoding every step between call and operator counts
            type(query) is Tensor
            and type(offset) is int
            and seq_len is None
            and cu_seqlens is None
            and inverse is False
            and self._parameters.get("frequencies", self) is None
        ):
            if key is None:
                return ROTARY(query, self._text, positions, self.layout, offset)
            return ROTARY_PAIR(query, key, self._text, positions, self.layout, offset)
        text = self._text_for(seq_len, query, positions, offset, cu_seqlens)
        given = (query, key, positions, text, self.layout, offset, inverse)
        return rotated(*given, self._frequencies(), cu_seqlens)

    def _by_length(
        self, lengths: Tensor, query: Tensor, key: Tensor | None, positions: Any, *where: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """:meth:`forward` with a length for each sample."""
        if self._regimes is None or self._regimes[1] is None:
            why = "none, because the frequencies do not depend on the length of the sequence"
            if self._regimes is not None:
                why = "a number, because dynamic NTK has other frequencies for every length"
            raise ValueError(f"seq_len: expected {why}, got a tensor {list(lengths.shape)}")
        axis = {"sbhd": 1}.get(self.layout, 0)
        if lengths.dtype not in INTEGERS or lengths.shape != query.shape[axis : axis + 1]:
            raise ValueError(
                f"seq_len: expected int32 or int64 [{query.shape[axis]}], a length for each "
                f"sample, got {lengths.dtype} {list(lengths.shape)}"
            )
        near_spec, far_spec, original = self._regimes
        shape = [-1 if dim == axis else 1 for dim in range(query.dim())]
        is_near = (lengths <= original).view(shape)
        texts = (self._with_heads(spec.text) for spec in (near_spec, far_spec) if spec)
        near, far = (rotated(query, key, positions, text, self.layout, *where) for text in texts)
        if isinstance(near, Tensor) and isinstance(far, Tensor):
            return torch.where(is_near, near, far)
        (near_query, near_key), (far_query, far_key) = near, far
        query = torch.where(is_near, near_query, far_query)
        return query, torch.where(is_near, near_key, far_key)

    @overload
    def rotate_(
        self, query: Tensor, key: None = None, positions: Tensor | None = None, **at: Unpack[AtOne]
    ) -> Tensor: ...

    @overload
    def rotate_(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None, **at: Unpack[AtOne]
    ) -> tuple[Tensor, Tensor]: ...

    def rotate_(
        self,
        query: Tensor,
        key: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        inverse: bool = False,
        seq_len: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """In-place :meth:`forward` for inference; returns the input tensors.

        See :func:`posembed.functional.rotary_`.
        """
        text = self._text_for(seq_len, query, positions, offset, cu_seqlens)
        given = (query, key, positions, text, self.layout, offset, inverse)
        return rotated_in_place(*given, self._frequencies(), cu_seqlens)

    def rotate_packed(
        self,
        qkv: Tensor,
        positions: Tensor | None = None,
        *,
        heads: int | None = None,
        key_heads: int | None = None,
        order: PackedOrder = "blocks",
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        inverse: bool = False,
        seq_len: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query and key of a packed projection, and its value, with one gradient for it.

        See :func:`posembed.functional.rotary_packed`. ``heads`` and ``key_heads`` are the module's
        by default.
        """
        given = (positions, order, self.layout, offset, cu_seqlens, self._frequencies(), inverse)
        text = self._packed_text(qkv, seq_len, positions, offset, cu_seqlens)
        return rotated_packed(qkv, text, *self._packing(heads, key_heads), *given)

    def rotate_packed_(
        self,
        qkv: Tensor,
        positions: Tensor | None = None,
        *,
        heads: int | None = None,
        key_heads: int | None = None,
        order: PackedOrder = "blocks",
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        inverse: bool = False,
        seq_len: int | None = None,
    ) -> Tensor:
        """In-place :meth:`rotate_packed` for inference; returns ``qkv``.

        See :func:`posembed.functional.rotary_packed_`.
        """
        given = (positions, order, self.layout, offset, cu_seqlens, self._frequencies(), inverse)
        text = self._packed_text(qkv, seq_len, positions, offset, cu_seqlens)
        return rotated_packed_in_place(qkv, text, *self._packing(heads, key_heads), *given)

    def _packing(self, heads: int | None, key_heads: int | None) -> tuple[int, int | None]:
        """The heads of a packed projection: those given, or the module's."""
        if heads is not None:
            return heads, key_heads
        if self.heads is None:
            raise ValueError("heads: expected a number, because the module has none, got None")
        return self.heads, self.key_heads if key_heads is None else key_heads

    def _packed_text(self, qkv: Tensor, seq_len: int | None, *where: Any) -> str:
        """The text of the specification for a projection, [batch, seq, width] for "bhsd"."""
        by_layout = qkv.unsqueeze(1) if seq_len is not None and self.layout == "bhsd" else qkv
        return self._text_for(seq_len, by_layout, *where)

    def rerotate_(
        self,
        key: Tensor,
        old_positions: Tensor,
        new_positions: Tensor,
        *,
        seq_len: int | None = None,
        new_spec: RotarySpec | None = None,
    ) -> Tensor:
        """Moves rotated keys to new positions in place, and returns them.

        See :func:`posembed.functional.rerotate_`.
        """
        if seq_len is not None:
            for positions in (old_positions, new_positions):
                self._check_length(seq_len, key, positions, 0, None)
        return functional.rerotate_(
            key,
            old_positions,
            new_positions,
            spec=self.spec_for(seq_len),
            new_spec=new_spec,
            layout=self.layout,
            frequencies=self._frequencies(),
        )

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        learned = "" if self.frequencies is None else ", learned_frequencies=True"
        sizes = f", frequency_sizes={self.frequency_sizes}" if self.frequency_sizes else ""
        heads = "" if self.heads is None else f", heads={self.heads}"
        heads += "" if self.key_heads is None else f", key_heads={self.key_heads}"
        return f"{self.spec.describe()}, layout={self.layout!r}{learned}{sizes}{heads}"
