"""Tests of InputEmbedding's submodules where the kernel cannot stand for their calls."""

import copy
from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from support.case import assert_close
from support.input import apart, assert_equals_calls
from support.refusals import refused
from torch import Tensor, nn
from torch.nn.utils import parametrize

IDS = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])
TYPES = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]])
PARTS = ["token", "position", "token_type", "norm"]
parts = pytest.mark.parametrize("name", PARTS)


def make(device: torch.device | str = "cpu", **options: Any) -> pe.InputEmbedding:
    torch.manual_seed(0)
    options = {"max_positions": 9, "num_types": 2, "norm": "layer", **options}
    return pe.InputEmbedding(3, 8, device=device, **options)


def assert_calls(embed: pe.InputEmbedding, device: torch.device) -> None:
    assert_equals_calls(embed, IDS.to(device), TYPES.to(device))


class Noisy(pe.TokenEmbedding):
    """A subclass with a forward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1


def shift_output(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    return output + torch.arange(output.shape[-1]).to(output)  # which no norm takes back


def double_input(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return (2 * inputs[0], *inputs[1:])


@parts
def test_forward_hooks_run(name: str, device: torch.device) -> None:
    """NEFTune's noise and enable_input_require_grads are such hooks."""
    embed = make(device)
    fused = embed(IDS.to(device), types=TYPES.to(device))
    handle = getattr(embed, name).register_forward_hook(shift_output)
    assert not torch.allclose(embed(IDS.to(device), types=TYPES.to(device)), fused)
    assert_calls(embed, device)
    handle.remove()
    assert torch.equal(embed(IDS.to(device), types=TYPES.to(device)), fused)


@pytest.mark.parametrize("name", ["position", "norm"])
def test_forward_pre_hooks_run(name: str, device: torch.device) -> None:
    embed = make(device)
    getattr(embed, name).register_forward_pre_hook(double_input)
    assert_calls(embed, device)


@parts
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_run(name: str, kind: str) -> None:
    embed, seen = make(), []
    getattr(getattr(embed, name), kind)(lambda module, *gradients: seen.append(module))
    embed(IDS, types=TYPES).sum().backward()
    assert seen == [getattr(embed, name)]


def test_frozen_tables_give_results_that_require_gradients() -> None:
    """As transformers' enable_input_require_grads asks for, before adapters are trained."""
    embed = make(norm=None).requires_grad_(False)
    assert not embed(IDS, types=TYPES).requires_grad
    embed.token.register_forward_hook(lambda module, ids, output: output.requires_grad_(True))
    assert embed(IDS, types=TYPES).requires_grad


def test_a_subclass_forward_runs(device: torch.device) -> None:
    embed = make(device)
    embed.token = Noisy(3, 8, device=device)
    assert_calls(embed, device)


@parts
def test_a_forward_of_an_instance_runs(name: str) -> None:
    """Accelerate replaces forward on the instance."""
    embed = make()
    part = getattr(embed, name)
    whole: Callable[..., Tensor] = part.forward
    part.forward = lambda *args, **kwargs: 2 * whole(*args, **kwargs)
    assert_close(embed(IDS, types=TYPES), apart(embed, IDS, TYPES), 2e-6)


def test_parametrized_tables_are_called(device: torch.device) -> None:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    embed = make(device)
    parametrize.register_parametrization(embed.token, "weight", Halved())
    assert_calls(embed, device)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("token", nn.Embedding(3, 8, sparse=True)),
        ("token", nn.Embedding(3, 8, max_norm=1.0)),
        ("token", pe.TokenEmbedding(3, 8, max_norm=1.0)),
        ("token", pe.TokenEmbedding(3, 8, scale_grad_by_freq=True)),
        ("token_type", nn.Embedding(2, 8, sparse=True)),
        ("token_type", pe.TokenEmbedding(2, 8, scale=2.0)),
        ("token_type", pe.TokenEmbedding(2, 8, padding_idx=0)),
        ("token_type", pe.TokenEmbedding(2, 8, max_norm=1.0)),
        ("position", pe.SinusoidalPositionalEmbedding(8, learned_scale=True)),
        ("position", pe.LearnedPositionalEmbedding(9, 8, layout="sbd")),
        ("position", pe.SinusoidalPositionalEmbedding(8, layout="sbd")),
        ("norm", nn.GroupNorm(2, 4)),
        ("norm", nn.LayerNorm((4, 8))),
        ("norm", nn.Linear(8, 8)),
    ],
)
def test_other_options_and_modules_are_called(name: str, other: nn.Module, device: torch.device) -> None:
    embed = make(device)
    setattr(embed, name, copy.deepcopy(other).to(device))
    assert_calls(embed, device)


