"""Writes python/posembed/models/catalogue.json: how the models of transformers rotate.

    python scripts/catalogue.py > python/posembed/models/catalogue.json

Every class is built from its defaults, and again with other values: what then changes follows from
these values, and what does not is a constant. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from posembed.integrations.huggingface._reading import recognise
from posembed.integrations.huggingface._rotation import Rotation
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel
from transformers.utils import logging

Fields = dict[str, Any]

HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_num_attention_heads")
HEADS += ("speech_encoder_attention_heads",)
WIDTHS = ("embed_dim", "hidden_size", "n_embd", "d_model", "dim")
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers")
# Keys that the readers take: numbers and words, lists with an entry for each layer, and bases.
SINGLE = (
    *(*HEADS, *WIDTHS, *COUNTS),
    *("alibi", "attention_head_dim", "attention_multiplier", "attn_rotary_emb"),
    *("cross_attention_layers", "query_pre_attn_scalar"),
    *("global_head_dim", "head_dim", "image_size", "index_head_dim", "indexer_head_dim"),
    *("kv_channels", "max_position_embeddings", "memory_attention_downsample_rate"),
    *("memory_attention_hidden_size", "memory_attention_num_attention_heads"),
    *("original_max_position_embeddings", "partial_rotary_factors", "patch_size"),
    *("per_layer_config", "position_embedding_type", "position_embeddings_type"),
    *("prefix_dense_sliding_window_pattern", "projection_dim", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "rope_interleave", "rope_scaling_layers", "rotary", "rotary_dim"),
    *("seq_length", "sliding_window", "use_mem_rope", "use_rotary_embedding"),
)  # fmt: skip
LISTS = ("no_rope_layers", "use_rope_layers", "layer_types", "layers_block_type", "mlp_layer_types")
LISTS += ("layer_rope_theta",)
BASES = ("rotary_emb_base", "rotary_embedding_base", "rope_theta", "rope_local_base_freq")
BASES += ("local_rope_theta", "swa_rope_theta", "global_rope_theta", "compress_rope_theta")
PARTS = ("rotary_pct", "partial_rotary_factor")
# Keys of a class with such a name concern positions, as posembed/models/unknown_keys.py has it.
CONCERNS = re.compile(
    "(^|_)(alibi|freqs?|mscale|nope|ntk|pos|posemb|rot|scaling|theta|timescale|wavelength|yarn"
    "|[a-z0-9]*rope|(rope|rota|position)[a-z0-9]*)(_|$)"
)
# Keys by which classes lay out kinds of layers.
PATTERN = re.compile("pattern|interval|period|offset|every|group_size|ratio|block|layer|window|idx")
SCALING = {"rope_type": "linear", "factor": 3.0}
BASE = 123456.0


BY_HAND = json.loads(
    (Path(__file__).parents[1] / "python/posembed/models/models.json").read_text(encoding="utf-8")
)["types"]


class Class:
    """A configuration class, and the files that it would complete."""

    def __init__(self, model_type: str) -> None:
        self.type: Any = CONFIG_MAPPING[model_type]
        self.defaults = self.completed() or {}

    def completed(self, **given: Any) -> Fields | None:
        """A file as the class completes it; None if the class refuses it."""
        try:
            made = self.type(**copy.deepcopy(given))
        except Exception:  # classes raise anything
            return None
        fields = json.loads(json.dumps(made.to_dict(), default=str))
        for key in ("layer_types", "layers_block_type"):  # a property of some classes
            kinds = getattr(made, key, None)
            if isinstance(kinds, (list, tuple)):
                fields.setdefault(key, list(kinds))
        return fields

    def value(self, key: str, **given: Any) -> Any:
        """A key of the file, as the class completes it."""
        return (self.completed(**given) or {}).get(key)

    def moves(self, key: str, into: tuple[str, ...], value: float = BASE) -> bool:
        """Whether a key of the file becomes a member of rope_parameters."""
        block = self.value("rope_parameters", **{key: value}) or {}
        return all(block.get(name) == value for name in into)

    def names(self) -> Iterator[str]:
        """The keys that the class knows."""
        yield from self.defaults
        yield from getattr(self.type, "__dataclass_fields__", {})
        yield from self.type.attribute_map


# ------------------------------------------------------------------------------- lists of layers


def expanded(rule: Fields, length: int) -> list[Any]:
    """The list that a rule describes, as posembed/models/catalogue.py expands it."""
    first, cycle = rule.get("first", []), rule["cycle"]
    if rule.get("from_end"):
        return [cycle[(length - 1 - place) % len(cycle)] for place in range(length)]
    rest = itertools.islice(itertools.cycle(cycle), max(length - len(first), 0))
    found = [*first[:length], *rest]
    return [*found[:-1], rule["last"]] if "last" in rule else found


def rules(seen: dict[int, list[Any]]) -> Iterator[Fields]:
    """Rules that may describe lists, the shortest first."""
    longest = seen[max(seen)]
    for length in range(1, 14):
        yield {"cycle": longest[:length]}
        yield {"cycle": longest[::-1][:length], "from_end": True}
        yield {"cycle": longest[:length], "last": longest[-1]}
        for start in (1, 2, 3, 4, 25):
            cycle = {"first": longest[:start], "cycle": longest[start : start + length]}
            yield cycle
            yield {**cycle, "last": longest[-1]}


def periodic(cycle: list[Any], period: int) -> list[Any] | None:
    """The cycle of another period, where one layer of a period differs: its first or its last."""
    if len(cycle) < 2:
        return None
    for place in (0, -1):
        others = cycle[1:] if place == 0 else cycle[:-1]
        if len(set(others)) == 1 and cycle[place] != others[0]:
            rest = [others[0]] * (period - 1)
            return [cycle[0], *rest] if place == 0 else [*rest, cycle[-1]]
    return None


def list_rule(own: Class, key: str, count: str) -> Fields | None:
    """How a class lays out the layers; None for a list of one length."""
    lengths = {n: own.value(key, **{count: n}) for n in (*range(1, 20), 27, 36, 49)}
    seen = {n: kinds for n, kinds in lengths.items() if kinds}
    if not seen or any(len(kinds) != n for n, kinds in seen.items()):
        return None
    rule = next(
        {**rule, **({} if least == 1 else {"least": least})}
        for least in (1, 4)
        for rule in rules(seen)
        if all(expanded(rule, n) == kinds for n, kinds in seen.items() if n >= least)
    )
    probe = own.defaults[count] if own.defaults[count] in seen else max(seen)
    usual = seen[probe]
    if followed := follows(own, key, {count: probe}, usual):
        return followed
    if key == "layer_rope_theta":
        given = {"rope_theta": BASE, "rope_scaling": SCALING}
        moved = own.value(key, **{count: probe}, **given) or usual
        bases = {base for base, other in zip(usual, moved, strict=True) if base != other}
        rule["cycle"] = [None if base in bases else base for base in rule["cycle"]]
    for name in sorted({*own.names(), *PATTERNS}):
        if name in (key, count) or not (name in PATTERNS or PATTERN.search(name)):
            continue
        steer(own, key, {count: probe}, usual, rule, name)
    return rule


def follows(own: Class, key: str, sizes: Fields, usual: list[Any]) -> Fields | None:
    """The rule of a list that follows from another one; None if it follows from none."""
    for other in LISTS:
        theirs = own.value(other, **sizes)
        if other == key or not isinstance(theirs, list) or len(theirs) != len(usual):
            continue
        values = {str(theirs[place]): usual[place] for place in range(len(usual))}
        mirrored = own.value(key, **sizes, **{other: theirs[::-1]})
        if len(values) > 1 and mirrored == [values[str(each)] for each in theirs[::-1]] != usual:
            return {"by": other, "values": values}
    return None


# Keys of files that classes read and do not keep.
PATTERNS = (
    *("sliding_window_pattern", "global_attn_every_n_layers", "full_attention_interval"),
    *("layer_group_size", "attn_layer_indices", "attn_layer_offset", "attn_layer_period"),
    *("compress_ratios", "hybrid_block_size", "hybrid_layer_pattern", "max_window_layers"),
    *("prefix_dense_sliding_window_pattern", "full_attn_idxs", "first_k_dense_replace"),
    *("no_rope_layer_interval", "block_types", "_sliding_window_pattern", "use_sliding_window"),
    *("linear_attn_config", "window_pattern", "swa_layers", "local_layer_ids"),
)  # fmt: skip


def steer(own: Class, key: str, sizes: Fields, usual: list[Any], rule: Fields, name: str) -> None:
    """Adds to a rule what a key of the file does to the list."""
    length = len(usual)

    def kinds(value: Any) -> list[Any] | None:
        found = own.value(key, **sizes, **{name: value})
        return found if isinstance(found, list) and len(found) == length else None

    numbers = {number: kinds([number] * length) for number in (0, 1, 4, 8, 16, 32, 64, 128)}
    values = {str(n): found[0] for n, found in numbers.items() if found and len({*found}) == 1}
    if len({*values.values()}) > 1:
        rule.setdefault("each", {})[name] = values
        return
    found = [own.value(key, **sizes, **{name: value}) for value in (2, 3, 5, True, [1])]
    foreign = name not in own.names()  # otherwise the class may refuse the type of the value
    if not any(each != usual for each in found if foreign or each is not None):
        return
    cycles = {period: periodic(rule["cycle"], period) for period in (2, 3, 5)}
    if all(
        cycle and kinds(period) == expanded({**rule, "cycle": cycle}, length)
        for period, cycle in cycles.items()
    ):
        rule.setdefault("period", []).append(name)
        return
    listed = kinds([1])
    if (
        listed
        and listed[0] != listed[1]
        and len({*map(str, listed)}) == 2
        and listed[2:].count(listed[0]) == length - 2
    ):
        rule.setdefault("listed", {})[name] = [listed[1], listed[0]]
        return
    leading = {number: kinds(number) for number in (2, 3, 5)}
    if all(
        found and len(rule["cycle"]) == 1 and found == [found[0]] * number + usual[number:]
        for number, found in leading.items()
    ):
        rule.setdefault("leading", {})[name] = (leading[2] or [])[0]
        return
    rule.setdefault("unless", {})[name] = own.defaults.get(name)


# ---------------------------------------------------------------------------------- one class


def single(own: Class) -> Fields:
    """Constants of a class: a file without the key has this value, whatever else it says."""
    values = own.defaults
    found = {key: values[key] for key in SINGLE if values.get(key) not in (None, [], {})}
    sizes = [next((key for key in keys if key in found), None) for keys in (WIDTHS, HEADS)]
    for key in (*filter(None, sizes), "head_dim", "qk_rope_head_dim", "num_hidden_layers"):
        if not isinstance(found.get(key), int):
            continue
        for times in (2, 4):
            other = own.completed(**{key: found[key] * times})
            if other is None:
                continue
            for name in [n for n in found if n != key and other.get(n) != values[n]]:
                aliases = own.type.attribute_map
                if aliases.get(name) == key or aliases.get(key) == name:
                    continue
                del found[name]
                if name == "attention_head_dim":
                    width, heads = (values[size or ""] for size in sizes)
                    found[name] = {"times": values[name] * heads // width}
            break
    return found


def rope(own: Class) -> Fields:
    """Defaults of rope_parameters, and of the keys from which a file's are made."""
    block = own.defaults.get("rope_parameters")
    if not block:
        return {key: own.defaults[key] for key in (*BASES, *PARTS) if own.defaults.get(key)}
    if any(isinstance(value, dict) for value in block.values()):
        return {"rope_parameters": block, "kinds": of_kinds(own, block)}
    given = own.value("rope_parameters", rope_scaling=SCALING) or block
    if given == block and own.completed(rope_scaling=SCALING):
        return {"rope_parameters": block, "passed_over": "rope_scaling"}
    named = next((k for k in BASES if own.moves(k, ("rope_theta",))), "rope_theta")
    found: Fields = {}
    part = next((k for k in PARTS if own.moves(k, ("partial_rotary_factor",), 0.5)), PARTS[1])
    for key, name in (("rope_theta", named), ("partial_rotary_factor", part)):
        if given.get(key) is not None:
            found[name] = given[key]
    rest = {
        key: value
        for key, value in block.items()
        if key not in ("rope_theta", "partial_rotary_factor")
    }
    fixed = not own.moves(named, ("rope_theta",))
    differs = any(
        given.get(key) != block.get(key) for key in ("rope_theta", "partial_rotary_factor")
    )
    if rest not in ({"rope_type": "default"}, {"rope_type": "axial"}) or fixed or differs:
        keep = dict(block)
        if not fixed and given.get("rope_theta") == block.get("rope_theta"):
            keep.pop("rope_theta", None)
        found["rope_parameters"] = keep
    return found


