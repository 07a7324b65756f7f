"""Tests of TokenEmbedding beyond the shared ones: nn.Embedding, gradients, errors."""

import posembed as pe
import pytest
import torch
from support.case import FLOATING, assert_close
from support.halves import AT_ONCE, CUDA_ON_CPU
from support.refusals import refused
from torch import Tensor, nn

ROWS, COLUMNS = 37, 5


def make_ids(count: int = 200, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, ROWS, (count // 4, 4), generator=generator).to(device)


def pair(dtype: torch.dtype, device: torch.device, **options: object) -> tuple[nn.Module, nn.Module]:
    """Our module and torch's, with the same values."""
    modules = []
    for kind in (pe.TokenEmbedding, nn.Embedding):
        torch.manual_seed(1)
        modules.append(kind(ROWS, COLUMNS, dtype=dtype, device=device, **options))
    return modules[0], modules[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 3},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"scale_grad_by_freq": True, "padding_idx": 0},
        {"max_norm": 1.5},
        {"max_norm": 1.0, "norm_type": 1.0},
        {"sparse": True, "padding_idx": 3},
    ],
    ids=str,
)
def test_equals_torch(dtype: torch.dtype, options: dict, device: torch.device) -> None:
    ours, theirs = pair(dtype, device, **options)
    ids = make_ids(device=device)
    for index in (torch.int32, torch.int64):
        ours.zero_grad(), theirs.zero_grad()
        # In one dimension, because otherwise torch shrinks rows several times, concurrently, on
        # CUDA.
        result, expected = ours(ids.to(index)), theirs(ids.flatten()).view(*ids.shape, -1)
        assert torch.equal(result, expected)
        assert torch.equal(ours.weight, theirs.weight)
        gradient = torch.randn_like(expected)
        result.backward(gradient), expected.backward(gradient)
        found, wanted = ours.weight.grad, theirs.weight.grad
        assert found.is_sparse == wanted.is_sparse
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        assert_close(found.to_dense(), wanted.to_dense(), tolerance)


def test_is_an_nn_embedding_by_type_and_state() -> None:
    ours, theirs = pair(torch.float32, torch.device("cpu"), padding_idx=2)
    assert isinstance(ours, nn.Embedding)
    assert torch.equal(ours.weight, theirs.weight)
    theirs.load_state_dict(ours.state_dict())
    ours.reset_parameters()
    assert not ours.weight[2].any()


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("gradient", ["dense", "rows"])
def test_ten_thousand_ones_are_not_lost(dtype: torch.dtype, gradient: str, device: torch.device) -> None:
    table = pe.TokenEmbedding(2, 8, gradient=gradient, dtype=dtype, device=device)
    table(torch.ones(10240, dtype=torch.int64, device=device)).sum().backward()
    found = table.weight.grad.to_dense()
    assert torch.equal(found[1].double().cpu(), torch.full((8,), 10240.0, dtype=torch.float64))
    assert not found[0].any()


def gradient_of(gradient: str, ids: Tensor, dtype: torch.dtype = torch.float32, **options) -> Tensor:
    torch.manual_seed(2)
    table = pe.TokenEmbedding(ROWS, COLUMNS, gradient=gradient, dtype=dtype, device=ids.device, **options)
    output = table(ids)
    output.backward(torch.linspace(-1, 1, output.numel(), device=ids.device).view_as(output).to(dtype))
    return table.weight.grad


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 5}, {"scale_grad_by_freq": True, "scale": 3.0}], ids=str)
def test_rows_form_has_each_touched_row_once_in_order(dtype, options, device: torch.device) -> None:
    ids = make_ids(60, device=device)
    rows, dense = (gradient_of("rows", ids, dtype, **options), gradient_of("dense", ids, dtype, **options))
    expected = ids.unique()
    expected = expected[expected != options.get("padding_idx", -1)]
    assert torch.equal(rows._indices(), expected.unsqueeze(0))
    assert torch.equal(rows.to_dense(), dense)


def test_rows_form_of_nothing(device: torch.device) -> None:
    empty = gradient_of("rows", torch.zeros(0, dtype=torch.int64, device=device))
    assert empty._nnz() == 0
    assert empty.shape == (ROWS, COLUMNS)
    only_padding = gradient_of("rows", torch.full((3,), 5, device=device), padding_idx=5)
    assert only_padding._nnz() == 0


@pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam"])
def test_optimizers_take_the_rows_form(optimizer: str, device: torch.device) -> None:
    ids = make_ids(device=device)
    ours = pe.TokenEmbedding(ROWS, COLUMNS, gradient="rows", device=device)
    theirs = torch.nn.Embedding(ROWS, COLUMNS, sparse=True, device=device)
    theirs.load_state_dict(ours.state_dict())
    for table in (ours, theirs):
        table(ids).pow(2).sum().backward()
        getattr(torch.optim, optimizer)(table.parameters(), lr=0.1).step()
    assert_close(ours.weight, theirs.weight, 1e-6)


