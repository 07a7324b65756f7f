"""Composite models: finds the nested configuration of one part."""

from __future__ import annotations

from collections.abc import Callable

from posembed.models import catalogue
from posembed.models.data import table
from posembed.models.fields import Fields, dict_of, same, shown, text_of

LAYER_PARTS = ("attention", "indexer", "linear_attention")


def layer_part(part: str | None) -> str | None:
    """The part of a layer that the last word of a path names."""
    last = (part or "").split(".")[-1]
    return last if last in LAYER_PARTS else None


def names_of_parts(fields: Fields) -> list[str]:
    """The keys of nested configurations."""
    own = catalogue.of(fields).get("parts", {})
    return [
        key for key, value in fields.items() if value and (key.endswith("_config") or key in own)
    ]


def _checked(fields: Fields, name: str) -> Fields:
    """A nested configuration that is asked for."""
    known = names_of_parts(fields)
    if name not in known:
        expected = f"one of {shown(known)}" if known else "none for a configuration without parts"
        raise ValueError(f"part: expected {expected}, got {shown(name)}")
    return dict_of(fields.get(name), name)


def _walk(
    fields: Fields, part: str | None, complete: Callable[[Fields], Fields]
) -> tuple[list[str], Fields]:
    """The path to a part, or to the text model, and its configuration.

    A part that is made of parts itself stands for its text model.
    """
    path = [] if part is None else part.split(".")
    if layer_part(part) is not None:
        path.pop()
    chosen = complete(fields)
    for name in path:
        chosen = complete(_checked(chosen, name))
    while not (path and "pairing" in catalogue.of(chosen)):
        text = next((key for key in table("words")["text_parts"] if chosen.get(key)), None)
        if text is None:
            break
        path.append(text)
        chosen = complete(dict_of(chosen.get(text), text))
    return path, chosen


def path_of(fields: Fields, part: str | None) -> list[str]:
    """The path of keys to a part, or to the text model; empty if the whole is a text model.

    Parts of layers are not in the path.
    """
    return _walk(fields, part, dict)[0]


def _with_base_of_attention(fields: Fields) -> Fields:
    """DBRX has its base in a block about attention."""
    block = fields.get("attn_config")
    if not isinstance(block, dict) or block.get("rope_theta") is None:
        return fields
    others = {key: value for key, value in block.items() if key != "rope_theta"}
    theta = same("rope_theta", (fields.get("rope_theta"), block["rope_theta"]))
    return {**fields, "rope_theta": theta, "attn_config": others}


def typed(fields: Fields, part: str | None) -> Fields:
    """A part, with the model_type that files of an older layout derive from the whole's."""
    _, chosen = _walk(_with_base_of_attention(fields), part, catalogue.with_parts)
    whole, own = text_of(fields.get("model_type")), chosen.get("model_type")
    text = catalogue.of(fields).get("text")
    if text is None or (own and own != whole):
        return chosen
    if part is not None and part != "text_config":
        text = f"{whole}_{part.removesuffix('_config')}"
    return {**chosen, "model_type": text}
