"""Writes rotary_conventions.md from the tables that posembed reads configurations with.

docs/pages.py calls it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from posembed.models import catalogue
from posembed.models.data import table as data

HEAD = """\
# Which model rotates how

`docs/rotary_conventions.py` writes this page from the tables of `posembed/models`. One test
compares both, and another compares every model type of transformers with its own code.

A configuration file gives base, widths and scaling. It does not say which components form a pair,
which way they turn, and which axis of a position turns them. posembed knows that for each
`model_type`, and the defaults of its configuration class. An unknown type raises: pass
`read_module=True`, or describe its rotation with `RotarySpec(...)`. A model type without RoPE
raises, too; the message names its positions.

```python
import posembed as pe
from transformers import Gemma3TextConfig, Qwen2VLConfig

# or a dict, or the path of a config.json or of its folder
gemma = Gemma3TextConfig()
spec = pe.RotarySpec.from_huggingface(gemma, "full_attention")
local = pe.RotarySpec.from_huggingface(gemma, "sliding_attention")
tower = pe.RotarySpec.from_huggingface(Qwen2VLConfig(), part="vision_config")
every = pe.RotarySpec.for_layers(gemma)  # None where a layer does not rotate
print(spec.explain(), spec.diff(local), sep="\\n\\n")
```

| form | read from | pairing |
|---|---|---|
| transformers 5 | `rope_parameters`, flat or one for each kind of layer | by `model_type` |
| transformers 4 | `rope_theta`, `rope_scaling`, `rotary_pct`, ... | by `model_type` |
| transformers 4, older | the text model's keys beside `vision_config` | by `model_type` |
| Meta's and Mistral's `params.json` | `rope_theta`, `use_scaled_rope`, `yarn` | interleaved |
| GGUF: a file or its metadata | `<architecture>.*` | by `general.architecture` |

Published files omit what the model's configuration class adds: kinds of layers, second bases,
widths, defaults. `python/posembed/models/catalogue.json` has these, read off the classes of
transformers {version} by `scripts/catalogue.py`. So a file gives the same result with and without
transformers, nothing is downloaded, and no model code runs without `read_module=True`. The keys of
a configuration object come from its own class. Families whose code is in their own repositories are
in `python/posembed/models/models.json`, with the lines of vLLM that say how they rotate.

A key about positions that posembed does not know raises unless `ignore=` names it. So do two keys
that contradict each other, and an argument without effect. `from_huggingface(config)` returns the
specification of all layers that rotate, if they rotate alike; `layer_type=` chooses a kind of
layers, and raises if it does not rotate. `RotarySpec.for_layers(config)` has an entry for each
layer. `part=` chooses a nested configuration
(`"vision_config"`), a part of a layer (`"indexer"`), or both (`"text_config.indexer"`).

From a GGUF file, posembed also reads the tensors that change the rotation; only quantised ones need
the gguf package. With a dict, pass the tensors among the keys:
`rope_freqs.weight`, without which a GGUF file of Llama 3.1 or later is not scaled (its metadata
does not say so) and one of Gemma 4 is refused, `rope_factors_short.weight` and
`rope_factors_long.weight`, and `rotary_emb.alpha` of Mistral Large 4.

## Pairing and direction
"""
POSITIONS = """
## Axes of positions

Models that are not listed here have one axis. `positions` is `[axes, batch, seq]` or
`[axes, tokens]`, with the axes in this order.
"""
TOWERS = """
Grids with coordinates from -1 to 1 (DINOv3 and its relatives) have whole positions here: `2 i + 1`
for patch `i` on each axis, and the number of patches for tokens that are no patches. Scores are the
same, because they depend only on differences. `image_size` of the configuration fixes
the number of patches: pass `{**config, "image_size": 512}` for images of another size.

EVA-02, which has no configuration class, is `RotarySpec(head_dim, interleaved=True,
sections=Sections((n, n), restart=True), scaling=LinearScaling(patches / patches_in_training))` with
`n = head_dim / 4`.
"""
REST = """
## Without a specification
"""
GGUF = """
## GGUF architectures

A GGUF file leaves to llama.cpp's program which layers rotate, and much else.
`python/posembed/models/gguf_architectures.json` has that for the {count} architectures of llama.cpp
([{date}]({repository}/tree/{commit})), and names the lines of each. Any other is refused.

The rotation is that of the program, with two exceptions, in which the model's counts: betas of YaRN
in the file, which it reads for `grok` and `mistral3` alone; and pairs beyond the reach of sections
in turns, which it leaves to a fourth axis of positions, and the models to the first.
"""


def listed(names: Iterable[str]) -> str:
    """Names as code, sorted."""
    return " ".join(f"`{name}`" for name in sorted(names))


def table(columns: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    """A Markdown table."""
    lines = [columns, ("---", "---"), *rows]
    return "\n".join(f"| {first} | {second} |" for first, second in lines) + "\n"


def switches(types: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Families with a key that says whether the model rotates."""
    families: dict[str, list[str]] = {}
    for name, own in types.items():
        if switch := own.get("switch"):
            row = f"rotated if `{switch['key']}` is {switch['rotating']!r}"
            missing = " or missing" if switch["otherwise"] == switch["rotating"] else ""
            families.setdefault(row + missing, []).append(name)
    return [(row, listed(names)) for row, names in sorted(families.items())]


