"""Tests the command line: output, pictures, files, and exit codes for scripts."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import posembed as pe
import pytest
import torch
from posembed.commands import COMMANDS, check, main

LLAMA = {"model_type": "llama", "head_dim": 64, "rope_theta": 500000.0}
LONGER = {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write(tmp_path / "llama" / "config.json", LLAMA)


def write(path: Path, fields: dict) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(fields))
    return str(path)


def output(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> str:
    """The output of a command."""
    assert main([str(word) for word in argv]) == code
    return capsys.readouterr().out


def printed_json(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> dict:
    return json.loads(output(capsys, *argv, "--json", code=code))


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The single line of output for bad input."""
    assert main([str(word) for word in argv]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.count("\n") == 1
    return streams.err


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as users do."""
    return subprocess.run([sys.executable, "-m", "posembed", *argv], capture_output=True, text=True)


# -------------------------------------------------------------------------------------- as a process


def test_process_prints_json_alone() -> None:
    result = run("info", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["version"] == pe.__version__


def test_process_tells_an_error_in_one_line() -> None:
    result = run("explain", "no_such_file.json")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "posembed explain: no_such_file.json: No such file or directory\n"


def test_a_reader_may_leave_early() -> None:
    command = f"{sys.executable} -m posembed plot scores --head-dim 64 --json | head -n 2"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0] == "{"


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().err


def test_cmake_dir(capsys: pytest.CaptureFixture[str]) -> None:
    assert os.path.isfile(Path(output(capsys, "--cmake-dir").strip(), "PosEmbedConfig.cmake"))


@pytest.mark.parametrize("name", [command.__name__.rpartition(".")[2] for command in COMMANDS])
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert f"python -m posembed {name}" in text.partition("examples:")[2]
    assert ("--json" in text) == (name != "describe")  # which writes JSON anyway


@pytest.mark.parametrize("kind", ["wavelengths", "scores", "heatmap"])
def test_every_kind_of_plot_has_help(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plot", kind, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out.partition("examples:")[2]
    assert f"posembed plot {kind}" in text


@pytest.mark.parametrize("argv", [["expalin"], ["explain"], ["plot"], ["plot", "scores", "--distances", "0"]])
def test_wrong_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ specifications


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    known = printed_json(capsys, "info")
    assert {**known, **pe.build_info()} == known
    assert known["torch_in_use"] == torch.__version__
    assert f"instruction set     {known['instruction_set']}" in output(capsys, "info")


def test_explain(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = pe.RotarySpec.from_huggingface(config)
    assert output(capsys, "explain", config).rstrip() == spec.explain()
    folder = Path(config).parent
    assert output(capsys, "explain", folder, "--seq-len", 99).rstrip() == spec.explain(99)
    known = printed_json(capsys, "explain", config)
    assert pe.RotarySpec.from_json(json.dumps(known["specification"])) == spec
    assert known["frequencies"] == spec.frequencies().tolist()


def test_explain_takes_what_a_configuration_does_not_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "params.json", {"dim": 64, "n_heads": 4})
    known = printed_json(capsys, "explain", path, "--base", 777)
    assert known["specification"]["base"] == 777
    assert "missing in params.json: pass --base" in refusal(capsys, "explain", path)
    unknown = write(tmp_path / "config.json", {"model_type": "mine", "head_dim": 8})
    message = refusal(capsys, "explain", unknown, "--base", 777, "--interleaved")
    assert "describe its rotation in full with RotarySpec" in message


def test_unknown_keys_are_ignored_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"model_type": "llama", "head_dim": 8, "rope_theta": 1e4, "rope_new": 2, "odd": 3}
    path = write(tmp_path / "config.json", fields)
    message = refusal(capsys, "explain", path)
    assert "pass --ignore with each of [" in message
    assert "rope_new" in message
    known = printed_json(capsys, "explain", path, "--ignore", "rope_new", "--ignore", "odd")
    assert known["specification"]["base"] == 1e4
    assert "with CONFIG only" in refusal(capsys, "plot", "wavelengths", "--head-dim", 8, "--ignore", "odd")


@pytest.fixture
def two_parts(tmp_path: Path) -> str:
    """A model of text and pictures with a rotation for each."""
    tower = {"model_type": "pixtral", "head_dim": 32, "rope_theta": 100.0}
    fields = {"model_type": "llava", "text_config": LLAMA, "vision_config": tower}
    return write(tmp_path / "two_parts" / "config.json", fields)


def test_part(two_parts: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = pe.RotarySpec.from_huggingface(two_parts, part="vision_config")
    assert expected.head_dim == 32
    vision = (two_parts, "--part", "vision_config")
    assert output(capsys, "explain", *vision).rstrip() == expected.explain()
    known = printed_json(capsys, "plot", "wavelengths", *vision)
    assert known["wavelengths"] == expected.wavelengths().tolist()
    assert f"{two_parts}: --part: expected one of" in refusal(capsys, "explain", two_parts, "--part", "audio_config")
    assert output(capsys, "diff", config, two_parts) == "equal\n"
    assert "part: expected none for a configuration without parts, got" in refusal(capsys, "diff", config, *vision)


def test_explain_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected a folder with config.json or params.json" in refusal(capsys, "explain", tmp_path)
    (tmp_path / "config.json").write_text("{")
    message = refusal(capsys, "explain", tmp_path)
    assert f"posembed explain: {tmp_path / 'config.json'}: byte 0: the file: expected JSON" in message


def test_wavelengths(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = printed_json(capsys, "plot", "wavelengths", config)
    table = pe.analysis.wavelengths(pe.RotarySpec.from_huggingface(config))
    assert known["half_wavelengths"] == table.half_wavelengths.tolist()
    assert known["contexts"] == table.contexts.tolist()
    known = printed_json(capsys, "plot", "wavelengths", "--head-dim", 16)
    assert known["frequencies"] == pe.RotarySpec(16).frequencies().tolist()
    assert "expected CONFIG or --head-dim" in refusal(capsys, "plot", "wavelengths")


def test_wavelengths_where_pairs_stand_still(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    path = write(tmp_path / "config.json", {"model_type": "llama", "head_dim": 16, "rope_parameters": rope})
    assert printed_json(capsys, "plot", "wavelengths", path)["wavelengths"][-1] is None


def test_scores(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path / "longer" / "config.json", LONGER)
    known = printed_json(capsys, "plot", "scores", config, other, "--distances", 20)
    assert known["distances"] == list(range(21))
    for path in (config, other):
        spec = pe.RotarySpec.from_huggingface(path)
        assert known["scores"][path] == pe.analysis.scores_by_distance(spec, 20).tolist()


DYNAMIC = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 32.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", DYNAMIC)
def test_scores_at_a_length(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For frequencies that depend on the length."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, **DYNAMIC[kind]}
    fields = {"head_dim": 16, "max_position_embeddings": 64, "rope_parameters": rope}
    path = write(tmp_path / "config.json", {"model_type": "llama", **fields})
    spec = pe.RotarySpec.from_huggingface(path)
    assert spec.is_dynamic
    for length in (32, 1024):
        known = printed_json(capsys, "plot", "scores", path, "--distances", 9, "--seq-len", length)
        expected = pe.analysis.scores_by_distance(spec.resolve(length), 9)
        assert known["scores"][path] == expected.tolist()
    assert refusal(capsys, "plot", "scores", path).endswith(
        f"{path}: its frequencies depend on the length of the sequence: pass --seq-len\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["wavelengths", "CONFIG", "--head-dim", 64], "--head-dim: expected without CONFIG only"),
        (["scores", "CONFIG", "--rotary-dim", 8], "--rotary-dim: expected without CONFIG only"),
        (["wavelengths", "--head-dim", 64, "--part", "x"], "--part: expected with CONFIG only"),
        (["scores", "--head-dim", 64, "--layer-type", "x"], "--layer-type: expected with CONFIG only"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    argv: list[object], message: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [config if word == "CONFIG" else word for word in argv]
    assert refusal(capsys, "plot", *words) == f"posembed plot: {message}\n"


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """Two kinds of layers with bases of their own."""
    path = tmp_path / "gemma.json"
    kinds = {"full_attention": 1e6, "sliding_attention": 1e4}
    rope = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in kinds.items()}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 2}
    fields = {"model_type": "gemma3_text", **sizes, "layer_types": list(kinds)}
    fields |= {"rope_parameters": rope, "query_pre_attn_scalar": 8}
    path.write_text(json.dumps(fields))
    return path


def test_all_kinds_of_layers(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("full_attention", "sliding_attention")
    specs = {kind: pe.RotarySpec.from_huggingface(gemma, kind) for kind in kinds}
    said = output(capsys, "explain", gemma)
    assert said == "\n\n".join(f"{kind}: {specs[kind].explain()}" for kind in kinds) + "\n"
    one = output(capsys, "explain", gemma, "--layer-type", kinds[1])
    assert one == specs[kinds[1]].explain() + "\n"
    known = printed_json(capsys, "explain", gemma)["layer_types"]
    assert [known[kind]["specification"]["base"] for kind in kinds] == [1e6, 1e4]


def test_kinds_of_deepseek_v4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its file has no layer_types: the kinds follow from compress_ratios."""
    path = tmp_path / "config.json"
    fields = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 0]}
    path.write_text(json.dumps(fields))
    kinds = printed_json(capsys, "explain", path)["layer_types"]
    layers = [layer["kind"] for layer in pe.describe(path)["layers"]]
    assert list(kinds) == list(dict.fromkeys(layers))
    assert len(kinds) == 3


