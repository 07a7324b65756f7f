"""Patches every model class of the installed transformers, and compares those that run small.

cd tests/python && python -m support.transformers_walk [model types]
"""

import collections
import dataclasses
import gc
import inspect
import json
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from posembed.integrations.huggingface import Report, patch, unpatch
from posembed.integrations.huggingface._door import INLINE
from torch import nn

from support.transformers_models import COMPLETED, code_of

LAYERS, VOCABULARY, TOKENS = 2, 99, 9
AXES = (1, 2, 3, 4)  # of positions; with four, those of the text may lead
SMALL: dict[str, int] = {
    **dict.fromkeys(
        (
            *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "num_blocks"),
            *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
            *("encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_mem_blocks"),
        ),
        LAYERS,
    ),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "projection_dim"), 64),
    **dict.fromkeys(
        (
            *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"),
            *("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size"),
            *("intermediate_size_mlp", "decoder_intermediate_size", "mlp_intermediate_size"),
        ),
        64,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads"),
            *("encoder_attention_heads", "num_experts", "n_routed_experts", "num_local_experts"),
            *("moe_num_experts", "num_routed_experts"),
        ),
        4,
    ),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "index_head_dim"), 16),
    "qk_rope_head_dim": 16,
    "rotary_dim": 8,
    **dict.fromkeys(("n_group", "topk_group", "num_nextn_predict_layers"), 1),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    "qk_head_dim": 32,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "max_position_embeddings": 64,
}
SECTIONS = {2: [4, 4], 3: [2, 3, 3], 4: [2, 2, 2, 2]}


@dataclasses.dataclass
class Visit:
    """The result for one model class."""

    family: str
    name: str
    report: Report | None = None
    why: str = ""
    compared: str = ""

    @property
    def state(self) -> str:
        """'patched', 'partly', 'left', 'does not rotate', 'not built' or 'failed'."""
        if self.why:
            return "failed" if self.why.startswith("failed") else "not built"
        assert self.report is not None
        rows = self.report.rows
        patched = {row.patched for row in rows if row.rotates or row.action == INLINE}
        if not patched:
            return "does not rotate"
        if patched == {True}:
            return "patched"
        return "partly" if True in patched else "left"


def shrunk(values: dict[str, Any], sections: bool) -> dict[str, Any]:
    """A configuration's values, recursively, with few layers of small width.

    Args:
        values: As the configuration has them.
        sections: Whether those with rotary positions get sections.
    """
    values = dict(values)
    if sections and "rope_theta" in values:
        values.setdefault("mrope_section", SECTIONS[3])  # of models whose code has a default
    if "qk_rope_head_dim" in values and "head_dim" in values:
        values["head_dim"] = SMALL["qk_rope_head_dim"]
    small: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            small[key] = value
        elif isinstance(value, dict):
            small[key] = shrunk(value, sections)
        elif key == "mrope_section" and isinstance(value, list):
            small[key] = SECTIONS.get(len(value), value)
        elif key == "per_layer_config":
            small[key] = {}
        elif key in ("num_experts_per_tok", "head_dim") and value is None:
            small[key] = SMALL[key]
        elif isinstance(value, bool) or value is None:
            small[key] = value
        elif key in SMALL and isinstance(value, int):
            small[key] = min(value, SMALL[key])
        elif key == "num_key_value_heads" and isinstance(value, int):
            whole = value == values.get("num_attention_heads")
            small[key] = min(value, 4 if whole else 2)
        elif key.endswith("token_id") and isinstance(value, int):
            small[key] = min(value, VOCABULARY - 1)
        elif key in ("layer_types", "mlp_layer_types", "block_types") and isinstance(value, list):
            small[key] = _kinds(value)
        else:
            small[key] = value
    if isinstance(small.get("layer_types"), list) and "num_hidden_layers" in small:
        small["num_hidden_layers"] = len(small["layer_types"])
        if isinstance(small.get("mlp_layer_types"), list):
            kinds = small["mlp_layer_types"] * len(small["layer_types"])
            small["mlp_layer_types"] = kinds[: len(small["layer_types"])]
    return small


def _kinds(layers: list[Any]) -> list[Any]:
    """One layer of each kind, and two layers at least."""
    kinds = list(dict.fromkeys(layers))
    return kinds if len(kinds) >= LAYERS else layers[:LAYERS]


def small_config(config: Any, sections: bool = True) -> Any:
    """A configuration of the same class whose model runs in a moment."""
    values = shrunk(config.to_dict(), sections)
    for key in ("transformers_version", "architectures", "model_type", "_name_or_path"):
        values.pop(key, None)
    return type(config)(**values)


