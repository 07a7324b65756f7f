"""Tests of InputEmbedding beyond the shared ones: separate modules, dropout, Hugging Face."""

import copy

import posembed as pe
import pytest
import torch
from support.case import FLOATING, TOLERANCE, assert_close
from support.halves import AT_ONCE, CUDA_ON_CPU
from support.input import apart, assert_equals_calls
from support.refusals import refused
from torch import Tensor, nn

ROWS, COLUMNS = 23, 48
KINDS = [
    {"positions": None},
    {"max_positions": 20},
    {"max_positions": 20, "num_types": 2, "norm": "layer", "padding_idx": 3, "eps": 1e-12},
    {"max_positions": 20, "norm": "rms", "scale": "sqrt_dim", "gradient": "rows"},
    {"positions": "sinusoidal", "norm": "layer", "num_types": 3, "scale": "sqrt_dim"},
]
kinds = pytest.mark.parametrize("options", KINDS, ids=str)


def make(options: dict, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, **more):
    torch.manual_seed(0)
    embed = pe.InputEmbedding(ROWS, COLUMNS, device=device, dtype=dtype, **options, **more)
    if embed.norm is not None:
        nn.init.normal_(embed.norm.weight)
    ids = torch.randint(0, ROWS, (4, 7), device=device)
    types = torch.randint(0, 2, (4, 7), device=device) if embed.token_type else None
    return embed, ids, types


@kinds
def test_equals_submodules_one_after_the_other(options: dict, device: torch.device) -> None:
    """Compares values and every gradient."""
    embed, ids, types = make(options, device)
    assert_equals_calls(embed, ids, types)


@kinds
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("width", [200, 512])
def test_long_batches(options: dict, shared: bool, width: int, device: torch.device) -> None:
    """Kernels process several tokens of a place together, whether or not they share a position."""
    torch.manual_seed(0)
    longer = options | ({"max_positions": 90} if "max_positions" in options else {})
    embed = pe.InputEmbedding(ROWS, width, device=device, **longer)
    exact = copy.deepcopy(embed).double()
    ids = torch.randint(0, ROWS, (6, 70), device=device)
    types = torch.randint(0, 2, (6, 70), device=device) if embed.token_type else None
    positions = None
    if embed.position is not None and not shared:
        positions = torch.randint(0, 90, (6, 70), device=device)
    result = embed(ids, positions=positions, types=types)
    x = exact.token(ids)
    if exact.token_type is not None:
        x = x + exact.token_type(types)
    if exact.position is not None:
        x = exact.position(x, positions)
    expected = x if exact.norm is None else exact.norm(x)
    assert_close(result, expected, 3e-6)
    gradient = torch.randn_like(result)
    result.backward(gradient), expected.backward(gradient.double())
    for (name, ours), theirs in zip(embed.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None, name
        assert_close(ours.grad.to_dense(), theirs.grad.to_dense(), 1e-5)


@pytest.mark.parametrize("mean", [0.0, 3e4, 1e20])
def test_norm_of_rows_far_from_zero(mean: float, device: torch.device) -> None:
    """A mean that is large beside the spread loses no more digits than the values do."""
    torch.manual_seed(0)
    spread = 1e-3 * mean + 1.0
    token = mean + spread * torch.randn(ROWS, 100, device=device)
    ids = torch.arange(ROWS, device=device).unsqueeze(0)
    result = pe.functional.input_embedding(ids, token, norm="layer")
    expected = nn.functional.layer_norm(token.double(), (100,)).unsqueeze(0)
    assert_close(result, expected, 2e-4 if mean else 2e-6)


@kinds
def test_default_types_are_type_0(options: dict, device: torch.device) -> None:
    """With the same bits on the CPU; CUDA adds the only type to the position first."""
    embed, ids, _ = make(options, device)
    zeros = torch.zeros_like(ids) if embed.token_type is not None else None
    results = [embed(ids), embed(ids, types=zeros)]
    on_cuda = CUDA_ON_CPU or device.type == "cuda"
    tolerance = {} if on_cuda else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(*results, **tolerance)
    gradients = []
    for result in results:
        embed.zero_grad()
        result.square().sum().backward()
        gradients.append([p.grad.to_dense().clone() for p in embed.parameters()])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, **tolerance)


