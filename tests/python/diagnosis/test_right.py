"""Right programs are found right: of other projects, of transformers, of servers and files."""

import json
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.diagnosis.observation import axes_of
from posembed.diagnosis.rotation import Call, Rotation
from posembed.models import catalogue
from published.rotary_programs import DEEPSEEK, GEMMA3, LLAMA31, PROGRAMS, QWEN2_VL, QWEN_YARN

LONGROPE = {
    "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "rope_theta": 1e4,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1 + i / 48 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]},
}  # fmt: skip
DYNAMIC = {"model_type": "llama", "head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 2048, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}  # fmt: skip
# Of transformers: file, its configuration, options of diagnose.
MODELS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", LLAMA31, {}),
    ("llama", DYNAMIC, {"max_position": 16383}),
    ("qwen3", QWEN_YARN, {"dtype": torch.bfloat16}),
    ("phi3", LONGROPE, {}),
    ("deepseek_v3", DEEPSEEK, {}),
    ("gemma3", GEMMA3, {"layer_type": "full_attention"}),
    ("gemma3", GEMMA3, {"layer_type": "sliding_attention"}),
    ("gpt_oss", {"model_type": "gpt_oss"}, {}),
    ("cohere", {"model_type": "cohere", "hidden_size": 1024, "num_attention_heads": 16}, {}),
    ("glm", {"model_type": "glm", "head_dim": 64}, {}),
    ("stablelm", {"model_type": "stablelm"}, {}),
    ("llama4", {"model_type": "llama4_text", "head_dim": 64, "max_position_embeddings": 32768}, {"layer": 0}),
    ("ernie4_5", {"model_type": "ernie4_5", "head_dim": 64}, {}),
    ("qwen2_vl", QWEN2_VL, {}),
]  # fmt: skip


@pytest.mark.parametrize(("source", "config", "options", "program"), PROGRAMS, ids=[row[0] for row in PROGRAMS])  # fmt: skip
def test_programs_of_other_projects(source: str, config: Any, options: Any, program: Any) -> None:
    found = pe.diagnose(program, config, heads=2, **options)
    assert str(found).startswith("right to "), found


@pytest.mark.parametrize(("name", "config", "options"), MODELS)
def test_models_of_transformers(name: str, config: Any, options: Any) -> None:
    pytest.importorskip("transformers")
    found = pe.diagnose(f"transformers.models.{name}.modeling_{name}", config, heads=2, **options)
    assert found.right, found
    reordered = any(note.startswith("order: ") for note in found.notes)
    assert reordered == (name == "deepseek_v3")


def test_there_are_enough_of_each() -> None:
    assert len(PROGRAMS) >= 15
    assert len({row[0] for row in PROGRAMS}) == len(PROGRAMS)
    assert len(PROGRAMS) + len(MODELS) >= 40


def test_predictions_are_those_of_the_operator() -> None:
    """For every model type whose defaults are known: what mistakes are made with is the truth."""
    count = 0
    for model_type in catalogue.types():
        try:
            found = pe.diagnosis.golden({"model_type": model_type})
        except ValueError:
            continue
        for name, entry in json.loads(found.metadata["entries"]).items():
            x, positions, output, tolerance = (
                found.tensors[f"{name}.{key}" if name else key] for key in ("x", "positions", "output", "tolerance")
            )
            spec = pe.RotarySpec.from_json(json.dumps(entry["specification"]))
            places = positions.view(axes_of(spec), -1)
            call = Call(places, entry["length"], x[:, 0].double(), output)
            predicted = Rotation(spec).apply(call)[:, None]
            assert torch.allclose(predicted, output, rtol=0, atol=1e-9), (model_type, name)
            assert bool((tolerance > 0).any())
            count += 1
    assert count >= 400
