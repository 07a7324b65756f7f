"""torch's negative and conjugate bits: views whose memory holds other numbers than they stand for.

Every tensor argument of every operator gets such a view: results are those of a copy without the
bit, and an argument that is written is refused before anything is written.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from support.families import FAMILIES
from torch import Tensor

Arguments = dict[str, Any]
SPEC = pe.RotarySpec(4).to_json()


def x(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.5


def input_layer() -> Arguments:
    ids = torch.tensor([[1, 4, 0]])
    return {"token": x(5, 4), "ids": ids, "norm": "layer", "norm_weight": x(4)}


def input_backward() -> Arguments:
    _, mean, rstd = torch.ops.posembed.input_embedding_forward.default(**input_layer())
    return {"output_gradient": x(1, 3, 4), "mean": mean, "rstd": rstd, **input_layer()}


def norm() -> Arguments:
    two = {"query": x(1, 3, 2, 4), "key": x(1, 3, 1, 4)}
    return {**two, "query_weight": x(4), "key_weight": x(4), "spec": SPEC}


def norm_backward() -> Arguments:
    _, _, *rstds = torch.ops.posembed.norm_rotary_forward.default(**norm())
    gradients = {"query_gradient": x(1, 3, 2, 4), "key_gradient": x(1, 3, 1, 4)}
    return {**gradients, **dict(zip(("query_rstd", "key_rstd"), rstds, strict=True)), **norm()}


def rows_backward() -> Arguments:
    return {"gradient": x(1, 3, 4), "num_embeddings": 5, "ids": torch.tensor([[1, 4, 0]])}


def attention() -> Arguments:
    return {name: x(1, 2, 3, 4) for name in ("query", "key", "value")}


# A composition is refused by an operator in it, under whose name for the argument.
COMPOSED = {"mla_rotary_cache_": {"cache": "key_cache"}}

# Writes by torch's copy_, which knows the bits.
WRITES_THROUGH = {"rotary_rerotate_"}

# Operators without a shared case.
OTHERS: dict[str, Callable[[], Arguments]] = {
    "alibi_attention": lambda: {**attention(), "slopes": x(2)},
    "alibi_check_attention": attention,
    "alibi_positions": lambda: {"attention_mask": torch.tensor([[0, 1, 1]])},
    "alibi_scaled_slopes": lambda: {"slopes": x(2), "key_length": 8, "train_length": 4},
    "embedding_backward_rows": rows_backward,
    "embedding_quantized": lambda: {
        "codes": torch.ones(3, 4, dtype=torch.int8),
        "scales": x(3, 1),
        "ids": torch.tensor([0, 2]),
    },
    "quantize_rows": lambda: {"weight": x(3, 4), "format": "int8"},
    "file_rows": lambda: {"ids": torch.tensor([0, 2]), "file": -1},
    "mapped": lambda: {"table": x(3, 4), "device": torch.device("cpu")},
    "embedding_resize": lambda: {"weight": x(3, 4), "num_embeddings": 5, "rows": x(2, 4)},
    "input_embedding_backward": input_backward,
    "input_embedding_backward_rows": input_backward,
    "input_embedding_forward": input_layer,
    "learned_positions": lambda: {"mask": torch.tensor([[0, 1, 1]])},
    "ngram_ids": lambda: {
        "ids": torch.tensor([[3, 1, 2]]),
        "multipliers": (3, 5),
        "moduli": (7,),
    },
    "ngram_mask": lambda: {"ids": torch.tensor([[3, 1, 2]]), "lengths": torch.tensor([2])},
    "mrope_positions": lambda: {"ids": torch.tensor([[0, 1, 1]]), "rule": "qwen2_vl"},
    "packed_grid_positions": lambda: {"grids": torch.tensor([[1, 2, 3]])},
    "packed_positions": lambda: {"cu_seqlens": torch.tensor([0, 3])},
    "document_positions": lambda: {"documents": torch.tensor([[0, 1, 1]])},
    "zigzag_positions": lambda: {"cu_seqlens": torch.tensor([0, 4]), "rank": 0, "world_size": 2},
    "norm_rotary_backward": norm_backward,
    "norm_rotary_forward": norm,
    "prefer_huge_pages": lambda: {"table": x(3, 4)},
    "relative_buckets": lambda: {"distances": torch.arange(-3, 4), "num_buckets": 8},
    "relative_log_distances": lambda: {
        "like": x(1),
        "window": (2, 3),
        "scale_window": (2, 3),
    },
    "rotary_rerotate_": lambda: {
        "key": x(1, 3, 1, 4),
        "old_positions": torch.arange(3),
        "new_positions": torch.arange(3) + 2,
        "spec": SPEC,
    },
    "score_scale": lambda: {
        "positions": torch.arange(3),
        "factor": 1.0,
        "growth": 0.1,
        "length": 2.0,
        "offset": 0,
        "logn": False,
    },
    "sinusoidal_grid_positions": lambda: {
        "like": x(1),
        "spec": pe.SinusoidalSpec(8, preset="detr").to_json(),
        "grid": (1, 3),
    },
    "token_bag_backward_rows": lambda: {**rows_backward(), "gradient": x(1, 4)},
}


@functools.cache
def calls() -> dict[str, list[Arguments]]:
    """Calls of each operator that takes a tensor."""
    found: dict[str, list[Arguments]] = {name: [make()] for name, make in OTHERS.items()}
    for family in FAMILIES:
        for case in importlib.import_module(f"support.{family}").CASES:
            torch.manual_seed(0)
            sample = case.sample(2, 3, "cpu", case.dtypes[0])
            names = [argument.name for argument in case.operator._schema.arguments]
            arguments = {**dict(zip(names, sample.args, strict=False)), **sample.kwargs}
            found.setdefault(case.operator._opname, []).append(arguments)
    return found


def operators() -> list[str]:
    """Every operator that takes a tensor."""
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    own = sorted(name for space, name in names if space == "posembed")
    return [name for name in own if tensors_of(name)]


def tensors_of(name: str) -> dict[str, bool]:
    """The tensor arguments of an operator, and whether it writes them."""
    arguments = getattr(torch.ops.posembed, name).default._schema.arguments
    return {
        argument.name: argument.alias_info is not None and argument.alias_info.is_write
        for argument in arguments
        if "Tensor" in str(argument.type)
    }


def negative(value: Tensor) -> Tensor:
    """The same numbers, as a view with the negative bit."""
    view = torch._neg_view(-value)
    assert view.is_neg()
    assert torch.equal(view.resolve_neg(), value)
    return view


def conjugate(value: Tensor) -> Tensor:
    """Complex numbers as a view with the conjugate bit."""
    return torch.complex(value.float(), value.float()).conj()


def outcome(name: str, arguments: Arguments) -> list[Any]:
    """What a call returns or raises, then the contents of its tensors."""
    try:
        results = getattr(torch.ops.posembed, name).default(**arguments)
        found = results if isinstance(results, tuple) else (results,)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        found = (type(error), str(error).partition("\n")[0])
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    return [contents(value) for value in (*found, *tensors)]


def contents(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    plain = value.resolve_conj().resolve_neg().to_dense()
    return plain.dtype, plain.shape, plain.flatten().view(torch.uint8).numpy().tobytes()


def copied(arguments: Arguments) -> Arguments:
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in arguments.items()}


def check(name: str, argument: str, arguments: Arguments, with_bit: Tensor) -> None:
    """Compares a call whose argument has a bit with one of the same numbers."""
    torch.manual_seed(0)
    resolved = with_bit.resolve_conj().resolve_neg()
    plain = outcome(name, {**copied(arguments), argument: resolved.clone()})
    other = {**copied(arguments), argument: with_bit}
    before = {key: contents(value) for key, value in other.items()}
    torch.manual_seed(0)
    found = outcome(name, other)
    if tensors_of(name)[argument] and name not in WRITES_THROUGH:
        assert found[0] is ValueError
        named = COMPOSED.get(name, {}).get(argument, argument)
        assert found[1].startswith(f"{named}: expected memory that holds its numbers")
        assert {key: contents(value) for key, value in other.items()} == before
    else:
        assert found == plain


def test_there_is_a_call_of_every_operator() -> None:
    assert sorted(calls()) == operators()


@pytest.mark.parametrize("name", operators())
def test_every_argument_may_be_a_view_with_a_bit(name: str) -> None:
    given = 0
    for arguments in calls()[name]:
        for argument in tensors_of(name):
            value = arguments.get(argument)
            if value is None:
                value = torch.ones(3)  # where it is refused, the bit changes no message
            elif value.dtype == torch.bool:
                continue
            given += 1
            check(name, argument, arguments, negative(value))
            check(name, argument, arguments, conjugate(value))
    assert given > 0


def test_gradients_pass_through_views_with_the_negative_bit() -> None:
    gradients = []
    for view in (lambda value: value, lambda value: torch._neg_view(-value)):
        query, weight = x(1, 3, 2, 4).requires_grad_(), x(5, 4).requires_grad_()
        rotated = pe.functional.rotary(view(query), spec=pe.RotarySpec(4))
        rows = pe.functional.embedding(torch.tensor([1, 1, 4]), view(weight))
        (view(rotated).sin().sum() + view(rows).sin().sum()).backward()
        gradients.append((query.grad, weight.grad))
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_parts_of_complex_numbers_rotate() -> None:
    """The call whose query was once released too often."""
    query, parts = x(1, 3, 2, 4), torch.complex(x(1, 3, 1, 4), x(1, 3, 1, 4)).conj()
    rope = pe.RotaryEmbedding(4)
    with pytest.raises(ValueError, match="key: expected memory that holds its numbers"):
        rope.rotate_(query, parts.imag)
    assert torch.equal(query, x(1, 3, 2, 4))
    expected, key = rope(query, parts.imag.resolve_neg())
    rope.rotate_(query, parts.imag.resolve_neg())
    assert torch.equal(query, expected)
    assert torch.equal(rope(x(1, 3, 2, 4), parts.imag)[1], key)
