"""Tests conversion of files: scores stay equal, and converting back restores all bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.commands import main
from support.case import assert_close
from torch import Tensor

safetensors = pytest.importorskip("safetensors.torch")

HEADS, KEY_HEADS, HEAD_DIM, WIDTH = 4, 2, 8, 12
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "head_dim": HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "rope_theta": 10000.0,
}
PHI3 = {**LLAMA, "model_type": "phi3"}
ATTENTION = "model.layers.0.self_attn"
QUERY = [f"{ATTENTION}.q_proj.weight"]
NEOX = {**LLAMA, "model_type": "gpt_neox", "num_key_value_heads": HEADS, "rotary_pct": 1.0}


class Files:
    """A model on disk, and its converted copy."""

    def __init__(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config = folder / "config.json"
        self.config.write_text(json.dumps(config))
        self.source, self.target = folder / "model.safetensors", folder / "other.safetensors"
        safetensors.save_file(tensors, self.source, metadata={"format": "pt"})

    def arguments(self, *more: str, to: str = "interleaved") -> list[str]:
        paths = (str(self.source), str(self.target), "--config", str(self.config))
        return ["convert", *paths, "--to", to, *more]

    def convert(self, *more: str) -> dict[str, Tensor]:
        assert main(self.arguments(*more)) == 0
        return safetensors.load_file(self.target)


def layer(*rows: int, names: tuple[str, ...], attention: str = ATTENTION) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        f"{attention}.{name}.weight": torch.randn(count, WIDTH, dtype=torch.float64)
        for name, count in zip(names, rows, strict=True)
    }


def scores(query: Tensor, key: Tensor, *, interleaved: bool) -> Tensor:
    """Scores [heads, tokens, tokens] of projections [tokens, heads * head_dim]."""
    spec = pe.RotarySpec(HEAD_DIM, interleaved=interleaved)
    q, k = (x.reshape(1, len(x), -1, HEAD_DIM) for x in (query, key))
    q, k = pe.functional.rotary(q, k, spec=spec)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("bqhd,bkhd->hqk", q, k)


def x() -> Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_separate_projections(tmp_path: Path) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    sizes = (HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM, 32)
    before = layer(*sizes, names=names)
    after = Files(tmp_path, LLAMA, before).convert()
    q, k, v, o = (f"{ATTENTION}.{name}.weight" for name in names)
    assert set(after) == set(before)
    assert torch.equal(after[v], before[v])
    assert torch.equal(after[o], before[o])
    assert not torch.equal(after[q], before[q])
    expected = scores(x() @ before[q].T, x() @ before[k].T, interleaved=False)
    assert_close(scores(x() @ after[q].T, x() @ after[k].T, interleaved=True), expected, 1e-13)


def packed_in_order(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM]
    return packed.split(sizes, -1)


def packed_by_head(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = packed.view(-1, HEADS, 3, HEAD_DIM).unbind(2)
    return tuple(part.flatten(1) for part in parts)


@pytest.mark.parametrize(
    ("config", "name", "heads", "unpack"),
    [
        (PHI3, f"{ATTENTION}.qkv_proj", HEADS + 2 * KEY_HEADS, packed_in_order),
        (NEOX, "gpt_neox.layers.0.attention.query_key_value", 3 * HEADS, packed_by_head),
    ],
)
def test_packed_projections(
    config: dict, name: str, heads: int, unpack: Any, tmp_path: Path
) -> None:
    attention, _, last = name.rpartition(".")
    before = layer(heads * HEAD_DIM, names=(last,), attention=attention)
    after = Files(tmp_path, config, before).convert()
    (key,) = before
    old, new = (unpack(x() @ tensors[key].T) for tensors in (before, after))
    assert_close(scores(*new[:2], interleaved=True), scores(*old[:2], interleaved=False), 1e-13)
    # Value rows are equal, but products may be summed in another order.
    assert_close(new[2], old[2], 1e-14)


def test_what_else_has_the_rows_of_heads(tmp_path: Path) -> None:
    """Converts biases, LoRA's B and Meta's names; keeps LoRA's A and the vision tower."""
    torch.manual_seed(2)
    size = HEADS * HEAD_DIM
    adapter = "base_model.model.model.layers.1.self_attn"
    changed = {
        f"{ATTENTION}.q_proj.bias": torch.randn(size),
        f"{ATTENTION}.k_proj.bias": torch.randn(KEY_HEADS * HEAD_DIM),
        f"{adapter}.q_proj.lora_B.default.weight": torch.randn(size, 2),
        f"{adapter}.k_proj.lora_B.weight": torch.randn(KEY_HEADS * HEAD_DIM, 2),
        "layers.2.attention.wq.weight": torch.randn(size, 3),
        "model.layers.9.self_attn.q_proj.weight": torch.randn(size, 3),  # of further tokens
    }
    kept = {
        f"{adapter}.q_proj.lora_A.default.weight": torch.randn(2, 3),
        "vision_tower.layers.0.self_attn.q_proj.weight": torch.randn(size, 3),
        f"{ATTENTION}.v_proj.weight": torch.randn(size, 3),
        "model.embed_tokens.weight": torch.randn(7, 3),
        f"{ATTENTION}.rotary_emb.inv_freq": torch.randn(4),
    }
    config = {**LLAMA, "attention_bias": True, "num_hidden_layers": 4}
    after = Files(tmp_path, config, {**changed, **kept}).convert()
    for name, tensor in kept.items():
        assert torch.equal(after[name], tensor), name
    for name, tensor in changed.items():
        heads = len(tensor) // HEAD_DIM
        expected = pe.permute_rotary_weight(tensor, heads, to="interleaved")
        assert torch.equal(after[name], expected), name
        assert not torch.equal(after[name], tensor), name


