"""params.json of Meta and Mistral: interleaved pairs; scalings by names of their own."""

from __future__ import annotations

from collections.abc import Iterable

from posembed.configuration.irrelevant import is_irrelevant
from posembed.configuration.keys import Fields, Keys, same, words
from posembed.configuration.layers import check_type
from posembed.scaling import Llama3Scaling, RotaryScaling, YarnScaling
from posembed.specification import RotarySpec

# Keys of these files alone that do not concern rotary positions. "llama_4_scaling" multiplies
# queries by a factor of their position, after the rotation.
NO_BEARING = words(
    """
causal llama_4_scaling moe multimodal n_kv_heads n_layers q_lora_rank quantization sliding_window
tied_embeddings use_biases v_head_dim vision_encoder
"""
)


def read(
    fields: Fields, layer_type: str | None, base: float | None, ignore: Iterable[str] = ()
) -> RotarySpec:
    """The specification of the original release of a Llama or a Mistral."""
    if layer_type is not None:
        check_type([], layer_type)
    keys = Keys(fields, "params.json")
    theta = same("rope_theta", keys.take("rope_theta"), base)
    if theta is None:
        raise ValueError("rope_theta: missing in params.json: pass base= (Llama 1 and 2: 10000)")
    scaling = scaling_of(keys)
    head_dim = keys.take("qk_rope_head_dim") or keys.take("head_dim")
    head_dim = head_dim or int(keys.need("dim")) // int(keys.need("n_heads"))
    keys.ignore("dim", "n_heads", "head_dim", "qk_nope_head_dim", *NO_BEARING)
    unknown = [key for key in keys.left() if key not in set(ignore) and not is_irrelevant(key)]
    if unknown:
        raise ValueError(
            f"params.json: keys that are not understood: {unknown}: pass ignore={unknown} if they "
            "do not concern rotary positions"
        )
    return RotarySpec(int(head_dim), base=theta, interleaved=True, scaling=scaling)


def read_layers(
    fields: Fields, base: float | None, ignore: Iterable[str] = ()
) -> list[RotarySpec | None]:
    """The same for each layer."""
    length = int(Keys(fields, "params.json").need("n_layers"))
    return [read(fields, None, base, ignore)] * length


def scaling_of(keys: Keys) -> RotaryScaling | None:
    """Llama 3's, whose other numbers are in Meta's code alone, or Mistral's YaRN."""
    factor = keys.take("rope_scaling_factor", 8.0)
    high = keys.take("rope_high_freq_factor", 4.0)
    llama3 = keys.take("use_scaled_rope") or keys.take("use_scaled")
    yarn = keys.take("yarn")
    if llama3 and yarn:
        raise ValueError("yarn: expected none beside use_scaled_rope")
    if llama3:
        return Llama3Scaling(factor, 1.0, high, 8192)
    return None if yarn is None else mistral_yarn(Keys(yarn, "yarn"))


def mistral_yarn(yarn: Keys) -> YarnScaling:
    """YaRN as Mistral names its numbers; apply_scale: whether queries and keys are multiplied."""
    scaling = YarnScaling(
        yarn.need("factor"),
        int(yarn.need("original_max_position_embeddings")),
        beta_fast=yarn.take("beta", 32.0),
        beta_slow=yarn.take("alpha", 1.0),
        attention_factor=None if yarn.take("apply_scale", True) else 1.0,
    )
    yarn.done()
    return scaling