@kinds
def test_decoding_token_by_token(options: dict, device: torch.device) -> None:
    """A single row has the bits that it has in the batch, at its offset or given position."""
    embed, ids, types = make(options, device)
    whole = embed(ids, types=types)
    for place in range(ids.shape[1]):
        part = slice(place, place + 1)
        step = embed(ids[:, part], types=None if types is None else types[:, part], offset=place)
        assert torch.equal(step, whole[:, part])
    if embed.position is not None:
        order = torch.randperm(ids.shape[1], device=device)
        moved = embed(ids[:, order], positions=order, types=None if types is None else types[:, order])
        assert torch.equal(moved, whole[:, order])


@pytest.mark.parametrize("norm", [None, "layer"])
@pytest.mark.parametrize("num_types", [1, 2, 8, 9])
@pytest.mark.parametrize("seq", [31, 32, 45])
def test_gradients_that_need_no_sort(norm: str | None, num_types: int, seq: int, device: torch.device) -> None:
    """Positions summed over the batch, in the kernel if there are many; few and many types."""
    torch.manual_seed(0)
    embed = pe.InputEmbedding(ROWS, 40, max_positions=60, num_types=num_types, norm=norm, device=device)
    other = copy.deepcopy(embed)
    ids = torch.randint(0, ROWS, (3, seq), device=device)
    types = torch.randint(0, num_types, (3, seq), device=device)
    result, expected = embed(ids, types=types, offset=4), apart(other, ids, types, offset=4)
    gradient = torch.randn_like(result)
    result.backward(gradient), expected.backward(gradient)
    for (name, mine), theirs in zip(embed.named_parameters(), other.parameters(), strict=True):
        assert mine.grad is not None, name
        assert_close(mine.grad, theirs.grad, 2e-5)
    assert not embed.position.weight.grad[:4].any()
    assert not embed.position.weight.grad[4 + seq :].any()


@pytest.mark.parametrize("norm", ["none", "layer"])
@pytest.mark.parametrize("scale", [1.0, -2.5])
def test_tokens_with_a_row_of_their_own(norm: str, scale: float, device: torch.device) -> None:
    ids = torch.arange(12, device=device).view(3, 4)
    gradient = torch.randn(3, 4, 8, device=device)
    found = []
    for own in (False, True):
        torch.manual_seed(5)
        rows = torch.randn(12, 8, device=device, requires_grad=True)
        result = pe.functional.input_embedding(ids, rows, norm=norm, scale=scale, own_rows=own)
        result.backward(gradient)
        found.append(rows.grad)
    assert torch.equal(*found)


def test_an_empty_batch_has_zero_gradients() -> None:
    embed = pe.InputEmbedding(ROWS, 8, max_positions=50, num_types=2, norm="layer")
    embed(torch.empty(0, 40, dtype=torch.long)).sum().backward()
    assert all(not parameter.grad.any() for parameter in embed.parameters())


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(
    "spec", [{}, {"preset": "marian"}, {"preset": "ddpm", "cos_first": True}, {"preset": "fairseq", "scale": 2.0}]
)
@pytest.mark.parametrize("width", [COLUMNS, 512])
def test_sinusoids_have_the_bits_of_the_operator(
    dtype: torch.dtype, spec: dict, width: int, device: torch.device
) -> None:
    sinusoid = pe.SinusoidalSpec(width, **spec)
    token = torch.randn(ROWS, width, device=device, dtype=dtype)
    ids = torch.randint(0, ROWS, (3, 9), device=device)
    positions = torch.randint(0, 2**40, (3, 9), device=device)
    positions[1, 2:4] = -1
    for places in ({"offset": 7}, {"positions": positions}, {"positions": positions[1]}):
        result = pe.functional.input_embedding(ids, token, sinusoid=sinusoid, **places)
        expected = pe.functional.sinusoidal(token[ids], spec=sinusoid, **places)
        assert torch.equal(result, expected)


