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
import types
import weakref
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posembed.functional import Layout
from posembed.functional._ngram import hashed
from posembed.functional._rotary import rotated
from posembed.functional._token import looked_up, padding_row
from posembed.integrations.huggingface._gate import Gate
from posembed.integrations.huggingface._rotation import (
    ANGLES,
    ATTACHED,
    KERNEL_DEVICES,
    OWN,
    Calls,
    Rotation,
    Rule,
    described,
    modes,
    parts_of,
    proved,
    varies,
)
from posembed.modules.ngram import NgramSpec
from posembed.specifications import RotarySpec
from posembed.tables.table import Hosted

Where = Literal["stay", "host"]
Counts = dict[tuple[Any, str], int]
# What a module does in place of its forward: it takes the module, its own forward, and arguments.
Forward = Callable[..., Any]
# A module's table, or None for a rotary module, with what it does; why it stays; or nothing.
Found = tuple[Any, Any] | str | None
FORWARD, PROVED, HOME = "posembed_forward", "posembed_proved", "posembed_home"
ADDED = (FORWARD, PROVED, "on_host", "_mapped")
META = "its table is not there yet (meta device)"
ALONE = "its tables are used, without positions: "
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


class Instance(Hosted):
    """A module of a model that does something otherwise, which an attribute holds."""

    posembed_calls: Calls  # of all modules of a class

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the attribute does, or the model's own code."""
        own = super().forward
        if OWN and not self.on_host:  # where the model's own code cannot read the table
            return own(*args, **kwargs)
        return vars(self)[FORWARD](self, own, *args, **kwargs)

    def host_names(self) -> tuple[str, ...]:
        """The table alone."""
        return ("weight",)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(vars(self), memo))
        if self in ATTACHED:
            ATTACHED.add(made)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle: the model's own class, and what it holds."""
        held = self.__getstate__().items()
        state = {name: x for name, x in held if name not in (*ADDED, HOME)}
        return copyreg._reconstructor, (original_of(type(self)), object, None), state  # type: ignore[attr-defined]

    def posembed_compare(
        self, weight: Tensor, ids: Tensor, found: Tensor, own: Callable[[], Tensor | None]
    ) -> bool:
        """Whether rows have the bits of the model's own code, and counts the call.

        ``own`` runs that code at the first call of each kind; None if it has another effect.
        """

        def compare() -> str | None:
            expected = own()
            if expected is not None and not varies(expected):
                return None
            same = expected is not None and torch.equal(found, expected)
            return "" if same else f"other bits for {described([ids])}"

        same, calls = True, self.posembed_calls
        if not hasattr(weight, "_local_tensor"):  # a look-up of its own would be a collective
            lengths = (n.bit_length() for n in ids.shape)
            kind = modes(), ids.dtype, weight.dtype, weight.device, *lengths
            proofs = vars(self).setdefault(PROVED, {})
            same = proved(proofs, kind, (ids, weight), compare, calls) is not False
        calls.own += not same
        calls.kernel += same
        return same


def original_of(cls: type) -> Any:
    """The model's own class that a class was made from, or the class itself."""
    return vars(cls).get("posembed_original", cls)


@functools.cache
def class_of(original: type) -> type[Any]:
    """The subclass of a model's class that does something otherwise."""
    members = {"posembed_calls": Calls(), "posembed_original": original}
    members |= {"__module__": original.__module__, "__doc__": original.__doc__}
    return type(original)(original.__name__, (Instance, original), members)


def become(module: nn.Module, cls: type) -> None:
    """Makes a module an instance of another class, and the bound methods that it holds."""
    before = type(module)
    module.__class__ = cls
    for name, value in list(vars(module).items()):
        if inspect.ismethod(value) and value.__self__ is module:
            method = value.__func__
            if getattr(before, method.__name__, None) is method:  # accelerate's _old_forward
                vars(module)[name] = getattr(cls, method.__name__).__get__(module)


