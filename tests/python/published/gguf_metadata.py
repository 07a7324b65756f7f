"""Metadata of GGUF files for every architecture of llama.cpp, with the keys that its program reads."""

from typing import Any

from published.llama_cpp import ARCHITECTURES

SECTIONS = [3, 3, 2, 0]
IRREGULAR = [place * (place + 3) // 4 % 2 for place in range(128)]


def file(architecture: str, scaling: str = "none", *, own: bool = False, **keys: Any) -> Any:
    """Keys for heads of 32 components, of which 16 rotate.

    Args:
        architecture: Its name in the table.
        scaling: "none", "linear" or "yarn".
        own: Whether the file states what the program would otherwise add to it.
        **keys: Further keys, with ``__`` for a dot.
    """
    rules = ARCHITECTURES[architecture]
    says: dict[str, Any] = {
        "block_count": count_of(rules),
        "context_length": 8192,
        "embedding_length": 128,
        "attention.head_count": 4,
        "rope.freq_base": rules.get("program_base", 5e5),
        **({} if rules.get("whole_head") else {"rope.dimension_count": 16}),
        **windows(rules, own),
        **layers(rules, own),
        **numbers(rules, own),
        **scaled(rules, scaling, own),
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    metadata = {f"{architecture}.{key}": value for key, value in says.items()}
    return {"general.architecture": architecture, **metadata, **tensors(architecture, own)}


def count_of(rules: dict[str, Any]) -> int:
    """A number of layers in which every period fits."""
    if "block_counts" in rules:
        return int(rules["block_counts"][0])
    return int(rules.get("windows", {}).get("block_count", 24))


def windows(rules: dict[str, Any], own: bool) -> dict[str, Any]:
    """Keys about sliding windows."""
    rule = rules.get("windows")
    if rule is None:
        return {}
    says: dict[str, Any] = {"attention.sliding_window": 128}
    if own:
        says["attention.sliding_window_pattern"] = [bool(value) for value in IRREGULAR[:24]]
    elif "period" not in rule:
        says["attention.sliding_window_pattern"] = [True, True, False] * 8
    sliding = rules["sliding"]
    if sliding["base"] == "stated" or (own and sliding["base"] != "shared"):
        says["rope.freq_base_swa"] = 3e4
    if own and sliding.get("rotary_dim"):
        says["rope.dimension_count_swa"] = 24
    if own and sliding.get("head_dim"):
        says["attention.key_length_swa"] = 48
    return says


def layers(rules: dict[str, Any], own: bool) -> dict[str, Any]:
    """Keys about layers that do not rotate."""
    recurrent, says = rules.get("recurrent"), {}
    if isinstance(recurrent, str):
        says[recurrent] = [2 if place % 3 == 1 else 0 for place in range(24)]
    elif recurrent and own:
        says["attention.recurrent_layers"] = IRREGULAR[:24]
    if own and rules.get("rotated") == "attention.rope_pattern":
        says["attention.rope_pattern"] = IRREGULAR[1:25]
    if own and "rotated_first" in rules:
        says[rules["rotated_first"]] = 3
    if own and rules.get("next_tokens"):
        says["nextn_predict_layers"] = 2
    return says


def numbers(rules: dict[str, Any], own: bool) -> dict[str, Any]:
    """Keys about axes of positions and the base."""
    says: dict[str, Any] = {}
    if "sections" in rules and (own or not rules.get("sections_optional")):
        says["rope.dimension_sections"] = SECTIONS
    if own and rules.get("alpha"):
        says["rope.scaling.alpha"] = 50.0
    return says


def scaled(rules: dict[str, Any], scaling: str, own: bool) -> dict[str, Any]:
    """Keys about the scaling."""
    if scaling == "none":
        return {}
    says: dict[str, Any] = {"rope.scaling.type": scaling, "rope.scaling.factor": 8.0}
    if scaling == "yarn":
        says["rope.scaling.original_context_length"] = 1024
        if own:
            says |= {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
        if own and "log_multiplier" in rules:
            says["rope.scaling.yarn_log_multiplier"] = 0.07
    return says


def tensors(architecture: str, own: bool) -> dict[str, Any]:
    """Tensors of the file that divide frequencies; for some, longer than what rotates."""
    rules = ARCHITECTURES[architecture]
    read = rules.get("tensors") in ("rope_freqs", "both") and architecture != "dflash"
    if not rules.get("tensors_required") and not (own and read):
        return {}
    pairs = 16 if "tensors_of" in rules else 8
    return {"rope_freqs.weight": [1.0 + pair / 8 for pair in range(pairs)]}