def test_messages_name_the_options(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = "expected one of ['full_attention', 'sliding_attention']"
    for kind in ("scores", "wavelengths"):
        told = refusal(capsys, "plot", kind, gemma)
        assert told == f"posembed plot: {gemma}: --layer-type: {kinds}, got None\n"
    told = refusal(capsys, "explain", gemma, "--layer-type", "full")
    assert told == f"posembed explain: {gemma}: --layer-type: {kinds}, got 'full'\n"
    assert f"{gemma}: --part: expected" in refusal(capsys, "explain", gemma, "--part", "tower")


def test_names_on_the_hub_are_told_from_paths(capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, "explain", "meta-llama/Llama-3.1-8B")
    assert told.startswith("posembed explain: meta-llama/Llama-3.1-8B: No such file or directory; ")
    assert "the Hugging Face hub is not downloaded" in told
    for path in ("no/such/file", "models/config.json", "models/tiny.gguf", "/models/llama", "llama"):
        assert refusal(capsys, "explain", path).endswith(f"{path}: No such file or directory\n")


def test_diff_of_all_kinds_of_layers(
    gemma: Path, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(gemma.read_text().replace("10000.0", "20000.0"))
    said = output(capsys, "diff", gemma, other, code=1)
    assert said.startswith("full_attention: equal\n\nsliding_attention: base: 10000.0 against 20000")
    known = printed_json(capsys, "diff", gemma, other, code=1)["layer_types"]
    assert [known[kind]["equal"] for kind in ("full_attention", "sliding_attention")] == [True, False]
    assert output(capsys, "diff", gemma, gemma).count("equal") == 2
    both = output(capsys, "diff", gemma, config, code=1)  # one kind of layers is compared with each
    assert both.count("head_dim: 8 against ") == 2


def test_diff_of_scores_alone(gemma: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text(gemma.read_text().replace('"query_pre_attn_scalar": 8', '"query_pre_attn_scalar": 32'))
    said = output(capsys, "diff", gemma, other, "--layer-type", "full_attention", code=1)
    assert said.startswith("score_scale: null against {")
    assert said.endswith("angles are equal\n")


def test_diff(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path / "longer" / "config.json", LONGER)
    assert output(capsys, "diff", config, config) == "equal\n"
    assert printed_json(capsys, "diff", config, config)["differences"] == []
    ours, theirs = (pe.RotarySpec.from_huggingface(path) for path in (config, other))
    assert output(capsys, "diff", config, other, code=1).rstrip() == ours.diff(theirs)
    known = printed_json(capsys, "diff", config, other, code=1)
    assert known["equal"] is False
    assert known["a"]["scaling"] is None
    assert known["b"]["scaling"]["factor"] == 4.0


# ------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize(
    "argv",
    [
        ["wavelengths", "--head-dim", "16"],
        ["scores", "--head-dim", "16", "--log"],
        ["heatmap", "--dim", "16"],
        ["heatmap", "--binary", "--json"],
    ],
)
def test_pictures(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    written = str(tmp_path / "picture.svg")
    said = output(capsys, "plot", *argv, "--output", written)
    assert written == (json.loads(said)["output"] if "--json" in argv else said.strip())
    assert "</svg>" in (tmp_path / "picture.svg").read_text()
    nowhere = tmp_path / "none" / "picture.svg"
    assert refusal(capsys, "plot", *argv, "--output", nowhere).endswith(f"{nowhere}: No such file or directory\n")


def test_a_picture_is_named_after_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    assert output(capsys, "plot", "wavelengths", "--head-dim", 16) == "wavelengths.png\n"
    assert (tmp_path / "wavelengths.png").is_file()


def test_heatmap_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    known = printed_json(capsys, "plot", "heatmap", "--positions", 5, "--dim", 8, "--base", 100, "--binary")
    expected = pe.analysis.heat_map(pe.SinusoidalSpec(8, base=100.0), 5)
    assert known["values"] == expected.tolist()
    assert known["binary"] == pe.analysis.binary_codes(5).tolist()
    wide = printed_json(capsys, "plot", "heatmap", "--positions", 5, "--dim", 8, "--binary", "--bits", 9)
    assert wide["binary"] == pe.analysis.binary_codes(5, 9).tolist()
    assert list(tmp_path.iterdir()) == []
    assert "--bits: expected with --binary" in refusal(capsys, "plot", "heatmap", "--bits", 9)
    assert "preset" in refusal(capsys, "plot", "heatmap", "--preset", "mine")


# ---------------------------------------------------------------------------------- check


def test_check_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    known = printed_json(capsys, "check", "--device", "cpu")
    assert known["passed"] is True
    assert [result["passed"] for result in known["checks"]] == [True] * 3
    assert output(capsys, "check", "--device", "cpu").splitlines()[-1].startswith("all 3 checks")


def without_angles(query: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
    return query


def without_gradient(query: torch.Tensor, **options: object) -> torch.Tensor:
    return pe.functional.rotary(query.detach(), **options) + 0 * query


@pytest.mark.parametrize(
    ("broken", "failures"),
    [(without_angles, ["rotary angles, float32", "rotary angles, float64"]), (without_gradient, ["rotary gradients"])],
)
def test_check_finds_what_is_broken(
    broken: Callable[..., torch.Tensor],
    failures: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "functional", types.SimpleNamespace(rotary=broken))
    known = printed_json(capsys, "check", "--device", "cpu", code=1)
    assert [one["name"] for one in known["checks"] if not one["passed"]] == failures
    lines = output(capsys, "check", "--device", "cpu", code=1).splitlines()
    assert lines[-1] == f"{len(failures)} of 3 checks failed"
    assert sum(line.startswith("FAILED") for line in lines) == len(failures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_check_of_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "finds no CUDA device" in refusal(capsys, "check", "--device", "cuda")
