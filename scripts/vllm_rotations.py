"""Diagnoses the rotary classes of the vLLM that is installed: exit code 1 unless all are right.

No continuous integration runs this, because vLLM pins its own torch. Scalings that vLLM chooses by
the engine's longest sequence (LongRoPE, dynamic NTK) are other rotations by design. Arguments are
those of vLLM 0.33.0, model_executor/layers/rotary_embedding/__init__.py.
"""

from __future__ import annotations

import sys
from typing import Any

import posembed as pe
import torch
from torch import Tensor

ORIGINAL = {"original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SECTIONS = {"rope_type": "default", "mrope_section": [8, 12, 12]}

# model type, whether pairs are split in halves, the rotated part, scaling
CASES: list[tuple[str, bool, float, dict[str, Any]]] = [
    ("llama", True, 1.0, {"rope_type": "default"}),
    ("glm4", False, 0.5, {"rope_type": "default"}),
    ("llama", True, 1.0, {"rope_type": "linear", "factor": 2.0}),
    ("llama", True, 1.0, {**LLAMA3, **ORIGINAL}),
    ("qwen3", True, 1.0, {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}),
    ("qwen2_vl", True, 1.0, SECTIONS),
]


def main() -> int:
    """Prints a verdict for each class."""
    from vllm.config import VllmConfig, set_current_vllm_config  # type: ignore[import-not-found]
    from vllm.model_executor.layers import rotary_embedding  # type: ignore[import-not-found]

    wrong = 0
    for model_type, halves, part, scaling in CASES:
        parameters = {"rope_theta": 10000.0, "partial_rotary_factor": part, **scaling}
        sizes = {
            "hidden_size": 256,
            "num_attention_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 16384,
        }
        config = {"model_type": model_type, **sizes, "rope_parameters": parameters}
        with set_current_vllm_config(VllmConfig()):
            rope = rotary_embedding.get_rope(64, 16384, halves, parameters, torch.float32)

        def program(x: Tensor, positions: Tensor, rope: Any = rope) -> Tensor:
            tokens = x.movedim(2, 1).flatten(2)  # [batch, seq, heads * head_dim]
            rows = [rope.forward_native(positions, row, row)[0] for row in tokens.clone()]
            return torch.stack(rows).unflatten(-1, (x.shape[1], 64)).movedim(1, 2)

        found = pe.diagnose(program, config)
        wrong += not found.right
        print(f"{model_type}, {scaling['rope_type']}, {type(rope).__name__}: {found.headline()}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
