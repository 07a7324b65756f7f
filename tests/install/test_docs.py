"""The C++ fragments of the documentation compile, link and run in a separate CMake project."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import posembed
import pytest
import torch
from safetensors.torch import save_file
from support.documentation import DOCS, ROOT, blocks

EXAMPLE = ROOT / "examples/cpp/checkpoint"
EXPORTED = ROOT / "examples/cpp/exported"
GENERATE = ROOT / "examples/cpp/generate"
GPT2_AND_BERT = ROOT / "examples/cpp/gpt2_and_bert"
WORK = ROOT / "build" / f"docs-test-{torch.__version__}"
HEADERS = ["posembed/posembed.h", "cstdio", "filesystem", "fstream", "iostream", "string"]
PROJECT = """cmake_minimum_required(VERSION 3.24)
project(Fragments LANGUAGES CXX)
find_package(PosEmbed REQUIRED)
add_executable(fragments main.cpp)
target_link_libraries(fragments PRIVATE PosEmbed::posembed)
"""


def fragments() -> list[str]:
    """The C++ blocks of the documentation that are neither whole programs nor headers."""
    found = [code for page in sorted(DOCS.rglob("*.md")) for code in blocks(page, "cpp")]
    whole = ("int main", "#pragma once", "#ifndef")
    return [part for part in found if not any(mark in part for mark in whole)]


def program(parts: list[str]) -> str:
    functions = "".join(f"void part_{i}() {{\n{code}}}\n" for i, code in enumerate(parts))
    calls = "".join(f"  part_{i}();\n" for i in range(len(parts)))
    includes = "".join(f"#include <{header}>\n" for header in HEADERS)
    return f"{includes}{functions}int main() {{\n{calls}}}\n"


def write(path: Path, text: str) -> None:
    """Writes a file only if its text changes, so that unchanged files are not compiled again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def run(*command: object) -> str:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_fragments_run() -> None:
    parts = fragments()
    assert len(parts) >= 3
    WORK.mkdir(parents=True, exist_ok=True)
    write(WORK / "CMakeLists.txt", PROJECT)
    write(WORK / "main.cpp", program(parts))
    run(build_project(WORK, WORK / "build") / "fragments")


def build_project(source: Path, build: Path, *options: str) -> Path:
    """Builds a project that finds this posembed; returns the folder of its programs."""
    folder = run(sys.executable, "-m", "posembed", "--cmake-dir").strip()
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DPosEmbed_DIR={folder}", *options)
    run("cmake", "--build", build)
    return build


def describe(folder: Path) -> None:
    """Writes the positions.json of a model's folder."""
    text = run(sys.executable, "-m", "posembed", "describe", folder)
    (folder / "positions.json").write_text(text)


