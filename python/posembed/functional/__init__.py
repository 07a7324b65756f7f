"""Functional API: each function calls one operator.

The modules hold options and parameters and call these functions.
"""

import torch.fx

if "__torch_package__" in globals():
    raise ImportError(
        "torch.package: expected posembed outside the package, because it has a part in C++: "
        "export with exporter.extern('posembed.**')"
    )

from posembed.functional._alibi import (
    alibi_add,
    alibi_add_,
    alibi_attention,
    alibi_bias,
    alibi_lse_correction,
    alibi_positions,
    alibi_scaled_slopes,
    alibi_slopes,
    alibi_softmax,
    alibi_softmax_,
)
from posembed.functional._bag import token_bag
from posembed.functional._errors import check_errors
from posembed.functional._fourier import fourier_bands, fourier_features
from posembed.functional._input import input_embedding
from posembed.functional._learned import (
    fairseq_positions,
    learned_add,
    learned_encode,
    learned_extend,
    learned_packed,
    learned_resample,
    opt_positions,
    roberta_positions,
)
from posembed.functional._ngram import ngram_ids
from posembed.functional._optim import StepRounding, StepRule, step_rows_
from posembed.functional._options import (
    BagMode,
    By,
    CacheLayout,
    CodeFormat,
    Device,
    FourierUnit,
    FourierWaves,
    Gradient,
    Initialization,
    Layout,
    NgramRule,
    RelativeBuckets,
    RelativeMlp,
    ResamplingMethod,
)
from posembed.functional._quantized import embedding_quantized, quantize_rows
from posembed.functional._relative_bias import (
    relative_bias,
    relative_buckets,
    relative_log_distances,
    relative_window_bias,
    relative_window_resample,
)
from posembed.functional._relative_logits import relative_logits, relative_logits_, relative_rows
from posembed.functional._rotary import rerotate_, rotary, rotary_
from posembed.functional._rotary_cache import mla_rotary, mla_rotary_cache_, rotary_cache_
from posembed.functional._rotary_norm import (
    norm_rotary,
    norm_rotary_,
    norm_rotary_packed,
    norm_rotary_packed_,
)
from posembed.functional._rotary_packed import PackedOrder, rotary_packed, rotary_packed_
from posembed.functional._rotary_tables import rotary_tables, rotary_tables_
from posembed.functional._sinusoidal import (
    sinusoidal,
    sinusoidal_encode,
    sinusoidal_grid_positions,
    sinusoidal_shift_matrix,
)
from posembed.functional._token import embedding, embedding_resize, embedding_with_features

__all__ = [
    "BagMode",
    "By",
    "CacheLayout",
    "CodeFormat",
    "Device",
    "FourierUnit",
    "FourierWaves",
    "Gradient",
    "Initialization",
    "Layout",
    "NgramRule",
    "PackedOrder",
    "RelativeBuckets",
    "RelativeMlp",
    "ResamplingMethod",
    "StepRounding",
    "StepRule",
    "alibi_add",
    "alibi_add_",
    "alibi_attention",
    "alibi_bias",
    "alibi_lse_correction",
    "alibi_positions",
    "alibi_scaled_slopes",
    "alibi_slopes",
    "alibi_softmax",
    "alibi_softmax_",
    "check_errors",
    "embedding",
    "embedding_quantized",
    "embedding_resize",
    "embedding_with_features",
    "fairseq_positions",
    "fourier_bands",
    "fourier_features",
    "input_embedding",
    "learned_add",
    "learned_encode",
    "learned_extend",
    "learned_packed",
    "learned_resample",
    "mla_rotary",
    "mla_rotary_cache_",
    "ngram_ids",
    "norm_rotary",
    "norm_rotary_",
    "norm_rotary_packed",
    "norm_rotary_packed_",
    "opt_positions",
    "quantize_rows",
    "relative_bias",
    "relative_buckets",
    "relative_log_distances",
    "relative_logits",
    "relative_logits_",
    "relative_rows",
    "relative_window_bias",
    "relative_window_resample",
    "rerotate_",
    "roberta_positions",
    "rotary",
    "rotary_",
    "rotary_cache_",
    "rotary_packed",
    "rotary_packed_",
    "rotary_tables",
    "rotary_tables_",
    "sinusoidal",
    "sinusoidal_encode",
    "sinusoidal_grid_positions",
    "sinusoidal_shift_matrix",
    "step_rows_",
    "token_bag",
]

for _name in __all__:
    if _name.islower():  # torch.fx.symbolic_trace keeps calls of these functions
        torch.fx.wrap(_name)
