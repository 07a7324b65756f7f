"""Writes the files of this folder by the programs whose formats they are.

python make.py OUT, with compressed-tensors 0.20.1, bitsandbytes 0.50.2, mlx 0.32.4, optimum-quanto
0.2.7 and torchao 0.18.0. Each folder has a table and, in expected.safetensors, the numbers that the
program itself makes of it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROWS, COLUMNS = 6, 64
WEIGHT = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
NAME = "model.embed_tokens."


def save(
    name: str,
    tensors: dict[str, torch.Tensor],
    expected: torch.Tensor,
    metadata: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
) -> None:
    """One folder."""
    folder = Path(sys.argv[1], name)
    folder.mkdir(exist_ok=True)
    whole = {key: value.detach().clone().contiguous() for key, value in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata)
    save_file({"expected": expected.float().contiguous()}, folder / "expected.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config) + "\n")


def compressed_tensors() -> None:
    """Codes in words, with and without zero points; NVFP4 and MXFP4."""
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def compressed(name: str, kind: Any, state: dict[str, torch.Tensor], **options: Any) -> None:
        args = QuantizationArgs(**options)
        scheme = QuantizationScheme(targets=["Embedding"], weights=args)
        made = kind.compress({"weight": WEIGHT, **state}, scheme)
        expected = kind.decompress(dict(made), scheme)["weight"]
        config = {"quantization_config": {"config_groups": {"group_0": {"weights": {
            "num_bits": args.num_bits, "group_size": args.group_size}}}}}  # fmt: skip
        save(f"compressed_tensors_{name}", {NAME + k: v for k, v in made.items()}, expected,
             config=config)  # fmt: skip

    packed = compressors.PackedQuantizationCompressor
    for bits in range(2, 9):
        largest = 2 ** (bits - 1)
        grouped = WEIGHT.view(ROWS, 4, -1).abs().amax(-1) / (largest - 0.5)
        symmetric = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 16}
        compressed(f"{bits}_bits", packed, {"weight_scale": grouped}, **symmetric)
    low, high = WEIGHT.amin(1, keepdim=True), WEIGHT.amax(1, keepdim=True)
    scale = (high - low) / 15
    zero = (-8 - low / scale).round().clamp(-8, 7).char()
    compressed("zero_points", packed, {"weight_scale": scale, "weight_zero_point": zero},
               num_bits=4, type="int", strategy="channel", symmetric=False)  # fmt: skip
    blocks = WEIGHT.view(ROWS, 4, -1).abs().amax(-1)
    whole = torch.tensor([448.0 * 6 / float(blocks.max())])
    compressed("nvfp4", compressors.NVFP4PackedCompressor,
               {"weight_scale": (blocks / 6 * whole).to(torch.float8_e4m3fn).float(),
                "weight_global_scale": whole},
               num_bits=4, type="float", strategy="tensor_group", group_size=16)  # fmt: skip
    powers = 2.0 ** (WEIGHT.view(ROWS, 2, -1).abs().amax(-1) / 6).log2().ceil()
    compressed("mxfp4", compressors.MXFP4PackedCompressor, {"weight_scale": powers},
               num_bits=4, type="float", strategy="group", group_size=32)  # fmt: skip


def bitsandbytes() -> None:
    """nf4 and fp4, with scales that are codes too, and int8."""
    from bitsandbytes import functional

    for name, kind, nested in (("nf4", "nf4", False), ("nf4_nested", "nf4", True),
                               ("fp4", "fp4", False)):  # fmt: skip
        # More than one nested block of 256 scales.
        weight = WEIGHT.repeat(50, 1) if nested else WEIGHT
        packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
        tensors = {NAME + "weight": packed}
        parts = state.as_dict(packed=True)
        tensors |= {f"{NAME}weight.{key}": value for key, value in parts.items()}
        expected = functional.dequantize_4bit(packed, state)[-ROWS:]
        save(f"bitsandbytes_{name}", tensors, expected)
    codes, scales, _ = functional.int8_vectorwise_quant(WEIGHT.half())
    expected = functional.int8_vectorwise_dequant(codes, scales)
    tensors = {NAME + "weight": codes, NAME + "SCB": scales}
    tensors[NAME + "weight_format"] = torch.tensor(0, dtype=torch.uint8)
    save("bitsandbytes_int8", tensors, expected)


def mlx() -> None:
    """All bits of the affine mode, and a mode that is refused."""
    import mlx.core as mx
    import numpy as np

    weight = mx.array(WEIGHT.numpy())
    for bits in (2, 3, 4, 5, 6, 8):
        parts = mx.quantize(weight, group_size=32, bits=bits)
        expected = torch.from_numpy(np.array(mx.dequantize(*parts, group_size=32, bits=bits)))
        named = zip(("weight", "scales", "biases"), parts, strict=True)
        save(f"mlx_{bits}_bits",
             {NAME + key: torch.from_numpy(np.array(value)) for key, value in named}, expected,
             config={"quantization": {"group_size": 32, "bits": bits}})  # fmt: skip


def quanto() -> None:
    """8 bits, and 4 bits, which are refused."""
    from optimum.quanto import QLinear, qfloat8, qint4, qint8

    for name, kind in (("int8", qint8), ("float8", qfloat8), ("int4", qint4)):
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        linear.weight.data.copy_(WEIGHT)
        layer = QLinear.from_module(linear, weights=kind)
        layer.freeze()
        tensors = {NAME + key: value for key, value in layer.state_dict().items()}
        save(f"quanto_{name}", tensors, layer.weight.dequantize())


def torchao() -> None:
    """A scale for each row and for groups, with zero points."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    for name, config in (
        ("int8", Int8WeightOnlyConfig(version=2)),
        ("float8", Float8WeightOnlyConfig(version=2)),
        ("intx", IntxWeightOnlyConfig(torch.int8, PerGroup(32), version=2)),
        ("int4", IntxWeightOnlyConfig(torch.int4, PerGroup(32), version=2)),
    ):
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        linear.weight.data.copy_(WEIGHT)
        quantize_(linear, config)
        tensors, metadata = flatten_tensor_state_dict({NAME + "weight": linear.weight.data})
        save(f"torchao_{name}", tensors, linear.weight.dequantize(), metadata)


if __name__ == "__main__":
    for make in (compressed_tensors, bitsandbytes, mlx, quanto, torchao):
        if len(sys.argv) < 3 or make.__name__ in sys.argv[2:]:
            make()
