"""Runs the own tests of transformers, diffusers or timm on patched models, and on plain ones.

python tests/suite/transformers_suite.py SOURCE [families or files], or make test-…-suite SOURCE=…
This file is also the pytest plugin that patches every model after it is built or when it first runs.
"""

import argparse
import collections
import functools
import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
# One for each way of rotating, and those whose positions have several axes.
FAMILIES = """
    llama gemma3 gpt_neox gptj deepseek_v3 cohere glm modernbert roformer esm
    qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe glm4v
"""
NUMERICS, RESULTS = "POSEMBED_SUITE_NUMERICS", "POSEMBED_SUITE_RESULTS"
# Own tests of other checkouts, by a folder that only theirs have, and what to choose of them.
OTHERS = {
    "src/diffusers": [
        f"tests/models/transformers/test_models_transformer_{name}.py"
        for name in ("flux", "wan", "qwenimage", "ltx", "hidream", "mochi", "cogvideox", "z_image")
    ],
    "timm": ["tests/test_models.py", "-k", "eva02_tiny or rope or pe_core or naver"],
}
Outcomes = dict[str, str]

outcomes: Outcomes = {}
models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def pytest_configure() -> None:
    """Patches each model when its constructor ends and when its weights are loaded."""
    if not os.environ.get(NUMERICS):
        return
    import transformers
    from posembed.integrations.huggingface import patch

    torch.nn.modules.module.register_module_forward_pre_hook(_patched_when_it_runs)
    base: Any = transformers.PreTrainedModel
    built, loaded = base.post_init, base.from_pretrained.__func__

    @functools.wraps(built)
    def post_init(self: Any) -> None:
        built(self)
        patch(self, numerics=os.environ[NUMERICS])  # type: ignore[arg-type]

    @functools.wraps(loaded)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found = loaded(cls, *args, **kwargs)
        model = found[0] if isinstance(found, tuple) else found
        patch(model, numerics=os.environ[NUMERICS])  # type: ignore[arg-type]
        return found

    base.post_init, base.from_pretrained = post_init, classmethod(from_pretrained)


def _patched_when_it_runs(module: torch.nn.Module, _: object) -> None:
    """Patches a model of diffusers or timm at its first call."""
    from posembed.integrations.huggingface import patch

    if type(module).__module__.startswith(("diffusers.models", "timm.models")):
        known = any(module in seen.modules() for seen in models)  # a part of a model
        if not known and not torch.compiler.is_compiling():
            models.add(module)
            patch(module, numerics=os.environ[NUMERICS])  # type: ignore[arg-type]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps each test's outcome; the worst of its phases."""
    if report.failed or report.nodeid not in outcomes or outcomes[report.nodeid] == "passed":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Writes the outcomes, and how often a kernel ran."""
    from posembed.integrations.huggingface import _door

    counters = [rotation.calls for x in _door._calls.values() for rotation, *_ in x.values()]
    calls = [sum(x.kernel for x in counters), sum(x.own for x in counters)]
    Path(os.environ[RESULTS]).write_text(json.dumps([outcomes, calls]))


def run(source: Path, tests: list[str], numerics: str) -> tuple[Outcomes, list[int]]:
    """Outcomes of tests with this patch, and the numbers of calls of kernels and own functions."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **{NUMERICS: numerics, RESULTS: str(results), "HF_HUB_OFFLINE": "1"},
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        options = ["-q", "--tb=short", "--timeout=600", "-o", "addopts=", "-o", "log_cli=0"]
        plugins = ["-p", "no:cacheprovider", "-p", "transformers_suite"]
        command = [sys.executable, "-m", "pytest", *options, *plugins, *tests]
        code = subprocess.run(command, cwd=source, env=environment, check=False).returncode
        if code not in (0, 1) or not results.exists():
            raise SystemExit(f"pytest ended with {code} before the tests ran")
        found: Outcomes
        found, calls = json.loads(results.read_text())
        return found, calls


def failed_only_patched(source: Path, plain: Outcomes, patched: Outcomes, how: str) -> list[str]:
    """Tests that fail with the patch alone, twice: some of transformers' tests are random."""
    found = [name for name, x in patched.items() if x == "failed" and plain.get(name) != "failed"]
    if found:
        again = (run(source, found, "")[0], run(source, found, how)[0])
        found = [name for name in found if [x.get(name) for x in again] == ["passed", "failed"]]
    return found


def main() -> None:
    """Prints the outcomes by family; fails if a test fails only when patched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a checkout of the library")
    parser.add_argument("families", nargs="*", help="families of transformers, or files of others")
    parser.add_argument("--numerics", choices=("model", "exact"), default="model")
    given = parser.parse_args()
    others = next((OTHERS[name] for name in OTHERS if (given.source / name).is_dir()), None)
    tests = (
        (given.families or others or [])
        if others
        else [
            str(file.relative_to(given.source))
            for family in given.families or FAMILIES.split()
            for file in sorted((given.source / "tests/models" / family).glob("test_modeling_*.py"))
        ]
    )
    if not tests:
        parser.error(f"{given.source} has no tests/models/<family>/test_modeling_*.py")
    plain, _ = run(given.source, tests, "")
    patched, calls = run(given.source, tests, given.numerics)
    only = failed_only_patched(given.source, plain, patched, given.numerics)
    rows: dict[str, collections.Counter[str]] = {}
    for name, outcome in plain.items():
        part = name.split("::")[0].removeprefix("tests/").removeprefix("models/")
        row = rows.setdefault(part, collections.Counter())
        row[f"{outcome} plain"] += 1
        row[f"{patched.get(name)} patched"] += 1
        row["failed only patched"] += name in only
    print(f"{calls[0]} calls of kernels, {calls[1]} of the models' own functions")
    for family, row in rows.items():
        columns = ("passed plain", "passed patched", "failed plain", "failed only patched")
        print(f"{family}: {', '.join(f'{row[x]} {x}' for x in columns)}")
    print(*only, sep="\n")
    sys.exit(bool(only) or not calls[0])


if __name__ == "__main__":
    main()
