"""RelativePositionBias: a learned score bias for each head and distance bucket.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer"
(T5), arXiv:1910.10683. In two dimensions: Liu et al., "Swin Transformer", arXiv:2103.14030; BEiT,
arXiv:2106.08254; "Swin Transformer V2", arXiv:2111.09883.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from posembed import functional
from posembed.functional import Device, RelativeBuckets, RelativeMlp, ResamplingMethod
from posembed.functional._learned import Grid, Window, checked_grid, same_grid
from posembed.glue.tracers import Leaf
from posembed.glue.validation import flag, one_of, whole, written
from posembed.specifications.score_positions import ScorePositions, check_names


def _checked_window(name: str, window: Any, most_axes: int = 3) -> Window:
    """A window as two or three whole numbers of at least 1."""
    if most_axes == 2 or not isinstance(window, Sequence) or len(window) != 3:
        return checked_grid(name, window)
    sizes = whole(name, window[0]), whole(name, window[1]), whole(name, window[2])
    if min(sizes) < 1:
        raise ValueError(
            f"{name}: expected the numbers of frames, rows and columns, each 1 or more, "
            f"got {window!r}"
        )
    return sizes


def check_rule(module: Any, count: int) -> None:
    """Raises ValueError for options of distances that are inconsistent."""
    one_of("buckets", module.buckets, *get_args(RelativeBuckets))
    functional.relative_buckets(
        torch.zeros(0, dtype=torch.int64, device="cpu"),
        count,
        max_distance=module.max_distance,
        bidirectional=module.bidirectional,
        kind=module.buckets,
    )


def rows_of(module: Any, queries: int, keys: int, **options: Any) -> Tensor:
    """The row of each query and key by a module's rule of distances."""
    rule = {"rule": module.buckets, "max_distance": module.max_distance}
    rule |= {"bidirectional": module.bidirectional, "device": module.weight.device}
    count = module.num_buckets
    options |= {"positions_from_mask": True, **rule}
    return functional.relative_rows(queries, keys, count, **options)


