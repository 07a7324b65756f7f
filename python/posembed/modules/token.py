"""TokenEmbedding: a table with a learned row for each id of a vocabulary."""

from __future__ import annotations

import functools
import inspect
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from posembed import functional, pretrained
from posembed.functional import Device, Gradient, Initialization
from posembed.functional._token import looked_up, padding_row
from posembed.glue.gate import check_tensors
from posembed.glue.other_names import check_options
from posembed.glue.sharding import PLAIN, is_sharded
from posembed.glue.tracers import Leaf
from posembed.glue.validation import finite, flag, not_negative, one_of, whole, written
from posembed.tables import gguf
from posembed.tables.file_table import FileTable
from posembed.tables.owner import Prefetching, TableOwner
from posembed.tables.quantized import QuantizedTable
from posembed.tables.table import Table
from posembed.tables.vocabulary import Rows, change_rows, row_ids, taken

# How from_file keeps a table: as numbers, as codes, or in the file.
Keep = Literal["numbers", "codes", "file"]
Owner = TypeVar("Owner", bound=TableOwner)


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


def table_from_file(path: str | os.PathLike[str], **reading: Unpack[TableOptions]) -> Tensor:
    """The table that :meth:`TokenEmbedding.from_file` reads."""
    check_options("from_file", reading, TableOptions.__annotations__)
    given: Any = reading
    tensor, dtype = given.get("tensor"), given.get("dtype")
    by_word = [name for name in ("vocabulary", "words") if given.get(name) is not None]
    if given.get("fallback") is not None and "vocabulary" not in by_word:
        raise ValueError("fallback: expected none without a vocabulary")
    one_of("missing", given.get("missing", "mean"), "mean", "zero", "random", "error")
    if gguf.is_gguf(path):
        if by_word:
            raise ValueError(f"{by_word[0]}: expected none for a GGUF file, whose rows are ids")
        return gguf.GgufFile(path).table(tensor, dtype)
    names = ("words", "unicode_errors", "on_bad_row")
    opening = {name: given.pop(name) for name in names if name in given}
    file = pretrained.open_vectors(path, **opening)
    table = pretrained.token_rows(file, tensor, dtype, by_word=bool(by_word))
    if table is None and "vocabulary" in by_word:
        table = file.rows(**given).vectors
    elif table is None:
        table = file.table(tensor, dtype, progress=given.get("progress"))
    if opening.get("on_bad_row") == "skip":
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
    freeze = flag("freeze", freeze)
    if keep == "numbers":
        return None
    one_of("keep", keep, "numbers", "codes", "file")
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
        most = None if max_norm is None else not_negative("max_norm", max_norm)
        order = norm_type if norm_type == math.inf else finite("norm_type", norm_type)
        sizes, norm = (num_embeddings, embedding_dim, padding_idx), (most, order)
        of_rows = (scale_grad_by_freq, self.gradient == "rows")
        super().__init__(*sizes, *norm, *of_rows, _weight, _freeze, device, dtype)

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
        check_matrix(embeddings)
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
            _freeze=flag("freeze", freeze),
        )

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
        try:
            inspect.signature(cls.from_pretrained).bind(None, freeze, **options)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}.from_file: {error}") from None
        others: Any = {"vocabulary": vocabulary, "words": words, "fallback": fallback}
        kept = kept_table(path, keep, tensor, dtype, freeze, **others)
        if kept is not None:
            return over_table(lambda weight: cls.from_pretrained(weight, True, **options), kept)
        table = table_from_file(
            path,
            tensor=tensor,
            dtype=dtype,
            unicode_errors=unicode_errors,
            on_bad_row=on_bad_row,
            missing=missing,
            progress=progress,
            **others,
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

    def with_embeddings(self, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """Looks up ids, and puts features in the places of a mask: those of images among tokens.

        Every row of the result is written once. The number of features is checked.

        Args:
            ids: int32 or int64 [...]. Those in places of the mask are not read.
            features: Floating-point [features, embedding_dim] in the dtype of the table, under
                autocast in any. They are not scaled, as in transformers.
            mask: bool, like ids: the places of the features, in order.

        Returns:
            [..., embedding_dim] in the dtype of the table. Gradients flow to table and features.

        Raises:
            ValueError: Shapes are incompatible, or there are more or fewer features than places (on
                CUDA a later call raises IndexError for that), or the module has ``max_norm`` or
                ``scale_grad_by_freq``.
            TypeError: A dtype is not supported.
            IndexError: An id is outside the table.

        Examples:
            >>> import torch, posembed as pe
            >>> token = pe.TokenEmbedding(100, 8)
            >>> ids, image = torch.tensor([[5, -1, -1, 7]]), torch.randn(2, 8)
            >>> x = token.with_embeddings(ids, image, ids == -1)
            >>> torch.equal(x[0, 1:3], image)
            True
        """
        check_mask(ids, mask)
        for name in ("max_norm", "scale_grad_by_freq"):
            if value := getattr(self, name):
                raise ValueError(f"{name}: expected none beside features, got {value}")
        weight: Any = self._parameters.get("weight")
        own = type(self).forward is not TokenEmbedding.forward
        if own or type(weight) not in PLAIN or does_more(self):
            return among(self(ids.masked_fill(mask, 0)), features, mask)
        if self.on_host:
            weight = self.near("weight", ids)
        return functional.embedding_with_features(
            ids,
            weight,
            in_autocast(features, weight),
            mask,
            padding_idx=self.padding_idx,
            scale=self.scale,
            gradient=self.gradient,
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
        self._check_numbers()
        num_embeddings = whole("num_embeddings", num_embeddings)
        multiple = whole("pad_to_multiple_of", pad_to_multiple_of, 1)
        if num_embeddings > 0:
            num_embeddings = (num_embeddings + multiple - 1) // multiple * multiple
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator: expected a torch.Generator or None, got {generator!r}")
        if self.padding_idx is not None and self.padding_idx >= num_embeddings:
            expected = f"expected more than padding_idx, {self.padding_idx}"
            raise ValueError(f"num_embeddings: {expected}, got {num_embeddings}")
        kept = max(0, min(num_embeddings, self.num_embeddings))
        sources = torch.full((max(num_embeddings, 0),), -1, device="cpu")
        sources[:kept] = torch.arange(kept, device="cpu")

        def resized(rows: Tensor, how: Initialization | Tensor) -> Tensor:
            table = functional.embedding_resize(
                rows[:, None] if rows.dim() == 1 else rows,
                num_embeddings,
                how,
                covariance_scale=covariance_scale,
                generator=generator,
            )
            return table[:, 0] if rows.dim() == 1 else table

        def of_head(rows: Tensor) -> Tensor:
            given = isinstance(initialization, Tensor) or rows.dim() == 1
            return resized(rows, "mean" if given else initialization)

        change_rows(
            self, lambda rows: resized(rows, initialization), of_head, sources, head, optimizer
        )

    def select(
        self,
        rows: Rows,
        *,
        head: nn.Linear | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Keeps a part of the vocabulary, in place: row ``i`` becomes the row ``rows[i]``.

        For a model that needs one language of many, or for a tokenizer that has the same tokens in
        another order. ``weight`` becomes a new parameter: create the optimizer afterwards, or pass
        it here. ``padding_idx`` follows its row.

        Args:
            rows: The ids to keep, int32 or int64 [num_embeddings] or a list, in any order; an id
                that occurs twice has two rows.
            head: The output layer of the vocabulary, which keeps the same rows and biases. A head
                that shares ``weight`` shares the new one.
            optimizer: Its references to the old parameters are replaced. It keeps its state for
                those rows (moments, momentum).

        Raises:
            ValueError: ``rows`` is not a list or lacks ``padding_idx``, ``head`` has not one output
                for each row, ``optimizer`` does not hold the parameters or has state that is not
                per row, or ``weight`` is a DTensor that is sharded.
            TypeError: ``rows`` are not integers, ``head`` is not a ``nn.Linear``, or the table is
                not one of numbers.
            IndexError: An id is outside the table.

        Examples:
            >>> import posembed as pe, torch
            >>> token = pe.TokenEmbedding(10, 4, padding_idx=0)
            >>> row = token.weight[7].clone()
            >>> token.select([7, 3, 0])
            >>> token
            TokenEmbedding(3, 4, padding_idx=2)
            >>> torch.equal(token.weight[0], row)
            True
        """
        self._check_numbers()
        ids = row_ids(rows, self.num_embeddings)
        padding = None
        if self.padding_idx is not None:
            places = (ids == self.padding_idx).nonzero().flatten()
            if places.numel() == 0:
                raise ValueError(f"rows: expected padding_idx, {self.padding_idx}, among them")
            padding = int(places[0])
        select = functools.partial(taken, rows=ids)
        change_rows(self, select, select, ids, head, optimizer)
        self.padding_idx = padding

    def train_rows(
        self, rows: Rows | None, *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """From now on only these rows learn, those of new tokens say; others keep their bits.

        The rows become a parameter of their own, ``trained`` [rows, embedding_dim], so an optimizer
        changes no other row, not by weight decay either, and keeps state for these rows alone.
        ``weight`` still is the whole table, with the learned values, but frozen; so is the table in
        a ``state_dict``. :meth:`logits` trains the same rows; a ``nn.Linear`` that shares
        ``weight`` does not. Create the optimizer afterwards, or pass it here.

        Args:
            rows: Ids, int32 or int64 [rows] or a list; ``padding_idx`` never learns. None: all rows
                learn again, in ``weight``.
            optimizer: Its reference to the table, or to ``trained``, is replaced, and its state for
                rows that go on learning is kept.

        Raises:
            ValueError: The module has ``max_norm`` or ``scale_grad_by_freq`` or is on the host,
                ``optimizer`` does not hold the table, or ``weight`` is a DTensor: call this before
                the table is sharded.
            TypeError: ``rows`` are not integers, or the module is a subclass or has codes.
            IndexError: An id is outside the table.

        Examples:
            >>> import posembed as pe, torch
            >>> token = pe.TokenEmbedding(10, 4)
            >>> token.resize(12)
            >>> token.train_rows(range(10, 12))
            >>> optimizer = torch.optim.AdamW(token.parameters(), weight_decay=0.1)
            >>> before = token.weight.clone()
            >>> token(torch.arange(12)).square().sum().backward()
            >>> optimizer.step()
            >>> (token.weight == before).all(1).tolist() == [True] * 10 + [False] * 2
            True
        """
        from posembed.tables import trained_rows

        trained_rows.train_rows(self, rows, optimizer)

    def freeze_rows(self, rows: Rows, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """From now on these rows do not learn; :meth:`train_rows` of all others.

        Args:
            rows: Ids, int32 or int64 [rows] or a list.
            optimizer: As for :meth:`train_rows`.

        Raises:
            ValueError, TypeError, IndexError: As :meth:`train_rows`.

        Examples:
            >>> import posembed as pe, torch
            >>> token = pe.TokenEmbedding(10, 4)
            >>> token.freeze_rows(range(8))
            >>> token.trained.shape
            torch.Size([2, 4])
        """
        learns = torch.ones(self.num_embeddings, dtype=torch.bool, device="cpu")
        learns[row_ids(rows, self.num_embeddings)] = False
        self.train_rows(learns.nonzero().flatten(), optimizer=optimizer)

    def _check_numbers(self) -> None:
        if self._parameters.get("weight", self) is None:
            raise TypeError("weight: expected a table of numbers, got none")

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        first = f"{self.num_embeddings}, {self.embedding_dim}"
        usual = {"padding_idx": None, "max_norm": None, "norm_type": 2, "scale_grad_by_freq": False}
        return written(self, first, **usual, scale=1, gradient="dense")


def check_mask(ids: Tensor, mask: Tensor) -> None:
    """Raises an error unless ``mask`` has the places of features among ids."""
    check_tensors(ids=ids, mask=mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected bool, got {mask.dtype}")
    if mask.shape != ids.shape:
        expected, found = list(ids.shape), list(mask.shape)
        raise ValueError(f"mask: expected the shape of ids, {expected}, got {found}")


def in_autocast(features: Tensor, table: Tensor) -> Tensor:
    """Features in the dtype of a table, which autocast may have changed; otherwise as they are."""
    check_tensors(features=features)
    autocast = torch.is_autocast_enabled(table.device.type)
    return features.to(table.dtype) if autocast else features


def does_more(module: nn.Module) -> bool:
    """Whether a call does more than ``forward`` of the module's class."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    hooks = hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def among(rows: Tensor, features: Tensor, mask: Tensor) -> Tensor:
    """Rows [..., embedding_dim] with features in the places of a mask [...]."""
    table = rows.flatten(0, mask.dim() - 1).flatten(1)  # a row for each token
    ids = torch.arange(mask.numel(), device=mask.device).view(mask.shape)
    return functional.embedding_with_features(ids, table, in_autocast(features, table), mask)


@torch.fx.wrap
def tied_logits(token: TokenEmbedding, hidden: Tensor) -> Tensor:
    """:meth:`TokenEmbedding.logits` as a function, so that torch.fx keeps the call."""
    if token.weight is None:
        raise TypeError("weight: expected a table of numbers, got none: table.dequantize() it")
    if not token.weight.is_meta or hidden.is_meta:
        return product(hidden, token.weight)
    # accelerate has offloaded the table, and its hook loads it only for calls of the module.
    hook: Any = getattr(token, "_hf_hook", None)
    if hook is None:
        raise ValueError(
            f"weight: expected it on {hidden.device}, got the meta device: load the table first"
        )
    (hidden,), _ = hook.pre_forward(token, hidden)
    return hook.post_forward(token, product(hidden, token.weight))  # type: ignore[no-any-return]


def product(hidden: Tensor, weight: Tensor) -> Tensor:
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


def check_matrix(embeddings: Tensor) -> None:
    """Raises ValueError for what is no table, TypeError for a dtype without arithmetic."""
    check_tensors(embeddings=embeddings)
    if embeddings.dim() != 2:
        shape = list(embeddings.shape)
        raise ValueError(f"embeddings: expected [num_embeddings, embedding_dim], got {shape}")
    check_computed("embeddings", embeddings, "; from_file converts to its dtype=")


def check_computed(name: str, tensor: Tensor, hint: str = "") -> None:
    """Raises TypeError for a dtype that does not support arithmetic, such as float8."""
    if tensor.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        expected = "float32, float64, bfloat16 or float16"
        raise TypeError(f"{name}: expected {expected}, got {tensor.dtype}{hint}")


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a negative size or one that is not a whole number."""
    for name, size in sizes.items():
        whole(name, size, 0)


def check_table_options(num_embeddings: int, padding_idx: int | None, gradient: str) -> None:
    """Raises ValueError for a padding row outside the table, or an unknown gradient form."""
    outside = padding_idx is not None and not (
        -num_embeddings <= whole("padding_idx", padding_idx) < num_embeddings
    )
    if outside:
        allowed = f"{-num_embeddings} to {num_embeddings - 1}"
        raise ValueError(f"padding_idx: expected {allowed}, got {padding_idx}")
    one_of("gradient", gradient, "dense", "rows")


def scale_number(scale: float | str, embedding_dim: int) -> float:
    """Converts a scale to a number; raises ValueError if it is invalid."""
    if scale == "sqrt_dim":
        return math.sqrt(embedding_dim)
    if isinstance(scale, str):
        raise ValueError(f"scale: expected a number or 'sqrt_dim', got {scale!r}")
    return finite("scale", scale)