def test_norms_that_have_a_row_for_each_head(tmp_path: Path) -> None:
    """As many heads as components: rows are not mistaken for them."""
    torch.manual_seed(4)
    norm = torch.randn(HEAD_DIM, HEAD_DIM)
    config = {**LLAMA, "model_type": "cohere", "use_qk_norm": True, "hidden_size": 64}
    config["num_attention_heads"] = HEAD_DIM
    files = Files(tmp_path, config, {f"{ATTENTION}.q_norm.weight": norm})
    assert main(files.arguments(to="half_split")) == 0
    (after,) = safetensors.load_file(files.target).values()
    each = [pe.permute_rotary_weight(row, 1, to="half_split") for row in norm]
    assert torch.equal(after, torch.stack(each))


def test_a_gate_in_each_head_of_the_query_stays(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = {**LLAMA, "model_type": "qwen3_next", "partial_rotary_factor": 1.0}
    before = torch.randn(HEADS, 2, HEAD_DIM, WIDTH)
    name = "model.layers.3.self_attn.q_proj.weight"
    files = Files(tmp_path, config, {name: before.flatten(0, 2)})
    (after,) = files.convert().values()
    query, gate = after.view_as(before).unbind(1)
    assert torch.equal(gate, before[:, 1])
    expected = [pe.permute_rotary_weight(head, 1, to="interleaved") for head in before[:, 0]]
    assert torch.equal(query, torch.stack(expected))


def test_layers_of_different_widths(tmp_path: Path) -> None:
    """Each layer by its own window: the same rows are two heads of one and one of the other."""
    torch.manual_seed(6)
    kinds = ("sliding_attention", "full_attention")
    config = {
        **LLAMA,
        "model_type": "gemma4_text",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "global_head_dim": 2 * HEAD_DIM,
        "num_hidden_layers": 2,
        "layer_types": list(kinds),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in kinds
        },
    }
    del config["rope_theta"]
    names = [f"model.layers.{layer}.self_attn.{x}_proj.weight" for layer, x in ((0, "q"), (1, "k"))]
    before = {name: torch.randn(2 * HEAD_DIM, 3) for name in names}
    after = Files(tmp_path, config, before).convert()
    for (name, weight), heads in zip(before.items(), (2, 1), strict=True):
        expected = pe.permute_rotary_weight(weight, heads, to="interleaved")
        assert torch.equal(after[name], expected), name


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]
)
def test_there_and_back_is_the_same_file(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(3)
    tensors = {
        "model.layers.1.self_attn.k_proj.weight": torch.randn(KEY_HEADS * HEAD_DIM, 3).to(dtype),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(HEADS * HEAD_DIM, 3).to(dtype),
        "scale": torch.tensor(2.0),
        "empty": torch.zeros(0, 4),
    }
    files = Files(tmp_path, LLAMA, tensors)
    files.convert()
    assert files.target.read_bytes() != files.source.read_bytes()
    back = tmp_path / "back.safetensors"
    config = tmp_path / "interleaved.json"
    config.write_text(json.dumps({**LLAMA, "model_type": "cohere"}))
    argv = ["convert", str(files.target), str(back), "--config", str(config), "--to", "half_split"]
    assert main(argv) == 0
    assert back.read_bytes() == files.source.read_bytes()


def test_json_tells_what_was_permuted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("q_proj", "k_proj", "v_proj")
    files = Files(tmp_path, LLAMA, layer(32, 16, 16, names=names))
    files.convert("--json")
    known = json.loads(capsys.readouterr().out)
    assert {name.split(".")[-2] for name in known["permuted"]} == {"q_proj", "k_proj"}
    assert main(files.arguments("--force")) == 0
    assert "2 tensors have interleaved pairs now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        (LLAMA, [f"{ATTENTION}.q_proj.qweight"], "only weights and biases can be converted"),
        (LLAMA, [f"{ATTENTION}.qkv_proj.weight"], "transformers' own model has no such weight"),
        (LLAMA, ["projector.layers.0.query.weight"], "transformers' own model has no such weight"),
        (LLAMA, [f"{ATTENTION}.v_proj.weight"], "no tensor is a projection to queries or keys"),
        ({**LLAMA, "head_dim": 14}, QUERY, "expected 56 rows, as the configuration says, got 32"),
        ({**LLAMA, "head_dim": 4}, QUERY, "expected 16 rows, as the configuration says, got 32"),
        ({**LLAMA, "attention_k_eq_v": True}, QUERY, "shared with keys cannot be"),
        ({**LLAMA, "model_type": "cohere"}, QUERY, "are interleaved already"),
    ],
)
def test_refusals_leave_no_file(
    config: dict,
    names: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = Files(tmp_path, config, {name: torch.zeros(32, 3) for name in names})
    assert main(files.arguments()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = Files(tmp_path, LLAMA, {QUERY[0]: torch.zeros(32, 3)})
    files.target.write_text("mine")
    assert main(files.arguments()) == 2
    assert "exists; --force overwrites it" in capsys.readouterr().err
    assert files.target.read_text() == "mine"
    files.target = files.source
    assert main(files.arguments("--force")) == 2
    assert "expected another file than the source" in capsys.readouterr().err


def test_a_file_that_is_no_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = Files(tmp_path, LLAMA, {})
    files.source.write_text("not a header")
    assert main(files.arguments()) == 2
    assert f"posembed convert: {files.source}: " in capsys.readouterr().err