class RelativePositionBias(Leaf, nn.Module):
    """A table of attention-score biases, ``weight`` [num_buckets, num_heads].

    Initialised from N(0, 0.02). T5's table is ``relative_attention_bias.weight`` of the first layer
    of its encoder (``bidirectional=True``) and of its decoder (``bidirectional=False``); all layers
    share it.

    With ``window``, tokens are the cells of a window in two dimensions, row by row, and ``weight``
    is Swin's and BEiT's ``relative_position_bias_table``; with three sizes, Video Swin's. With
    ``mlp_dim``, ``mlp`` is SwinV2's ``continuous_position_bias_mlp``, which computes the table:
    ``16 * sigmoid(mlp(distances))``.

    Args:
        num_heads: Columns of the table.
        num_buckets: Rows of the table: even for "t5" in both directions; odd,
            ``2 * max_positions - 1``, for "bert".
        max_distance: For "t5": longer distances share a bucket.
        bidirectional: Give keys after the query their own buckets.
        buckets: "t5" or "bert"; see :func:`posembed.functional.relative_buckets`.
        window: Rows and columns, or frames, rows and columns. The options above then do not apply.
        class_token: A token stands before the window's cells (BEiT).
        mlp_dim: Hidden components of SwinV2's MLP; 0: a table.
        mlp_rule: "cr": timm's MLP of Swin V2 Cr, with a bias in both layers, whose result is the
            table.
        pretrained_window: With SwinV2's MLP: the window whose largest differences count as 8;
            default: the window of the call.
        resampling: How the table of a window becomes that of another one: "bilinear" or "bicubic".
        align_corners: The corners of both tables are the same points.
        antialias: Average over all rows that a smaller table merges.
        device, dtype: Device and dtype of the table.

    Raises:
        ValueError: Options are inconsistent.

    Examples:
        >>> import torch, posembed as pe
        >>> bias = pe.RelativePositionBias(8)
        >>> query, key, value = torch.randn(3, 2, 8, 16, 64)
        >>> y = torch.nn.functional.scaled_dot_product_attention(query, key, value, bias(16))
        >>> beit = pe.RelativePositionBias(12, window=(14, 14), class_token=True)
        >>> beit().shape, beit(window=(16, 20)).shape
        (torch.Size([12, 197, 197]), torch.Size([12, 321, 321]))
    """

    # Defaults of modules that were saved before there were windows.
    window: Window | None = None
    class_token: bool = False
    mlp_rule: RelativeMlp = "swin"
    pretrained_window: Grid | None = None
    resampling: ResamplingMethod = "bilinear"
    align_corners: bool = False
    antialias: bool = False
    mlp_dim: int = 0

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        buckets: RelativeBuckets = "t5",
        window: Window | None = None,
        class_token: bool = False,
        mlp_dim: int = 0,
        mlp_rule: RelativeMlp = "swin",
        pretrained_window: Grid | None = None,
        resampling: ResamplingMethod = "bilinear",
        align_corners: bool = False,
        antialias: bool = False,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = whole("num_heads", num_heads, 0)
        self.num_buckets = whole("num_buckets", num_buckets)
        self.max_distance = whole("max_distance", max_distance)
        self.bidirectional = flag("bidirectional", bidirectional)
        self.buckets = buckets
        self.class_token = flag("class_token", class_token)
        self.mlp_dim = whole("mlp_dim", mlp_dim, 0)
        self.mlp_rule = mlp_rule
        self.resampling = resampling
        self.align_corners = flag("align_corners", align_corners)
        self.antialias = flag("antialias", antialias)
        if window is not None:
            self.window = _checked_window("window", window, most_axes=2 if mlp_dim else 3)
        if pretrained_window is not None:
            self.pretrained_window = checked_grid("pretrained_window", pretrained_window)
        self._check_window()
        if self.window is not None:
            self.num_buckets = math.prod(2 * size - 1 for size in self.window)
            self.num_buckets += 3 * self.class_token
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.mlp: nn.Sequential | None = None
        if self.mlp_dim > 0:
            self.register_parameter("weight", None)
            self.mlp = nn.Sequential(
                nn.Linear(2, mlp_dim, **options),
                nn.ReLU(),
                nn.Linear(mlp_dim, num_heads, bias=mlp_rule == "cr", **options),
            )
        else:
            self.weight = nn.Parameter(torch.empty(self.num_buckets, num_heads, **options))
        self.reset_parameters()

    def _check_window(self) -> None:
        one_of("mlp_rule", self.mlp_rule, "swin", "cr")
        if self.mlp_rule == "cr" and (self.mlp_dim == 0 or self.pretrained_window):
            raise ValueError("mlp_rule: expected 'swin' without mlp_dim or with pretrained_window")
        if self.window is None:
            if self.class_token or self.mlp_dim or self.pretrained_window:
                raise ValueError(
                    "window: expected one beside class_token, mlp_dim or pretrained_window"
                )
            check_rule(self, self.num_buckets)
            return
        one_of("resampling", self.resampling, "bicubic", "bilinear")
        if self.mlp_dim and self.class_token:
            raise ValueError("class_token: expected False beside mlp_dim")
        if self.pretrained_window and not self.mlp_dim:
            raise ValueError(
                f"pretrained_window: expected None without mlp_dim, got {self.pretrained_window}"
            )

    def reset_parameters(self) -> None:
        """Draws the table, or the weights of the MLP, from N(0, 0.02); zeroes the MLP's bias."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        query_length: int | None = None,
        key_length: int | None = None,
        *,
        window: Window | None = None,
        **positions: Unpack[ScorePositions],
    ) -> Tensor:
        """The bias that SDPA takes as ``attn_mask``.

        Args:
            query_length: Number of queries; None for a window.
            key_length: Number of keys; default: ``query_length``.
            window: Rows and columns of another window; default: its own.
            positions: Positions, packed documents and padding, as :class:`posembed.ALiBi` takes
                them. Keys that an ``attention_mask`` hides are not numbered.

        Returns:
            [num_heads, query_length, key_length] in the dtype of the table, [batch, num_heads,
            query_length, key_length] where positions, offsets or mask have a batch; for a window,
            [num_heads, tokens, tokens]. Hidden keys get -infinity.

        Raises:
            ValueError: Lengths are given for a bias of a window, or a window for one of distances.
        """
        check_names(positions)
        if self.window is not None:
            if query_length is not None:
                raise ValueError(f"query_length: expected None for a window, got {query_length}")
            return self.of_window(window)
        if query_length is None or window is not None:
            raise ValueError(
                f"query_length: expected a length, because there is no window, got {query_length}"
            )
        keys = query_length if key_length is None else key_length
        offset = positions.pop("query_offset", None)
        if isinstance(offset, Tensor) or positions:
            rows = rows_of(self, query_length, keys, query_offset=offset, **positions)
            bias = functional.embedding(rows.clamp_min(0), self.weight).movedim(-1, -3)
            rows = rows.unsqueeze(-3)
            return bias.masked_fill(rows == -1, 0).masked_fill(rows == -2, -math.inf)
        return functional.relative_bias(
            self.weight,
            query_length,
            keys,
            query_offset=offset,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
            kind=self.buckets,
        )

    def of_window(self, window: Window | None = None) -> Tensor:
        """The bias of a window, [num_heads, tokens, tokens]; :meth:`forward` without lengths."""
        table = self.table(window)
        own = self._own_window(window)
        return functional.relative_window_bias(table, own, class_token=self.class_token)

    def table(self, window: Window | None = None) -> Tensor:
        """The table of a window, [rows, num_heads]; another one resamples it.

        An MLP computes it anew; see :func:`posembed.functional.relative_window_bias` for its rows.

        Raises:
            ValueError: The bias has no window.
        """
        wanted = self._own_window(window)
        if self.mlp is not None:
            first: Tensor = self.mlp[0].weight  # type: ignore[assignment]
            swin = self.mlp_rule == "swin"
            distances = functional.relative_log_distances(
                cast(Grid, wanted),
                self.pretrained_window if swin else (),
                dtype=first.dtype,
                device=first.device,
            )
            table: Tensor = self.mlp(distances)
            return 16 * torch.sigmoid(table) if swin else table
        weight: Tensor = self._parameter("weight")
        assert self.window is not None
        if same_grid(wanted, self.window):
            return weight
        return functional.relative_window_resample(
            weight,
            cast(Grid, self.window),
            cast(Grid, wanted),
            method=self.resampling,
            align_corners=self.align_corners,
            antialias=self.antialias,
        )

    def _own_window(self, window: Window | None) -> Window:
        if self.window is None:
            raise ValueError("window: expected a bias with a window, got one by distances")
        return self.window if window is None else window

    def extend(self, window: Window) -> None:
        """Makes another window its own, in place. Create the optimizer afterwards.

        Examples:
            >>> import posembed as pe
            >>> bias = pe.RelativePositionBias(4, window=(7, 7))
            >>> bias.extend((12, 12))
            >>> bias
            RelativePositionBias(4, window=(12, 12))
        """
        window = _checked_window("window", window)
        if self.mlp is None:
            with torch.no_grad():
                table = self.table(window)
            self.weight = nn.Parameter(table, requires_grad=self.weight.requires_grad)
            self.num_buckets = len(table)
        self.window = window

    def score_mod(
        self,
        query_length: int | None = None,
        key_length: int | None = None,
        *,
        query_offset: int | None = None,
        window: Grid | None = None,
    ) -> Callable[..., Tensor]:
        """A ``score_mod`` for ``torch.nn.attention.flex_attention``: no bias of the scores' size.

        Arguments are as in :meth:`forward`. Gradients flow to the table.

        Examples:
            >>> from torch.nn.attention.flex_attention import flex_attention
            >>> import torch, posembed as pe
            >>> query, key, value = torch.randn(3, 1, 4, 49, 16)
            >>> bias = pe.RelativePositionBias(4, window=(7, 7))
            >>> y = flex_attention(query, key, value, score_mod=bias.score_mod())
        """
        if self.window is not None:
            if query_length is not None:
                raise ValueError(f"query_length: expected None for a window, got {query_length}")
            return self._score_mod_of_window(self.table(window), self._own_window(window))
        if query_length is None:
            raise ValueError("query_length: expected a length, got None")
        keys = query_length if key_length is None else key_length
        offset = keys - query_length if query_offset is None else query_offset
        # One query with every distance: from that of the last query to the first key on.
        row: Tensor = self(1, query_length + keys - 1, query_offset=offset + query_length - 1)[:, 0]

        def bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + row[head, key - query + query_length - 1]

        return bias

    def _score_mod_of_window(self, table: Tensor, window: Window) -> Callable[..., Tensor]:
        extra = int(self.class_token)
        first = math.prod(2 * size - 1 for size in window)

        def bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            q, k = query - extra, key - extra
            row, stride, cells = torch.zeros_like(q), 1, 1
            for size in reversed(window):
                row = row + (q // cells % size - k // cells % size + size - 1) * stride
                stride, cells = stride * (2 * size - 1), cells * size
            if extra:
                to_token = torch.where(q < 0, first + 2, first + 1)
                row = torch.where(k < 0, to_token, torch.where(q < 0, first, row))
            return score + table[row, head]

        return bias

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        if self.window is None:
            first = f"{self.num_heads}, num_buckets={self.num_buckets}"
            first += f", max_distance={self.max_distance}"
            return written(self, first, bidirectional=True, buckets="t5")
        usual = {"class_token": False, "mlp_dim": 0, "mlp_rule": "swin", "pretrained_window": None}
        usual |= {"resampling": "bilinear", "align_corners": False, "antialias": False}
        return written(self, f"{self.num_heads}, window={tuple(self.window)}", **usual)
