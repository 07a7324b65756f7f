"""A valid call of every function of functional and of every operator, by the names of arguments.

Operators with shared cases (support/case.py) have their calls there; this table has the others'.
"""

import functools
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import posembed as pe
import torch
from posembed import functional
from torch import Tensor

from support.case import OperatorCase, Sample
from support.families import cases

Arguments = dict[str, Any]

SPEC, LATENT = pe.RotarySpec(16), pe.RotarySpec(24, rotary_dim=8, rotary_start=16)
WAVES, GRIDS = pe.SinusoidalSpec(32), pe.SinusoidalSpec(8, preset="detr")
ROWS = 10

# Operators whose results tell of the process, and differ from call to call.
OF_THE_PROCESS = ("build_info", "empty_cache")


def x(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.5


def integers(*shape: int) -> Tensor:
    return torch.randint(ROWS, shape, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------------------------------- functions


def functions(batch: int = 2, seq: int = 3, heads: int = 2) -> dict[str, Arguments]:
    """A call of each function that takes tensors."""
    tokens, kv_heads, pages = batch * seq, heads // 2, batch * seq // 4 + 1
    ids, positions, slots = integers(batch, seq), torch.arange(seq), torch.arange(tokens)
    mask, table, slopes = torch.ones(batch, seq).long(), x(ROWS, 32), x(heads) + 1
    rows, scores = x(batch, seq, 32), x(batch, heads, seq, seq)
    codes = {"codes": torch.ones(ROWS, 32, dtype=torch.int8), "scales": x(ROWS, 1)}
    rotated = {"query": x(batch, seq, heads, 16), "key": x(batch, seq, kv_heads, 16), "spec": SPEC}
    normed = {**rotated, "query_weight": x(16), "key_weight": x(16)}
    packed = {
        "qkv": x(batch, seq, (heads + 2 * kv_heads) * 16),
        "heads": heads,
        "key_heads": kv_heads,
        "order": "groups",
        "positions": positions,
        "spec": SPEC,
    }
    packed_norm = {**packed, "query_weight": x(16), "key_weight": x(16)}
    heads_first = {"query": x(batch, heads, seq, 16), "key": x(batch, kv_heads, seq, 16)}
    angles = {**heads_first, "cos": x(seq, 16), "sin": x(seq, 16)}
    latent = {"query": x(tokens, heads, 24), "key_rope": x(tokens, 8), "spec": LATENT}
    biased = {"scores": scores, "slopes": slopes}
    lengths = {"query_length": seq, "key_length": seq}
    grid = {"weight": x(4, 32), "grid": (2, 2)}
    attention = {name: x(batch, heads, seq, 16) for name in ("query", "key", "value")}
    return {
        "alibi_add": {**biased, "query_positions": positions},
        "alibi_add_": {**biased, "key_positions": positions},
        "alibi_attention": {**attention, "slopes": slopes},
        "alibi_bias": {"slopes": slopes, **lengths, "attention_mask": mask},
        "alibi_lse_correction": {"slopes": slopes, "query_length": seq, "query_start": seq, "key_start": 0},
        "alibi_positions": {"attention_mask": mask},
        "alibi_scaled_slopes": {"slopes": slopes, "key_length": 8, "train_length": 4},
        "alibi_softmax": {**biased, "cu_seqlens": torch.tensor([0, seq])},
        "alibi_softmax_": biased,
        "embedding": {"ids": ids, "weight": table, "padding_idx": 0},
        "embedding_quantized": {"ids": ids, **codes, "biases": x(ROWS, 1)},
        "embedding_resize": {"weight": table, "num_embeddings": ROWS + 2},
        "embedding_with_features": {"ids": ids, "weight": table, "features": x(2, 32), "places": ids % 3 - 1},
        "fairseq_positions": {"ids": ids, "padding_idx": 1},
        "fourier_features": {"coordinates": x(batch, seq, 2), "frequencies": x(2, 16), "phases": x(16), "x": rows},
        "input_embedding": {
            "ids": ids,
            "token": table,
            "position": table,
            "positions": ids,
            "token_type": x(2, 32),
            "types": ids % 2,
            "norm_weight": x(32),
            "norm_bias": x(32),
            "norm": "layer",
            "dropout": 0.5,
            "seed": torch.tensor([7]),
        },
        "learned_add": {"x": rows, "weight": table, "positions": ids},
        "learned_encode": {"weight": table, "positions": ids},
        "learned_extend": {"weight": table, "max_positions": ROWS + 2},
        "learned_packed": {**grid, "grids": torch.ones(1, 3).long()},
        "learned_resample": {**grid, "new_grid": (3, 3)},
        "mla_rotary": {**latent, "layout": "thd"},
        "mla_rotary_cache_": {**latent, "latent": x(tokens, 10), "cache": x(pages, 4, 18), "slot_mapping": slots},
        "ngram_ids": {"ids": ids, "multipliers": (3, 5), "moduli": ((7,),), "history": integers(batch, 1)},
        "norm_rotary": normed,
        "norm_rotary_": normed,
        "norm_rotary_packed": packed_norm,
        "norm_rotary_packed_": packed_norm,
        "opt_positions": {"attention_mask": mask},
        "quantize_rows": {"weight": table, "format": "int8"},
        "relative_bias": {"weight": x(32, heads), **lengths},
        "relative_buckets": {"distances": positions - 1, "num_buckets": 8},
        "relative_logits": {
            "query": x(batch, heads, seq, 16),
            "table": x(5, 16),
            "rows": torch.arange(seq).expand(seq, seq) % 5,
        },
        "relative_logits_": {
            "scores": scores,
            "query": x(batch, heads, seq, 16),
            "table": x(heads, 5, 16),
            "rows": torch.arange(seq).expand(seq, seq) % 5,
        },
        "relative_window_bias": {"weight": x(9, heads), "window": (2, 2)},
        "relative_window_resample": {"weight": x(9, heads), "window": (2, 2), "new_window": (3, 3)},
        "rerotate_": {"key": rotated["key"], "old_positions": positions, "new_positions": positions + 2, "spec": SPEC},
        "roberta_positions": {"ids": ids, "padding_idx": 1},
        "rotary": {**rotated, "positions": positions},
        "rotary_": {**rotated, "positions": positions + 1},
        "rotary_cache_": {
            "query": x(tokens, heads, 16),
            "key": x(tokens, kv_heads, 16),
            "value": x(tokens, kv_heads, 16),
            "key_cache": x(pages, 4, kv_heads, 16),
            "value_cache": x(pages, 4, kv_heads, 16),
            "slot_mapping": slots,
            "positions": slots,
            "spec": SPEC,
        },
        "rotary_packed": packed,
        "rotary_packed_": packed,
        "rotary_tables": angles,
        "rotary_tables_": angles,
        "sinusoidal": {"x": rows, "positions": ids, "scale": x(1) + 2, "spec": WAVES},
        "sinusoidal_encode": {"positions": ids, "scale": x(1) + 2, "spec": WAVES},
        "sinusoidal_grid_positions": {"grid": (1, 3), "mask": torch.ones(1, 1, 3).bool(), "spec": GRIDS},
        "step_rows_": {
            "weight": x(tokens, heads * 16),
            "gradient": x(tokens, heads * 16),
            "rule": "sgd",
            "lr": 0.1,
            "ids": slots,
        },
        "token_bag": {"ids": integers(tokens), "weight": table, "offsets": torch.zeros(1).long()},
    }


def written(name: str) -> tuple[str, ...]:
    """The arguments that the operator of an in-place function writes, by its schema."""
    operator = {"rerotate_": "rotary_rerotate_", "rotary_": "rotary_pair_"}.get(name, name)
    operator = "rotary_tables_pair_" if name == "rotary_tables_" else operator
    schema = getattr(torch.ops.posembed, operator).default._schema
    return tuple(a.name for a in schema.arguments if a.is_write)


def required(name: str) -> set[str]:
    """The arguments of a function that have no default."""
    parameters = inspect.signature(getattr(functional, name)).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}


# ---------------------------------------------------------------------------------------- operators


def as_operator(arguments: Arguments) -> Arguments:
    """The arguments of a function as its operator takes them."""
    result = dict(arguments)
    if "spec" in result:
        result["spec"] = result["spec"].to_json()
    for name in ("moduli", "offsets") if "moduli" in result else ():
        result[name] = [number for row in result.get(name, ()) for number in row]
    return result


def write_tables(folder: str, **rows: int) -> Path:
    """Writes safetensors with a table of 8 columns for each name."""
    entries, end = {}, 0
    for name, count in rows.items():
        begin, end = end, end + 32 * count
        offsets = [begin, end]
        entries[f"{name}.weight"] = {"dtype": "F32", "shape": [count, 8], "data_offsets": offsets}
    header = json.dumps(entries).encode()
    path = Path(folder, "model.safetensors")
    path.write_bytes(len(header).to_bytes(8, "little") + header + x(end // 4).numpy().tobytes())
    return path


@functools.cache
def stored_table() -> pe.FileTable:
    """A table in a file, which stays open."""
    with tempfile.TemporaryDirectory() as folder:
        return pe.FileTable(write_tables(folder, table=ROWS))


def limit_of_cache() -> int:
    """The limit on kept memory, which stays."""
    limit = pe.set_cache_limit(0)
    pe.set_cache_limit(limit)
    return limit


@functools.lru_cache(64)
def operators(batch: int = 2, seq: int = 3) -> dict[str, Arguments]:
    """A call of each operator that has no shared case."""
    known = {name: as_operator(given) for name, given in functions(batch, seq).items()}
    names = {operator.rpartition("::")[2] for operator in torch._C._dispatch_get_all_op_names()}
    same = {name: given for name, given in known.items() if name in names}
    ids, rows, mask = integers(batch, seq), x(batch, seq, 32), torch.ones(batch, seq).long()
    cu_seqlens = torch.tensor([0, 4 * seq])
    table, text, waves = x(ROWS, 32), SPEC.to_json(), WAVES.to_json()
    gradients = {"num_embeddings": ROWS, "ids": ids}
    attention = {name: known["alibi_attention"][name] for name in ("query", "key", "value")}
    normed, layer = known["norm_rotary"], known["input_embedding"]
    _, mean, rstd = torch.ops.posembed.input_embedding_forward.default(**layer)
    _, _, *rstds = torch.ops.posembed.norm_rotary_forward.default(**normed)
    layer_backward = {**layer, "output_gradient": rows, "mean": mean, "rstd": rstd}
    return {
        **same,
        "alibi_check_attention": attention,
        "alibi_slopes": {"num_heads": 4},
        "build_info": {},
        "check_errors": {},
        "document_positions": {"documents": ids.sort(-1).values},
        "embedding_backward_rows": {**gradients, "gradient": rows},
        "embedding_resize": {**known["embedding_resize"], "rows": x(2, 32)},
        "empty_cache": {},
        "ngram_mask": {"ids": ids, "lengths": torch.full((batch,), min(seq, 1))},
        "fourier_bands": {"first": 1.0, "last": 3.0, "count": 4},
        "file_rows": {"ids": ids, "file": stored_table().handle},
        "grid_positions": {"frames": 1, "height": 2, "width": seq},
        "input_embedding_backward": layer_backward,
        "input_embedding_backward_rows": layer_backward,
        "input_embedding_forward": layer,
        "learned_positions": {"mask": mask},
        "mapped": {"table": table, "device": torch.device("cpu")},
        "mrope_positions": {"ids": ids, "rule": "qwen2_vl"},
        "mrope_rules": {},
        "mrope_specification": {"rule": "qwen2_vl"},
        "ngram_multipliers": {"count": 3, "vocab_size": 50},
        "ngram_primes": {"count": 4, "start": 100},
        "norm_rotary_backward": {
            **normed,
            "query_gradient": normed["query"],
            "key_gradient": normed["key"],
            **dict(zip(("query_rstd", "key_rstd"), rstds, strict=True)),
        },
        "norm_rotary_forward": normed,
        "norm_rotary_packed_backward": {
            **known["norm_rotary_packed"],
            "query_gradient": normed["query"],
            "key_gradient": normed["key"],
            "value_gradient": normed["key"],
            **dict(zip(("query_rstd", "key_rstd"), rstds, strict=True)),
        },
        "packed_grid_positions": {"grids": torch.tensor([[1, 2, 3]])},
        "packed_positions": {"cu_seqlens": cu_seqlens},
        "prefer_huge_pages": {"table": table},
        "relative_rows": {
            "like": x(1),
            "query_length": seq,
            "key_length": seq,
            "num_buckets": [8],
            "attention_mask": mask,
        },
        "relative_log_distances": {"like": x(1), "window": (2, 3), "scale_window": (2, 3)},
        "rotary_attention_factor": {"spec": text},
        "rotary_axial": {"axes": [text, text]},
        "rotary_description": {"spec": text},
        "rotary_difference": {"spec": text, "other": LATENT.to_json()},
        "rotary_explanation": {"spec": text},
        "rotary_float32_error": {"spec": text, "length": 9},
        "rotary_for_keys": {"spec": text},
        "rotary_frequencies": {"spec": text},
        "rotary_preset": {"name": "flux"},
        "rotary_rerotate_": known["rerotate_"],
        "rotary_resolve": {"spec": text, "seq_len": 8},
        "rotary_sections": {"sizes": [2, 3, 3], "interleaved": False},
        "rotary_specification": {"spec": text},
        "rotary_wavelengths": {"spec": text},
        "score_scale": {
            "positions": torch.arange(seq),
            "factor": 1.0,
            "growth": 0.1,
            "length": 2.0,
            "offset": 0,
            "logn": False,
        },
        "set_cache_limit": {"bytes": limit_of_cache()},
        "sinusoidal_blocks": {"spec": waves},
        "sinusoidal_frequencies": {"spec": waves},
        "sinusoidal_grid_positions": {**known["sinusoidal_grid_positions"], "like": x(1)},
        "sinusoidal_permutation": {"spec": waves, "other": waves},
        "sinusoidal_shift_matrix": {"distance": 3.0, "spec": waves},
        "sinusoidal_specification": {"spec": waves},
        "token_bag_backward_rows": {**gradients, "gradient": x(batch, 32)},
        "zigzag_positions": {"cu_seqlens": cu_seqlens, "rank": 0, "world_size": 2},
    }


def positional(operator: Any, arguments: Arguments) -> tuple[Any, ...]:
    """The arguments in the order of the schema, up to the last that is given."""
    names = [argument.name for argument in operator._schema.arguments]
    assert arguments.keys() <= set(names), f"{operator}: has no {arguments.keys() - set(names)}"
    last = max((names.index(name) for name in arguments), default=-1)
    defaults = operator._schema.arguments[: last + 1]
    return tuple(arguments.get(a.name, a.default_value) for a in defaults)


def without_reference(*_: Any) -> Any:
    raise NotImplementedError("tests/python/test_operators.py, WITHOUT_CASE: what tests it")


def case_of(name: str) -> OperatorCase:
    """The call of this table as a case, without a reference."""
    operator = getattr(torch.ops.posembed, name).default

    def sample(batch: int, seq: int, *_: Any) -> Sample:
        given = positional(operator, operators(batch, seq)[name])
        return Sample(tuple(a.clone() if isinstance(a, Tensor) else a for a in given))

    mutates = any(argument.is_write for argument in operator._schema.arguments)
    return OperatorCase(name, operator, sample, without_reference, mutates, False, dtypes=(torch.float32,))


@functools.cache
def every() -> list[OperatorCase]:
    """The shared cases, and a call of each operator that has none."""
    shared = cases()
    others = sorted(operators().keys() - {case.operator._opname for case in shared})
    return [*shared, *map(case_of, others)]
