"""What instances of a patched model do otherwise: look tables up in one kernel, and keep positions.

A module keeps its weights; its class becomes a subclass. Copies of it are patched, too; a pickle
has the model's own class.
"""

from __future__ import annotations

import collections
import copy
import copyreg
import dataclasses
import functools
import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from posembed.functional import Layout
from posembed.functional._ngram import hashed
from posembed.functional._rotary import rotated
from posembed.functional._token import looked_up, padding_row
from posembed.integrations.huggingface._gate import Branches, Gate
from posembed.integrations.huggingface._rotation import (
    ANGLES,
    ATTACHED,
    KERNEL_DEVICES,
    OWN,
    Counter,
    Proofs,
    described,
    modes,
    regrouped,
    varies,
)
from posembed.ngram import NgramSpec
from posembed.specification import RotarySpec
from posembed.tables import Hosted

if TYPE_CHECKING:
    from posembed.integrations.huggingface._rotation import Rotation

Where = Literal["stay", "host"]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
SPEC, SCALE, HOME = "posembed_ngrams", "posembed_scale", "posembed_home"
SOURCE, PROVED = "posembed_source", "posembed_proved"
PROBED = 256  # rows
# What the code of n-grams calls: functions of integers, and those of the cache.
HASHES = {
    *("bitwise_xor", "clamp", "clamp_min", "cummax", "cumsum", "fmod", "full", "full_like", "long"),
    *("masked_fill", "maximum", "minimum", "new_full", "remainder", "where"),
    *("get_conv_state", "update_conv_state", "weight"),
}
POSITIONS = (0, 1, 2, 3, 5, 1000, 32767)
STEP = 2.0**-20  # relative: float32 rounding of frequencies and of their product with positions
ROUNDING = 1e-5  # absolute: float32 rounding of cosines, sines, products, for components of size 1


class Instance(nn.Module):
    """Base class of modules that do something otherwise."""

    posembed_counter: Counter

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(vars(self), memo))
        if SOURCE in vars(made):
            ATTACHED.add(made)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle: the model's own class, and what it holds."""
        added = (SPEC, SCALE, SOURCE, HOME, PROVED, "on_host", "_mapped")
        state = {name: x for name, x in self.__getstate__().items() if name not in added}  # type: ignore[no-untyped-call]
        return copyreg._reconstructor, (original_of(type(self)), object, None), state  # type: ignore[attr-defined]


def original_of(cls: type) -> Any:
    """The model's own class that a class was made from, or the class itself."""
    return vars(cls).get("posembed_original", cls)


def kind_of(original: type) -> type[Instance]:
    """The base class of tables of a class."""
    return ScaledTable if issubclass(original, nn.Embedding) else NgramTable


@functools.cache
def class_of(original: type, kind: type) -> type[Any]:
    """The subclass of a model's class that does something otherwise."""
    members = {"posembed_counter": Counter(), "posembed_original": original}
    members |= {"__module__": original.__module__, "__doc__": original.__doc__}
    return type(original)(original.__name__, (kind, original), members)


def become(module: nn.Module, kind: type) -> None:
    """Makes a module an instance of the subclass, and the bound methods that it holds."""
    _change(module, class_of(original_of(type(module)), kind))


def restore(module: nn.Module) -> None:
    """Gives a module its own class back, and its table the device that it had."""
    home = vars(module).pop(HOME, None)
    if "posembed_original" in vars(type(module)):
        for name in (SPEC, SCALE, SOURCE, PROVED, "on_host", "_mapped"):
            vars(module).pop(name, None)
        ATTACHED.discard(module)
        _change(module, original_of(type(module)))
    if home is not None:
        device, learns = home
        weight: Any = module.weight
        weight.data = weight.data.to(device)
        weight.requires_grad_(learns)


def _change(module: nn.Module, cls: type) -> None:
    before = type(module)
    module.__class__ = cls
    for name, value in list(vars(module).items()):
        if inspect.ismethod(value) and value.__self__ is module:
            method = value.__func__
            if getattr(before, method.__name__, None) is method:  # accelerate's _old_forward
                vars(module)[name] = getattr(cls, method.__name__).__get__(module)


# ------------------------------------------------------------------------------------------- tables


