"""Every configuration class of the installed transformers that rotates, against its own code.

Default configurations: nothing is downloaded. Compared are frequencies, attention factor, and the
rotation itself: pairing, direction, window, axes.
"""

from __future__ import annotations

import posembed as pe
import pytest
import torch
from posembed import conventions
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.0")

from support.transformers_models import Model, models, of_layer, rotate  # noqa: E402

TOKENS = 7
# Their angles are products of float32 numbers; positions stay below 50.
TOLERANCE = 2e-5

# Default configurations that transformers' own code cannot run.
INCOMPLETE = {
    "blt": "a composite of four models without a width of its own",
    "cohere_compass_text": "no rope_parameters",
    "glm4v_moe_text": "sections of 32 pairs, of which it has 11",
    "glm4v_text": "sections of 32 pairs, of which it has 64",
    "glm_image_text": "sections of 32 pairs, of which it has 64",
    "qwen3_omni_moe_text": "an odd head_dim",
}
# rotary_dim 64 beside a partial_rotary_factor that is 1 by default, which the code reads.
CONTRADICTING = {"minimax_m3_vl_text"}
# No rotary module of the usual form: compared below, or rotated in the middle of a layer.
WITHOUT_MODULE = {"codegen", "gptj", "llama4_vision_model", "roformer"}
FREQUENCIES_ONLY = {"hunyuan_vl_text", "seamless_m4t", "wav2vec2-bert", "wav2vec2-conformer"}


def axes_of(spec: pe.RotarySpec) -> int:
    return 1 + max(spec.sections.axis_of_pair) if spec.sections else 0


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
    return (
        ours.shape == theirs.shape
        and same_factor
        and torch.allclose(ours, theirs, rtol=1e-6, atol=0)
    )


def in_their_order(rotated: Tensor) -> Tensor:
    """Interleaved pairs written in half-split order, as some models do to query and key alike."""
    return torch.cat((rotated[..., 0::2], rotated[..., 1::2]), -1)


def agrees(
    model: Model, spec: pe.RotarySpec, rotary: torch.nn.Module, name: str, whole: bool
) -> bool:
    """Whether the model's function rotates as ours does; of the whole head or its window."""
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
    except (IndexError, RuntimeError, TypeError, ValueError):  # made for other shapes
        return False
    candidates = [expected, in_their_order(expected)] if spec.interleaved else [expected]
    return any(
        found.shape == candidate.shape and float((found - candidate).abs().max()) < TOLERANCE
        for candidate in candidates
    )


def verdict(model: Model) -> str:
    """'agrees', 'no such layer', or what is wrong."""
    spec = pe.RotarySpec.from_huggingface(model.config, model.layer_type)
    if model.model_type in WITHOUT_MODULE:
        return "compared below"
    rotary = model.rotary()
    if model.layer_type and not any(name.startswith(model.layer_type) for name in vars(rotary)):
        return "no such layer"
    if not frequencies_agree(model, spec, rotary):
        return "other frequencies"
    if model.model_type in FREQUENCIES_ONLY:
        return "agrees"
    ways = [(name, whole) for name in model.apply_functions() for whole in (True, False)]
    if any(agrees(model, spec, rotary, *way) for way in ways):
        return "agrees"
    return "another rotation"


def test_every_model() -> None:
    torch.manual_seed(0)
    verdicts: dict[str, str] = {}
    refused: dict[str, str] = {}
    for model in models():
        try:
            verdicts[str(model)] = verdict(model)
        except ValueError as error:
            refused[model.model_type] = str(error)
    agreeing = [name for name, found in verdicts.items() if found == "agrees"]
    print(f"{len(agreeing)} rotations agree, {len(refused)} model types are refused:")
    for name, reason in refused.items():
        print(f"  {name}: {INCOMPLETE.get(name, reason)}")
    wrong = {k: v for k, v in verdicts.items() if v in ("other frequencies", "another rotation")}
    assert wrong == {}
    assert set(refused) <= {*conventions.UNSUPPORTED, *INCOMPLETE, *CONTRADICTING}
    assert len(agreeing) >= 240


@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_tables_of_gpt_j(model_type: str) -> None:
    code = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}")
    spec = pe.RotarySpec.from_huggingface(transformers.CONFIG_MAPPING[model_type]())
    query = torch.randn(1, TOKENS, 2, spec.rotary_dim)
    table = code.create_sinusoidal_positions(TOKENS, spec.rotary_dim)
    sine, cosine = table.unsqueeze(0).chunk(2, dim=-1)
    expected = code.apply_rotary_pos_emb(query, sine, cosine)
    head = torch.nn.functional.pad(query, (0, spec.head_dim - spec.rotary_dim))
    found = pe.functional.rotary(head, spec=spec)[..., : spec.rotary_dim]
    assert torch.allclose(found, expected, atol=TOLERANCE)


def test_table_of_roformer() -> None:
    code = pytest.importorskip("transformers.models.roformer.modeling_roformer")
    config = transformers.CONFIG_MAPPING["roformer"]()
    spec = pe.RotarySpec.from_huggingface(config)
    table = code.RoFormerSinusoidalPositionalEmbedding(TOKENS, spec.head_dim).create_weight()
    query = torch.randn(1, 2, TOKENS, spec.head_dim)
    attention = code.RoFormerSelfAttention
    expected, _ = attention.apply_rotary_position_embeddings(table[None, None], query, query)
    found = pe.functional.rotary(query, spec=spec, layout="bhsd")
    assert torch.allclose(found, expected, atol=TOLERANCE)


def test_llama4_vision_tower() -> None:
    code = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = transformers.CONFIG_MAPPING["llama4_vision_model"]()
    spec = pe.RotarySpec.from_huggingface(config)
    side = config.image_size // config.patch_size
    patches = side * side
    query = torch.randn(1, patches + 1, 2, spec.head_dim)
    expected, _ = code.vision_apply_rotary_emb(
        query, query, code.Llama4VisionRotaryEmbedding(config)(query)
    )
    place = torch.arange(patches)
    rows_and_columns = torch.stack([place // side, place % side]) + 1
    class_token = torch.zeros(2, 1, dtype=torch.int64)
    positions = torch.cat([rows_and_columns, class_token], 1).unsqueeze(1)
    found = pe.functional.rotary(query, positions=positions, spec=spec)
    assert torch.allclose(found, expected, atol=TOLERANCE)
