"""InputEmbedding: everything before a Transformer's first block, in one kernel.

Devlin et al., "BERT", arXiv:1810.04805; Vaswani et al., "Attention Is All You Need",
arXiv:1706.03762.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posembed import functional
from posembed.functional import Device, Gradient
from posembed.functional._offset import positions_from
from posembed.functional._options import is_wrapper
from posembed.glue.gate import check_tensors
from posembed.glue.tracers import Leaf
from posembed.glue.validation import finite, not_negative, one_of
from posembed.models import input_families
from posembed.modules.learned import LearnedPositionalEmbedding
from posembed.modules.sinusoidal import SinusoidalPositionalEmbedding
from posembed.modules.token import (
    TokenEmbedding,
    among,
    check_computed,
    check_mask,
    check_sizes,
    does_more,
    scale_number,
)

Position = LearnedPositionalEmbedding | SinusoidalPositionalEmbedding
PositionRule = Literal["consecutive", "roberta", "opt"]

# Modules whose parameters the kernel reads.
TABLES = (TokenEmbedding, nn.Embedding)
POSITIONS = (LearnedPositionalEmbedding, SinusoidalPositionalEmbedding)
NORMS = (nn.LayerNorm, nn.RMSNorm)


class InputEmbedding(Leaf, nn.Module):
    """Sums token, position and type rows and applies norm and dropout, in one kernel.

    The submodules ``token``, ``position``, ``token_type``, ``norm`` and ``projection`` hold the
    parameters; those that the options omit are None. The kernel reads the parameters directly and
    does not call the submodules. It cannot do so if a submodule has hooks, is of another type (a
    subclass, an adapter), has an option that the kernel lacks, or has parameters that are not plain
    tensors. In that case the submodules are called, and posembed's kernel applies only dropout. If
    you replace a submodule, it is called like the original: ``token(ids)``,
    ``position(x, positions, offset=0)``, ``token_type(types)``, ``norm(x)``.

    Args:
        num_embeddings: Rows of the token table.
        embedding_dim: Components of a row.
        positions: "learned", "sinusoidal", or None.
        max_positions: Rows of the position table, for learned positions.
        num_types: Rows of the token-type (segment) table; 0: no table.
        scale: Multiplies the token rows; "sqrt_dim" is the square root of embedding_dim.
        norm: "layer" for LayerNorm, "rms" for RMSNorm, or None.
        eps: Added to the norm's variance; default: 1e-5.
        dropout: Probability of dropping a component of the result in training. The mask depends
            only on a seed and the component's index, not on the number of threads;
            ``torch.manual_seed`` controls the seed unless one is passed to ``forward``.
        padding_idx: The token row that starts as zeros and gets no gradient.
        position_rule: How tokens are numbered if no positions are passed. "consecutive":
            ``offset``, ``offset + 1``, and so on. "roberta": padding is not counted and gets
            position -1, whose row precedes the others, starts as zeros and gets no gradient;
            sinusoids then follow fairseq (M2M100). "opt", for learned positions: the same, but
            padding is read from an attention mask, its row is trained, and two rows precede
            position 0.
        token_dim: Size of a token row, if not ``embedding_dim``: ``projection``, a Linear without
            bias, maps it to ``embedding_dim`` (OPT-350m).
        output_dim: Size of the output, if not ``embedding_dim``: ``projection``, a Linear after
            norm and dropout, maps to it (ELECTRA, ALBERT).
        gradient: Form of the token table's gradient, "dense" or "rows".
        device, dtype: Device and dtype of all parameters.

    Raises:
        ValueError: A negative size or ``eps``, an unknown name, or a ``dropout`` outside 0 to 1;
            ``eps`` without a norm;
            learned positions without ``max_positions``, or the reverse; a ``position_rule`` without
            such positions, or "roberta" without ``padding_idx``; or both ``token_dim`` and
            ``output_dim``.

    Examples:
        >>> import torch, posembed as pe
        >>> embed = pe.InputEmbedding(
        ...     30522, 768, max_positions=512, num_types=2, norm="layer", eps=1e-12, dropout=0.1
        ... )
        >>> embed(torch.tensor([[101, 2023, 102]])).shape
        torch.Size([1, 3, 768])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        positions: Literal["learned", "sinusoidal"] | None = "learned",
        max_positions: int | None = None,
        num_types: int = 0,
        scale: float | Literal["sqrt_dim"] = 1.0,
        norm: Literal["layer", "rms"] | None = None,
        eps: float | None = None,
        dropout: float = 0.0,
        padding_idx: int | None = None,
        position_rule: PositionRule = "consecutive",
        token_dim: int | None = None,
        output_dim: int | None = None,
        gradient: Gradient = "dense",
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(embedding_dim=embedding_dim, num_types=num_types)
        for name, size in {"token_dim": token_dim, "output_dim": output_dim}.items():
            if size is not None:
                check_sizes(**{name: size})
        _check_rule(position_rule, positions, padding_idx)
        if token_dim is not None and output_dim is not None:
            raise ValueError(f"output_dim: expected none beside token_dim, got {output_dim}")
        if eps is not None and norm is None:
            raise ValueError(f"eps: expected none without a norm, got {eps}")
        eps = 1e-5 if eps is None else not_negative("eps", eps)
        if not 0 <= finite("dropout", dropout) <= 1:
            raise ValueError(f"dropout: expected 0 to 1, got {dropout}")
        one_of("norm", norm, "layer", "rms", None)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding_dim = embedding_dim
        self.dropout = dropout
        self.position_rule = position_rule
        self.token_dim = token_dim
        self.token = TokenEmbedding(
            num_embeddings,
            embedding_dim if token_dim is None else token_dim,
            padding_idx,
            scale=scale_number(scale, embedding_dim),  # scales the sum's rows, also with token_dim
            gradient=gradient,
            **place,
        )
        self._padding_id = self.token.padding_idx  # a replacement of token may not have it
        first = self._first_row()
        rows = {
            "first_row": first,
            "_padding_row": first - 1 if position_rule == "roberta" else None,
        }
        self.position = _position(positions, max_positions, embedding_dim, rows, place)
        self.token_type = TokenEmbedding(num_types, embedding_dim, **place) if num_types else None
        norms: dict[str, Any] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
        self.norm: nn.LayerNorm | nn.RMSNorm | None = None
        if norm is not None:
            self.norm = norms[norm](embedding_dim, eps=eps, **place)
        self.projection: nn.Linear | None = None
        if token_dim is not None:
            self.projection = nn.Linear(token_dim, embedding_dim, bias=False, **place)
        if output_dim is not None:
            self.projection = nn.Linear(embedding_dim, output_dim, **place)

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        offset: int | Tensor = 0,
        attention_mask: Tensor | None = None,
        seed: Tensor | None = None,
        first_token: int = 0,
        cu_seqlens: Tensor | None = None,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Embeds ids, or vectors that replace the token rows.

        Positions, types and masks are passed by name, because other libraries have them in other
        orders.

        Args:
            ids: int32 or int64 [batch, seq]; None with ``inputs_embeds``.
            positions: int32 or int64 [seq] or [batch, seq]; None: counted from ``offset`` by
                ``position_rule``.
            types: int32 or int64 [batch, seq]; None: type 0.
            inputs_embeds: Instead of ids: floating-point [batch, seq, embedding_dim] or
                [batch, seq, token_dim], in the dtype of the tables. They replace the scaled token
                rows, as in transformers; gradients flow to them. ``position_rule="roberta"`` counts
                all of them, because there are no ids to mark padding.
            offset: Position of the first token if ``positions`` is None: the number of cached
                tokens. int32 or int64 [batch]: one per sample, unless ``position_rule`` depends on
                padding.
            attention_mask: bool, int32 or int64 [batch, offset + seq], 0 for padding; used by
                ``position_rule="opt"``. None: there is no padding.
            seed: Dropout seed: int64 with one element on the device of ``ids``; None: drawn from
                torch's generator for that device.
            first_token: Index of this call's first token in the dropout mask. Shards of a batch
                that pass the same ``seed`` and their own index draw the mask of the whole batch, on
                any device.
            cu_seqlens: Packed documents, with batch 1: int32 or int64 [documents + 1], the token at
                which each begins, then the number of tokens. Positions restart at ``offset``, a
                number or [documents], in each; not with ``positions`` or counted padding.
            input_ids: transformers' name of ids.
            position_ids: transformers' name of positions.
            token_type_ids: transformers' name of types.

        Returns:
            [batch, seq, embedding_dim], or [batch, seq, output_dim].

        Raises:
            ValueError: Shapes are incompatible, or ids and ``inputs_embeds`` are both passed or
                both missing, or an argument is passed under both of its names.
            TypeError: A dtype is not supported.
            IndexError: An id, position or type is outside its table.

        Examples:
            >>> import torch, posembed as pe
            >>> embed = pe.InputEmbedding(10, 8, max_positions=4)
            >>> ids = torch.tensor([[1, 2]])
            >>> torch.equal(embed(inputs_embeds=embed.token(ids)), embed(ids))
            True
        """
        ids = either("ids", ids, "input_ids", input_ids)
        positions = either("positions", positions, "position_ids", position_ids)
        types = either("types", types, "token_type_ids", token_type_ids)
        tokens = self._check_inputs(ids, inputs_embeds)
        positions = self._positions(tokens, ids, positions, attention_mask, offset, cu_seqlens)
        offset = 0 if positions is not None else offset
        dropout = self.dropout if self.training else 0.0
        parts = self._plain_parts(inputs_embeds is None and self.token_dim is None)
        if parts is None:
            result = self._call_parts(ids, inputs_embeds, positions, types, offset)  # type: ignore[arg-type]
            if dropout > 0:
                ids, table = own_rows(result)
                result = functional.input_embedding(
                    ids, dropout=dropout, seed=seed, first_token=first_token, **table
                )
        else:
            if "token" not in parts:
                ids, table = own_rows(self._vectors(ids, inputs_embeds))
                parts |= table
            result = functional.input_embedding(
                ids,  # type: ignore[arg-type]
                positions=positions,
                types=types,
                offset=offset,
                dropout=dropout,
                seed=seed,
                first_token=first_token,
                **parts,
            )
        if self.projection is None or self.token_dim is not None:
            return result
        return self.projection(result)  # type: ignore[no-any-return]

    def with_embeddings(
        self, ids: Tensor, features: Tensor, mask: Tensor, **options: Any
    ) -> Tensor:
        """Embeds ids, with features in the places of a mask instead of token rows.

        The features are those of images among the tokens of a text. They take the places of scaled
        token rows, as ``inputs_embeds`` do.

        Args:
            ids: int32 or int64 [batch, seq]. Those in places of the mask are not read.
            features: Floating-point [features, embedding_dim] or [features, token_dim], in the
                dtype of the tables, under autocast in any.
            mask: bool [batch, seq]: the places of the features, in order.
            options: Of ``forward``: positions, types and so on.

        Returns:
            [batch, seq, embedding_dim], or [batch, seq, output_dim].

        Raises:
            ValueError, TypeError, IndexError: As ``forward`` and
                :meth:`TokenEmbedding.with_embeddings`, which counts the features.

        Examples:
            >>> import torch, posembed as pe
            >>> embed = pe.InputEmbedding(100, 8, positions=None, norm="rms")
            >>> ids, image = torch.tensor([[5, -1, -1, 7]]), torch.randn(2, 8)
            >>> embed.with_embeddings(ids, image, ids == -1).shape
            torch.Size([1, 4, 8])
        """
        if isinstance(self.token, TokenEmbedding):
            rows = self.token.with_embeddings(ids, features, mask)
        else:
            check_mask(ids, mask)
            rows = among(self.token(ids.masked_fill(mask, 0)), features, mask)
        given = options.keys() & {"positions", "position_ids"}
        if self.position_rule == "roberta" and not any(options[name] is not None for name in given):
            tokens = ids.masked_fill(mask, self._first_row())  # never padding
            options["positions"] = functional.roberta_positions(
                tokens, self._first_row() - 1, past_length=options.pop("offset", 0)
            )
        return self(inputs_embeds=rows, **options)  # type: ignore[no-any-return]

    @property
    def num_embeddings(self) -> int:
        """Rows of the token table."""
        return self.token.num_embeddings

    @property
    def padding_idx(self) -> int | None:
        """The token row that gets no gradient; never negative."""
        return self.token.padding_idx

    @property
    def max_positions(self) -> int | None:
        """Number of positions with a row; None: there is no table."""
        if isinstance(self.position, LearnedPositionalEmbedding):
            return self.position.max_positions
        return None

    @property
    def num_types(self) -> int:
        """Rows of the token-type table; 0: there is no table."""
        return 0 if self.token_type is None else self.token_type.num_embeddings

    def _first_row(self) -> int:
        """The row of position 0."""
        if self.position_rule == "roberta":
            return self._padding_id + 1  # type: ignore[operator]
        return 2 if self.position_rule == "opt" else 0

    def _check_inputs(self, ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Returns ids or inputs_embeds, whichever is passed."""
        if ids is not None and inputs_embeds is None:
            return ids
        if inputs_embeds is None or ids is not None:
            got = "neither" if inputs_embeds is None else "both"
            raise ValueError(f"inputs_embeds: expected either ids or inputs_embeds, got {got}")
        width = self.embedding_dim if self.token_dim is None else self.token_dim
        _check_vectors(inputs_embeds, width, self._dtype())
        return inputs_embeds

    def _dtype(self) -> torch.dtype | None:
        """The dtype of token rows; None: a module in the place of ``token`` has no table."""
        rows = getattr(self.token, "weight", None)
        if rows is None:
            rows = getattr(self.token, "table", None)
        return getattr(rows, "dtype", None)

    def _positions(
        self,
        tokens: Tensor,
        ids: Tensor | None,
        positions: Tensor | None,
        attention_mask: Tensor | None,
        offset: int | Tensor,
        cu_seqlens: Tensor | None,
    ) -> Tensor | None:
        """The given positions, or those of the rule; None means consecutive.

        ``tokens`` are ids [batch, seq] or vectors [batch, seq, components].
        """
        if attention_mask is not None and (self.position_rule != "opt" or positions is not None):
            raise ValueError(
                "attention_mask: expected none unless position_rule is 'opt' and positions are "
                "counted"
            )
        roberta = self.position_rule == "roberta" and ids is not None
        if isinstance(offset, Tensor) or cu_seqlens is not None:
            if roberta or attention_mask is not None:
                if cu_seqlens is not None:
                    raise ValueError("cu_seqlens: expected none where padding is counted")
                raise ValueError(
                    f"offset: expected a number where padding is counted, got {list(offset.shape)}"  # type: ignore[union-attr]
                )
            return positions_from(offset, positions, tokens, 0, 1, cu_seqlens)
        if positions is not None:
            if offset != 0:
                raise ValueError(f"offset: expected 0 where positions are given, got {offset}")
            return positions
        if attention_mask is not None:
            check_tensors(attention_mask=attention_mask)
            length = offset + tokens.shape[-1 if ids is not None else 1]
            if attention_mask.dim() == 0 or attention_mask.shape[-1] != length:
                raise ValueError(
                    f"attention_mask: expected [batch, offset + seq] with offset + seq {length}, "
                    f"got {list(attention_mask.shape)}"
                )
            return functional.opt_positions(attention_mask, past_length=offset)
        if roberta:
            return functional.roberta_positions(ids, self._padding_id, past_length=offset)  # type: ignore[arg-type]
        return None

    def _plain_parts(self, with_token: bool) -> dict[str, Any] | None:
        """The kernel's arguments, from the submodules' parameters.

        None: the kernel cannot replace the calls of the submodules, because one of them is of
        another type, has hooks, an option that the kernel lacks, or a parameter that is not a plain
        tensor.
        """
        module: Any = self._modules.get  # attributes that are modules are slow to look up
        token, position, token_type, norm = map(module, ("token", "position", "token_type", "norm"))
        parts: dict[str, Any] = {}
        if with_token:
            if not (is_plain(token, TABLES) and has_plain_rows(token)):
                return None
            parts = {
                "token": token.weight,
                "scale": token.scale if type(token) is TokenEmbedding else 1.0,
                "padding_idx": token.padding_idx,
                "gradient": "rows" if token.sparse else "dense",
            }
        if position is not None:
            if not is_plain(position, POSITIONS) or position.layout != "bsd":
                return None
            if type(position) is LearnedPositionalEmbedding:
                parts["position"] = position.weight
                parts["first_row"] = first = position.first_row
                if self.position_rule == "roberta":
                    parts["position_padding_idx"] = first - 1
            elif position.scale is None and not position.spec.block_texts:
                parts["sinusoid"] = position.spec
            else:
                return None
        if token_type is not None:
            if not (is_plain(token_type, TABLES) and is_simple(token_type)):
                return None
            parts["token_type"] = token_type.weight
        if norm is not None:
            if not is_plain(norm, NORMS) or norm.normalized_shape != (self.embedding_dim,):
                return None
            parts |= norm_parts(norm, self._dtype)
        return parts

    def _vectors(self, ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Token rows [batch, seq, embedding_dim], from calls of token and projection."""
        rows = self.token(ids) if inputs_embeds is None else inputs_embeds
        return rows if self.token_dim is None else self.projection(rows)  # type: ignore[misc]

    def _call_parts(
        self,
        ids: Tensor | None,
        inputs_embeds: Tensor | None,
        positions: Tensor | None,
        types: Tensor | None,
        offset: int,
    ) -> Tensor:
        """The normalised sum, computed by calling each submodule; refuses what the kernel does."""
        result = self._vectors(ids, inputs_embeds)
        shape = result.shape[:-1]
        if len(shape) != 2:
            raise ValueError(f"ids: expected [batch, seq], got {list(shape)}")
        if self.token_type is not None:
            if types is None:
                types = torch.zeros(shape, dtype=torch.int64, device=result.device)
            check_tensors(types=types)
            if types.shape != shape:
                found = list(types.shape)
                raise ValueError(f"types: expected the shape of ids, {list(shape)}, got {found}")
            result = result + self.token_type(types)
        elif types is not None:
            raise ValueError("types: expected none where there is no table of token types")
        if self.position is not None:
            result = self.position(result, positions, offset=offset)
        elif positions is not None:
            raise ValueError(
                "positions: expected none where there is no table of positions and no sinusoid"
            )
        return result if self.norm is None else self.norm(result)

    @classmethod
    def from_huggingface(cls, model_or_path: Any) -> InputEmbedding:
        """Copies the input layer of a ``transformers`` model; results are the same.

        Families: BERT, RoBERTa (XLM-RoBERTa, CamemBERT), DistilBERT, ELECTRA, ALBERT, GPT-2, OPT,
        M2M100 (NLLB), NLLB-MoE, FSMT. Encoder-decoder models give the encoder's layer. The module's
        ``position_rule`` treats padding as RoBERTa, fairseq and OPT do; pass OPT's attention mask
        to ``forward``. GPT-2's token types, which are rows of its token table, are not supported.

        Args:
            model_or_path: A ``transformers`` model with or without a head, or a folder or name for
                ``AutoModel.from_pretrained``. From a folder with safetensors, only the input layer
                is read, in the file's dtype and without transformers.

        Raises:
            TypeError: The argument is neither a model nor a path or name.
            ValueError: The model belongs to another family, or a tensor is missing or has another
                shape.

        Examples:
            >>> import posembed as pe
            >>> from transformers import BertConfig, BertModel
            >>> embed = pe.InputEmbedding.from_huggingface(BertModel(BertConfig()))
        """
        layer = input_families.read(model_or_path)
        embed = cls(**layer.options)
        with torch.no_grad():
            for name, value in layer.parameters.items():
                parameter = embed.get_parameter(name)
                if parameter.shape != value.shape:
                    expected, found = list(parameter.shape), list(value.shape)
                    raise ValueError(f"{name}: expected {expected}, got {found}")
                parameter.copy_(value).requires_grad_(value.requires_grad)
        return embed.train(layer.training)


def either(name: str, ours: Tensor | None, other: str, theirs: Tensor | None) -> Tensor | None:
    """An argument that has two names."""
    if theirs is None:
        return ours
    if ours is not None:
        raise ValueError(f"{other}: expected none beside {name}, which it is")
    return theirs


def _check_rule(rule: str, positions: str | None, padding_idx: int | None) -> None:
    one_of("position_rule", rule, "consecutive", "roberta", "opt")
    if rule != "consecutive" and positions is None:
        raise ValueError(f"position_rule: expected 'consecutive' without positions, got {rule!r}")
    if rule == "opt" and positions != "learned":
        raise ValueError(
            "position_rule: expected 'consecutive' or 'roberta' without learned positions, "
            "got 'opt'"
        )
    if rule == "roberta" and padding_idx is None:
        raise ValueError("padding_idx: expected an id where position_rule is 'roberta', got none")


def _check_vectors(vectors: Tensor, width: int, dtype: torch.dtype | None) -> None:
    """Raises for an invalid shape or dtype of inputs_embeds; autocast casts the tables."""
    if vectors.dim() != 3 or vectors.shape[-1] != width:
        found = list(vectors.shape)
        raise ValueError(f"inputs_embeds: expected [batch, seq, {width}], got {found}")
    check_computed("inputs_embeds", vectors)
    if dtype not in (None, vectors.dtype) and not torch.is_autocast_enabled(vectors.device.type):
        raise TypeError(
            f"inputs_embeds: expected the dtype of the tables, {dtype}, got {vectors.dtype}"
        )


def own_rows(vectors: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Treats vectors [..., components] as a table with a row per token: its ids, and the table."""
    shape = vectors.shape[:-1]
    count = math.prod(shape)  # Size.numel() would bind the sizes of an exported program
    rows = torch.arange(count, device=vectors.device).view(shape)
    return rows, {"token": vectors.flatten(0, -2), "gradient": "dense", "own_rows": True}


def is_plain(module: nn.Module, kinds: tuple[type, ...]) -> bool:
    """Whether the kernel can read the module's parameters instead of calling it."""
    if type(module) not in kinds or does_more(module):
        return False
    for parameter in module._parameters.values():
        if parameter is not None and is_wrapper(parameter):
            return False
    return True


def has_plain_rows(table: nn.Embedding) -> bool:
    """Whether the rows are numbers beside ids, which a lookup neither changes nor counts."""
    beside = table._parameters.get("weight") is not None and not getattr(table, "on_host", False)
    return beside and table.max_norm is None and not table.scale_grad_by_freq


def is_simple(table: nn.Embedding) -> bool:
    """Whether a token-type table has only default options."""
    scale = table.scale if type(table) is TokenEmbedding else 1.0
    plain = scale == 1.0 and table.padding_idx is None and not table.sparse
    return plain and has_plain_rows(table)


def norm_parts(
    norm: nn.LayerNorm | nn.RMSNorm, dtype: Callable[[], torch.dtype | None]
) -> dict[str, Any]:
    """The kernel's arguments for a norm of rows of a dtype."""
    if isinstance(norm, nn.LayerNorm):
        layer = {"norm_weight": norm.weight, "norm_bias": norm.bias}
        return {"norm": "layer", "eps": norm.eps, **layer}
    eps = norm.eps
    if eps is None:  # torch's RMSNorm then uses the epsilon of its compute dtype
        wide = torch.float64 if dtype() == torch.float64 else torch.float32
        eps = torch.finfo(wide).eps
    return {"norm": "rms", "eps": eps, "norm_weight": norm.weight}


def _position(
    kind: str | None,
    max_positions: int | None,
    embedding_dim: int,
    rows: dict[str, Any],
    place: dict[str, Any],
) -> Position | None:
    one_of("positions", kind, "learned", "sinusoidal", None)
    if kind == "learned":
        if max_positions is None:
            raise ValueError("max_positions: expected a number for learned positions, got none")
        return LearnedPositionalEmbedding(max_positions, embedding_dim, **rows, **place)
    if max_positions is not None:
        raise ValueError(
            f"max_positions: expected none without learned positions, got {max_positions}"
        )
    if kind is None:
        return None
    fairseq: dict[str, Any] = {}
    if rows["_padding_row"] is not None:
        fairseq = {"preset": "fairseq", "padding_idx": rows["_padding_row"]}
    return SinusoidalPositionalEmbedding(embedding_dim, **fairseq, **place)
