"""RotarySpec, Sections: the numbers that define a rotation."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from posembed.glue.gate import gated
from posembed.glue.other_names import check_options
from posembed.glue.validation import convert_fields, fields_of, positive, shown, whole
from posembed.models.options import READING, Reading
from posembed.specifications.scaling import RotaryScaling, Scaling, XPosScaling, meant_by
from posembed.specifications.score_scale import ScoreScale
from posembed.specifications.text import canonical_text
from posembed.tables import gguf

Numerics = Literal["exact", "float32", "float32_product", "float32_rounded_table", "float32_polar"]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Sections:
    """For positions with several axes (time, height, width): which axis rotates each pair.

    Args:
        sizes: Number of pairs of each axis, one axis after the other (Qwen2-VL); 0 for a position
            axis that rotates no pair.
        interleaved: Alternate between axes instead; left-over pairs belong to axis 0 (Qwen3-VL).
        restart: Each axis uses the full series of frequencies (vision towers).
        axis_of_pair: The axis of each pair, for any other order; instead of ``sizes``.
        axes: Number of position axes, with ``axis_of_pair``, if the last axes rotate no pair; None:
            up to the last axis that rotates one. Positions may omit such trailing axes.
        within_axes: Half-split pairs lie within the components of their axis (Allegro): pair ``i``
            of an axis with ``n`` pairs, whose components begin at ``c``, is (c + i, c + i + n).
            Default: the whole window is split in two. Interleaved pairs always lie within an axis.

    Raises:
        ValueError: Not exactly one of ``sizes`` and ``axis_of_pair`` is passed; ``interleaved`` is
            passed with the latter or ``axes`` with the former; or a size is negative or not an
            integer.

    Examples:
        >>> import posembed as pe
        >>> pe.Sections((1, 1, 2)).axis_of_pair
        (0, 1, 2, 2)
    """

    axis_of_pair: tuple[int, ...]
    restart: bool
    axes: int | None
    within_axes: bool

    def __init__(
        self,
        sizes: Iterable[int] | None = None,
        interleaved: bool = False,
        restart: bool = False,
        *,
        axis_of_pair: Iterable[int] | None = None,
        axes: int | None = None,
        within_axes: bool = False,
    ) -> None:
        if (sizes is None) == (axis_of_pair is None):
            raise ValueError("Sections: expected either sizes or axis_of_pair")
        if sizes is not None:
            whole_sizes = [whole("sizes", size) for size in sizes]
            axis_of_pair = torch.ops.posembed.rotary_sections.default(whole_sizes, interleaved)
            if axes is not None:
                raise ValueError(f"axes: expected none beside sizes, got {axes}")
            axes = max(1, len(whole_sizes))
        elif interleaved:
            raise ValueError("interleaved: expected False beside axis_of_pair")
        assert axis_of_pair is not None
        axis_of = tuple(whole("axis_of_pair", axis) for axis in axis_of_pair)
        used = 1 + max(axis_of, default=0)
        declared = used if axes is None else whole("axes", axes)
        object.__setattr__(self, "axis_of_pair", axis_of)
        object.__setattr__(self, "restart", bool(restart))
        object.__setattr__(self, "axes", None if declared == used else declared)
        object.__setattr__(self, "within_axes", bool(within_axes))

    def __repr__(self) -> str:
        """By sizes where these give the axes of all pairs: ``Sections((16, 24, 24))``."""
        axes = 1 + max(self.axis_of_pair, default=0) if self.axes is None else self.axes
        sizes = tuple(self.axis_of_pair.count(axis) for axis in range(axes))
        options = [f"axis_of_pair={self.axis_of_pair}"]
        options += [] if self.axes is None else [f"axes={self.axes}"]
        for interleaved in (True, False):
            with contextlib.suppress(ValueError):  # there are more pairs than any head has
                if self == Sections(sizes, interleaved, self.restart, within_axes=self.within_axes):
                    options = [repr(sizes), *["interleaved=True"] * interleaved]
        options += [f"{name}=True" for name in ("restart", "within_axes") if getattr(self, name)]
        return f"Sections({', '.join(options)})"


class RotaryFields(TypedDict, total=False):
    """The fields of :class:`RotarySpec` besides head_dim, as options of other functions."""

    base: float
    rotary_dim: int | None
    rotary_start: int
    interleaved: bool
    scaling: RotaryScaling | None
    sections: Sections | None
    custom_frequencies: Sequence[float] | None
    custom_attention_factor: float | None
    reverse: bool
    numerics: Numerics
    score_scale: ScoreScale | None


class AngleError(NamedTuple):
    """The error of an angle, and the position where it is."""

    radians: float
    position: int


@dataclasses.dataclass(frozen=True)
class RotarySpec:
    """The parameters of a rotary embedding: immutable, hashable, comparable, picklable.

    Pair ``i`` rotates by ``base ** (-2 * i / rotary_dim)`` radians per position.

    Args:
        head_dim: Components of one head.
        base: The base of the frequencies ("theta").
        rotary_dim: Number of rotated components; default: all.
        rotary_start: The first rotated component.
        interleaved: Pairs (2i, 2i + 1), as GPT-J; otherwise (i, i + rotary_dim / 2), as Llama.
        scaling: Context extension, such as :class:`YarnScaling`.
        sections: The position axis of each pair, for positions with several axes.
        custom_frequencies: Radians per position [rotary_dim / 2], instead of the formula above.
        custom_attention_factor: Multiplies rotated queries and keys; only with
            ``custom_frequencies``, because scalings have their own.
        reverse: Rotate in the opposite direction.
        numerics: How angles and products are rounded. "exact": exact angles at every position, and
            one rounding of the result. The others reproduce PyTorch programs bit for bit, with
            float32 frequencies and angles. "float32": as in transformers' Llama, with cosine, sine
            and each step in the data's dtype. "float32_product": all in float32, and the result
            rounded once. "float32_rounded_table": the same with cosine and sine in the data's
            dtype. "float32_polar": as in Meta's complex form. docs/guide/rotary_bits.md lists which
            program uses which.
        score_scale: What the model multiplies its scores by besides ``1 / sqrt(head width)``. The
            rotation does not, so specifications that differ in it alone are equal.

    Raises:
        ValueError: The numbers are inconsistent; the message names the field.

    Examples:
        >>> import posembed as pe
        >>> spec = pe.RotarySpec(128, base=500000.0)
        >>> spec == pe.RotarySpec.from_json(spec.to_json())
        True
    """

    head_dim: int
    _: dataclasses.KW_ONLY
    base: float = 10000.0
    rotary_dim: int | None = None
    rotary_start: int = 0
    interleaved: bool = False
    scaling: RotaryScaling | None = None
    sections: Sections | None = None
    custom_frequencies: Sequence[float] | None = None  # stored as a tuple
    custom_attention_factor: float | None = None
    reverse: bool = False
    numerics: Numerics = "exact"
    score_scale: ScoreScale | None = dataclasses.field(default=None, compare=False)
    # The longest sequence that the configuration states, for explain().
    max_positions: int | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    # "read from the module", unless rules gave it.
    source: str = dataclasses.field(default="", init=False, repr=False, compare=False)
    text: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise ValueError(
                f"scaling: expected {meant_by(self.scaling)}, got {shown(self.scaling)}"
            )
        if self.sections is not None and not isinstance(self.sections, Sections):
            hint = f"; pe.Sections({self.sections!r})" * isinstance(self.sections, (tuple, list))
            raise ValueError(f"sections: expected Sections, got {self.sections!r}{hint}")
        if self.score_scale is not None and not isinstance(self.score_scale, ScoreScale):
            raise ValueError(f"score_scale: expected a ScoreScale, got {self.score_scale!r}")
        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        convert_fields(self)
        object.__setattr__(self, "text", canonical_text("rotary", self._to_dict()))

    def _to_dict(self) -> dict[str, Any]:
        fields = fields_of(self)
        if self.scaling is not None:
            fields["scaling"] = self.scaling.to_dict()
        if self.sections is not None:
            fields["sections"] = fields_of(self.sections)
        if self.score_scale is not None:
            fields["score_scale"] = fields_of(self.score_scale)
        return fields

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """The node that torch.fx puts into a graph for a specification."""
        return tracer.create_node("call_function", rotary_spec, (self.text,), {})

    def to_json(self) -> str:
        """JSON text; equal specifications with equal scales have equal text, in C++ too."""
        return self.text

    @classmethod
    def from_json(cls, text: str) -> RotarySpec:
        """The specification that :meth:`to_json` wrote.

        Raises:
            ValueError: The text is not JSON, or has a key that is not a field.
        """
        checked: Any = gated(torch.ops.posembed.rotary_specification.default)(text)
        return cls._of_canonical(checked)

    @classmethod
    def _of_canonical(cls, text: str) -> RotarySpec:
        """The specification for a text that the C++ library wrote and has already checked."""
        fields: dict[str, Any] = json.loads(text)
        if fields["scaling"] is not None:
            fields["scaling"] = Scaling.from_dict(fields["scaling"])
        if fields["sections"] is not None:
            fields["sections"] = Sections(**fields["sections"])
        scale = fields.setdefault("score_scale", None)  # absent if there is none
        if scale is not None:
            fields["score_scale"] = ScoreScale(**scale)
        if fields["custom_frequencies"] is not None:
            fields["custom_frequencies"] = tuple(fields["custom_frequencies"])
        spec = object.__new__(cls)
        for name, value in {**fields, "text": text}.items():
            object.__setattr__(spec, name, value)
        return spec

    @classmethod
    def from_huggingface(
        cls,
        config: Any,
        layer_type: str | None = None,
        *,
        part: str | None = None,
        interleaved: bool | None = None,
        base: float | None = None,
        ignore: Iterable[str] = (),
        read_module: bool = False,
        trust_remote_code: bool = False,
    ) -> RotarySpec:
        """Reads a model's specification from its configuration.

        Accepts configurations of transformers 4 and 5 and of diffusers (the classes of
        :meth:`from_preset`), Meta's and Mistral's params.json, and GGUF files and metadata. What a
        published file omits, posembed's catalogue of transformers' classes fills in. Pass tensors
        that change the rotation as additional keys: GGUF's "rope_freqs.weight" (Llama 3, Gemma 4),
        "rope_factors_short.weight" and "rope_factors_long.weight" (Phi-3). If the keys say that the
        model does not rotate, the specification has rotary_dim 0.

        Args:
            config: A dict, a ``PretrainedConfig``, or the path of a config.json, of its folder or
                of a GGUF file.
            layer_type: Needed if layers differ: "full_attention", "sliding_attention", and so on.
            part: A nested configuration, such as "vision_config" or "talker_config.text_config";
                default: that of the text model, or the top level. Also a part of a layer that
                rotates in its own way, alone or after a dot: "indexer", "linear_attention".
            interleaved: The pairing, to check it; where rope_interleave is null, to state it.
            base: The base of params.json without rope_theta; or the layers of one base, where
                layer_rope_theta has several.
            ignore: Keys to ignore: posembed does not know them, and they do not affect the
                rotation.
            read_module: Where there is no rule for the model, or for a key, build the model of the
                installed transformers, without memory for its weights, and read the rotation of a
                text model off what its attention gets. ``spec.source`` is then "read from the
                module". Frequencies that depend on the length are refused; ``score_scale`` is read
                where the model calls torch's attention function.
            trust_remote_code: Also run the code in the folder ``config``, of models that are not in
                transformers.

        Raises:
            ValueError: The model type is unknown or does not rotate; a key is missing, not
                understood, or contradicts another; layers of this type do not exist or do not
                rotate; or an argument has no effect. The message names the key or the argument.
            TypeError: ``config`` is of another type.

        Examples:
            >>> import posembed as pe
            >>> config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
            ...           "rope_theta": 500000.0}
            >>> pe.RotarySpec.from_huggingface(config).head_dim
            128
        """
        from posembed.models import reading

        facts: Reading = {"part": part, "interleaved": interleaved, "base": base, "ignore": ignore}
        facts |= {"read_module": read_module, "trust_remote_code": trust_remote_code}
        return reading.rotary(config, layer_type=layer_type, **facts)

    @classmethod
    def from_preset(cls, name: str, head_dim: int | None = None) -> RotarySpec:
        """The specification of an image or video model, whose positions have several axes.

        docs/families/rotary.md lists the presets and the positions that each expects. To read the
        numbers of a checkpoint instead, pass its config.json of diffusers to
        :meth:`from_huggingface`.

        Args:
            name: "flux", "flux2", "flux3", "wan", "qwen_image", "hunyuan_video", "cogvideox",
                "z_image", "cosmos", "allegro", "hidream", "lumina2", "dinov3", "eva02" or "sam2".
            head_dim: For models that come with heads of several sizes; default: that of most.

        Raises:
            ValueError: The name is unknown, the model has no specification (its message says what
                to use instead), or its heads do not have that size.

        Examples:
            >>> import posembed as pe
            >>> spec = pe.RotarySpec.from_preset("flux")
            >>> spec == pe.RotarySpec(
            ...     128, interleaved=True, sections=pe.Sections((8, 28, 28), restart=True)
            ... )
            True
        """
        try:
            text: Any = gated(torch.ops.posembed.rotary_preset.default)(name, head_dim)
        except ValueError as error:
            if not str(error).startswith("name: expected"):
                raise
            remedy = "from_huggingface reads a language model's config.json"
            raise ValueError(f"{error}; {remedy}") from None
        return cls._of_canonical(text)

    @classmethod
    def axial(cls, axes: Iterable[RotarySpec], *, within_axes: bool = True) -> RotarySpec:
        """The specification of a head that has a part for each axis of positions.

        The parts follow one another; each has a base and a scaling of its own.

        Args:
            axes: Specifications of the parts, as heads of their own.
            within_axes: Half-split pairs lie within each part; otherwise the whole head is split in
                two. Interleaved pairs always lie within a part.

        Raises:
            ValueError: A part does not rotate as a whole, has several axes, or differs from the
                others in more than size, base, scaling and frequencies.

        Examples:
            >>> import posembed as pe
            >>> time, row = pe.RotarySpec(4, base=100.0), pe.RotarySpec(8, base=10000.0)
            >>> pe.RotarySpec.axial([time, row, row]).frequencies().tolist()[:3]
            [1.0, 0.1, 1.0]
        """
        texts = [axis.text for axis in axes]
        return cls._of_canonical(torch.ops.posembed.rotary_axial.default(texts, within_axes))

    @classmethod
    def from_gguf(
        cls,
        path: str | os.PathLike[str],
        layer_type: str | None = None,
        *,
        ignore: Iterable[str] = (),
    ) -> RotarySpec:
        """Reads a model's specification from a GGUF file: its metadata and its frequency tensors.

        :meth:`from_huggingface`, :meth:`for_layers` and :meth:`posembed.ALiBi.from_config` accept
        the file, too. Only quantised frequency tensors need the gguf package.

        Args:
            path: The file; of a split model, the first part.
            layer_type: As in :meth:`from_huggingface`.
            ignore: As in :meth:`from_huggingface`.

        Raises:
            ValueError: The file is not GGUF, or as in :meth:`from_huggingface`.
            FileNotFoundError: There is no such file.

        Examples:
            >>> import pathlib, tempfile, gguf, posembed as pe
            >>> folder = tempfile.TemporaryDirectory()
            >>> path = pathlib.Path(folder.name, "model.gguf")
            >>> writer = gguf.GGUFWriter(path, "qwen3")
            >>> for key in ("embedding_length", "attention.head_count", "context_length"):
            ...     writer.add_uint32(f"qwen3.{key}", 64)
            >>> writer.add_uint32("qwen3.attention.key_length", 128)
            >>> writer.add_float32("qwen3.rope.freq_base", 1000000.0)
            >>> writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.close()
            >>> pe.RotarySpec.from_gguf(path).base
            1000000.0
            >>> folder.cleanup()
        """
        os.stat(path)  # raises FileNotFoundError
        if not gguf.is_gguf(path):
            raise ValueError(f"path: expected a GGUF file, got {os.fspath(path)!r}")
        return cls.from_huggingface(path, layer_type, ignore=ignore)

    @classmethod
    def for_layers(cls, config: Any, **reading: Unpack[Reading]) -> list[RotarySpec | None]:
        """Reads one specification per layer; None for a layer that does not rotate.

        Args:
            config: As in :meth:`from_huggingface`.
            **reading: ``part``, ``interleaved``, ``base``, ``ignore``, ``read_module`` and
                ``trust_remote_code``, as there.

        Returns:
            A list with an entry for each layer, in the model's order.

        Raises:
            ValueError: As in :meth:`from_huggingface`, or the configuration does not state each
                layer's type.
            TypeError: ``config`` is not a configuration.

        Examples:
            >>> import posembed as pe
            >>> config = {"model_type": "smollm3", "hidden_size": 2048, "num_attention_heads": 16,
            ...           "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "rope_theta": 5e6}
            >>> [spec is not None for spec in pe.RotarySpec.for_layers(config)]
            [True, True, True, False]
        """
        from posembed.models.reading import rotary_layers

        check_options("RotarySpec.for_layers", reading, READING)
        return rotary_layers(config, **reading)

    def resolve(self, seq_len: int) -> RotarySpec:
        """The specification with the frequencies for one sequence length.

        Returns itself if the frequencies do not depend on the length. Do not mix keys that were
        rotated by different resolved specifications in one cache.
        """
        resolved = self.resolved_text(whole("seq_len", seq_len))
        return self if resolved == self.text else self._of_canonical(resolved)

    def resolved_text(self, seq_len: int) -> str:
        """``resolve(seq_len).to_json()`` in one step, for generation, where the length grows."""
        return torch.ops.posembed.rotary_resolve.default(self.text, seq_len)  # type: ignore[no-any-return]

    @property
    def is_dynamic(self) -> bool:
        """Whether the frequencies depend on the sequence length; :meth:`resolve` fixes them.

        Examples:
            >>> import posembed as pe
            >>> spec = pe.RotarySpec(64, scaling=pe.DynamicNtkScaling(2.0, 4096))
            >>> spec.is_dynamic, spec.resolve(8192).is_dynamic
            (True, False)
        """
        return self.resolve(0) is not self

    def for_keys(self) -> RotarySpec:
        """The specification for rotating keys without a query; it differs only for xPos.

        By default a single tensor is treated as a query. ``rotary(query, key)`` does not need
        this.

        Examples:
            >>> import torch, posembed as pe
            >>> spec = pe.RotarySpec(64, scaling=pe.XPosScaling())
            >>> query, key = torch.randn(1, 9, 2, 64), torch.randn(1, 9, 2, 64)
            >>> alone = pe.functional.rotary(key, spec=spec.for_keys())
            >>> bool((alone == pe.functional.rotary(query, key, spec=spec)[1]).all())
            True
        """
        if not isinstance(self.scaling, XPosScaling):
            return self
        text: str = torch.ops.posembed.rotary_for_keys.default(self.text)
        return self if text == self.text else self._of_canonical(text)

    def frequencies(self, seq_len: int | None = None) -> Tensor:
        """Radians per position of each pair: float64 [rotary_dim / 2].

        Without ``seq_len``: those for the original context.
        """
        text = self.text if seq_len is None else self.resolve(seq_len).text
        return torch.ops.posembed.rotary_frequencies.default(text)  # type: ignore[no-any-return]

    def wavelengths(self, seq_len: int | None = None) -> Tensor:
        """Positions per turn of each pair: float64 [rotary_dim / 2]; inf for unrotated pairs."""
        text = self.text if seq_len is None else self.resolve(seq_len).text
        return torch.ops.posembed.rotary_wavelengths.default(text)  # type: ignore[no-any-return]

    def describe(self) -> str:
        """The options that differ from the defaults, as modules print them."""
        return torch.ops.posembed.rotary_description.default(self.text)  # type: ignore[no-any-return]

    def explain(self, seq_len: int | None = None) -> str:
        """A human-readable description: pairs, wavelengths, scaling, scale of scores.

        It also tells the largest error of float32 angles in ``seq_len`` positions; without it, in
        as many as the configuration states, or the scaling.

        Raises:
            ValueError: ``seq_len`` is not a positive whole number.
        """
        length = None if seq_len is None else positive("seq_len", seq_len)
        explanation = torch.ops.posembed.rotary_explanation.default
        explained: str = explanation(self.text, length, self.max_positions)
        return f"{explained}\n{self.source}" if self.source else explained

    def float32_error(self, length: int) -> AngleError:
        """See :func:`posembed.analysis.float32_error`."""
        length = positive("length", length)
        return AngleError(*torch.ops.posembed.rotary_float32_error.default(self.text, length))

    def _repr_html_(self) -> str:
        """The description, for notebooks."""
        sentence, _, rest = html.escape(self.explain()).partition("\n")
        return f"<p>{sentence}</p><pre>{rest}</pre>"

    def diff(self, other: RotarySpec) -> str:
        """Describes the differences, and the first position where angles differ by over 1e-3.

        Raises:
            TypeError: ``other`` is not a specification.
        """
        if not isinstance(other, RotarySpec):
            remedy = (
                "; pass its spec" if isinstance(getattr(other, "spec", None), RotarySpec) else ""
            )
            raise TypeError(f"other: expected a RotarySpec, got {type(other).__name__}{remedy}")
        return torch.ops.posembed.rotary_difference.default(self.text, other.text)  # type: ignore[no-any-return]

    @property
    def attention_factor(self) -> float:
        """The factor that multiplies rotated queries and keys (within the original context)."""
        return torch.ops.posembed.rotary_attention_factor.default(self.text)  # type: ignore[no-any-return]


def rotary_spec(text: str) -> RotarySpec:
    """:meth:`RotarySpec.from_json` as a function that torch.fx can refer to by name."""
    return RotarySpec.from_json(text)