# Rows that no CUDA kernel takes, of 16, 8 and 4 bytes, which a chain of operators computes.
WIDE = [(torch.float32, 4104), (torch.bfloat16, 8200), (torch.float64, 1028), (torch.float32, 1029)]


@kinds
@pytest.mark.parametrize(("dtype", "width"), WIDE)
@pytest.mark.parametrize("places", ["counted", "shared", "own"])
def test_rows_wider_than_a_kernel_takes(
    options: dict, dtype: torch.dtype, width: int, places: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    embed = pe.InputEmbedding(ROWS, width, device=device, dtype=dtype, dropout=0.4, **options)
    exact = copy.deepcopy(embed).double()
    ids = torch.randint(0, ROWS, (2, 3), device=device)
    types = torch.randint(0, 2, (2, 3), device=device) if embed.token_type else None
    call = {"counted": {"offset": 4}, "shared": {"positions": ids[1] % 9}, "own": {"positions": ids % 9}}[places]
    call = call if embed.position else {}
    seed = torch.tensor([7], device=device)
    result = embed(ids, types=types, seed=seed, first_token=3, **call)
    x = exact.token(ids) if types is None else exact.token(ids) + exact.token_type(types)
    x = exact.position(x, **call) if exact.position else x
    x = exact.norm(x) if exact.norm else x
    expected = torch.ops.posembed.input_dropout(x, seed, 0.4, 3 * width)
    tolerance = (2 if dtype == torch.bfloat16 else 8) * TOLERANCE[dtype]
    assert_close(result, expected, tolerance)
    gradient = torch.randn_like(result)
    result.backward(gradient), expected.backward(gradient.double())
    for (name, ours), theirs in zip(embed.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None, name
        assert_close(ours.grad.to_dense(), theirs.grad.to_dense(), 5 * tolerance)


@pytest.mark.parametrize("norm", ["none", "layer", "rms"])
def test_operators_of_rows_wider_than_a_kernel_takes(norm: str, device: torch.device) -> None:
    """With the shapes and gradients that tracers expect."""
    width = WIDE[0][1]
    ids = torch.randint(0, ROWS, (2, 3), device=device)
    token, position, types = (torch.randn(ROWS, width, device=device, requires_grad=True) for _ in range(3))
    weight, bias = (torch.randn(width, device=device, requires_grad=True) for _ in range(2))
    norms = (weight if norm != "none" else None, bias if norm == "layer" else None)
    seed = torch.tensor([7], device=device)
    call = (token, ids, position, None, types, ids, *norms, seed)
    options = {"norm": norm, "dropout": 0.4}
    operators = torch.ops.posembed
    for operator in (operators.input_embedding, operators.input_embedding_forward):
        torch.library.opcheck(operator.default, call, options)
    output, mean, rstd = (x.detach() for x in operators.input_embedding_forward(*call, **options))
    if norm == "layer":
        sums = token[ids] + types[ids] + position[:3]
        assert_close(mean, sums.mean(-1), 1e-6)
        assert_close(rstd, (sums.var(-1, correction=0) + 1e-5).rsqrt(), 1e-5)
    torch.library.opcheck(operators.input_embedding_backward.default, (output, mean, rstd, *call), options)


@pytest.mark.skipif(not CUDA_ON_CPU, reason="elsewhere it is an error at once")
@pytest.mark.parametrize("width", [COLUMNS, WIDE[0][1]])
@pytest.mark.parametrize("norm", ["none", "layer"])
def test_a_token_with_an_index_outside_has_zeros_and_no_gradient(width: int, norm: str) -> None:
    """On a device it is recorded, too (test_indices_outside.py)."""
    tables = [torch.randn(ROWS, width, requires_grad=True) for _ in range(3)]
    token, position, types = tables
    ids, places, kinds = (torch.arange(12).view(3, 4) for _ in range(3))
    ids[0, 1], places[1, 2], kinds[2, 3] = -1, ROWS, -5
    call = {"position": position, "positions": places, "token_type": types, "types": kinds, "norm": norm}
    result = pe.functional.input_embedding(ids, token, **call)
    outside = torch.zeros(3, 4, dtype=torch.bool)
    outside[0, 1] = outside[1, 2] = outside[2, 3] = True
    assert torch.equal(~result.any(-1), outside)
    result.backward(torch.randn_like(result))
    for table in tables:
        assert torch.equal(table.grad[:12].any(-1), ~outside.flatten())


# ------------------------------------------------------------------------------------------ dropout


@kinds
def test_dropout_follows_the_seed_and_its_gradient_the_mask(options: dict, device: torch.device) -> None:
    embed, ids, types = make(options, device, dropout=0.4)
    plain = embed.eval()(ids, types=types)
    embed.train()
    torch.manual_seed(1)
    first = embed(ids, types=types)
    second = embed(ids, types=types)
    torch.manual_seed(1)
    again = embed(ids, types=types)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    kept = first != 0
    assert 0.5 < float(kept.double().mean()) < 0.7
    assert_close(first[kept], plain[kept] / 0.6, 1e-6)
    embed.zero_grad()
    first.backward(torch.ones_like(first))
    found = embed.token.weight.grad.to_dense().clone()
    embed.zero_grad()
    (apart(embed, ids, types) * kept / 0.6).backward(torch.ones_like(first))
    assert_close(found, embed.token.weight.grad.to_dense(), 1e-5)


@kinds
def test_parts_of_a_batch_draw_the_mask_of_the_whole(options: dict, device: torch.device) -> None:
    embed, ids, types = make({**options, "gradient": "dense"}, device, dropout=0.4)
    seed = torch.tensor([7], device=device)
    gradient = torch.randn(4, 7, COLUMNS, device=device)
    whole = embed(ids, types=types, seed=seed)
    parameters = list(embed.parameters())
    expected = torch.autograd.grad(whole, parameters, gradient)
    found, sums = [], [torch.zeros_like(p) for p in parameters]
    for rows, first in ((slice(0, 1), 0), (slice(1, 4), 7)):
        kind = None if types is None else types[rows]
        found.append(embed(ids[rows], types=kind, seed=seed, first_token=first))
        for total, part in zip(sums, torch.autograd.grad(found[-1], parameters, gradient[rows]), strict=True):
            total += part
    assert torch.equal(torch.cat(found), whole)
    for ours, theirs in zip(sums, expected, strict=True):
        assert_close(ours, theirs, 1e-5)


def test_the_mask_of_a_part_in_derivatives(device: torch.device) -> None:
    """The chains for tangents and second derivatives draw the same mask."""
    embed, ids, types = make(KINDS[2], device, torch.float64, dropout=0.4)
    call = {"types": types, "seed": torch.tensor([7], device=device), "first_token": 3}
    plain = embed(ids, **call)
    tangents = {name: torch.zeros_like(p) for name, p in embed.named_parameters()}
    parameters = {name: p.detach() for name, p in embed.named_parameters()}
    chained, _ = torch.func.jvp(lambda p: torch.func.functional_call(embed, p, ids, call), (parameters,), (tangents,))
    assert torch.equal(chained == 0, plain == 0)
    weight = embed.token.weight
    first = torch.autograd.grad(plain.square().sum(), weight, retain_graph=True)
    derived = torch.autograd.grad(plain.square().sum(), weight, create_graph=True)
    assert_close(derived[0], first[0], 1e-12)


def test_a_given_seed_has_the_same_mask_on_either_device(device: torch.device) -> None:
    masks = []
    for place in (torch.device("cpu"), device):
        embed, ids, _ = make({"max_positions": 20, "norm": "layer"}, place, dropout=0.4)
        masks.append(embed(ids, seed=torch.tensor([7], device=place)).cpu() == 0)
    assert torch.equal(*masks)


@pytest.mark.parametrize("gradient", ["dense", "rows"])
@pytest.mark.parametrize("num_types", [2, 9])
def test_without_a_norm_no_table_is_kept(num_types: int, gradient: str, device: torch.device) -> None:
    """Tables may change before backward, whose bits do not change."""
    options = {"max_positions": 20, "num_types": num_types, "dropout": 0.4, "gradient": gradient}
    embed, ids, types = make(options, device)
    positions = torch.randint(0, 20, (4, 7), device=device)
    for places in (None, positions):
        gradients = []
        for changes in (False, True):
            torch.manual_seed(3)
            result = embed(ids, positions=places, types=types).square()
            if changes:
                with torch.no_grad():
                    for parameter in embed.parameters():
                        parameter.add_(1.0)
            embed.zero_grad()
            result.sum().backward()
            gradients.append([p.grad.to_dense() for p in embed.parameters()])
            if changes:
                with torch.no_grad():
                    for parameter in embed.parameters():
                        parameter.sub_(1.0)
        for first, second in zip(*gradients, strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_dropout_at_its_ends(probability: float, device: torch.device) -> None:
    embed, ids, _ = make({"positions": None}, device, dropout=probability)
    expected = embed.token(ids) * (1 - probability)
    assert torch.equal(embed(ids), expected)


# ------------------------------------------------------------------------------- module and errors


def test_state_dict_keys() -> None:
    embed = pe.InputEmbedding(5, 4, max_positions=3, num_types=2, norm="layer")
    assert list(embed.state_dict()) == [
        "token.weight",
        "position.weight",
        "token_type.weight",
        "norm.weight",
        "norm.bias",
    ]
    bare = pe.InputEmbedding(5, 4, positions="sinusoidal", norm="rms")
    assert list(bare.state_dict()) == ["token.weight", "norm.weight"]


def test_sizes_can_be_read() -> None:
    """Sizes of submodules, which may have been resized."""
    embed = pe.InputEmbedding(5, 4, max_positions=3, num_types=2, padding_idx=-1, token_dim=2)
    embed.token.resize(7)
    embed.position.extend(6)
    sizes = ("num_embeddings", "embedding_dim", "padding_idx", "max_positions", "num_types")
    assert [getattr(embed, name) for name in sizes] == [7, 4, 4, 6, 2]
    bare = pe.InputEmbedding(5, 4, positions="sinusoidal")
    assert [getattr(bare, name) for name in sizes] == [5, 4, None, None, 0]


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "ids: expected int32", lambda e, i: e(i.float())),
        (ValueError, "positions: expected seq 7", lambda e, i: e(i, positions=torch.arange(6))),
        (ValueError, "offset: expected 0 where", lambda e, i: e(i, positions=torch.arange(7), offset=1)),
        (ValueError, "types: expected the shape of ids", lambda e, i: e(i, types=i[:, :3])),
        (ValueError, "types: expected none", lambda e, i: pe.InputEmbedding(ROWS, 4, positions=None)(i, types=i)),
        (ValueError, "positions: expected none", lambda e, i: pe.InputEmbedding(ROWS, 4, positions=None)(i, positions=torch.arange(7))),
        (ValueError, "norm: expected 'layer'", lambda e, i: pe.InputEmbedding(ROWS, 4, positions=None, norm="batch")),
        (ValueError, "dropout: expected a number, got 'a'", lambda e, i: pe.InputEmbedding(ROWS, 4, positions=None, dropout="a")),
        (ValueError, "eps: expected a number, got 'a'", lambda e, i: pe.InputEmbedding(ROWS, 4, positions=None, norm="rms", eps="a")),
        (ValueError, "padding_idx: expected a whole number, got 'a'", lambda e, i: pe.InputEmbedding(ROWS, 4, positions=None, padding_idx="a")),
        (ValueError, "token_dim: expected 0 or more, got -2", lambda e, i: pe.InputEmbedding(ROWS, 4, positions=None, token_dim=-2)),
        (ValueError, "embedding_dim: expected 0 or more, got -2", lambda e, i: pe.InputEmbedding(ROWS, -2, positions=None, scale="sqrt_dim")),
        (ValueError, "output_dim: expected 0 or more, got -2", lambda e, i: pe.InputEmbedding(ROWS, 4, positions=None, output_dim=-2)),
        (ValueError, "output_dim: expected a whole number, got 2.5", lambda e, i: pe.InputEmbedding(ROWS, 4, positions=None, output_dim=2.5)),
        (ValueError, "cu_seqlens: expected none where padding is counted", lambda e, i: pe.InputEmbedding(ROWS, 4, max_positions=99, padding_idx=1, position_rule="roberta")(i[:1], cu_seqlens=torch.tensor([0, 7]))),
        (ValueError, "num_types: expected 0 or more", lambda e, i: pe.InputEmbedding(ROWS, 4, positions=None, num_types=-1)),
        (ValueError, r"token: expected \[num_embeddings, embedding_dim\], got \[\]", lambda e, i: pe.functional.input_embedding(i, torch.tensor(1.0))),
        (ValueError, "norm: expected 'none'", lambda e, i: torch.ops.posembed.input_embedding(e.token.weight, i, norm="batch")),
        (ValueError, "norm_weight: expected none", lambda e, i: torch.ops.posembed.input_embedding(e.token.weight, i, norm_weight=e.norm.weight)),
        (ValueError, "own_rows: expected no padding_idx and a row of token for each id", lambda e, i: torch.ops.posembed.input_embedding(e.token.weight, i, own_rows=True)),
        pytest.param(ValueError, "ids: expected 0, 1, … with own_rows, got 1 at index 0", lambda e, i: torch.ops.posembed.input_embedding(e.token.weight[:2], torch.tensor([[1, 0]]), own_rows=True), marks=AT_ONCE),
        (TypeError, "position: expected the dtype", lambda e, i: torch.ops.posembed.input_embedding(e.token.weight, i, e.position.weight.half())),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], message: str, call) -> None:
    embed, ids, _ = make({"max_positions": 20, "num_types": 2, "norm": "layer"})
    refused((call, error, message), given=(embed, ids))


