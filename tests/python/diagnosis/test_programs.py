"""Programs of files and servers, golden files, and the two commands."""

import json
import math
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.commands import main
from posembed.diagnosis import of_cache, of_onnx
from published.rotary_programs import CHATGLM, DEEPSEEK, GEMMA3, LLAMA31, META, QWEN2_VL, WAN, by, halves, series
from safetensors.torch import load_file, save_file
from support.refusals import refused

PLAIN = {"model_type": "llama", "head_dim": 64, "rope_theta": 1e4, "max_position_embeddings": 2048}
LONGROPE = {"model_type": "phi3", "hidden_size": 128, "num_attention_heads": 2, "rope_theta": 1e4, "max_position_embeddings": 1024, "original_max_position_embeddings": 256, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [4.0] * 32}}  # fmt: skip
ENGINE = """
import numpy as np


def rotate(x, positions):
    frequencies = 10000.0 ** (-np.arange(0, 64, 2, dtype=np.float32) / 64)
    angles = positions.numpy()[:, None].astype(np.float32) * frequencies
    first, second = np.split(x.numpy(), 2, -1)
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([first * c - second * s, second * c + first * s], -1)


def backwards(x, positions):
    return rotate(x, -positions)


def short(x, positions):
    if positions.max() > 999:
        raise RuntimeError("no such row")
    return rotate(x, positions)


def flat(x, positions):
    return x.flatten()


def broken(x, positions):
    raise RuntimeError("no memory")
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN))
    return str(path)


@pytest.fixture
def engine(tmp_path: Path) -> str:
    path = tmp_path / "engine.py"
    path.write_text(ENGINE)
    return str(path)


def diagnosed(capsys: pytest.CaptureFixture[str], *argv: str, code: int) -> str:
    assert main(["diagnose", *argv]) == code
    streams = capsys.readouterr()
    return streams.err if code == 2 else streams.out


def test_exit_codes(config: str, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, *options: str, code: int) -> str:
        return diagnosed(capsys, config, "--program", f"{engine}:{name}", *options, code=code)

    right = run("rotate", code=0)
    assert right.startswith("right to ")
    assert "bound, for components up to 1: 4.8e-07 for the dtype" in right
    assert f"truth: {config}: model_type 'llama' as in transformers " in right
    assert run("backwards", code=1).startswith("turned backwards\n")
    assert run("short", code=1).startswith("table too short: position 1000 raises RuntimeError")
    assert run("short", "--max-position", "999", code=0).startswith("right to ")
    found = json.loads(run("backwards", "--json", code=1))
    assert (found["verdict"], found["mistakes"]) == ("wrong", [["turned backwards"]])
    assert {"position", "error", "bound"} == set(found["errors"][0])
    assert "program: expected an output of shape" in run("flat", code=2)
    assert "has no function 'none'" in run("none", code=2)
    assert "program: expected rotated x, but it raises RuntimeError: no memory" in run("broken", code=2)
    assert "layer: expected 0 to 31, got 99" in run("rotate", "--layer", "99", code=2)


@pytest.mark.parametrize(
    ("program", "text"), [("nowhere.at_all", "program: expected module:name"), ("json", "json: expected a class")]
)
def test_programs_that_are_none(program: str, text: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    assert text in diagnosed(capsys, config, "--program", program, code=2)


COHERE = {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window_pattern": 4}


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        (COHERE, {"layer": 3}, "layer: layer 3 does not rotate"),
        (COHERE, {"layer": 0, "layer_type": "full_attention"}, "layer: expected none beside"),
        (GEMMA3, {}, "layer_type: expected one of"),
        (PLAIN, {"heads": 0}, "heads: "),
        (PLAIN, {"max_position": -1}, "max_position: "),
    ],
)
def test_bad_arguments(config: Any, options: dict[str, Any], text: str) -> None:
    refused((lambda: pe.diagnose(lambda x, positions: x, config, **options), ValueError, text))


@pytest.mark.parametrize(
    ("config", "source"),
    [
        (PLAIN, "model_type 'llama' as in transformers "),
        (CHATGLM, "model_type 'chatglm' as in "),
        (META, "params.json"),
        (WAN, "WanTransformer3DModel of diffusers "),
        ({"general.architecture": "llama", "llama.embedding_length": 256, "llama.attention.head_count": 4, "llama.rope.freq_base": 1e4}, "the metadata of GGUF architecture 'llama'"),
        (pe.RotarySpec(64), "the RotarySpec given: 64"),
    ],
)  # fmt: skip
def test_the_source_of_the_truth_is_named(config: Any, source: str) -> None:
    found = pe.diagnose(lambda x, positions: x, config, max_position=9)
    assert found.truth.startswith(source)
    assert str(found).endswith(f"truth: {found.truth}")
    assert found.mistakes == (("not turned at all",),)


def test_specifications_instead_of_configurations() -> None:
    spec = pe.RotarySpec(64)
    assert pe.diagnose(by(series(64), halves), spec, max_position=99).right
    refused(
        (lambda: pe.diagnose(by(series(64), halves), spec, part="vision_config"), ValueError, "part: expected none beside a RotarySpec"),
        (lambda: pe.diagnose(by(series(64), halves), pe.RotarySpec(64, scaling=pe.XPosScaling())), ValueError, "xPos is not diagnosed"),
        (lambda: pe.diagnose(by(series(64), halves), spec, dtype=torch.int64), TypeError, "dtype: expected a floating-point dtype"),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ programs


GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
rotation (float[%s, 2, %s, 64] x, int64[%s] positions) => (float[%s, 2, %s, 64] y)
<float[32] frequencies = {%s}>
{
    axis = Constant <value_ints: ints = [1]> ()
    column = Cast <to: int = 1> (positions)
    places = Unsqueeze (column, axis)
    angles = Mul (places, frequencies)
    c = Cos (angles)
    s = Sin (angles)
    a, b = Split <axis: int = -1, num_outputs: int = 2> (x)
    ac = Mul (a, c)
    bs = Mul (b, s)
    bc = Mul (b, c)
    as = Mul (a, s)
    first = Sub (ac, bs)
    second = Add (bc, as)
    y = Concat <axis: int = -1> (first, second)
}
"""


