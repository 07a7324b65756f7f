"""Tests that torch.fx keeps calls of posembed in a traced model, and what torch.jit says of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from posembed import functional
from torch import Tensor, nn

IDS = torch.tensor([[1, 5, 3], [7, 0, 2]])
VECTORS = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
HEADS = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1))
SCORES = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(2))

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "token": (lambda: pe.TokenEmbedding(9, 8, padding_idx=0, scale=2.0), (IDS,)),
    "token-max-norm": (lambda: pe.TokenEmbedding(9, 8, max_norm=1.0), (IDS,)),
    "bag": (lambda: pe.TokenBag(9, 8, padding_idx=0), (IDS,)),
    "learned": (lambda: pe.LearnedPositionalEmbedding(9, 8), (VECTORS,)),
    "sinusoidal": (lambda: pe.SinusoidalPositionalEmbedding(8), (VECTORS,)),
    "rotary": (lambda: pe.RotaryEmbedding(8), (HEADS, HEADS)),
    "rotary-learned": (lambda: pe.RotaryEmbedding(8, learned_frequencies=True), (HEADS,)),
    "alibi": (lambda: pe.ALiBi(4, learned=True), (3,)),
    "relative-bias": (lambda: pe.RelativePositionBias(4), (3,)),
    "input": (
        lambda: pe.InputEmbedding(9, 8, max_positions=5, num_types=2, norm="layer", dropout=0.5),
        (IDS,),
    ),
    "input-roberta": (
        lambda: pe.InputEmbedding(
            9, 8, max_positions=5, padding_idx=1, position_rule="roberta", token_dim=4
        ),
        (IDS,),
    ),
}


class Holder(nn.Module):
    """A module in a model, with arithmetic around it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Any) -> Tensor:
        return self.part(x) * 2


class PairHolder(Holder):
    """For two arguments and results."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        query, key = self.part(query, key)
        return query * key


def equal(model: nn.Module, other: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Results and gradients."""
    found = []
    for each in (model, other):
        torch.manual_seed(3)
        result = each(*arguments)
        parameters = list(each.parameters())
        gradients = torch.autograd.grad(result.square().sum(), parameters) if parameters else ()
        found.append((result, *gradients))
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_symbolic_trace_keeps_modules(name: str, training: bool) -> None:
    make, arguments = MODULES[name]
    model = (PairHolder if len(arguments) == 2 else Holder)(make()).train(training)
    graph = torch.fx.symbolic_trace(model)
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["part"]
    assert type(graph.part) is type(model.part)
    assert list(graph.state_dict()) == list(model.state_dict())
    equal(model, graph, arguments)
    equal(model.eval(), graph.eval(), arguments)


def test_a_traced_module_keeps_hooks_and_subclasses() -> None:
    class Doubled(pe.TokenEmbedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 2

    model = nn.Sequential(Doubled(9, 8))
    model[0].register_forward_hook(lambda *given: given[2] + 1)
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(IDS), model[0].weight[IDS] * 2 + 1)


class Functions(nn.Module):
    """Methods and functions that are no calls of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.token = pe.TokenEmbedding(9, 8)
        self.rope = pe.RotaryEmbedding(8, learned_frequencies=True)
        self.spec, self.waves = (
            pe.RotarySpec(8, scaling=pe.LinearScaling(2.0)),
            pe.SinusoidalSpec(8),
        )

    def forward(self, ids, heads, scores):  # annotations that are text cannot be pickled
        x = functional.sinusoidal(functional.embedding(ids, self.token.weight), spec=self.waves)
        turned = functional.rotary(heads, spec=self.spec)
        back = self.rope.rotate_(heads.detach().clone(), inverse=True)
        return (
            self.token.logits(x),
            turned,
            back.detach(),
            functional.alibi_softmax(scores, functional.alibi_slopes(4)),
        )


def test_symbolic_trace_keeps_functions() -> None:
    model = Functions().requires_grad_(False)
    graph = torch.fx.symbolic_trace(model)
    again = pickle.loads(pickle.dumps(graph))
    for each in (graph, again, copy.deepcopy(graph)):
        expected, found = model(IDS, HEADS, SCORES), each(IDS, HEADS, SCORES)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    with pytest.raises(ValueError, match=r"hidden: expected .*embedding_dim 8, got"):
        model.token.logits(torch.randn(2, 7))


@pytest.mark.parametrize("name", MODULES)
def test_script_names_a_remedy(name: str) -> None:
    make, _ = MODULES[name]
    module = make()
    kind = type(module).__name__
    message = rf"torch.jit.script: expected no module of posembed, got a {kind}; torch.export"
    for model in (module, nn.Sequential(nn.Identity(), module)):
        with pytest.raises(RuntimeError, match=message):
            torch.jit.script(model)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [n for n in MODULES if not isinstance(MODULES[n][1][0], int)])
def test_jit_trace(name: str) -> None:
    make, arguments = MODULES[name]
    module = make().eval()
    program = torch.jit.trace(module, arguments)
    found, expected = program(*arguments), module(*arguments)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    assert all(torch.equal(a, b) for a, b in pairs)