def test_errors_with_a_tangent() -> None:
    """Forward mode takes another path and makes the same checks."""
    ids, table = torch.tensor([[1, 2]]), torch.randn(5, 8)

    def call(table: Tensor) -> Tensor:
        return torch.ops.posembed.input_embedding(table, ids, norm="foo")

    refused((lambda: torch.func.jvp(call, (table,), (table,)), ValueError, "norm: expected"))


@pytest.mark.gpu
def test_sequences_that_share_positions_on_cuda(cuda: torch.device) -> None:
    """So many tokens that a team takes several sequences: a bad id concerns its own token alone."""
    embed = pe.InputEmbedding(ROWS, 16, max_positions=4300, num_types=2, norm="layer")
    ids = torch.randint(0, ROWS, (5, 4300))
    expected = embed(ids)
    bad = ids.to(cuda)
    bad[0, 5] = bad[2, 6] = bad[4, 4299] = ROWS
    output = embed.to(cuda)(bad)
    with pytest.raises(IndexError, match=f"token id {ROWS} at index (5|8606|21499)"):
        pe.check_errors()
    places = ([0, 2, 4], [5, 6, 4299])
    assert not output[places].any()
    expected[places] = 0
    assert_close(output, expected, 2e-6)


@pytest.mark.parametrize("dtype", FLOATING)
def test_torchs_own_modules_may_stand_in(dtype: torch.dtype, device: torch.device) -> None:
    """They give the values and gradients of their own calls; an eps of None is torch's default."""
    options = {"device": device, "dtype": dtype}
    ids = torch.tensor([[0, 2, 1]], device=device)
    for norm in (nn.RMSNorm(8, **options), nn.LayerNorm(8, eps=0.1, **options), nn.LayerNorm(8, bias=False, **options), nn.RMSNorm(8, elementwise_affine=False, **options)):  # fmt: skip
        embed = pe.InputEmbedding(3, 8, positions=None, num_types=2, norm="layer", **options)
        embed.token = nn.Embedding(3, 8, padding_idx=-1, **options)
        embed.token_type = nn.Embedding(2, 8, **options)
        embed.norm = norm
        with torch.no_grad():
            for table in (embed.token, embed.token_type):
                table.weight.mul_(1e-3)  # so that eps matters
        exact = copy.deepcopy(embed).double()
        if getattr(exact.norm, "eps", 0) is None and dtype != torch.float64:
            exact.norm.eps = torch.finfo(torch.float32).eps
        result, expected = embed(ids), apart(exact, ids, torch.zeros_like(ids))
        assert_close(result, expected, max(TOLERANCE[dtype], 4e-6))
        result[..., 0].sum().backward()
        assert not embed.token.weight.grad[2].any()
        assert embed.token.weight.grad[:2].any()


