"""Models of diffusers and timm: the kernel rotates, and results have the models' bits."""

from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import patch, unpatch
from torch import Tensor, nn

DTYPES = [torch.float32, torch.bfloat16]


def compare(model: nn.Module, given: dict[str, Any]) -> None:
    """Plain, patched and unpatched models give the same, and every rotation ran the kernel."""

    def result() -> Tensor:
        with torch.no_grad():
            found = model(**given)
        return found if isinstance(found, Tensor) else found[0]

    expected = result()
    report = patch(model)
    assert torch.equal(result(), expected)
    assert sum(each.kernel for each in report.calls()) > 0
    assert not any(each.own for each in report.calls())
    unpatch(model)
    assert torch.equal(result(), expected)


def flux(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """A function of diffusers with options, called by attention processors."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return model, {
        "hidden_states": torch.randn(1, 6, 4, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 5, 32, dtype=dtype),
        "pooled_projections": torch.randn(1, 32, dtype=dtype),
        "timestep": torch.ones(1, dtype=dtype),
        "img_ids": torch.randint(8, (6, 3)),
        "txt_ids": torch.zeros(5, 3),
        "return_dict": False,
    }


def wan(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """A function inside the method of an attention processor."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 8, 8, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 5, 16, dtype=dtype),
        "timestep": torch.tensor([7]),
        "return_dict": False,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [flux, wan])
def test_diffusers(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model, given = make(dtype)
    compare(model.to(dtype).eval(), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "eva02_tiny_patch14_224",
        "vit_small_patch16_dinov3",  # half=True
        "vit_small_patch16_rope_mixed_224",  # tables with a row for each head
    ],
)
def test_timm(name: str, dtype: torch.dtype) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(3)
    model = timm.create_model(name, depth=1).to(dtype).eval()
    compare(model, {"x": torch.randn(1, *model.pretrained_cfg["input_size"], dtype=dtype)})
