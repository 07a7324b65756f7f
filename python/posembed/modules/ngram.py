"""Tables as memory: NgramEmbedding for hashed n-grams, PerLayerEmbedding for a row for each layer.

Cheng et al., "Conditional Memory via Scalable Lookup" (Engram), arXiv:2601.07372; Pagnoni et al.,
"Byte Latent Transformer", arXiv:2412.09871; Liu et al., "Scaling Embeddings Outperforms Scaling
Experts in Language Models" (LongCat), arXiv:2601.21204.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posembed import pretrained
from posembed.functional import Device, Gradient, NgramRule
from posembed.functional._bag import pooled
from posembed.functional._ngram import derived_multipliers, derived_primes, hashed, lists, text_mask
from posembed.functional._token import looked_up
from posembed.glue.gate import check_tensors, wrong_type
from posembed.glue.sharding import is_sharded, summed_over_processes
from posembed.glue.tracers import Leaf
from posembed.glue.validation import flag, whole, written
from posembed.modules.token import (
    Keep,
    TokenEmbedding,
    check_matrix,
    check_sizes,
    check_table_options,
    kept_table,
    over_table,
    scale_number,
)
from posembed.tables.owner import Prefetching

# Multipliers of the heads of BLT's encoder: transformers, models/blt.
_BLT_PRIMES = (
    1_000_000_007,
    5_915_587_277,
    1_500_450_271,
    3_267_000_013,
    5_754_853_343,
    4_093_082_899,
    9_576_890_767,
    3_628_273_133,
    2_860_486_313,
    5_463_458_053,
    3_367_900_313,
)


@dataclasses.dataclass(frozen=True)
class NgramSpec:
    """The numbers that map n-grams to rows of a table: see :func:`functional.ngram_ids`.

    Attributes:
        multipliers: [n], or for "rolling" and "modular" [heads].
        moduli: [sizes, heads]: rows of each head.
        offsets: [sizes, heads]: first row of each head; default: heads follow each other.
        sizes: Sizes of the n-grams; default: 2, 3, … as many as ``moduli`` has rows.
        boundary: A token that ends a text.
        padding: What tokens before the text count as; default: ``boundary``, or 0 without one.
        rule: "xor", "rolling" or "modular".
        num_embeddings: Rows of a table; default, 0: as many as the heads need.

    Raises:
        ValueError: The numbers do not fit together.

    Examples:
        >>> import posembed as pe
        >>> spec = pe.NgramSpec(multipliers=(3, 5, 7), moduli=((11, 13), (17, 19)))
        >>> spec.offsets, spec.num_embeddings
        (((0, 11), (24, 41)), 60)
    """

    multipliers: Sequence[int]
    moduli: Sequence[Sequence[int]]
    _: dataclasses.KW_ONLY
    offsets: Sequence[Sequence[int]] = ()
    sizes: Sequence[int] = ()
    boundary: int | None = None
    padding: int | None = None
    rule: NgramRule = "xor"
    num_embeddings: int = 0
    arguments: tuple[Any, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fills in defaults, and makes tuples of sequences."""
        moduli = tuple(map(tuple, self.moduli))
        values = {
            "multipliers": tuple(self.multipliers),
            "moduli": moduli,
            "offsets": tuple(map(tuple, self.offsets)) or _in_turn(moduli),
            "sizes": tuple(self.sizes) or tuple(range(2, len(moduli) + 2)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        numbers = lists(self.multipliers, self.moduli, self.offsets, self.sizes, self.rule)
        arguments = (*numbers, self.boundary, self.padding, self.rule)
        hashed(torch.zeros(0, dtype=torch.int64, device="cpu"), *arguments)  # checks them
        needed = max(sum(head) for head in zip(numbers[1], numbers[2], strict=True))
        rows = whole("num_embeddings", self.num_embeddings) or needed
        if rows < needed:
            raise ValueError(
                f"num_embeddings: expected {needed} or more, which the heads need, got {rows}"
            )
        object.__setattr__(self, "num_embeddings", rows)
        object.__setattr__(self, "arguments", arguments)

    @property
    def padding_token(self) -> int:
        """What tokens before the text count as."""
        return self.padding if self.padding is not None else self.boundary or 0

    @property
    def ngram_size(self) -> int:
        """The tokens of the longest n-gram."""
        return self.sizes[-1]

    @property
    def columns(self) -> int:
        """The rows of a token: one for each size and head."""
        return sum(map(len, self.moduli))

    @classmethod
    def qwen4_exp(
        cls,
        vocab_size: int,
        boundary: int,
        *,
        layer: int = 0,
        ngram_size: int = 3,
        heads: int = 8,
        rows: int = 20_000_000,
        seed: int = 1234,
        divisor: int = 128,
    ) -> NgramSpec:
        """The spec of a layer of Qwen's qwen4_exp, as transformers derives it.

        Args:
            vocab_size: Tokens of the model.
            boundary: Its end-of-text token.
            layer: Which of the layers with n-grams, from 0; each has its own numbers.
            ngram_size: The longest n-gram.
            heads: Heads of each size.
            rows: The least rows of a head: moduli are the next primes.
            seed: Of the multipliers.
            divisor: The table's rows are a multiple of it.

        Examples:
            >>> import posembed as pe
            >>> pe.NgramSpec.qwen4_exp(248_320, boundary=248_046).num_embeddings
            320001536
        """
        multipliers = derived_multipliers(ngram_size, vocab_size, layer, seed)
        moduli = _primes(ngram_size, heads, rows, layer)
        needed = sum(map(sum, moduli))
        padded = -(-needed // divisor) * divisor
        return cls(multipliers, moduli, boundary=boundary, num_embeddings=padded)

    @classmethod
    def engram(
        cls,
        vocab_size: int,
        padding: int,
        layers: Sequence[int],
        layer: int,
        *,
        ngram_size: int = 3,
        heads: int = 8,
        rows: int = 16_000_000,
        seed: int = 0,
        boundary: int | None = None,
    ) -> NgramSpec:
        """The spec of a layer of DeepSeek's Engram, as its published program derives it.

        Engram hashes ids of a compressed vocabulary, in which tokens that look alike share one:
        look them up in :meth:`compressed_vocabulary` first. Needs numpy, whose random numbers are
        the multipliers.

        Args:
            vocab_size: Ids of the compressed vocabulary.
            padding: The compressed id before a text.
            layers: All layers with a table, in the model's order.
            layer: One of them.
            ngram_size: The longest n-gram.
            heads: Heads of each size.
            rows: The least rows of a head: moduli are the next primes.
            seed: Of the multipliers.
            boundary: An id that ends a text, such as that of images.

        Examples:
            >>> import posembed as pe
            >>> pe.NgramSpec.engram(1000, 2, layers=(1, 14), layer=14, rows=100).moduli[1][:3]
            (229, 233, 239)
        """
        import numpy as np

        if layer not in layers:
            raise ValueError(f"layer: expected one of {tuple(layers)}, got {layer}")
        bound = max(1, (2**63 - 1) // vocab_size // 2)
        random = np.random.default_rng(seed + 10007 * layer)
        draws = random.integers(low=0, high=bound, size=ngram_size, dtype=np.int64)
        moduli = _primes(ngram_size, heads, rows, list(layers).index(layer))
        return cls((2 * draws + 1).tolist(), moduli, padding=padding, boundary=boundary)

    @staticmethod
    def compressed_vocabulary(tokenizer: Any) -> Tensor:
        """The compressed id of each token, which Engram hashes: tokens that look alike share one.

        Alike are tokens whose texts differ in case, accents, compatible forms or white space around
        them. ``spec.engram`` takes the number of ids, and ``NgramEmbedding`` the ids
        ``map[input_ids]``. Source: DeepSeek's engram_demo_v1.py. Needs the tokenizers package.

        Args:
            tokenizer: One of transformers or tokenizers.

        Returns:
            int64 [tokens of the tokenizer], from 0 in the order in which they first occur.

        Examples:
            >>> import posembed as pe
            >>> from tokenizers import Tokenizer, models
            >>> words = {"The": 0, "cat": 1, "the": 2, "Cat ": 3, " ": 4}
            >>> pe.NgramSpec.compressed_vocabulary(Tokenizer(models.WordLevel(words)))
            tensor([0, 1, 0, 1, 2])
        """
        from tokenizers import Regex, normalizers

        steps = (normalizers.NFKC, normalizers.NFD, normalizers.StripAccents, normalizers.Lowercase)
        spaces = normalizers.Replace(Regex(r"[ \t\r\n]+"), " ")
        alike = normalizers.Sequence([*(step() for step in steps), spaces])
        strip = normalizers.Strip()
        ours = hasattr(tokenizer, "id_to_token")
        name = tokenizer.id_to_token if ours else tokenizer.convert_ids_to_tokens
        known: dict[str, int] = {}

        def key(token: int) -> str:
            text = tokenizer.decode([token], skip_special_tokens=False)
            if "\ufffd" in text:  # a part of a character
                return str(name(token))
            seen = alike.normalize_str(text)
            if seen != " ":  # white space alone is a text too, for which U+E000 stands there
                seen = strip.normalize_str(seen).replace("\ue000", " ")
            return seen or text

        count = tokenizer.get_vocab_size() if ours else len(tokenizer)
        return torch.tensor([known.setdefault(key(token), len(known)) for token in range(count)])

    @classmethod
    def blt(
        cls, heads: int = 1, sizes: Sequence[int] = (3, 4, 5, 6, 7, 8), rows: int = 30_000
    ) -> NgramSpec:
        """The spec of the Byte Latent Transformer, whose rows are summed."""
        multipliers = [_BLT_PRIMES[head % len(_BLT_PRIMES)] for head in range(heads)]
        count = len(sizes)  # a head has the tables of all sizes
        offsets = [[(head * count + i) * rows for head in range(heads)] for i in range(count)]
        moduli = [[rows] * heads] * count
        return cls(multipliers, moduli, offsets=offsets, sizes=sizes, rule="rolling")

    @classmethod
    def longcat(
        cls,
        vocab_size: int,
        boundary: int = 2,
        *,
        ngram_size: int = 4,
        heads: int = 4,
        ratio: float = 78,
    ) -> NgramSpec:
        """The spec of LongCat's models with n-grams; the defaults are LongCat-Flash-Lite's.

        The model projects each head's rows and takes the mean with the token's: that is one linear
        layer on the joined rows, whose weight joins the heads'.

        Args:
            vocab_size: Tokens of the model.
            boundary: Its end-of-text token.
            ngram_size: ``emb_neighbor_num``: the longest n-gram.
            heads: ``emb_split_num``: heads of each size.
            ratio: ``ngram_vocab_size_ratio``: rows of a head by tokens of the vocabulary.

        Examples:
            >>> import posembed as pe
            >>> spec = pe.NgramSpec.longcat(131_072)
            >>> spec.moduli[0], spec.num_embeddings
            ((10223617, 10223619, 10223621, 10223623), 122683536)
        """
        count = _columns(ngram_size, heads)
        rows = [int(ratio * vocab_size + 2 * column + 1) for column in range(count)]
        moduli = [rows[i : i + heads] for i in range(0, count, heads)]
        multipliers = [vocab_size] * heads
        return cls(multipliers, moduli, boundary=boundary, padding=0, rule="modular")


def _in_turn(moduli: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The first row of each head, where heads follow each other."""
    starts = itertools.accumulate((rows for heads in moduli for rows in heads), initial=0)
    return tuple(tuple(itertools.islice(starts, len(heads))) for heads in moduli)


def _columns(ngram_size: int, heads: int) -> int:
    """The heads of all sizes from 2 on."""
    if ngram_size < 2 or heads < 1:
        raise ValueError(
            f"ngram_size, heads: expected at least 2 and 1, got {ngram_size} and {heads}"
        )
    return (ngram_size - 1) * heads


def _primes(ngram_size: int, heads: int, rows: int, layer: int) -> list[list[int]]:
    """A prime for each size and head, [ngram_size - 1, heads]; layers have different ones."""
    count = _columns(ngram_size, heads)
    primes = derived_primes(count, rows, layer * count)
    return [primes[i : i + heads] for i in range(0, count, heads)]


class NgramEmbedding(Leaf, Prefetching):
    """A table of hashed n-grams: each token looks up the n-grams that end at it.

    ``weight`` is [spec.num_embeddings, components of a row], drawn from N(0, 1).

    Args:
        spec: How n-grams map to rows.
        embedding_dim: Components of a result.
        summed: Add the rows of all sizes and heads, in float32, as BLT does; otherwise they are
            joined, and each has an equal part of the components.
        gradient: "dense", or "rows" for a sparse ``weight.grad`` with each row that was looked up,
            once, for :mod:`posembed.optim`.
        device, dtype: Device and dtype of the table.

    Raises:
        ValueError: ``embedding_dim`` cannot be divided among the joined rows, or an unknown
            ``gradient``.

    Examples:
        >>> import torch, posembed as pe
        >>> spec = pe.NgramSpec.qwen4_exp(50_000, boundary=2, rows=1_000)
        >>> memory = pe.NgramEmbedding(spec, 64)
        >>> ids = torch.randint(50_000, (2, 9))
        >>> whole = memory(ids)
        >>> first, history = memory(ids[:, :6]), memory.next_history(ids[:, :6])
        >>> torch.equal(torch.cat([first, memory(ids[:, 6:], history)], 1), whole)
        True
    """

    def __init__(
        self,
        spec: NgramSpec,
        embedding_dim: int,
        *,
        summed: bool = False,
        gradient: Gradient = "dense",
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(spec, NgramSpec):
            raise wrong_type("spec", "a NgramSpec", type(spec).__name__)
        check_sizes(embedding_dim=embedding_dim)
        check_table_options(spec.num_embeddings, None, gradient)
        self.spec = spec
        self.embedding_dim = embedding_dim
        self.summed = flag("summed", summed)
        self.gradient: Gradient = gradient
        parts = 1 if summed else spec.columns
        if embedding_dim % parts:
            raise ValueError(
                f"embedding_dim: expected a multiple of {parts}, the sizes times heads whose rows "
                f"are joined, got {embedding_dim}"
            )
        shape = (spec.num_embeddings, embedding_dim // parts)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def sparse(self) -> bool:
        """Whether ``gradient`` is "rows"; read by DistributedDataParallel."""
        return self.gradient == "rows"

    @classmethod
    def from_pretrained(
        cls,
        weight: Tensor,
        spec: NgramSpec,
        *,
        freeze: bool = True,
        summed: bool = False,
        gradient: Gradient = "dense",
    ) -> NgramEmbedding:
        """A module that shares ``weight`` [spec.num_embeddings, components of a row].

        Raises:
            ValueError: ``weight`` has another shape.
        """
        check_tensors(weight=weight)
        if weight.dim() != 2 or weight.shape[0] != spec.num_embeddings:
            raise ValueError(
                f"weight: expected [{spec.num_embeddings}, components], got {list(weight.shape)}"
            )
        dim = weight.shape[1] * (1 if summed else spec.columns)
        made = cls(spec, dim, summed=summed, gradient=gradient, device="meta")
        made.weight = nn.Parameter(weight, requires_grad=not flag("freeze", freeze))
        return made

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        spec: NgramSpec,
        *,
        tensor: str | None = None,
        dtype: torch.dtype | None = None,
        freeze: bool = True,
        summed: bool = False,
        keep: Keep = "numbers",
    ) -> NgramEmbedding:
        """A module with a table of a model's safetensors, or their index.

        Finds the tables of qwen4_exp, in shards or whole, of DeepSeek's Engram, and of LongCat, one
        for each head, by their names; float8 codes are multiplied by their scales.

        Args:
            path: The file.
            spec: How n-grams map to rows.
            tensor: Name of the table, without a shard's number, if the file has several.
            dtype: Dtype of the table; default: the file's, float32 with scales.
            freeze: Freeze the table: no gradient.
            summed: Add rows, as in the constructor.
            keep: As in :meth:`posembed.TokenEmbedding.from_file`.

        Raises:
            FileFormatError: The file is broken.
            ValueError: The file has no such table, several, or only some of its shards, or the
                table has not the rows of ``spec``.
        """
        file = pretrained.open_vectors(path)
        names = _shards(file.names, tensor)
        kept = kept_table(path, keep, names, dtype, freeze)
        if kept is not None:
            return over_table(lambda weight: cls.from_pretrained(weight, spec, summed=summed), kept)
        parts = [file.table(name, dtype) for name in names]
        table = parts[0] if len(parts) == 1 else torch.cat(parts)
        return cls.from_pretrained(table, spec, freeze=freeze, summed=summed)

    def forward(
        self,
        ids: Tensor,
        history: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Looks up the n-grams that end at each token.

        Args:
            ids: int32 or int64 [batch, seq] or [seq]; any numbers.
            history: The tokens before, [batch, ngram_size - 1]: :meth:`next_history`.
            cu_seqlens: Boundaries of packed texts; see :func:`functional.ngram_ids`.
            attention_mask: bool or integers, as ``ids``: 0 for padding on any side. Without it,
                padding is text: the first tokens after padding look up other rows than alone.
            lengths: [batch], instead of it: the tokens of each row before its padding.

        Returns:
            [batch, seq, embedding_dim] in the dtype of the table.
        """
        return self.rows_at(
            self.row_ids(ids, history, cu_seqlens, attention_mask=attention_mask, lengths=lengths)
        )

    def row_ids(
        self,
        ids: Tensor,
        history: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """The rows that :meth:`forward` looks up: int64 [batch, seq, sizes * heads]."""
        text = _text(ids, attention_mask, lengths)
        return hashed(ids, *self.spec.arguments, history, cu_seqlens, text)

    def rows_at(self, rows: Tensor) -> Tensor:
        """The result for rows of the table."""
        weight: Tensor | None = self._parameter("weight")
        if self.on_host:
            weight = self.near("weight", rows)
        if self.summed and weight is not None and is_sharded(weight):
            # Processes add up sums in float32, which are rounded once.
            wide = torch.promote_types(weight.dtype, torch.float32)
            found = looked_up(rows, weight, -1, 1.0, False, -1, self.gradient)
            return summed_over_processes(found.sum(-2, dtype=wide)).to(weight.dtype)
        if self.summed:
            bags = rows.flatten(0, -2)
            if weight is None:
                found = self.table.pooled(bags, None, -1, False, "sum", None)
            else:
                found = pooled(weight, bags, None, -1, False, "sum", None, self.gradient)
            return found.view(*rows.shape[:-1], self.embedding_dim)
        if weight is None:
            return self.table(rows).flatten(-2)  # type: ignore[no-any-return]
        return looked_up(rows, weight, -1, 1.0, False, -1, self.gradient).flatten(-2)

    def next_history(
        self,
        ids: Tensor,
        history: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """The last tokens that are text, as ``history`` of the next call.

        The shape does not depend on the length of ``ids``, so that ``history.copy_(...)`` keeps it
        in one place for CUDA graphs.

        Args:
            ids: [batch, seq] or [seq], the tokens of this call.
            history: The history of this call; default: padding.
            attention_mask: That of this call, [batch, seq].
            lengths: [batch], instead of it: the tokens of each row that stay, such as those that
                were accepted of a draft.

        Returns:
            [batch, ngram_size - 1] in the dtype of ``ids``.

        Raises:
            ValueError: Shapes do not fit together.
            TypeError: The mask is not bool or integers.
        """
        kept = self.spec.ngram_size - 1
        shape = (*ids.shape[:-1], kept)
        if history is None:
            history = ids.new_full(shape, self.spec.padding_token)
        elif history.shape[-1:] != (kept,) or history.shape[:-1] not in ((), (1,), shape[:-1]):
            raise ValueError(f"history: expected {list(shape)}, got {list(history.shape)}")
        joined = torch.cat([history.to(ids.dtype).expand(shape), ids], -1)
        text = _text(ids, attention_mask, lengths)
        if text is None:
            return joined[..., joined.shape[-1] - kept :].clone()
        # The places of the last tokens that are text; the history always has enough.
        before = torch.arange(kept, device=ids.device).expand(shape)
        after = torch.arange(kept, joined.shape[-1], device=ids.device)
        places = torch.cat([before, torch.where(text != 0, after, -1)], -1)
        return joined.gather(-1, places.topk(kept, -1).values.flip(-1))

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        spec = self.spec
        first = (
            f"{spec.num_embeddings}, {self.embedding_dim}, ngram_size={spec.ngram_size}, "
            f"columns={spec.columns}"
        )
        return written(self, written(spec, first, rule="xor"), summed=False, gradient="dense")


def _text(ids: Tensor, attention_mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Which ids are text; None for all. Errors have the modules' name of the mask."""
    if attention_mask is not None:
        dtype, shape = attention_mask.dtype, attention_mask.shape
        if dtype.is_floating_point or dtype.is_complex:
            raise TypeError(f"attention_mask: expected bool or integers, got {dtype}")
        if shape != ids.shape:
            raise ValueError(
                f"attention_mask: expected the shape of ids, {list(ids.shape)}, got {list(shape)}"
            )
    return text_mask(ids, attention_mask, lengths)


# Tables of qwen4_exp, whose checkpoints have shards, of Engram, and of LongCat, one a head.
_TABLE = re.compile(
    r"(.*(?:ngram_embedding|engram\.embed|\bembedders))(?:\.(?:shard_)?([0-9]+))?\.weight"
)


def _shards(names: Sequence[str], tensor: str | None) -> list[str]:
    """The names of a table's shards in order; raises ValueError unless there is one table."""
    if tensor is not None and tensor in names:
        return [tensor]
    tables: dict[str, dict[int, str]] = {}
    for name in names:
        found = _TABLE.fullmatch(name)
        if found and tensor in (None, found[1], f"{found[1]}.weight"):
            digits = found[2] or "0"
            number = int(digits) if len(digits) < 19 else 10**18  # more than any table has
            tables.setdefault(found[1], {})[number] = name
    if len(tables) != 1:
        expected = "the name of one table of n-grams" if tensor is None else "a table"
        known = sorted(tables) or names
        raise ValueError(f"tensor: expected {expected}, got {tensor!r} for {known}")
    ((table, shards),) = tables.items()
    missing = next(number for number in range(len(shards) + 1) if number not in shards)
    if missing < len(shards):
        raise ValueError(f"tensor: expected all shards of {table}, got none of number {missing}")
    return [shards[number] for number in sorted(shards)]


class PerLayerEmbedding(TokenEmbedding):
    """A row for each token and layer of a model, in one table, as in Gemma 3n and 4.

    ``weight`` is [num_embeddings, num_layers * layer_dim], their ``embed_tokens_per_layer.weight``.

    Args:
        num_embeddings: Tokens of the vocabulary.
        num_layers: Layers that have rows.
        layer_dim: Components of a layer's row.
        scale: Multiplies the result; ``"sqrt_dim"`` is the square root of layer_dim, Gemma's.
        device, dtype: Device and dtype of the table.

    Raises:
        ValueError: A negative size or an unknown ``scale``.

    Examples:
        >>> import torch, posembed as pe
        >>> table = pe.PerLayerEmbedding(1000, 4, 16, scale="sqrt_dim")
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> table(ids).shape
        torch.Size([1, 3, 4, 16])
        >>> torch.equal(table.layer(ids, 2), table(ids)[:, :, 2])
        True
    """

    def __init__(
        self,
        num_embeddings: int,
        num_layers: int,
        layer_dim: int,
        *,
        scale: float | Literal["sqrt_dim"] = 1.0,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        whole("num_layers", num_layers, 1)
        check_sizes(layer_dim=layer_dim)
        super().__init__(
            num_embeddings,
            num_layers * layer_dim,
            scale=scale_number(scale, layer_dim),
            device=device,
            dtype=dtype,
        )
        self.num_layers = num_layers
        self.layer_dim = layer_dim

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        *,
        num_layers: int,
        scale: float | Literal["sqrt_dim"] = 1.0,
    ) -> PerLayerEmbedding:
        """A module that shares ``embeddings`` [num_embeddings, num_layers * layer_dim].

        ``freeze``: without gradient. Other options are the class's.

        Raises:
            ValueError: ``num_layers`` does not divide a row.
        """
        check_matrix(embeddings)
        rows, columns = embeddings.shape
        if num_layers < 1 or columns % num_layers:
            raise ValueError(f"num_layers: expected a divisor of {columns}, got {num_layers}")
        made = cls(rows, num_layers, columns // num_layers, scale=scale, device="meta")
        made.weight = nn.Parameter(embeddings, requires_grad=not flag("freeze", freeze))
        return made

    def forward(self, ids: Tensor) -> Tensor:
        """All layers' rows: int32 or int64 [...] -> [..., num_layers, layer_dim]."""
        return super().forward(ids).view(*ids.shape, self.num_layers, self.layer_dim)

    def layer(self, ids: Tensor, index: int) -> Tensor:
        """One layer's rows, without reading those of others: [...] -> [..., layer_dim].

        Args:
            ids: int32 or int64 [...].
            index: The layer; a negative number counts from the last.

        Raises:
            IndexError: An id or the layer is outside the table.
        """
        if not -self.num_layers <= index < self.num_layers:
            allowed = f"{-self.num_layers} to {self.num_layers - 1}"
            raise IndexError(f"index: expected {allowed}, got {index}")
        index %= self.num_layers
        weight: Tensor | None = self._parameter("weight")
        if weight is None:
            return self.table.part(ids, index, self.num_layers, self.scale)
        if self.on_host:
            weight = self.near("weight", ids)
        columns = weight.narrow(1, index * self.layer_dim, self.layer_dim)
        return looked_up(ids, columns, -1, self.scale, False, -1, "dense")

    def with_embeddings(self, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """All layers' rows, with features [features, num_layers * layer_dim] among them."""
        rows = super().with_embeddings(ids, features, mask)
        return rows.view(*ids.shape, self.num_layers, self.layer_dim)

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        scale = f", scale={self.scale:g}" if self.scale != 1 else ""
        return f"{self.num_embeddings}, {self.num_layers}, {self.layer_dim}{scale}"