def of_kinds(own: Class, block: Fields) -> Fields:
    """Which kinds of layers take a base or a scaling that stands outside of rope_parameters."""
    block = {kind: block[kind] for kind in sorted(block)}  # classes may make them from a set
    found: Fields = {}
    for key in BASES:
        other = own.value("rope_parameters", **{key: BASE}) or {}
        moved = [kind for kind in block if (other.get(kind) or {}).get("rope_theta") == BASE]
        expected = {k: {**v, "rope_theta": BASE} if k in moved else v for k, v in block.items()}
        if moved and other == expected:
            found[key] = moved
    other = own.value("rope_parameters", rope_scaling=SCALING) or {}
    moved = [kind for kind in block if (other.get(kind) or {}).get("rope_type") == "linear"]
    if moved and other == {k: {**v, **SCALING} if k in moved else v for k, v in block.items()}:
        found["rope_scaling"] = moved
        older = {"type": SCALING["rope_type"], "factor": SCALING["factor"]}
        block = (own.value("rope_parameters", rope_scaling=older) or {}).get(moved[0]) or {}
        if block.get("rope_type") == "linear":
            found["older_type"] = moved
        if own.value("rope_parameters", rope_parameters=SCALING) == other:
            found["rope_parameters"] = moved
    return found


def parts(own: Class) -> Fields:
    """The types of nested configurations, with what this class passes to them."""
    found: Fields = {}
    for key, value in own.defaults.items():
        if not (key.endswith("_config") and isinstance(value, dict) and value.get("model_type")):
            continue
        usual = plain(value["model_type"])
        if usual is None:
            continue
        taken = {k: v for k, v in value.items() if k in TAKEN}
        differs = {k: v for k, v in taken.items() if usual.get(k) != v}
        derived = Class(value["model_type"]).completed(**differs) or usual  # such as head_dim
        differs |= {k: v for k, v in taken.items() if derived.get(k) != v}
        found[key] = {"model_type": value["model_type"], **differs}
    return found


