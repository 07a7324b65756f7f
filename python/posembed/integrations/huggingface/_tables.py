"""Tables of models on posembed's kernels: scaled rows in one pass, and rows of hashed n-grams.

A table keeps its module, whose class becomes a subclass; it can be moved to the host's memory.
Scaled tables are recognised by their results, those of n-grams by the shapes of their numbers and
by their results.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from posembed.functional._ngram import hashed
from posembed.functional._token import looked_up, padding_row
from posembed.integrations.huggingface import _shadow
from posembed.integrations.huggingface._report import Counter
from posembed.ngram import NgramSpec
from posembed.tables import Hosted

Where = Literal["stay", "host"]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
SPEC, SCALE, HOME = "posembed_ngrams", "posembed_scale", "posembed_home"
ADDED = (SPEC, SCALE)  # to modules
PROBED = 256  # rows


class Ngrams(NamedTuple):
    """How a module hashes n-grams.

    Args:
        table: The name of its ``nn.Embedding``.
        spec: The numbers.
        read: How it asks the cache for the tokens before, the state of a convolution.
        written: What it gives the cache beside the tokens.
    """

    table: str
    spec: NgramSpec
    read: Arguments
    written: Arguments


class OnKernels(nn.Module):
    """Base class of tables; a copy or pickle names the model's own class."""

    posembed_counter: Counter

    def _count(self) -> None:
        if not torch.compiler.is_compiling():
            self.posembed_counter.kernel += 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The model's class, from which the subclass is made again."""
        return _remade, (_shadow.original_of(type(self)),), self.__getstate__()  # type: ignore[no-untyped-call]


class ScaledTable(Hosted, OnKernels):
    """An ``nn.Embedding`` whose rows are multiplied by a number."""

    weight: Tensor
    padding_idx: int | None

    def host_names(self) -> tuple[str, ...]:
        """The table alone."""
        return ("weight",)

    def forward(self, input_ids: Tensor) -> Tensor:
        """The rows of ids, times the scale."""
        self._count()
        return scaled(self, input_ids, vars(self)[SCALE])


class NgramTable(OnKernels):
    """A module that hashes n-grams and joins their rows."""

    def forward(self, input_ids: Tensor, past_key_values: Any) -> Tensor:
        """The joined rows, and the last tokens into the cache."""
        self._count()
        ids, ngrams = input_ids.long(), vars(self)[SPEC]
        spec, size = ngrams.spec, ngrams.spec.ngram_size - 1
        history = None
        if past_key_values is not None:
            history = past_key_values.get_conv_state(*ngrams.read[0], **ngrams.read[1])
            kept, short = ids, size - ids.shape[1]
            if history is not None:
                history = history[:, -size:].clone()  # the cache writes in place
            elif short > 0:
                kept = nn.functional.pad(ids, (short, 0), value=spec.padding_token)
            past_key_values.update_conv_state(kept, *ngrams.written[0], **ngrams.written[1])
        rows = hashed(ids, *spec.arguments, history)
        return getattr(self, ngrams.table)(rows).flatten(-2)  # type: ignore[no-any-return]


def scaled(module: Any, ids: Tensor, scale: float) -> Tensor:
    """The rows of an ``nn.Embedding``, times a number, wherever its table is."""
    weight = module.near("weight", ids) if getattr(module, "on_host", False) else module.weight
    padding = padding_row(module.padding_idx, weight)
    return looked_up(ids, weight, padding, scale, module.scale_grad_by_freq, -1, "dense")


@functools.cache
def class_of(original: type) -> type[Any]:
    """The subclass of a model's class for tables."""
    kind = ScaledTable if issubclass(original, nn.Embedding) else NgramTable
    members = {"posembed_counter": Counter(), "__module__": original.__module__}
    made = type(original.__name__, (kind, original), members)
    _shadow.ORIGINALS[made] = original
    return made


def _remade(original: type) -> Any:
    made: Any = class_of(original)
    return made.__new__(made)


def place(
    model: nn.Module, where: Where, become: Callable[[nn.Module, type], None]
) -> list[tuple[Any, int, str]]:
    """Puts tables of layers and of n-grams on the kernels; no input table, which a head may share.

    Args:
        model: The model.
        where: Where tables are afterwards.
        become: Changes a module's class.

    Returns:
        Classes, how many modules have each, and why they were left, or ''.
    """
    shared = _shared(model)
    counts: dict[tuple[Any, str], int] = collections.Counter()
    for module in list(model.modules()):
        original = _shadow.original_of(type(module))
        own = module._parameters.get("weight")
        reason = None if id(own) in shared else _added(module, original)
        if reason is None:
            continue
        counts[original, reason] += 1
        if reason:
            continue
        table = module
        if SPEC in vars(module):
            table = getattr(module, vars(module)[SPEC].table)
            vars(table)[SCALE] = 1.0
            become(table, class_of(_shadow.original_of(type(table))))
        become(module, class_of(original))
        if where == "host":
            _move(table)
    return [(cls, count, reason) for (cls, reason), count in counts.items()]


