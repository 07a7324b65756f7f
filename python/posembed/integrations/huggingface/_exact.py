"""Decides which rotary modules of a model can pass positions to rotations instead of tables.

The module's specification is read from the configuration and verified: posembed's rotation
must match the model's own function with the module's own tables.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import Tensor, nn

from posembed.integrations.huggingface import _shadow
from posembed.integrations.huggingface._angles import Texts
from posembed.integrations.huggingface._flow import Flow, TablesStayError
from posembed.integrations.huggingface._rotation import Angles, Rotation, layout_of
from posembed.specification import RotarySpec

POSITIONS = (0, 1, 2, 3, 5, 1000, 32767)
STEP = 2.0**-20  # relative: float32 rounding of frequencies and of their product with positions
ROUNDING = 1e-5  # absolute: float32 rounding of cosines, sines, products, for components of size 1


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is done with a rotary module.

    Args:
        module: The rotary module.
        owners: The modules that call it.
        texts: What ``ExactAngles`` reads for each layer type; if empty, the tables stay.
        rotations: Rotations that receive positions.
        reason: Why the tables stay.
    """

    module: nn.Module
    owners: tuple[nn.Module, ...]
    texts: dict[str | None, Texts]
    rotations: frozenset[Rotation] = frozenset()
    reason: str = ""


def decide(model: nn.Module) -> list[Decision]:
    """A decision for each rotary module of a patched model."""
    owners: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for name, child in owner._modules.items():
            if child is not None and _shadow.original_of(type(child)) in _shadow.EXACT:
                owners.setdefault(child, []).append((owner, name))
    return [_decision(model, module, places) for module, places in owners.items()]


def _decision(model: nn.Module, module: nn.Module, places: list[tuple[nn.Module, str]]) -> Decision:
    owners = tuple(owner for owner, _ in places)
    try:
        flows = [Flow(model, *place) for place in places]
        calls = set().union(*(flow.calls for flow in flows))
        texts = _texts(module, calls, _head_dims(owners))
    except TablesStayError as error:
        return Decision(module, owners, {}, reason=str(error))
    return Decision(module, owners, texts, frozenset(rotation for rotation, _ in calls))


def _head_dims(owners: tuple[nn.Module, ...]) -> set[int]:
    """Head sizes that attention modules declare."""
    sizes = {getattr(module, "head_dim", None) for owner in owners for module in owner.modules()}
    return {size for size in sizes if isinstance(size, int)}


def _texts(
    module: nn.Module, calls: set[tuple[Rotation, int | None]], head_dims: set[int]
) -> dict[str | None, Texts]:
    """Verified specifications, by layer type."""
    if module._forward_hooks or next(module.parameters(), None) is not None:
        raise TablesStayError("it has hooks or parameters")
    original = _fresh(module)
    texts: dict[str | None, Texts] = {}
    for kind in _kinds(original):
        try:
            spec = RotarySpec.from_huggingface(module.config, kind)
        except (TypeError, ValueError) as error:
            raise TablesStayError(f"its configuration is not understood: {error}") from error
        if spec.is_dynamic:
            raise TablesStayError("its frequencies depend on the length of the sequence")
        for rotation, dimension in calls:
            if rotation.rule.window != "all" and not {spec.head_dim} >= head_dims:
                raise TablesStayError(
                    f"heads have {sorted(head_dims)} components, not {spec.head_dim}"
                )
            _compare(original, kind, spec, rotation, dimension)
        texts[kind] = (*_pairings(spec), spec.sections is not None)
    if not texts:
        raise TablesStayError("it has no frequencies")
    return texts


def _kinds(module: nn.Module) -> list[str | None]:
    """The layer types that have frequencies; None: all layers share them."""
    found = [re.fullmatch(r"(?:(\w+)_)?inv_freq", name) for name, _ in module.named_buffers()]
    kinds = [match[1] for match in found if match]
    return [kind for kind in kinds if kind is None or not kind.endswith(("original", "long"))]


def _pairings(spec: RotarySpec) -> tuple[str, str]:
    """Its text for either pairing; the pairing depends on the function, not on its tables."""
    halves, adjacent = (dataclasses.replace(spec, interleaved=x).text for x in (False, True))
    return halves, adjacent


