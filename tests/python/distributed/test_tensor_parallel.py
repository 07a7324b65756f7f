"""Tests tensor parallelism: torch's styles on token tables, and the style of InputEmbedding."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.integrations.distributed import VocabularyParallel
from support.processes import Processes
from support.refusals import refused
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

ROWS, COLUMNS = 11, 8  # two processes have 6 and 5 rows, four have 3, 3, 3 and 2
IDS = torch.tensor([[0, 7, 3, 10], [7, 7, 5, 2]])


def mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def check_table(style: str, padding: int | None, scale: float = 2.0) -> None:
    """Results, gradients, and a few steps of training."""
    plain = pe.TokenEmbedding(ROWS, COLUMNS, padding_idx=padding, scale=scale)
    table = copy.deepcopy(plain)
    styles = {"rows": RowwiseParallel(input_layouts=Replicate()), "columns": ColwiseParallel()}
    parallelize_module(table, mesh(), styles[style])
    assert table.weight.placements == (Shard(0 if style == "rows" else 1),)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, table)]
    for _ in range(2):
        expected, found = plain(IDS), table(IDS)
        if style == "columns":
            found = DTensor.from_local(found, mesh(), [Shard(2)]).full_tensor()
        assert torch.equal(found, expected)
        for result, optimizer in zip((expected, found), optimizers, strict=True):
            optimizer.zero_grad()
            result.square().sum().backward()
        gradient = table.weight.grad.full_tensor()
        torch.testing.assert_close(gradient, plain.weight.grad)
        if padding is not None:
            assert not gradient[padding].any()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(table.weight.full_tensor(), plain.weight)


def check_refused() -> None:
    table = pe.TokenEmbedding(ROWS, COLUMNS, gradient="rows")
    parallelize_module(table, mesh(), RowwiseParallel(input_layouts=Replicate()))
    with torch.no_grad():
        assert table(IDS).shape == (2, 4, COLUMNS)
    refused((lambda: table(IDS), ValueError, "gradient: expected 'dense', as a DTensor has no sparse"))  # fmt: skip
    short = pe.TokenEmbedding(ROWS, COLUMNS, max_norm=1.0)
    parallelize_module(short, mesh(), RowwiseParallel(input_layouts=Replicate()))
    refused(
        (lambda: short(IDS), ValueError, "max_norm: expected none for a DTensor, got 1"),
        (lambda: parallelize_module(short, mesh(), VocabularyParallel()), TypeError, "expected an InputEmbedding, got TokenEmbedding"),
    )  # fmt: skip


def check_tied_logits() -> None:
    plain = pe.TokenEmbedding(ROWS, COLUMNS, dtype=torch.float64)
    table = copy.deepcopy(plain)
    parallelize_module(table, mesh(), RowwiseParallel(input_layouts=Replicate()))
    expected = nn.functional.cross_entropy(plain.logits(plain(IDS)).flatten(0, 1), IDS.flatten())
    hidden = DTensor.from_local(table(IDS), mesh(), [Replicate()], run_check=False)
    logits = table.logits(hidden)
    assert logits.placements == (Shard(2),)
    with loss_parallel():
        found = nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())
        found.backward()
    expected.backward()
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(table.weight.grad.full_tensor(), plain.weight.grad)


def check_meta() -> None:
    """nn.Embedding zeroes a copy of the row, and not the row."""
    with torch.device("meta"):
        table = pe.TokenEmbedding(ROWS, COLUMNS, padding_idx=7)
        bag = pe.TokenBag(ROWS, COLUMNS, padding_idx=7)
    for module, places in itertools.product((table, bag), ([Shard(0)], [Shard(1)], [Replicate()])):
        weight = distribute_tensor(torch.empty(ROWS, COLUMNS, device="meta"), mesh(), places)
        module.weight = nn.Parameter(weight)
        module.to_empty(device="cpu")
        module.reset_parameters()
        rows = module.weight.full_tensor()
        assert (rows == 0).all(dim=1).nonzero().flatten().tolist() == [7]


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "bert": {"max_positions": 16, "num_types": 2, "norm": "layer", "dropout": 0.5},
    "roberta": {"max_positions": 16, "position_rule": "roberta", "padding_idx": 3, "norm": "rms"},
    "sinusoids": {"positions": "sinusoidal", "scale": "sqrt_dim", "dropout": 0.5},
    "tokens alone": {"positions": None, "dropout": 0.25},
    "narrow rows": {"max_positions": 16, "token_dim": 4, "padding_idx": 7},
    "wide result": {"max_positions": 16, "output_dim": 12, "norm": "layer"},
    "opt": {"max_positions": 16, "position_rule": "opt"},
    "documents": {"max_positions": 16},
}


def embedded(embed: nn.Module, name: str, **more: Any) -> Tensor:
    arguments: dict[str, Any] = {"seed": torch.tensor([9]), "first_token": 5}
    if name == "bert":
        arguments |= {"types": IDS % 2, "offset": torch.tensor([3, 0])}
    if name == "opt":
        arguments["attention_mask"] = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    if name == "sinusoids":
        arguments["offset"] = 2
    ids = IDS
    if name == "documents":
        ids, arguments["cu_seqlens"] = IDS[:1], torch.tensor([0, 1, IDS.shape[1]])
    return embed(ids, **arguments | more)


def check_embedding(name: str, sequence: bool) -> None:
    """The same results, dropout among them, and gradients of all parameters."""
    plain = pe.InputEmbedding(ROWS, COLUMNS, **EMBEDDINGS[name], dtype=torch.float64)
    embed = copy.deepcopy(plain)
    parallelize_module(embed, mesh(), VocabularyParallel(sequence_parallel=sequence))
    embed = copy.deepcopy(embed)  # a copy computes with its own parameters
    expected, found = embedded(plain, name), embedded(embed, name)
    if sequence:
        assert found.shape[1] < IDS.shape[1]
        found = DTensor.from_local(found, mesh(), [Shard(1)]).full_tensor()
    torch.testing.assert_close(found, expected)
    for result in (expected, found):
        result.square().sum().backward()
    for (path, ours), theirs in zip(embed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=path)
    assert embed.state_dict().keys() == plain.state_dict().keys()


def check_style_of_the_table_alone() -> None:
    """A style of torch on the token table; the module then calls its parts."""
    plain = pe.InputEmbedding(ROWS, COLUMNS, max_positions=16, norm="layer", dropout=0.5)
    embed = copy.deepcopy(plain)
    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(embed, mesh(), {"token": rows})
    seed = torch.tensor([4])
    expected, found = plain(IDS, seed=seed), embed(IDS, seed=seed)
    torch.testing.assert_close(found, expected)
    for result in (expected, found):
        result.square().sum().backward()
    for ours, theirs in zip(embed.parameters(), plain.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(gradient, theirs.grad)


def check_calls() -> None:
    """Vectors instead of ids, a mask that the first process draws, DTensors as results."""
    plain = pe.InputEmbedding(ROWS, COLUMNS, max_positions=16, dropout=0.5)
    embed = copy.deepcopy(plain)
    style = VocabularyParallel(sequence_parallel=True, use_local_output=False)
    parallelize_module(embed, mesh(), style)
    vectors = torch.randn(2, 5, COLUMNS)  # the processes have three tokens and two
    seed = torch.tensor([4])
    found = embed(inputs_embeds=vectors, seed=seed)
    assert found.placements == (Shard(1),)
    assert torch.equal(found.full_tensor(), plain(inputs_embeds=vectors, seed=seed))
    torch.manual_seed(torch.distributed.get_rank())
    again = embed(IDS)
    torch.manual_seed(0)
    assert torch.equal(again.full_tensor(), plain(IDS))
    counted = pe.InputEmbedding(ROWS, COLUMNS, max_positions=16, padding_idx=3, position_rule="roberta")
    parallelize_module(counted, mesh(), VocabularyParallel())
    refused(
        (lambda: counted(IDS, offset=torch.tensor([1, 2])), ValueError, "offset: expected a number where padding is counted"),
        (embed, ValueError, "expected either ids or inputs_embeds, got neither"),
    )  # fmt: skip


TWO: dict[str, Callable[[], None]] = {
    **{f"{s}, padding {p}": partial(check_table, s, p) for s in ("rows", "columns") for p in (3, 7, None)},
    "refused": check_refused,
    "tied logits": check_tied_logits,
    "padding after meta": check_meta,
    **{f"{n}, sequence {s}": partial(check_embedding, n, s) for n in EMBEDDINGS for s in (False, True)},
    "style of the table alone": check_style_of_the_table_alone,
    "calls of input embeddings": check_calls,
}


@pytest.mark.parametrize("name", TWO)
def test_in_two_processes(name: str, two: Processes) -> None:
    two.run(TWO[name])


def test_four_processes_with_unlike_parts(four: Processes) -> None:
    four.run(check_table, "rows", 10, 1.0)
