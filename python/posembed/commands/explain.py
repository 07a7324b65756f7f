"""explain: describes the rotation of a model's queries and keys."""

from __future__ import annotations

import argparse
from typing import Any

from posembed.commands import common
from posembed.specifications import RotarySpec


def add(commands: common.Commands) -> None:
    """Arguments of explain."""
    summary, one = "explain the rotary embedding of a model", "--layer-type full_attention"
    examples = ["config.json", "model_folder --seq-len 131072", f"config.json {one}"]
    parser = common.add_command(commands, "explain", run, summary, examples)
    parser.add_argument("config", help=common.FILES)
    common.add_length_option(parser, " and the error of float32 angles")
    common.add_reading_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the specification in words, or as JSON with its numbers; of each kind of layers."""
    kinds = common.read_kinds(arguments.config, arguments)
    if arguments.json:
        facts = {kind: facts_of(spec, arguments.seq_len) for kind, spec in kinds.items()}
        common.print_json(facts.get("", {"layer_types": facts}))
        return 0
    heads = {kind: f"{kind}: " if kind else "" for kind in kinds}
    texts = [heads[kind] + spec.explain(arguments.seq_len) for kind, spec in kinds.items()]
    print("\n\n".join(texts))
    return 0


def facts_of(spec: RotarySpec, seq_len: int | None) -> dict[str, Any]:
    """The facts of a specification, with its numbers."""
    resolved = spec if seq_len is None else spec.resolve(seq_len)
    return {
        "specification": common.facts(resolved),
        "attention_factor": resolved.attention_factor,
        "frequencies": resolved.frequencies().tolist(),
        "wavelengths": resolved.wavelengths().tolist(),
    }
