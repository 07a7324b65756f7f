"""Compares every rotating configuration class of the installed transformers with its own code.

Uses default configurations, so nothing is downloaded. Compares frequencies, attention factor, and
the rotation itself: pairing, direction, window, axes.
"""

import contextlib
import copy
import dataclasses
import re
from pathlib import Path

import posembed as pe
import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.0")

from support.catalogue import TYPES, having  # noqa: E402
from support.transformers_models import Model, models, of_layer, rotate  # noqa: E402

TOKENS = 7
# Their angles are products of float32 numbers; positions stay below 50.
TOLERANCE = 2e-5

# Models without a rotary module of the usual form, which test_transformers_apart.py compares.
APART = {
    *("clvp_encoder", "codegen", "efficientloftr", "gemma4_vision", "gptj", "llama4_vision_model"),
    *("mistral_large4_text", "roformer"),
    *having("grid", "normalised"),
    *having("unrotated"),
}
FREQUENCIES_ONLY = {"hunyuan_vl_text", "seamless_m4t", "wav2vec2-bert", "wav2vec2-conformer"}


def axes_of(spec: pe.RotarySpec) -> int:
    return 1 + max(spec.sections.axis_of_pair) if spec.sections else 0


def has_axes(model: Model, rotary: torch.nn.Module) -> bool:
    """Whether the model's code gives pairs to axes, for this configuration."""
    sections = getattr(rotary, "mrope_section", None)
    if model.model_type == "neomme":  # its module has no sizes: axes alternate
        return True
    if model.model_type.endswith("code_predictor"):  # its own module, of another name, has none
        return False
    return bool(sections.get(model.layer_type) if isinstance(sections, dict) else sections)


def frequencies_agree(model: Model, spec: pe.RotarySpec, rotary: torch.nn.Module) -> bool:
    theirs = of_layer(rotary, "inv_freq", model.layer_type).double().flatten()
    ours = spec.frequencies()
    if spec.sections is not None and spec.sections.restart:  # one axis's series
        ours = ours[torch.tensor(spec.sections.axis_of_pair) == 0]
    if model.model_type == "ernie4_5_vl_moe_text":  # the same in another order
        ours, theirs = ours.sort().values, theirs.sort().values
    factor = 1.0
    if any(name.endswith("attention_scaling") for name in vars(rotary)):
        factor = of_layer(rotary, "attention_scaling", model.layer_type)
    same_factor = abs(factor - spec.attention_factor) < 1e-6
    return ours.shape == theirs.shape and same_factor and torch.allclose(ours, theirs, rtol=1e-6, atol=0)


def in_their_order(rotated: Tensor) -> Tensor:
    """Interleaved pairs written in half-split order, as some models do to query and key alike."""
    return torch.cat((rotated[..., 0::2], rotated[..., 1::2]), -1)


def agrees(model: Model, spec: pe.RotarySpec, rotary: torch.nn.Module, name: str, whole: bool) -> bool:
    """Whether the model's function rotates as ours does, for the whole head or its window."""
    axes = axes_of(spec)
    by_token = model.axial and "2d" not in name
    layout, shape = ("thd", (TOKENS, 2)) if by_token else ("bhsd", (1, 2, TOKENS))
    query = torch.randn(*shape, spec.head_dim)
    positions = torch.randint(0, 50, ((axes or 1), 1, TOKENS))
    given = positions[:, 0].T if model.axial else positions if axes else positions[0]
    ours = positions[:, 0] if by_token else positions if axes else positions[0]
    window = slice(spec.rotary_start, spec.rotary_start + spec.rotary_dim)
    expected = pe.functional.rotary(query, None, ours.contiguous(), spec=spec, layout=layout)
    if not whole:
        query, expected = query[..., window], expected[..., window]
    try:
        found = rotate(model, model.apply_functions()[name], rotary, query, given).float()
    except (IndexError, RuntimeError, TypeError, ValueError):  # a function for other shapes
        return False
    candidates = [expected, in_their_order(expected)] if spec.interleaved else [expected]
    return any(
        found.shape == candidate.shape and float((found - candidate).abs().max()) < TOLERANCE
        for candidate in candidates
    )


def verdict(model: Model) -> str:
    """'agrees', 'no such layer', or a description of the difference."""
    if model.model_type in APART:
        return "compared apart"
    spec = pe.RotarySpec.from_huggingface(model.config, model.layer_type)
    rotary = model.rotary()
    if model.layer_type and not any(name.startswith(model.layer_type) for name in vars(rotary)):
        return "no such layer"
    if not frequencies_agree(model, spec, rotary):
        return "other frequencies"
    if has_axes(model, rotary) and spec.sections is None:
        return "another rotation"
    if model.model_type in FREQUENCIES_ONLY:
        return "agrees"
    ways = [(name, whole) for name in model.apply_functions() for whole in (True, False)]
    if any(agrees(model, spec, rotary, *way) for way in ways):
        return "agrees"
    return "another rotation"


