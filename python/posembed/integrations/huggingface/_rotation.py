"""A rotation that runs in place of a model's own function, with the same arguments and results.

A rule says how the function rotates. The first call of each kind runs the model's own code too and
compares bits; later ones are a look-up and a call of the operator.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from posembed.functional._rotary_tables import rotated_by_tables
from posembed.glue.build_info import build_info

KERNEL_DEVICES = {"cpu", "meta"} | ({"cuda"} if build_info()["cuda_version"] else set())
NARROW = (torch.bfloat16, torch.float16)
ROUNDED = (torch.float32, *NARROW)
ONCE = {*ROUNDED, torch.complex64, torch.complex128}  # which products in float32 may have
Form = Literal["separate", "pair", "joint", "stacked", "matrices", "angles", "complex"]
INNER = {"stacked": 1, "matrices": 2}  # dimensions of a pair's elements behind the pairs
MAX_WIDTH = 1024  # rotated components that the kernel takes
ANGLES = "posembed_angles"  # of tables that carry the positions that they were made from
ATTACHED: weakref.WeakSet[Any] = weakref.WeakSet()  # rotary modules that make such tables
OWN: list[None] = []  # has an element while all run the model's own code
KNOWN = 512  # calls that a rotation remembers: prompt lengths are unbounded
WORDS = {"halves": "half-split", "adjacent": "interleaved", "regrouped": "adjacent pairs to halves"}
# The columns of a table for each pair: the first table, 0, or the second, 1; the column to begin
# at, as numbers of pairs and of columns; and the step from one column to the next.
Columns = tuple[int, int, int, int]
# How tables belong to tensors: the ranks of both, the view ("" takes tables as they are, "squeezed"
# without a dimension of size 1, "each head" with one for heads, "tokens first" as [tokens, 1, 1,
# width], and "parts" for each part of the last dimension), and the head dimension then.
Layout = tuple[int, int, str, int]
Shape = tuple[int, ...]
# How to call the operator: the layout, the operator's options (layout, interleaved, half_width,
# start, numerics), whether one call is enough, and the shape of tables then if it is another.
Plan = tuple[Layout, tuple[Any, ...], bool, Shape | None]


@dataclasses.dataclass(frozen=True)
class Roles:
    """Names of the arguments that matter for a rotation, in the function's order."""

    names: tuple[str, ...] = ()  # all arguments
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # of those that have one
    tensors: tuple[str, ...] = ()  # what is rotated
    cos: str = ""  # the tables, or the first of two
    sin: str | None = None
    # How tables are passed: in arguments of their own, as a pair, side by side, in a last dimension
    # of 2, as matrices of 2 x 2, as their angles, or as complex numbers.
    form: Form = "separate"
    unsqueeze: str | None = None  # the head dimension to insert into the tables
    positions: str | None = None  # rows of the tables
    options: tuple[tuple[str, Any], ...] = ()  # values of others that are not their defaults

    def others(self) -> dict[str, Any]:
        """Arguments without a role, and the only value of each that a rotation supports."""
        known = {*self.tensors, self.cos, self.sin, self.unsqueeze, self.positions}
        values = {**self.defaults, **dict(self.options)}
        return {name: values.get(name) for name in self.names if name not in known}

    def tables(self, given: dict[str, Any], *, once: bool = False) -> list[Tensor]:
        """The tables, with all that belongs to a token in one dimension; none in another form.

        ``once``: angles are converted to float32 first.
        """
        table: Any = given.get(self.cos)
        tables, inner = [table], INNER.get(self.form, 0)
        if self.form == "separate":
            tables.append(given.get(self.sin or ""))
        elif self.form == "pair":
            tables = list(table) if isinstance(table, tuple | list) and len(table) == 2 else []
        if not all(isinstance(x, Tensor) and x.dim() > inner for x in tables):
            return []
        if self.form == "angles":
            table = table.float() if once else table
            return [table.cos(), table.sin()]
        if inner and table.shape[-inner:] != (2,) * inner:
            return []
        return [table.flatten(-1 - inner)] if inner else tables


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rotation that a function computes, by arguments in some roles."""

    roles: Roles = Roles()
    # Components i and i + n/2, or 2i and 2i + 1; "regrouped" reads these and writes halves.
    pairs: Literal["halves", "adjacent", "regrouped"] = "halves"
    # Where the factors of the first and of the second component of a pair are in the tables, their
    # columns for a pair, and the signs of the sine's products. Complex tables have no places.
    cos: tuple[Columns, Columns] | None = None
    sin: tuple[Columns, Columns] | None = None
    ratio: int = 1
    signs: tuple[int, int] = (-1, 1)
    # "float32" rounds each product as PyTorch does, "float32_product" rounds once.
    numerics: Literal["float32", "float32_product", "float64"] = "float32"
    keeps_dtype: bool = False  # results have that of their tensors even if tables are wider
    casts: bool = False  # tables are converted to the dtype of the tensors first
    window: Literal["all", "first", "last"] = "all"  # components of the head that rotate
    unsqueeze: int | None = None  # the head dimension that the function inserts into its tables
    gathers: bool = False  # it gathers the tables' rows by position
    # All tokens have a row in the tables, only the last have one, or the query uses some rows.
    tokens: Literal["all", "last", "table's last", "table's first"] = "all"
    # For which this is verified, with dtypes of tensors and tables. None: all.
    layouts: frozenset[Layout] | None = None
    dtypes: frozenset[tuple[torch.dtype, torch.dtype]] | None = None
    packs: bool = False  # results are contiguous, whatever the memory order of the tensors
    # What is returned if the last tensors are None: the rest alone, or padded with None.
    lone: Literal["", "alone", "padded"] = ""

    @functools.cached_property
    def reads(self) -> Literal["whole", "half", "apart"]:
        """How the kernel gets the tables: as they are, a value for each pair, or joined anew."""
        if self.cos is None or self.sin is None:
            return "whole"
        if sum(self.signs) == 0:
            if self.cos[0] == self.cos[1] and self.sin[0] == self.sin[1]:
                return "half"
            ends = {"adjacent": ((0, 0, 2), (0, 1, 2))}.get(self.pairs, ((0, 0, 1), (1, 0, 1)))
            whole = [tuple((at, *end) for end in ends) for at in (0, 1)]
            if self.ratio == 2 and self.cos in whole and self.sin in whole:
                return "whole"
        return "apart"

    @property
    def is_plain(self) -> bool:
        """Whether the kernel takes the two tables as they are."""
        if self.cos is None or self.sin is None:
            return True
        as_is = self.reads == "whole" or (self.reads == "half" and self.ratio == 1)
        return as_is and self.signs == (-1, 1) and self.cos[0][0] != self.sin[0][0]

    def __str__(self) -> str:
        words = WORDS[self.pairs]
        if self.cos is None:
            words += ", complex"
        elif self.reads == "half":
            whole = self.ratio == 1 or self.cos[0][3] > 1
            places = {0: "first ", self.ratio // 2: "second "}
            words += f", {'' if whole else places.get(self.cos[0][1], '')}half tables"
        words += f", {self.window} part of the head" if self.window != "all" else ""
        words += f", {self.tokens} tokens" if self.tokens != "all" else ""
        words += ", backwards" if self.signs == (1, -1) else ""
        once = self.numerics.replace("_product", "")
        return words if self.numerics == "float32" else f"{words}, {once}"

    # ------------------------------------------------------------------------------------ planning

    def plan(self, given: dict[str, Any]) -> Plan | None:
        """How to rotate these arguments; None if the function itself has to run."""
        roles, kinds = self.roles, (int, float, str)
        for name, value in roles.others().items():  # tensors are not compared
            x = given.get(name)
            if x is not value and (type(x) not in kinds or type(value) not in kinds or x != value):
                return None
        slots = [given.get(name) for name in roles.tensors]
        tensors = [x for x in slots if x is not None]
        known = tensors if self.lone else slots  # the others may be None
        if not tensors or not all(isinstance(x, Tensor) for x in slots[: len(known)]):
            return None
        dim = given[roles.unsqueeze] if roles.unsqueeze else self.unsqueeze
        if len(given) > len(roles.names) or not (dim is None or isinstance(dim, int)):
            return None
        cos, sin = self.tables(given, tensors[0])
        if cos is None:
            return None
        dtype, device = tensors[0].dtype, cos.device
        if device.type not in KERNEL_DEVICES or cos.is_complex() != (self.cos is None):
            return None
        if any(x.dtype != dtype or x.device != device for x in tensors):
            return None
        if not dtype.is_floating_point or tensors[0].dim() not in (3, 4):
            return None
        if self.numerics == "float32_product" and not {dtype, cos.dtype} <= ONCE:
            return None
        if sin is not None and (sin.shape, sin.dtype, sin.device) != (cos.shape, cos.dtype, device):
            return None
        if self.dtypes is not None and (dtype, cos.dtype) not in self.dtypes:
            return None
        return self._plan(tensors, cos, dim)

    def _view(self, x: Tensor, cos: Tensor, dim: int | None) -> tuple[str, int, Shape, Shape]:
        """The view of tables and the head dimension then, 0 for other broadcasts.

        And the shapes for the kernel, of tables and of what is before the heads' components.
        """
        lead, rows, rank = x.shape[:-1], cos.shape[:-1], cos.dim()
        if dim is not None:
            heads = dim if dim < 0 else dim - rank - 1
            known = heads in (-2, -3) and rank in (2, x.dim() - 1)
            return "", heads if known else 0, rows, lead
        if rank == 2:
            return "", -3, rows, lead
        if rank <= x.dim() and rank - 1 in (2, x.dim() - 1):
            if rows[-2] == 1 and (rows[-1] != 1 or lead[-1] == 1):
                return "squeezed", -3, (*rows[:-2], rows[-1]), lead
            if rows[-1] == 1 and rows[-2] == lead[-2]:
                return "squeezed", -2, rows[:-1], lead
        if self.tokens == "all" and x.dim() == 4:
            if rows == (lead[0], 1, 1):
                return "tokens first", -2, rows[:1], (lead[0], lead[1] * lead[2])
            if rows in (lead[1:], (1, *lead[1:]), lead):
                return "each head", -2, rows if rank == 4 else (1, *rows), lead
        if self.tokens == "all" and rows == lead:  # one dimension may have all heads
            parts, width = 1, x.shape[-1]
            if width > MAX_WIDTH and self.pairs == "adjacent" and self.window == "all":
                counts = (n for n in range(2, width // 2 + 1) if width % (2 * n) == 0)
                parts = next((n for n in counts if width // n <= MAX_WIDTH), 1)
            return "parts", -2, (*rows, parts), (*lead, parts)
        return "", 0, rows, lead

    def _plan(self, tensors: list[Tensor], cos: Tensor, dim: int | None) -> Plan | None:
        """The plan for tensors and tables, if the kernel takes their sizes."""
        query = tensors[0]
        view, heads, rows, lead = self._view(query, cos, dim)
        rank, layout = query.dim(), (query.dim(), cos.dim(), view, heads)
        if not heads or (self.layouts is not None and layout not in self.layouts):
            return None
        if view in ("each head", "parts") and any(x.shape != query.shape for x in tensors):
            return None
        lead = (1, *lead) if rank == 3 and heads == -3 else lead
        wide = self.numerics == "float64" or cos.dtype == torch.complex128
        plain = view in ("", "squeezed", "each head") and (rank == 4 or heads == -2)
        plain = plain and len(tensors) <= 2 and self.pairs != "regrouped" and not wide
        parts = lead[-1] if view == "parts" else 1
        head, width = query.shape[-1] // parts, cos.shape[-1] // parts
        table = (*rows, width)
        width *= 2 if self.reads == "half" or self.cos is None else 1
        if width > MAX_WIDTH or (width > head if self.window != "all" else width != head):
            return None
        axis = {"tokens first": 0, "parts": 1}.get(view, -2 if heads == -3 else -3)  # of tokens
        for x in tensors:
            if x.dim() != rank or x.shape[-1] != query.shape[-1]:
                return None
            if len(rows) > 1 and rows[0] not in (1, x.shape[0] if len(lead) == 3 else 1):
                return None
            more = x.shape[axis] - rows[1 if len(rows) == 3 else -1]
            shorter = x is query and self.tokens.startswith("table's")
            if (more > 0 and self.tokens != "last") or (more < 0 and not shorter):
                return None
            plain = plain and more == 0
        numerics: str = self.numerics
        once = self.keeps_dtype and query.dtype in ROUNDED and cos.dtype == torch.float32
        if once and numerics == "float32":  # dtypes are kept: the same bits, rounded earlier
            numerics = "float32_product"
        stays = cos.is_complex() or torch.promote_types(query.dtype, cos.dtype) == query.dtype
        plain = plain and (not self.keeps_dtype or stays)
        order = "bhsd" if heads == -3 else "thd" if len(lead) == 2 else "bshd"
        start = head - width if self.window == "last" else 0
        numerics = "float32" if wide else numerics
        options = order, self.pairs == "adjacent", self.reads == "half", start, numerics
        return layout, options, plain, table if view else None

    # ------------------------------------------------------------------------------------ rotating

    def run(self, given: dict[str, Any], plan: Plan) -> Any:
        """The result for arguments that the plan was made for."""
        _, options, plain, shape = plan
        slots = [given[name] for name in self.roles.tensors]
        tensors = [x for x in slots if x is not None]
        cos, sin = self.tables(given, tensors[0])
        if shape is not None:
            cos, sin = cos.reshape(shape), None if sin is None else sin.reshape(shape)
        if not plain:
            turned = tuple([self._turned(x, cos, sin, plan) for x in tensors])
            return self.packed(turned, len(slots))
        key = tensors[1] if len(tensors) > 1 else None
        return self.packed(rotated_by_tables(tensors[0], key, None, cos, sin, *options), len(slots))

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor | None, plan: Plan) -> Tensor:
        """A rotation that needs more than a call: of other tokens, dtypes, pairs or views."""
        (rank, _, view, heads), options, _, _ = plan
        shape, dtype = x.shape, x.dtype
        if view == "parts":
            x = x.view(*shape[:-1], cos.shape[-2], -1)
        elif view == "tokens first":
            x = x.flatten(1, 2)
        elif rank == 3 and heads == -3:
            x = x[None]
        if self.numerics == "float64" or cos.dtype == torch.complex128:
            x, cos = x.double(), cos.to(torch.complex128 if cos.is_complex() else torch.float64)
            sin = None if sin is None else sin.double()
        if self.pairs == "regrouped":
            x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        axis, rows = -2 if heads == -3 else -3, cos.shape[1 if cos.dim() == 4 else -2]
        more, before = x.shape[axis] - rows, None
        if more > 0:
            before, x = torch.split(x, [more, rows], axis)
        elif more < 0:
            rest = -2, -more if self.tokens == "table's last" else 0, rows + more
            cos, sin = cos.narrow(*rest), None if sin is None else sin.narrow(*rest)
        result: Any = rotated_by_tables(x, None, None, cos, sin, *options)
        result = result if before is None else torch.cat((before, result), axis)
        result = result.to(dtype) if self.keeps_dtype or cos.is_complex() else result
        return result.reshape(shape)  # type: ignore[no-any-return]

    def tables(self, given: dict[str, Any], query: Tensor) -> tuple[Any, Tensor | None]:
        """Cosines and sines for the kernel, gathered by position if necessary.

        None in place of cosines if the arguments have another form.
        """
        tables = self.roles.tables(given, once=self.numerics == "float32_product")
        rows = given.get(self.roles.positions or "")
        if not tables or (self.gathers and (tables[0].dim() != 2 or not isinstance(rows, Tensor))):
            return None, None
        found: list[Tensor] = tables[:1]
        if self.cos is not None and self.sin is not None:
            signs = (1, 1), (-self.signs[0], self.signs[1])
            found = []
            for read, factors in zip((self.cos, self.sin), signs, strict=True):
                table, parts = tables[read[0][0]], []
                pairs = table.shape[-1] // self.ratio
                for (_, block, offset, step), sign in zip(read, factors, strict=True):
                    start = block * pairs + offset
                    part = table
                    if self.reads != "whole":
                        part = table[..., start : start + (pairs - 1) * step + 1 : step]
                    parts.append(part if sign > 0 else -part)
                    if self.reads != "apart":  # the same for both components of a pair
                        break
                if self.reads != "apart":
                    found.append(parts[0])
                elif self.pairs == "adjacent":
                    found.append(torch.stack(parts, -1).flatten(-2))
                else:
                    found.append(torch.cat(parts, -1))
        if self.gathers:
            found = [x[rows] for x in found]
        if self.casts:
            found = [x.to(query.dtype) for x in found]
        return found[0], found[1] if len(found) > 1 else None

    def packed(self, result: Any, slots: int) -> Any:
        """The result in the function's form, for this number of tensor arguments."""
        rotated = result if isinstance(result, tuple) else (result,)
        if self.packs:
            rotated = tuple([x.contiguous() for x in rotated])
        if len(rotated) < slots and self.lone == "padded":
            return (*rotated, *[None] * (slots - len(rotated)))
        return rotated[0] if slots == 1 or (len(rotated) == 1 and self.lone == "alone") else rotated


