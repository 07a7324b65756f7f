"""posembed's tables in torchrec's collections, alone and sharded; by make test-torchrec."""

import copy
from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from support.processes import Processes
from support.refusals import refused
from torch import Tensor, nn

torchrec = pytest.importorskip("torchrec")

from posembed.integrations.torchrec import from_torchrec, gather_tables, scatter_tables, to_torchrec  # noqa: E402

FEATURES = {"item": ["seen", "bought"]}
OPTIMIZERS = ["SGD", "Adagrad", "RowWiseAdagrad"]


def batch() -> Any:
    """Two samples of the features seen, bought and shop; one bag is empty."""
    return torchrec.KeyedJaggedTensor.from_offsets_sync(
        keys=["seen", "bought", "shop"],
        values=torch.tensor([1, 2, 2, 9, 3, 4, 6]),
        offsets=torch.tensor([0, 3, 3, 4, 5, 6, 7]),
    )


def sample(number: int) -> Any:
    """One of the two samples."""
    parts = [batch()[name].to_dense()[number] for name in ("seen", "bought", "shop")]
    return torchrec.KeyedJaggedTensor(
        keys=["seen", "bought", "shop"], values=torch.cat(parts), lengths=torch.tensor([len(part) for part in parts])
    )


def tables(kind: type, **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return {"item": kind(10, 8, **options), "shop": kind(7, 8, **options)}


def pooled(bags: Any, features: Any) -> Tensor:
    columns = [
        bags[name](features[feature].values(), features[feature].offsets())
        for name, feature in (("item", "seen"), ("item", "bought"), ("shop", "shop"))
    ]
    return torch.cat(columns, 1)


def rows(tokens: Any, features: Any) -> Tensor:
    found = [
        tokens[name](features[feature].values())
        for name, feature in (("item", "seen"), ("item", "bought"), ("shop", "shop"))
    ]
    return torch.cat(found)


def collected(collection: nn.Module, features: Any) -> Tensor:
    result = collection(features)
    result = result.wait() if hasattr(result, "wait") else result
    if isinstance(result, torchrec.KeyedTensor):
        assert result.keys() == ["seen", "bought", "shop"]
        return result.values()
    return torch.cat([result[name].values() for name in ("seen", "bought", "shop")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags(mode: str, dtype: torch.dtype) -> None:
    bags = tables(pe.TokenBag, mode=mode, include_last_offset=True, dtype=dtype)
    collection = to_torchrec(bags, FEATURES)
    assert type(collection) is torchrec.EmbeddingBagCollection
    assert list(collection.state_dict()) == [f"embedding_bags.{name}.weight" for name in bags]
    assert collection.device == torch.device("cpu")
    found, expected = collected(collection, batch()), pooled(bags, batch())
    torch.testing.assert_close(found, expected.float(), rtol=2e-3, atol=2e-3)
    back = from_torchrec(collection)
    for name, bag in bags.items():
        assert type(back[name]) is pe.TokenBag
        assert back[name].weight is bag.weight
        assert (back[name].mode, back[name].include_last_offset) == (mode, True)
    assert torch.equal(pooled(back, batch()), expected)


def test_weighted_bags() -> None:
    bag = pe.TokenBag(10, 8, include_last_offset=True)
    collection = to_torchrec({"item": bag}, is_weighted=True)
    ids, offsets, weights = torch.tensor([1, 9, 3]), torch.tensor([0, 2, 3]), torch.rand(3)
    features = torchrec.KeyedJaggedTensor(["item"], ids, weights, offsets=offsets)
    found = collection(features)["item"]
    torch.testing.assert_close(found, bag(ids, offsets, weights), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gradient", ["dense", "rows"])
def test_tokens(gradient: str) -> None:
    tokens = tables(pe.TokenEmbedding, gradient=gradient)
    tokens["shop"].requires_grad_(False)
    collection = to_torchrec(tokens, FEATURES)
    assert type(collection) is torchrec.EmbeddingCollection
    assert list(collection.state_dict()) == [f"embeddings.{name}.weight" for name in tokens]
    assert torch.equal(collected(collection, batch()), rows(tokens, batch()))
    back = from_torchrec(collection)
    for name, token in tokens.items():
        assert type(back[name]) is pe.TokenEmbedding
        assert back[name].weight is token.weight
        assert back[name].gradient == gradient
    assert not back["shop"].weight.requires_grad
    collected(collection, batch()).sum().backward()
    assert tokens["item"].weight.grad.is_sparse == (gradient == "rows")


@pytest.mark.parametrize("kind", [pe.TokenEmbedding, pe.TokenBag])
def test_an_optimizer_continues(kind: type) -> None:
    """Steps before and after the conversion are those of the tables alone."""
    ours, theirs = tables(kind), tables(kind)
    look_up = rows if kind is pe.TokenEmbedding else pooled
    if kind is pe.TokenBag:
        for each in (*ours.values(), *theirs.values()):
            each.include_last_offset = True

    def adam(of: dict[str, nn.Module]) -> torch.optim.Optimizer:
        return torch.optim.Adam([table.weight for table in of.values()], 0.1)

    def step(optimizer: torch.optim.Optimizer, result: Tensor) -> None:
        optimizer.zero_grad()
        result.square().sum().backward()
        optimizer.step()

    alone, converted = adam(theirs), adam(ours)
    for _ in range(4):
        step(alone, look_up(theirs, batch()))
    step(converted, look_up(ours, batch()))
    collection = to_torchrec(ours, FEATURES)
    for _ in range(2):
        step(converted, collected(collection, batch()))
    step(converted, look_up(from_torchrec(collection), batch()))
    for name in ours:
        torch.testing.assert_close(ours[name].weight, theirs[name].weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: {}, ValueError, "tables: expected a table, got none"),
        (lambda: {"a": pe.TokenBag(3, 4), "b": pe.TokenEmbedding(3, 4)}, TypeError, "tables: expected all TokenEmbedding or all TokenBag, got TokenBag, TokenEmbedding"),
        (lambda: {"a": pe.TokenBag(3, 4, padding_idx=0)}, ValueError, r"tables\['a'\]: expected no padding_idx, as jagged features have no padding, got 0"),
        (lambda: {"a": pe.TokenBag(3, 4, mode="max")}, ValueError, r"tables\['a'\]: expected mode 'sum' or 'mean', got 'max'"),
        (lambda: {"a": pe.TokenEmbedding(3, 4, scale=2.0)}, ValueError, r"tables\['a'\]: expected scale 1.0, got 2.0"),
        (lambda: {"a": pe.TokenEmbedding(3, 4, max_norm=1.0)}, ValueError, r"tables\['a'\]: expected max_norm None, got 1.0"),
        (lambda: {"a": pe.TokenEmbedding(3, 4, scale_grad_by_freq=True)}, ValueError, r"tables\['a'\]: expected scale_grad_by_freq False, got True"),
        (lambda: {"a": pe.TokenEmbedding(3, 4, dtype=torch.bfloat16)}, TypeError, r"tables\['a'\]: expected float32 or float16, got torch.bfloat16"),
    ],
)  # fmt: skip
def test_tables_that_torchrec_lacks(make: Callable[[], Any], error: type, message: str) -> None:
    refused((lambda: to_torchrec(make()), error, message))


def test_other_arguments() -> None:
    refused(
        (lambda: to_torchrec({"item": pe.TokenBag(3, 4)}, {"shop": ["a"]}), ValueError, "features: expected names of tables, got shop"),
        (lambda: to_torchrec({"item": pe.TokenEmbedding(3, 4)}, is_weighted=True), ValueError, "is_weighted: expected False for TokenEmbedding"),
        (lambda: from_torchrec(nn.Linear(2, 2)), TypeError, "collection: expected an EmbeddingCollection .* Linear"),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------- sharded


def optimizer_of(name: str) -> type[torch.optim.Optimizer]:
    from torchrec.optim import RowWiseAdagrad

    return RowWiseAdagrad if name == "RowWiseAdagrad" else getattr(torch.optim, name)


def shard(collection: nn.Module, optimizer: str) -> nn.Module:
    """One table by rows, the other in the second process, with a fused optimizer."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    collection = copy.deepcopy(collection)  # the fused optimizer must not change shared parameters
    options = {"lr": 0.1, **({} if optimizer == "SGD" else {"eps": 1e-8})}
    apply_optimizer_in_backward(optimizer_of(optimizer), collection.parameters(), options)
    bags = isinstance(collection, torchrec.EmbeddingBagCollection)
    sharder = EmbeddingBagCollectionSharder() if bags else EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        collection,
        {"item": row_wise(), "shop": table_wise(rank=1)},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    return sharder.shard(collection, plan, env, torch.device("cpu"))


def there_and_back(kind: type, name: str) -> None:
    """Steps in two processes between steps in one are those of one process alone."""
    options = {"include_last_offset": True} if kind is pe.TokenBag else {}
    look_up = pooled if kind is pe.TokenBag else rows
    alone, ours = tables(kind, **options), tables(kind, **options)

    def optimizer(of: dict[str, nn.Module]) -> torch.optim.Optimizer:
        more = {} if name == "SGD" else {"eps": 1e-8}
        return optimizer_of(name)([table.weight for table in of.values()], lr=0.1, **more)

    def step(made: torch.optim.Optimizer, of: dict[str, nn.Module]) -> None:
        made.zero_grad()
        look_up(of, batch()).square().sum().backward()
        made.step()

    theirs, made = optimizer(alone), optimizer(ours)
    step(theirs, alone)
    step(made, ours)
    sharded = shard(to_torchrec(ours, FEATURES), name)
    scatter_tables(ours, sharded, made)
    for _ in range(2):
        step(theirs, alone)
        # A sample for each process; torchrec takes the mean of their gradients.
        result = collected(sharded, sample(torch.distributed.get_rank()))
        (2 * result.square().sum()).backward()
    before = ours["item"].weight.detach().clone()
    gather_tables(sharded, ours, made)
    assert not torch.equal(ours["item"].weight, before)
    step(theirs, alone)
    step(made, ours)
    for table in alone:
        torch.testing.assert_close(ours[table].weight, alone[table].weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", [pe.TokenEmbedding, pe.TokenBag])
def test_sharded(kind: type, name: str, two: Processes) -> None:
    two.run(there_and_back, kind, name)


def refusals() -> None:
    bags = tables(pe.TokenBag)
    sharded = shard(to_torchrec(bags, FEATURES), "Adagrad")
    weights = [bag.weight for bag in bags.values()]
    before = [weight.detach().clone() for weight in weights]
    wrong: list[tuple[dict[str, Any], Any, type, str]] = [
        ({"item": bags["item"]}, None, ValueError, "tables: expected those of the collection, item"),
        ({**bags, "shop": pe.TokenBag(8, 8)}, None, ValueError, r"tables\['shop'\]: expected \[7, 8\]"),
        (bags, torch.optim.Adam(weights), TypeError, "optimizer: expected SGD without .* got Adam"),
        (bags, torch.optim.SGD(weights, 0.1, 0.9), TypeError, "got SGD with momentum"),
        (bags, torch.optim.SGD(weights, 0.1), ValueError, "whose state of 'item' is .*momentum1"),
        (bags, torch.optim.Adagrad([torch.zeros(1)]), ValueError, "optimizer: expected the coll"),
    ]  # fmt: skip
    for of, optimizer, error, message in wrong:
        refused((lambda: gather_tables(sharded, of, optimizer), error, message))
        refused((lambda: scatter_tables(of, sharded, optimizer), error, message))
    refused((lambda: from_torchrec(sharded), TypeError, "of a sharded one, gather_tables"))
    for weight, old in zip(weights, before, strict=True):
        assert torch.equal(weight, old)


def test_refusals_of_sharded_collections(two: Processes) -> None:
    two.run(refusals)
