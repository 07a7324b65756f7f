"""Cases of rotary with a paged cache."""

import json
from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample, in_schema_order
from support.case import case as case_of
from support.rotary import PARTIAL, PLAIN, rotate, shape_of

PAGES, PAGE_SIZE = 2051, 4  # fits every size of the shared tests and equals none


def keep(rows: Tensor, cache: Tensor, slots: Tensor, layout: str, cache_layout: str) -> Tensor:
    """The cache with rows at their slots; rows with -1 are not written."""
    if layout == "thd":
        rows, slots = rows.unsqueeze(0), slots.unsqueeze(0)
    elif layout == "bhsd":
        rows = rows.transpose(1, 2)
    elif layout == "sbhd":
        rows = rows.transpose(0, 1)
    places = cache.clone() if cache_layout == "nhd" else cache.transpose(1, 2).clone()
    kept = slots >= 0
    page, place = slots[kept] // places.shape[1], slots[kept] % places.shape[1]
    places[page, place] = rows[kept]
    return places if cache_layout == "nhd" else places.transpose(1, 2)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    spec: str,
    positions: Tensor | None = None,
    layout: str = "thd",
    cache_layout: str = "nhd",
    offset: int = 0,
    query_out: Tensor | None = None,
    rotate_key: bool = False,
) -> tuple[Tensor, ...]:
    """The contents of every tensor after the call."""
    rotated = rotate(query, spec, positions, layout, offset)
    keys = rotate(key, spec, positions, layout, offset)
    caches = (
        keep(keys, key_cache, slot_mapping, layout, cache_layout),
        keep(value, value_cache, slot_mapping, layout, cache_layout),
    )
    left = (keys if rotate_key else key, value, *caches)
    return (rotated, *left) if query_out is None else (query, *left, rotated)


def reference_latent(
    query: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    spec: str,
    positions: Tensor | None = None,
    layout: str = "thd",
) -> tuple[Tensor, ...]:
    keys = rotate(key_rope.unsqueeze(1), spec, positions, layout)
    rows = torch.cat([latent.unsqueeze(1), keys], -1)
    kept = keep(rows, cache.unsqueeze(2), slot_mapping, layout, "nhd").squeeze(2)
    return rotate(query, spec, positions, layout), latent, key_rope, kept


def slots_of(layout: str, batch: int, seq: int, device: Any, dtype: torch.dtype) -> Tensor:
    """Different slots of the whole cache; some tokens have none."""
    shape = (seq,) if layout == "thd" else (batch, seq)
    count = seq if layout == "thd" else batch * seq
    slots = torch.randperm(PAGES * PAGE_SIZE)[:count]
    return torch.where(torch.rand(count) < 0.2, -1, slots).view(shape).to(device, dtype)


def sample(
    *,
    positions: bool = False,
    query_out: bool = False,
    value_dim: int | None = None,
    index: torch.dtype = torch.int64,
    **options: Any,
) -> Any:
    """Samples with three heads of the query and two of key and value."""
    layout = options.get("layout", "thd")
    dim = json.loads(options["spec"])["head_dim"]

    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        def cache(dim: int) -> Tensor:
            paged = (PAGE_SIZE, 2) if options.get("cache_layout", "nhd") == "nhd" else (2, PAGE_SIZE)
            return random(PAGES, *paged, dim)

        query = random(*shape_of(layout, batch, seq, 3, dim))
        places = (seq,) if layout == "thd" else (batch, seq)
        return Sample(
            (
                query,
                random(*shape_of(layout, batch, seq, 2, dim)),
                random(*shape_of(layout, batch, seq, 2, value_dim or dim)),
                cache(dim),
                cache(value_dim or dim),
                slots_of(layout, batch, seq, device, index),
                torch.randint(-1, 40, places, device=device, dtype=index) if positions else None,
                torch.empty_like(query) if query_out else None,
            ),
            options,
        )

    return make


LATENT = 10


def latent_sample(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
    options: dict[str, Any] = {"spec": PARTIAL, "layout": "thd"}
    numbers = json.loads(PARTIAL)
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    return Sample(
        (
            torch.randn(seq, 3, numbers["head_dim"], **place),
            torch.randn(seq, LATENT, **place),
            torch.randn(seq, numbers["rotary_dim"], **place),
            torch.randn(PAGES, PAGE_SIZE, LATENT + numbers["rotary_dim"], **place),
            slots_of("thd", batch, seq, device, torch.int64),
            torch.randint(-1, 40, (seq,), device=device),
        ),
        options,
    )


def mla_sample(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
    numbers = json.loads(PARTIAL)
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    return Sample(
        (
            torch.randn(batch, seq, 3, numbers["head_dim"], **place),
            torch.randn(batch, seq, numbers["rotary_dim"], **place),
            torch.randint(-1, 40, (batch, seq), device=device),
        ),
        {"spec": PARTIAL},
    )


def case(name: str, **options: Any) -> OperatorCase:
    make = sample(**options)
    return case_of(f"rotary_cache_{name}", make, reference, mutates=True, vmap=False)


CASES = in_schema_order(
    [
        case("", spec=PLAIN),
        case("-partial", spec=PARTIAL, positions=True, rotate_key=True, value_dim=6, index=torch.int32),
        case("-hnd", spec=PARTIAL, positions=True, layout="bhsd", cache_layout="hnd"),
        case("-sbhd", spec=PLAIN, layout="sbhd", offset=7, rotate_key=True),
        case_of("mla_rotary", mla_sample),
        case_of("mla_rotary_cache_", latent_sample, reference_latent, mutates=True, vmap=False),
    ],
    "query",
    "key",
    "value",
    "latent",
    "key_rope",
    "key_cache",
    "value_cache",
    "cache",
    "slot_mapping",
    "positions",
    "query_out",
)  # fmt: skip