@pytest.mark.parametrize("options", [{}, {"norm": "rms"}, {"token_dim": 4}, {"scale": 2.0}])
@pytest.mark.parametrize("name", ["token", "token_type"])
def test_tables_of_codes_are_called(name: str, options: dict[str, Any], device: torch.device) -> None:
    embed = make(device, **options)
    ids, types = IDS.to(device), TYPES.to(device)
    vectors = embed.token(ids).detach()
    getattr(embed, name).quantize("int8")
    for given in (None, types):  # None: type 0
        chosen = torch.zeros_like(types) if given is None else given
        x = embed.token(ids) if embed.projection is None else embed.projection(embed.token(ids))
        expected = embed.norm(embed.position(x + embed.token_type(chosen)))
        assert_close(embed(ids, types=given), expected, 2e-6)
    among = embed.with_embeddings(ids, vectors[ids == 1], ids == 1, types=types)
    assert_close(among, embed(inputs_embeds=embed.token(ids).where((ids != 1)[..., None], vectors), types=types), 2e-6)
    if not options:
        with pytest.raises(TypeError, match="inputs_embeds: expected the dtype of the tables"):
            embed(inputs_embeds=vectors.double())


@pytest.mark.parametrize("change", ["codes", "rows"])
@pytest.mark.parametrize("name", ["token", "token_type"])
def test_cpp_calls_tables_of_codes_and_those_whose_rows_learn_apart(name: str, change: str) -> None:
    embed = pe.cpp.InputEmbedding(3, 8, max_positions=9, num_types=2)
    parts = dict(embed.named_children())
    table = parts[name]
    if change == "codes":
        table.quantize("int8")
    else:
        table.train_rows(torch.tensor([1]))
        dict(table.named_parameters())["trained"].detach().add_(torch.arange(8.0))
    for types in (TYPES, torch.zeros_like(TYPES)):
        expected = parts["position"].forward(parts["token"](IDS) + parts["token_type"](types))
        found = embed(IDS, types=types) if types.any() else embed(IDS)
        assert_close(found, expected, 2e-6)
        assert_close(embed(None, inputs_embeds=parts["token"](IDS), types=types), expected, 2e-6)
    with pytest.raises(ValueError, match=r"types: expected the shape of ids"):
        embed(IDS, types=TYPES[0])


def test_tables_on_the_host_are_called() -> None:
    embed = make()
    assert embed._plain_parts(with_token=True) is not None
    embed.token.keep_on_host("cpu")
    assert embed._plain_parts(with_token=True) is None
    assert_close(embed(IDS, types=TYPES), apart(embed, IDS, TYPES), 2e-6)


def test_positions_of_several_axes_are_called() -> None:
    embed = make(num_types=0)
    embed.position = pe.SinusoidalPositionalEmbedding(8, preset="mae")
    cells = pe.positions.grid(1, 2, 2, order="hw")
    expected = embed.norm(embed.position(embed.token(IDS), cells))
    assert_close(embed(IDS, positions=cells), expected, 2e-6)