@pytest.mark.parametrize("rows", [6000, 18000])
def test_large_gradient_in_used_and_in_fresh_memory(rows: int) -> None:
    """Tables of 12 and 37 MB: malloc keeps the former and maps the latter anew each time."""
    ids = torch.randint(rows, (2000,), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        gradient = torch.randn(2000, 512)  # another one: rows of the call before would be wrong
        expected = torch.zeros(rows, 512, dtype=torch.float64).index_add_(0, ids, gradient.double())
        used = torch.full((rows, 512), float("nan"))
        del used
        found = torch.ops.posembed.embedding_backward(gradient, rows, ids)
        assert found.is_contiguous()
        assert found.data_ptr() % 64 == 0
        assert_close(found, expected, 1e-5)
        found.resize_(rows + 1, 512)  # like an ordinary tensor
        assert_close(found[:-1], expected, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("columns", [1, 5, 64, 768])
def test_cuda_gradient_has_the_bits_of_the_cpu(dtype: torch.dtype, columns: int) -> None:
    ids = torch.cat([make_ids(4000), torch.full((500, 4), 7), torch.full((16, 4), 8)])
    gradient = torch.randn(*ids.shape, columns).to(dtype)
    call = torch.ops.posembed.embedding_backward
    on_cpu = call(gradient, ROWS, ids, padding_idx=4, scale=0.5, scale_grad_by_freq=True)
    for _ in range(3):
        on_cuda = call(gradient.cuda(), ROWS, ids.cuda(), padding_idx=4, scale=0.5, scale_grad_by_freq=True)
        assert torch.equal(on_cuda.cpu(), on_cpu)


def test_rows_form_refuses_second_derivatives() -> None:
    table = pe.TokenEmbedding(ROWS, COLUMNS, gradient="rows")
    (first,) = torch.autograd.grad(table(make_ids()).pow(2).sum(), table.weight, create_graph=True)
    refused((first.to_dense().sum().backward, NotImplementedError, "gradient='dense'"))


@pytest.mark.parametrize("ids", [[[0, ROWS], [1, 2]], [[0, 1], [-1, 2]]])
def test_vmap_keeps_to_the_table_of_each_copy(ids: list, device: torch.device) -> None:
    weights = torch.randn(2, ROWS, COLUMNS, device=device)
    places = torch.tensor(ids, device=device)
    refused((lambda: (torch.func.vmap(pe.functional.embedding)(places, weights), pe.check_errors()), IndexError, f"{ROWS if ids[0][1] == ROWS else -1} at index"))  # fmt: skip


@pytest.mark.gpu
def test_max_norm_leaves_other_rows_cuda() -> None:
    token = pe.TokenEmbedding(5, 4, max_norm=0.1, device="cuda")
    before = token.weight.detach().clone()
    ids = torch.tensor([[1, 9], [-1, 1]], device="cuda")
    with pytest.raises(IndexError, match=r"token id 9 at index 1|token id -1 at index 2"):
        token(ids), pe.check_errors()
    others = [0, 2, 3, 4]
    assert torch.equal(token.weight[others], before[others])
    assert token(torch.empty(0, dtype=torch.int64, device="cuda")).shape == (0, 4)


def test_scale_and_logits() -> None:
    table = pe.TokenEmbedding(ROWS, 16, scale="sqrt_dim")
    ids = make_ids()
    assert torch.equal(table(ids), table.weight[ids] * 4)
    hidden = torch.randn(2, 3, 16)
    assert_close(table.logits(hidden), hidden @ table.weight.T, 1e-6)


@pytest.mark.parametrize("gradient", ["dense", "rows"])
def test_gradients_of_tied_logits(gradient: str, device: torch.device) -> None:
    """The table's gradient is the sum of the look-up's and the output head's."""
    torch.manual_seed(0)
    table = pe.TokenEmbedding(ROWS, 16, padding_idx=2, scale=3.0, gradient=gradient, device=device, dtype=torch.float64)
    ids = torch.tensor([[2, 1, 4], [4, 0, 1]], device=device)
    table.logits(table(ids).tanh()).square().sum().backward()
    weight = table.weight.detach().clone().requires_grad_()
    rows = nn.functional.embedding(ids, weight, padding_idx=2) * 3.0
    (rows.tanh() @ weight.T).square().sum().backward()
    assert_close(table.weight.grad, weight.grad, 1e-13)


def test_logits_of_what_does_not_fit() -> None:
    for table in (pe.TokenEmbedding(ROWS, 16), pe.cpp.TokenEmbedding(ROWS, 16)):
        for hidden in (torch.zeros(2, 15), torch.zeros(())):
            refused((lambda: table.logits(hidden), ValueError, "hidden: expected .* with embedding_dim 16, got"))  # fmt: skip
        refused((lambda: table.logits(torch.zeros(2, 16, dtype=torch.bfloat16)), TypeError, "hidden: expected the dtype of weight"))  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16):
            assert table.logits(torch.zeros(2, 16)).dtype == torch.bfloat16
            assert table.logits(torch.zeros(2, 16, dtype=torch.bfloat16)).any().item() is False
    compiled = torch.compile(pe.TokenEmbedding(ROWS, 16).logits, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2, 16)).shape == (2, ROWS)


