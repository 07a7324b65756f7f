"""InputEmbedding: what stands before the first block of a Transformer, in one kernel each way.

Devlin et al., "BERT", arXiv:1810.04805; Vaswani et al., "Attention Is All You Need",
arXiv:1706.03762.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posembed import functional
from posembed.functional import Gradient
from posembed.learned import LearnedPositionalEmbedding
from posembed.sinusoidal import SinusoidalPositionalEmbedding
from posembed.token import TokenEmbedding, check_sizes

Position = LearnedPositionalEmbedding | SinusoidalPositionalEmbedding


class InputEmbedding(nn.Module):
    """Adds up token, position and type rows, norms the sum and drops out: one kernel each way.

    Submodules ``token``, ``position``, ``token_type`` and ``norm`` hold the parameters; those that
    the options leave out are None.

    Args:
        num_embeddings: Rows of the token table.
        embedding_dim: Components of a row.
        positions: "learned", "sinusoidal", or None.
        max_positions: Rows of the position table, for learned positions.
        num_types: Rows of the table of token types (segments); 0: there is none.
        scale: Multiplies the token rows; "sqrt_dim" is the square root of embedding_dim.
        norm: "layer" for LayerNorm, "rms" for RMSNorm, or None.
        eps: Added to the norm's variance.
        dropout: Probability with which training drops a component of the result. The mask follows
            ``torch.manual_seed`` and depends on nothing else: neither threads nor device.
        padding_idx: A token row that starts as zeros and gets no gradient.
        gradient: Form of the token table's gradient, "dense" or "rows".
        device, dtype: Of all parameters.

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
        eps: float = 1e-5,
        dropout: float = 0.0,
        padding_idx: int | None = None,
        gradient: Gradient = "dense",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_types=num_types)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout: expected 0 to 1, got {dropout}")
        if norm not in ("layer", "rms", None):
            raise ValueError(f"norm: expected 'layer', 'rms' or None, got {norm!r}")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dropout = dropout
        self.token = TokenEmbedding(
            num_embeddings,
            embedding_dim,
            padding_idx,
            scale=scale,
            gradient=gradient,
            **place,
        )
        self.position = _position(positions, max_positions, embedding_dim, place)
        self.token_type = TokenEmbedding(num_types, embedding_dim, **place) if num_types else None
        norms: dict[str, Any] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
        self.norm: nn.LayerNorm | nn.RMSNorm | None = None
        if norm is not None:
            self.norm = norms[norm](embedding_dim, eps=eps, **place)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        *,
        offset: int = 0,
    ) -> Tensor:
        """Ids to vectors.

        Args:
            ids: int32 or int64 [batch, seq].
            positions: int32 or int64 [seq] or [batch, seq]; None: ``offset``, ``offset + 1``, and
                so on.
            types: int32 or int64 [batch, seq]; None: type 0.
            offset: Position of the first token where no positions are given.

        Returns:
            [batch, seq, embedding_dim].

        Raises:
            ValueError: Shapes do not fit.
            TypeError: A dtype is not supported.
            IndexError: An id, position or type is outside its table.
        """
        table: dict[str, Any] = {}
        if isinstance(self.position, LearnedPositionalEmbedding):
            table = {"position": self.position.weight, "first_row": self.position.first_row}
        elif self.position is not None:
            table = {"sinusoid": self.position.spec}
        if self.token_type is not None:
            table["token_type"] = self.token_type.weight
        norm: dict[str, Any] = {}
        if self.norm is not None:
            norm = {"norm": "rms", "norm_weight": self.norm.weight, "eps": self.norm.eps}
        if isinstance(self.norm, nn.LayerNorm):
            norm |= {"norm": "layer", "norm_bias": self.norm.bias}
        return functional.input_embedding(
            ids,
            self.token.weight,
            positions=positions,
            types=types,
            offset=offset,
            scale=self.token.scale,
            dropout=self.dropout if self.training else 0.0,
            padding_idx=self.token.padding_idx,
            gradient=self.token.gradient,
            **table,
            **norm,
        )

    @classmethod
    def from_huggingface(cls, model_or_path: Any) -> InputEmbedding:
        """The input layer of a BERT, DistilBERT or GPT-2 model: parameters copied, same output.

        Args:
            model_or_path: A ``transformers`` model with or without a head, or a folder or name that
                ``AutoModel.from_pretrained`` takes.

        Raises:
            ValueError: The model is of another family.

        Examples:
            >>> import posembed as pe
            >>> from transformers import BertConfig, BertModel
            >>> embed = pe.InputEmbedding.from_huggingface(BertModel(BertConfig()))
        """
        model = model_or_path
        if isinstance(model, (str, Path)):
            from transformers import AutoModel

            model = AutoModel.from_pretrained(model)
        model = model.base_model
        family = model.config.model_type
        if family not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise ValueError(f"model_or_path: expected a model of {known}, got {family!r}")
        return _FAMILIES[family](model).train(model.training)


def _position(
    kind: str | None, max_positions: int | None, embedding_dim: int, place: dict[str, Any]
) -> Position | None:
    if kind not in ("learned", "sinusoidal", None):
        raise ValueError(f"positions: expected 'learned', 'sinusoidal' or None, got {kind!r}")
    if kind == "learned":
        if max_positions is None:
            raise ValueError("max_positions: expected a number for learned positions, got none")
        return LearnedPositionalEmbedding(max_positions, embedding_dim, **place)
    if max_positions is not None:
        raise ValueError(
            f"max_positions: expected none without learned positions, got {max_positions}"
        )
    return SinusoidalPositionalEmbedding(embedding_dim, **place) if kind else None


def _copy_tables(
    token: nn.Embedding,
    position: nn.Embedding,
    token_type: nn.Embedding | None = None,
    norm: nn.LayerNorm | None = None,
    dropout: float = 0.0,
) -> InputEmbedding:
    """An InputEmbedding of these tables' sizes, with their values."""
    embed = InputEmbedding(
        *token.weight.shape,
        max_positions=position.num_embeddings,
        num_types=token_type.num_embeddings if token_type is not None else 0,
        norm="layer" if norm is not None else None,
        eps=norm.eps if norm is not None else 1e-5,
        dropout=dropout,
        padding_idx=token.padding_idx,
        device=token.weight.device,
        dtype=token.weight.dtype,
    )
    sources = {"token": token, "position": position, "token_type": token_type, "norm": norm}
    with torch.no_grad():
        for name, source in sources.items():
            if source is None:
                continue
            for key, value in source.named_parameters():
                parameter = embed.get_parameter(f"{name}.{key}")
                parameter.copy_(value).requires_grad_(value.requires_grad)
    return embed


def _bert(model: Any) -> InputEmbedding:
    parts = model.embeddings
    return _copy_tables(
        parts.word_embeddings,
        parts.position_embeddings,
        getattr(parts, "token_type_embeddings", None),  # DistilBERT has none
        parts.LayerNorm,
        parts.dropout.p,
    )


def _gpt2(model: Any) -> InputEmbedding:
    return _copy_tables(model.wte, model.wpe, dropout=model.drop.p)


_FAMILIES = {"bert": _bert, "distilbert": _bert, "gpt2": _gpt2}
