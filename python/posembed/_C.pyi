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
