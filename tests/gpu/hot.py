"""Calls of models' widths, which take the CUDA kernels' fast paths: packs of 16 bytes, whole rows.

The shared cases are narrow and odd. sweep.py, capture.py and the sanitizers run these beside them;
test_launches.py sees that they launch every kernel that scripts/machine_code.py watches.
"""

from collections.abc import Callable
from typing import Any

import posembed as pe
import torch
from posembed import functional
from support.case import OperatorCase, Sample
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ONE = DTYPES[:1]  # integers and codes
BATCH, SEQ, HEADS, KEY_HEADS, DIM = 2, 16, 8, 2, 128
TOKENS, ROWS, PAGE = BATCH * SEQ, 300, 16

# Makes an argument for a device and a dtype.
Make = Callable[[Any, torch.dtype], Any]


def normal(*shape: int) -> Make:
    return lambda device, dtype: torch.randn(shape, device=device, dtype=dtype)


def wide(*shape: int) -> Make:
    """Frequencies and slopes stay float32 beside data of 16 bits."""
    return lambda device, dtype: torch.rand(
        shape, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )


def whole(high: int, *shape: int, low: int = 0) -> Make:
    return lambda device, dtype: torch.randint(low, high, shape, device=device)


def fixed(tensor: Tensor) -> Make:
    return lambda device, dtype: tensor.to(device, copy=True)  # calls in place change it