class Ngrams(NamedTuple):
    """How a module hashes n-grams.

    Args:
        table: The name of its ``nn.Embedding``.
        spec: The numbers.
        read: How it asks the cache for the tokens before, the state of a convolution.
        written: What it gives the cache beside the tokens.
    """

    table: str
    spec: NgramSpec
    read: Arguments
    written: Arguments


class ScaledTable(Hosted, Instance):
    """An ``nn.Embedding`` whose rows are multiplied by a number."""

    weight: Tensor
    padding_idx: int | None

    def host_names(self) -> tuple[str, ...]:
        """The table alone."""
        return ("weight",)

    def forward(self, input_ids: Tensor) -> Tensor:
        """The rows of ids, times the scale."""
        if OWN and not getattr(self, "on_host", False):
            return super().forward(input_ids)  # type: ignore[no-any-return]
        found = scaled(self, input_ids, vars(self)[SCALE])
        if torch.compiler.is_compiling():
            return found
        own = super().forward
        if getattr(self, "on_host", False):  # where the model's own code cannot read it
            proved = True
        else:
            proved = _is_own(self, self.weight, input_ids, found, lambda: own(input_ids))
        self.posembed_counter.kernel += proved
        self.posembed_counter.own += not proved
        return found if proved else own(input_ids)


class NgramTable(Instance):
    """A module that hashes n-grams and joins their rows."""

    def forward(self, input_ids: Tensor, past_key_values: Any) -> Tensor:
        """The joined rows, and the last tokens into the cache."""
        if OWN:
            return super().forward(input_ids, past_key_values)  # type: ignore[no-any-return]
        ids, ngrams, own = input_ids.long(), vars(self)[SPEC], super().forward
        spec, size, kept = ngrams.spec, ngrams.spec.ngram_size - 1, input_ids.long()
        history = None
        if past_key_values is not None:
            history = past_key_values.get_conv_state(*ngrams.read[0], **ngrams.read[1])
            short = size - ids.shape[1]
            if history is not None:
                history = history[:, -size:]
            elif short > 0:
                kept = nn.functional.pad(ids, (short, 0), value=spec.padding_token)
        table = getattr(self, ngrams.table)
        found: Tensor = table(hashed(ids, *spec.arguments, history)).flatten(-2)
        if not torch.compiler.is_compiling():

            def expected() -> Tensor | None:
                cache = None if past_key_values is None else _Recorder(history)
                wanted: Tensor = own(input_ids, cache)
                right = cache is None or cache.wrote(ngrams, kept)
                return wanted if right else None

            proved = _is_own(self, table.weight, input_ids, found, expected)
            self.posembed_counter.kernel += proved
            self.posembed_counter.own += not proved
            if not proved:
                return own(input_ids, past_key_values)  # type: ignore[no-any-return]
        if past_key_values is not None:
            past_key_values.update_conv_state(kept, *ngrams.written[0], **ngrams.written[1])
        return found


def _is_own(
    module: Any, weight: Tensor, ids: Tensor, found: Tensor, own: Callable[[], Tensor | None]
) -> bool:
    """Whether rows have the bits of the model's own code; the first call of each kind compares.

    Args:
        module: The module, which keeps what was compared.
        weight: Its table.
        ids: What is looked up.
        found: The rows.
        own: Runs the model's own code; None if that has another effect.
    """

    def difference() -> str | None:
        expected = own()
        if expected is not None and not varies(expected):
            return None
        same = expected is not None and torch.equal(found, expected)
        return "" if same else f"other bits for {described([ids])}"

    if hasattr(weight, "_local_tensor"):  # a look-up of its own would be a collective
        return True
    kind = modes(), ids.dtype, weight.dtype, weight.device, *(n.bit_length() for n in ids.shape)
    proofs: Proofs = vars(module).setdefault(PROVED, Proofs())
    proved = proofs.hold(kind, (ids, weight), difference)
    if proved is False:
        module.posembed_counter.difference = proofs[kind]
    return proved is not False


def scaled(module: Any, ids: Tensor, scale: float) -> Tensor:
    """The rows of an ``nn.Embedding``, times a number, wherever its table is."""
    weight = module.near("weight", ids) if getattr(module, "on_host", False) else module.weight
    padding = padding_row(module.padding_idx, weight)
    return looked_up(ids, weight, padding, scale, module.scale_grad_by_freq, -1, "dense")


