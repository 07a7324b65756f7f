"""torchtitan with posembed's overrides: results and gradients as without, in every dtype."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

pytest.importorskip("torchtitan.models.common.rope")
from posembed.integrations.torchtitan import RotaryComplex, RotaryCosSin
from torchtitan.config import Configurable, OverrideConfig
from torchtitan.config.override import apply_overrides
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

BATCH, TOKENS, HEAD = 2, 7, 16
POSITIONS = {
    "none": None,
    "one row": torch.tensor([[3, 1, 4, 1, 5, 9, 2]]),
    "rows": torch.tensor([[0, 1, 2, 3, 0, 1, 2], [5, 6, 7, 8, 9, 10, 11]]),
}


class Layers(Configurable):
    """Two modules in one configuration, as a model has them."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        complex: ComplexRoPE.Config
        cos_sin: CosSinRoPE.Config


def modules() -> list[tuple[nn.Module, nn.Module]]:
    """Torchtitan's modules, each beside the one that replaces it."""
    options: dict[str, Any] = {"dim": HEAD, "max_seq_len": 32, "theta": 500.0}
    config = Layers.Config(complex=ComplexRoPE.Config(**options, scaling="llama"), cos_sin=CosSinRoPE.Config(**options))
    own = config.complex.build(), config.cos_sin.build()
    names = [f"posembed.integrations.torchtitan.{x}_rope" for x in ("complex", "cos_sin")]
    apply_overrides(OverrideConfig(imports=list(names)), config)
    changed = config.complex.build(), config.cos_sin.build()
    assert list(map(type, changed)) == [RotaryComplex, RotaryCosSin]
    return list(zip(own, changed, strict=True))


def results(module: nn.Module, dtype: torch.dtype, positions: Tensor | None) -> list[Tensor]:
    """Query, key and their gradients."""
    random = torch.Generator().manual_seed(5)
    given = [torch.randn(BATCH, TOKENS, heads, HEAD, generator=random).to(dtype).requires_grad_() for heads in (4, 2)]
    turned = module(*given, positions)
    weights = [torch.randn(x.shape, generator=random).to(dtype) for x in turned]
    return [*turned, *torch.autograd.grad(turned, given, weights)]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_of_overridden_modules(dtype: torch.dtype, positions: str) -> None:
    for own, changed in modules():
        before = results(own, dtype, POSITIONS[positions])
        after = results(changed, dtype, POSITIONS[positions])
        for x, y in zip(before, after, strict=True):
            assert x.dtype == y.dtype
            if isinstance(own, ComplexRoPE):  # PyTorch's complex products round by layout
                torch.testing.assert_close(x, y, rtol=torch.finfo(dtype).eps, atol=1e-6)
            else:
                assert torch.equal(x, y)


def test_overridden_modules_compile() -> None:
    for own, changed in modules():
        compiled = torch.compile(changed, fullgraph=True, backend="aot_eager")
        x, y = torch.randn(1, TOKENS, 4, HEAD), torch.randn(1, TOKENS, 2, HEAD)
        torch.testing.assert_close(compiled(x, y), own(x, y))


def test_queries_split_by_heads() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for own, changed in modules():
            query, key = torch.randn(2, 1, TOKENS, 4, HEAD).unbind()
            changed.cache = distribute_tensor(changed.cache, mesh, [Replicate()])
            given = [distribute_tensor(x, mesh, [Shard(2)]) for x in (query, key)]
            turned = changed(*given, None)
            for x, y in zip(turned, own(query, key, None), strict=True):
                assert x.placements == (Shard(2),)
                torch.testing.assert_close(x.full_tensor(), y)
    finally:
        dist.destroy_process_group()
