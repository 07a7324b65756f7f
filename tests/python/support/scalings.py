"""Scalings of rotary frequencies, each with transformers' equivalent parameters and a length."""

from typing import Any

import posembed as pe

SHORT, LONG = [1 + i / 64 for i in range(64)], [1.0 + i for i in range(64)]
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 32.0,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 4096,
}
SCALINGS: list[tuple[Any, dict[str, Any], int | None]] = [
    (pe.LinearScaling(4), {"rope_type": "linear", "factor": 4.0}, None),
    *((pe.DynamicNtkScaling(factor, 2048), {"rope_type": "dynamic", "factor": factor}, length) for factor, length in ((4.0, 100), (4.0, 2048), (4.0, 2049), (1.5, 5000), (4.0, 131072))),
    (pe.YarnScaling(40, 4096), YARN, None),
    (pe.YarnScaling(40, 4096, beta_fast=16, beta_slow=2), {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}, None),
    (pe.YarnScaling(40, 4096, truncate=False), {**YARN, "truncate": False}, None),
    (pe.YarnScaling(40, 4096, mscale=0.7, mscale_all_dim=1), {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, None),
    (pe.YarnScaling(40, 4096, attention_factor=1.3), {**YARN, "attention_factor": 1.3}, None),
    (pe.YarnScaling(40, 4096, mscale=0.7), {**YARN, "mscale": 0.7}, None),
    (
        pe.YarnScaling(4, 32768, beta_fast=48, beta_slow=3, truncate=False, attention_factor=0.9),
        {
            **YARN,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "beta_fast": 48.0,
            "beta_slow": 3.0,
            "truncate": False,
            "attention_factor": 0.9,
        },
        None,
    ),
    (pe.Llama3Scaling(8, 1, 4, 8192), LLAMA3, None),
    (pe.Llama3Scaling(32, 2, 8, 4096), {**LLAMA3, "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 4096}, None),
    (pe.ProportionalScaling(0.25, 2), {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.25}, None),
    *((pe.LongRopeScaling(SHORT, LONG, 4096, factor=32), LONGROPE, length) for length in (1, 4096, 4097)),
    (pe.LongRopeScaling(SHORT, LONG, 4096, factor=32, attention_factor=1.2), {**LONGROPE, "attention_factor": 1.2}, 5000),
]  # fmt: skip
