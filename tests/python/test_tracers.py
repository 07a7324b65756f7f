"""Tests that torch.fx keeps calls of posembed in a traced model, and what torch.jit says of them."""

import copy
import pickle
from typing import Any

import posembed as pe
import pytest
import torch
from posembed import functional
from support.modules import MODULES, Call, cells, made
from support.refusals import refused
from torch import Tensor, nn

IDS = torch.tensor([[1, 5, 3], [7, 0, 2]])
HEADS = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1))
SCORES = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(2))


# Calls of methods, and two arguments with one result.
UNLIKE = {"alibi", "alibi-attention", "bag-offsets"}
# torch.jit.trace cannot keep a size of a tensor in a list of numbers.
SIZED = {"relative-window", *(name for name, row in MODULES.items() if row.inputs is cells)}


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
        return torch.cat([query, key], 2)


def equal(model: nn.Module, other: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Results and gradients."""
    found = []
    for each in (model, other):
        torch.manual_seed(3)
        result = each(*arguments)
        parameters = [p for p in each.parameters() if p.requires_grad]
        loss = result.square().sum()
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True) if parameters else ()
        found.append((result, *(g.to_dense() for g in gradients)))
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted({*MODULES} - UNLIKE))
def test_symbolic_trace_keeps_modules(name: str, training: bool) -> None:
    module, arguments = made(name)
    kind = type(module) if isinstance(module, Call) else (Holder, PairHolder)[len(arguments) - 1]
    model = (module if isinstance(module, Call) else kind(module)).train(training)
    graph = torch.fx.symbolic_trace(model)
    part = "module" if isinstance(module, Call) else "part"
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == [part]
    assert type(getattr(graph, part)) is type(getattr(model, part))
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
        self.spec, self.waves = (pe.RotarySpec(8, scaling=pe.LinearScaling(2.0)), pe.SinusoidalSpec(8))

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
    refused((lambda: model.token.logits(torch.randn(2, 7)), ValueError, "hidden: expected .*embedding_dim 8, got"))  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_script_names_a_remedy(name: str) -> None:
    module, _ = made(name)
    module = getattr(module, "module", module)
    kind = type(module).__name__
    message = rf"torch.jit.script: expected no module of posembed, got a {kind}; torch.export"
    for model in (module, nn.Sequential(nn.Identity(), module)):
        refused((lambda: torch.jit.script(model), RuntimeError, message))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted({*MODULES} - SIZED))
def test_jit_trace(name: str) -> None:
    module, arguments = made(name)
    program = torch.jit.trace(module.eval(), arguments)
    found, expected = program(*arguments), module(*arguments)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    assert all(torch.equal(a, b) for a, b in pairs)