@pytest.mark.program
def test_the_example_reads_folders(tmp_path: Path) -> None:
    """tests/cpp/models compares numbers; here the program runs."""
    program = build_project(EXAMPLE, WORK / "checkpoint") / "checkpoint"
    config = {"model_type": "llama", "head_dim": 64, "rope_theta": 500000, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = subprocess.run([program, "rotary", tmp_path], capture_output=True, text=True)
    assert f"python -m posembed describe {tmp_path}" in refused.stderr
    describe(tmp_path)
    expected = "layer 0: 64, base=500000\nlayer 1: 64, base=500000\n"
    assert run(program, "rotary", tmp_path) == expected
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tables = {"wte.weight": torch.ones(30, 4), "wpe.weight": torch.ones(9, 4)}
    save_file(tables, tmp_path / "model.safetensors")
    describe(tmp_path)
    assert run(program, "input", tmp_path).endswith("[2, 8] -> [2, 8, 4]\n")
    failed = subprocess.run([program, "rotary", tmp_path], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("checkpoint: model_type 'gpt2'")


@pytest.mark.program
def test_the_example_continues_texts(tmp_path: Path) -> None:
    """The C++ program and transformers give the same tokens and the same text."""
    json_folder = importlib.util.find_spec("nlohmann_json")
    if json_folder is None or not json_folder.submodule_search_locations:
        pytest.skip("no headers of nlohmann/json in this Python")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, initial_alphabet=letters)
    tokenizer.train([str(ROOT / "README.md")], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    describe(tmp_path)
    text = "We've  rotated 12 queries,\n then keys: caf\u00e9!"
    ids = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
        found = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
    options = f"-DJSON_INCLUDE={json_folder.submodule_search_locations[0]}/include"
    program = build_project(GENERATE, WORK / "generate", options) / "generate"
    written = subprocess.run([program, tmp_path, text, "12"], capture_output=True, check=True)
    # A model that knows nothing writes bytes that are no text.
    expected = tokenizer.decode(found.tolist())
    assert written.stdout.decode(errors="replace") == expected + "\n"
    failed = subprocess.run([program, tmp_path / "x", text, "1"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("generate: ")


@pytest.mark.program
def test_the_example_reads_gpt2_and_bert(tmp_path: Path) -> None:
    """The C++ program and transformers give the same numbers, from files of both generations."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids, path = [5, 17, 3, 8], tmp_path / "model.safetensors"
    program = build_project(GPT2_AND_BERT, WORK / "gpt2_and_bert") / "gpt2_and_bert"
    sizes = {"vocab_size": 50, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 1}
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=12, n_head=4, n_positions=16, **sizes)
    )
    logits = gpt2.eval()(torch.tensor([ids])).logits[0, -1].detach()
    state = {name: tensor for name, tensor in gpt2.state_dict().items() if name != "lm_head.weight"}
    old = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    for tensors in (state, old | {"h.0.attn.bias": torch.ones(1, 1, 16, 16)}):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        token, logit = run(program, "gpt2", path, 4, *ids).split()
        assert int(token) == int(logits.argmax())
        assert float(logit) == pytest.approx(float(logits.max()), abs=1e-3)
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        vocab_size=50,
        initializer_range=0.2,
    )
    bert = transformers.BertModel(config).eval()
    expected = bert(torch.tensor([ids])).last_hidden_state[0, 0, :4].tolist()
    old_names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    state = bert.state_dict()
    old = {f"bert.{name}": tensor for name, tensor in state.items()}
    for new, before in old_names.items():
        old = {name.replace(new, before): tensor for name, tensor in old.items()}
    for tensors in (state, old):
        save_file(tensors, path)
        found = [float(number) for number in run(program, "bert", path, 4, *ids).split()]
        assert found == pytest.approx(expected, abs=1e-4)
    del tensors["bert.embeddings.word_embeddings.weight"]
    save_file(tensors, path)
    failed = subprocess.run([program, "bert", path, "4", "1"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "bert.embeddings.word_embeddings.weight" in failed.stderr


def test_compile_errors_name_the_option(tmp_path: Path) -> None:
    """Mistakes of people who know other libraries; strings for enumerations name their setter."""
    mistakes = {
        "RotaryEmbedding rope(128, 2048);": "there is no largest position",
        "RotaryEmbedding rope(128); rope(x, x, 17);": "RotaryCall().offset(17)",
        "RotaryEmbedding rope(128); rope->forward(x, 17);": "RotaryCall().offset(17)",
        "SinusoidalPositionalEmbedding e(512, 5000);": "there is no largest position",
        "InputEmbedding e(100, 64, 512);": "max_positions(512)",
        "TokenEmbedding e(100, 64, 0);": "padding_idx(0)",
        'RotaryOptions(128).layout("bhsd");': "posembed::Layout",
        'InputOptions(100, 64).norm("layer");': "posembed::InputNorm",
    }
    lines = [f"void f{i}(at::Tensor x) {{ {code} }}" for i, code in enumerate(mistakes)]
    source = tmp_path / "mistakes.cpp"
    head = ["#include <posembed/posembed.h>", "using namespace posembed;"]
    source.write_text("\n".join([*head, *lines, ""]))
    from torch.utils import cpp_extension

    folders = [Path(posembed.__file__).parent / "include", *cpp_extension.include_paths()]
    command = ["c++", "-std=c++17", "-fsyntax-only", *(f"-I{folder}" for folder in folders), source]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert [words for words in mistakes.values() if words not in result.stderr] == []


@pytest.mark.program
def test_the_example_runs_exported_models(tmp_path: Path) -> None:
    """Python, the C++ program and ONNX Runtime give the same token and logit."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    package, onnx = tmp_path / "model.pt2", tmp_path / "model.onnx"
    script = ROOT / "examples/python/export_model.py"
    token, logit = run(sys.executable, script, package, onnx).split()[-2:]
    program = build_project(EXPORTED, WORK / "exported") / "exported"
    found = run(program, package, 5, 17, 3).split()
    assert found[0] == token
    assert float(found[1]) == pytest.approx(float(logit), abs=1e-3)
    session = runtime.InferenceSession(onnx)
    ids = np.array([[5, 17, 3]])
    logits = session.run(None, {session.get_inputs()[0].name: ids})[0][0, -1]
    assert logits.argmax() == int(token)
    assert logits.max() == pytest.approx(float(logit), abs=1e-3)
    failed = subprocess.run([program, tmp_path, "5", "17"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("exported: ")
