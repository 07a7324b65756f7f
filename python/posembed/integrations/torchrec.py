"""Converts posembed's tables to torchrec's table collections, and back.

Ivchenko et al., "TorchRec: a PyTorch Domain Library for Recommendation Systems", RecSys 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posembed.modules.bag import TokenBag
from posembed.modules.token import TokenEmbedding

try:
    import torchrec  # type: ignore[import-not-found]
    from torchrec.distributed.types import ShardedTensor  # type: ignore[import-not-found]
    from torchrec.modules.embedding_configs import (  # type: ignore[import-not-found]
        DataType,
        PoolingType,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"posembed.integrations.torchrec makes torchrec's collections; {error.name} is missing: "
        "python -m pip install torchrec fbgemm-gpu (fbgemm-gpu-cpu on machines without a GPU)",
        name=error.name,
    ) from error

__all__ = ["from_torchrec", "gather_tables", "scatter_tables", "to_torchrec"]

Table = TokenEmbedding | TokenBag
Tables = Mapping[str, TokenEmbedding] | Mapping[str, TokenBag]

_TYPES = {torch.float32: DataType.FP32, torch.float16: DataType.FP16}
_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
# State of the optimizers that torchrec can fuse into the backward pass, by fused state name.
_STATES: dict[str, dict[str, str]] = {
    "SGD": {},
    "Adagrad": {"momentum1": "sum"},
    "RowWiseAdagrad": {"momentum1": "sum"},
}


def to_torchrec(
    tables: Tables,
    features: Mapping[str, Sequence[str]] | None = None,
    *,
    is_weighted: bool = False,
) -> nn.Module:
    """A collection that shares the tables' parameters, so optimizers and their state stay valid.

    Args:
        tables: Tables by name, all TokenEmbedding or all TokenBag, float32 or float16. In the
            collection their parameters are ``embeddings.NAME.weight`` or
            ``embedding_bags.NAME.weight``.
        features: The names of the features that look up each table; default: the table's name.
        is_weighted: Bags use the weights of the KeyedJaggedTensor.

    Returns:
        torchrec's EmbeddingCollection or EmbeddingBagCollection. torchrec's sharders do not copy
        the values of all tables: call :func:`scatter_tables` on their result. Pass
        ``apply_optimizer_in_backward`` the parameters of a copy of the collection: it would also
        change how the tables that share the parameters are trained.

    Raises:
        ValueError: There are no tables, a table has an option that torchrec lacks (``padding_idx``,
            ``scale``, ``max_norm``, ``scale_grad_by_freq``, ``mode="max"``), or ``features`` names
            an unknown table.
        TypeError: Tables of both kinds, of another type, or of another dtype.

    Examples:
        >>> import posembed as pe
        >>> from posembed.integrations.torchrec import from_torchrec, to_torchrec
        >>> bags = {"item": pe.TokenBag(1000, 64), "shop": pe.TokenBag(50, 64, mode="mean")}
        >>> collection = to_torchrec(bags, {"item": ["seen", "bought"]})
        >>> list(collection.state_dict())
        ['embedding_bags.item.weight', 'embedding_bags.shop.weight']
        >>> from_torchrec(collection)["item"].weight is bags["item"].weight
        True
    """
    if not tables:
        raise ValueError("tables: expected a table, got none")
    kinds = {type(table) for table in tables.values()}
    if kinds not in ({TokenEmbedding}, {TokenBag}):
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"tables: expected all TokenEmbedding or all TokenBag, got {found}")
    features = {} if features is None else features
    if unknown := sorted(set(features) - set(tables)):
        raise ValueError(f"features: expected names of tables, got {', '.join(unknown)}")
    for name, table in tables.items():
        _check_table(name, table)
    configs = [_config(name, table, features.get(name, [name])) for name, table in tables.items()]
    collection: Any
    # The parameters that torchrec creates are replaced, so they need no memory.
    if kinds == {TokenBag}:
        collection = torchrec.EmbeddingBagCollection(configs, is_weighted, torch.device("meta"))
    elif is_weighted:
        raise ValueError("is_weighted: expected False for TokenEmbedding, got True")
    else:
        collection = torchrec.EmbeddingCollection(configs, torch.device("meta"))
    for name, module in _modules(collection).items():
        module.weight = tables[name].weight
        module.sparse = tables[name].sparse
    first: Any = next(iter(tables.values()))
    collection._device = first.weight.device
    return cast(nn.Module, collection)


def from_torchrec(collection: nn.Module) -> nn.ModuleDict:
    """Tables by name that share the parameters of a collection.

    Call a TokenEmbedding with the ids of a JaggedTensor, and a TokenBag with its offsets too:
    ``bag(jagged.values(), jagged.offsets())``.

    Args:
        collection: An EmbeddingCollection or EmbeddingBagCollection. For a sharded one, create
            tables and call :func:`gather_tables`.

    Raises:
        TypeError: The module is of another type.

    Examples:
        >>> import torchrec
        >>> from posembed.integrations.torchrec import from_torchrec
        >>> config = torchrec.EmbeddingConfig(1000, 64, "item")
        >>> from_torchrec(torchrec.EmbeddingCollection(tables=[config]))
        ModuleDict(
          (item): TokenEmbedding(1000, 64)
        )
    """
    if isinstance(collection, torchrec.EmbeddingBagCollection):
        return nn.ModuleDict({name: _bag(table) for name, table in _modules(collection).items()})
    if isinstance(collection, torchrec.EmbeddingCollection):
        return nn.ModuleDict({name: _token(table) for name, table in _modules(collection).items()})
    raise TypeError(
        "collection: expected an EmbeddingCollection or EmbeddingBagCollection, got "
        f"{type(collection).__name__}; of a sharded one, gather_tables copies the tables"
    )


def scatter_tables(
    tables: Tables, sharded: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Copies tables, and their optimizer's state, into a sharded collection.

    Args:
        tables: The tables by name, the same in each process.
        sharded: The collection as a torchrec sharder returned it.
        optimizer: Holds the tables: SGD without momentum, Adagrad, or torchrec's RowWiseAdagrad.
            The collection has the same optimizer, fused into its backward pass.

    Raises:
        ValueError: The collection has other tables or another optimizer, or shapes differ.
        TypeError: The optimizer's state has no counterpart, or a shard is a DTensor.
    """
    with torch.no_grad():
        for part, whole in _pairs(tables, sharded, optimizer):
            for shard, place in _shards(part):
                shard.copy_(whole[place])