@pytest.mark.parametrize("sizes", [("batch", "tokens"), (3, 7)])
def test_onnx_graphs(sizes: tuple[Any, Any], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    batch, tokens = sizes
    for sign, mistakes in ((1, ()), (-1, (("turned backwards",),))):
        numbers = ", ".join(f"{sign * frequency:.9g}" for frequency in series(64).tolist())
        text = GRAPH % (batch, tokens, tokens, batch, tokens, numbers)
        path = tmp_path / "rotation.onnx"
        onnx.save(onnx.parser.parse_model(text), path)
        assert pe.diagnose(of_onnx(path), PLAIN, heads=2).mistakes == mistakes
        assert pe.diagnose(path, PLAIN, heads=2).mistakes == mistakes
    onnx.save(onnx.parser.parse_model(text.replace("int64[", "float[").replace("positions)", "p)").replace("(positions", "(p")), path)  # fmt: skip
    refused((lambda: of_onnx(path), ValueError, "expected inputs x and positions, got x: "))


def test_rotations_in_place() -> None:
    def program(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x.copy_(by(series(64), halves)(x, positions))

    assert pe.diagnose(program, PLAIN, heads=1).right


def test_caches_of_servers(tmp_path: Path) -> None:
    angles = torch.outer(torch.arange(2048).float(), series(64))
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    assert pe.diagnose(of_cache(cache), PLAIN).right
    rounded = pe.diagnose(of_cache(cache.bfloat16()), PLAIN)
    assert rounded.mistakes == (("cosines and sines rounded to 16 bits (bfloat16)",),)
    assert pe.diagnose(of_cache(cache.bfloat16()), PLAIN, dtype=torch.bfloat16).right
    swapped = pe.diagnose(of_cache(cache.roll(32, -1)), PLAIN)
    assert swapped.verdict == "unknown"
    save_file({"model.rotary_emb.cos_sin_cache": cache}, tmp_path / "cache.safetensors")
    spec = pe.RotarySpec(80, rotary_dim=64, rotary_start=16, interleaved=True)
    assert pe.diagnose(tmp_path / "cache.safetensors", spec, max_position=2047).right
    refused((lambda: of_cache(cache[:, 0]), ValueError, "cache: expected [positions, rotary_dim], got [2048]"))  # fmt: skip


# ------------------------------------------------------------------------------------------ golden


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (PLAIN, [""]),
        (DEEPSEEK, [""]),
        (GEMMA3, ["full_attention", "sliding_attention"]),
        (LONGROPE, ["1024", "256", "257", "512"]),
        (WAN, [""]),
        ({**QWEN2_VL, "vision_config": {"model_type": "qwen2_vl_vision", "embed_dim": 1280, "num_heads": 16}}, ["", "vision_config"]),
    ],
)  # fmt: skip
def test_golden_files(config: Any, names: list[str], tmp_path: Path) -> None:
    """They have what their page says, and are right by their own tolerance."""
    path, results = tmp_path / "golden.safetensors", tmp_path / "results.safetensors"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["golden", str(tmp_path / "config.json"), "-o", str(path)]) == 0
    tensors = load_file(path)
    assert sorted({name.rpartition(".")[0] for name in tensors}) == names
    metadata = pe.diagnosis.golden(config).metadata
    assert (metadata["format"], metadata["version"]) == ("posembed.golden", "1")
    for name, entry in json.loads(metadata["entries"]).items():
        assert {"part", "layer_type", "length", "specification", "source"} == set(entry)
        of = {key: tensors[f"{name}.{key}" if name else key] for key in ("x", "positions", "output", "tolerance")}  # fmt: skip
        assert of["x"].dtype == of["tolerance"].dtype == torch.float32
        assert (of["output"].dtype, of["positions"].dtype) == (torch.float64, torch.int64)
        spec = pe.RotarySpec.from_json(json.dumps(entry["specification"]))
        spec = pe.RotarySpec.from_json(json.dumps({**json.loads(spec.to_json()), "numerics": "float32"}))  # fmt: skip
        places = of["positions"]
        assert int(places.max()) == entry["length"] - 1
        places = places.unsqueeze(1) if places.dim() > 1 else places
        result = pe.functional.rotary(of["x"], spec=spec, positions=places, layout="bhsd")
        error = (result - of["output"]).abs()
        assert bool((error <= of["tolerance"]).all())
        assert float(error.max()) > float(of["tolerance"].max()) / 1000
    save_file(tensors, results)
    kind = names[0] if names[0].endswith("attention") else None
    if "vision_config" not in names:
        assert pe.diagnose(results, config, layer_type=kind).right