def _fresh(module: nn.Module) -> Any:
    """A new module of the same configuration on the CPU, if it has the same numbers.

    A cast to 16 bits rounds the module's own frequencies; exact angles avoid that.
    """
    cls: Any = _shadow.original_of(type(module))
    try:
        with torch.device("cpu"):
            fresh = cls(module.config).train(module.training)
    except Exception as error:  # another kind of module may need anything
        raise TablesStayError("it cannot be made from its configuration") from error
    for name, buffer in fresh.named_buffers():
        mine = getattr(module, name, None)
        if not isinstance(mine, Tensor) or mine.is_meta:
            raise TablesStayError("its frequencies are not there yet (meta device)")
        if not torch.equal(buffer.to(mine.dtype), mine.cpu()):
            raise TablesStayError(f"its {name} differs from that of its configuration")
    for name, value in vars(fresh).items():
        if isinstance(value, int | float | str) and vars(module).get(name) != value:
            raise TablesStayError(f"its {name} differs from that of its configuration")
    return fresh


def _compare(
    original: Any, kind: str | None, spec: RotarySpec, rotation: Rotation, dimension: int | None
) -> None:
    """Raises TablesStayError unless both rotate alike, up to float32 rounding."""
    rule, name = rotation.rule, rotation.__name__
    layout = layout_of(dimension)
    if layout is None:
        raise TablesStayError(f"{name} takes tables in another layout than [batch, tokens, width]")
    if rule.tokens != "all" or rule.gathers or rule.tables == "complex":
        raise TablesStayError(f"{name} is no plain rotation: {rule}")
    width = 2 * len(spec.frequencies()) if rule.window == "all" else spec.head_dim
    shape = (1, 2, len(POSITIONS), width) if layout == "bhsd" else (1, len(POSITIONS), 2, width)
    random = torch.Generator("cpu").manual_seed(7)
    query = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")
    positions = _positions(spec)
    expected = _theirs(original, kind, rotation, dimension, query, positions)
    exact, low, high = (
        _ours(spec, rotation, dimension, query.double(), positions.double() * factor)
        for factor in (1.0, 1 - STEP, 1 + STEP)
    )
    slack = (high - low).abs() + ROUNDING * max(1.0, spec.attention_factor)
    if expected.shape != exact.shape or not bool(((expected - exact).abs() <= slack).all()):
        raise TablesStayError(f"{name} with its tables does not rotate as its configuration says")
    narrow = query.bfloat16()
    if _theirs(original, kind, rotation, dimension, narrow, positions).dtype != narrow.dtype:
        raise TablesStayError(f"{name} gives float32 for bfloat16")


def _positions(spec: RotarySpec) -> Tensor:
    """Positions [1, tokens], or [axes, 1, tokens] with another order on each axis."""
    one = torch.tensor([POSITIONS], device="cpu")
    if spec.sections is None:
        return one
    axes = spec.sections.axes or 1 + max(spec.sections.axis_of_pair)
    return torch.stack([one.roll(axis, -1) for axis in range(axes)])


def _arguments(
    rotation: Rotation, dimension: int | None, x: Tensor, cos: Any, sin: Any
) -> dict[str, Any]:
    roles = rotation.roles
    given = {**roles.defaults, **dict.fromkeys(roles.tensors, x), roles.cos: cos}
    if roles.sin:
        given[roles.sin] = sin
    if roles.unsqueeze:
        given[roles.unsqueeze] = dimension
    return given


def _first(result: Any) -> Tensor:
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _theirs(
    original: Any,
    kind: str | None,
    rotation: Rotation,
    dimension: int | None,
    x: Tensor,
    positions: Tensor,
) -> Tensor:
    """The model's rotation with the model's tables."""
    try:
        with torch.no_grad():
            tables = original(x, positions, *([] if kind is None else [kind]))
            cos, sin = tables
            return _first(rotation.original(**_arguments(rotation, dimension, x, cos, sin)))
    except Exception as error:  # tables of another shape may raise anything
        raise TablesStayError(f"{rotation.__name__} does not take its tables alone") from error


def _ours(
    spec: RotarySpec, rotation: Rotation, dimension: int | None, x: Tensor, positions: Tensor
) -> Tensor:
    """The rotation by posembed, as in a patched model."""
    angles = Angles(positions, *_pairings(spec))
    try:
        given = _arguments(rotation, dimension, x, angles, angles)
        return _first(rotation.cases[0].turned(given, angles))
    except Exception as error:  # a specification for other tensors may raise anything
        raise TablesStayError(f"posembed does not take it: {error}") from error