def gguf_section(known: dict[str, Any]) -> str:
    """The architectures of GGUF files, by what llama.cpp's program does."""
    architectures: dict[str, dict[str, Any]] = known["architectures"]

    def having(key: str, *values: Any, inside: str | None = None) -> str:
        found = []
        for name, rules in architectures.items():
            own = rules if inside is None else rules.get(inside, {})
            if key in own and (not values or own[key] in values):
                found.append(name)
        return listed(found)

    windows = "where a window slides: "
    rows = [
        ("(2i, 2i + 1); with sections as below", having("pairing", "interleaved")),
        ("(i, i + dimension_count / 2)", having("pairing", "half_split")),
        ("sections one after the other", having("sections", "contiguous")),
        ("sections in turns", having("sections", "alternating")),
        ("rotated components are a separate head", having("latent")),
        ("rotated where a window slides, not in `full_attention`", having("rotated", "sliding")),
        (
            "rotated where `attention.rope_pattern` has 1",
            having("rotated", "attention.rope_pattern"),
        ),
        ("one of every few layers not rotated", having("unrotated")),
        ("recurrent layers not rotated", having("recurrent")),
        ("not rotated if `rope.scaling.finetuned` is false", having("switch")),
        ("rotated with 32 layers, ALiBi with 40", having("block_counts")),
        (windows + "base 10000 if no key says it", having("base", 1e4, inside="sliding")),
        (windows + "not scaled", having("scaled", False, inside="sliding")),
        (windows + "a width of their own", having("rotary_dim", inside="sliding")),
        ("windows in all but the first layer of a period", having("full_first", inside="windows")),
        ("`full_attention` rotates half of `rope.dimension_count`", having("half_rotary_dim")),
        ("base 10000, whatever the file says, or an error", having("program_base")),
        ("not rotated: ALiBi", having("instead", "ALiBi")),
        ("not rotated: other positions, or none", having("instead", *others_than(architectures))),
        ("refused", having("refused")),
    ]
    head = GGUF.format(count=len(architectures), **known["source"])
    return head + "\n" + table(("components", "architectures"), rows)


def others_than(architectures: dict[str, dict[str, Any]], first: str = "ALiBi") -> set[str]:
    """What architectures without rotation have instead, but for one."""
    return {rules["instead"] for rules in architectures.values() if "instead" in rules} - {first}


def page() -> str:
    """The whole page."""
    types: dict[str, dict[str, Any]] = catalogue.types()

    def having(key: str, *values: Any, inside: str | None = None) -> str:
        found = []
        for name, own in types.items():
            rules = own if inside is None else own.get(inside, {})
            if key in rules and (not values or rules[key] in values):
                found.append(name)
        return listed(found)

    pairing = [
        ("(i, i + rotary_dim / 2)", having("pairing", "half_split")),
        ("(2i, 2i + 1)", having("pairing", "interleaved")),
        ("as `rope_interleave` says, or (2i, 2i + 1)", having("pairing", "rope_interleave")),
        ("rotated the other way", having("reversed")),
        ("the last components of the head", having("trailing")),
        ("frequencies times a learned tensor", having("learned_scale")),
        ("not rotated, whatever the keys say", having("unrotated")),
        *switches(types),
        (
            "rotated where a window slides, not in `full_attention`",
            having("rotates", "sliding_attention"),
        ),
        ("the same, if layers have windows", having("rotates", "sliding_attention_if_windowed")),
        ("rotated where `no_rope_layers` has 1", having("no_rope_layers", inside="defaults")),
        (
            "rotated where `layer_rope_theta` is not 0",
            having("layer_rope_theta", inside="defaults"),
        ),
        ("scaled in `full_attention` alone", having("scaled")),
        (
            "with `use_dynamic_ntk`: its code rounds lengths up to `seq_length * 2 ** k`: resolve "
            "for those",
            having("doubled_ntk"),
        ),
        ('`part="indexer"`: the sparse indexer', having("indexer", inside="layer_parts")),
        (
            "`linear_attention` layers rotate too, in files of 2.x",
            having("linear_attention", inside="layer_parts"),
        ),
    ]
    thirds, halves = "time, height, width: ", "height, width: "
    inside = {"inside": "axes"}
    axes = [
        (thirds + "one after the other", having("order", "contiguous", **inside)),
        (thirds + "in turns", having("order", "alternating", **inside)),
        (thirds + "only where `mrope_section` is given", having("if_stated", **inside)),
        (
            thirds + "height and width in turns, then time",
            having("order", "time_last", **inside),
        ),
        (thirds + "each its whole series", having("grid", "time_height_width")),
        ("two axes in turns", having("order", "two_in_turns", **inside)),
        (halves + "each its whole series", having("grid", "height_width")),
        (halves + "each its whole series, width first", having("grid", "width_height")),
        (halves + "in turns, width first", having("grid", "width_height_in_turns")),
        (halves + "the even and the odd of one series", having("grid", "shared_series")),
        (halves + "coordinates from -1 to 1", having("grid", "normalised")),
        (halves + "in turns, all heads as one", having("grid", "whole_grid")),
        (halves + "pairs within the half of each", having("grid", "window_of_axis")),
    ]
    refused = [
        (f"`{name}`", own["refused"]) for name, own in sorted(types.items()) if "refused" in own
    ]
    kinds = sorted({own["instead"] for own in types.values() if "instead" in own})
    others = [(having("instead", kind), f"not rotated: {kind}") for kind in kinds]
    return "".join(
        [
            HEAD.replace("{version}", data("catalogue")["source"]["version"])
            + "\n"
            + table(("components", "model types"), pairing),
            POSITIONS + "\n" + table(("axes", "model types"), axes) + TOWERS,
            REST + "\n" + table(("model type", "why"), refused + others),
            gguf_section(data("gguf_architectures")),
        ]
    )