def test_results_in_place_of_golden_outputs(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    path = tmp_path / "results.safetensors"
    assert main(["golden", config, "-o", str(tmp_path / "none" / "x")]) == 2
    assert capsys.readouterr().err.endswith("none/x: No such file or directory\n")
    assert main(["golden", config, "-o", str(path), "--max-position", "500", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["entries"]) == [""]
    tensors = load_file(path)
    assert int(tensors["positions"].max()) == 500
    x, positions = tensors["x"], tensors["positions"]
    tensors["output"] = by(series(64), lambda x, c, s: halves(halves(x, c, s), c, s))(x, positions)
    save_file(tensors, path)
    assert diagnosed(capsys, config, "--program", str(path), code=1).startswith("turned twice\n")
    del tensors["positions"]
    save_file(tensors, path)
    assert "expected ['positions']" in diagnosed(capsys, config, "--program", str(path), code=2)


def test_golden_files_of_all_types(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from posembed.models import catalogue

    chosen = {name: catalogue.types()[name] for name in ("llama", "gemma3_text", "bert")}
    monkeypatch.setattr(catalogue, "types", lambda: chosen)
    assert main(["golden", "--all", "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: 2 model types; 1 refused")
    refused = json.loads((tmp_path / "refused.json").read_text())
    assert list(refused) == ["bert"]
    assert "learned positions" in refused["bert"]
    assert {path.stem for path in tmp_path.glob("*.safetensors")} == {"llama", "gemma3_text"}
    assert main(["golden", "-o", str(tmp_path)]) == 2


def test_the_bound_is_not_far_from_what_float32_angles_are() -> None:
    """It is above the largest error at any position, and within 32 times of it."""
    spec = pe.RotarySpec.from_huggingface(LLAMA31)
    found = pe.diagnose(by(spec.frequencies().float(), halves), LLAMA31, heads=2)
    last = found.errors[-1]
    error, _ = pe.analysis.float32_error(spec, 131072)
    assert last.position == 131071
    assert error < last.bound < 32 * error
    assert math.isfinite(last.error)
