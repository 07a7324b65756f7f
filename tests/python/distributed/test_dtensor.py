"""Tests that functions of DTensors equal those of whole tensors, gradients included.

Each process computes both; no collective may run in a function of DTensors.
"""

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed import functional
from posembed.glue.dimensions import ARGUMENTS, TABLE, letters_of
from posembed.glue.sharding.calls import call
from support.case import OperatorCase
from support.families import FAMILIES
from support.processes import Processes
from support.refusals import refused
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

SPEC = pe.RotarySpec(8, base=100.0)
WAVES = pe.SinusoidalSpec(8)
WHOLE = Replicate()
Case = tuple[Callable[..., Any], dict[str, Any], dict[str, Placement]]


def mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def gradients(result: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Of a sum with unlike weights."""
    total = 0
    for tensor in tensors(result):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        weights = torch.linspace(-1, 1, whole.numel(), dtype=whole.dtype).view(whole.shape)
        total = total + (whole.masked_fill(whole.isinf(), 0) * weights).sum()
    return list(torch.autograd.grad(total, leaves)) if leaves else []


def leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def split(value: Any, place: Placement | None) -> Any:
    """A DTensor, or the argument itself where no placement is given."""
    if isinstance(value, Tensor):
        value = value.clone().requires_grad_(value.is_floating_point())
        if place is not None:
            return distribute_tensor(value.detach(), mesh(), [place]).requires_grad_(leaf(value))
    return value


def compare(case: Case, seen: Placement | None = None) -> None:
    function, arguments, places = case
    whole = {name: split(value, None) for name, value in arguments.items()}
    parts = {name: split(value, places.get(name)) for name, value in arguments.items()}
    expected = function(**whole)
    with CommDebugMode() as communication:
        found = function(**parts)
    assert communication.get_total_counts() == 0
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        assert isinstance(ours, DTensor)
        assert ours.shape == theirs.shape
        assert seen is None or ours.placements == (seen,)
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-12)
    leaves = [name for name, value in arguments.items() if leaf(value)]
    wanted = gradients(expected, [whole[name] for name in leaves])
    given = gradients(found, [parts[name] for name in leaves])
    for name, ours, theirs in zip(leaves, given, wanted, strict=True):
        full = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(full, theirs, rtol=1e-10, atol=1e-10, msg=name)


def randn(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def rotation(layout: str, place: Placement, key_place: Placement | None = None, **more: Any) -> Any:
    """Query and key have 6 and 3 heads, which two processes split evenly and unevenly."""
    sizes = {"b": 2, "s": 5, "t": 5, "h": 6, "d": 8}
    query = randn(*(sizes[letter] for letter in layout))
    key = randn(*({**sizes, "h": 3}[letter] for letter in layout))
    arguments = {"query": query, "key": key, "spec": SPEC, "layout": layout, **more}
    return functional.rotary, arguments, {"query": place, "key": key_place or place}


def normed(place: Placement, key_place: Placement | None = None) -> Case:
    _, arguments, places = rotation("bshd", place, key_place)
    weights = {"query_weight": randn(8), "key_weight": randn(8)}
    return functional.norm_rotary, arguments | weights, places


def by_tables(place: Placement, rows: tuple[int, ...], **more: Any) -> Case:
    arguments = {"query": randn(2, 6, 5, 8), "key": randn(2, 3, 5, 8)}
    tables = {"cos": randn(*rows, 5, 4), "sin": randn(*rows, 5, 4)}
    options = {"half_width": True, "numerics": "float32_product"}
    places = {"query": place, "key": place}
    return functional.rotary_tables, {**arguments, **tables, **options, **more}, places


def attention(place: Placement, key_heads: int, key_place: Placement, **more: Any) -> Case:
    query, key, value = randn(2, 6, 4, 8), randn(2, key_heads, 7, 8), randn(2, key_heads, 7, 3)
    slopes = functional.alibi_slopes(6).double()
    arguments = {"query": query, "key": key, "value": value, "slopes": slopes, **more}
    places = {"query": place, "key": key_place, "value": key_place}
    return functional.alibi_attention, arguments, places


def table(place: Placement, ids_place: Placement | None = None, **more: Any) -> Case:
    ids = torch.tensor([[0, 4, 3], [4, 6, 1]])
    places = {"weight": place} | ({} if ids_place is None else {"ids": ids_place})
    return functional.embedding, {"ids": ids, "weight": randn(7, 8), **more}, places


def bags(places: dict[str, Placement], **more: Any) -> Case:
    ids = torch.tensor([[0, 4, 3], [4, 6, 1], [2, 2, 5]])
    return functional.token_bag, {"ids": ids, "weight": randn(7, 8), **more}, places


def in_pack(place: Placement, **more: Any) -> Case:
    heads = {"qkv": randn(2, 5, 12 * 8), "heads": 6, "key_heads": 3}
    return functional.rotary_packed, {**heads, "spec": SPEC, **more}, {"qkv": place}


def normed_pack(place: Placement, **more: Any) -> Case:
    _, arguments, places = in_pack(place, **more)
    weights = {"query_weight": randn(8), "key_weight": randn(8)}
    return functional.norm_rotary_packed, arguments | weights, places


LATENT = pe.RotarySpec(8, rotary_dim=4, rotary_start=4)


def latent(layout: str, place: Placement, key_place: Placement, **more: Any) -> Case:
    """Queries of 6 heads; a layout in capitals gives the key one head, others none."""
    sizes, names = {"b": 2, "s": 5, "t": 5, "h": 6, "d": 8}, layout.lower()
    of_key = {**sizes, "h": 1, "d": 4}
    key_names = names if layout.isupper() else names.replace("h", "")
    arguments = {
        "query": randn(*(sizes[name] for name in names)),
        "key_rope": randn(*(of_key[name] for name in key_names)),
        "spec": LATENT,
        "layout": names,
        **more,
    }
    return functional.mla_rotary, arguments, {"query": place, "key_rope": key_place}


POSITIONS = torch.tensor([3, 0, 7, -1, 2])
OF_SAMPLES = torch.stack([POSITIONS, POSITIONS + 1])
HASH: dict[str, Any] = {"multipliers": (3, 5), "moduli": ((11, 13),), "offsets": ((0, 11),), "boundary": 0}
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])

CASES: dict[str, Callable[[], Case]] = {
    "rotary sequence, uneven": lambda: rotation("bshd", Shard(1), positions=POSITIONS),
    "rotary query by heads, key whole": lambda: rotation("bshd", Shard(2), WHOLE, frequencies=randn(4).abs()),
    "rotary whole": lambda: rotation("bshd", WHOLE, frequencies=randn(4).abs()),
    "rotary_packed batch": lambda: in_pack(Shard(0), order="groups", positions=OF_SAMPLES),
    "rotary_packed sequence, heads first": lambda: in_pack(Shard(1), layout="bhsd"),
    "norm_rotary_packed batch": lambda: normed_pack(Shard(0), positions=OF_SAMPLES),
    "norm_rotary_packed sequence, groups": lambda: normed_pack(Shard(1), order="groups"),
    "mla_rotary heads, key with one": lambda: latent("BHSD", Shard(1), WHOLE, inverse=True),
    "mla_rotary sequence, key with a head": lambda: latent("SBHD", Shard(0), Shard(0)),
    "alibi_attention heads": lambda: attention(Shard(1), 6, Shard(1)),
    "alibi_attention groups": lambda: attention(Shard(1), 2, Shard(1), attention_mask=MASK),
    "alibi_attention one key head": lambda: attention(Shard(1), 1, WHOLE),
    "embedding columns": lambda: table(Shard(1), scale=3.0, padding_idx=4),
    "token_bag columns": lambda: bags({"weight": Shard(1)}, weights=randn(3, 3), padding_idx=-3),
    "token_bag bags, plain table": lambda: bags({"ids": Shard(0)}, mode="mean", padding_idx=2),
    "token_bag maxima of columns": lambda: bags({"weight": Shard(1)}, mode="max"),
    "token_bag with offsets": lambda: bags({"weight": Shard(1)}, ids=torch.tensor([0, 4, 3, 6]), offsets=torch.tensor([0, 1, 1, 4]), include_last_offset=True),
    "embedding whole": lambda: table(WHOLE, scale_grad_by_freq=True),
    "ngram_ids batch": lambda: (functional.ngram_ids, {"ids": torch.randint(9, (3, 5)), **HASH, "history": torch.randint(9, (3, 1))}, {"ids": Shard(0)}),
}  # fmt: skip


def shared_cases() -> dict[str, list[OperatorCase]]:
    """The shared cases of each operator with stated dimensions that functions of posembed call."""
    inner = ("embedding_quantized", "file_rows", "rotary_packed_pair", "rotary_tangent")
    names = [name for name in TABLE if name not in inner and not name.endswith("_backward")]
    found: dict[str, list[OperatorCase]] = {name: [] for name in names}
    for family in FAMILIES:
        for case in importlib.import_module(f"support.{family}").CASES:
            found.get(case.operator._opname, []).append(case)
    return found


def generated() -> dict[str, Callable[[], Case]]:
    """The shared cases of operators, split along each dimension of the leading tensors."""
    return {
        f"{case.name} {letter}": functools.partial(along, case, letter)
        for cases in shared_cases().values()
        for case in cases
        for letter in letters_to_split(case)
    }


def letters_of_leading(case: OperatorCase) -> tuple[dict[str, Any], dict[str, str]]:
    """All arguments of a call, and the letters of its leading tensors."""
    torch.manual_seed(0)
    name, sample = case.operator._opname, case.sample(2, 5, "cpu", torch.float64)
    given = {**ARGUMENTS[name], **dict(zip(ARGUMENTS[name], sample.args, strict=False))}
    given |= sample.kwargs
    known = TABLE[name].arranged(given.get("layout"))
    known = known.with_whole_heads() if given.get("all_heads") else known
    return given, {n: letters_of(x, given[n].dim()) for n, x in known.leading.items()}


def letters_to_split(case: OperatorCase) -> list[str]:
    given, letters = letters_of_leading(case)
    found = set("".join(letters.values())) - {"."}
    special = given.get("scale_grad_by_freq") or given.get("gradient", "dense") != "dense"
    if special or given.get("vocabulary_start", -1) >= 0:
        return []  # refused
    if given.get("cos") is not None and "k" in found:  # heads of both: their gradients are sums
        return sorted(found - {"k"})
    return sorted(found - {"s"} if given.get("cu_seqlens") is not None else found)


def along(case: OperatorCase, letter: str) -> Case:
    given, letters = letters_of_leading(case)
    both = "hk" if letter == "h" and given.get("cos") is not None else letter
    split_at = {n: [x.index(each) for each in both if each in x] for n, x in letters.items()}
    places = {n: Shard(at[0]) if at else WHOLE for n, at in split_at.items()}

    def function(**arguments: Any) -> Any:
        if any(isinstance(value, DTensor) for value in arguments.values()):
            return call(case.operator._opname, *arguments.values())
        return case.operator(*arguments.values())

    return function, given, places


CASES |= generated()


def test_every_operator_is_called_with_shards() -> None:
    """Its gate sends DTensors there; that of embeddings is one of several."""
    code = "".join(path.read_text() for path in Path(functional.__file__).parent.glob("*.py"))
    gates = re.findall(r"\.(\w+[a-z])\.default, sharded=True", code)
    assert sorted(gates) == sorted(shared_cases().keys() - {"embedding"})


def test_every_operator_has_cases() -> None:
    """The others are among those above, but for the slopes of longer texts, which a module calls."""
    named = {name for name, cases in shared_cases().items() if not cases}
    packed = {"norm_rotary_packed", "rotary_packed"}
    assert named == {"alibi_attention", "alibi_scaled_slopes", "ngram_ids"} | packed


def check_cases(names: list[str]) -> dict[str, str]:
    """The errors of the cases that fail, of many in one call."""
    errors = {}
    for name in names:
        torch.manual_seed(0)
        try:
            compare(CASES[name]())
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def test_dtensors_give_what_whole_tensors_give(two: Processes) -> None:
    assert two.run(check_cases, list(CASES)) == [{}, {}]


def test_a_process_may_have_nothing(four: Processes) -> None:
    assert four.run(check_cases, ["rotary sequence, uneven"]) == [{}] * 4


def check_rows() -> None:
    """Uneven parts of a vocabulary, whose results are sums; of 7 rows, 4 processes have 2 or 1."""
    for options in ({"padding_idx": 4, "scale": 3.0}, {"padding_idx": -7}, {}):
        compare(table(Shard(0), **options), seen=Partial())
    compare(table(Shard(0), scale_grad_by_freq=True), seen=Partial())
    _, arguments, _ = table(Shard(0))
    function = functional.embedding
    compare((function, arguments | {"weight": randn(7, 0)}, {"weight": Shard(0)}))


def check_two_dimensions() -> None:
    """Batch or rows by one dimension of the mesh, heads, columns or rows by the other."""
    grid = init_device_mesh("cpu", (2, 2))

    def spread(whole: Tensor, *places: Placement) -> DTensor:
        return distribute_tensor(whole, grid, places)

    query, key = randn(2, 5, 6, 8), randn(2, 5, 3, 8)
    place = (Shard(0), Shard(2))
    found = functional.rotary(spread(query, *place), spread(key, *place), spec=SPEC)
    for ours, theirs in zip(found, functional.rotary(query, key, spec=SPEC), strict=True):
        assert ours.placements == place
        assert torch.equal(ours.full_tensor(), theirs)
    ids, weight = torch.tensor([[0, 4, 3], [4, 6, 1]]), randn(7, 8)
    expected = functional.embedding(ids, weight)
    for places in ((Shard(0), Shard(1)), (Shard(0), Shard(0))):
        rows = functional.embedding(ids, spread(weight, *places))
        assert torch.equal(rows.full_tensor(), expected)
    rows = functional.embedding(spread(ids, Shard(0), WHOLE), spread(weight, WHOLE, Shard(0)))
    assert rows.placements == (Shard(0), Partial())
    assert torch.equal(rows.full_tensor(), expected)


def check_in_place() -> None:
    slopes = functional.alibi_slopes(6).double()
    _, by_rotation, _ = rotation("bshd", Shard(2))
    _, by_table, _ = by_tables(Shard(1), ())
    _, by_norm, _ = normed(Shard(2))
    weights = randn(2, 6, 4, 7)
    for function, arguments, dim in (
        (functional.rotary_, by_rotation, 2),
        (functional.rotary_tables_, by_table, 1),
        (functional.norm_rotary_, by_norm, 2),
        (functional.alibi_add_, {"scores": weights, "slopes": slopes}, 1),
        (functional.alibi_softmax_, {"scores": weights, "slopes": slopes}, 1),
    ):
        names = [name for name in ("query", "key", "scores") if name in arguments]
        given = {name: split(arguments[name], Shard(dim)).detach() for name in names}
        result = tensors(function(**arguments | given))
        whole = {name: arguments[name].clone() for name in names}
        function(**arguments | whole)
        for ours, name in zip(result, names, strict=True):
            assert ours is given[name]
            assert torch.equal(ours.full_tensor(), whole[name])


def check_compiled() -> None:
    """Without a break of the graph, gradients included."""
    for name in ("rotary sequence, uneven", "alibi_softmax-hidden b", "embedding columns"):
        function, arguments, places = CASES[name]()
        compare((torch.compile(function, fullgraph=True, backend="aot_eager"), arguments, places))


def check_gradients_are_sums() -> None:
    """Nothing is sent in the backward pass either, where the parameter is a DTensor."""
    weight = distribute_tensor(randn(9, 8), mesh(), [WHOLE]).requires_grad_()
    x = distribute_tensor(randn(2, 5, 8), mesh(), [Shard(1)])
    result = functional.learned_add(x, weight)
    upstream = torch.ones_like(result)
    with CommDebugMode() as communication:
        (gradient,) = torch.autograd.grad(result, [weight], upstream)
    assert gradient.placements == (Partial(),)
    assert communication.get_total_counts() == 0


class Modules(torch.nn.Module):
    """Each module that takes or gives tensors of a split batch; heads are not split."""

    def __init__(self) -> None:
        super().__init__()
        self.token = pe.TokenEmbedding(50, 16, padding_idx=3, dtype=torch.float64)
        self.position = pe.LearnedPositionalEmbedding(32, 16, dtype=torch.float64)
        self.wave = pe.SinusoidalPositionalEmbedding(16, learned_scale=True, dtype=torch.float64)
        self.rope = pe.RotaryEmbedding(4, learned_frequencies=True, dtype=torch.float64)
        self.alibi = pe.ALiBi(4, learned=True, train_length=4, dtype=torch.float64)

    def forward(self, ids: Tensor, offset: Tensor) -> Tensor:
        x = self.wave(self.position(self.token(ids), offset=offset))
        heads = x.unflatten(-1, (4, 4))
        query, key = (each.transpose(1, 2) for each in self.rope(heads, heads, offset=offset))
        return self.alibi.attention(query, key, key)


def check_modules() -> None:
    """Plain parameters beside DTensors get the gradient of the whole batch."""
    model, ids, offset = Modules(), torch.randint(50, (3, 6)), torch.tensor([0, 5, 2])
    ids[1, 2] = 3
    expected = model(ids, offset)
    wanted = gradients(expected, list(model.parameters()))
    found = model(distribute_tensor(ids, mesh(), [Shard(0)]), offset)
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(gradients(found, list(model.parameters())), wanted)


def parted(tensor: Tensor, place: Placement) -> DTensor:
    return distribute_tensor(tensor, mesh(), [place])


def check_refusals() -> None:
    """What cannot work with the parts that processes have."""
    f, positions = functional, POSITIONS[:4]
    x, ids, weight = randn(2, 4, 4, 8), torch.tensor([[0, 4, 3]]), randn(8, 8)
    batch, seq, heads, whole = (parted(x, place) for place in (Shard(0), Shard(1), Shard(2), WHOLE))
    partial = DTensor.from_local(x, mesh(), [Partial()])
    rows, columns, table, slopes = (
        parted(weight, Shard(0)),
        parted(weight, Shard(1)),
        parted(weight, WHOLE),
        f.alibi_slopes(4),
    )
    fit = "; redistribute it before the call"
    refused(
        (lambda: f.rotary(parted(x, Shard(3)), spec=SPEC), ValueError, f"query: expected Shard(0) or Shard(1) or Shard(2) or Replicate(), got Shard(dim=3){fit}"),
        (lambda: f.rotary(partial, spec=SPEC), ValueError, f"query: expected Shard(0) or Shard(1) or Shard(2) or Replicate(), got Partial(sum){fit}"),
        (lambda: f.rotary(parted(x[:1], Shard(1)), cu_seqlens=torch.tensor([0, 1, 4]), spec=SPEC), ValueError, "cu_seqlens: expected positions instead where the sequence is split"),
        (lambda: f.norm_rotary(batch, seq, x[0, 0, 0], x[0, 0, 0], spec=SPEC), ValueError, "query, key: expected mesh dimension 0 to split one dimension of the call, got query Shard(dim=0), key Shard(dim=1)"),
        (lambda: f.norm_rotary(heads, whole, cos=x[0, :, 0].clone().requires_grad_(), sin=x[0, :, 0], spec=SPEC), ValueError, "cos: expected no gradient where query and key are split differently, got query (Shard(dim=2),), key (Replicate(),)"),
        (lambda: f.rotary(batch, x, spec=SPEC), TypeError, "key: expected a DTensor beside other DTensors, got a Tensor"),
        (lambda: f.rotary(batch, layout="hbsd", spec=SPEC), ValueError, "layout: expected 'bshd', 'bhsd', 'sbhd' or 'thd', got 'hbsd'"),
        (lambda: f.rotary(parted(x[0], Shard(0)), spec=SPEC), ValueError, "query: expected 4 dimensions, got 3"),
        (lambda: f.rotary(seq, positions=parted(torch.zeros(2, 4).long(), Shard(0)), spec=SPEC), ValueError, f"positions: expected placements (Shard(dim=1),), as other arguments are split, got (Shard(dim=0),){fit}"),
        (lambda: f.rotary(whole, out=whole, spec=SPEC), NotImplementedError, "posembed.rotary_out.default does not have a sharding strategy registered."),
        (lambda: f.embedding(ids + 4, rows), IndexError, "ids: expected 0 to 7, a row of the token table of 8, got 8 at index 1"),
        (lambda: f.embedding(parted(ids, Shard(1)), rows), ValueError, "ids, weight: expected mesh dimension 0 to split one dimension of the call, got ids Shard(dim=1), weight Shard(dim=0)"),
        (lambda: f.embedding(ids, rows, vocabulary_start=4), ValueError, "vocabulary_start: expected none for DTensors, got 4"),
        (lambda: f.embedding(ids, rows.detach().requires_grad_(), gradient="rows"), ValueError, "gradient: expected 'dense', as a DTensor has no sparse parts, got 'rows'"),
        (lambda: f.embedding(parted(ids, Shard(1)), weight, scale_grad_by_freq=True), ValueError, "scale_grad_by_freq: expected ids that are not split, because each process counts its own, got (Shard(dim=1),)"),
        (lambda: f.embedding_resize(rows, num_embeddings=9), ValueError, "weight: expected Replicate(), got Shard(dim=0); change the number of rows before the table is sharded, or redistribute it"),
        (lambda: f.learned_add(parted(x[0], Shard(0)), rows), ValueError, f"weight: expected placements (Replicate(),), as other arguments are split, got (Shard(dim=0),){fit}"),
        (lambda: f.learned_add(x[0], table), TypeError, "x: expected a DTensor beside other DTensors, got a Tensor"),
        (lambda: f.learned_extend(columns, max_positions=9), ValueError, "weight: expected Replicate(), got Shard(dim=1); change the number of rows before the table is sharded, or redistribute it"),
        (lambda: f.alibi_attention(seq, heads, heads, slopes=slopes), ValueError, f"key: expected Shard(0) or Shard(1) or Replicate(), got Shard(dim=2){fit}"),
        (lambda: f.alibi_attention(seq, parted(x[:, :2], WHOLE), parted(x[:, :2], WHOLE), slopes=slopes), ValueError, f"key: expected placements (Shard(dim=1),), as other arguments are split, got (Replicate(),){fit}"),
        (lambda: f.alibi_attention(partial, x, x, slopes=slopes, dropout=0.5), ValueError, "dropout: expected 0 for DTensors, got 0.5"),
        (lambda: f.alibi_attention(*(parted(randn(2, n, 4, 8), Shard(1)) for n in (6, 3, 3)), slopes=f.alibi_slopes(6)), ValueError, "key: expected heads that 2 processes split evenly, got 3 for 6 heads of the query"),
        (lambda: f.ngram_ids(parted(ids, Shard(1)), **HASH), ValueError, "ids: expected a sequence in one piece, as n-grams reach back, got (Shard(dim=1),)"),
        (lambda: f.ngram_ids(parted(ids, Shard(0)), **HASH, history=ids[:, :1], cu_seqlens=torch.tensor([0, 3])), ValueError, "history: expected none with cu_seqlens for DTensors"),
        (lambda: f.token_bag(ids, rows), ValueError, f"weight: expected Shard(1) or Replicate(), got Shard(dim=0){fit}"),
        (lambda: f.token_bag(parted(ids[0], Shard(0)), weight, torch.tensor([0, 1])), ValueError, f"ids: expected Replicate(), got Shard(dim=0){fit}"),
        (lambda: f.token_bag(ids, parted(weight, WHOLE).requires_grad_(), gradient="rows"), ValueError, "gradient: expected 'dense', as a DTensor has no sparse parts, got 'rows'"),
        (lambda: f.mla_rotary(heads, parted(x[..., 0, :4], Shard(1)), spec=LATENT), ValueError, "query, key_rope: expected mesh dimension 0 to split one dimension of the call, got query Shard(dim=2), key_rope Shard(dim=1)"),
        (lambda: f.mla_rotary(heads, x[..., 0, :4], spec=LATENT), TypeError, "key_rope: expected a DTensor beside other DTensors, got a Tensor"),
        (lambda: f.rotary_cache_(parted(x[0], Shard(1)), x[0], x[0], x, x, positions, spec=SPEC), ValueError, "query: expected a Tensor, got a DTensor placed (Shard(dim=1),); pass this process's part, to_local()"),
        (lambda: f.mla_rotary_cache_(x[0], x[0, 0], x[0, 0, :, :4], parted(x[0], WHOLE), positions, spec=LATENT), ValueError, "cache: expected a Tensor, got a DTensor placed (Replicate(),); pass this process's part, to_local()"),
        (lambda: f.rerotate_(heads, positions, positions, spec=SPEC), ValueError, "key: expected a Tensor, got a DTensor placed (Shard(dim=2),); pass this process's part, to_local()"),
    )  # fmt: skip


def check_resized() -> None:
    """Tables that each process has get other rows, new ones as the first process draws them."""
    token, plain = pe.TokenEmbedding(6, 4), pe.TokenEmbedding(6, 4)
    plain.load_state_dict(token.state_dict())
    token.weight = torch.nn.Parameter(parted(token.weight.detach(), WHOLE))
    optimizers = [torch.optim.Adam(each.parameters(), 0.1) for each in (token, plain)]
    ids = torch.tensor([[0, 5, 2]])
    for each, optimizer in zip((token, plain), optimizers, strict=True):
        for rows in (6, 8, 5):
            each.resize(rows, optimizer=optimizer)
            optimizer.zero_grad()
            result = each(ids.clamp(max=rows - 1)).square().sum()
            (result.full_tensor() if isinstance(result, DTensor) else result).backward()
            optimizer.step()
        each.select([4, 0, 2], optimizer=optimizer)
        result = each(torch.arange(3)).sum()
        (result.full_tensor() if isinstance(result, DTensor) else result).backward()
        optimizer.step()
    assert token.weight.placements == (WHOLE,)
    torch.testing.assert_close(token.weight.full_tensor(), plain.weight)

    torch.manual_seed(torch.distributed.get_rank())
    token.resize(9, "normal")
    own = token.weight.to_local().detach()
    everywhere = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everywhere, own)
    assert all(torch.equal(each, own) for each in everywhere)

    learned = pe.LearnedPositionalEmbedding(3, 4, first_row=1)
    learned.weight = torch.nn.Parameter(parted(learned.weight.detach(), WHOLE))
    expected = functional.learned_extend(learned.weight.full_tensor(), 5, first_row=1)
    learned.extend(5)
    torch.testing.assert_close(learned.weight.full_tensor(), expected)


def check_row_gradients() -> None:
    """Modules refuse them for split tables, and take them without gradients."""
    tables = pe.TokenEmbedding(6, 4, gradient="rows"), pe.TokenBag(6, 4, gradient="rows")
    for each in tables:
        each.weight = torch.nn.Parameter(parted(each.weight.detach(), Shard(1)))
        refused((lambda: each(torch.tensor([[0, 5]])), ValueError, "gradient: expected 'dense', as a DTensor has no"))  # fmt: skip
        with torch.no_grad():
            assert each(torch.tensor([[0, 5]])).shape[-1] == 4


TWO: dict[str, Callable[[], None]] = {
    "rows of a vocabulary": check_rows,
    "in place": check_in_place,
    "compiled": check_compiled,
    "gradients are sums": check_gradients_are_sums,
    "modules": check_modules,
    "what cannot work is named": check_refusals,
    "resized tables": check_resized,
    "row gradients": check_row_gradients,
}
FOUR: dict[str, Callable[[], None]] = {"rows of a vocabulary": check_rows, "two dimensions": check_two_dimensions}


@pytest.mark.parametrize("name", TWO)
def test_in_two_processes(name: str, two: Processes) -> None:
    two.run(TWO[name])


@pytest.mark.parametrize("name", FOUR)
def test_in_four_processes(name: str, four: Processes) -> None:
    four.run(FOUR[name])
