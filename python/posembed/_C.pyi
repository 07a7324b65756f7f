from typing import Any

from torch import Tensor
from torch.nn.cpp import ModuleWrapper

from posembed._build_info import BuildInfo

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

class RotaryEmbedding(ModuleWrapper):
    def __init__(
        self,
        head_dim: int,
        *,
        layout: str = "bshd",
        base: float = 10000.0,
        rotary_dim: int | None = None,
        rotary_start: int = 0,
        interleaved: bool = False,
        reverse: bool = False,
    ) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def rotate_(self, *args: Any, **kwargs: Any) -> None: ...