# --------------------------------------------------------------------------------------- comparing


def parts_of(result: Any) -> list[Any]:
    """The elements of a result."""
    return list(result) if isinstance(result, tuple) else [result]


def difference(first: Any, second: Any, exact: bool) -> str:
    """In what results differ, "shapes", "dtypes" or "bits"; '' if they are equal.

    Unless exact, elements may be one rounding apart: PyTorch's complex product rounds differently
    in the remainder of a SIMD vector, so its bits depend on shape and strides.
    """
    found, each = "", (parts_of(first), parts_of(second))
    if isinstance(first, tuple) != isinstance(second, tuple) or len(each[0]) != len(each[1]):
        return "shapes"
    for x, y in zip(*each, strict=True):
        if x is None and y is None:
            continue
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.shape != y.shape:
            return "shapes"
        if x.dtype != y.dtype:
            found = "dtypes"
            continue
        step = torch.finfo(x.dtype).eps if x.dtype in NARROW else 1e-6
        near = not exact and torch.allclose(x, y, rtol=step, atol=1e-6)
        if not (near or torch.equal(x, y)):
            found = found or "bits"
    return found


def varies(x: Tensor) -> bool:
    """Whether a tensor's numbers are finite, and more than one."""
    return x.numel() > 0 and bool(x.isfinite().all()) and bool(x.min() < x.max())


