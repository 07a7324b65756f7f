"""Files as they are published, of every model type of the installed transformers.

transformers completes a file: that is what its own object says. The readers here say the same, from
the catalogue.
"""

import copy
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import posembed as pe
import pytest

transformers = pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.program

from support.catalogue import TYPES  # noqa: E402
from support.transformers_models import COMPLETED, ROTARY_KEY  # noqa: E402

# Its class gives sliding layers the default base, whatever rope_theta is.
BASE_PASSED_OVER = {"olmo3"}
# Its class multiplies num_hidden_layers by the loops of its stacks.
MULTIPLIED = {"hrm_text"}
# Its objects keep the usual bases beside blocks with others, and so contradict themselves.
BASES_BESIDE = {"deepseek_v4"}
# Its class copies a flat rope_scaling, with the flat base, to every kind of layer.
COPIED = {"dots3_note_text"}
# Its class passes over the names of published files, which models.json has.
NAMED = {"kimi_k25_vision"}


def without_nesting(fields: dict[str, Any]) -> dict[str, Any]:
    """The names of transformers 4."""
    fields = copy.deepcopy(fields)
    rope = fields.pop("rope_parameters", None) or {}
    if set(rope) == {"full_attention", "sliding_attention"} and all(rope.values()):
        fields["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
        rope = rope["full_attention"]
    if any(isinstance(value, dict) for value in rope.values()):
        return {**fields, "rope_parameters": rope}
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is not None:
            fields[key] = rope.pop(key)
    if rope.get("rope_type", "default") not in ("default", "axial"):
        fields["rope_scaling"] = rope
    return fields


def steered(own: dict[str, Any], layers: int) -> Iterator[tuple[str, Any]]:
    """Keys that lay out a model's layers, with values that differ from the usual ones."""
    for rule in own.get("defaults", {}).values():
        if not isinstance(rule, dict):
            continue
        if "by" in rule:
            values = [json.loads(value) for value in rule["values"]]
            yield rule["by"], [values[place % len(values)] for place in range(layers)]
        yield from ((key, 3 if len(rule["cycle"]) != 3 else 5) for key in rule.get("period", []))
        yield from ((key, value) for key in rule.get("unless", {}) for value in (True, 2))
        yield from ((key, [1, 2]) for key in rule.get("listed", {}))
        yield from ((key, 2) for key in rule.get("leading", {}))
        for key, values in rule.get("each", {}).items():
            numbers = sorted(int(number) for number in values)
            yield key, [numbers[place % len(numbers)] for place in range(layers)]


def published(model_type: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Files that say the least, as transformers saves them, with sizes, scaled, of transformers 4.

    And files that use what the catalogue knows: other names of keys, and keys that lay out layers.
    """
    minimal = {"model_type": model_type, **COMPLETED.get(model_type, {})}
    own_class = transformers.CONFIG_MAPPING[model_type](**copy.deepcopy(minimal))
    whole = json.loads(json.dumps(own_class.to_dict(), default=str))
    if not any(ROTARY_KEY.search(key) for key in whole):
        return
    sizes = {
        key: whole[key] * (1 if key == "num_attention_heads" else 2)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        if isinstance(whole.get(key), int)
    }
    yield "minimal", minimal
    yield "saved", json.loads(own_class.to_json_string(use_diff=True))
    yield "sizes", {**minimal, **sizes}
    if isinstance(whole.get("num_hidden_layers"), int):
        yield "more layers", {**minimal, "num_hidden_layers": whole["num_hidden_layers"] + 1}
    if model_type not in BASE_PASSED_OVER:
        for name in ("type", "rope_type"):
            scaling = {"rope_scaling": {name: "linear", "factor": 3.0}}
            yield f"scaled by {name}", {**minimal, **sizes, "rope_theta": 123456.0, **scaling}
    yield "dynamic", {**minimal, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}
    yield "transformers 4", without_nesting(whole)
    rope = whole.get("rope_parameters") or {}
    blocks = {} if model_type in BASES_BESIDE else rope
    for kind in (kind for kind, block in blocks.items() if isinstance(block, dict)):
        for block in ({"rope_theta": 123456.0}, {"rope_theta": 123456.0, "type": "linear", "factor": 3.0}):
            yield f"{kind} of {[*block]}", {**minimal, "rope_parameters": {**rope, kind: block}}
    own = TYPES.get(model_type, {})
    for alias, name in own.get("names", {}).items():
        if isinstance(whole.get(name), int) and model_type not in NAMED:
            yield f"named {alias}", {**minimal, alias: 2 * whole[name]}
    for key in own.get("kinds", {}):
        if key.endswith(("theta", "freq")):
            yield f"with {key}", {**minimal, key: 123456.0}
    for key, value in steered(own, whole.get("num_hidden_layers") or 0):
        yield f"steered by {key}", {**minimal, key: value}


# JSON texts of specifications, with their scales of scores, which == passes over; or an error.
Outcome = list[str | None] | str


def outcome(read: Callable[[Any], Any], config: Any) -> Outcome:
    """The specifications that are read, or the error's message."""
    try:
        found = read(copy.deepcopy(config))
    except ValueError as error:
        return str(error)
    specs = found if isinstance(found, list) else [found]
    return [None if spec is None else spec.to_json() for spec in specs]


def own_object(fields: dict[str, Any]) -> Any:
    """The configuration object of transformers; None where its class refuses the file."""
    try:
        return transformers.CONFIG_MAPPING[fields["model_type"]](**copy.deepcopy(fields))
    except Exception:  # whatever classes raise
        return None


@functools.cache
def cases() -> list[tuple[str, dict[str, Any], Any]]:
    """A name, a file and its object of transformers, for all types."""
    found = []
    for model_type in sorted(transformers.CONFIG_MAPPING.keys()):
        if own_object({"model_type": model_type}) is None:
            continue
        for kind, fields in published(model_type):
            config = own_object(fields)
            if config is not None:
                found.append((f"{model_type}, {kind}", fields, config))
    return found


@pytest.mark.parametrize("read", [pe.RotarySpec.from_huggingface, pe.RotarySpec.for_layers])
def test_files_are_read_as_objects(read: Callable[[Any], Any]) -> None:
    transformers.logging.set_verbosity_error()
    wrong: dict[str, tuple[Outcome, Outcome]] = {}
    count = 0
    for name, fields, config in cases():
        truth, found = outcome(read, config), outcome(read, fields)
        refused = isinstance(found, str) and (
            isinstance(truth, str)
            or fields["model_type"] in MULTIPLIED | COPIED
            or "its class derives it from" in found
            or "contradicts itself" in found
            or "expected an entry for each of" in found
        )
        if found != truth and not refused:
            wrong[name] = (found, truth)
        count += not isinstance(found, str)
    assert wrong == {}
    assert count > 1000


def of_parts() -> Iterator[tuple[dict[str, Any], str | None]]:
    """Files of models made of parts, one of which may say its type alone; and a part to read."""
    for model_type in sorted(transformers.CONFIG_MAPPING):
        minimal = {"model_type": model_type, **COMPLETED.get(model_type, {})}
        parts = TYPES.get(model_type, {}).get("parts", {})
        files = [minimal, *({**minimal, part: {"model_type": own["model_type"]}} for part, own in parts.items())]
        if "text" in TYPES.get(model_type, {}):
            files.append({**minimal, "rope_theta": 54321.0})
        yield from ((file, part) for file in files if parts for part in (None, *parts))


def test_parts_of_files_are_read_as_those_of_objects() -> None:
    transformers.logging.set_verbosity_error()
    wrong, count = [], 0
    for file, part in of_parts():
        config = own_object(file)
        if config is None:
            continue
        read = functools.partial(pe.RotarySpec.for_layers, part=part)
        truth, found = outcome(read, config), outcome(read, file)
        if found != truth and not (isinstance(found, str) and isinstance(truth, str)):
            wrong.append((file, part, found, truth))
        count += not isinstance(found, str)
    assert wrong == []
    assert count > 500
