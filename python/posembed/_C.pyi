from typing import Any

from torch import Tensor
from torch.nn.cpp import ModuleWrapper

from posembed._build_info import BuildInfo
from posembed.specification import RotarySpec

def build_info() -> BuildInfo: ...
def rotary(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    spec: str,
    layout: str,
    offset: int,
    inverse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def rotary_(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    spec: str,
    layout: str,
    offset: int,
    inverse: bool,
) -> None: ...

class ALiBi(ModuleWrapper):
    def __init__(
        self,
        num_heads: int,
        *,
        slopes: str | Tensor = "press",
        max_bias: float = 8.0,
        causal: bool = True,
        total_heads: int | None = None,
        head_start: int = 0,
        learned: bool = False,
    ) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def add_(self, *args: Any, **kwargs: Any) -> None: ...
    def attention(self, *args: Any, **kwargs: Any) -> Any: ...

class RotaryEmbedding(ModuleWrapper):
    def __init__(
        self,
        spec_or_head_dim: RotarySpec | int,
        *,
        layout: str = "bshd",
        **spec_options: Any,
    ) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def rotate_(self, *args: Any, **kwargs: Any) -> None: ...

class SinusoidalPositionalEmbedding(ModuleWrapper):
    def __init__(
        self,
        embedding_dim: int,
        *,
        base: float = 10000.0,
        preset: str = "vaswani",
        cos_first: bool | None = None,
        shift: float | None = None,
        scale: float = 1.0,
    ) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def encode(self, *args: Any, **kwargs: Any) -> Any: ...
    def shift_matrix(self, distance: float) -> Any: ...
