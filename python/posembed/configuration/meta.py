"""Meta's params.json: interleaved pairs, and Llama 3's scaling without its numbers."""

from __future__ import annotations

from posembed.configuration.keys import Fields, Keys, same
from posembed.configuration.layers import check_type
from posembed.scaling import Llama3Scaling
from posembed.specification import RotarySpec


def read(fields: Fields, layer_type: str | None, base: float | None) -> RotarySpec:
    """The specification of the original release of a Llama."""
    if layer_type is not None:
        check_type([], layer_type)
    keys = Keys(fields, "params.json")
    theta = same("rope_theta", keys.take("rope_theta"), base)
    if theta is None:
        raise ValueError("rope_theta: missing in params.json: pass base= (Llama 1 and 2: 10000)")
    factor = keys.take("rope_scaling_factor", 8.0)
    high = keys.take("rope_high_freq_factor", 4.0)
    scaled = keys.take("use_scaled_rope") or keys.take("use_scaled")
    keys.done("rope|rotary|theta")
    head_dim = keys.take("head_dim") or int(keys.need("dim")) // int(keys.need("n_heads"))
    return RotarySpec(
        int(head_dim),
        base=theta,
        interleaved=True,
        # The numbers that Meta's code has and its configuration has not.
        scaling=Llama3Scaling(factor, 1.0, high, 8192) if scaled else None,
    )
