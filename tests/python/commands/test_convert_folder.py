"""Tests conversion of a model's folder: shards, index, configuration; complete or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import posembed as pe
import pytest
import torch
from posembed.commands import convert, main
from support.case import assert_close
from torch import Tensor

safetensors = pytest.importorskip("safetensors.torch")

INDEX = "model.safetensors.index.json"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
}


def shard(layer: int) -> str:
    return f"model-{layer + 1:05}-of-00003.safetensors"


def layers() -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    return [
        {
            f"model.layers.{layer}.self_attn.{name}.weight": torch.randn(count, 32).bfloat16()
            for name, count in rows.items()
        }
        for layer in range(3)
    ]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three shards, a tokenizer in a subfolder, weights in another format, a hidden file."""
    folder = tmp_path / "model"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / ".git").mkdir()
    weight_map = {}
    for layer, tensors in enumerate(layers()):
        safetensors.save_file(tensors, folder / shard(layer), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard(layer))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("other weights")
    (folder / ".git" / "HEAD").write_text("")
    return folder


def arguments(source: Path, target: Path, *more: str, to: str = "interleaved") -> list[str]:
    return ["convert", str(source), str(target), "--to", to, *more]


def refusal(capsys: pytest.CaptureFixture[str], source: Path, target: Path, *more: str) -> str:
    assert main(arguments(source, target, *more)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_every_shard_is_converted(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "made" / "interleaved"
    assert main(arguments(model, target)) == 0
    for layer, before in enumerate(layers()):
        after = safetensors.load_file(target / shard(layer))
        for name, tensor in before.items():
            heads = len(tensor) // CONFIG["head_dim"]
            expected = pe.permute_rotary_weight(tensor, heads, to="interleaved")
            assert torch.equal(after[name], tensor if "v_proj" in name else expected), name


def test_what_else_the_folder_has(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "interleaved"
    assert main(arguments(model, target)) == 0
    files = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert files == {*map(shard, range(3)), INDEX, "config.json", "tokenizer/vocab.json"}
    assert (target / INDEX).read_bytes() == (model / INDEX).read_bytes()
    assert set(tmp_path.iterdir()) == {model, target}


def test_the_configuration_records_the_pairing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "interleaved"
    assert main(arguments(model, target)) == 0
    fields = json.loads((target / "config.json").read_text())
    assert fields == {**CONFIG, "posembed_rotary_pairs": "interleaved"}
    assert pe.RotarySpec.from_huggingface(target / "config.json").interleaved
    assert "are interleaved already" in refusal(capsys, target, tmp_path / "again")
    assert main(["diff", str(model), str(target)]) == 1
    with pytest.raises(ValueError, match="interleaved: the configuration contradicts itself"):
        pe.RotarySpec.from_huggingface(fields, interleaved=False)
    with pytest.raises(ValueError, match="posembed_rotary_pairs: expected 'interleaved' or"):
        pe.RotarySpec.from_huggingface({**CONFIG, "posembed_rotary_pairs": "yes"})


def test_there_and_back(model: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    assert main(arguments(model, there)) == 0
    assert main(arguments(there, back, to="half_split")) == 0
    for layer in range(3):
        assert (back / shard(layer)).read_bytes() == (model / shard(layer)).read_bytes()
        assert (there / shard(layer)).read_bytes() != (model / shard(layer)).read_bytes()
    ours, theirs = (pe.RotarySpec.from_huggingface(x / "config.json") for x in (model, back))
    assert ours == theirs


def test_the_text_model_of_several(model: Path, tmp_path: Path) -> None:
    """The pairing is recorded in the text model's configuration."""
    target, outer = tmp_path / "interleaved", {"model_type": "two", "text_config": CONFIG}
    (model / "config.json").write_text(json.dumps(outer))
    assert main(arguments(model, target)) == 0
    fields = json.loads((target / "config.json").read_text())
    assert fields["text_config"]["posembed_rotary_pairs"] == "interleaved"
    assert pe.RotarySpec.from_huggingface(target / "config.json").interleaved


def test_one_file_without_an_index(model: Path, tmp_path: Path) -> None:
    for file in model.glob("model-*"):
        file.unlink()
    (model / INDEX).unlink()
    safetensors.save_file(layers()[0], model / "model.safetensors")
    assert main(arguments(model, tmp_path / "interleaved")) == 0
    assert (tmp_path / "interleaved" / "model.safetensors").is_file()


# ----------------------------------------------------------------------------------------- refusals


def break_download(model: Path) -> None:
    (model / shard(1)).unlink()


def break_shard(model: Path) -> None:
    (model / shard(2)).write_bytes((model / shard(2)).read_bytes()[:-1])


def break_index(model: Path) -> None:
    (model / INDEX).write_text("{}")


def exchange_shards(model: Path) -> None:
    (model / shard(0)).write_bytes((model / shard(1)).read_bytes())


def lead_outside(model: Path) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))


def take_configuration(model: Path) -> None:
    (model / "config.json").unlink()


def take_weights(model: Path) -> None:
    (model / INDEX).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_download, "names ['model-00002-of-00003.safetensors'], which are not there"),
        (break_shard, "model-00003-of-00003.safetensors: "),
        (break_index, "expected a weight_map of tensors and files"),
        (exchange_shards, "are only here or only in model.safetensors.index.json"),
        (lead_outside, "expected names of files beside it, got ['../a.safetensors']"),
        (take_configuration, "expected a folder with config.json"),
        (take_weights, "expected model.safetensors or model.safetensors.index.json"),
    ],
)
def test_broken_models_leave_nothing(
    damage: object, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(model)
    assert message in refusal(capsys, model, tmp_path / "interleaved")
    assert list(tmp_path.iterdir()) == [model]


def test_a_failure_on_the_way_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite = convert.rewrite

    def full_disk(source: Path, target: Path, *rest: object) -> None:
        rewrite(source, target, *rest)
        if source.name == shard(1):
            raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(convert, "rewrite", full_disk)
    assert "No space left on device" in refusal(capsys, model, tmp_path / "interleaved")
    assert list(tmp_path.iterdir()) == [model]


def test_folders_are_not_overwritten(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    assert "a folder is not overwritten" in refusal(capsys, model, tmp_path / "other", "--force")
    assert "a folder is not overwritten" in refusal(capsys, model, model, "--force")


def test_who_names_the_configuration(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, config = tmp_path / "x", str(model / "config.json")
    assert "--config: expected none for a folder" in refusal(
        capsys, model, target, "--config", config
    )
    assert "--config: expected for a file" in refusal(capsys, model / shard(0), target)
    nothing = tmp_path / "nothing"
    assert f"{nothing}: No such file or directory" in refusal(capsys, nothing, target)


def test_a_bar_counts_bytes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    class Bar:
        def __init__(self, total: int) -> None:
            self.total = total

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            counted.append(self.total)

        def update(self, count: int) -> None:
            self.total -= count

    def progress(sources: dict[Path, set[str]], quiet: bool) -> Bar:
        return Bar(sum(source.stat().st_size for source in sources))

    monkeypatch.setattr(convert, "progress", progress)
    assert main(arguments(model, tmp_path / "interleaved")) == 0
    assert counted == [0]


# -------------------------------------------------------------------------------------------- links


def in_a_cache(model: Path, home: Path) -> Path:
    """The model as huggingface_hub stores it: its files are links to blobs."""
    snapshot, blobs = home / "snapshots" / "c0ffee", home / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in model.rglob("*") if path.is_file())):
        link, blob = snapshot / file.relative_to(model), blobs / str(number)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_links_inside_the_folder_and_to_blobs_of_the_cache(model: Path, tmp_path: Path) -> None:
    """They are followed: what is written has no link."""
    (model / "vocab.json").symlink_to("tokenizer/vocab.json")
    cached = in_a_cache(model, tmp_path / "models--org--name")
    for source in (model, cached):
        target = tmp_path / f"from_{source.name}"
        assert main(arguments(source, target)) == 0
        assert (target / "vocab.json").read_text() == "{}"
        assert not any(path.is_symlink() for path in target.rglob("*"))
        assert len(safetensors.load_file(target / shard(2))) == 3


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer/merges.txt", shard(1), "config.json"])
def test_links_that_leave_the_folder_are_refused(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By way of another link inside it, and in a cache."""
    private = tmp_path / "private"
    private.write_bytes((model / name).read_bytes() if (model / name).exists() else b"secret")
    folders = [model, in_a_cache(model, tmp_path / "models--a--b")]
    for folder in folders:
        (folder / name).unlink(missing_ok=True)
        (folder / ".link").symlink_to(private)
        (folder / name).symlink_to(folder / ".link")
    before = sorted(tmp_path.iterdir())
    for folder in folders:
        error = refusal(capsys, folder, tmp_path / "out")
        assert f"{tmp_path}" in error.split(" which is outside the model's folder")[0]
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_not_the_cache(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another name of the repository's folder, and blobs that are a link themselves."""
    other = in_a_cache(model, tmp_path / "other")
    cached, blobs = in_a_cache(model, tmp_path / "models--a"), tmp_path / "models--a" / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    for source in (other, cached):
        message = refusal(capsys, source, tmp_path / "out")
        assert "which is outside the model's folder" in message


@pytest.mark.parametrize("to", ["nothing", "tokenizer"])
def test_links_to_no_file_are_refused(
    to: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "more").symlink_to(to)
    assert f"more: a link to {model / to}, which is no file" in refusal(
        capsys, model, tmp_path / "out"
    )


def test_links_of_files_that_are_not_used(model: Path, tmp_path: Path) -> None:
    for name in ("model.gguf", ".hidden", ".git/more"):
        (model / name).symlink_to("/etc/hostname")
    assert main(arguments(model, tmp_path / "out")) == 0
    assert not list((tmp_path / "out").rglob("*hidden"))


# ------------------------------------------------------------------------------------- whole models


@torch.no_grad()
def test_a_sharded_llama_gives_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    source, target = tmp_path / "half_split", tmp_path / "interleaved"
    transformers.LlamaForCausalLM(config).save_pretrained(source, max_shard_size="40KB")
    assert len(list(source.glob("model-*.safetensors"))) > 1
    assert main(arguments(source, target)) == 0

    def logits(folder: Path) -> Tensor:
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        return model.eval()(torch.arange(12)[None]).logits

    before = logits(source)
    assert (logits(target) - before).abs().max() > 1e-4  # with the rotation unchanged
    spec = pe.RotarySpec.from_huggingface(target / "config.json")

    def rotate(query: Tensor, key: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return pe.functional.rotary(query, key, spec=spec, layout="bhsd")

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    assert_close(logits(target), before, 1e-6)
