"""What patch follows to a rotation, what it keeps of the code on the way, and what unpatch restores."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import patch, unpatch
from torch import Tensor, nn

BATCH, HEADS, TOKENS, HEAD = 2, 3, 5, 8


def half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def swapped(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def turn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    theta = torch.rand(TOKENS, HEAD // 2).repeat(1, 2)
    return torch.randn(BATCH, HEADS, TOKENS, HEAD), theta.cos(), theta.sin()


def named(x: Tensor, c: Tensor, s: Tensor, style: str = "halves", kind: int = 7) -> Tensor:
    """Its options are a name and a number, which its code compares."""
    if style == "neighbours" or kind == 8:
        return x * c + swapped(x) * s
    return x * c + half(x) * s if style == "halves" else x


class Named(nn.Module):
    def forward(self, *given: Tensor, **options: Any) -> Tensor:
        return named(*given, **options)


def marked(function: Any) -> Any:
    """A decorator of this module; what it returns has an attribute."""

    @functools.wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        return function(*given, **options)

    call.mark = "kept"  # type: ignore[attr-defined]
    return call


def doubled(amount: float, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return turn(x, c, s) * amount


class Members(nn.Module):
    """Calls a rotation in every kind of member that a class may have."""

    given: tuple[Tensor, Tensor, Tensor]

    @marked
    def decorated(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        """Its text."""
        return turn(x, c, s) + 1

    @torch.no_grad()
    def by_torch(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return turn(x, c, s) + 2

    @classmethod
    def of_class(cls, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return turn(x, c, s) + 3

    @staticmethod
    def static(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return turn(x, c, s) + 4

    def _get(self) -> Tensor:
        return turn(*self.given) + 5

    def _set(self, given: tuple[Tensor, Tensor, Tensor]) -> None:
        self.written = turn(*given)

    read = property(_get, _set, doc="Its text.")

    @contextlib.contextmanager
    def managed(self, x: Tensor, c: Tensor, s: Tensor) -> Iterator[Tensor]:
        yield turn(x, c, s) + 6

    def delayed(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        def run(amount: int) -> Tensor:
            return turn(x, c, s) + amount

        return run(7)

    partly = functools.partial(doubled, 3.0)

    def scaled(
        self, x: Tensor, c: Tensor, s: Tensor, scale: float = 2.0, *, more: float = 1.0
    ) -> Tensor:
        return turn(x, c, s) * scale + more

    def forward(self, name: str, *given: Any) -> Any:
        if name == "read":
            self.given = given  # type: ignore[assignment]
            return self.read
        if name == "managed":
            with self.managed(*given) as result:
                return result
        if name == "write":
            self.read = given
            return self.written
        return getattr(self, name)(*given)


MEMBERS = ["decorated", "by_torch", "of_class", "static", "read", "write", "managed", "partly"]


@pytest.mark.parametrize("name", [*MEMBERS, "delayed", "scaled"])
def test_rotations_in_any_member_of_a_class(name: str) -> None:
    model, given = Members(), arguments()
    expected = model(name, *given)
    report = patch(model)
    assert torch.equal(model(name, *given), expected)
    (calls,) = [each for each in report.calls() if each.function == "turn"]
    assert (calls.kernel, calls.own) == (1, 0)
    unpatch(model)
    assert torch.equal(model(name, *given), expected)
    assert [each.kernel for each in report.calls() if each.function == "turn"] == [1]


def test_members_keep_what_describes_them() -> None:
    model, given = Members(), arguments()
    report = patch(model)
    cls: Any = type(model)
    assert cls is not Members
    for name in ("decorated", "by_torch", "scaled"):
        found, own = getattr(cls, name), getattr(Members, name)
        assert found is not own
        assert inspect.signature(found) == inspect.signature(own)
        for field in ("__name__", "__qualname__", "__doc__", "__annotations__"):
            assert getattr(found, field) == getattr(own, field)
    assert cls.decorated.mark == "kept"
    assert cls.read.__doc__ == Members.read.__doc__
    cls.decorated.__wrapped__(model, *given)  # as who unwraps a function calls it
    assert [each.kernel for each in report.calls() if each.function == "turn"] == [1]


class Watched(nn.Module):
    def forward(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return turn(x, c, s)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_hooks_of_modules_stay(before: bool) -> None:
    """Hooks that a module had and those that it gets when it is patched, of all kinds."""
    model, (x, *tables), seen = Watched(), arguments(), list[str]()
    x.requires_grad_()
    hooks: list[tuple[Any, str]] = [
        (model.register_forward_pre_hook, "forward pre"),
        (model.register_forward_hook, "forward"),
        (model.register_full_backward_pre_hook, "backward pre"),
        (model.register_full_backward_hook, "backward"),
        (model.register_state_dict_pre_hook, "state"),
    ]

    def add() -> None:
        for register, name in hooks:
            register(lambda *given, name=name: seen.append(name))

    def ran() -> list[str]:
        seen.clear()
        model(x, *tables).sum().backward()
        model.state_dict()
        return seen

    if before:
        add()
    report = patch(model)
    if not before:
        add()
    assert ran() == [name for _, name in hooks]
    assert [each.kernel for each in report.calls()] == [1]
    unpatch(model)
    assert ran() == [name for _, name in hooks]


class Scaled(nn.Embedding):
    """A table that patch moves to the host."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.factor = 2.5

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.factor


class Processor:
    def __call__(self, *given: Tensor) -> Tensor:
        return turn(*given) + 1


class Holds(nn.Module):
    """Holds a function, an object and a method of its own, as hooks store it."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.processor, self.stored = turn, Processor(), self.forward

    def forward(self, *given: Tensor) -> Tensor:
        return self.turn(*given) + self.processor(*given)


def test_unpatch_leaves_nothing_behind() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4}
    qwen = transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8)
    model = nn.ModuleList(
        [
            transformers.Qwen3ForCausalLM(qwen),
            transformers.BertModel(transformers.BertConfig(**sizes)),
            nn.ModuleList([Scaled(5, 4), Scaled(5, 4).requires_grad_(False)]),
            Holds(),
        ]
    )

    def state() -> list[Any]:
        held = model[3]
        return [
            [(type(module), sorted(vars(module))) for module in model.modules()],
            [(name, x.requires_grad, x.device) for name, x in model.named_parameters()],
            (held.turn, type(held.processor), held.stored),
        ]

    before = state()
    report = patch(model, numerics="exact", tables="host")
    actions = [row.action for row in report.patched]
    assert {"half-split; exact angles", "one kernel; equal bits"} <= set(actions)
    for part, other in zip(before, state(), strict=True):
        assert part != other
    unpatch(model)
    assert state() == before


def test_options_of_a_name_and_a_number() -> None:
    model, (x, cos, sin) = Named(), arguments()
    theta = torch.rand(TOKENS, HEAD // 2).repeat_interleave(2, -1)
    report = patch(model)
    for given, options in [
        ((x, cos, sin), {}),
        ((x, theta.cos(), theta.sin()), {"style": "neighbours"}),
        ((x, theta.cos(), theta.sin()), {"kind": 8}),
        ((x, cos, sin), {"style": "none"}),
    ]:
        assert torch.equal(model(*given, **options), named(*given, **options))
    assert [(each.kernel, each.own) for each in report.calls()] == [(3, 1)]
