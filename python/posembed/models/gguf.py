"""GGUF metadata: keys that begin with the architecture.

gguf_architectures.json has what llama.cpp's program adds to them, and where each entry is taken
from. Numbers of YaRN that a file states are used even where llama.cpp ignores them. Tensors
that belong to the rotation are keys: "rope_freqs.weight", "rope_factors_short.weight",
"rope_factors_long.weight".
"""

from __future__ import annotations

import dataclasses
from typing import Any

from posembed.models import scalings
from posembed.models.axes import in_turns
from posembed.models.data import table
from posembed.models.fields import (
    IN_FULL,
    Fields,
    Keys,
    base_number,
    is_number,
    positive,
    real,
    reals,
    same,
    shown,
    text_of,
    whole,
    wholes,
)
from posembed.models.gguf_layers import has_windows, layers_of
from posembed.models.layers import check_type
from posembed.models.options import Options
from posembed.specifications import RotarySpec, Sections
from posembed.specifications.scaling import (
    LinearScaling,
    LongRopeScaling,
    NtkScaling,
    RotaryScaling,
    YarnScaling,
)

WITHOUT_EFFECT = {"part": "GGUF metadata has no parts"}
FULL = "full_attention"
SLIDING = "sliding_attention"
# Of files without rope.freq_base (llama_hparams, llama-model.cpp: 10000 before the key is read).
PROGRAM_BASE = 10000.0

# ------------------------------------------------------------------------------------ a file's keys


def is_metadata(fields: Fields) -> bool:
    """Whether this is the metadata of a GGUF file."""
    return "general.architecture" in fields


def keys_of_architecture(fields: Fields, architecture: str) -> Fields:
    """The keys that begin with the architecture, without it."""
    start = architecture + "."
    return {key[len(start) :]: value for key, value in fields.items() if key.startswith(start)}


def rules_of(architecture: str) -> Fields:
    """The architecture's entry; empty for an unknown one."""
    rules: Fields = table("gguf_architectures")["architectures"].get(architecture, {})
    return rules


class Metadata:
    """A file's keys: the model's, those about rotation, and the tensors that belong to it.

    Raises:
        ValueError: The architecture is not known, does not rotate, or rotates in a way that has no
            specification.
    """

    def __init__(self, fields: Fields) -> None:
        self.architecture = text_of(fields.get("general.architecture"))
        self.name = f"general.architecture {shown(self.architecture)}"
        own = keys_of_architecture(fields, self.architecture)
        self.rules = rules_of(self.architecture)
        self.sliding: Fields = self.rules.get("sliding", {})
        self.model = Keys(own, "the metadata")
        self.rope = Keys(keys_of_architecture(own, "rope"), f"{self.architecture}.rope")
        tensors = {key: value for key, value in fields.items() if key.startswith("rope_")}
        self.tensors = Keys(tensors, "tensors")
        if not self.rules:
            raise ValueError(f"{self.name} is not known: {IN_FULL}")
        if "instead" in self.rules:
            raise ValueError(f"{self.name} does not rotate: it has {self.rules['instead']}")
        if "refused" in self.rules:
            raise ValueError(f"{self.name} has no single specification: {self.rules['refused']}")
        self._check_refused()
        self._check_block_count()

    def _check_refused(self) -> None:
        """Rejects files whose value of one key makes llama.cpp rotate in another way."""
        rule = self.rules.get("refused_if")
        if rule is None:
            return
        value = self.model.take(rule["key"])
        if value == rule["equals"] if "equals" in rule else value:
            raise ValueError(
                f"{rule['key']}: {shown(value)} is not understood for {self.name}: {rule['why']}"
            )

    def _check_block_count(self) -> None:
        """Baichuan: the number of layers tells which of its models rotate."""
        counts = self.rules.get("block_counts")
        if counts is None:
            return
        count = self.model.need("block_count")
        if count == self.rules.get("alibi", {}).get("block_count", object()):
            raise ValueError(
                f"{self.name} does not rotate with {shown(count)} layers: it has ALiBi"
            )
        if count not in counts:
            raise ValueError(
                f"block_count: expected one of {shown(counts)} for {self.name}, got {shown(count)}"
            )


# ------------------------------------------------------------------------------- numbers of a layer


def _own_width(keys: Keys, key: str, known: bool, slides: bool, others: Any) -> Any:
    """The width of layers with a sliding window.

    Architectures without such widths may only repeat that of the others.
    """
    own = keys.take(key)
    if not known and own is not None and own != others:
        raise ValueError(
            f"{key}: not understood for this architecture, whose layers are alike: expected "
            f"{shown(others)}, got {shown(own)}"
        )
    return own if slides and own is not None else others