def merged(own: Class, nested: Fields) -> list[str]:
    """The parts of a file to which this class adds what it passes to those that a file lacks."""
    found = []
    for key, part in nested.items():
        sizes = [k for k, v in part.items() if k != "model_type" and isinstance(v, int)]
        made = own.value(key, **{key: {"model_type": part["model_type"]}}) or {}
        if sizes and all(made.get(k) == part[k] for k in sizes):
            found.append(key)
    return found


def own_parts(own: Class, nested: Fields) -> list[str]:
    """The parts whose class this class names, whatever type a file states."""
    classes = getattr(own.type, "sub_configs", {})
    return [key for key in nested if classes.get(key, AutoConfig) is not AutoConfig]


TAKEN = {*SINGLE, *LISTS, *BASES, *PARTS, "rope_parameters"}


def plain(model_type: str) -> Fields | None:
    """The defaults of a model type; None for one without."""
    return Class(model_type).defaults or None if model_type in CONFIG_MAPPING else None


def code_of(own: Class) -> types.ModuleType | None:
    """The modeling module beside the configuration's."""
    file = Path(inspect.getfile(own.type))
    named = file.stem.replace("configuration_", "modeling_")
    names = sorted((path.stem for path in file.parent.glob("modeling_*.py")), key=named.__ne__)
    package = own.type.__module__.rpartition(".")[0]
    try:
        return importlib.import_module(f"{package}.{names[0]}") if names else None
    except ImportError:  # code that needs packages of its own
        return None


