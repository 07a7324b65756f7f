"""Tests modules in PyTorch's wrappers: sharding, fake tensors, autocast, compilers."""

import copy
from collections.abc import Iterator

import posembed as pe
import pytest
import torch
import torch.distributed.fsdp
from support.refusals import refused
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import fake_pg as testing_process_groups

DIM, HEADS = 16, 2


class Model(nn.Module):
    """A model of every module with parameters; all of them learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = pe.InputEmbedding(50, DIM, max_positions=32, num_types=2, norm="layer")
        self.position = pe.LearnedPositionalEmbedding(32, DIM)
        self.wave = pe.SinusoidalPositionalEmbedding(DIM, learned_scale=True)
        self.bag = pe.TokenBag(50, DIM)
        self.rope = pe.RotaryEmbedding(DIM // HEADS, learned_frequencies=True)
        self.alibi = pe.ALiBi(HEADS, learned=True)
        self.head = pe.TokenEmbedding(50, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wave(self.position(self.embed(ids))) + self.bag(ids)[:, None]
        heads = x.unflatten(-1, (HEADS, -1))
        query, key = (each.transpose(1, 2) for each in self.rope(heads, heads))
        return self.head.logits(self.alibi.attention(query, key, key).transpose(1, 2).flatten(2))


def model_and_ids() -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randint(50, (2, 9))


def gradients(model: nn.Module, result: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(result.float().square().sum(), list(model.parameters())))


@pytest.fixture
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_first_fsdp(one_process: None) -> None:
    """DDP and its second version: distributed/test_data_parallel.py."""
    model, ids = model_and_ids()
    expected = model(ids)
    wrapped = torch.distributed.fsdp.FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device("cpu"))
    result = wrapped(ids)
    torch.testing.assert_close(result, expected)  # bits of a product depend on where a parameter starts
    result.sum().backward()
    torch.optim.SGD(wrapped.parameters(), 0.1).step()
    assert not torch.equal(wrapped(ids), expected)


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.rope = pe.RotaryEmbedding(8, learned_frequencies=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rope(self.project(x))


@pytest.mark.filterwarnings("ignore")
def test_mixed_precision_spares_frequencies_or_is_refused(one_process: None) -> None:
    """Tests the way that the message and the documentation show."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    x = torch.randn(1, 5, 2, 8)
    whole = torch.distributed.fsdp.fully_shard(Rotated(), mesh=mesh, mp_policy=policy)
    refused((lambda: whole(x), TypeError, "got torch.bfloat16: .* fully_shard(rope)"))
    model = Rotated()
    low = copy.deepcopy(model).bfloat16()
    torch.distributed.fsdp.fully_shard(model.rope, mesh=mesh)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    result = model(x)
    torch.testing.assert_close(result, low(x.bfloat16()))
    result.float().square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert model.rope.frequencies.grad.dtype == torch.float32
    assert not torch.equal(model.rope.frequencies.full_tensor(), low.rope.frequencies)


def reset(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """Acts as the second of two processes; the first does not exist."""
    store = testing_process_groups.FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=1, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_sharded_on_meta_and_back(second_of_two: None) -> None:
    """Shards start with this process's part of the whole parameter's initial values."""
    with torch.device("meta"):
        rope = pe.RotaryEmbedding(12, learned_frequencies=True)
        alibi = pe.ALiBi(3, learned=True)
        embed = pe.InputEmbedding(50, DIM, max_positions=4, padding_idx=30, position_rule="roberta")
    model = nn.Sequential(rope, alibi, embed)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    reset(model)
    assert torch.equal(rope.frequencies.to_local(), rope.spec.frequencies().float()[3:])
    assert torch.equal(alibi.slopes.to_local(), pe.ALiBi(3).slopes[2:])
    rows = embed.position.weight.to_local()  # 18 to 34
    assert (rows == 0).all(dim=1).nonzero().flatten().tolist() == [30 - 18]


@pytest.mark.slow
def test_inductor_in_a_model() -> None:
    """Among other operators Inductor reads schemas, which it does not for a single operator."""
    model, ids = model_and_ids()
    result = torch.compile(model, fullgraph=True, dynamic=True)(ids)
    assert torch.allclose(result, model(ids), atol=1e-5)
    for found, wanted in zip(gradients(model, result), gradients(model, model(ids)), strict=True):
        assert torch.allclose(found, wanted, atol=1e-4)


def test_schemas_name_each_argument_once() -> None:
    """Inductor reads them as Python signatures, where a name may occur only once."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("posembed::")]
    assert len(schemas) > 50
    for schema in schemas:
        names = [argument.name for argument in schema.arguments]
        assert len(names) == len(set(names)), schema.name


def test_fake_tensors() -> None:
    with FakeTensorMode():
        model, ids = model_and_ids()
        assert model(ids).shape == (2, 9, 50)
        frequencies = pe.RotarySpec(8, scaling=pe.LinearScaling(2.0)).frequencies()
        assert frequencies.shape == (4,)
        assert frequencies.device.type == "cpu"


def test_autocast_lowers_data_and_parameters_follow() -> None:
    """A Linear's output under autocast meets a table in float32."""
    model, ids = model_and_ids()
    x = torch.randn(2, 9, DIM)
    project = nn.Linear(DIM, DIM)
    weight = torch.ones(DIM // HEADS, requires_grad=True)
    spec = pe.RotarySpec(DIM // HEADS)
    projected = pe.InputEmbedding(50, DIM, max_positions=32, norm="layer", token_dim=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = project(x)
        positioned = model.position(low)
        heads = low.unflatten(-1, (HEADS, -1))
        query, key = pe.functional.norm_rotary(heads, heads, weight, weight, spec=spec)
        embedded = projected(ids)
    assert {t.dtype for t in (positioned, query, key, embedded)} == {torch.bfloat16}
    rows = model.position.weight[:9].bfloat16()
    assert torch.equal(positioned, (low.float() + rows.float()).bfloat16())
    (positioned.sum() + query.sum() + embedded.sum()).backward()
    assert model.position.weight.grad.dtype == torch.float32
    assert weight.grad.dtype == torch.float32
    assert projected.position.weight.grad.dtype == torch.float32


class Doubled(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


def test_parametrizations() -> None:
    rope, alibi = pe.RotaryEmbedding(8, learned_frequencies=True), pe.ALiBi(4, learned=True)
    query = torch.randn(1, 5, 2, 8)
    expected = pe.functional.rotary(query, spec=rope.spec, frequencies=2 * rope.frequencies)
    bias = pe.functional.alibi_bias(2 * alibi.slopes, 3, 3)
    nn.utils.parametrize.register_parametrization(rope, "frequencies", Doubled())
    nn.utils.parametrize.register_parametrization(alibi, "slopes", Doubled())
    assert torch.equal(rope(query), expected)
    with torch.no_grad():
        rope.rotate_(query)
    assert torch.equal(query, expected)
    assert torch.equal(alibi(3), bias)
