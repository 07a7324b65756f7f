"""Reads params.json of Meta and Mistral: interleaved pairs, and scalings under their own names."""

from __future__ import annotations

from posembed.models.fields import (
    Fields,
    Keys,
    base_number,
    flag,
    positive,
    real,
    same,
    text_of,
    whole,
)
from posembed.models.layers import check_type
from posembed.models.options import Options
from posembed.models.unknown_keys import check_understood, repeated
from posembed.specifications import RotarySpec
from posembed.specifications.scaling import Llama3Scaling, RotaryScaling, YarnScaling

WITHOUT_EFFECT = {
    "part": "params.json has no parts",
    "interleaved": "pairs of params.json are interleaved",
}
LATENT = ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank")
# Keys that only these files have and that do not concern rotary positions. "llama_4_scaling"
# multiplies queries by a factor of their position, after the rotation.
NO_BEARING = (
    *("causal", "llama_4_scaling", "moe", "multimodal", "n_kv_heads", "n_layers", "q_lora_rank"),
    *("quantization", "sliding_window", "tied_embeddings", "use_biases", "v_head_dim"),
    "vision_encoder",
)


def is_params(fields: Fields) -> bool:
    """Whether this is a params.json."""
    is_named = "model_type" in fields and text_of(fields["model_type"]) != "transformer"
    return "n_heads" in fields and "dim" in fields and not is_named


def _yarn(yarn: Keys, is_latent: bool) -> YarnScaling:
    """YaRN with Mistral's names.

    apply_scale: whether queries and keys are multiplied; in latent attention, as DeepSeek-V3 does
    it: the scores instead of the rotated components (vLLM's deepseek_v2.py, with mscale_all_dim = 1
    from its transformers_utils/configs/mistral.py).
    """
    length = "original_max_position_embeddings"
    numbers = {
        "factor": real("factor", yarn.need("factor")),
        "original_max_positions": whole(length, yarn.need(length)),
        "beta_fast": real("beta", yarn.take("beta", 32.0)),
        "beta_slow": real("alpha", yarn.take("alpha", 1.0)),
    }
    if not yarn.take("apply_scale", True):
        numbers["attention_factor"] = 1.0
    elif is_latent:
        numbers |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    yarn.done()
    return YarnScaling(**numbers)  # type: ignore[arg-type]


def _llama3_factor(keys: Keys) -> float:
    """Llama 3's factor, which few files have.

    8 in Llama 3.1 and in the large models of 3.2, 32 in its models of 1B and 3B, as their
    config.json has it. The width tells them apart.
    """
    given = keys.take("rope_scaling_factor")
    if given is not None:
        return real("rope_scaling_factor", given)
    width = whole("dim", keys.need("dim"))
    if width in (2048, 3072):
        return 32.0
    if width in (4096, 8192, 16384):
        return 8.0
    raise ValueError(
        f"rope_scaling_factor: missing in params.json, and no Llama 3 has a dim of {width}"
    )


def _is_latent(keys: Keys) -> bool:
    """Whether rotated components are a head apart."""
    return keys.first(LATENT) is not None


def _scaling_of(keys: Keys) -> RotaryScaling | None:
    """Llama 3's scaling, whose other numbers are only in Meta's code, or Mistral's YaRN."""
    high = keys.take("rope_high_freq_factor", 4.0)
    flags = [flag(name, keys.take(name, False)) for name in ("use_scaled_rope", "use_scaled")]
    llama3 = any(flags)
    yarn = keys.take("yarn")
    if llama3 and yarn:
        raise ValueError("yarn: expected none beside use_scaled_rope")
    if llama3:
        return Llama3Scaling(_llama3_factor(keys), 1.0, real("factor", high), 8192)
    keys.ignore("rope_scaling_factor")
    return None if yarn is None else _yarn(Keys(yarn, "yarn"), _is_latent(keys))


def _head_dim_of(keys: Keys) -> int:
    if _is_latent(keys):
        return whole("qk_rope_head_dim", keys.need("qk_rope_head_dim"))
    given = keys.first(["head_dim"])
    if given is not None:
        return whole("head_dim", given)
    return whole("dim", keys.need("dim")) // positive("n_heads", keys.need("n_heads"))


def read(fields: Fields, options: Options) -> RotarySpec:
    """The specification of a Llama or Mistral model in its original release."""
    if options.layer_type is not None:
        check_type((), options.layer_type)
    keys = Keys(fields, "params.json")
    theta = same("rope_theta", (keys.take("rope_theta"), options.base))
    if theta is None:
        raise ValueError("rope_theta: missing in params.json: pass base= (Llama 1 and 2: 10000)")
    base, scaling = base_number("rope_theta", theta), _scaling_of(keys)
    head_dim = _head_dim_of(keys)
    keys.ignore("dim", "n_heads", "head_dim", *NO_BEARING)
    spec = RotarySpec(head_dim, base=base, scaling=scaling, interleaved=True)
    check_understood(
        keys, options.ignore, repeated(spec, [], "yarn" if keys.take("yarn") else "default")
    )
    return spec


def read_layers(fields: Fields, options: Options) -> list[RotarySpec | None]:
    """The same for each layer."""
    length = whole("n_layers", Keys(fields, "params.json").need("n_layers"), 0)
    return [read(fields, options)] * length