def described(tensors: Iterable[Tensor]) -> str:
    """The dtypes and shapes of tensors, for a row."""
    return " and ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors)


@dataclasses.dataclass
class Calls:
    """Calls of one function, since the patch.

    Args:
        function: Its name.
        location: Its file and line.
        kernel: How often posembed's kernel ran.
        own: How often the model's own code ran, for arguments that posembed does not support.
        exact: How often the kernel ran by exact angles, not by the model's tables.
        difference: Where the kernel's bits were not those of the function, or ''.
    """

    function: str = ""
    location: str = ""
    kernel: int = 0
    own: int = 0
    exact: int = 0
    difference: str = ""


def proved(
    proofs: dict[Any, str],
    kind: Any,
    values: Iterable[Any],
    compare: Callable[[], str | None],
    calls: Calls,
) -> bool | None:
    """Whether bits are those of the model's own code; None if that is not known yet.

    ``proofs`` has '' or the difference, by kind of call. ``compare`` runs both; None if the numbers
    cannot tell. ``calls`` gets the first difference.
    """
    try:
        known = proofs.get(kind)
    except TypeError:  # an argument that cannot be hashed
        return None
    plain, tensors = (Tensor, torch.nn.Parameter), [x for x in values if isinstance(x, Tensor)]
    # The model's own code may run beside the kernel, and results may be compared.
    provable = (
        all(type(x) in plain or hasattr(x, "_local_tensor") for x in tensors)
        and not any(x.is_meta for x in tensors)
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
        and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )
    if known is None and provable:
        try:
            with torch.no_grad():
                known = compare()
        except Exception:  # memory that runs out; what else is wrong, the call itself raises
            return None
        if known is not None:
            proofs[kind] = known
    calls.difference = calls.difference or known or ""
    return None if known is None else not known