def test_projected_tokens_have_every_option() -> None:
    """The rows come from the submodule's own call."""
    embed = pe.InputEmbedding(3, 8, positions=None, token_dim=4)
    embed.token = pe.TokenEmbedding(3, 4, max_norm=1e-3)
    assert embed(torch.tensor([[0, 2]])).abs().max() < 1e-2
    assert embed.token.weight[[0, 2]].norm(dim=1).max() < 2e-3


def test_what_does_not_fit_is_refused_before_it_is_read() -> None:
    ids, token = torch.zeros(1, 4, dtype=torch.long), torch.zeros(3, 8)
    refused((lambda: pe.functional.input_embedding(ids, token, sinusoid=pe.SinusoidalSpec(4)), ValueError, "sinusoid: expected embedding_dim 8, got 4"))  # fmt: skip
    embed = pe.InputEmbedding(3, 8, max_positions=16)
    refused((lambda: embed(ids, offset=2**63 - 2), ValueError, "offset: expected a sum below 2^63"))
    none = torch.empty(0)
    refused((lambda: torch.ops.posembed.input_embedding_backward(torch.zeros(1, 4, 8), none, none, token, ids, norm="layer"), ValueError, "mean: expected the shape of ids"))  # fmt: skip


# ------------------------------------------------------------------------------ vectors instead of ids


