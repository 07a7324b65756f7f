"""Exports a small language model: compiled by AOTInductor for C++, and as ONNX.

python examples/python/export_model.py model.pt2 [model.onnx]; examples/cpp/exported runs model.pt2.
"""

from __future__ import annotations

import argparse

import posembed as pe
import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention with rotary queries and keys."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.rope = pe.RotaryEmbedding(dim // heads)
        self.project = nn.Linear(dim, 3 * dim)
        self.mix = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, seq, heads, head_dim]
        query, key, value = self.project(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key = self.rope(query, key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.mix(mixed.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """Logits of the next token: [batch, seq] -> [batch, seq, vocabulary]."""

    def __init__(self, vocabulary: int = 100, dim: int = 32) -> None:
        super().__init__()
        self.embed = pe.InputEmbedding(vocabulary, dim, positions=None, norm="rms")
        self.blocks = nn.Sequential(Block(dim, 4), Block(dim, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed.token.logits(self.blocks(self.embed(ids)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="where AOTInductor's package goes")
    parser.add_argument("onnx", nargs="?", help="where the ONNX file goes")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, ids = Model().eval(), torch.arange(12).view(2, 6)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", max=4096)}
    with torch.no_grad():
        program = torch.export.export(model, (ids,), dynamic_shapes=(sizes,))
        torch._inductor.aoti_compile_and_package(program, package_path=options.package)
        if options.onnx:
            torch.onnx.export(pe.decompose(program), dynamo=True, verbose=False).save(options.onnx)
        logit, token = model(torch.tensor([[5, 17, 3]]))[0, -1].max(0)
        print(token.item(), logit.item())


if __name__ == "__main__":
    main()
