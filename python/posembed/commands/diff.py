"""diff: shows whether two models rotate alike, and from which position they differ."""

from __future__ import annotations

import argparse
from typing import Any

from posembed.commands import common
from posembed.specifications import RotarySpec


def add(commands: common.Commands) -> None:
    """Arguments of diff."""
    summary = "compare the rotary embeddings of two models; exit code 1 where they differ"
    examples = ["before/config.json after/config.json", "model_a model_b --json"]
    parser = common.add_command(commands, "diff", run, summary, examples)
    parser.add_argument("a", help="a config.json, or a model's folder")
    parser.add_argument("b", help="another one")
    common.add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the differences, of each kind of layers."""
    a, b = (
        common.read_kinds(path, arguments, compared=True) for path in (arguments.a, arguments.b)
    )
    kinds = dict.fromkeys(kind for kind in (*a, *b) if kind or len(a) == len(b) == 1)
    pairs = {kind: (a.get(kind, a.get("")), b.get(kind, b.get(""))) for kind in kinds}
    found = {kind: compared(*pair) for kind, pair in pairs.items()}
    if arguments.json:
        common.print_json(found.get("", {"layer_types": found}))
    else:
        texts = {kind: "\n".join(facts["differences"]) or "equal" for kind, facts in found.items()}
        print("\n\n".join(f"{kind}: {text}" if kind else text for kind, text in texts.items()))
    return int(not all(facts["equal"] for facts in found.values()))


def compared(a: RotarySpec | None, b: RotarySpec | None) -> dict[str, Any]:
    """The differences of layers of one kind; None: there are no such layers that rotate."""
    if a is not None and b is not None:
        differences = [] if a.to_json() == b.to_json() else a.diff(b).splitlines()
    else:
        differences = [f"only the {'first' if b is None else 'second'} model has such layers"]
    facts = {"a": a and common.facts(a), "b": b and common.facts(b)}
    return {"equal": not differences, "differences": differences, **facts}