def replace(module: nn.Module, forward: Forward) -> None:
    """Makes a module do something else in place of its forward."""
    vars(module)[FORWARD] = forward
    become(module, class_of(original_of(type(module))))


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


def _scaling(scale: float) -> Forward:
    """What an ``nn.Embedding`` does whose rows are multiplied by a number."""

    def forward(module: Any, own: Any, input_ids: Tensor) -> Tensor:
        found = scaled(module, input_ids, scale)
        if torch.compiler.is_compiling():
            return found
        if module.on_host:
            module.posembed_calls.kernel += 1
            return found
        same = module.posembed_compare(module.weight, input_ids, found, lambda: own(input_ids))
        return found if same else own(input_ids)

    return forward


def _joining(name: str, spec: NgramSpec, called: Any) -> Forward:
    """What a module does that hashes n-grams and joins the rows of its table with this name.

    ``called`` says how it asks the cache for the tokens before, the state of a convolution, and
    what it gives the cache beside the tokens.
    """
    size = spec.ngram_size - 1

    def forward(module: Any, own: Any, input_ids: Tensor, past_key_values: Any) -> Tensor:
        ids = kept = input_ids.long()
        history = None
        if past_key_values is not None:
            history = past_key_values.get_conv_state(*called.read[0], **called.read[1])
            short = size - ids.shape[1]
            if history is not None:
                history = history[:, -size:]
            elif short > 0:
                kept = nn.functional.pad(ids, (short, 0), value=spec.padding_token)
        table = getattr(module, name)
        found: Tensor = table(hashed(ids, *spec.arguments, history)).flatten(-2)

        def expected() -> Tensor | None:
            cache = None if past_key_values is None else _recorder(history)
            wanted: Tensor = own(input_ids, cache)
            if cache is None:
                return wanted
            alike = (cache.read, cache.written) == (called.read, called.written)
            alike = alike and cache.kept is not None and torch.equal(cache.kept, kept)
            return wanted if alike else None

        known = torch.compiler.is_compiling()
        if not (known or module.posembed_compare(table.weight, input_ids, found, expected)):
            return own(input_ids, past_key_values)  # type: ignore[no-any-return]
        if past_key_values is not None:
            past_key_values.update_conv_state(kept, *called.written[0], **called.written[1])
        return found

    return forward


def scaled(module: Any, ids: Tensor, scale: float) -> Tensor:
    """The rows of an ``nn.Embedding``, times a number, wherever its table is."""
    weight = module.near("weight", ids) if isinstance(module, Instance) else module.weight
    padding = padding_row(module.padding_idx, weight)
    return looked_up(ids, weight, padding, scale, module.scale_grad_by_freq, -1, "dense")


def place(model: nn.Module, where: Where, exact: bool) -> Counts:
    """Puts tables of layers and of n-grams on the kernels; no input table, which a head may share.

    If ``exact``, rotary modules keep positions beside their tables. Returns how many modules have
    each class, by class and why they were left, or '' for tables on the kernels.
    """
    parameters = (x for module in model.modules() for x in module.parameters(recurse=False))
    shared = {x for x, count in collections.Counter(map(id, parameters)).items() if count > 1}
    for module in model.modules():
        with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
            shared.add(id(module.get_input_embeddings().weight))  # type: ignore[operator]
    counts: Counts = collections.Counter()
    for module in list(model.modules()):
        original = original_of(type(module))
        left = isinstance(module, torch.jit.ScriptModule) or original is nn.Embedding
        left = left or issubclass(original, Instance)  # or made from one, by FSDP
        if left or id(module._parameters.get("weight")) in shared:
            continue
        if module in ATTACHED:
            restore(module)
        finders = [_layers if issubclass(original, nn.Embedding) else _ngrams, _rotary]
        every = (find(module, original) for find in finders[: 1 + exact])
        found: Any = next(filter(None, every), None)
        if found is None:
            continue
        if isinstance(found, str):
            counts[original, found] += 1
            continue
        table, forward = found
        replace(module, forward)
        if table is None:
            ATTACHED.add(module)
            continue
        counts[original, ""] += 1
        if table is not module:
            replace(table, _scaling(1.0))
        if where == "host":
            device = table.weight.device
            vars(table).setdefault(HOME, (device, table.weight.requires_grad))
            table.keep_on_host(device if device.type == "cuda" else None)
    return counts