@pytest.mark.parametrize("name", ["nothing", "token"])
def test_calls_refuse_what_the_kernel_refuses(name: str) -> None:
    embed, bare = make(), make(positions=None, max_positions=None, num_types=0)
    for module in (embed, bare):
        if name == "token":
            module.token.register_forward_hook(lambda *_: None)
    refused(
        (lambda: embed(IDS, types=TYPES[0]), ValueError, "types: expected the shape of ids, [2, 4], got [4]"),
        (lambda: embed(IDS, types=TYPES[:1]), ValueError, "types: expected the shape of ids, [2, 4], got [1, 4]"),
        (lambda: embed(IDS, types=[0, 1]), TypeError, "types: expected a Tensor, got a list"),
        (lambda: bare(IDS, types=TYPES), ValueError, "types: expected none where there is no table of token types"),
        (lambda: bare(IDS, positions=torch.arange(4)), ValueError, "positions: expected none where there is no table of positions"),
        (lambda: bare(IDS[:1], cu_seqlens=torch.tensor([0, 4])), ValueError, "positions: expected none where there is no table of positions"),
        (lambda: bare(IDS[0]), ValueError, "ids: expected [batch, seq], got [4]"),
    )  # fmt: skip


@parts
def test_dropout_has_the_same_mask(name: str, device: torch.device) -> None:
    embed = make(device, dropout=0.5)
    ids, types = IDS.to(device), TYPES.to(device)
    options = {"types": types, "seed": torch.tensor([7], device=device), "first_token": 3}
    fused = embed(ids, **options)
    getattr(embed, name).register_forward_hook(lambda *_: None)
    assert_close(embed(ids, **options), fused, 2e-6)


@pytest.mark.parametrize("rule", ["roberta", "opt"])
def test_positions_are_counted_as_in_the_kernel(rule: Any, device: torch.device) -> None:
    """With RoBERTa's rule the row of padding gets no gradient."""
    embed = make(device, position_rule=rule, padding_idx=1)
    other = copy.deepcopy(embed)
    other.norm.register_forward_hook(lambda *_: None)
    mask = (IDS != 1).to(device) if rule == "opt" else None
    for module in (embed, other):
        result = module(IDS.to(device), types=TYPES.to(device), attention_mask=mask)
        result[..., 0].sum().backward()
    for ours, theirs in zip(embed.parameters(), other.parameters(), strict=True):
        assert_close(theirs.grad, ours.grad, 4e-6)
    padding = other.position.weight.grad[embed.position.first_row - 1]
    assert bool(padding.any()) == (rule == "opt")


def test_vectors_take_the_place_of_token_rows() -> None:
    embed = make(positions="sinusoidal", max_positions=None, padding_idx=1)
    vectors = torch.randn(2, 4, 8)
    fused = embed(inputs_embeds=vectors)
    embed.norm.register_forward_hook(lambda *_: None)
    assert_close(embed(inputs_embeds=vectors), fused, 2e-6)


@pytest.mark.parametrize("options", [{"token_dim": 4}, {"output_dim": 5}])
def test_projections_are_applied_once(options: dict[str, int]) -> None:
    embed = make(**options)
    fused = embed(IDS, types=TYPES)
    embed.position.register_forward_hook(lambda *_: None)
    assert_close(embed(IDS, types=TYPES), fused, 2e-6)


def test_only_plain_parts_are_fused() -> None:
    """One operator, until a hook is added."""
    embed = make()
    with torch.profiler.profile() as before:
        embed(IDS, types=TYPES)
    embed.token.register_forward_hook(lambda *_: None)
    with torch.profiler.profile() as after:
        embed(IDS, types=TYPES)
    counts = [{event.key: event.count for event in profile.key_averages()} for profile in (before, after)]
    assert counts[0]["posembed::input_embedding"] == 1
    assert "posembed::embedding" not in counts[0]
    assert counts[1]["posembed::embedding"] == 2
    assert "posembed::input_embedding" not in counts[1]


def test_compiles_whole() -> None:
    embed = make()
    embed.token = Noisy(3, 8)
    compiled = torch.compile(embed, backend="aot_eager", fullgraph=True)
    assert_close(compiled(IDS, types=TYPES), embed(IDS, types=TYPES), 2e-6)


def test_adapters_scale_as_the_table_does() -> None:
    """PEFT reads embed_scale, as of Gemma's tables."""
    token = pe.TokenEmbedding(3, 64, scale="sqrt_dim")
    assert token.embed_scale == 8.0
    token.scale = 2.0
    assert token.embed_scale == 2.0