@kinds
def test_vectors_take_the_place_of_token_rows(options: dict, device: torch.device) -> None:
    """Values, and gradients of vectors and parameters."""
    embed, ids, types = make({**options, "gradient": "dense"}, device)
    other = copy.deepcopy(embed)
    vectors = embed.token(ids).detach().requires_grad_()
    rows = vectors.detach().clone().requires_grad_()
    result = embed(inputs_embeds=vectors, types=types, offset=2)
    x = rows if types is None else rows + other.token_type(types)
    x = x if other.position is None else other.position(x, offset=2)
    expected = x if other.norm is None else other.norm(x)
    assert_close(result, expected, 2e-6)
    assert_close(result, embed(ids, types=types, offset=2), 2e-6)
    gradient = torch.randn_like(result)
    result.backward(gradient), expected.backward(gradient)
    assert_close(vectors.grad, rows.grad, 4e-6)
    assert embed.token.weight.grad is None
    for (name, ours), theirs in zip(embed.named_parameters(), other.parameters(), strict=True):
        if name != "token.weight":
            assert_close(ours.grad, theirs.grad, 4e-6)


def test_vectors_are_not_scaled_and_not_padding(device: torch.device) -> None:
    embed = pe.InputEmbedding(
        ROWS, 8, positions="sinusoidal", padding_idx=0, position_rule="roberta", scale="sqrt_dim"
    ).to(device)
    vectors = torch.zeros(2, 5, 8, device=device)  # as the row of padding
    expected = embed.position.encode(torch.arange(5, device=device))
    assert torch.equal(embed(inputs_embeds=vectors), expected.expand(2, 5, 8))
    ids = torch.tensor([[3, 0, 4]], device=device)
    places = torch.tensor([[0, -1, 1]], device=device)
    assert torch.equal(embed(ids), embed.position(embed.token(ids), places))
    assert not embed(ids)[0, 1].any()


