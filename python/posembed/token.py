"""TokenEmbedding: a table with a learned row for each id of a vocabulary."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from posembed import _gguf, functional, pretrained
from posembed._leaf import Leaf
from posembed._memory import prefer_huge_pages
from posembed._table_owner import Prefetching, TableOwner
from posembed._validation import finite, flag, whole
from posembed.file_table import FileTable
from posembed.functional import Device, Gradient, Initialization
from posembed.functional._gate import check_tensors
from posembed.functional._token import looked_up, padding_row
from posembed.quantized import QuantizedTable
from posembed.sharding import is_sharded, zero_row
from posembed.tables import Table

# How from_file keeps a table: as numbers, as codes, or in the file.
Keep = Literal["numbers", "codes", "file"]
Owner = TypeVar("Owner", bound=TableOwner)

# The dtypes of tables.
COMPUTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def warn_of_skipped(file: pretrained.VectorFile) -> None:
    """Warns of skipped rows: their count, and the first of them."""
    skipped = file.skipped()
    if skipped.count == 0:
        return
    named = ", ".join(f"row {row.row} {row.word!r}: {row.reason}" for row in skipped.rows[:3])
    more = ", ..." if skipped.count > 3 else ""
    message = f"{file.path}: skipped {skipped.count} rows that cannot be read: {named}{more}"
    warnings.warn(message, stacklevel=4)


class TableOptions(TypedDict, total=False):
    """Options of :meth:`TokenEmbedding.from_file` that say how a table is read."""

    tensor: str | None
    vocabulary: pretrained.Vocabulary | None
    words: pretrained.Vocabulary | None
    unicode_errors: Literal["strict", "replace"]
    on_bad_row: pretrained.OnBadRow
    missing: pretrained.Missing
    fallback: Callable[[str], str] | None
    dtype: torch.dtype | None
    progress: bool | None


def table_from_file(
    path: str | os.PathLike[str],
    *,
    tensor: str | None = None,
    vocabulary: pretrained.Vocabulary | None = None,
    words: pretrained.Vocabulary | None = None,
    unicode_errors: Literal["strict", "replace"] = "strict",
    on_bad_row: pretrained.OnBadRow = "raise",
    missing: pretrained.Missing = "mean",
    fallback: Callable[[str], str] | None = None,
    dtype: torch.dtype | None = None,
    progress: bool | None = None,
) -> Tensor:
    """The table that :meth:`TokenEmbedding.from_file` reads."""
    if fallback is not None and vocabulary is None:
        raise ValueError("fallback: expected none without a vocabulary")
    if _gguf.is_gguf(path):
        if vocabulary is not None or words is not None:
            name = "words" if vocabulary is None else "vocabulary"
            raise ValueError(f"{name}: expected none for a GGUF file, whose rows are ids")
        return _gguf.GgufFile(path).table(tensor, dtype)
    file = pretrained.open_vectors(
        path, words=words, unicode_errors=unicode_errors, on_bad_row=on_bad_row
    )
    by_word = vocabulary is not None or words is not None
    by_id = pretrained.token_rows(file, tensor, dtype, by_word=by_word)
    if by_id is not None:
        table = by_id
    elif vocabulary is None:
        table = file.table(tensor, dtype, progress=progress)
    else:
        table = file.rows(
            vocabulary,
            tensor=tensor,
            dtype=dtype,
            missing=missing,
            fallback=fallback,
            progress=progress,
        ).vectors
    if on_bad_row == "skip":
        warn_of_skipped(file)
    return table


def kept_table(
    path: str | os.PathLike[str],
    keep: Keep,
    tensor: str | Sequence[str] | None,
    dtype: torch.dtype | None,
    freeze: bool,
    **others: Any,
) -> Table | None:
    """The table of a file that is kept as codes or in the file; None for one of numbers.

    ``others`` are options that only tables of numbers have, by their names.
    """
    if keep == "numbers":
        return None
    if keep not in ("codes", "file"):
        raise ValueError(f"keep: expected 'numbers', 'codes' or 'file', got {keep!r}")
    if not freeze:
        raise ValueError(f"freeze: expected True with keep={keep!r}, got False")
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name}: expected none with keep={keep!r}")
    kind = QuantizedTable.from_file if keep == "codes" else FileTable
    return kind(path, tensor, dtype=dtype)


def over_table(make: Callable[[Tensor], Owner], table: Table) -> Owner:
    """The module that ``make`` returns for a table of numbers, with another table."""
    shape = (table.num_embeddings, table.embedding_dim)
    module = make(torch.empty(shape, dtype=table.dtype, device="meta"))
    module.use_table(table)
    return module


def within(ids: Tensor, rows: int) -> Tensor:
    """Ids [count] with out-of-range ids replaced, because a CUDA call cannot reject them.

    Each out-of-range id becomes another of the given ids, or 0 if there is none. The result is
    one-dimensional, because torch needs that to find equal ids on CUDA.
    """
    ids = ids.reshape(-1)
    if not ids.is_cuda or ids.numel() == 0:
        return ids
    valid = (ids >= 0) & (ids < rows)
    return torch.where(valid, ids, (ids * valid).amax())


class TokenEmbedding(Leaf, Prefetching, nn.Embedding):
    """``torch.nn.Embedding`` with reproducible gradients, a scale and a tied output head.

    Gradients of every dtype are summed in float32 and rounded once. They are bitwise identical for
    any number of threads.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq: As in
            ``torch.nn.Embedding``.
        sparse: Same as ``gradient="rows"``.
        scale: Multiplies the result; ``"sqrt_dim"`` is the square root of embedding_dim.
        gradient: "dense", or "rows" for a sparse ``weight.grad`` with each row that was looked up,
            once, for :mod:`posembed.optim`; torch's SGD and SparseAdam accept it.
        device, dtype: Device and dtype of the table.

    Raises:
        ValueError: A negative size, a ``padding_idx`` outside the table, an unknown ``scale`` or
            ``gradient``, or ``gradient="dense"`` beside ``sparse=True``.

    Examples:
        >>> import torch, posembed as pe
        >>> token = pe.TokenEmbedding(30522, 768, padding_idx=0, scale="sqrt_dim")
        >>> token(torch.tensor([[101, 2023, 102]])).shape
        torch.Size([1, 3, 768])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        scale: float | Literal["sqrt_dim"] = 1.0,
        gradient: Gradient | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        _weight: Tensor | None = None,
        _freeze: bool = False,
    ) -> None:
        check_sizes(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        sparse = flag("sparse", sparse)
        if sparse and gradient not in (None, "rows"):
            raise ValueError(
                "gradient: expected 'rows' with sparse=True, which means the same, got "
                f"{gradient!r}"
            )
        if gradient is None:
            gradient = "rows" if sparse else "dense"
        check_table_options(num_embeddings, padding_idx, gradient)
        scale_grad_by_freq = flag("scale_grad_by_freq", scale_grad_by_freq)
        self.scale = scale_number(scale, embedding_dim)
        self.gradient: Gradient = gradient
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            self.gradient == "rows",
            _weight,
            _freeze,
            device,
            dtype,
        )

    @property
    def embed_scale(self) -> float:
        """``scale``, under the name that PEFT reads to scale an adapter's rows too."""
        return self.scale

    @property
    def sparse(self) -> bool:
        """Whether ``gradient`` is "rows"."""
        return self.gradient == "rows"

    @sparse.setter
    def sparse(self, value: bool) -> None:
        self.gradient = "rows" if value else "dense"

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        scale: float | Literal["sqrt_dim"] = 1.0,
        gradient: Gradient | None = None,
    ) -> TokenEmbedding:
        """A module that shares ``embeddings`` [num_embeddings, embedding_dim].

        Args:
            embeddings: The table.
            freeze: Freeze the table: no gradient.
            padding_idx: The row that gets no gradient; its values stay as they are.
            max_norm: As in ``torch.nn.Embedding``.
            norm_type: The p of the p-norm for ``max_norm``.
            scale_grad_by_freq: Divide a row's gradient by its id's count in the batch.
            sparse: Same as ``gradient="rows"``.
            scale: Multiplies the result.
            gradient: "dense" or "rows".

        Raises:
            ValueError: ``embeddings`` is not a matrix.
            TypeError: Its dtype does not support arithmetic, such as float8.
        """
        check_tensors(embeddings=embeddings)
        if embeddings.dim() != 2:
            shape = list(embeddings.shape)
            raise ValueError(f"embeddings: expected [num_embeddings, embedding_dim], got {shape}")
        if embeddings.dtype not in COMPUTED:
            raise TypeError(
                f"embeddings: expected float32, float64, bfloat16 or float16, got "
                f"{embeddings.dtype}; from_file converts to its dtype="
            )
        rows, columns = embeddings.shape
        return cls(
            rows,
            columns,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            scale=scale,
            gradient=gradient,
            _weight=embeddings,
            _freeze=freeze,
        )

    def reset_parameters(self) -> None:
        """Draws the table from N(0, 1) and zeroes the row of padding_idx."""
        prefer_huge_pages(self.weight)
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            zero_row(self.weight, self.padding_idx)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        tensor: str | None = None,
        vocabulary: pretrained.Vocabulary | None = None,
        words: pretrained.Vocabulary | None = None,
        unicode_errors: Literal["strict", "replace"] = "strict",
        on_bad_row: pretrained.OnBadRow = "raise",
        missing: pretrained.Missing = "mean",
        fallback: Callable[[str], str] | None = None,
        dtype: torch.dtype | None = None,
        freeze: bool = True,
        progress: bool | None = None,
        keep: Keep = "numbers",
        **options: Any,
    ) -> TokenEmbedding:
        r"""A module with vectors from a file that :func:`posembed.pretrained.open_vectors` reads.

        The rows of a model2vec file are those of its token ids, ``embeddings[mapping] * weights``.
        Codes of quantised checkpoints become numbers, and so do those of a GGUF model's token
        table, if the gguf package is installed; its rows are the ids of the model's own tokenizer,
        so it takes no words.

        Args:
            path: safetensors (or their index), word2vec, fastText .vec, GloVe or GGUF.
            tensor: Name of the table, for files with several; default for GGUF:
                "token_embd.weight".
            vocabulary: Words in id order, a dict from words to ids, or a tokenizer; default: all
                rows of the file.
            words: The word of each row, for safetensors, which store no words: for example the
                model's own tokenizer. ``vocabulary`` can then select rows.
            unicode_errors: For words that are not valid UTF-8: "strict" raises, "replace" replaces
                invalid bytes with U+FFFD.
            on_bad_row: For rows that cannot be read: "raise", or "skip" to omit them with a
                warning that counts them.
            missing: For words that are not in the file: "mean" of the rows that were found,
                "zero", "random" with the mean and the spread of those rows, or "error".
            fallback: Gives another word for a word of the vocabulary that is not in the file, such
                as ``str.lower``; the file's words are then read twice.
            dtype: Dtype of the table; default: the file's, float32 with scales.
            freeze: Freeze the table: no gradient.
            progress: Show a progress bar; default: for a large file, on a terminal.
            keep: "numbers"; "codes" for a :class:`posembed.QuantizedTable` of the file's codes,
                which are not widened; or "file" for a :class:`posembed.FileTable`, whose rows are
                read when they are looked up. The last two are frozen, and take no vocabulary.
            options: Options of :meth:`from_pretrained`.

        Raises:
            FileFormatError: The file is broken.
            ValueError: Options do not match the file.
            TypeError: :meth:`from_pretrained` has no such option (raised before the file is read);
                the table has a dtype such as float8, and no ``dtype`` says what to convert it to;
                or its codes are of a format that is not read.
            ImportError: For codes in GGUF: the gguf package is not installed.

        Examples:
            >>> import pathlib, tempfile, posembed as pe, torch
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "tiny.txt")
            ...     _ = path.write_text("the 0.5 0.25\ncat 1 2\n")
            ...     token = pe.TokenEmbedding.from_file(path, vocabulary=["cat", "the"])
            >>> token(torch.tensor([0]))
            tensor([[1., 2.]])
        """
        # Check options before reading a large file.
        inspect.signature(cls.from_pretrained).bind(None, freeze, **options)
        others = {"vocabulary": vocabulary, "words": words, "fallback": fallback}
        kept = kept_table(path, keep, tensor, dtype, freeze, **others)
        if kept is not None:
            return over_table(lambda weight: cls.from_pretrained(weight, True, **options), kept)
        table = table_from_file(
            path,
            tensor=tensor,
            vocabulary=vocabulary,
            words=words,
            unicode_errors=unicode_errors,
            on_bad_row=on_bad_row,
            missing=missing,
            fallback=fallback,
            dtype=dtype,
            progress=progress,
        )
        return cls.from_pretrained(table, freeze, **options)

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up ids: int32 or int64 [...] -> [..., embedding_dim]; :func:`functional.embedding`.

        Raises:
            ValueError: The table is a DTensor and ``max_norm`` is set.
        """
        weight: Tensor | None = self._parameter("weight")
        if weight is None:
            return self.table(ids, self.scale)  # type: ignore[no-any-return]
        if self.max_norm is not None:
            if is_sharded(self.weight):
                raise ValueError(f"max_norm: expected none for a DTensor, got {self.max_norm:g}")
            with torch.no_grad():
                table = self.weight.detach()
                functional.embedding(ids, table[:, :1])  # raises for bad ids before any write
                known = within(ids, self.num_embeddings)
                if known.numel() > 0:
                    torch.embedding_renorm_(table, known, self.max_norm, self.norm_type)
        if self.on_host:
            weight = self.near("weight", ids)
        padding = padding_row(self.padding_idx, weight)
        return looked_up(
            ids, weight, padding, self.scale, self.scale_grad_by_freq, -1, self.gradient
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Uses the table as a tied output head: [..., embedding_dim] -> [..., num_embeddings].

        Raises:
            ValueError: The last dimension of ``hidden`` is not embedding_dim, or the table is on
                the meta device and no accelerate hook loads it.
            TypeError: ``hidden`` has another dtype outside autocast.
        """
        return tied_logits(self, hidden)  # type: ignore[no-any-return]

    def resize(
        self,
        num_embeddings: int,
        initialization: Initialization | Tensor = "mean",
        *,
        pad_to_multiple_of: int = 1,
        head: nn.Linear | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        covariance_scale: float = 1e-9,
        generator: torch.Generator | None = None,
    ) -> None:
        """Resizes the vocabulary in place; the remaining rows do not change.

        ``weight`` becomes a new parameter: create the optimizer afterwards, or pass it here.

        Args:
            num_embeddings: The new number of rows.
            initialization: How to initialise new rows; see :func:`functional.embedding_resize`.
            pad_to_multiple_of: The number of rows is rounded up to a multiple of this one: 64 suits
                tensor cores.
            head: The output layer of the vocabulary, which is resized too. Its new rows are
                initialised as the table's, or with the mean if those are given. New biases are the
                mean. A head that shares ``weight`` shares the new one.
            optimizer: Its references to the old parameters are replaced. It keeps its state for
                the remaining rows (moments, momentum); new rows get zeros, or Rprop's initial step.
            covariance_scale: For "mean-and-covariance".
            generator: Random generator for new rows; default: torch's default generator.

        Raises:
            ValueError: ``padding_idx`` would be cut off, ``pad_to_multiple_of`` is not positive,
                ``head`` has not one output for each row, ``optimizer`` does not hold the parameters
                or has state that is not per row, or new rows have another shape.
            TypeError: ``generator`` is not a ``torch.Generator``, ``head`` is not a ``nn.Linear``.

        Examples:
            >>> import posembed as pe, torch
            >>> token = pe.TokenEmbedding(30522, 768, padding_idx=0)
            >>> token.resize(30592, "mean-and-covariance")
            >>> token
            TokenEmbedding(30592, 768, padding_idx=0)
            >>> head = torch.nn.Linear(768, 30592)
            >>> token.resize(30600, pad_to_multiple_of=64, head=head)
            >>> head
            Linear(in_features=768, out_features=30656, bias=True)
        """
        if self.weight is None:
            raise TypeError("weight: expected a table of numbers, got none")
        num_embeddings = whole("num_embeddings", num_embeddings)
        multiple = whole("pad_to_multiple_of", pad_to_multiple_of)
        if multiple < 1:
            raise ValueError(f"pad_to_multiple_of: expected 1 or more, got {multiple}")
        if num_embeddings > 0:
            num_embeddings = (num_embeddings + multiple - 1) // multiple * multiple
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator: expected a torch.Generator or None, got {generator!r}")
        if self.padding_idx is not None and self.padding_idx >= num_embeddings:
            expected = f"expected more than padding_idx, {self.padding_idx}"
            raise ValueError(f"num_embeddings: {expected}, got {num_embeddings}")
        if head is not None:
            check_head(head, self.num_embeddings)

        def resized(rows: Tensor, how: Initialization | Tensor) -> nn.Parameter:
            with torch.no_grad():
                table = functional.embedding_resize(
                    rows[:, None] if rows.dim() == 1 else rows,
                    num_embeddings,
                    how,
                    covariance_scale=covariance_scale,
                    generator=generator,
                )
            return nn.Parameter(table[:, 0] if rows.dim() == 1 else table, rows.requires_grad)

        new = {self.weight: resized(self.weight, initialization)}
        if head is not None and head.weight is not self.weight:
            given = isinstance(initialization, Tensor)
            new[head.weight] = resized(head.weight, "mean" if given else initialization)
        if head is not None and head.bias is not None:
            new[head.bias] = resized(head.bias, "mean")
        if optimizer is not None:
            replace_parameters(optimizer, new)
        if head is not None:
            head.weight = new[head.weight]
            head.bias = None if head.bias is None else new[head.bias]
            head.out_features = num_embeddings
        self.weight = new[self.weight]
        self.num_embeddings = num_embeddings

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        parts = [f"{self.num_embeddings}, {self.embedding_dim}"]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if self.max_norm is not None:
            parts.append(f"max_norm={self.max_norm:g}")
        if self.norm_type != 2:
            parts.append(f"norm_type={self.norm_type:g}")
        if self.scale_grad_by_freq:
            parts.append("scale_grad_by_freq=True")
        if self.scale != 1:
            parts.append(f"scale={self.scale:g}")
        if self.gradient == "rows":
            parts.append("gradient='rows'")
        return ", ".join(parts)


