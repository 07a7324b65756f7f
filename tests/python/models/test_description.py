"""Tests pe.describe and its command: one document of all that a program has to know."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.models.description import VERSION
from published import gguf, huggingface, params
from published.row import Row

ROOT = Path(__file__).parents[3]
ROWS = [*huggingface.ROWS, *params.ROWS, *gguf.ROWS]
SCHEMA = json.loads((ROOT / "docs/reference/positions.schema.json").read_text(encoding="utf-8"))
LLAMA4: dict[str, Any] = {"model_type": "llama4_text", "num_hidden_layers": 4, "rope_theta": 5e5}


def specification(part: dict[str, Any], index: int | None) -> pe.RotarySpec | None:
    """A rotation of a document."""
    if index is None:
        return None
    return pe.RotarySpec.from_json(json.dumps(part["rotations"][index]["specification"]))


def check_schema(found: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(found, SCHEMA)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_documents_say_what_is_read(row: Row) -> None:
    options = {key: row.arguments[key] for key in ("interleaved", "base", "ignore") if key in row.arguments}  # fmt: skip
    part = row.arguments.get("part")
    found = pe.describe(row.says, **options)
    json.dumps(found, allow_nan=False)
    check_schema(found)
    described = found if part is None else found["parts"].get(part, found)
    if described["layers"] is not None:
        layers = [specification(described, layer["rotary"]) for layer in described["layers"]]
        assert layers == pe.RotarySpec.for_layers(row.says, **row.arguments)
    if described["rotary"] is not None:
        every = pe.RotarySpec.from_huggingface(row.says, **row.arguments)
        assert specification(described, described["rotary"]) == every


def test_golden_numbers_are_those_of_the_specification() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = {"model_type": "llama", "head_dim": 64, "rope_theta": 1e6, "rope_scaling": scaling}
    rotation = pe.describe(config)["rotations"][0]
    spec = pe.RotarySpec.from_huggingface(config)
    assert rotation["frequencies"] == spec.frequencies().tolist()
    assert rotation["attention_factor"] == pytest.approx(0.1 * 1.3862943611198906 + 1.0)


def test_layers_that_do_not_rotate_have_scales() -> None:
    """Llama 4's temperature."""
    found = pe.describe(LLAMA4)
    assert [layer["rotary"] for layer in found["layers"]] == [0, 0, 0, None]
    assert [layer["score_scale"] for layer in found["layers"]] == [None, None, None, 0]
    assert found["score_scales"][0]["source"] == "attn_temperature_tuning"


def test_kinds_parts_and_rules() -> None:
    found = pe.describe({"model_type": "qwen2_5_vl", "image_token_id": 7})
    check_schema(found)
    assert found["mrope"]["image_token"] == 7
    tower = found["parts"]["vision_config"]
    spec = specification(tower, tower["rotary"])
    assert spec == pe.RotarySpec.from_huggingface({"model_type": "qwen2_5_vl"}, part="vision_config")
    indexed = pe.describe({"model_type": "deepseek_v32"})
    assert list(indexed["parts"]) == ["indexer"]
    kinds = [layer["kind"] for layer in pe.describe({"model_type": "gemma3_text"})["layers"]]
    assert kinds[:6] == ["sliding_attention"] * 5 + ["full_attention"]
    metadata = {"general.architecture": "gemma2", "gemma2.attention.key_length": 128, "gemma2.block_count": 4}  # fmt: skip
    layers = pe.describe(metadata)["layers"]
    assert [layer["kind"] for layer in layers[:2]] == ["sliding_attention", "full_attention"]


def test_alibi_and_refusals() -> None:
    found = pe.describe({"model_type": "mpt", "n_heads": 8, "attn_config": {"alibi": True}})
    check_schema(found)
    assert found["alibi"] == {"preset": "mpt", "num_heads": 8, "options": {"max_bias": 8.0}}
    assert found["refused"] == "model_type 'mpt' does not rotate: it has ALiBi"
    rotating = {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4}
    assert pe.describe({**rotating, "alibi": False})["alibi"] is None
    with pytest.raises(ValueError, match="num_attention_heads: expected a positive number, got 0"):
        pe.describe({**rotating, "alibi": True, "num_attention_heads": 0})
    with pytest.raises(ValueError, match="image_token_id"):
        pe.describe({"model_type": "qwen2_vl", "image_token_id": "seven"})
    with pytest.raises(ValueError, match="model_type 'mine' is not known"):
        pe.describe({"model_type": "mine"})
    with pytest.raises(TypeError, match="config: expected a dict"):
        pe.describe(3)


def test_options_concern_the_text_model() -> None:
    """A tower has a base and a pairing of its own."""
    config = {"model_type": "qwen2_5_vl"}
    theirs = pe.describe(config)["parts"]["vision_config"]
    stated = pe.describe(config, base=1e6, interleaved=False)
    assert stated["rotations"][0]["specification"]["base"] == 1e6
    assert stated["parts"]["vision_config"] == theirs


def test_a_folder_runs_no_code(tmp_path: Path) -> None:
    """Files of a model's own classes are not imported."""
    planted, told = "modeling_mine.py", tmp_path / "it ran"
    (tmp_path / planted).write_text(f"open({str(told)!r}, 'w').close()")
    names = {"AutoConfig": "modeling_mine.Config", "AutoModel": "modeling_mine.Model"}
    fields = {"head_dim": 8, "auto_map": names}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    assert pe.RotarySpec.from_huggingface(tmp_path) == pe.RotarySpec(8)
    pe.describe(tmp_path)
    assert not told.exists()


def test_input_layers_of_folders(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.torch")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tables = {"wte.weight": torch.ones(30, 4), "wpe.weight": torch.ones(9, 4)}
    theirs.save_file(tables, tmp_path / "model.safetensors")
    found = pe.describe(tmp_path)
    check_schema(found)
    assert found["input"]["tensors"] == {"token.weight": "wte.weight", "position.weight": "wpe.weight"}  # fmt: skip
    assert found["input"]["options"]["max_positions"] == 9


def test_the_command_writes_the_document(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA4))
    command = [sys.executable, "-m", "posembed", "describe"]
    run = subprocess.run([*command, tmp_path], capture_output=True, text=True)
    assert json.loads(run.stdout) == pe.describe(tmp_path)
    run = subprocess.run([*command, tmp_path, "--json"], capture_output=True, text=True)
    assert "unrecognized arguments: --json" in run.stderr
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    run = subprocess.run([*command, tmp_path], capture_output=True, text=True)
    assert run.returncode == 2
    assert "model_type 'mine' is not known" in run.stderr


def test_the_version_is_that_of_the_readers() -> None:
    assert SCHEMA["properties"]["version"]["const"] == VERSION
    reader = (ROOT / "csrc/models/model_positions.cpp").read_text(encoding="utf-8")
    assert f"newest_version = {VERSION};" in reader


def test_the_tables_are_in_the_wheel() -> None:
    """Setuptools packs what matches package-data."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"models/*.json"' in settings.partition("[tool.setuptools.package-data]")[2]
    tables = {file.name for file in resources.files("posembed.models").iterdir()}
    names = {"catalogue", "models", "gguf_architectures", "words", "diffusers", "input_layers"}
    assert {f"{name}.json" for name in names} <= tables


def test_reading_imports_no_transformers() -> None:
    code = (
        "import sys, posembed as pe; pe.describe({'model_type': 'gemma3_text'});"
        "pe.RotarySpec.for_layers({'model_type': 'llama'});"
        "pe.MropeRule.from_huggingface({'model_type': 'qwen2_vl'});"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