def few_layers(config: Any) -> Any:
    """The configuration with few layers, in full width, for models that hold no numbers."""
    for part in (config, *[v for v in vars(config).values() if hasattr(v, "to_dict")]):
        if getattr(part, "head_dim", 0) is None:
            part.head_dim = part.hidden_size // part.num_attention_heads
        if getattr(part, "num_key_value_heads", 0) is None:
            part.num_key_value_heads = part.num_attention_heads
        if not isinstance(getattr(part, "num_hidden_layers", None), int):
            continue
        kinds = getattr(part, "layer_types", None)
        count = len(_kinds(kinds)) if kinds else LAYERS
        if kinds:
            part.layer_types = _kinds(kinds)
        part.num_hidden_layers = min(part.num_hidden_layers, count)
    return config


def without_numbers(cls: type[Any], family: str) -> Any:
    """A model on the meta device: with few layers, in full depth, or else small."""
    from transformers import CONFIG_MAPPING

    def config() -> Any:
        return CONFIG_MAPPING[family](**COMPLETED.get(family, {}))

    errors = []
    for made in (lambda: few_layers(config()), config, lambda: small_config(config())):
        try:
            with torch.device("meta"):
                return cls(made())
        except Exception as error:
            errors.append(error)
    raise errors[0]


def classes_of(config: Any, code: types.ModuleType) -> list[type[nn.Module]]:
    """Every model class of a family that this configuration configures."""
    from transformers import PreTrainedModel

    return [
        value
        for name, value in vars(code).items()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == code.__name__
        and value.config_class is type(config)
        and not name.endswith("PreTrainedModel")
        and "forward" in {key for base in value.__mro__ for key in vars(base)}
        and value.forward is not nn.Module.forward
    ]


def inputs(model: Any) -> dict[str, Any]:
    """Arguments of a forward pass."""
    name, config = model.main_input_name, model.config
    parameters = inspect.signature(model.forward).parameters
    grid = next((n for n in ("grid_thw", "image_grid_thw") if n in parameters), None)
    if grid and "input_ids" not in parameters:  # a tower of patches
        channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
        width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        return {next(iter(parameters)): torch.randn(16, width), grid: torch.tensor([[1, 4, 4]])}
    if name in ("pixel_values", "pixel_values_videos"):
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = [1, getattr(config, "num_channels", 3), height, width]
        return {name: torch.randn(shape)}
    if name == "input_ids":
        ids = torch.randint(3, VOCABULARY - 9, (2, TOKENS))
        given = {name: ids}
        if getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = ids
        return given
    raise LookupError(f"no inputs known for {name}")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def run(model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    with torch.no_grad():
        return list(tensors_in(model(**given)))


def with_positions(model: Any, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The call without positions, and with them in every shape that the model takes."""
    calls = [given]
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return calls
    shapes: list[tuple[int, ...]] = [(1, TOKENS), (2, TOKENS)]
    if "mrope_section" in str(model.config):  # others compute something without meaning
        shapes += [(axes, rows, TOKENS) for axes in AXES for rows in (1, 2)]
    random = torch.Generator().manual_seed(5)
    for shape in shapes if "input_ids" in given else []:
        steps = torch.randint(1, 4, shape, generator=random)
        call = {**given, "position_ids": steps.cumsum(-1)}
        try:
            run(model, call)
        except Exception:  # another shape than the model takes may raise anything
            continue
        calls.append(call)
    return calls


def difference(model: nn.Module, calls: list[dict[str, Any]], numerics: Any) -> str:
    """'' if a patched model gives what the model does, and its kernels ran.

    Equal are the same bits, or for exact angles the same to the rounding of the model's own.
    """
    before = [run(model, given) for given in calls]
    report = patch(model, numerics=numerics)
    try:
        after = [run(model, given) for given in calls]
    except Exception as error:
        return f"{numerics} differs by {type(error).__name__}: {error}"
    finally:
        unpatch(model)
    found = [idle(report)]
    for given, old, new in zip(calls, before, after, strict=True):
        worst = max((distance(x, y) for x, y in zip(old, new, strict=True)), default=0.0)
        if worst > (1e-4 if numerics == "exact" else 0):
            shapes = [f"{key} {[*value.shape]}" for key, value in given.items()]
            found.append(f"{numerics} differs by {worst:.2g} with {', '.join(shapes)}")
    return "; ".join(filter(None, found))


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; 0 for the same bits."""
    x, y = x.nan_to_num(7), y.nan_to_num(7)
    if x.dtype != y.dtype or x.shape != y.shape:
        return float("inf")
    if torch.equal(x, y):
        return 0.0
    x, y = x.double(), y.double()
    return float((x - y).abs().max() / x.abs().max().clamp_min(1e-9))


def idle(report: Report) -> str:
    """'' if the kernel ran in place of every function that was called, and of one at least."""
    calls = report.calls()
    never = [each for each in calls if each.own or not any(other.kernel for other in calls)]
    names = [f"{each.function} ({each.own} calls)" for each in never if not each.kernel]
    return f"idle: {', '.join(names)}" if names else ""


def compare(cls: type[Any], config: Any) -> str:
    """'equal', or why a small model is not."""
    errors = []
    for sections in (False, True):  # some code has them, and its default does not fit small heads
        torch.manual_seed(1)
        try:
            model = cls(small_config(config, sections)).eval()
            if sum(p.numel() for p in model.parameters()) > 30_000_000:
                return "not small"
            given = inputs(model)
            run(model, given)
        except Exception as error:
            errors.append(f"not run: {type(error).__name__}: {str(error).splitlines()[:1]}")
            continue
        calls = with_positions(model, given)
        found = [difference(model, calls, numerics) for numerics in ("model", "exact")]
        half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in given.items()}
        found.append(difference(model.bfloat16(), [half], "model"))
        return "; ".join(filter(None, found)) or "equal"
    return errors[-1]


def families(only: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, types.ModuleType]]:
    """Model types with their default configuration and code."""
    from transformers import CONFIG_MAPPING

    for family in sorted(CONFIG_MAPPING.keys()):
        if only and family not in only:
            continue
        try:
            config = CONFIG_MAPPING[family](**COMPLETED.get(family, {}))
            code = code_of(config)
        except Exception:  # a configuration without defaults, or code without its packages
            continue
        if code is not None:
            yield family, config, code