@torch.fx.wrap
def tied_logits(token: TokenEmbedding, hidden: Tensor) -> Tensor:
    """:meth:`TokenEmbedding.logits` as a function, so that torch.fx keeps the call."""
    if token.weight is None:
        raise TypeError("weight: expected a table of numbers, got none: table.dequantize() it")
    if not token.weight.is_meta or hidden.is_meta:
        return _product(hidden, token.weight)
    # accelerate has offloaded the table, and its hook loads it only for calls of the module.
    hook: Any = getattr(token, "_hf_hook", None)
    if hook is None:
        raise ValueError(
            f"weight: expected it on {hidden.device}, got the meta device: load the table first"
        )
    (hidden,), _ = hook.pre_forward(token, hidden)
    return hook.post_forward(token, _product(hidden, token.weight))  # type: ignore[no-any-return]


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden`` [..., embedding_dim] times a table; checks width and dtype first."""
    check_tensors(hidden=hidden)
    width = weight.shape[1]
    if hidden.dim() == 0 or hidden.shape[-1] != width:
        raise ValueError(
            f"hidden: expected [..., embedding_dim] with embedding_dim {width}, got "
            f"{list(hidden.shape)}"
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise TypeError(f"hidden: expected the dtype of weight, {weight.dtype}, got {hidden.dtype}")
    return nn.functional.linear(hidden, weight)


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a negative size or one that is not a whole number."""
    for name, size in sizes.items():
        if whole(name, size) < 0:
            raise ValueError(f"{name}: expected 0 or more, got {size}")