def _head_dim_of(file: Metadata) -> Any:
    """The width of a head: as given, or a part of the model's."""
    given = file.model.take("attention.key_length")
    if given:
        return given
    width, heads = "embedding_length", "attention.head_count"
    number = file.model.need(heads)
    if isinstance(number, list) and number:
        number = number[0]
    return whole(width, file.model.need(width)) // positive(heads, number)


def _widths_of(file: Metadata, slides: bool) -> tuple[int, int]:
    """Components of a head, and how many are rotated."""
    count, key = "dimension_count", "attention.key_length"
    stated = file.rope.take(count)
    own = bool(file.sliding.get("rotary_dim"))
    if file.rules.get("latent"):  # the rotated components are a separate head
        _own_width(file.rope, "dimension_count_swa", own, slides, stated)
        rotary_dim = whole(count, file.rope.need(count))
        return rotary_dim, rotary_dim
    every = _head_dim_of(file)
    width = _own_width(file.model, f"{key}_swa", bool(file.sliding.get("head_dim")), slides, every)
    head_dim = whole(key, width)
    rotated = _own_width(file.rope, "dimension_count_swa", own, slides, stated or every)
    rotary_dim = whole(count, rotated)
    if not slides and file.rules.get("half_rotary_dim"):
        rotary_dim //= 2
    if file.rules.get("whole_head") and rotary_dim != head_dim:
        raise ValueError(f"{count}: expected the whole head, {head_dim}, got {rotary_dim}")
    return head_dim, rotary_dim


def _base_of(file: Metadata, stated: float | None, slides: bool) -> float:
    """The base of layers with a sliding window, or that of all layers.

    Their own is in the file or in llama.cpp's program; so is that of the others.
    """
    key, name = "freq_base_swa", f"'{file.architecture}'"
    rule, own = file.sliding.get("base"), file.rope.take(key)
    if rule is None and own is not None:
        raise ValueError(f"{key}: not understood for {name}, whose layers are alike")
    if slides and rule != "shared" and own is not None:
        return base_number(key, own)
    if slides and rule == "stated":
        return base_number(key, file.rope.need(key))
    if slides and is_number(rule):
        return base_number(key, rule)
    given = (file.rope.take("freq_base"), stated, file.rules.get("program_base"))
    base = same("rope.freq_base", given)
    base = PROGRAM_BASE if base is None else base
    if rule == "shared" and own is not None and own != base:
        raise ValueError(
            f"{key}: expected {shown(base)}, the base that llama.cpp has for all layers of "
            f"{name}, got {shown(own)}"
        )
    return base_number(key if slides and rule != "shared" else "freq_base", base)


def _section_sizes(file: Metadata) -> list[int]:
    """The sizes of the sections if positions have axes: four numbers, of which models use three.

    A single axis is none.
    """
    key, known = "dimension_sections", "sections" in file.rules
    optional = not known or file.rules.get("sections_optional")
    sizes = wholes(key, file.rope.take(key, []) if optional else file.rope.need(key))
    while sizes and sizes[-1] == 0:
        sizes.pop()
    if len(sizes) == 1 and known:
        return []
    if sizes and not known:
        raise ValueError(f"{key}: '{file.architecture}' is not known to have sections")
    return sizes


# ----------------------------------------------------------------------------------------- scalings


def _context_length(file: Metadata) -> int:
    """The context length of training."""
    length, key = file.rope.take("scaling.original_context_length"), "context_length"
    return whole(key, file.model.need(key) if length is None else length)


def _mscale_of(file: Metadata) -> Fields:
    """What llama.cpp's program makes of the multiplier of mscale_all_dim.

    Three converters write it.
    """
    key, rule = "scaling.yarn_log_multiplier", file.rules.get("log_multiplier")
    given = file.rope.take(key)
    if given is None:
        return {}
    if rule is None:
        raise ValueError(f"{key}: not understood for '{file.architecture}'")
    all_dim = real(key, given) * rule["times"]
    if all_dim == 0.0:
        return {}
    return {"mscale_all_dim": all_dim, "mscale": all_dim if rule.get("mscale") == "equal" else 1.0}