def _shared(model: nn.Module) -> set[int]:
    """Parameters of several modules, and the models' input tables, which the head may share."""
    owners = collections.Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    inputs = set()
    for module in model.modules():
        try:
            inputs.add(id(module.get_input_embeddings().weight))  # type: ignore[operator]
        except (AttributeError, NotImplementedError, TypeError):
            continue
    return inputs | {parameter for parameter, count in owners.items() if count > 1}


def _move(table: Any) -> None:
    device = table.weight.device
    vars(table).setdefault(HOME, (device, table.weight.requires_grad))
    table.keep_on_host(device if device.type == "cuda" else None)


def release(module: nn.Module) -> None:
    """Moves a table from the host to where it was, where it learns again if it did."""
    home = vars(module).pop(HOME, None)
    for name in ("on_host", "_mapped"):
        vars(module).pop(name, None)
    if home is not None:
        device, learns = home
        weight: Any = module.weight
        weight.data = weight.data.to(device)
        weight.requires_grad_(learns)


def _added(module: Any, original: type) -> str | None:
    """Adds what a table's class needs; why it cannot, or None for modules that are no tables."""
    if original is nn.Embedding:
        return None
    if issubclass(original, nn.Embedding):
        numbers = _numbers(module)
        return _add_scale(module, original, numbers) if numbers else None
    return _add_ngrams(module, original)


def _numbers(module: nn.Module) -> list[float]:
    """The numbers that a module holds, any of which may be its scale."""
    held = {**vars(module), **module._buffers}
    return [
        float(x)
        for name, x in held.items()
        if name not in (*nn.Embedding.__constants__, SCALE)
        and (isinstance(x, float) or (isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta))
    ]


def _add_scale(module: Any, original: Any, numbers: list[float]) -> str:
    if module.weight.is_meta:
        return "its table is not there yet (meta device)"
    if module.max_norm is not None or module.sparse:
        return "it has an option that the kernel lacks"
    rows = module.num_embeddings
    ids = torch.arange(min(rows, PROBED), device=module.weight.device) * max(1, rows // PROBED)
    dtype = module.weight.dtype
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return f"its table is in {dtype}"
    rounded = [float(torch.tensor(x, dtype=dtype, device="cpu")) for x in numbers]
    with torch.no_grad():
        expected = original.forward(module, ids)
        for scale in (*rounded, *numbers):
            if torch.equal(scaled(module, ids, scale), expected):
                vars(module)[SCALE] = scale
                return ""
    return "it computes something else than rows times a number"


def _add_ngrams(module: Any, original: Any) -> str | None:
    tables = {
        name: child
        for name, child in module.named_children()
        if _shadow.original_of(type(child)) is nn.Embedding
    }
    lists = [x.tolist() for x in module._buffers.values() if _is_list(x)]
    if len(tables) != 1 or len(lists) != 3:
        return None
    ((name, table),) = tables.items()
    if table.weight.is_meta:
        return "its table is not there yet (meta device)"
    for spec in _specifications(lists, vars(module).values(), table.num_embeddings):
        ngrams = _hashes_alike(module, original, name, spec)
        if ngrams is not None:
            vars(module)[SPEC] = ngrams
            return ""
    return "it computes other rows than those of hashed n-grams"


def _is_list(x: Any) -> bool:
    return x is not None and x.dtype == torch.int64 and x.dim() == 1 and not x.is_meta


def _specifications(
    lists: list[list[int]], attributes: Iterable[Any], rows: int
) -> Iterator[NgramSpec]:
    """What n-grams three lists may mean: multipliers, moduli and offsets, and any boundary."""
    for multipliers, moduli, offsets in itertools.permutations(lists):
        heads, rest = divmod(len(moduli), max(1, len(multipliers) - 1))
        begins = [0, *itertools.accumulate(moduli)][:-1]
        if rest or heads == 0 or offsets != begins:
            continue
        by_size = [range(i, i + heads) for i in range(0, len(moduli), heads)]
        for boundary in {x for x in attributes if type(x) is int and x >= 0}:
            yield NgramSpec(
                multipliers,
                [[moduli[i] for i in part] for part in by_size],
                offsets=[[offsets[i] for i in part] for part in by_size],
                boundary=boundary,
                num_embeddings=rows,
            )


class _Recorder:
    """A cache that is empty, and keeps how it is called."""

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        self.read = args, kwargs

    def update_conv_state(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.written = args, kwargs
        return ids


def _hashes_alike(module: Any, original: Any, name: str, spec: NgramSpec) -> Ngrams | None:
    """How a module calls its cache, if it looks up the rows of a specification."""
    weight, cache = getattr(module, name).weight, _Recorder()
    device = next(module.buffers()).device
    ids = torch.arange(PROBED, device=device).mul(7919).remainder(PROBED)[None]
    ids[:, ::9] = spec.padding_token
    with torch.no_grad():
        rows = hashed(ids, *spec.arguments, None).to(weight.device)
        found = nn.functional.embedding(rows, weight).flatten(-2)
        try:
            expected = original.forward(module, ids, cache)
        except Exception:  # another kind of module may need anything
            return None
    if not torch.equal(expected.to(weight.device), found) or not hasattr(cache, "written"):
        return None
    return Ngrams(name, spec, cache.read, cache.written)