def rotations(code: types.ModuleType, vision: bool) -> dict[str, str]:
    """How each function of a model pairs components, found by running it."""
    found = {}
    for name, function in vars(code).items():
        if not (name.startswith(("apply_rotary", "apply_multi")) and callable(function)):
            continue
        if function not in RECOGNISED:
            RECOGNISED[function] = recognise(function)
        rotation = RECOGNISED[function]
        if isinstance(rotation, Rotation):
            halves = rotation.rule.pairs == "halves"
            found[name] = "half_split" if halves else "interleaved"
    of_vision = {name: pairs for name, pairs in found.items() if "vision" in name}
    others = {name: pairs for name, pairs in found.items() if "vision" not in name}
    return of_vision or others if vision else others


RECOGNISED: dict[Any, Any] = {}


def pairing(model_type: str, own: Class) -> Fields:
    """The pairing of a model that rotates."""
    code = code_of(own)
    if code is None or not any(re.search("rope|rotary|theta", key) for key in own.defaults):
        return {}
    found = rotations(code, "vision" in model_type)
    pairs = {*found.values()}
    if len(pairs) == 1:
        return {"pairing": pairs.pop()}
    if len(pairs) == 2 and own.defaults.get("rope_interleave") is not None:
        return {"pairing": "rope_interleave"}
    if len(pairs) == 2 and "index_head_dim" in own.defaults:
        return {"pairing": "interleaved"}  # and the indexer halves: models.json
    return {}


