"""What instances of a patched model do otherwise: look tables up in one kernel, and keep positions.

A module keeps its weights; its class becomes a subclass. Copies of it are patched, too; a pickle
has the model's own class.
"""

from __future__ import annotations

import collections
import contextlib
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
    Rule,
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
ADDED = (SPEC, SCALE, SOURCE, PROVED, "on_host", "_mapped")
META = "its table is not there yet (meta device)"
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
LAYOUTS: dict[int | None, Layout] = {1: "bhsd", -3: "bhsd", 2: "bshd", -2: "bshd"}


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
        held = self.__getstate__().items()  # type: ignore[no-untyped-call]
        state = {name: x for name, x in held if name not in (*ADDED, HOME)}
        return copyreg._reconstructor, (original_of(type(self)), object, None), state  # type: ignore[attr-defined]

    def posembed_compare(
        self, weight: Tensor, ids: Tensor, found: Tensor, own: Callable[[], Tensor | None]
    ) -> bool:
        """Whether rows have the bits of the model's own code, and counts the call.

        Args:
            weight: The table.
            ids: What is looked up; the first call of each kind is compared.
            found: The rows.
            own: Runs the model's own code; None if that has another effect.
        """

        def difference() -> str | None:
            expected = own()
            if expected is not None and not varies(expected):
                return None
            same = expected is not None and torch.equal(found, expected)
            return "" if same else f"other bits for {described([ids])}"

        proved: bool | None = True
        counter, proofs = self.posembed_counter, vars(self).setdefault(PROVED, Proofs())
        if not hasattr(weight, "_local_tensor"):  # a look-up of its own would be a collective
            lengths = (n.bit_length() for n in ids.shape)
            kind = modes(), ids.dtype, weight.dtype, weight.device, *lengths
            proved = proofs.hold(kind, (ids, weight), difference)
            if proved is False:
                counter.difference = proofs[kind]
        counter.own += proved is False
        counter.kernel += proved is not False
        return proved is not False


def original_of(cls: type) -> Any:
    """The model's own class that a class was made from, or the class itself."""
    return vars(cls).get("posembed_original", cls)


@functools.cache
def class_of(original: type, kind: type) -> type[Any]:
    """The subclass of a model's class that does something otherwise."""
    members = {"posembed_counter": Counter(), "posembed_original": original}
    members |= {"__module__": original.__module__, "__doc__": original.__doc__}
    return type(original)(original.__name__, (kind, original), members)


def become(module: nn.Module, cls: type) -> None:
    """Makes a module an instance of another class, and the bound methods that it holds."""
    before = type(module)
    module.__class__ = cls
    for name, value in list(vars(module).items()):
        if inspect.ismethod(value) and value.__self__ is module:
            method = value.__func__
            if getattr(before, method.__name__, None) is method:  # accelerate's _old_forward
                vars(module)[name] = getattr(cls, method.__name__).__get__(module)


def restore(module: nn.Module) -> None:
    """Gives a module its own class back, and its table the device that it had."""
    home = vars(module).pop(HOME, None)
    if "posembed_original" in vars(type(module)):
        for name in ADDED:
            vars(module).pop(name, None)
        ATTACHED.discard(module)
        become(module, original_of(type(module)))
    if home is not None:
        weight: Any = module.weight
        weight.data = weight.data.to(home[0])
        weight.requires_grad_(home[1])


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
        own, hosted = super().forward, getattr(self, "on_host", False)
        if OWN and not hosted:
            return own(input_ids)  # type: ignore[no-any-return]
        found = scaled(self, input_ids, vars(self)[SCALE])
        if torch.compiler.is_compiling():
            return found
        if hosted:  # where the model's own code cannot read it
            self.posembed_counter.kernel += 1
            return found
        proved = self.posembed_compare(self.weight, input_ids, found, lambda: own(input_ids))
        return found if proved else own(input_ids)