@pytest.mark.parametrize("dims", [{"token_dim": 6}, {"output_dim": 6}], ids=str)
def test_vectors_are_projected(dims: dict, device: torch.device) -> None:
    embed = pe.InputEmbedding(ROWS, 8, max_positions=9, norm="rms", device=device, **dims)
    ids = torch.randint(0, ROWS, (2, 5), device=device)
    vectors = embed.token(ids)
    assert_close(embed(inputs_embeds=vectors), embed(ids), 2e-6)


def test_vectors_draw_the_mask_of_ids(device: torch.device) -> None:
    embed, ids, types = make(KINDS[2], device, dropout=0.4)
    seed = torch.tensor([7], device=device)
    call = {"types": types, "seed": seed, "first_token": 3}
    found = embed(inputs_embeds=embed.token(ids), **call)
    assert torch.equal(found == 0, embed(ids, **call) == 0)
    torch.manual_seed(1)
    drawn = embed(inputs_embeds=embed.token(ids), types=types)
    torch.manual_seed(1)
    assert torch.equal(drawn == 0, embed(ids, types=types) == 0)


def test_vectors_under_autocast(device: torch.device) -> None:
    """Tables take the dtype of the vectors, as they take that of token rows."""
    embed = pe.InputEmbedding(ROWS, 8, max_positions=9, norm="layer", device=device)
    vectors = torch.randn(2, 5, 8, device=device, dtype=torch.bfloat16)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        result = embed(inputs_embeds=vectors)
    assert result.dtype == torch.bfloat16
    assert_close(result, embed.norm(embed.position(vectors.float())), 2.0**-6)