def without_sections(model: Model) -> str:
    """Of files with rope_parameters, but without mrope_section: the sizes are in the code."""
    blocks = model.config.rope_parameters
    for block in (blocks, *blocks.values()):
        if isinstance(block, dict):
            block.pop("mrope_section", None)
    return verdict(model)


def is_without(model: Model) -> bool:
    """Whether the default configuration has no layers of this kind."""
    if model.model_type == "deepseek_v4":  # test_deepseek_v4: its layers have other names
        return True
    return not any(name.startswith(str(model.layer_type)) for name in vars(model.rotary()))


@pytest.mark.parametrize(
    ("kind", "theirs"), [("sliding_attention", "main"), ("compressed_sparse_attention", "compress")]
)
def test_deepseek_v4(kind: str, theirs: str) -> None:
    """Its rope_parameters name rotations, and its layer_types name layers."""
    config = transformers.DeepseekV4Config()
    config.layer_types = ["sliding_attention", *config.layer_types[1:]]
    (model,) = (m for m in models() if str(m) == f"deepseek_v4-{theirs}")
    expected = getattr(model.rotary(), f"{theirs}_inv_freq").double()
    ours = pe.RotarySpec.from_huggingface(config, kind).frequencies()
    assert torch.allclose(ours, expected, rtol=1e-6, atol=0)


def test_every_model() -> None:
    torch.manual_seed(0)
    verdicts: dict[str, str] = {}
    refused: dict[str, str] = {}
    by_default: dict[str, str] = {}
    for model in models():
        try:
            verdicts[str(model)] = verdict(model)
            if "sizes" in TYPES[model.model_type].get("axes", {}):
                by_default[str(model)] = without_sections(model)
        except ValueError as error:
            if str(error).startswith("layer_type:") and is_without(model):
                verdicts[str(model)] = "no such layer"
            else:
                refused[model.model_type] = str(error)
    agreeing = [name for name, found in verdicts.items() if found == "agrees"]
    print(f"{len(agreeing)} rotations agree, {len(refused)} model types are refused:")
    for name, reason in refused.items():
        print(f"  {name}: {reason}")
    assert {k: v for k, v in verdicts.items() if v in ("other frequencies", "another rotation")} == {}
    assert set(refused) <= set(having("refused"))
    assert len(agreeing) >= 246
    assert {*by_default.values()} <= {"agrees", "no such layer"}, by_default
    assert [*by_default.values()].count("agrees") >= 18


def test_parts_of_heads_count_where_the_class_reads_them() -> None:
    """partial_rotary_factor of type default, which most classes pass over."""
    seen, wrong = [], {}
    for model in models():
        config = copy.deepcopy(model.config)
        blocks = getattr(config, "rope_parameters", None) or {}
        block = blocks.get(model.layer_type, blocks)
        if block.get("rope_type") != "default" or model.model_type in APART:
            continue
        if getattr(config, "qk_rope_head_dim", None):  # the width is a key of its own
            continue
        block["partial_rotary_factor"] = (block.get("partial_rotary_factor") or 1.0) / 2
        changed = dataclasses.replace(model, config=config)
        with contextlib.suppress(AttributeError, LookupError, ValueError):  # no such layer
            spec = pe.RotarySpec.from_huggingface(config, model.layer_type)
            theirs = of_layer(changed.rotary(), "inv_freq", model.layer_type).numel()
            ours = spec.rotary_dim // 2
            if spec.sections is not None and spec.sections.restart:
                ours = spec.sections.axis_of_pair.count(0)
            seen.append((ours, "whole_heads" in TYPES[model.model_type]))
            if ours != theirs:
                wrong[str(model)] = (ours, theirs)
    assert wrong == {}
    assert sum(whole for _, whole in seen) > 130
    assert sum(not whole for _, whole in seen) > 20


def test_nobody_is_left_out() -> None:
    """Every package whose code calls a rotary function has a model in the table or a reason."""
    known: set[str] = set()
    packages: dict[str, set[str]] = {}
    for model_type in transformers.CONFIG_MAPPING:
        module = transformers.CONFIG_MAPPING[model_type].__module__
        packages.setdefault(module.split(".")[2], set()).add(model_type)
    known = {model.model_type for model in models()} | set(having("refused"))
    folder = Path(transformers.__file__).parent / "models"
    called = re.compile(r"(?<!def )\b(?:apply_\w*rot\w*|rotate_queries\w*)\(")
    rotating = {
        file.parent.name for file in folder.glob("*/modeling_*.py") if called.search(file.read_text(encoding="utf-8"))
    }
    left_out = {name for name in rotating if not packages.get(name, set()) & known}
    assert left_out == set()
    assert len(rotating) > 200