class NgramTable(Instance):
    """A module that hashes n-grams and joins their rows."""

    def forward(self, input_ids: Tensor, past_key_values: Any) -> Tensor:
        """The joined rows, and the last tokens into the cache."""
        own = super().forward
        if OWN:
            return own(input_ids, past_key_values)  # type: ignore[no-any-return]
        ids, ngrams = input_ids.long(), vars(self)[SPEC]
        spec, size, kept = ngrams.spec, ngrams.spec.ngram_size - 1, ids
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

        def expected() -> Tensor | None:
            cache = None if past_key_values is None else _Recorder(history)
            wanted: Tensor = own(input_ids, cache)
            return wanted if cache is None or cache.wrote(ngrams, kept) else None

        known = torch.compiler.is_compiling()
        if not (known or self.posembed_compare(table.weight, input_ids, found, expected)):
            return own(input_ids, past_key_values)  # type: ignore[no-any-return]
        if past_key_values is not None:
            past_key_values.update_conv_state(kept, *ngrams.written[0], **ngrams.written[1])
        return found


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
    parameters = (x for module in model.modules() for x in module.parameters(recurse=False))
    owners = collections.Counter(map(id, parameters))
    shared = {parameter for parameter, count in owners.items() if count > 1}
    for module in model.modules():
        with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
            shared.add(id(module.get_input_embeddings().weight))  # type: ignore[operator]
    counts: dict[tuple[Any, str], int] = collections.Counter()
    for module in list(model.modules()):
        original = original_of(type(module))
        left = isinstance(module, torch.jit.ScriptModule)
        left = left or id(module._parameters.get("weight")) in shared
        reason = None if left else _added(module, original)
        if reason is None:
            continue
        counts[original, reason] += 1
        if reason:
            continue
        table: Any = module
        if SPEC in vars(module):
            become(module, class_of(original, NgramTable))
            table = getattr(module, vars(module)[SPEC].table)
            vars(table)[SCALE] = 1.0
        become(table, class_of(original_of(type(table)), ScaledTable))
        if where == "host":
            device = table.weight.device
            vars(table).setdefault(HOME, (device, table.weight.requires_grad))
            table.keep_on_host(device if device.type == "cuda" else None)
    yield from ((cls, count, reason) for (cls, reason), count in counts.items())


def _added(module: Any, original: type) -> str | None:
    """Adds what a table's class needs; why it cannot, or None for modules that are no tables."""
    if original is nn.Embedding or issubclass(original, Instance):  # or made from one, by FSDP
        return None
    if not issubclass(original, nn.Embedding):
        return _add_ngrams(module, original)
    numbers = [  # any may be the scale
        float(x)
        for name, x in {**vars(module), **module._buffers}.items()
        if name not in (*nn.Embedding.__constants__, SCALE)
        and (isinstance(x, float) or (isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta))
    ]
    return _add_scale(module, original, numbers) if numbers else None


