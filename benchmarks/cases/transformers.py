"""Whole models of transformers beside themselves, patched to rotate by posembed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import Case, Goal
from plan import Plan, plan
from setting import Setting
from torch import Tensor, nn

from cases import peers

PROMPT, BEFORE, AFTER = 512, "transformers", "posembed"
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
}
WIDE = {
    **SMALL,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
}
# Configuration class, model class and options of each model.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama, 2 layers of 7B": ("LlamaConfig", "LlamaForCausalLM", WIDE),
    "Llama, 100M": ("LlamaConfig", "LlamaForCausalLM", SMALL),
    "Qwen3, 100M": ("Qwen3Config", "Qwen3ForCausalLM", {**SMALL, "num_key_value_heads": 4}),
    "Gemma3, 100M": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**SMALL, "num_key_value_heads": 4}),
    "GPT-NeoX, 100M": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SMALL),
    # Norms of query and key, and BERT's input layer, which only exact numerics fuse.
    "Qwen3, 100M, exact": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**SMALL, "num_key_value_heads": 4},
    ),
    "BERT, exact": ("BertConfig", "BertForMaskedLM", SMALL),
    "ModernBERT, 100M": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**SMALL, "pad_token_id": 0, "reference_compile": False},
    ),
}


def models(name: str, dtype: torch.dtype, device: str) -> dict[str, nn.Module]:
    """The model and its patched copy, which shares the weights."""
    import transformers

    config, model, options = MODELS[name]
    torch.manual_seed(0)
    original = getattr(transformers, model)(getattr(transformers, config)(**options))
    numerics = "exact" if name.endswith("exact") else "model"
    return beside_patched(original.to(device, dtype).eval(), numerics)


def beside_patched(original: nn.Module, numerics: Any = "model") -> dict[str, nn.Module]:
    """A model and its patched copy, which shares the weights."""
    from posembed.integrations import huggingface

    shared = {id(tensor): tensor for tensor in original.parameters()}
    patched = copy.deepcopy(original, shared)
    huggingface.patch(patched, numerics=numerics)
    return {BEFORE: original, AFTER: patched}


def ids(batch: int, seq: int, device: str) -> Tensor:
    return torch.randint(1, SMALL["vocab_size"], (batch, seq), device=device)


def prefill(name: str, model: str, dtype: torch.dtype, device: str) -> Case:
    prompt = ids(1, PROMPT, device)

    def call(model: nn.Module) -> Callable[[], object]:
        def run() -> object:
            with torch.inference_mode():
                return model(prompt).logits

        return run

    return case(name, models(model, dtype, device), call)


def compiled_prefill(name: str, model: str, dtype: torch.dtype, device: str) -> Case:
    """Both compiled by Inductor, which fuses the model's own rotation with what is around it."""
    prompt = ids(1, PROMPT, device)

    def call(model: nn.Module) -> Callable[[], object]:
        compiled = torch.compile(model, dynamic=False)

        def run() -> object:
            with torch.inference_mode():
                return compiled(prompt, use_cache=False).logits

        return run

    return case(name, models(model, dtype, device), call)


def decode(name: str, model: str, dtype: torch.dtype, device: str) -> Case:
    prompt, token = ids(1, PROMPT, device), ids(1, 1, device)

    def call(model: nn.Module) -> Callable[[], object]:
        with torch.inference_mode():
            cache = model(prompt, use_cache=True).past_key_values

        def run() -> object:
            with torch.inference_mode():
                logits = model(token, past_key_values=cache).logits
                cache.crop(-1)
                return logits

        return run

    return case(name, models(model, dtype, device), call)


def training_step(name: str, model: str, dtype: torch.dtype, device: str) -> Case:
    prompt = ids(1, PROMPT, device)

    def call(model: nn.Module) -> Callable[[], object]:
        def run() -> object:
            loss = model(prompt, labels=prompt).loss
            return torch.autograd.grad(loss, list(model.parameters()))

        return run

    return case(name, models(model, dtype, device), call)


def case(
    name: str, both: dict[str, nn.Module], call: Callable[[nn.Module], Callable[[], object]]
) -> Case:
    candidates = {label: call(model) for label, model in both.items()}
    return Case(name, candidates, None, (Goal(AFTER, BEFORE, 1.0),))


def plans(setting: Setting) -> Iterator[Plan]:
    if not peers.installed("transformers"):
        return
    for dtype in (torch.float32, torch.bfloat16):
        for model in MODELS:
            kinds = {"prefill": prefill, "decode": decode, "training step": training_step}
            if "BERT" in model:
                del kinds["decode"]
            elif setting.compile_peers:
                kinds["compiled prefill"] = compiled_prefill
            for kind, build in kinds.items():
                name = f"transformers: {model}, {kind}, {str(dtype).removeprefix('torch.')}"
                yield plan(name, build, model, dtype, setting.device)