def _check_factors_of_yarn(file: Metadata, scaling: YarnScaling) -> None:
    """llama.cpp computes the factor itself, whatever these keys say."""
    blend, factor = "scaling.yarn_ext_factor", "scaling.yarn_attn_factor"
    if file.rope.take(blend, 1.0) != 1.0:
        raise ValueError(f"{blend}: expected 1: a partial blend has no scaling here")
    relative = file.rules.get("attention_factor_of_yarn") == "relative"
    expected = 1.0 if relative else scalings.attention_factor_of(scaling)
    given = real(factor, file.rope.take(factor, expected))
    if abs(given - expected) > 1e-5:
        raise ValueError(
            f"{factor}: expected {expected:g}, from which llama.cpp rotates whatever this key "
            f"says, got {given:g}"
        )


def _yarn(file: Metadata, factor: Any, attention_factor: float) -> YarnScaling:
    """YaRN. The file's attention factor multiplies the paper's, or that of mscale_all_dim."""
    key, fast, slow = "scaling.factor", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow"
    scaling = YarnScaling(
        factor=real(key, file.rope.need(key) if factor is None else factor),
        **_mscale_of(file),
        original_max_positions=_context_length(file),
        beta_fast=real(fast, file.rope.take(fast, file.rules.get("beta_fast", 32.0))),
        beta_slow=real(slow, file.rope.take(slow, 1.0)),
    )
    _check_factors_of_yarn(file, scaling)
    if attention_factor == 1.0:
        return scaling
    factor = attention_factor * scalings.attention_factor_of(scaling)
    return dataclasses.replace(scaling, attention_factor=factor)