def check_table_options(num_embeddings: int, padding_idx: int | None, gradient: str) -> None:
    """Raises ValueError for a padding row outside the table, or an unknown gradient form."""
    outside = padding_idx is not None and not (
        -num_embeddings <= whole("padding_idx", padding_idx) < num_embeddings
    )
    if outside:
        allowed = f"{-num_embeddings} to {num_embeddings - 1}"
        raise ValueError(f"padding_idx: expected {allowed}, got {padding_idx}")
    if gradient not in ("dense", "rows"):
        raise ValueError(f"gradient: expected 'dense' or 'rows', got {gradient!r}")


def check_head(head: nn.Linear, num_embeddings: int) -> None:
    """Raises an error if ``head`` is no output layer of a vocabulary of that size."""
    if not isinstance(head, nn.Linear):
        raise TypeError(f"head: expected a torch.nn.Linear, got a {type(head).__name__}")
    if head.weight.shape[0] != num_embeddings:
        expected = f"expected {num_embeddings} outputs, one for each row of the table"
        raise ValueError(f"head: {expected}, got {head.weight.shape[0]}")


def replace_parameters(
    optimizer: torch.optim.Optimizer, new: Mapping[Tensor, nn.Parameter]
) -> None:
    """Replaces parameters by others that have another number of rows.

    Raises ValueError and changes nothing if the optimizer's state is not per row.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for old in new:
        if old not in groups:
            raise ValueError("optimizer: expected one that holds the table, got one that does not")
        # LBFGS keeps one state for all parameters, under the first one.
        owners = optimizer.state if isinstance(optimizer, torch.optim.LBFGS) else [old]
        for owner in owners:
            _check_rows(optimizer, optimizer.state.get(owner, {}), old.shape)
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(parameter, parameter) for parameter in group["params"]]
    for old, replacement in new.items():
        if old not in optimizer.state:
            continue
        state = optimizer.state.pop(old)
        optimizer.state[replacement] = {
            name: _with_rows(value, replacement.shape[0], _initial(optimizer, name, groups[old]))
            if isinstance(value, Tensor) and value.dim() > 0
            else value
            for name, value in state.items()
        }


def _check_rows(optimizer: torch.optim.Optimizer, state: Any, shape: torch.Size) -> None:
    """Raises ValueError for state that is neither a number nor per row of the table."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            known = value.dim() == 0 or value.shape in (shape, shape[:1])
        else:
            known = value is None or isinstance(value, (int, float, str))
        if not known:
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"optimizer: expected a state of numbers and tensors of shape {list(shape)}, got "
                f"{type(optimizer).__name__} with {name!r} of {found}"
            )


