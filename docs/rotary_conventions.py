"""Writes rotary_conventions.md from the tables that posembed reads configurations with.

python docs/rotary_conventions.py > docs/guide/rotary_conventions.md
"""

from __future__ import annotations

from collections.abc import Iterable

from posembed.configuration import conventions, gguf

HEAD = """\
# Which model rotates how

`docs/rotary_conventions.py` writes this page from the tables in `posembed.configuration`. One test
compares both, and another compares every model type of transformers with its own code.

A configuration file gives base, widths and scaling. It does not say which components form a pair,
which way they turn, and which axis of a position turns them. posembed knows that for each
`model_type`; an unknown type raises an error unless you pass `interleaved=`.

```python
import posembed as pe
from transformers import Gemma3TextConfig, Qwen2VLConfig

gemma = Gemma3TextConfig()  # or a dict, or the path of a config.json or of its folder
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
| GGUF metadata, a dict | `<architecture>.rope.*` | by `general.architecture` |

A published file leaves out what the model's configuration class adds: layers of different kinds,
second bases, widths, defaults. Where transformers is installed and knows the model type, its class
completes the file first: nothing is downloaded, no code of the file's repository runs. Elsewhere
the readers here take the file as it is, and raise for a model type whose class has rules of its own
for a missing key. A number of the file that the class passes over raises, too.

Every key is read, known to the class, or listed as one that has no bearing on positions; any other
raises, whatever its name, until `ignore=` has it. So do two keys that contradict each other, and an
argument that has no effect. `from_huggingface(config)` is the specification of all layers that
rotate, if they rotate alike; `layer_type=` chooses a kind, and raises where that kind does not
rotate. `RotarySpec.for_layers(config)` has an entry for each layer.

Pass tensors of the rotation among the keys:
`rope_freqs.weight`, without which a GGUF file of Llama 3.1 or later is not scaled (its metadata
does not say so), `rope_factors_short.weight` and `rope_factors_long.weight`, and
`rotary_emb.alpha` of Mistral Large 4.

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
"""


def listed(names: Iterable[str]) -> str:
    """Names as code, sorted."""
    return " ".join(f"`{name}`" for name in sorted(names))


def table(columns: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    """A Markdown table."""
    lines = [columns, ("---", "---"), *rows]
    return "\n".join(f"| {first} | {second} |" for first, second in lines) + "\n"


def switches() -> list[tuple[str, str]]:
    """Families with a key that says whether the model rotates."""
    families: dict[str, list[str]] = {}
    for name, (key, default, rotating) in conventions.SWITCHES.items():
        row = f"rotated if `{key}` is {rotating[0]!r}"
        families.setdefault(row + " or missing" * (default in rotating), []).append(name)
    return [(row, listed(names)) for row, names in sorted(families.items())]


def page() -> str:
    """The whole page."""
    pairing = [
        ("(i, i + rotary_dim / 2)", listed(conventions.HALF_SPLIT)),
        ("(2i, 2i + 1)", listed(conventions.INTERLEAVED)),
        ("as `rope_interleave` says, or (2i, 2i + 1)", listed(conventions.BY_KEY)),
        ("rotated the other way", listed(conventions.REVERSED)),
        ("the last components of the head", listed(conventions.TRAILING)),
        ("frequencies times a learned tensor", listed(conventions.LEARNED_SCALE)),
        ("not rotated, whatever the keys say", listed(conventions.UNROTATED)),
        *switches(),
        (
            "rotated where a window slides, not in `full_attention`",
            listed(conventions.ROTATED_IF_SLIDING - conventions.ROTATED_WITHOUT_WINDOW),
        ),
        ("the same, if layers have windows", listed(conventions.ROTATED_WITHOUT_WINDOW)),
        ("rotated where `no_rope_layers` has 1", listed(conventions.BY_CODE["no_rope_layers"])),
        (
            "rotated where `layer_rope_theta` is not 0",
            listed(conventions.BY_CODE["layer_rope_theta"]),
        ),
        ("scaled in `full_attention` alone", listed(conventions.SCALED_IF_FULL)),
        (
            "with `use_dynamic_ntk`: its code rounds lengths up to `seq_length * 2 ** k`: resolve "
            "for those",
            listed(conventions.DOUBLED_NTK),
        ),
    ]
    other_towers = conventions.HEIGHT_THEN_WIDTH | (
        conventions.INTERLEAVED_AXIAL - conventions.WIDTH_THEN_HEIGHT - conventions.WHOLE_GRID
    )
    thirds, halves = "time, height, width: ", "height, width: "
    axes = [
        (thirds + "one after the other", listed(conventions.CONTIGUOUS_SECTIONS)),
        (thirds + "in turns", listed(conventions.INTERLEAVED_SECTIONS)),
        (thirds + "where `mrope_section` is given", listed(conventions.OPTIONAL_SECTIONS)),
        (thirds + "height and width in turns, then time", listed(conventions.TIME_LAST)),
        (thirds + "each its whole series", listed(conventions.TIME_HEIGHT_WIDTH)),
        ("two axes in turns", listed(conventions.ALTERNATING_AXES)),
        (halves + "each its whole series", listed(other_towers)),
        (halves + "each its whole series, width first", listed(conventions.WIDTH_THEN_HEIGHT)),
        (halves + "in turns, width first", listed(conventions.WIDTH_AND_HEIGHT_IN_TURNS)),
        (halves + "the even and the odd of one series", listed(conventions.SHARED_SERIES)),
        (halves + "coordinates from -1 to 1", listed(conventions.NORMALISED_GRID)),
        (halves + "in turns, all heads as one", listed(conventions.WHOLE_GRID)),
        (halves + "`layer_type` names the axis", listed(conventions.WINDOW_OF_AXIS)),
    ]
    architectures = [
        ("(2i, 2i + 1)", listed(gguf.INTERLEAVED)),
        ("(i, i + dimension_count / 2)", listed(gguf.HALF_SPLIT)),
        ("sections one after the other", listed(gguf.CONTIGUOUS_SECTIONS)),
        ("sections in turns", listed(gguf.INTERLEAVED_SECTIONS)),
        ("rotated components are a separate head", listed(gguf.APART)),
        ("rotated where a window slides", listed(gguf.ROTATED_IF_SLIDING)),
        ("every fourth layer not rotated", listed(gguf.EVERY_FOURTH_UNROTATED)),
        ("scaled where no window slides", listed(gguf.SCALED_IF_FULL)),
    ]
    refused = [(f"`{name}`", reason) for name, reason in sorted(conventions.UNSUPPORTED.items())]
    return "".join(
        [
            HEAD + "\n" + table(("components", "model types"), pairing),
            POSITIONS + "\n" + table(("axes", "model types"), axes) + TOWERS,
            REST + "\n" + table(("model type", "why"), refused),
            GGUF + "\n" + table(("components", "architectures"), architectures),
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
