"""Inputs and right outputs of a model's rotations, by which a program in any language tests itself.

docs/guide/diagnose.md describes the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from posembed import functional
from posembed.diagnosis.observation import (
    RANDOM,
    axes_of,
    lengths_of,
    longest_of,
    positions_of,
    random_vectors,
)
from posembed.diagnosis.rotation import FLOAT32_ROUNDOFF, Call, Rotation
from posembed.diagnosis.truth import kinds_of, source_of
from posembed.glue.other_names import check_options
from posembed.models import description, reading
from posembed.models.fields import as_fields
from posembed.models.files import load, read_once
from posembed.models.options import Facts
from posembed.specifications import RotarySpec

FORMAT = "posembed.golden"
VERSION = 1


class Golden(NamedTuple):
    """Tensors by name, and what the file says of them."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def save(self, path: Any) -> None:
        """Writes a safetensors file; ImportError without safetensors."""
        from safetensors.torch import save

        Path(path).write_bytes(save(self.tensors, self.metadata))


def _entry(spec: RotarySpec, length: int) -> dict[str, Tensor]:
    """x, positions, output and tolerance of a sequence of this length."""
    resolved = spec.resolve(length)
    positions = positions_of(spec, length)
    x = random_vectors(spec, RANDOM, positions.shape[-1], torch.float32)
    places = positions[0] if axes_of(spec) == 1 else positions.unsqueeze(1)
    output = functional.rotary(x.double(), spec=resolved, positions=places, layout="bhsd")
    call = Call(positions, length, x[:, 0].double(), output)
    bound = Rotation(resolved).bound(call, FLOAT32_ROUNDOFF)
    return {
        "x": x,
        "positions": positions[0] if axes_of(spec) == 1 else positions,
        "output": output,
        "tolerance": bound.float().unsqueeze(1),
    }


def golden(config: Any, *, max_position: int | None = None, **facts: Unpack[Facts]) -> Golden:
    """Inputs and right outputs of each kind of layers of a model, and of its parts.

    ``python -m posembed golden MODEL -o golden.safetensors`` writes them. Each kind of layers has
    x, float32 [2, 1, seq, head_dim]; positions, int64 [seq] or [axes, seq]; output, float64 like x,
    by exact angles; and tolerance, float32 like x: how far a program with float32 arithmetic and
    angles may be. Where frequencies depend on the length, there is an entry for each of several
    lengths.

    Args:
        config: As in :meth:`posembed.RotarySpec.from_huggingface`.
        max_position: The last position; default: that of the configuration.
        **facts: As in :func:`posembed.describe`.

    Raises:
        ValueError: No part of the model has a rotation that can be read.

    Examples:
        >>> import posembed as pe
        >>> found = pe.diagnosis.golden({"model_type": "gemma3_text", "num_hidden_layers": 6})
        >>> [name for name in found.tensors if name.endswith("output")]
        ['full_attention.output', 'sliding_attention.output']
    """
    loaded = load(config)
    check_options("golden", facts, Facts.__annotations__)
    source = read_once(config, loaded, facts.get("trust_remote_code", False))
    fields = as_fields(loaded)
    options = {**facts, "ignore": tuple(facts.get("ignore", ()))}
    tensors: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    refused: list[ValueError] = []
    for part in (None, *description.names_of_parts(fields)):
        own = options if part is None else description.for_part(part, options)
        try:
            kinds = kinds_of(source, part=part, **own)
        except ValueError as error:
            refused.append(error)
            continue
        stated = reading.sizes_of(source, part).max_positions
        if max_position is not None:
            stated = max_position + 1
        for kind, spec in sorted(kinds.items()):
            longest, _ = longest_of(spec, stated)
            for length in lengths_of(spec, longest):
                name = "/".join(filter(None, (part, kind, f"{length}" * spec.is_dynamic)))
                found = _entry(spec, length)
                before = f"{name}." if name else ""
                tensors |= {before + key: tensor.contiguous() for key, tensor in found.items()}
                entries[name] = {
                    "part": part,
                    "layer_type": kind or None,
                    "length": length,
                    "specification": json.loads(spec.resolve(length).to_json()),
                    "source": spec.source or source_of(fields, part),
                }
    if not entries:
        raise refused[0] if refused else ValueError("config: the model does not rotate")
    metadata = {"format": FORMAT, "version": str(VERSION), "entries": json.dumps(entries)}
    return Golden(tensors, metadata)
