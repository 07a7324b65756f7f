"""The rotation of each layer as llama.cpp computes it, in float64, for tests of the GGUF reader.

The formulas are those of ggml_rope_cache_init and rope_yarn in ggml/src/ggml-cpu/ops.cpp, of ggml_rope_yarn_corr_dims in
ggml/src/ggml.c, and of llama-context.cpp, where the factor of YaRN is set. What differs between architectures is read
from python/posembed/models/gguf_architectures.json, whose entries name their lines.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

TABLE = json.loads((Path(__file__).parents[3] / "python/posembed/models/gguf_architectures.json").read_text())
ARCHITECTURES: dict[str, dict[str, Any]] = TABLE["architectures"]


@dataclasses.dataclass(frozen=True)
class Rotation:
    """What one layer does to queries and keys."""

    head_dim: int
    rotary_dim: int
    interleaved: bool
    frequencies: np.ndarray[Any, np.dtype[np.float64]]
    amplitude: float
    axes: tuple[int, ...]  # the axis of positions that turns each pair


class File:
    """The metadata of a file: keys without the architecture."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.name = metadata["general.architecture"]
        self.rules = ARCHITECTURES[self.name]
        self.metadata = metadata

    def get(self, key: str, otherwise: Any = None) -> Any:
        return self.metadata.get(f"{self.name}.{key}", otherwise)

    @property
    def layers(self) -> int:
        """Without those that predict further tokens."""
        return int(self.get("block_count") - self.get("nextn_predict_layers", 0))

    # ------------------------------------------------------------------------------------ layers

    def slides(self) -> list[bool]:
        """Whether each layer has a sliding window."""
        count, rule = self.get("block_count"), self.rules.get("windows")
        window = self.get("attention.sliding_window", 0)
        present = rule is not None and {"stated": window > 0, "always": True, "block_count": count == 64}[rule["when"]]
        if not present:
            return [False] * count
        pattern = self.get("attention.sliding_window_pattern", rule.get("period"))
        if isinstance(pattern, list):
            return [bool(value) for value in (pattern + [False] * count)[:count]]
        if rule.get("full_first"):
            found = [layer % pattern > 0 for layer in range(self.layers)]
        else:
            found = [layer % pattern < pattern - 1 for layer in range(self.layers)]
        return found + [False] * (count - self.layers)

    def rotates(self) -> list[bool]:
        """Whether each layer rotates."""
        count, rules, slides = self.get("block_count"), self.rules, self.slides()
        result = [True] * count
        windows = any(slides)
        for layer in range(count):
            if rules.get("rotated") == "sliding" and windows:
                dense = layer < self.get(rules.get("rotated_first", ""), 0)
                result[layer] = slides[layer] or dense
            elif rules.get("rotated") == "attention.rope_pattern":
                result[layer] = bool(self.get("attention.rope_pattern", [1] * count)[layer])
            left_out = rules.get("unrotated")
            if left_out and (windows or "windowed" not in left_out):
                result[layer] &= layer % left_out["every"] != left_out["place"]
            recurrent = rules.get("recurrent")
            if recurrent == "attention.head_count_kv":
                result[layer] &= self.get(recurrent)[layer] != 0
            elif recurrent is not None:
                period = self.get("full_attention_interval", recurrent)
                listed = self.get("attention.recurrent_layers")
                result[layer] &= (layer + 1) % period == 0 if listed is None else not listed[layer]
            if layer >= self.layers:
                result[layer] = True
        if not self.get("rope.scaling.finetuned", True) and "switch" in rules:
            result = [False] * count
        return result

    # ---------------------------------------------------------------------------------- a layer

    def layer(self, place: int) -> Rotation | None:
        """The rotation of a layer; None if it does not rotate."""
        if not self.rotates()[place]:
            return None
        slides, rule = self.slides()[place], self.rules.get("sliding", {})
        head_dim, rotary_dim = self.widths(slides)
        base = self.get("rope.freq_base")
        if slides and rule["base"] != "shared":
            known = base if rule["base"] == "inherited" else rule["base"]
            base = self.get("rope.freq_base_swa", known)
        plain = slides and not rule["scaled"]
        frequencies, amplitude = self.scaled(base, rotary_dim, plain=plain)
        if not plain or "tensors_of" not in self.rules:
            frequencies = frequencies / self.divisors(rotary_dim // 2, slides)
        sections = [size for size in self.get("rope.dimension_sections", []) if size]
        axes = [0] * (rotary_dim // 2)
        interleaved = self.rules["pairing"] == "interleaved"
        if len(sections) > 1:
            interleaved = False
            alternating = self.rules["sections"] == "alternating"
            axes = [axis_of(pair, sections, alternating) for pair in range(rotary_dim // 2)]
        return Rotation(head_dim, rotary_dim, interleaved, frequencies, amplitude, tuple(axes))

    def widths(self, slides: bool) -> tuple[int, int]:
        """The width of a head, and that of its rotated part."""
        rule = self.rules.get("sliding", {})
        heads = self.get("attention.head_count")
        head = self.get("attention.key_length", self.get("embedding_length") // heads)
        rotary = self.get("rope.dimension_count", head)
        if self.rules.get("latent"):
            return rotary, rotary
        if slides and rule.get("rotary_dim"):
            rotary = self.get("rope.dimension_count_swa", rotary)
        elif self.rules.get("half_rotary_dim"):
            rotary //= 2
        if slides and rule.get("head_dim"):
            head = self.get("attention.key_length_swa", head)
        return head, rotary

    def divisors(self, pairs: int, slides: bool) -> Any:
        """The tensor of the file that divides frequencies."""
        given = self.metadata.get("rope_freqs.weight")
        if given is None or (slides and "tensors_of" in self.rules):
            return 1.0
        return np.array(given[:pairs])

    def scaled(self, base: float, width: int, *, plain: bool) -> tuple[Any, float]:
        """Radians per position, and the factor of cosine and sine."""
        turns = base ** (-np.arange(0, width, 2) / width)
        kind, factor = self.get("rope.scaling.type", "linear"), self.get("rope.scaling.factor", 1.0)
        alpha = self.get("rope.scaling.alpha")
        if alpha is not None:
            return (base * alpha ** (width / (width - 2))) ** (-np.arange(0, width, 2) / width), 1.0
        if plain:
            return turns, 1.0
        if kind != "yarn":
            return turns / factor, 1.0
        fast = self.get("rope.scaling.yarn_beta_fast", self.rules.get("beta_fast", 32.0))
        slow = self.get("rope.scaling.yarn_beta_slow", 1.0)
        length = self.get("rope.scaling.original_context_length")
        low = max(0.0, math.floor(corrected(width, length, fast, base)))
        high = min(width - 1.0, math.ceil(corrected(width, length, slow, base)))
        pair = np.arange(width // 2)
        ramp = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
        return turns / factor * (1 - ramp) + turns * ramp, self.factor_of_yarn(factor)

    def factor_of_yarn(self, factor: float) -> float:
        """As llama-context.cpp sets it; the kernel's own factor and its inverse there cancel."""

        def scale(by: float) -> float:
            return 0.1 * by * math.log(factor) + 1.0

        multiplier = self.get("rope.scaling.yarn_log_multiplier")
        if multiplier is None:
            return scale(1.0)
        by_tenth = self.name in ("deepseek2", "deepseek32", "mistral4")
        all_dims = multiplier / 0.1 if by_tenth else multiplier
        own = all_dims if self.name == "deepseek2" else 1.0
        return scale(own) / scale(all_dims)


def corrected(width: int, length: int, turns: float, base: float) -> float:
    """The pair that makes so many turns in the original context."""
    return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))


def axis_of(pair: int, sections: list[int], alternating: bool) -> int:
    """ggml_mrope_cache_init; pairs that it leaves to a fourth axis belong to the first."""
    time, height, width = sections
    place = pair % sum(sections)
    if not alternating:
        return 0 if place < time else 1 if place < time + height else 2
    if place % 3 == 1 and place < 3 * height:
        return 1
    return 2 if place % 3 == 2 and place < 3 * width else 0
