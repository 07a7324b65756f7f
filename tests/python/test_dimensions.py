"""Tests that vmap and DTensors forget no operator, and that vmap merges any arguments."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import posembed
import pytest
import torch
from posembed.glue.dimensions import ARGUMENTS, LAYOUTS, TABLE, letters_of
from posembed.glue.vmap import COPY_BY_COPY, WITHOUT_RULE
from support.case import OperatorCase, as_tuple, assert_close
from support.families import cases
from support.refusals import refused

FUNCTIONAL = Path(posembed.__file__).parent / "functional"

# Reasons, and the operators whose dimensions are not in the table; vmap calls those that are not in WITHOUT_RULE once per
# copy.
NOT_IN_TABLE = {
    "writes to its arguments, copy by copy": (
        "alibi_bias_out rotary_out rotary_pair_out rotary_tables_out rotary_tables_pair_out"
    ),
    "writes to a cache that copies or processes would share": "rotary_cache_ mla_rotary_cache_",
    "writes to a table and its state, which copies would share": "step_rows_",
    "a composition; keys of a DTensor are refused": "rotary_rerotate_",
    "a composition": (
        "alibi_check_attention alibi_positions learned_positions ngram_mask relative_buckets mrope_positions "
        "packed_grid_positions packed_positions document_positions zigzag_positions relative_log_distances "
        "relative_rows score_scale sinusoidal_grid_positions"
    ),
    "a composition, for whole tables alone": "learned_extend quantize_rows",
    "sums over tokens and heads": (
        "relative_logits_backward norm_rotary_backward norm_rotary_packed_backward rotary_frequencies_backward"
    ),
    "a composition, for whole weights alone": "rotary_permute_weight",
    "a place's row depends on the places before": "embedding_with_features",
    "its dropout depends on where a token is": "input_embedding input_embedding_forward input_embedding_backward",
    "it depends on where a token is": "input_dropout",
    "its divisors have a layout of their own": "norm_rotary_forward",
    "as token_bag, copy by copy": "token_bag_max token_bag_backward token_bag_weights_backward",
}
# Reasons, and the functions that pass a DTensor on to the operator.
NOT_SPLIT = {
    "counts along the sequence": (
        "alibi_positions learned_positions ngram_mask packed_grid_positions packed_positions "
        "document_positions zigzag_positions"
    ),
    "from integers to integers": "relative_buckets relative_rows",
    "counts along the batch and the sequence": "mrope_positions",
    "from integers to numbers": "relative_log_distances sinusoidal_grid_positions",
    "checks only": "alibi_check_attention",
    "torch names the operator that takes no DTensor": (
        "rotary_out rotary_pair_out rotary_tables_out rotary_tables_pair_out alibi_bias_out"
    ),
    "its module takes one table at a time where they are split": "input_embedding",
    "refused by name": (
        "rotary_cache_ mla_rotary_cache_ step_rows_ rotary_rerotate_ embedding_with_features embedding_quantized"
    ),
    "replicated tables only, with_rows": "learned_extend embedding_resize",
    "for whole tables alone": "quantize_rows",
    "merges a process's own rows": "embedding_backward_rows",
    "reads a file for this process": "file_rows",
    "for local tables alone": "mapped",
}


def names(reasons: dict[str, str]) -> set[str]:
    return {name for names in reasons.values() for name in names.split()}


def test_every_operator_names_its_dimensions_or_has_a_reason() -> None:
    on_tensors = {
        schema.name.removeprefix("posembed::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("posembed::") and any("Tensor" in str(argument.type) for argument in schema.arguments)
    }
    in_place = {name + "_" for name in TABLE} & on_tensors
    assert on_tensors - in_place - set(TABLE) == names(NOT_IN_TABLE) | set(WITHOUT_RULE)
    assert set(COPY_BY_COPY) <= set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_every_tensor_of_an_operator_has_letters(name: str) -> None:
    schema = getattr(torch.ops.posembed, name).default._schema
    tensors = {each.name for each in schema.arguments if "Tensor" in str(each.type)}
    assert set(TABLE[name].letters()) == tensors
    assert len(TABLE[name].results) == len(schema.returns)
    layouts = LAYOUTS if "layout" in ARGUMENTS[name] else [None]
    assert all(TABLE[name].arranged(layout).letters() for layout in layouts)


def test_every_function_has_a_call_for_dtensors() -> None:
    called, split = set(), set()
    for path in FUNCTIONAL.glob("*.py"):
        source = path.read_text()
        called |= set(re.findall(r"\.(\w+)\.default\b", source))
        gates = dict(re.findall(r"(\w+) = (?:cast\(\w+, )?gated\(torch\.ops\.posembed\.(\w+)\.default", source))
        passed = re.findall(r"\b(?:call|on_scores)\(\s*(\w+)", source)
        split |= {gates[name] for name in passed if name in gates}
        split |= set(re.findall(r"\.(\w+)\.default, sharded=True", source))
    takes_tensors = {
        name for name in called if name in names(NOT_IN_TABLE) | set(WITHOUT_RULE) or name.rstrip("_") in TABLE
    }
    assert takes_tensors - split == names(NOT_SPLIT)


@pytest.mark.parametrize(
    ("given", "rank", "letters"),
    [
        ("bsh.", 4, "bsh."),
        ("b?s.", 2, "s."),
        (".?b?s", 3, ".bs"),
        (".?b?s", 1, "s"),
        ("bsh?./h", 3, "bs."),
        (".?h?.", 1, "."),
        (".?h?.", 2, "h."),
        (".?h?.", 3, ".h."),
        ("b?sh~.", 2, "s."),
        ("b?sh~.", 3, "bs."),
        ("b?sh~.", 4, "bsh."),
        ("*D", 3, "abD"),
        ("*D", 1, "D"),
    ],
)
def test_letters(given: str, rank: int, letters: str) -> None:
    assert letters_of(given, rank) == letters


def copies_of(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Three tensors like this one, with other values where any values are valid."""
    if tensor.is_floating_point():
        return [torch.randn_like(tensor) for _ in range(3)]
    free = name == "ids" or name.endswith("positions") or name == "attention_mask"
    return [tensor, tensor.flip(-1) if free else tensor, tensor]


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.operator._opname in TABLE], ids=lambda case: case.name
)
def test_vmap_over_any_arguments(case: OperatorCase, device: torch.device) -> None:
    """One call for all copies equals a call for each, gradients too, whichever are mapped."""
    torch.manual_seed(7)
    sample = case.sample(2, 3, device, torch.float64)
    names = [argument.name for argument in case.operator._schema.arguments]
    tensors = [i for i, each in enumerate(sample.args) if isinstance(each, torch.Tensor)]
    mapped = (s for n in range(1, 4) for s in itertools.combinations(tensors, n))
    for dim, chosen in enumerate(mapped):
        args, in_dims = list(sample.args), [None] * len(sample.args)
        for i in chosen:
            in_dims[i] = min(dim % 2, args[i].dim())
            args[i] = torch.stack(copies_of(names[i], args[i]), in_dims[i])
            args[i].requires_grad_(case.differentiable and args[i].is_floating_point())

        def call(*args: Any) -> Any:
            return as_tuple(case.operator(*args, **sample.kwargs))

        found = torch.func.vmap(call, tuple(in_dims))(*args)
        alone = [
            call(*(x if d is None else x.select(d, copy) for x, d in zip(args, in_dims, strict=True)))
            for copy in range(3)
        ]
        wanted = [torch.stack(copies) for copies in zip(*alone, strict=True)]
        for ours, theirs in zip(found, wanted, strict=True):
            assert_close(ours, theirs, 1e-13)
        leaves = [args[i] for i in chosen if args[i].requires_grad]
        options = {"allow_unused": True, "materialize_grads": True}
        gradients = [torch.autograd.grad(weighted(x), leaves, **options) for x in (found, wanted) if leaves]
        for ours, theirs in zip(*gradients, strict=True):
            assert_close(ours, theirs, 1e-12)


def weighted(results: Iterable[torch.Tensor]) -> torch.Tensor:
    """A number that depends on every finite element with a weight of its own."""
    parts = [x.masked_fill(x.isinf(), 0) for x in results if x.requires_grad]
    return sum((x * torch.linspace(1, 2, x.numel(), device=x.device).view_as(x)).sum() for x in parts)


def test_vmap_refuses_to_write_to_what_copies_share(device: torch.device) -> None:
    query, spec = torch.randn(1, 3, 2, 8, device=device), posembed.RotarySpec(8).text
    positions = torch.arange(6, device=device).view(2, 3)
    rotate = torch.ops.posembed.rotary_.default
    refused((lambda: torch.func.vmap(rotate, (None, None, 0))(query, spec, positions), ValueError, "query: expected a mapped tensor, because each copy"))  # fmt: skip