def _divisors_of(file: Metadata, name: str, rotary_dim: int) -> list[float]:
    """A tensor of divisors. Where layers differ in width, it fits the widest."""
    divisors = reals(name, file.tensors.need(name))
    wider = file.rules.get("tensors_of") == FULL
    return divisors[: max(rotary_dim // 2, 0)] if wider else divisors


def _longrope(
    file: Metadata, factor: Any, attention_factor: float, rotary_dim: int
) -> LongRopeScaling:
    """LongRoPE, whose factors are tensors of the file."""
    if file.rules.get("tensors") not in ("both", "rope_factors"):
        raise ValueError(
            f"scaling.type: 'longrope' is not understood for '{file.architecture}', for which "
            "llama.cpp reads no factors"
        )
    if factor is not None and factor != 1.0:
        raise ValueError(
            "scaling.factor: expected none beside scaling.type 'longrope', got " + shown(factor)
        )
    short, long = (
        _divisors_of(file, f"rope_factors_{name}.weight", rotary_dim) for name in ("short", "long")
    )
    return LongRopeScaling(short, long, _context_length(file), attention_factor=attention_factor)


def _alpha_of(file: Metadata, kind: Any, factor: Any) -> NtkScaling | None:
    """Hunyuan's NTK-aware base, if the file gives its factor."""
    if not file.rules.get("alpha"):
        return None
    key = "scaling.alpha"
    alpha = real(key, file.rope.take(key, 0.0))
    if alpha <= 0.0:
        return None
    alone = kind == "none" or factor is None or factor == 1.0
    if not alone or kind == "yarn":
        raise ValueError(f"{key}: expected no other scaling beside it, got {shown(kind)}")
    return NtkScaling(alpha)


def _scaling_of(file: Metadata, rotary_dim: int) -> RotaryScaling | None:
    """The scaling, by its type."""
    file.rope.ignore("scaling.finetuned")
    kind = file.rope.take("scaling.type", "linear")
    factor = file.rope.same("scaling.factor", "scale_linear")
    key = "scaling.attn_factor"
    attention_factor = real(key, file.rope.take(key, 1.0))
    old = (  # files without a type
        file.rules.get("tensors") == "rope_factors"
        and factor is None
        and file.tensors.has("rope_factors_short.weight")
    )
    if kind == "longrope" or (kind == "linear" and old):
        return _longrope(file, factor, attention_factor, rotary_dim)
    ntk = _alpha_of(file, kind, factor)
    if ntk is not None:
        return ntk
    if kind == "yarn":
        return _yarn(file, factor, attention_factor)
    if kind not in ("none", "linear"):
        raise ValueError(
            f"scaling.type: expected 'none', 'linear', 'longrope' or 'yarn', got {shown(kind)}"
        )
    if attention_factor != 1.0:
        raise ValueError(f"{key}: expected none beside scaling.type {shown(kind)}")
    if kind == "none" or factor is None:
        return None
    return LinearScaling(real("scaling.factor", factor))


def _with_tensor(spec: RotarySpec, file: Metadata, slides: bool) -> RotarySpec:
    """Frequencies divided by a tensor of the file, if it has one: Llama 3's, Gemma 4's."""
    read = file.rules.get("tensors") in ("rope_freqs", "both")
    if not read or isinstance(spec.scaling, LongRopeScaling):
        return spec
    name, key = "rope_freqs.weight", "context_length"
    given = file.tensors.take(name) is not None
    if slides and file.rules.get("tensors_of") == FULL:
        return spec
    if not given and not file.rules.get("tensors_required"):
        return spec
    if spec.sections is not None:
        raise ValueError(f"{name}: expected none beside dimension_sections")
    divisors = _divisors_of(file, name, spec.rotary_dim or 0)
    return scalings.divided(spec, divisors, whole(key, file.model.need(key)))


def _check_part_of_scaling(file: Metadata) -> None:
    """Rejects scalings that llama.cpp applies to layers with a sliding window in part."""
    factor = file.rope.take("scaling.attn_factor", 1.0)
    if file.sliding.get("attention_factor") and factor != 1.0:
        raise ValueError(
            "scaling.attn_factor: expected 1 where some layers are not scaled, got " + shown(factor)
        )
    kind, length = file.rope.take("scaling.type"), file.rope.take("scaling.factor")
    scaled = file.sliding.get("scaled") and file.sliding.get("base") != "shared"
    if scaled and kind == "none" and length is not None and length != 1.0:
        raise ValueError(
            "scaling.factor: expected none beside scaling.type 'none', got " + shown(length)
        )


# ----------------------------------------------------------------------------------- specifications


def _specification_of(fields: Fields, slides: bool, options: Options) -> RotarySpec:
    """The specification of layers with or without a sliding window."""
    file = Metadata(fields)
    sizes = _section_sizes(file)
    # With sections, llama.cpp always pairs halves.
    interleaved = file.rules.get("pairing") == "interleaved" and not sizes
    interleaved = bool(same("interleaved", (options.interleaved, interleaved)))
    head_dim, rotary_dim = _widths_of(file, slides)
    base = _base_of(file, options.base, slides)
    file.rope.ignore("freq_base")
    numbers: Fields = {"base": base, "rotary_dim": rotary_dim, "interleaved": interleaved}
    if sizes:
        turns = file.rules["sections"] == "alternating"
        numbers["sections"] = in_turns(sizes, rotary_dim // 2) if turns else Sections(sizes)
    scaling = _scaling_of(file, rotary_dim)
    if "program_base" in file.rules and scaling is not None:
        raise ValueError(f"scaling.type: '{file.architecture}' is not scaled in llama.cpp")
    scaled = _with_tensor(RotarySpec(head_dim, **numbers, scaling=scaling), file, slides)
    if slides:
        _check_part_of_scaling(file)
    start = f"{file.architecture}.rope."
    file.rope.ignore(*(key.removeprefix(start) for key in options.ignore))
    file.tensors.ignore(*options.ignore)
    file.rope.done()
    file.tensors.done()
    plain = slides and not file.sliding.get("scaled")
    return RotarySpec(head_dim, **numbers) if plain else scaled


def read(fields: Fields, options: Options) -> RotarySpec:
    """The specification of a file's metadata."""
    file = Metadata(fields)
    rotating = {layer.slides for layer in layers_of(file) if layer.rotates}
    kinds = [FULL, SLIDING] if has_windows(file) else []
    asked = options.layer_type
    if asked is not None:
        check_type(kinds, asked)
        if (asked == SLIDING) not in rotating:
            raise ValueError(f"layer_type: layers of kind '{asked}' do not rotate")
        return _specification_of(fields, asked == SLIDING, options)
    if not rotating:  # the keys say so
        return RotarySpec(whole("attention.key_length", _head_dim_of(file)), rotary_dim=0)
    specs = [_specification_of(fields, slides, options) for slides in sorted(rotating)]
    if len(set(specs)) > 1:
        raise ValueError(f"layer_type: expected one of {shown(kinds)}, got None")
    return specs[0]


def read_layers(fields: Fields, options: Options) -> list[RotarySpec | None]:
    """The specification of each layer; None if it does not rotate."""
    file = Metadata(fields)
    file.model.need("block_count")
    layers = layers_of(file)
    of_kind = {
        slides: _specification_of(fields, slides, options)
        for slides in dict.fromkeys(layer.slides for layer in layers if layer.rotates)
    }
    return [of_kind[layer.slides] if layer.rotates else None for layer in layers]


def kinds_of_layers(fields: Fields) -> list[str | None]:
    """The kind of each layer, if some have a sliding window."""
    file = Metadata(fields)
    windows = has_windows(file)
    return [(SLIDING if layer.slides else FULL) if windows else None for layer in layers_of(file)]
