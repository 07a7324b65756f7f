"""Which tensors of a checkpoint have components that are rotated, and in which rows.

transformers says what becomes of a tensor's name on loading, and which part of the model is the
text model. The same weight of a small model says how its rows are ordered.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from posembed.commands.permutation import Rows
from posembed.commands.small_model import UnverifiedError, kinds, telling
from posembed.configuration import completion

HEADS = re.compile("(^|_)n?_?heads?($|_)|query_groups")
LAYER = re.compile(r"^(?P<before>(.*\.)?(layers|layer|blocks|h)\.)(?P<number>\d+)\.(?P<rest>.*)$")
# Layers that predict further tokens, which transformers leaves out.
FURTHER = re.compile(r"^(model\.)?mtp\.layers\.$")
# In W + B A, only B has one row for each component.
ADAPTER = re.compile(r"\.lora_(?P<factor>[AB])(\.\w+)?\.weight$")
# Names of queries and keys: only a reason to refuse a tensor that transformers does not know.
ATTENTION = re.compile(
    r"(^|[._])(q|k|qk|qkv|kv|query|key|wq|wk|wqkv|c_attn)([._]|$)", re.IGNORECASE
)
OTHER_TOWERS = re.compile(r"vision|visual|audio")  # they have their own pairs


def in_words_of_llama(name: str) -> str:
    """Converts the name of one of Meta's tensors to transformers' name."""
    return re.sub(r"(^|\.)attention\.w([qkvo])\.", r"\1self_attn.\2_proj.", name)


# --------------------------------------------------------------------------------------- row order


def candidates(units: int, counts: list[int], width: int, first: int) -> Iterator[Any]:
    """Where heads start in a packed weight: all queries, keys and values, or those of each group.

    Yields:
        The starts for every choice of counts; None if the rows do not fit.
    """
    for queries, keys in itertools.product(counts, counts):
        fits = units == (queries + 2 * keys) * width and queries % keys == 0
        group = queries // keys + 2
        by_group = [head for head in range(keys * group) if head % group != group - 1]
        for order in (list(range(queries + keys)), by_group):
            yield [head * width + first for head in order] if fits else None


def in_blocks(rows: Rows, units: int) -> Rows | None:
    """Heads in blocks of equal size, which may have more rows than those of a query or key."""
    heads = len(rows.starts)
    block = rows.units // heads
    every = tuple(head * block + rows.starts[0] for head in range(heads))
    if rows.starts != every or block * heads != rows.units or units % block:
        return None
    starts = tuple(head * block + rows.starts[0] for head in range(units // block))
    return dataclasses.replace(rows, starts=starts, units=units)


def enlarged(name: str, rows: Rows, units: int, counts: list[tuple[int, int]]) -> Rows:
    """The heads of a large model's tensor, in the order seen in the small model's.

    Args:
        name: The tensor's name, for errors.
        rows: The heads of the small model's tensor.
        units: The number of rows of the large one.
        counts: Numbers of heads in the small and in the large configuration.
    """
    if units == rows.units:
        return rows
    blocks = in_blocks(rows, units)
    if blocks is not None:
        return blocks
    width, first = rows.spec.head_dim, rows.starts[0]
    small = candidates(rows.units, [pair[0] for pair in counts], width, first)
    large = candidates(units, [pair[1] for pair in counts], width, first)
    found = {
        tuple(there)
        for here, there in zip(small, large, strict=True)
        if here and there and tuple(here) == rows.starts
    }
    if len(found) != 1:
        raise ValueError(f"{name}: how its {units} rows are ordered is not known")
    return dataclasses.replace(rows, starts=found.pop(), units=units)


def counts_of_heads(small: Mapping[str, Any], large: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The numbers of heads in the small and in the large configuration, and 1: multi-query."""
    pairs = {
        (small[key], value): None
        for key, value in large.items()
        if HEADS.search(key) and type(value) is int and type(small.get(key)) is int
    }
    return [*((here, there) for here, there in pairs if here > 0 and there > 0), (1, 1)]


# --------------------------------------------------------------------------------------- the names


def relative_names(model: nn.Module, base: type) -> dict[str, str]:
    """The names of a model's weights: in the whole model, and within the text model.

    Args:
        model: The model.
        base: The class of the text model without its head.
    """
    paths = [path for path, module in model.named_modules() if type(module) is base]
    outer = [p for p in paths if not any(p.startswith(f"{q}.") or (q == "" != p) for q in paths)]
    if len(outer) != 1:
        raise UnverifiedError(f"the model has {len(outer)} parts that are a {base.__name__}")
    prefix = f"{outer[0]}." if outer[0] else ""
    return {
        name: name.removeprefix(prefix)
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name.startswith(prefix)
    }


def empty_model(whole: dict[str, Any], fields: dict[str, Any], text: nn.Module) -> nn.Module:
    """The whole model without memory for its weights; the text model alone if the whole is unknown.

    Args:
        whole: The whole configuration.
        fields: That of the text model, completed.
        text: A small text model.
    """
    import transformers

    config = completion.complete(whole)
    kind: Any = None
    if config is not None and not isinstance(config, Exception):
        for name in whole.get("architectures") or ():
            kind = kind or getattr(transformers, str(name), None)
        autos = (transformers.AutoModelForCausalLM, transformers.AutoModel)
        mappings = [auto._model_mapping for auto in autos]
        kind = kind or next((m[type(config)] for m in mappings if type(config) in m), None)
    if kind is None:
        kind, config = type(text), type(text.config)(**fields)
    with torch.device("meta"), telling("transformers cannot build the whole model"):
        model: nn.Module = kind._from_config(config)
    return model