def _copied(value: Any) -> Any:
    """An argument for the comparison: detached, and the local part of a distributed tensor."""
    if isinstance(value, tuple | list):
        return type(value)(map(_copied, value))
    if not isinstance(value, Tensor):
        return value
    return getattr(value, "_local_tensor", value).detach().clone()


def modes() -> tuple[Any, ...]:
    """Whether there are gradients and inference mode, and the dtypes of autocast or False."""
    autocast: Any = False
    if torch._C._is_any_autocast_enabled():
        autocast = tuple(
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in ("cpu", "cuda")
        )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def signature(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call depends on: of plain tensors their metadata, otherwise the value itself."""
    return (
        *modes(),
        *[
            (x.shape, x.dtype, x.device, x.is_contiguous(), x.requires_grad)
            if type(x) is Tensor
            else signature(tuple(x))
            if type(x) in (tuple, list)
            else x
            for x in args
        ],
    )


# ----------------------------------------------------------------------------------------- rotation


class Rotation:
    """Calls the operator in place of a model's function, ``original``, or the function itself.

    The function runs for arguments that the operator does not support: other devices, dtypes,
    broadcasts and options. The first call of each kind whose numbers can tell rotations apart runs
    it, too: if its bits differ, the function stays for calls of that kind. ``cases`` say what it
    computes, for different layouts of tables and for different options.
    """

    def __init__(self, original: Callable[..., Any], cases: tuple[Rule, ...]) -> None:
        self.original, self.cases, self.rule = original, cases, cases[0]
        self.reads = [rule.reads for rule in cases]  # cached now: torch.compile takes no locks
        roles = self.rule.roles
        self.empty = {name: roles.defaults.get(name) for name in roles.names}
        self.known: dict[Any, Callable[..., Any]] = {}  # proved calls, by signature
        self.used: dict[int, Rule] = {}  # by identity
        self.proofs: dict[Any, str] = {}
        self.calls = Calls()

    def function(self) -> Any:
        """A function that calls this, for the code that takes the place of the model's own."""
        known, calls, attached = self.known, self.calls, ATTACHED
        key_of, is_compiling = signature, torch.compiler.is_compiling
        at = self.rule.roles.names.index(self.rule.roles.cos)

        def rotate(*args: Any, **kwargs: Any) -> Any:
            if kwargs or is_compiling() or (attached and _angles(args[at]) is not None):
                return self(*args, **kwargs)
            try:
                call = known.get(key_of(args))
            except TypeError:  # an argument that cannot be hashed, or symbolic shapes
                call = None
            if call is None:
                return self(*args)
            calls.kernel += 1
            return call(*args)

        made: Any = rotate
        made.rule = self.rule
        return made

    def forms(self) -> str:
        """What it computes, by default and with other options; or what calls have used."""
        texts: dict[str, str] = {}
        for rule in self.used.values() or self.cases:
            given = ", ".join(f"{name}={value!r}" for name, value in rule.roles.options)
            texts.setdefault(str(rule), f"{rule} with {given}" if given else str(rule))
        return "; ".join(texts.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Rotates like the model's function."""
        given = {**self.empty, **dict(zip(self.rule.roles.names, args, strict=False)), **kwargs}
        if torch.compiler.is_compiling():  # code is compiled again when a counter changes
            chosen = self._choose(given)
            if chosen is None:
                return self.original(*args, **kwargs)
            return chosen[0].run(given, chosen[1])
        if ATTACHED:
            angles = _angles(given.get(self.rule.roles.cos))
            result = None if angles is None else angles(self, given)
            if result is not None:
                self.calls.kernel += 1
                self.calls.exact += 1
                return result
        chosen = self._choose(given)
        known = chosen is not None and self._prove(given, chosen[1])
        if chosen is None or known is False:
            self.calls.own += 1
            return self.original(*args, **kwargs)
        self.calls.kernel += 1
        rule, plan = chosen
        self.used[id(rule)] = rule
        if known and not kwargs:
            self._remember(rule, plan, args)
        return rule.run(given, plan)

    def _choose(self, given: dict[str, Any]) -> tuple[Rule, Plan] | None:
        """The rule and the plan for these arguments; None if the function itself has to run."""
        plans = ((rule, plan) for rule in self.cases if (plan := rule.plan(given)) is not None)
        return next(plans, None)

    def _remember(self, rule: Rule, plan: Plan, args: tuple[Any, ...]) -> None:
        """Calls with such arguments are a look-up from now on, unless a value may be a tensor."""
        kinds = (Tensor, int, float, bool, str, types.NoneType)
        for x in args:
            each = x if type(x) in (tuple, list) else [x]
            if not all(type(y) in kinds for y in each):
                return
        if len(self.known) >= KNOWN:
            self.known.clear()
        roles, ((_, _, view, _), options, plain, _) = rule.roles, plan
        key = roles.tensors[1] if len(roles.tensors) > 1 else None
        needed = roles.tensors[0], key, roles.cos, roles.sin
        q, k, c, s = (roles.names.index(name) if name else -1 for name in needed)
        plain = plain and rule.is_plain and not (view or rule.gathers or rule.casts or rule.packs)
        plain = plain and len(roles.tensors) < 3 and roles.form in ("separate", "complex")
        if rule.cos is not None and rule.cos[0][0] == 1:
            c, s = s, c

        def general(*x: Any) -> Any:
            return rule.run({**self.empty, **dict(zip(roles.names, x, strict=False))}, plan)

        def single(*x: Any) -> Any:
            return call(x[q], x[c], None if s < 0 else x[s], *options)

        def pair(*x: Any) -> Any:
            return call(x[q], x[k], x[c], None if s < 0 else x[s], *options)

        operators = torch.ops.posembed
        call: Any = (operators.rotary_tables if k < 0 else operators.rotary_tables_pair).default._op
        # Nothing but a call of the operator.
        direct = plain and max(q, k, c, s) < len(args) and (k < 0 or args[k] is not None)
        self.known[signature(args)] = (single if k < 0 else pair) if direct else general

    def _prove(self, given: dict[str, Any], plan: Plan) -> bool | None:
        """Whether bits are those of the model's own code; None if that is not known yet."""
        kind: list[Any] = list(modes())
        for name, x in given.items():
            for y in x if isinstance(x, tuple | list) else (x,):
                if not isinstance(y, Tensor):
                    kind.append(y)
                    continue
                kept = y.dim() + plan[0][3] if name in self.rule.roles.tensors else -1
                for i, n in enumerate(y.shape):  # lengths count by their powers of two
                    kind.append(n if i in (kept, y.dim() - 1) else n.bit_length())
                kind.append((y.dtype, y.device, y.is_contiguous(), y.requires_grad))

        def compare() -> str | None:
            return self._difference({name: _copied(x) for name, x in given.items()})

        return proved(self.proofs, tuple(kind), given.values(), compare, self.calls)

    def _difference(self, given: dict[str, Any]) -> str | None:
        """How the kernel's bits differ from those of the model's own code; '' if they do not.

        None if these numbers cannot tell: identity angles, or values that are constant or NaN.
        """
        chosen, roles = self._choose(given), self.rule.roles
        if chosen is None:  # parts of distributed tensors have other shapes
            return None
        rule, plan = chosen
        found = rule.run(given, plan)
        tensors = [given[n].clone() for n in roles.tensors if given[n] is not None]
        cos, sin = rule.tables(given, tensors[0])
        tells = bool(((cos.imag if sin is None else sin).abs() > 1e-3).any())
        try:
            expected = self.original(**given)
        except Exception as error:  # the user gets it from the model's own code
            memory = "allocate" in str(error)  # of PyTorch's allocators, on CPUs and GPUs
            return None if memory else f"it raises {type(error).__name__}"
        differs, results = difference(found, expected, rule.cos is not None), parts_of(expected)
        if differs in ("shapes", "dtypes"):
            return f"other shapes or dtypes for {described(tensors)}"
        if not differs:
            turned = any(not torch.equal(x, y) for x, y in zip(results, tensors, strict=False))
            return "" if tells and turned and all(map(varies, tensors)) else None
        finite = all(x is None or bool(x.isfinite().all()) for x in results)
        return f"other bits for {described(tensors)}" if finite else None


def _angles(table: Any) -> Any:
    """What computes exact angles in place of a table, or None."""
    table = table[0] if isinstance(table, tuple | list) and table else table
    return getattr(table, ANGLES, None)