def test_sparse_is_another_name_of_the_gradients_form() -> None:
    table = pe.TokenEmbedding(ROWS, 16)
    for sparse in (True, False):
        table.sparse = sparse
        table.zero_grad()
        table(make_ids()).sum().backward()
        assert table.weight.grad.is_sparse == sparse
    table.gradient = "rows"
    assert table.sparse


def test_from_pretrained_shares_and_freezes() -> None:
    values = torch.randn(4, 3)
    table = pe.TokenEmbedding.from_pretrained(values, padding_idx=1, scale=2.0)
    assert isinstance(table, pe.TokenEmbedding)
    assert table.weight.data_ptr() == values.data_ptr()
    assert not table.weight.requires_grad
    assert table.padding_idx == 1
    assert values[1].any()
    assert torch.equal(table(torch.tensor([1])), values[[1]] * 2)
    assert pe.TokenEmbedding.from_pretrained(values, freeze=False).weight.requires_grad
    refused((lambda: pe.TokenEmbedding.from_pretrained(torch.zeros(3)), ValueError, "embeddings: expected"))  # fmt: skip


@pytest.mark.gpu
def test_a_large_table_with_wide_rows_on_cuda(cuda: torch.device) -> None:
    """So many rows that a warp takes a whole row of the gradient, in several steps."""
    rows = 600 if CUDA_ON_CPU else 20_000
    ids, gradient = torch.randint(0, rows, (700,)), torch.randn(700, 1100)
    operator = torch.ops.posembed.embedding_backward
    found = operator(gradient.to(cuda), rows, ids.to(cuda))
    expected = torch.zeros(rows, 1100).index_add_(0, ids, gradient)
    assert_close(found, expected, 1e-6)


@pytest.mark.gpu
def test_errors_are_seen_without_waiting(cuda: torch.device) -> None:
    table = pe.TokenEmbedding(ROWS, COLUMNS, device=cuda)
    table(torch.tensor([ROWS], device=cuda))
    if cuda.type == "cuda":
        torch.cuda.synchronize()
    refused((lambda: pe.check_errors(wait=False), IndexError, f"token id {ROWS} at index 0 of an earlier call on cuda:0"))  # fmt: skip
    pe.check_errors(wait=False)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "weight: expected float32", lambda w: pe.functional.embedding(torch.zeros(2).long(), w.int())),
        (ValueError, "weight: expected .num_embeddings", lambda w: pe.functional.embedding(torch.zeros(2).long(), w[0])),
        (ValueError, r"weight: expected \[num_embeddings, embedding_dim\], got \[\]", lambda w: pe.functional.embedding(torch.zeros(2).long(), w[0, 0])),
        (ValueError, r"weight: expected \[num_embeddings, embedding_dim\], got \[\]", lambda w: pe.functional.embedding(torch.zeros(2).long(), w[0, 0], padding_idx=0)),
        (ValueError, "padding_idx: expected", lambda w: pe.functional.embedding(torch.zeros(2).long(), w, padding_idx=37)),
        (ValueError, "gradient: expected", lambda w: pe.functional.embedding(torch.zeros(2).long(), w, gradient="sparse")),
        (ValueError, "ids: expected the device", lambda w: pe.functional.embedding(torch.zeros(2, device="meta").long(), w)),
        (ValueError, "padding_idx: expected a whole number, got 'a'", lambda w: pe.TokenEmbedding(37, 5, padding_idx="a")),
        (ValueError, "scale_grad_by_freq: expected True or False, got 'no'", lambda w: pe.TokenEmbedding(37, 5, scale_grad_by_freq="no")),
        (ValueError, "sparse: expected True or False, got 'no'", lambda w: pe.TokenEmbedding(37, 5, sparse="no")),
        (ValueError, "gradient: expected the shape of ids", lambda w: torch.ops.posembed.embedding_backward(w, 3, torch.zeros(2).long())),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], message: str, call) -> None:
    refused((call, error, message), given=(torch.zeros(ROWS, COLUMNS),))


@AT_ONCE
def test_max_norm_writes_nothing_where_an_id_is_bad() -> None:
    token = pe.TokenEmbedding(5, 4, max_norm=0.1)
    before = token.weight.detach().clone()
    for ids in ([0, 9], [0, -1]):
        refused((lambda: token(torch.tensor(ids)), IndexError, "ids: expected 0 to 4"))
    assert torch.equal(token.weight, before)


def test_negative_padding_counts_from_the_end() -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    pe.functional.embedding(torch.tensor([4, 1]), weight, padding_idx=-1).sum().backward()
    assert weight.grad is not None
    assert weight.grad[4].eq(0).all()
    assert weight.grad[1].eq(1).all()
    refused((lambda: pe.functional.embedding(torch.tensor([4]), weight, padding_idx=5), ValueError, "padding_idx: expected -5 to 4, got 5"))  # fmt: skip