class Loading:
    """What becomes of a file's tensor on loading into transformers' model.

    Args:
        model: The whole model.
        base: The class of the text model without its head.
    """

    def __init__(self, model: nn.Module, base: type) -> None:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.relative = relative_names(model, base)
        self.names = model.state_dict()
        self.prefix = getattr(model, "base_model_prefix", "")
        transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
        renames = core_model_loading.WeightRenaming
        self.renamings = [each for each in transforms if isinstance(each, renames)]
        converters = core_model_loading.WeightConverter
        self.converters = [each for each in transforms if isinstance(each, converters)]
        self._rename = core_model_loading.rename_source_key

    def name(self, name: str) -> tuple[str, bool]:
        """The name in the model, and whether transformers changes more than the name."""
        found, pattern = self._rename(
            in_words_of_llama(name.removeprefix("base_model.model.")),
            self.renamings,
            self.converters,
            self.prefix,
            self.names,
        )
        return found, pattern is not None


class Checkpoint:
    """Where the tensors of a checkpoint have components that are rotated.

    Args:
        whole: The configuration of the whole model.
        fields: That of its text model, completed.
        small: A small text model.
        rows: Where its weights have such components.
    """

    def __init__(
        self, whole: dict[str, Any], fields: dict[str, Any], small: nn.Module, rows: dict[str, Rows]
    ) -> None:
        base: Any = getattr(small, "base_model", small)
        self.loading = Loading(empty_model(whole, fields, small), type(base))
        self.kinds = kinds(fields)
        self.counts = counts_of_heads(small.config.to_dict(), fields)  # type: ignore[operator, union-attr]
        self.seen: dict[Any, Rows | None] = {}
        self.differ = False  # layers that should be alike are not
        for name, relative in relative_names(small, type(base)).items():
            key, found = self._key(relative), rows.get(name)
            self.differ |= key in self.seen and self.seen[key] != found
            self.seen[key] = found
        # The modules that contain weights with such components.
        self.around = {
            name[: dot.start()]
            for name, relative in self.loading.relative.items()
            if self.seen.get(self._key(relative)) is not None
            for dot in re.finditer(r"\.", name)
        }

    def _key(self, relative: str) -> tuple[Any, ...]:
        """A weight's name, with its layer's kind in place of the layer's number."""
        layer = LAYER.match(relative)
        if layer is None:
            return (relative,)
        number = int(layer["number"])
        return layer["before"], "".join(self.kinds[number : number + 1]), layer["rest"]

    def rows(self, name: str, shape: list[int]) -> Rows | None:
        """Where a tensor has components that are rotated; None if it has none.

        Args:
            name: Its name in the file.
            shape: Its shape.

        Raises:
            ValueError: It may have some, but which rows they are is not known.
        """
        adapter = ADAPTER.search(name)
        if adapter is not None and adapter["factor"] == "A":
            return None
        stem = ADAPTER.sub(".weight", name)
        found, changed = self.loading.name(stem)
        if found in self.loading.names:
            relative = self.loading.relative.get(found)
            rows = None if relative is None else self._of_weight(name, relative)
        else:
            rows = self._of_unknown(name, found)
        if changed and (rows is not None or found.rsplit(".", 2)[0] in self.around):
            raise ValueError(f"{name}: transformers splits or joins it on loading")
        if rows is None:
            return None
        known = self.loading.names.get(found)
        if known is not None and shape[:1] != list(known.shape[:1]):
            raise ValueError(
                f"{name}: expected {known.shape[0]} rows, as the configuration says, got {shape[0]}"
            )
        units = int(torch.Size(shape if rows.elements else shape[:1]).numel())
        return enlarged(name, rows, units, self.counts)

    def _of_weight(self, name: str, relative: str) -> Rows | None:
        """Where a weight of the text model has components, by the small model's."""
        key = self._key(relative)
        if key not in self.seen and ATTENTION.search(relative):
            raise ValueError(f"{name}: the small model that was tried has no such weight")
        return self.seen.get(key)

    def _of_unknown(self, name: str, found: str) -> Rows | None:
        """Where a tensor that is no weight of the model has components."""
        module = found.rpartition(".")[0]
        siblings = [self.loading.relative.get(f"{module}.{x}", "") for x in ("weight", "bias")]
        if any(x and self.seen.get(self._key(x)) for x in siblings):
            raise ValueError(f"{name}: only weights and biases can be converted, not quantised")
        layer = LAYER.match(found)
        if layer is not None and self._is_further(layer["before"], layer["rest"]):
            alike = {rows for key, rows in self.seen.items() if key[-1] == layer["rest"]}
            if len(alike) == 1:
                return alike.pop()
        if ATTENTION.search(name) and not OTHER_TOWERS.search(name):
            raise ValueError(f"{name}: transformers' own model has no such weight")
        return None

    def _is_further(self, before: str, rest: str) -> bool:
        """Whether a layer stands after the text model's last one, or in a head of its own."""
        layers = [match for match in map(LAYER.match, self.loading.relative) if match is not None]
        return FURTHER.match(before) is not None or before in {x["before"] for x in layers}
