"""Tests of tables in the host's memory, which kernels read there."""

import copy
from typing import Any

import posembed as pe
import pytest
import torch
from support.refusals import refused

ROWS, COLUMNS = 500, 64
IDS = torch.tensor([[3, 499, 0], [7, 7, 256]])
SPEC = pe.NgramSpec((3, 5), ((240, 251),), num_embeddings=ROWS)


def modules() -> dict[str, Any]:
    codes = pe.TokenEmbedding(ROWS, COLUMNS, scale=2.0)
    codes.quantize("int4", block=16)
    bag = pe.TokenBag(ROWS, COLUMNS, padding_idx=7)
    bag.quantize("float8")
    return {
        "token": pe.TokenEmbedding(ROWS, COLUMNS, scale=2.0),
        "codes": codes,
        "bag": pe.TokenBag(ROWS, COLUMNS, padding_idx=7),
        "bag of codes": bag,
        "ngrams": pe.NgramEmbedding(SPEC, COLUMNS),
        "summed ngrams": pe.NgramEmbedding(SPEC, COLUMNS, summed=True),
        "layers": pe.PerLayerEmbedding(ROWS, 4, 16),
    }


@pytest.fixture(params=[*modules()])
def module(request: pytest.FixtureRequest) -> Any:
    return modules()[request.param]


def places(module: Any) -> set[str]:
    return {str(tensor.device) for tensor in (*module.parameters(), *module.buffers())}


def test_equal_bits(module: Any, device: torch.device) -> None:
    expected = module(IDS)
    module.keep_on_host(device)
    bits = module.memory()
    found = module.to(device)(IDS.to(device))
    assert found.device == device
    assert not found.requires_grad
    assert torch.equal(found.cpu(), expected)
    assert places(module) == {"cpu"}
    assert module.memory() == bits
    assert torch.equal(module(IDS), expected)


def test_conversions_and_copies(module: Any, device: torch.device) -> None:
    module.keep_on_host(device)
    expected = copy.deepcopy(module).bfloat16()(IDS)
    for each in (copy.deepcopy(module).to(device, torch.bfloat16), module.bfloat16()):
        assert places(each) == {"cpu"}
        assert torch.equal(each(IDS.to(device)).cpu(), expected)


def test_new_values_are_read(device: torch.device) -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS)
    token.keep_on_host(device)
    token(IDS.to(device))
    other = torch.randn(ROWS, COLUMNS)
    token.load_state_dict({"weight": other})
    assert torch.equal(token(IDS.to(device)).cpu(), other[IDS])
    token.weight = torch.nn.Parameter(other + 1, requires_grad=False)
    assert torch.equal(token(IDS.to(device)).cpu(), (other + 1)[IDS])


def test_prefetch_and_take(module: Any, device: torch.device) -> None:
    if isinstance(module, pe.TokenBag):
        pytest.skip("bags have no prefetch")
    expected = [module(IDS), module(IDS.flip(0))]
    module.keep_on_host(device)
    ids = IDS.to(device, copy=True)
    asked = [module.prefetch(ids)]
    ids.copy_(IDS.flip(0))
    asked.append(module.prefetch(ids))
    ids.zero_()
    for ahead, rows in zip(reversed(asked), reversed(expected), strict=True):
        assert torch.equal(ahead.take().cpu(), rows)


@pytest.mark.gpu
def test_a_graph_captures_prefetch_and_take(module: Any) -> None:
    if isinstance(module, pe.TokenBag):
        pytest.skip("bags have no prefetch")
    module.keep_on_host("cuda")
    ids = IDS.cuda()

    def run() -> torch.Tensor:
        ahead = module.prefetch(ids)
        before = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
        return ahead.take() + 0 * before.sum()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for given in (IDS, IDS.flip(0)):
        ids.copy_(given)
        graph.replay()
        assert torch.equal(found, module(given.cuda()))


@pytest.mark.gpu
def test_compiled() -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS)
    token.keep_on_host("cuda")
    compiled = torch.compile(token, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        assert torch.equal(compiled(IDS.cuda()).cpu(), token(IDS))


@pytest.mark.gpu
def test_memory_is_pinned_while_a_view_lives() -> None:
    table = torch.randn(ROWS, COLUMNS)
    view = torch.ops.posembed.mapped(table, torch.device("cuda"))
    assert table.is_pinned()
    assert view.is_cuda
    second = torch.ops.posembed.mapped(table, torch.device("cuda"))
    del second
    assert table.is_pinned()
    del view
    assert not table.is_pinned()


def test_a_view_keeps_the_memory(device: torch.device) -> None:
    """Under the stand-in, memory is pinned and unpinned as on a device."""
    table = torch.randn(ROWS, COLUMNS)
    expected = table.clone()
    views = [torch.ops.posembed.mapped(table, device) for _ in range(2)]
    del table
    views.pop()
    assert torch.equal(pe.functional.embedding(IDS.to(device), views[0]).cpu(), expected[IDS])
    for empty in (torch.zeros(0, 4), torch.zeros(3, 0)):
        assert torch.ops.posembed.mapped(empty, device).shape == empty.shape


def test_bad_arguments() -> None:
    mapped = torch.ops.posembed.mapped.default
    refused(
        (lambda: mapped(torch.zeros(3, 4).t(), torch.device("cpu")), ValueError, "table: expected a contiguous tensor on the CPU"),
        (lambda: mapped(torch.zeros(3, 4), torch.device("meta")), ValueError, "device: expected the CPU"),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["token", "bag", "ngrams", "summed ngrams"])
def test_a_table_learns_on_the_host(name: str, device: torch.device) -> None:
    """As on the device; rows move, and the table does not."""

    def trained(hosted: bool) -> torch.Tensor:
        torch.manual_seed(0)
        module = modules()[name]
        module.gradient = "rows"
        if hosted:
            module.keep_on_host(device)
        module.to(device)
        kept = module.weight.data_ptr()
        optimizer = pe.optim.RowwiseAdagrad(module.parameters(), lr=0.1)
        for _ in range(2):
            (module(IDS.to(device)).sum() + module(IDS[:1].to(device)).sum()).backward()
            assert module.weight.grad.device == module.weight.device
            optimizer.step()
            optimizer.zero_grad()
        assert module.weight.data_ptr() == kept
        assert module.weight.device.type == ("cpu" if hosted else device.type)
        return module.weight.detach().cpu()

    assert torch.equal(trained(True), trained(False))


def test_which_tables_learn_on_the_host(device: torch.device) -> None:
    frozen, learned = (pe.TokenEmbedding(9, 4, gradient="rows") for _ in range(2))
    frozen.keep_on_host(device, trainable=False)
    learned.requires_grad_(False).keep_on_host(device, trainable=True)
    assert [frozen.weight.requires_grad, learned.weight.requires_grad] == [False, True]
    still = pe.TokenEmbedding(9, 4, gradient="rows").requires_grad_(False)
    still.keep_on_host(device)
    assert not still.weight.requires_grad
    codes = pe.TokenEmbedding(9, 4, gradient="rows")
    codes.quantize("int8")
    for table in (pe.TokenEmbedding(9, 4), codes):
        refused((lambda t=table: t.keep_on_host(device, trainable=True), ValueError, "trainable: expected a weight gradient='rows', got none"))  # fmt: skip