@pytest.mark.parametrize("kind", [pe.InputEmbedding, pe.cpp.InputEmbedding])
def test_vectors_that_do_not_fit(kind) -> None:
    embed = kind(ROWS, 8, max_positions=9)
    ids, vectors = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 8)
    refused(
        (lambda: embed(ids, inputs_embeds=vectors), ValueError, "inputs_embeds: expected either .*, got both"),
        (embed, ValueError, "inputs_embeds: expected either .*, got neither"),
    )  # fmt: skip
    for wrong in (vectors[0], vectors[..., :6]):
        refused((lambda: embed(inputs_embeds=wrong), ValueError, "inputs_embeds: expected [batch, seq, 8], got"))  # fmt: skip
    refused(
        (lambda: embed(inputs_embeds=vectors.int()), TypeError, "inputs_embeds: expected float32, .*, got"),
        (lambda: embed(inputs_embeds=vectors.half()), TypeError, "inputs_embeds: expected the dtype of the tables"),
        (lambda: embed(inputs_embeds=vectors, types=ids), ValueError, "types: expected none"),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- eps


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_an_eps_that_no_norm_has(eps: float, norm: str) -> None:
    message = "eps: expected a finite number"
    for kind in (pe.InputEmbedding, pe.cpp.InputEmbedding):
        refused((lambda: kind(3, 8, positions=None, norm=norm, eps=eps), ValueError, message))
    ids, token = torch.tensor([[0, 2]]), torch.randn(3, 8)
    refused((lambda: pe.functional.input_embedding(ids, token, norm=norm, eps=eps), ValueError, message))  # fmt: skip
    refused((lambda: torch.ops.posembed.input_embedding(token.to("meta"), ids.to("meta"), norm=norm, eps=eps), ValueError, message))  # fmt: skip
    embed = pe.InputEmbedding(3, 8, positions=None, norm=norm)
    embed.norm.eps = eps
    refused((lambda: embed(ids), ValueError, message))


@pytest.mark.parametrize("dim", [40, 512])
@pytest.mark.parametrize("empty", ["token", "token_type", "position"])
def test_tables_without_rows_have_no_row_for_any_index(empty: str, dim: int, device: torch.device) -> None:
    """On CUDA too at once: such a table has no address, and the kernels take it for none."""
    rows = {"token": 5, "token_type": 2, "position": 9, empty: 0}
    tables = {name: torch.zeros(count, dim, device=device) for name, count in rows.items()}
    ids = torch.zeros(2, 3, dtype=torch.int64, device=device)
    refused((lambda: pe.functional.input_embedding(ids, **tables, types=ids, positions=ids), IndexError, "expected"))  # fmt: skip
    none = ids[:, :0]
    result = pe.functional.input_embedding(none, **tables, types=none, positions=none)
    assert result.shape == (2, 0, dim)