def rotates_whole_heads(model_type: str, own: Class) -> bool:
    """Whether the rotary modules of a model pass over partial_rotary_factor."""
    code, vision = code_of(own), "vision" in model_type
    modules = [
        value
        for name, value in (vars(code) if code else {}).items()
        if name.endswith("RotaryEmbedding")
        and ("Vision" in name) == vision
        and getattr(value, "__module__", None) == getattr(code, "__name__", "")
    ]
    bases = [base for module in modules for base in module.__mro__[:-1]]
    own_bases = [base for base in bases if base.__module__ == modules[0].__module__]
    return bool(modules) and not any(
        "partial_rotary_factor" in inspect.getsource(base) for base in own_bases
    )


OTHERS = "other positions, or none"
# What a model without rotation has instead, by the names of its tensors and modules.
INSTEAD = {
    "relative positions": "relative_(attention|position|bias)|rel_(pos|emb)|pos_bias|r_w_bias"
    "|linear_pos",
    "sinusoidal positions": "[Ss]inusoid|SinePosition|PositionalEncoding",
    "learned positions": r"pos\w*_?embed|embed_pos|\bwpe\b|position_enc",
}


def instead(own: Class) -> str:
    """What a model has instead of a rotation."""
    code = code_of(own)
    if code is not None and "build_alibi" in inspect.getsource(code):
        return "ALiBi"
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(own.type())
    except Exception:  # a model without defaults, or without its packages
        return OTHERS
    names = [*model.state_dict(), *(type(module).__name__ for module in model.modules())]
    for kind, pattern in INSTEAD.items():
        if any(re.search(pattern, name) for name in names):
            return kind
    return OTHERS


def entry(model_type: str) -> Fields:
    """All that the catalogue has of a model type."""
    own = Class(model_type)
    if not own.defaults:
        return {}
    found: Fields = pairing(model_type, own)
    nested = parts(own)
    if not found and model_type not in BY_HAND and not nested:
        return {"instead": instead(own)}
    found["whole_heads"] = rotates_whole_heads(model_type, own)
    found["defaults"] = {**single(own), **rope(own)}
    count = next((key for key in COUNTS if isinstance(own.defaults.get(key), int)), None)
    for key in LISTS:
        if key == "mlp_layer_types" and "prefix_dense_sliding_window_pattern" not in own.defaults:
            continue  # no matter for positions
        if key in own.type.attribute_map:
            continue
        if count and isinstance(own.defaults.get(key), list):
            rule = list_rule(own, key, count)
            found["defaults"][key] = rule or own.defaults[key]
    kinds = found["defaults"].pop("kinds", None)
    if kinds is not None:
        found["kinds"] = kinds
    if "passed_over" in found["defaults"]:
        found["passed_over"] = found["defaults"].pop("passed_over")
    aliases = {
        alias: name
        for alias, name in own.type.attribute_map.items()
        if alias in TAKEN and name in TAKEN
    }
    if aliases:
        found["names"] = aliases
    if nested:
        found["parts"] = nested
        if own_parts(own, nested):
            found["own_parts"] = sorted(own_parts(own, nested))
        if of_class := merged(own, nested):
            found["merged"] = of_class
    beside = TAKEN - {"original_max_position_embeddings"}  # which classes keep without a scaling
    known = sorted({name for name in own.names() if CONCERNS.search(name)} - beside)
    if known:
        found["known"] = known
    return found


def written(types: Fields) -> str:
    """The text: models without a rotation, by what they have instead, and the others."""
    without: dict[str, list[str]] = {}
    for name, own in types.items():
        if "instead" in own:
            without.setdefault(own["instead"], []).append(name)
    whole_heads = [name for name, own in types.items() if own.pop("whole_heads", False)]
    lists = [f"  {json.dumps(kind)}: {json.dumps(without[kind])}" for kind in sorted(without)]
    rotating = [
        f"  {json.dumps(name)}: {json.dumps(own, sort_keys=True)}"
        for name, own in types.items()
        if "instead" not in own
    ]
    source = {"library": "transformers", "version": transformers.__version__}
    return "\n".join(
        [
            *("{", f' "source": {json.dumps(source)},', ' "instead": {', ",\n".join(lists), " },"),
            f' "whole_heads": {json.dumps(whole_heads)},',
            *(' "types": {', ",\n".join(rotating), " }", "}"),
        ]
    )


def main() -> None:
    """Prints the catalogue."""
    logging.set_verbosity(50)
    found = {model_type: entry(model_type) for model_type in sorted(CONFIG_MAPPING)}
    print(written({model_type: own for model_type, own in found.items() if own}))


if __name__ == "__main__":
    sys.exit(main())