def place(model: nn.Module, where: Where) -> Iterator[tuple[Any, int, str]]:
    """Puts tables of layers and of n-grams on the kernels; no input table, which a head may share.

    Args:
        model: The model.
        where: Where tables are afterwards.

    Yields:
        Classes, how many modules have each, and why they were left, or ''.
    """
    shared = _shared(model)
    counts: dict[tuple[Any, str], int] = collections.Counter()
    for module in list(model.modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        original = original_of(type(module))
        own = module._parameters.get("weight")
        reason = None if id(own) in shared else _added(module, original)
        if reason is None:
            continue
        counts[original, reason] += 1
        if reason:
            continue
        table = module
        if SPEC in vars(module):
            table = getattr(module, vars(module)[SPEC].table)
            vars(table)[SCALE] = 1.0
            become(table, ScaledTable)
        become(module, NgramTable if SPEC in vars(module) else ScaledTable)
        if where == "host":
            _move(table)
    yield from ((cls, count, reason) for (cls, reason), count in counts.items())


def _shared(model: nn.Module) -> set[int]:
    """Parameters of several modules, and the models' input tables, which the head may share."""
    owners = collections.Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    inputs = set()
    for module in model.modules():
        try:
            inputs.add(id(module.get_input_embeddings().weight))  # type: ignore[operator]
        except (AttributeError, NotImplementedError, TypeError):
            continue
    return inputs | {parameter for parameter, count in owners.items() if count > 1}


def _move(table: Any) -> None:
    device = table.weight.device
    vars(table).setdefault(HOME, (device, table.weight.requires_grad))
    table.keep_on_host(device if device.type == "cuda" else None)


def _added(module: Any, original: type) -> str | None:
    """Adds what a table's class needs; why it cannot, or None for modules that are no tables."""
    if original is nn.Embedding or issubclass(original, Instance):  # or made from one, by FSDP
        return None
    if issubclass(original, nn.Embedding):
        numbers = _numbers(module)
        return _add_scale(module, original, numbers) if numbers else None
    return _add_ngrams(module, original)


def _numbers(module: nn.Module) -> list[float]:
    """The numbers that a module holds, any of which may be its scale."""
    held = {**vars(module), **module._buffers}
    return [
        float(x)
        for name, x in held.items()
        if name not in (*nn.Embedding.__constants__, SCALE)
        and (isinstance(x, float) or (isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta))
    ]


def _add_scale(module: Any, original: Any, numbers: list[float]) -> str:
    if module.weight.is_meta:
        return "its table is not there yet (meta device)"
    if module.max_norm is not None or module.sparse:
        return "it has an option that the kernel lacks"
    gate = _gate(module, original)
    branches = Branches(gate.codes)
    if gate.reason or branches:
        return gate.reason or branches.first()
    rows = module.num_embeddings
    ids = torch.arange(min(rows, PROBED), device=module.weight.device) * max(1, rows // PROBED)
    dtype = module.weight.dtype
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return f"its table is in {dtype}"
    rounded = [float(torch.tensor(x, dtype=dtype, device="cpu")) for x in numbers]
    with torch.no_grad():
        expected = original.forward(module, ids)
        if not varies(expected):
            return "its table is empty, so that its scale cannot be seen"
        for scale in (*rounded, *numbers):
            if torch.equal(scaled(module, ids, scale), expected):
                vars(module)[SCALE] = scale
                return ""
    return "it computes something else than rows times a number"


def _gate(module: Any, original: type, more: Collection[str] = ()) -> Gate:
    """The gate of what a module's forward does before that of PyTorch's classes."""
    names = {*vars(module), *module._buffers, *module._parameters, *module._modules}
    gate = Gate({*names, "forward", "super", *more}, original, more)
    for base in original.__mro__:
        if base in (nn.Embedding, nn.Module):
            break
        function = vars(base).get("forward")
        gate.reason = gate.reason or (gate.effect(function) if function is not None else "")
    return gate


def _add_ngrams(module: Any, original: Any) -> str | None:
    tables = {
        name: child
        for name, child in module.named_children()
        if original_of(type(child)) is nn.Embedding
    }
    lists = [x.tolist() for x in module._buffers.values() if _is_list(x)]
    if len(tables) != 1 or len(lists) != 3:
        return None
    ((name, table),) = tables.items()
    if table.weight.is_meta:
        return "its table is not there yet (meta device)"
    gate = _gate(module, original, HASHES)
    if gate.reason:
        return gate.reason
    for spec in _specifications(lists, vars(module).values(), table.num_embeddings):
        branches = Branches(gate.codes)
        with branches:
            ngrams = _hashes_alike(module, original, name, spec)
        if ngrams is not None and not branches.unknown():
            vars(module)[SPEC] = ngrams
            return ""
        if ngrams is not None:
            return branches.unknown()
    return "it computes other rows than those of hashed n-grams"


def _is_list(x: Any) -> bool:
    return x is not None and x.dtype == torch.int64 and x.dim() == 1 and not x.is_meta


def _specifications(
    lists: list[list[int]], attributes: Iterable[Any], rows: int
) -> Iterator[NgramSpec]:
    """What n-grams three lists may mean: multipliers, moduli and offsets, and any boundary."""
    for multipliers, moduli, offsets in itertools.permutations(lists):
        heads, rest = divmod(len(moduli), max(1, len(multipliers) - 1))
        begins = [0, *itertools.accumulate(moduli)][:-1]
        if rest or heads == 0 or offsets != begins:
            continue
        by_size = [range(i, i + heads) for i in range(0, len(moduli), heads)]
        for boundary in {x for x in attributes if type(x) is int and x >= 0}:
            yield NgramSpec(
                multipliers,
                [[moduli[i] for i in part] for part in by_size],
                offsets=[[offsets[i] for i in part] for part in by_size],
                boundary=boundary,
                num_embeddings=rows,
            )


class _Recorder:
    """A cache with one state, which keeps how it is called."""

    def __init__(self, history: Tensor | None = None) -> None:
        self.history = history
        self.read: Arguments = (), {}
        self.written: Arguments = (), {}
        self.kept: Tensor | None = None

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self.read = args, kwargs
        return None if self.history is None else self.history.clone()

    def update_conv_state(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.kept, self.written = ids, (args, kwargs)
        return ids

    def wrote(self, ngrams: Ngrams, kept: Tensor) -> bool:
        """Whether it was called as the table calls the model's cache."""
        calls = (self.read, self.written) == (ngrams.read, ngrams.written)
        return calls and self.kept is not None and torch.equal(self.kept, kept)


def _hashes_alike(module: Any, original: Any, name: str, spec: NgramSpec) -> Ngrams | None:
    """How a module calls its cache, if it looks up the rows of a specification."""
    weight = getattr(module, name).weight
    device = next(module.buffers()).device
    every = torch.arange(PROBED, device=device).mul(7919).remainder(PROBED)[None]
    every[:, ::9] = spec.padding_token
    cache = _Recorder()
    with torch.no_grad():
        for ids in (every[:, :1], every):  # shorter than what the cache keeps, and longer
            rows = hashed(ids, *spec.arguments, None).to(weight.device)
            found = nn.functional.embedding(rows, weight).flatten(-2)
            try:
                expected = original.forward(module, ids, cache)
            except Exception:  # another kind of module may need anything
                return None
            if not torch.equal(expected.to(weight.device), found):
                return None
    return None if cache.kept is None else Ngrams(name, spec, cache.read, cache.written)


# ------------------------------------------------------------------------------------- exact angles


@dataclasses.dataclass
class Angles:
    """What tables carry: the positions that they were made from, while nothing has changed them.

    Args:
        source: The specifications of the rotary module.
        kind: The layer type, or None.
        positions: [batch or 1, tokens], or [axes, batch or 1, tokens] with several axes.
        versions: Of the positions and of the two tables.
        tables: The tables.
    """

    source: Source
    kind: str | None
    positions: Tensor
    versions: tuple[int, ...]
    tables: tuple[weakref.ref[Tensor], ...]

    def turned(self, rotation: Rotation, given: dict[str, Any]) -> Any:
        """The result by exact angles, or None if tables were changed or mean something else."""
        roles, rule = rotation.rule.roles, rotation.rule
        if roles.form not in ("separate", "pair") or rule.cos is None:
            return None
        tables = roles.tables(given)
        same = all(x is y() for x, y in zip(tables, self.tables, strict=True))
        if not same or self.versions != tuple(x._version for x in (self.positions, *tables)):
            return None
        dimension = given[roles.unsqueeze] if roles.unsqueeze else rule.unsqueeze
        slots: list[Any] = [given.get(name) for name in roles.tensors]
        text = self.source.text(rotation, self.kind, dimension, slots[0])
        if not text or any(given[n] != x for n, x in roles.others().items()):
            return None
        return rule.packed(_turned(rotation, slots, self.positions, text, dimension), len(slots))


def _turned(
    rotation: Rotation, slots: list[Any], positions: Tensor, text: str, dimension: int | None
) -> tuple[Tensor, ...]:
    """Rotations by exact angles, in the dtype of each tensor."""
    layout = layout_of(dimension)
    assert layout is not None
    tensors = [x for x in slots if x is not None]
    if rotation.rule.pairs == "regrouped":
        tensors = [regrouped(x) for x in tensors]
    results: list[Tensor] = []
    while tensors:
        first, second = tensors.pop(0), None
        if tensors and tensors[0].dtype == first.dtype:
            second = tensors.pop(0)
        found = rotated(first, second, positions, text, layout, 0, False, None, None)
        results.extend(found if isinstance(found, tuple) else (found,))
    return tuple(results)


def layout_of(dimension: int | None) -> Layout | None:
    """The tensor layout if this is the head dimension inserted into [batch, tokens, width]."""
    places: dict[int | None, Layout] = {1: "bhsd", -3: "bhsd", 2: "bshd", -2: "bshd"}
    return places.get(dimension)


class WithPositions(Instance):
    """A rotary module whose tables carry the positions that they were made from."""

    def forward(self, x: Tensor, position_ids: Tensor, *rest: Any, **named: Any) -> Any:
        """The model's tables."""
        tables = super().forward(x, position_ids, *rest, **named)
        kind = next(iter((*rest, *named.values())), None)
        source: Source = vars(self)[SOURCE]
        eager = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
        if eager and kind in source.specs and x.device.type in KERNEL_DEVICES and len(tables) == 2:
            several = source.specs[kind].sections is not None
            if several and position_ids.dim() == 3 and position_ids.shape[0] == 1:
                position_ids = position_ids[0]  # the same for all axes, as the model expands it
            versions = tuple(x._version for x in (position_ids, *tables))
            angles = Angles(source, kind, position_ids, versions, tuple(map(weakref.ref, tables)))
            for table in tables:
                setattr(table, ANGLES, angles)
        return tables


def attach(model: nn.Module) -> Iterator[tuple[Any, int, str]]:
    """Makes rotary modules keep positions beside their tables.

    Yields:
        Classes, how many modules have each, and why their tables are used alone, or ''.
    """
    counts: dict[tuple[Any, str], int] = collections.Counter()
    for module in list(model.modules()):
        original = original_of(type(module))
        if not _makes_tables(original) or issubclass(original, Instance):
            continue
        found = _source(module, original)
        counts[original, found if isinstance(found, str) else ""] += 1
        if isinstance(found, Source):
            vars(module)[SOURCE] = found
            become(module, WithPositions)
            ATTACHED.add(module)
    yield from ((cls, count, reason) for (cls, reason), count in counts.items())


def _makes_tables(cls: type) -> bool:
    """Whether modules of a class look like they make tables from positions alone."""
    try:
        names = list(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return False
    return names[:3] == ["self", "x", "position_ids"] and names[3:] in ([], ["layer_type"])


class Source:
    """Specifications of a rotary module, and which rotations use its tables as they say.

    Args:
        module: A module of the same configuration on the CPU.
        specs: A specification for each layer type, or None.
    """

    def __init__(self, module: Any, specs: dict[str | None, RotarySpec]) -> None:
        self.module, self.specs = module, specs
        self.verified: dict[Any, str] = {}

    def text(self, rotation: Rotation, kind: str | None, dimension: Any, query: Tensor) -> str:
        """The text of the specification, if a rotation by the module's tables rotates like it."""
        key = rotation, kind, dimension, query.shape[-1]
        if key not in self.verified:
            spec, pairs = self.specs[kind], rotation.rule.pairs
            right = spec.interleaved == (pairs != "halves") and query.shape[-1] == spec.head_dim
            right = right and layout_of(dimension) is not None and rotation.rule.tokens == "all"
            right = (
                right and not rotation.rule.gathers and self._is_alike(rotation, kind, dimension)
            )
            written = spec if pairs != "regrouped" else dataclasses.replace(spec, interleaved=False)
            self.verified[key] = written.text if right else ""
        return self.verified[key]

    def _is_alike(self, rotation: Rotation, kind: str | None, dimension: Any) -> bool:
        """Whether both rotate alike, up to float32 rounding, at positions up to 32,767."""
        spec = self.specs[kind]
        shape = (1, 2, len(POSITIONS), spec.head_dim)
        if layout_of(dimension) != "bhsd":
            shape = (1, len(POSITIONS), 2, spec.head_dim)
        random = torch.Generator("cpu").manual_seed(7)
        query = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")
        positions = _positions(spec)
        written = dataclasses.replace(spec, interleaved=rotation.rule.pairs == "adjacent").text
        roles = rotation.rule.roles

        def theirs(x: Tensor) -> Tensor:
            tables = self.module(x, positions, *([] if kind is None else [kind]))
            given = {**roles.defaults, **dict.fromkeys(roles.tensors, x)}
            if roles.form == "separate":
                given |= {roles.cos: tables[0], roles.sin or "": tables[1]}
            else:
                given[roles.cos] = tables
            if roles.unsqueeze:
                given[roles.unsqueeze] = dimension
            result = rotation.original(**given)
            found: Tensor = result[0] if isinstance(result, tuple) else result
            return found

        def ours(factor: float) -> Tensor:
            scaled = positions.double() * factor
            return _turned(rotation, [query.double()], scaled, written, dimension)[0]

        try:
            with torch.no_grad():
                expected, narrow = theirs(query), theirs(query.bfloat16())
                exact, low, high = (ours(factor) for factor in (1.0, 1 - STEP, 1 + STEP))
        except Exception:  # tables of another shape may raise anything
            return False
        slack = (high - low).abs() + ROUNDING * max(1.0, spec.attention_factor)
        same = expected.shape == exact.shape and narrow.dtype == torch.bfloat16
        return same and bool(((expected - exact).abs() <= slack).all())


def _positions(spec: RotarySpec) -> Tensor:
    """Positions [1, tokens], or [axes, 1, tokens] with another order on each axis."""
    one = torch.tensor([POSITIONS], device="cpu")
    if spec.sections is None:
        return one
    axes = spec.sections.axes or 1 + max(spec.sections.axis_of_pair)
    return torch.stack([one.roll(axis, -1) for axis in range(axes)])


def _source(module: Any, original: Any) -> Source | str:
    """The specifications of a rotary module, or why its tables are used alone."""
    if next(module.parameters(), None) is not None:
        return "it has parameters"
    try:
        with torch.device("cpu"):
            fresh = original(module.config).train(module.training)
    except Exception:  # another kind of module may need anything
        return "it cannot be made from its configuration"
    for name, buffer in fresh.named_buffers():
        mine = getattr(module, name, None)
        if not isinstance(mine, Tensor) or mine.is_meta:
            return "its frequencies are not there yet (meta device)"
        if not torch.equal(buffer.to(mine.dtype), mine.cpu()):
            return f"its {name} differs from that of its configuration"
    for name, value in vars(fresh).items():
        if isinstance(value, int | float | str) and vars(module).get(name) != value:
            return f"its {name} differs from that of its configuration"
    found = [re.fullmatch(r"(?:(\w+)_)?inv_freq", name) for name, _ in fresh.named_buffers()]
    kinds = [match[1] for match in found if match]
    kinds = [k for k in kinds if k is None or not k.endswith(("original", "long"))]
    specs: dict[str | None, RotarySpec] = {}
    for kind in kinds:
        try:
            specs[kind] = RotarySpec.from_huggingface(module.config, kind)
        except (TypeError, ValueError) as error:
            return f"its configuration is not understood: {error}"
        if specs[kind].is_dynamic:
            return "its frequencies depend on the length of the sequence"
    return Source(fresh, specs) if specs else "it has no frequencies"