def gather_tables(
    sharded: nn.Module,
    tables: Tables,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Copies a sharded collection, and its fused optimizer's state, into tables in each process.

    Args:
        sharded: As in :func:`scatter_tables`. All of its processes must call this function.
        tables: The tables by name, on a device that the group's backend supports.
        optimizer: As in :func:`scatter_tables`.
        group: The processes that share the collection; default: all.

    Raises:
        ValueError, TypeError: See :func:`scatter_tables`.
    """
    with torch.no_grad():
        for part, whole in _pairs(tables, sharded, optimizer):
            if isinstance(part, Tensor) and not isinstance(part, ShardedTensor):
                whole.copy_(part)
                continue
            sent = torch.zeros_like(whole)
            for shard, place in _shards(part):
                sent[place] = shard
            dist.all_reduce(sent, group=group)  # each element is zero in all but one process
            whole.copy_(sent)


def _check_table(name: str, table: Table) -> None:
    """Raises for options that a torchrec table cannot have."""
    if table.padding_idx is not None:
        raise ValueError(
            f"tables[{name!r}]: expected no padding_idx, as jagged features have no padding, got "
            f"{table.padding_idx}"
        )
    if isinstance(table, TokenBag):
        options: dict[str, Any] = {"mode": (table.mode, _POOLING)}
    else:
        options = {
            "scale": (table.scale, (1.0,)),
            "max_norm": (table.max_norm, (None,)),
            "scale_grad_by_freq": (table.scale_grad_by_freq, (False,)),
        }
    for option, (value, known) in options.items():
        if value not in known:
            expected = " or ".join(repr(each) for each in known)
            raise ValueError(f"tables[{name!r}]: expected {option} {expected}, got {value!r}")
    if table.weight.dtype not in _TYPES:
        raise TypeError(f"tables[{name!r}]: expected float32 or float16, got {table.weight.dtype}")


def _config(name: str, table: Table, features: Sequence[str]) -> Any:
    """The description of a table for torchrec."""
    options: dict[str, Any] = {
        "name": name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "data_type": _TYPES[table.weight.dtype],
        "feature_names": list(features),
    }
    if isinstance(table, TokenBag):
        return torchrec.EmbeddingBagConfig(pooling=_POOLING[table.mode], **options)
    return torchrec.EmbeddingConfig(**options)


def _modules(collection: nn.Module) -> dict[str, Any]:
    """The tables in a collection, by name."""
    bags = isinstance(collection, torchrec.EmbeddingBagCollection)
    tables = collection.embedding_bags if bags else collection.embeddings
    return dict(tables.items())  # type: ignore[operator, union-attr]


def _bag(table: nn.EmbeddingBag) -> TokenBag:
    bag = TokenBag.from_pretrained(
        table.weight,
        mode=table.mode,  # type: ignore[arg-type]
        include_last_offset=True,  # as JaggedTensors have them
        gradient="rows" if table.sparse else "dense",
    )
    bag.weight = table.weight  # the same parameter object, because an optimizer may hold it
    return bag


def _token(table: nn.Embedding) -> TokenEmbedding:
    token = TokenEmbedding.from_pretrained(table.weight, sparse=table.sparse)
    token.weight = table.weight
    return token


def _pairs(
    tables: Tables, sharded: Any, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[Any, Tensor]]:
    """Pairs of a sharded collection's tensors and the full tensors of a table or optimizer.

    None stands for a fused state of which this process has no shard.
    """
    parts = {key.split(".")[-2]: (key, part) for key, part in sharded.state_dict().items()}
    if set(parts) != set(tables):
        have, got = ", ".join(sorted(parts)), ", ".join(sorted(tables))
        raise ValueError(f"tables: expected those of the collection, {have}, got {got}")
    pairs = [(f"tables[{name!r}]", parts[name][1], tables[name].weight) for name in tables]
    if optimizer is not None:
        names = _state_names(optimizer)
        fused = sharded.fused_optimizer.state_dict()["state"]
        for name, table in tables.items():
            key, part = parts[name]
            found = fused.get(key, {}) if any(True for _ in _shards(part)) else None
            pairs += _state_pairs(name, found, optimizer.state.get(table.weight, {}), names)
    for name, part, whole in pairs:  # check all before anything is written
        if part is not None:
            _check_part(name, part, whole)
    for _, part, whole in pairs:
        yield part, whole if part is None else whole.view(part.size())


def _check_part(name: str, part: Any, whole: Tensor) -> None:
    if not isinstance(part, ShardedTensor) and type(part) not in (Tensor, nn.Parameter):
        kind = type(part).__name__
        raise TypeError(f"{name}: expected a ShardedTensor or a Tensor, got a {kind}")
    shape = tuple(part.size())
    if tuple(whole.shape) not in (shape, (*shape, 1)):  # one number per row is [rows] or [rows, 1]
        expected, found = list(shape), list(whole.shape)
        raise ValueError(f"{name}: expected {expected}, as the collection has it, got {found}")


def _state_names(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The names of fused states and of the optimizer's."""
    kind = type(optimizer).__name__
    momentum = any(group.get("momentum", 0) for group in optimizer.param_groups)
    if kind not in _STATES or momentum:
        got = f"{kind} with momentum" if momentum else kind
        raise TypeError(
            f"optimizer: expected SGD without momentum, Adagrad or RowWiseAdagrad, got {got}"
        )
    return _STATES[kind]


def _state_pairs(
    table: str,
    fused: Mapping[str, Any] | None,
    state: Mapping[str, Tensor],
    names: Mapping[str, str],
) -> list[tuple[str, Any, Tensor]]:
    """Pairs of a table's fused state and the optimizer's state."""
    expected = {f"{table}.{name}": own for name, own in names.items()}
    found = set(expected) if fused is None else set(fused)
    if found != set(expected) or not set(names.values()) <= set(state):
        raise ValueError(
            f"optimizer: expected the collection's, whose state of {table!r} is {sorted(found)}, "
            f"got one whose state is {sorted(state)}"
        )
    parts = {} if fused is None else fused
    return [(f"state {name!r}", parts.get(name), state[own]) for name, own in expected.items()]


def _shards(part: Any) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """This process's shards and their slices of the whole tensor."""
    if isinstance(part, Tensor) and not isinstance(part, ShardedTensor):
        yield part, (slice(None),) * part.dim()
    elif part is not None:
        for shard in part.local_shards():
            starts, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            place = (slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
            yield shard.tensor, tuple(place)