def visits(only: tuple[str, ...] = (), run_small: bool = True) -> Iterator[Visit]:
    """Every model class, patched; the first of each family that rotates also runs."""
    for family, config, code in families(only):
        ran = False
        for cls in classes_of(config, code):
            visit = Visit(family, cls.__name__)
            try:
                model = without_numbers(cls, family)
            except Exception as error:
                visit.why = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
                yield visit
                continue
            try:
                visit.report = patch(model)
            except Exception as error:
                visit.why = f"failed: {type(error).__name__}: {error}"
            if run_small and not ran and visit.state in ("patched", "partly"):
                ran = True
                visit.compared = compare(cls, type(config)(**COMPLETED.get(family, {})))
            yield visit
            del model
        gc.collect()


def summary(found: list[Visit]) -> dict[str, Any]:
    """The entry of transformers in docs/patched_models.json, but for the sentence on what stays."""
    import transformers

    states = collections.Counter(visit.state for visit in found)
    order = ("patched", "partly", "left", "failed")
    users: dict[str, list[Visit]] = {}
    for visit in found:
        rows = visit.report.rows if visit.report else ()
        for action in {row.action for row in rows if row.rotates and row.patched}:
            users.setdefault(action, []).append(visit)
    families = {action: sorted({v.family for v in visits}) for action, visits in users.items()}
    return {
        "version": transformers.__version__,
        "classes": {
            "that rotate": sum(states[state] for state in order),
            **{state: states[state] for state in order},
            "that do not rotate": states["does not rotate"],
            "that cannot be built from their default configuration": states["not built"],
            "run small, with equal bits": sum(v.compared == "equal" for v in found),
            "run small, with other bits": sum("differs" in v.compared for v in found),
            "run small, with a kernel that never runs": sum("idle" in v.compared for v in found),
        },
        "rotations": [
            [action, len(families[action]), len(of_action), ", ".join(families[action][:3])]
            for action, of_action in sorted(users.items(), key=lambda item: -len(item[1]))
        ],
        "families": {state: sorted({visit.family for visit in found if visit.state == state}) for state in order[:3]},
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = []
    for visit in visits(tuple(sys.argv[1:])):
        found.append(visit)
        rows = visit.report.rows if visit.report else ()
        actions = sorted({f"{row.function}: {row.action}" for row in rows})
        columns = (visit.family, visit.name, visit.state, visit.compared, visit.why, *actions)
        print(*columns, sep=" | ", flush=True)
    print(json.dumps(summary(found), indent=1))


if __name__ == "__main__":
    main()