def _layers(module: Any, original: Any) -> Found:
    """A table of layers and what it does, or why it stays; None if it has no scale."""
    numbers = [  # any may be the scale
        float(x)
        for name, x in {**vars(module), **module._buffers}.items()
        if name not in nn.Embedding.__constants__
        and (isinstance(x, float) or (isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta))
    ]
    if not numbers:
        return None
    if module.weight.is_meta:
        return META
    rows, dtype = module.num_embeddings, module.weight.dtype
    if module.max_norm is not None or module.sparse:
        return "it has an option that the kernel lacks"
    gate = _gate(module, original, {"tensor"})
    for jumps in gate.jumps.values():
        return gate.reason or f"it branches on {next(iter(jumps.values()))[2]}"
    if gate.reason:
        return gate.reason
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return f"its table is in {dtype}"
    ids = torch.arange(min(rows, PROBED), device=module.weight.device) * max(1, rows // PROBED)
    rounded = [float(torch.tensor(x, dtype=dtype, device="cpu")) for x in numbers]
    with torch.no_grad():
        expected = original.forward(module, ids)
        if not varies(expected):
            return "its table is empty, so that its scale cannot be seen"
        for scale in (*rounded, *numbers):
            if torch.equal(scaled(module, ids, scale), expected):
                return module, _scaling(scale)
    return "it computes something else than rows times a number"


def _gate(module: Any, original: type, more: Collection[str]) -> Gate:
    """The gate of what a module's forward does before that of PyTorch's classes."""
    names = {*vars(module), *module._buffers, *module._parameters, *module._modules}
    own = itertools.takewhile(lambda x: x not in (nn.Embedding, nn.Module), original.__mro__)
    functions = [vars(base)["forward"] for base in own if "forward" in vars(base)]
    return Gate(functions, {*names, "forward", "super", *more}, original, more)


def _ngrams(module: Any, original: Any) -> Found:
    """A module's table and what it does, or why it stays; None if it hashes no n-grams."""
    lists = []
    for x in module._buffers.values():
        if x is not None and x.dtype == torch.int64 and x.dim() == 1 and not x.is_meta:
            lists.append(x.tolist())
    children = module.named_children()
    tables = [(n, x) for n, x in children if original_of(type(x)) is nn.Embedding]
    if len(lists) != 3 or len(tables) != 1:
        return None
    ((name, table),) = tables
    gate = _gate(module, original, HASHES)
    if table.weight.is_meta or gate.reason:
        return META if table.weight.is_meta else gate.reason
    boundaries = {x for x in vars(module).values() if type(x) is int and x >= 0}
    orders = itertools.product(itertools.permutations(lists), boundaries)
    for (multipliers, moduli, offsets), boundary in orders:
        heads, rest = divmod(len(moduli), max(1, len(multipliers) - 1))
        if rest or heads == 0 or offsets != [0, *itertools.accumulate(moduli)][:-1]:
            continue
        parts = [slice(i, i + heads) for i in range(0, len(moduli), heads)]
        spec = NgramSpec(
            multipliers,
            [moduli[part] for part in parts],
            offsets=[offsets[part] for part in parts],
            boundary=boundary,
            num_embeddings=table.num_embeddings,
        )
        with gate.watching():
            called = _hashes_alike(module, original, name, spec)
        if called is not None:
            return gate.unseen() or (table, _joining(name, spec, called))
    return "it computes other rows than those of hashed n-grams"


def _recorder(history: Tensor | None = None) -> Any:
    """A cache with one state, which keeps how it is called."""
    cache = types.SimpleNamespace(read=((), {}), written=((), {}), kept=None)

    def read(*args: Any, **kwargs: Any) -> Tensor | None:
        cache.read = args, kwargs
        return None if history is None else history.clone()

    def written(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cache.kept, cache.written = ids, (args, kwargs)
        return ids

    cache.get_conv_state, cache.update_conv_state = read, written
    return cache


def _hashes_alike(module: Any, original: Any, name: str, spec: NgramSpec) -> Any:
    """How a module calls its cache; None if it looks up other rows than the specification."""
    weight = getattr(module, name).weight
    device = next(module.buffers()).device
    every = torch.arange(PROBED, device=device).mul(7919).remainder(PROBED)[None]
    every[:, ::9] = spec.padding_token
    cache = _recorder()
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
    return None if cache.kept is None else cache


# ------------------------------------------------------------------------------------- exact angles


def _keeping(source: Any, specs: dict[str | None, RotarySpec]) -> Forward:
    """What a rotary module does whose tables carry the positions that they were made from.

    ``source`` is a module of the same configuration on the CPU, with specifications by layer type.
    """
    texts: dict[Any, str] = {}  # of the specification; '' if another rotation is meant

    def forward(
        module: Any, own: Any, x: Tensor, position_ids: Tensor, *rest: Any, **named: Any
    ) -> Any:
        tables = own(x, position_ids, *rest, **named)
        kind = next(iter((*rest, *named.values())), None)
        eager = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
        if eager and kind in specs and x.device.type in KERNEL_DEVICES and len(tables) == 2:
            several = specs[kind].sections is not None
            if several and position_ids.dim() == 3 and position_ids.shape[0] == 1:
                position_ids = position_ids[0]  # the same for all axes, as the model expands it
            held = [*map(weakref.ref, tables)]
            versions = [x._version for x in (position_ids, *tables)]
            angles = functools.partial(turned, kind, position_ids, held, versions)
            for table in tables:
                setattr(table, ANGLES, angles)
        return tables

    def turned(
        kind: Any, positions: Tensor, held: Any, versions: Any, rotation: Rotation, given: Any
    ) -> Any:
        """The result by exact angles, or None if tables were changed or mean something else."""
        roles, rule = rotation.rule.roles, rotation.rule
        tables = roles.tables(given)
        if roles.form not in ("separate", "pair") or rule.cos is None or len(tables) != 2:
            return None
        if tables[0] is not held[0]() or tables[1] is not held[1]():
            return None
        if versions != [x._version for x in (positions, *tables)]:
            return None
        dim = given[roles.unsqueeze] if roles.unsqueeze else rule.unsqueeze
        slots: list[Any] = [given.get(name) for name in roles.tensors]
        key = rotation, kind, dim, slots[0].shape[-1]
        if key not in texts:
            texts[key] = _text(source, specs[kind], rotation, kind, dim, given)
        if not texts[key] or any(given[n] != x for n, x in roles.others().items()):
            return None
        tensors = [x for x in slots if x is not None]
        return rule.packed(_turned(rule, tensors, positions, texts[key], dim), len(slots))

    return forward


def _text(
    source: Any, spec: RotarySpec, rotation: Rotation, kind: Any, dim: Any, given: Any
) -> str:
    """The specification, if tables rotate alike at positions up to 32,767; otherwise ''."""
    roles, rule = rotation.rule.roles, rotation.rule
    text = dataclasses.replace(spec, interleaved=rule.pairs == "adjacent").text
    head = given[roles.tensors[0]].shape[-1]
    if spec.interleaved != (rule.pairs != "halves") or head != spec.head_dim:
        return ""
    if dim not in LAYOUTS or rule.tokens != "all" or rule.gathers:
        return ""
    sizes = (2, len(POSITIONS)) if LAYOUTS[dim] == "bhsd" else (len(POSITIONS), 2)
    random = torch.Generator("cpu").manual_seed(7)
    query = torch.randn((1, *sizes, head), generator=random, dtype=torch.float32, device="cpu")
    positions = torch.tensor([POSITIONS], device="cpu")
    if spec.sections is not None:  # another order on each axis
        axes = spec.sections.axes or 1 + max(spec.sections.axis_of_pair)
        positions = torch.stack([positions.roll(axis, -1) for axis in range(axes)])

    def theirs(x: Tensor) -> Tensor:
        tables = source(x, positions, *([] if kind is None else [kind]))
        passed = {roles.cos: tables, **dict.fromkeys(roles.tensors, x)}
        if roles.form != "pair":
            passed |= {roles.cos: tables[0], roles.sin or "": tables[1]}
        found: Tensor = parts_of(rotation.original(**{**given, **passed}))[0]
        return found

    def ours(factor: float) -> Tensor:
        return _turned(rule, [query.double()], positions.double() * factor, text, dim)[0]

    try:
        with torch.no_grad():
            expected, narrow = theirs(query), theirs(query.bfloat16())
            exact, low, high = (ours(factor) for factor in (1.0, 1 - STEP, 1 + STEP))
    except Exception:  # tables of another shape may raise anything
        return ""
    slack = (high - low).abs() + ROUNDING * max(1.0, spec.attention_factor)
    same = expected.shape == exact.shape and narrow.dtype == torch.bfloat16
    return text if same and bool(((expected - exact).abs() <= slack).all()) else ""


def _turned(
    rule: Rule, tensors: list[Tensor], positions: Tensor, text: str, dim: int | None
) -> tuple[Tensor, ...]:
    """Rotations by exact angles, in the dtype of each tensor."""
    if rule.pairs == "regrouped":
        tensors = [torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in tensors]
    turn: Any = rotated
    options = positions, text, LAYOUTS[dim], 0, False, None, None
    if len(tensors) == 2 and tensors[0].dtype == tensors[1].dtype:
        return turn(*tensors, *options)  # type: ignore[no-any-return]
    return tuple(turn(x, None, *options) for x in tensors)


def _rotary(module: Any, original: Any) -> Found:
    """What keeps the positions of a rotary module's tables, or why these are used alone."""
    names: list[str] = []
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        names = list(inspect.signature(original.forward).parameters)
    # It looks as if it made tables from positions alone.
    if names[:3] != ["self", "x", "position_ids"] or names[3:] not in ([], ["layer_type"]):
        return None
    source = _source(module, original)
    if isinstance(source, str):
        return ALONE + source
    specs: dict[str | None, RotarySpec] = {}
    for name, _ in source.named_buffers():
        match = re.fullmatch(r"(?:(\w+)_)?inv_freq", name)
        if match is None or (match[1] or "").endswith(("original", "long")):
            continue
        try:
            specs[match[1]] = RotarySpec.from_huggingface(module.config, match[1])
        except (TypeError, ValueError) as error:
            return f"{ALONE}its configuration is not understood: {error}"
        if specs[match[1]].is_dynamic:
            return ALONE + "its frequencies depend on the length of the sequence"
    return (None, _keeping(source, specs)) if specs else ALONE + "it has no frequencies"


def _source(module: Any, original: Any) -> Any:
    """A module of the same configuration on the CPU, or why it makes other tables."""
    if next(module.parameters(), None) is not None:
        return "it has parameters"
    try:
        with torch.device("cpu"):
            fresh = original(module.config).train(module.training)
    except Exception:  # another kind of module may need anything
        return "it cannot be made from its configuration"
    buffers = dict(fresh.named_buffers())
    for name, value in {**vars(fresh), **buffers}.items():
        mine = getattr(module, name, None)
        same = not isinstance(value, int | float | str) or mine == value
        if name in buffers:
            if not isinstance(mine, Tensor) or mine.is_meta:
                return "its frequencies are not there yet (meta device)"
            same = torch.equal(value.to(mine.dtype), mine.cpu())
        if not same:
            return f"its {name} differs from that of its configuration"
    return fresh
