"""Patches every rotating model of diffusers and timm, and compares those that run small.

cd tests/python && python -m support.stacks_walk timm [names]
cd tests/python && python -m support.stacks_walk diffusers [names]
cd tests/python && python -m support.stacks_walk summary < LINES    for docs/patched_models.json
DIFFUSERS_SOURCE is a checkout of diffusers, whose own tests build small models.
"""

import contextlib
import gc
import importlib
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from posembed.integrations.huggingface import patch, unpatch
from posembed.integrations.huggingface._door import INLINE
from torch import Tensor, nn

from support.transformers_walk import distance, run

ROUNDING = 2**-22  # of complex products in float32
Found = dict[str, Any]


def compared(model: nn.Module, given: Found) -> Found:
    """What the report of a small model says, how often the kernel ran, and whether bits are equal."""
    before = run(model, given)
    report = patch(model)
    found: Found = {
        "rows": [[row.function, row.patched, row.action] for row in report.rows if row.rotates],
        "inline": [row.function for row in report.left if not row.rotates],
    }
    try:
        after = run(model, given)
        calls = report.calls()
    finally:
        unpatch(model)
    found["kernel"] = sum(each.kernel for each in calls)
    found["own"] = {each.function: each.own for each in calls if each.own}
    worst = [distance(x, y) for x, y in zip(before, after, strict=True)]
    found["equal"] = max(worst, default=0) == 0
    found["near"] = max(worst, default=0) <= 64 * ROUNDING
    return found


def in_both_dtypes(make: Callable[[torch.dtype], tuple[nn.Module, Found]]) -> dict[str, Found]:
    """The results of a model and its arguments by dtype, or the error."""
    found: dict[str, Found] = {}
    try:
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(1)
            found[str(dtype)] = compared(*make(dtype))
    except Exception as error:
        found["error"] = {"why": f"{type(error).__name__}: {str(error)[:200]}"}
    gc.collect()
    return found


def state(found: dict[str, Found]) -> str:
    """'patched', 'partly', 'left' or 'does not rotate', from the results by dtype."""
    rows = [row for each in found.values() for row in each.get("rows", [])]
    inline = any(each.get("inline") for each in found.values())
    ran = all(each.get("kernel", 0) > 0 and each["near"] for each in found.values())
    owned = any(each.get("own") for each in found.values())
    idle = not owned and not any(each.get("kernel") for each in found.values())
    if idle and all(patched for _, patched, _ in rows):  # what could rotate is not called
        return "left" if inline else "does not rotate"
    if ran and not owned and all(patched for _, patched, _ in rows):
        return "patched"
    return "partly" if any(each.get("kernel", 0) > 0 for each in found.values()) else "left"


def diffusers_configs(only: list[str]) -> Iterator[tuple[str, Any]]:
    """The small models of diffusers' own tests, by class."""
    source = Path(os.environ["DIFFUSERS_SOURCE"])
    sys.path.insert(0, str(source))
    folder = source / "tests" / "models" / "transformers"
    for file in sorted(folder.glob("test_models_transformer*.py")):
        if only and not any(file.stem.endswith(name) for name in only):
            continue
        try:
            module = importlib.import_module(f"tests.models.transformers.{file.stem}")
        except Exception as error:
            print(f"{file.stem}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        for name, value in vars(module).items():
            own = inspect.isclass(value) and value.__module__ == module.__name__
            if own and name.endswith("TesterConfig") and hasattr(value, "model_class"):
                yield name, value


def completed(name: str, given: Found) -> Found:
    """A test's inputs, with tables that rotate where it has none or random numbers."""
    old = given.get("image_rotary_emb")
    if name.startswith(("CogVideoX", "ConsisID", "HunyuanDiT")):
        tokens, width = 16, 8  # of their small pictures and heads
        theta = torch.rand(tokens, width // 2).repeat_interleave(2, -1)
        return {**given, "image_rotary_emb": (theta.cos(), theta.sin())}
    if name.startswith("LuminaNext"):
        theta = torch.rand(384, 384, old.shape[-1])
        return {**given, "image_rotary_emb": torch.polar(torch.ones_like(theta), theta)}
    return given


def diffusers_models(only: list[str]) -> Iterator[tuple[str, dict[str, Found]]]:
    for name, tester in diffusers_configs(only):
        config = tester()
        cls = config.model_class

        def make(dtype: torch.dtype, config: Any = config, cls: Any = cls) -> tuple[nn.Module, Found]:
            model = cls(**config.get_init_dict()).to(dtype).eval()
            return model, converted(completed(cls.__name__, config.get_dummy_inputs()), dtype)

        yield f"{cls.__name__} ({name.removesuffix('TesterConfig')})", in_both_dtypes(make)


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in another dtype, recursively."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: converted(part, dtype) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(converted(part, dtype) for part in value)
    return value


def shallow(name: str) -> Any:
    """A model of timm with one layer; None for models whose blocks are of several kinds."""
    import timm

    for options in ({}, {"num_kv_heads": (1,)}):  # whose default has an entry for each layer
        with contextlib.suppress(AssertionError, TypeError):
            return timm.create_model(name, depth=1, **options)
    return None


def timm_models(only: list[str]) -> Iterator[tuple[str, dict[str, Found]]]:
    import timm

    for name in only or timm.list_models():
        text = Path(inspect.getfile(timm.models.model_entrypoint(name))).read_text("utf-8")
        if not re.search("rope|rotary", text):
            continue
        with torch.device("meta"):
            model = shallow(name)
        if model is None or not any("rope" in key.lower() for key, _ in model.named_modules()):
            continue
        size = model.pretrained_cfg["input_size"]

        def make(dtype: torch.dtype, name: str = name, size: Any = size) -> tuple[nn.Module, Found]:
            return shallow(name).to(dtype).eval(), {"x": torch.randn(1, *size, dtype=dtype)}

        yield name, in_both_dtypes(make)


def summary(lines: list[Found]) -> dict[str, list[str]]:
    """The models of a library in docs/patched_models.json: state and reason, by class.

    A class with several configurations has the worst of their states.
    """
    order = ["left", "partly", "patched", "does not rotate", "not run"]
    lines = [line for line in lines if line["state"] != "not run"]
    models: dict[str, list[str]] = {}
    for line in sorted(lines, key=lambda line: order.index(line["state"]), reverse=True):
        models[line["name"].partition(" ")[0]] = [line["state"], reason(line)]
    return dict(sorted(models.items()))


def reason(line: Found) -> str:
    """What a model's functions compute, or why they stay."""
    found = [part for key, part in line.items() if key not in ("name", "state")]
    texts = []
    for each in found:
        texts += [action for _, _, action in each.get("rows", [])]
        texts += [INLINE] * bool(each.get("inline"))
    return "; ".join(dict.fromkeys("; ".join(texts).split("; "))) if texts else ""


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1] == "summary":  # of the lines that the walks have printed
        lines = [json.loads(line) for line in sys.stdin if line.startswith("{")]
        print(json.dumps(summary(lines), indent=1))
        return
    models = {"diffusers": diffusers_models, "timm": timm_models}[sys.argv[1]]
    for name, found in models(sys.argv[2:]):
        known = {key: value for key, value in found.items() if key.startswith("torch.")}
        line = {"name": name, "state": state(known) if known else "not run", **found}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
