"""Families of vLLM: frequencies and pairing of layers, computed apart in float64."""

import re
from typing import Any

import posembed as pe
import pytest
import torch
from published.vllm import FAMILIES, Turn, llama
from support.catalogue import TYPES
from support.refusals import refused


@pytest.mark.parametrize(("model_type", "fields", "turns"), FAMILIES)
def test_layers(model_type: str, fields: dict[str, Any], turns: dict[int, Turn | None]) -> None:
    specs = pe.RotarySpec.for_layers({"model_type": model_type, **fields})
    position = 1234
    for layer, turn in turns.items():
        spec = specs[layer]
        if turn is None:
            assert spec is None
            continue
        assert spec is not None
        assert spec.head_dim == turn.head
        spec = spec.resolve(position + 1)
        query = torch.randn(turn.head, dtype=torch.float64)
        found = pe.functional.rotary(query.view(1, 1, 1, -1), positions=torch.tensor([position]), spec=spec)
        assert torch.allclose(found.flatten(), turn(query, position), rtol=0, atol=1e-11)


def test_every_family_of_vllm_has_a_row() -> None:
    names = {
        name
        for name, own in TYPES.items()
        if re.search(r"vLLM|vllm-project", str(own.get("source")))
        and "grid" not in own  # towers have tests of their own
    }
    without = {name for name in names if "instead" in TYPES[name]}
    assert names - without == {row[0] for row in FAMILIES}
    for name in without:
        with pytest.raises(ValueError, match=f"model_type '{name}' does not rotate: it has ALiBi"):
            pe.RotarySpec.from_huggingface({"model_type": name})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        # ChatGLM-6B has another rotation.
        ({"model_type": "chatglm", "position_encoding_2d": True}, "not understood: .'position_encoding_2d'"),
        ({"model_type": "mimo_v2", "head_dim": 192, "swa_head_dim": 128}, "head_dim: the configuration contradicts"),
        ({"model_type": "plamo2", "mamba_step": 4}, "layer_types: missing in the configuration, and its class"),
        ({"model_type": "new", "rope_theta": 5e5, "rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type: expected one of"),
        ({"model_type": "internlm", "rotary": {"base": 10000, "type": "dynamic"}}, "not understood: .'rotary'"),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], message: str) -> None:
    refused((lambda: pe.RotarySpec.for_layers({**llama(4096, 32), **fields}), ValueError, message))
