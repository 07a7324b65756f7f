"""The trial of convert before it writes: a small model of the same type gives the same outputs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from posembed.commands import main, permutation, verification

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
}
ATTENTION = "model.layers.0.self_attn"
ROWS = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "q_norm": 8, "k_norm": 8}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {
        f"{ATTENTION}.{name}.weight": torch.randn(rows, *([] if "norm" in name else [32]))
        for name, rows in ROWS.items()
    }
    safetensors.save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    write_config(folder, CONFIG)
    return folder


def write_config(folder: Path, fields: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


def convert(folder: Path, *more: str) -> int:
    target = folder.with_name("converted")
    return main(["convert", str(folder), str(target), "--to", "interleaved", *more])


def check_refusal(folder: Path, message: str, code: int, capsys: Any, *more: str) -> None:
    assert convert(folder, *more) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(folder.parent.iterdir()) == [folder]


def test_a_conversion_says_that_it_was_verified(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(model) == 0
    assert "4 tensors have interleaved pairs now (verified on a small model)" in (
        capsys.readouterr().out
    )


def test_a_conversion_that_changes_outputs_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(permutation.Rows, "permuted", lambda rows, tensor, to: tensor.flip(0))
    message = "model_type 'qwen3': outputs of a small model differ by "
    check_refusal(model, message, 1, capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mystery"}, "model_type 'mystery' is not known"),
        ({"model_type": "llama"}, "k_norm.weight: transformers' own model has no such weight"),
        ({"model_type": "wav2vec2-bert", "position_embeddings_type": "rotary"}, "cannot be tried"),
        ({"hidden_act": "no such function"}, "transformers has no small model to try"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--no-verify",)])
def test_what_cannot_be_tried_is_not_converted(
    change: dict[str, Any],
    message: str,
    more: tuple[str, ...],
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_config(model, {**CONFIG, **change})
    check_refusal(model, message, 2, capsys, "--half-split", *more)


def test_without_transformers(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    check_refusal(model, "transformers has no small model to try: ", 2, capsys)


def test_metas_own_files(tmp_path: Path) -> None:
    config, file = tmp_path / "params.json", tmp_path / "meta.safetensors"
    config.write_text(json.dumps({"dim": 32, "n_heads": 4, "n_kv_heads": 2, "rope_theta": 5e5}))
    parts = {f"layers.0.attention.w{x}.weight": torch.randn(32, 32) for x in "qvo"}
    safetensors.save_file({**parts, "layers.0.attention.wk.weight": torch.randn(16, 32)}, file)
    target = tmp_path / "hf.safetensors"
    argv = ["convert", str(file), str(target), "--config", str(config), "--to", "half_split"]
    assert main(argv) == 0


# -------------------------------------------------------------------------------------- model types

# The heads in all weights of a model of the default size: layers * (queries + keys), and norms.
TYPES = {
    "cohere": 40 * (64 + 64),
    "deepseek_v3": 61 * (128 + 1),
    "falcon": 32 * (71 + 1),
    "gemma3_text": 26 * (8 + 4 + 2),
    "glm": 2 * 40 * (32 + 2),  # with biases
    "mimo_v2_flash": 9 * (64 + 4) + 39 * (64 + 8),  # no key names the heads of sliding layers
    "olmo2": 32 * 2 * (32 + 32),  # norms over all heads
    "phi3": 32 * (32 + 32),
    "qwen3_moe": 24 * (32 + 4 + 2),
    "stablelm": 32 * (32 + 32),
}


def verify(model_type: str) -> int:
    """Verifies a type; returns the number of heads in the tensors of the large model."""
    fields = transformers.CONFIG_MAPPING[model_type]().to_dict()

    def read(config: dict[str, Any]) -> permutation.Specs:
        return permutation.specs_of_kinds(config, None, None)

    specs = read(fields)
    interleaved = any(spec.interleaved for spec in specs.values() if spec.rotary_dim)
    to: permutation.Pairing = "half_split" if interleaved else "interleaved"
    trial = verification.try_on(fields, fields, specs, read)
    verification.verify(trial, to, model_type)
    checkpoint = trial.checkpoint
    shapes = {name: list(x.shape) for name, x in checkpoint.loading.names.items()}
    found = [checkpoint.rows(name, shape) for name, shape in shapes.items()]
    return sum(len(rows.starts) for rows in found if rows is not None)


@pytest.mark.parametrize("model_type", TYPES)
def test_default_configurations_are_verified(model_type: str) -> None:
    assert verify(model_type) == TYPES[model_type]


# ------------------------------------------------------------------------------------ sudden deaths

# Ends the command at the first call of a function, or just after it. The trial takes no part.
KILLED = """
import os, signal, sys
from posembed import RotarySpec
from posembed.commands import common, convert, main, model_folder, permutation

class Checkpoint:
    def rows(self, name, shape):
        return permutation.Rows(RotarySpec(shape[0]), (0,), shape[0], False)

convert.planned = lambda source, *_: convert.look_through(source, Checkpoint())

owner, name, before = sys.argv[1:4]
owner = {"common": common, "convert": convert, "model_folder": model_folder, "os": os}[owner]
function = getattr(owner, name)

def killed(*arguments, **options):
    if before == "after":
        function(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, name, killed)
main(["convert", *sys.argv[4:]])
"""


@pytest.mark.parametrize(
    ("moment", "is_there"),
    [
        ("convert rewrite before", False),
        ("convert copy_header after", False),
        ("model_folder copy before", False),
        ("convert record after", False),
        ("common sync before", False),
        ("os replace before", False),
        ("os replace after", True),
    ],
)
def test_killed_at_any_moment(moment: str, is_there: bool, model: Path) -> None:
    target = model.with_name("converted")
    options = [str(model), str(target), "--to", "interleaved"]
    argv = [sys.executable, "-c", KILLED, *moment.split(), *options]
    assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL
    assert target.exists() == is_there
    if is_there:
        names = {"config.json", "model.safetensors", "tokenizer.json"}
        assert {path.name for path in target.iterdir()} == names
        assert safetensors.load_file(target / "model.safetensors").keys() == {
            f"{ATTENTION}.{name}.weight" for name in ROWS
        }