def _initial(optimizer: torch.optim.Optimizer, name: str, group: dict[str, Any]) -> float:
    """The initial value of an optimizer's state: zero, except Rprop's step."""
    steps = isinstance(optimizer, torch.optim.Rprop) and name == "step_size"
    return float(group["lr"]) if steps else 0.0


def _with_rows(state: Tensor, rows: int, initial: float) -> Tensor:
    """Resizes an optimizer's state for a table: the remaining rows, then new ones."""
    kept = min(rows, state.shape[0])
    if state.is_sparse:
        state = state.coalesce()
        stays = state.indices()[0] < kept
        return torch.sparse_coo_tensor(
            state.indices()[:, stays],
            state.values()[stays],
            (rows, *state.shape[1:]),
            check_invariants=False,  # they are valid
            is_coalesced=True,
        )
    result = state.new_full((rows, *state.shape[1:]), initial)
    result[:kept] = state[:kept]
    return result


def scale_number(scale: float | str, embedding_dim: int) -> float:
    """Converts a scale to a number; raises ValueError if it is invalid."""
    if scale == "sqrt_dim":
        return math.sqrt(embedding_dim)
    if isinstance(scale, str):
        raise ValueError(f"scale: expected a number or 'sqrt_dim', got {scale!r}")
    return finite("scale", scale)
