"""Tests checkpoints of torch.distributed: saved by two processes, loaded by any number."""

from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
import torch.distributed.checkpoint as dcp
from posembed.integrations.distributed import VocabularyParallel
from support.processes import Processes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

ROWS, DIM = 11, 8
IDS = torch.tensor([[0, 7, 3, 10]])


class Model(nn.Module):
    def __init__(self, token: type[nn.Embedding] = pe.TokenEmbedding) -> None:
        super().__init__()
        self.embed = pe.InputEmbedding(ROWS, DIM, max_positions=16, norm="layer")
        self.token = token(ROWS, DIM)
        self.rope = pe.RotaryEmbedding(DIM, learned_frequencies=True)
        self.alibi = pe.ALiBi(4, learned=True)


def distributed(engine: str, **options: Any) -> Model:
    model = Model(**options)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if engine == "fsdp":
        return fully_shard(model, mesh=mesh)
    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"embed": VocabularyParallel(), "token": rows})
    return model


def save(engine: str, path: str) -> dict[str, torch.Tensor]:
    """Saves, and returns what was saved."""
    model = distributed(engine, token=nn.Embedding)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=path)
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}


def load(engine: str, path: str, saved: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(1)  # other values than those that were saved
    model = distributed(engine)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state)
    same(model, saved)
    if engine == "tensor parallel":
        expected = nn.functional.embedding(IDS, saved["token.weight"])
        assert torch.equal(model.token(IDS), expected)


def same(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == saved.keys()
    for name, each in state.items():
        assert torch.equal(each.full_tensor() if isinstance(each, DTensor) else each, saved[name])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_processes_save_and_others_load(two: Processes, four: Processes, tmp_path: Path) -> None:
    """nn.Embedding saves, TokenEmbedding loads; and the engine changes."""
    for engine, other in (("fsdp", "tensor parallel"), ("tensor parallel", "fsdp")):
        path = str(tmp_path / engine)
        saved = two.run(save, engine, path)[0]
        four.run(load, engine, path, saved)
        two.run(load, other, path, saved)
        model = Model()
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path, no_dist=True)
        model.load_state_dict(state)
        same(model, saved)