def _add_scale(module: Any, original: Any, numbers: list[float]) -> str:
    if module.weight.is_meta:
        return META
    if module.max_norm is not None or module.sparse:
        return "it has an option that the kernel lacks"
    gate = _gate(module, original)
    branches = Branches(gate.codes)
    if gate.reason or branches:
        return gate.reason or branches.first()
    rows, dtype = module.num_embeddings, module.weight.dtype
    ids = torch.arange(min(rows, PROBED), device=module.weight.device) * max(1, rows // PROBED)
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
    for base in itertools.takewhile(lambda x: x not in (nn.Embedding, nn.Module), original.__mro__):
        function = vars(base).get("forward")
        gate.reason = gate.reason or (gate.effect(function) if function is not None else "")
    return gate


def _add_ngrams(module: Any, original: Any) -> str | None:
    children = module.named_children()
    tables = [(n, x) for n, x in children if original_of(type(x)) is nn.Embedding]
    lists = [
        x.tolist()
        for x in module._buffers.values()
        if x is not None and x.dtype == torch.int64 and x.dim() == 1 and not x.is_meta
    ]
    if len(tables) != 1 or len(lists) != 3:
        return None
    ((name, table),) = tables
    gate = _gate(module, original, HASHES)
    if table.weight.is_meta or gate.reason:
        return META if table.weight.is_meta else gate.reason
    for spec in _specifications(lists, vars(module).values(), table.num_embeddings):
        branches = Branches(gate.codes)
        with branches:
            ngrams = _hashes_alike(module, original, name, spec)
        if ngrams is not None:
            if not branches.unknown():
                vars(module)[SPEC] = ngrams
            return branches.unknown()
    return "it computes other rows than those of hashed n-grams"


def _specifications(
    lists: list[list[int]], attributes: Iterable[Any], rows: int
) -> Iterator[NgramSpec]:
    """What n-grams three lists may mean: multipliers, moduli and offsets, and any boundary."""
    for multipliers, moduli, offsets in itertools.permutations(lists):
        heads, rest = divmod(len(moduli), max(1, len(multipliers) - 1))
        begins = [0, *itertools.accumulate(moduli)][:-1]
        if rest or heads == 0 or offsets != begins:
            continue
        parts = [slice(i, i + heads) for i in range(0, len(moduli), heads)]
        for boundary in {x for x in attributes if type(x) is int and x >= 0}:
            yield NgramSpec(
                multipliers,
                [moduli[part] for part in parts],
                offsets=[offsets[part] for part in parts],
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
            versions = [t._version for t in (position_ids, *tables)]
            held = list(map(weakref.ref, tables))
            angles = functools.partial(source.turned, kind, position_ids, held, versions)
            for table in tables:
                setattr(table, ANGLES, angles)
        return tables


class Source:
    """Specifications of a rotary module, and which rotations use its tables as they say.

    Args:
        module: A module of the same configuration on the CPU.
        specs: A specification for each layer type, or None.
    """

    def __init__(self, module: Any, specs: dict[str | None, RotarySpec]) -> None:
        self.module, self.specs = module, specs
        self.texts: dict[Any, str] = {}  # of the specification; '' if another rotation is meant

    def turned(
        self,
        kind: str | None,
        positions: Tensor,
        held: list[weakref.ref[Tensor]],
        versions: list[int],
        rotation: Rotation,
        given: dict[str, Any],
    ) -> Any:
        """The result by exact angles, or None if tables were changed or mean something else.

        Args:
            kind: The layer type, or None.
            positions: [batch or 1, tokens], or [axes, batch or 1, tokens] with several axes.
            held: The tables that were made from them.
            versions: Of the positions and of the two tables.
            rotation: What gets the tables.
            given: Its arguments.
        """
        roles, rule = rotation.rule.roles, rotation.rule
        if roles.form not in ("separate", "pair") or rule.cos is None:
            return None
        tables = roles.tables(given)
        same = all(x is y() for x, y in zip(tables, held, strict=True))
        if not same or versions != [x._version for x in (positions, *tables)]:
            return None
        dim = given[roles.unsqueeze] if roles.unsqueeze else rule.unsqueeze
        slots: list[Any] = [given.get(name) for name in roles.tensors]
        key = rotation, kind, dim, slots[0].shape[-1]
        if key not in self.texts:
            text = dataclasses.replace(self.specs[kind], interleaved=rule.pairs == "adjacent").text
            self.texts[key] = text if self._rotates_alike(*key, text) else ""
        text = self.texts[key]
        if not text or any(given[n] != x for n, x in roles.others().items()):
            return None
        tensors = [x for x in slots if x is not None]
        return rule.packed(_turned(rule, tensors, positions, text, dim), len(slots))

    def _rotates_alike(self, rotation: Rotation, kind: Any, dim: Any, head: int, text: str) -> bool:
        """Whether tables and the specification rotate alike, at positions up to 32,767."""
        spec, roles, rule = self.specs[kind], rotation.rule.roles, rotation.rule
        if spec.interleaved != (rule.pairs != "halves") or head != spec.head_dim:
            return False
        if dim not in LAYOUTS or rule.tokens != "all" or rule.gathers:
            return False
        sizes = (2, len(POSITIONS)) if LAYOUTS[dim] == "bhsd" else (len(POSITIONS), 2)
        random = torch.Generator("cpu").manual_seed(7)
        query = torch.randn((1, *sizes, head), generator=random, dtype=torch.float32, device="cpu")
        positions = torch.tensor([POSITIONS], device="cpu")
        if spec.sections is not None:  # another order on each axis
            axes = spec.sections.axes or 1 + max(spec.sections.axis_of_pair)
            positions = torch.stack([positions.roll(axis, -1) for axis in range(axes)])

        def theirs(x: Tensor) -> Tensor:
            tables = self.module(x, positions, *([] if kind is None else [kind]))
            given = {**roles.defaults, **dict.fromkeys(roles.tensors, x)}
            pair = roles.form == "pair"
            given |= (
                {roles.cos: tables} if pair else {roles.cos: tables[0], roles.sin or "": tables[1]}
            )
            if roles.unsqueeze:
                given[roles.unsqueeze] = dim
            result = rotation.original(**given)
            found: Tensor = result[0] if isinstance(result, tuple) else result
            return found

        def ours(factor: float) -> Tensor:
            return _turned(rule, [query.double()], positions.double() * factor, text, dim)[0]

        try:
            with torch.no_grad():
                expected, narrow = theirs(query), theirs(query.bfloat16())
                exact, low, high = (ours(factor) for factor in (1.0, 1 - STEP, 1 + STEP))
        except Exception:  # tables of another shape may raise anything
            return False
        slack = (high - low).abs() + ROUNDING * max(1.0, spec.attention_factor)
        same = expected.shape == exact.shape and narrow.dtype == torch.bfloat16
        return same and bool(((expected - exact).abs() <= slack).all())


def _turned(
    rule: Rule, tensors: list[Tensor], positions: Tensor, text: str, dim: int | None
) -> tuple[Tensor, ...]:
    """Rotations by exact angles, in the dtype of each tensor."""
    if rule.pairs == "regrouped":
        tensors = [regrouped(x) for x in tensors]
    results: list[Tensor] = []
    while tensors:
        first, *tensors = tensors
        second = tensors.pop(0) if tensors and tensors[0].dtype == first.dtype else None
        found = rotated(first, second, positions, text, LAYOUTS[dim], 0, False, None, None)
        results.extend(found if isinstance(found, tuple) else (found,))
    return tuple(results)


def attach(model: nn.Module) -> Iterator[tuple[Any, int, str]]:
    """Makes rotary modules keep positions beside their tables.

    Yields:
        Classes, how many modules have each, and why their tables are used alone, or ''.
    """
    counts: dict[tuple[Any, str], int] = collections.Counter()
    for module in list(model.modules()):
        original = original_of(type(module))
        names: list[str] = []
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            names = list(inspect.signature(original.forward).parameters)
        # It looks as if it made tables from positions alone.
        makes = names[:3] == ["self", "x", "position_ids"] and names[3:] in ([], ["layer_type"])
        if not makes or issubclass(original, Instance):
            continue
        found = _source(module, original)
        counts[original, found if isinstance(found, str) else ""] += 1
        if isinstance(found, Source):
            vars(module)[SOURCE] = found
            become(module, class_of(original, WithPositions))
            ATTACHED.add(module)
    yield from ((cls, count, reason) for (cls, reason), count in counts.items())


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
    specs: dict[str | None, RotarySpec] = {}
    for name, _ in fresh.named_buffers():
        match = re.fullmatch(r"(?:(\w+)_)?inv_freq", name)
        if match is None or (match[1] or "").endswith(("original", "long")):
            continue
        try:
            specs[match[1]] = RotarySpec.from_huggingface(module.config, match[1])
        except (TypeError, ValueError) as error:
            return f"its configuration is not understood: {error}"
        if specs[match[1]].is_dynamic:
            return "its frequencies depend on the length of the sequence"
    return Source(fresh, specs) if specs else "it has no frequencies"