def hot(
    name: str,
    function: Callable[..., Any],
    mutates: bool = False,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    **given: Any,
) -> OperatorCase:
    """A case of a function; arguments that are made come first, as gradients flow to them."""
    made = {key: value for key, value in given.items() if callable(value)}
    options = {key: value for key, value in given.items() if key not in made}

    def call(*tensors: Tensor) -> Any:
        return function(**dict(zip(made, tensors, strict=True)), **options)

    def sample(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        return Sample(tuple(make(device, dtype) for make in made.values()))

    return OperatorCase(f"hot {name}", call, sample, call, mutates, dtypes=dtypes)


def rotations() -> list[OperatorCase]:
    query, key = normal(BATCH, SEQ, HEADS, DIM), normal(BATCH, SEQ, KEY_HEADS, DIM)
    pair = {"query": query, "key": key}
    half, interleaved = pe.RotarySpec(DIM), pe.RotarySpec(DIM, interleaved=True)
    places = whole(5000, BATCH, SEQ, low=-1)
    first = {"query": normal(BATCH, HEADS, SEQ, DIM), "key": normal(BATCH, KEY_HEADS, SEQ, DIM)}
    packed = normal(BATCH, SEQ, (HEADS + 2 * KEY_HEADS) * DIM)
    norms = {"query_weight": normal(DIM), "key_weight": normal(DIM)}
    return [
        hot("rotary", functional.rotary, **pair, spec=half),
        hot("rotary_", functional.rotary_, True, **pair, spec=half),
        hot("rotary, interleaved", functional.rotary, **pair, spec=interleaved, positions=places),
        hot("rotary, partial", functional.rotary, **pair, spec=pe.RotarySpec(DIM, rotary_dim=64)),
        hot("rotary, frequencies", functional.rotary, **pair, frequencies=wide(DIM // 2), spec=half),
        hot("rotary, frequencies of heads", functional.rotary, query=query, frequencies=wide(HEADS, DIM // 2), spec=half),
        hot("rotary, one token", functional.rotary, query=normal(BATCH, 1, HEADS, DIM), key=normal(BATCH, 1, KEY_HEADS, DIM), spec=half, offset=777),
        hot("rotary_packed", functional.rotary_packed, qkv=packed, heads=HEADS, key_heads=KEY_HEADS, spec=half),
        hot("rotary_tables", functional.rotary_tables, **first, cos=wide(SEQ, DIM), sin=wide(SEQ, DIM)),
        hot("rotary_tables, half", functional.rotary_tables, **first, cos=normal(SEQ, DIM // 2), sin=normal(SEQ, DIM // 2), half_width=True, numerics="float32_product"),
        hot("rotary_tables, values of components", functional.rotary_tables, **first, cos=normal(SEQ, DIM), sin=normal(SEQ, DIM)),
        hot("norm_rotary", functional.norm_rotary, **pair, **norms, spec=half),
        hot("norm_rotary, partial", functional.norm_rotary, **pair, **norms, spec=pe.RotarySpec(DIM, rotary_dim=64)),
        hot("norm_rotary, many heads", functional.norm_rotary, query=normal(1, SEQ, 32, DIM), key=normal(1, SEQ, 8, DIM), **norms, spec=half),
        hot("norm_rotary, all heads", functional.norm_rotary, **pair, query_weight=normal(HEADS * DIM), key_weight=normal(KEY_HEADS * DIM), over="all_heads", spec=half),
        hot("norm_rotary, layer", functional.norm_rotary, **pair, **norms, query_bias=normal(DIM), key_bias=normal(DIM), norm="layer", spec=half),
    ]  # fmt: skip


def caches() -> list[OperatorCase]:
    spec = pe.RotarySpec(DIM)
    slots = fixed(torch.randperm(4 * PAGE, generator=torch.Generator().manual_seed(0))[:TOKENS])
    keys = {"key": normal(TOKENS, KEY_HEADS, DIM), "value": normal(TOKENS, KEY_HEADS, DIM)}
    paged = {f"{name}_cache": normal(4, PAGE, KEY_HEADS, DIM) for name in keys}
    call = {"query": normal(TOKENS, HEADS, DIM), **keys, **paged, "slot_mapping": slots}
    norms = {"query_weight": normal(DIM), "key_weight": normal(DIM), "norm": "rms"}

    def into_float8(query: Tensor, key_cache: Tensor, value_cache: Tensor, **rest: Any) -> Any:
        """Caches come as bytes, which no dtype of a sample changes."""
        codes = (cache.view(torch.float8_e4m3fn) for cache in (key_cache, value_cache))
        named = dict(zip(paged, codes, strict=True))
        return functional.rotary_cache_(query=query, **named, **rest)

    coded = {name: fixed(torch.zeros(4, PAGE, KEY_HEADS, DIM, dtype=torch.uint8)) for name in paged}
    latent = pe.RotarySpec(192, rotary_dim=64, rotary_start=128)
    return [
        hot("rotary_cache_", functional.rotary_cache_, True, **call, spec=spec),
        hot("rotary_cache_, float8", into_float8, True, **{**call, **coded}, spec=spec),
        hot("rotary_cache_, normed", functional.rotary_cache_, True, **call, **norms, spec=spec),
        hot(
            "mla_rotary_cache_",
            functional.mla_rotary_cache_,
            True,
            query=normal(TOKENS, HEADS, 192),
            latent=normal(TOKENS, 512),
            key_rope=normal(TOKENS, 64),
            cache=normal(4, PAGE, 576),
            slot_mapping=slots,
            spec=latent,
        ),
    ]


def codes(format: Any, dtype: torch.dtype) -> OperatorCase:
    """Codes and scales as bytes, which no dtype of a sample changes."""
    parts = functional.quantize_rows(torch.randn(ROWS, 256), format, 64)
    given = dict(zip(("codes", "scales", "biases"), parts, strict=True))
    dtypes = {name: part.dtype for name, part in given.items() if part is not None}

    def call(ids: Tensor, **by_name: Tensor) -> Tensor:
        parts = {name: part.view(dtypes[name]) for name, part in by_name.items()}
        return functional.embedding_quantized(ids, **parts, dtype=dtype)

    made = {name: fixed(given[name].view(torch.uint8)) for name in dtypes}
    return hot(f"codes, {format}, {dtype}", call, dtypes=ONE, ids=whole(ROWS, BATCH, SEQ), **made)


def tables() -> list[OperatorCase]:
    # One id often: its rows are summed by groups.
    often = torch.where(torch.arange(640) % 5 > 0, 7, torch.arange(640) % ROWS)
    x, ids, bags = normal(BATCH, SEQ, 1024), whole(ROWS, BATCH, SEQ), whole(ROWS, BATCH, 8)
    numbers = {"multipliers": (131_072,) * 8, "moduli": ((10_223_617,) * 8,) * 2}
    return [
        hot("embedding", functional.embedding, ids=ids, weight=normal(ROWS, 768)),
        hot("embedding, one id often", functional.embedding, ids=fixed(often), weight=normal(ROWS, 512)),
        hot("embedding, 300 columns", functional.embedding, ids=fixed(often), weight=normal(ROWS, 300)),
        hot("token_bag", functional.token_bag, ids=bags, weight=normal(ROWS, 64)),
        hot("token_bag, weights", functional.token_bag, ids=bags, weight=normal(ROWS, 768), weights=normal(BATCH, 8)),
        *(codes(format, dtype) for format in ("int8", "int4", "float8") for dtype in DTYPES),
        hot("learned_add", functional.learned_add, x=x, weight=normal(64, 1024)),
        hot("learned_add, large batch", functional.learned_add, x=normal(40, 2, 256), weight=normal(2, 256)),
        hot("learned_add, positions", functional.learned_add, x=x, weight=normal(64, 1024), positions=whole(64, BATCH, SEQ)),
        hot("sinusoidal", functional.sinusoidal, x=x, spec=pe.SinusoidalSpec(1024)),
        hot("sinusoidal_encode", functional.sinusoidal_encode, positions=fixed(torch.arange(SEQ)), spec=pe.SinusoidalSpec(1024)),
        hot("fourier_features", functional.fourier_features, coordinates=wide(BATCH, SEQ, 2), frequencies=wide(2, 128)),
        hot("ngram_ids", functional.ngram_ids, dtypes=ONE, ids=whole(131_072, BATCH, 300), multipliers=(3, 2**61 + 1, -7), moduli=numbers["moduli"], boundary=5),
        hot("ngram_ids, modular", functional.ngram_ids, dtypes=ONE, ids=whole(131_072, BATCH, 300), **numbers, rule="modular"),
        hot("step_rows_", functional.step_rows_, True, DTYPES[:2], weight=normal(ROWS, 512), gradient=normal(64, 512), ids=fixed(torch.arange(64) * 3), second=fixed(torch.zeros(ROWS)), rule="rowwise_adagrad", lr=0.1, eps=1e-3),
    ]  # fmt: skip


def inputs() -> list[OperatorCase]:
    def layer(name: str, width: int, seq: int = SEQ, **options: Any) -> OperatorCase:
        ids = whole(ROWS, BATCH, seq)
        return hot(f"input, {name}", functional.input_embedding, ids=ids, token=normal(ROWS, width), **options)

    def norm(width: int) -> dict[str, Any]:
        return {"norm_weight": normal(width), "norm_bias": normal(width), "norm": "layer"}

    types = {"token_type": normal(2, 768), "types": whole(2, BATCH, SEQ)}
    seed = {"dropout": 0.25, "seed": fixed(torch.tensor([7]))}
    return [
        layer("BERT", 768, position=normal(SEQ, 768), **types, **norm(768)),
        layer("BERT, dropout", 768, position=normal(SEQ, 768), **types, **norm(768), **seed),
        *(layer(f"RoBERTa, {width}", width, position=normal(64, width), positions=whole(64, BATCH, SEQ), **norm(width)) for width in (256, 384, 512, 768)),
        layer("GPT-2", 768, position=normal(SEQ, 768)),
        layer("1,024 columns", 1024, position=normal(SEQ, 1024), token_type=normal(2, 1024), types=whole(2, BATCH, SEQ), **norm(1024)),
        layer("4,096 columns, no norm", 4096, position=normal(SEQ, 4096)),
        layer("4,096 columns", 4096, norm_weight=normal(4096), norm="rms", scale=64.0),
        layer("192 columns", 192, position=normal(SEQ, 192), **norm(192)),
        layer("384 columns", 384, position=normal(SEQ, 384), **norm(384)),
        *(layer(f"sinusoids, {width}", width, sinusoid=pe.SinusoidalSpec(width), **norm(width)) for width in (512, 1024)),
    ]  # fmt: skip


def fixed_slopes(scores: Tensor, slopes: Tensor, **options: Any) -> Tensor:
    """The weights of ALiBi, whose gradient flows to the scores alone."""
    return functional.alibi_softmax(scores, slopes.detach(), **options)


def scores() -> list[OperatorCase]:
    found = []
    for keys in (256, 258):
        matrix, slopes = normal(1, HEADS, 32, keys), wide(HEADS)
        mask = fixed((torch.arange(keys) % 7 != 3)[None])
        forms: dict[str, dict[str, Any]] = {
            "causal": {},
            "two sides": {"causal": False},
            "masked": {"attention_mask": mask},
        }
        for form, options in forms.items():
            for name in ("alibi_add", "alibi_softmax", "alibi_softmax_"):
                writes = name.endswith("_")
                given = {"scores": matrix, "slopes": slopes, **options}
                function = getattr(functional, name)
                found.append(hot(f"{name}, {keys} keys, {form}", function, writes, **given))
            sizes = {"query_length": 32, "key_length": keys, **options}
            own = normal(HEADS)  # biases have the dtype of the slopes
            found.append(hot(f"alibi_bias, {keys} keys, {form}", functional.alibi_bias, slopes=own, **sizes))
            given = {"scores": matrix, "slopes": slopes, **options}
            found.append(hot(f"alibi_softmax, {keys} keys, {form}, fixed slopes", fixed_slopes, **given))
    rows = fixed((torch.arange(64)[None, :] - torch.arange(64)[:, None]).clamp(-16, 16) + 16)
    logits = {"query": normal(1, HEADS, 64, 64), "table": normal(33, 64), "rows": rows}
    return [*found, hot("relative_logits", functional.relative_logits, **logits)]


CASES = [*rotations(), *caches(), *tables(), *inputs(), *scores()]
