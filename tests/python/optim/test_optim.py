"""Tests of the optimizers of tables: the formula, rows, state, and what torch does with optimizers."""

import copy
import io
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import posembed as pe
import pytest
import torch
from support.case import same_for_any_thread_count
from support.optim import formula, state
from support.refusals import refused
from torch import Tensor, nn

ROWS, DIM, STEPS = 40, 24, 100
RULES: dict[str, Callable[..., Any]] = {
    "sgd": pe.optim.SGD,
    "sgd with momentum": lambda p, **k: pe.optim.SGD(p, momentum=0.8, **k),
    "rowwise_adagrad": pe.optim.RowwiseAdagrad,
    "rowwise_adam": lambda p, **k: pe.optim.RowwiseAdam(p, betas=(0.8, 0.95), **k),
    "adam": lambda p, **k: pe.optim.Adam(p, betas=(0.8, 0.95), **k),
}
every = pytest.mark.parametrize("rule", RULES)


def drawn(seed: int = 0, dtype: torch.dtype = torch.float32, dim: int = DIM) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(ROWS, dim, generator=generator).to(dtype))


def gradients(
    dtype: torch.dtype = torch.float32, dim: int = DIM, count: int = 9, steps: int = STEPS
) -> Iterator[Tensor]:
    """Sparse gradients of ascending rows."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randperm(ROWS, generator=generator)[:count].sort().values
        yield rows_of(ids, torch.randn(count, dim, generator=generator).to(dtype))


def rows_of(ids: Tensor, values: Tensor) -> Tensor:
    shape = (ROWS, values.shape[1])
    return torch.sparse_coo_tensor(ids[None], values, shape, check_invariants=True)


def formula_of(rule: str, weight: Tensor) -> Callable[..., Tensor]:
    """A function that takes a step of the formula in float64, and returns the weight."""
    name = rule.removesuffix(" with momentum")
    left: dict[str, Tensor] = {
        kind: torch.zeros_like(value) for kind, value in state(name, *weight.shape, dtype=torch.float64).items()
    }
    if rule == "sgd":
        left = {}
    decays = {"sgd": (0.0, 0.0), "sgd with momentum": (0.8, 0.0)}.get(rule, (0.8, 0.95))
    current, count = weight.detach().double().clone(), itertools.count(1)

    def step(gradient: Tensor, lr: float, **options: Any) -> Tensor:
        nonlocal current
        ids = gradient._indices()[0] if gradient.is_sparse else None
        values = gradient._values() if gradient.is_sparse else gradient
        current, _, *new = formula(
            current, values.double(), name, lr, next(count), ids, left.get("first"),
            left.get("second"), first_decay=decays[0], second_decay=decays[1], **options,
        )  # fmt: skip
        left.update(zip(left, new, strict=True))
        return current

    return step


# ---------------------------------------------------------------------------------------- semantics


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 24, 131])
def test_a_hundred_steps_are_those_of_the_formula(rule: str, dtype: torch.dtype, dim: int) -> None:
    weight = drawn(dtype=dtype, dim=dim)
    optimizer = RULES[rule]([weight], lr=0.01, weight_decay=0.1)
    step = formula_of(rule, weight)
    for gradient in gradients(dtype, dim):
        weight.grad = gradient
        optimizer.step()
        expected = step(gradient, 0.01, weight_decay=0.1)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(weight.detach().double(), expected, rtol=tolerance, atol=tolerance)


def test_adam_is_torchs_for_sparse_gradients() -> None:
    ours, theirs = drawn(), drawn()
    optimizers = pe.optim.Adam([ours], lr=0.01), torch.optim.SparseAdam([theirs], lr=0.01)
    for gradient in gradients():
        ours.grad, theirs.grad = gradient, gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        found, expected = (o.state[p][name] for o, p in zip(optimizers, (ours, theirs), strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_momentum_is_torchs_for_dense_gradients() -> None:
    ours, theirs = drawn(), drawn()
    optimizers = pe.optim.SGD([ours], 0.1, 0.9), torch.optim.SGD([theirs], 0.1, 0.9)
    for gradient in gradients(steps=20):
        ours.grad = theirs.grad = gradient.to_dense()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_bits_for_any_number_of_threads(rule: str, dtype: torch.dtype) -> None:
    ids, values = torch.arange(0, 40_000, 2), torch.randn(20_000, 70).to(dtype)

    def run() -> list[Tensor]:
        weight = nn.Parameter(torch.linspace(-1, 1, 40_000 * 70).view(40_000, 70).to(dtype))
        rounding = {"rounding": "stochastic"} if dtype == torch.bfloat16 else {}
        optimizer = RULES[rule]([weight], lr=0.1, **rounding)
        for _ in range(2):
            weight.grad = torch.sparse_coo_tensor(ids[None], values, weight.shape)
            optimizer.step()
        return [weight.detach(), *(v for v in optimizer.state[weight].values() if v is not None)]

    same_for_any_thread_count(run)


@every
def test_a_dense_gradient_is_a_step_on_all_rows(rule: str) -> None:
    dense, sparse = drawn(), drawn()
    optimizers = [RULES[rule]([each], lr=0.1) for each in (dense, sparse)]
    for gradient in gradients(count=ROWS, steps=3):
        dense.grad, sparse.grad = gradient.to_dense(), gradient
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(dense, sparse)


def test_a_tied_table_learns_from_both_uses() -> None:
    table = pe.TokenEmbedding(ROWS, DIM, gradient="rows")
    before = table.weight.detach().clone()
    optimizer = pe.optim.RowwiseAdagrad(table.parameters(), lr=0.1)
    table.logits(table(torch.tensor([[3, 5, 3]]))).logsumexp(-1).sum().backward()
    optimizer.step()
    assert (table.weight != before).any(1).all()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_any_order_are_added_up_in_float32(rule: str, dtype: torch.dtype) -> None:
    """As autograd gives them where a table is looked up twice."""
    ids = torch.tensor([7, 3, 7, 0, 7])
    values = torch.randn(5, DIM).to(dtype)
    wide = torch.zeros(3, DIM).index_add_(0, torch.tensor([2, 1, 2, 0, 2]), values.float())
    found, expected = drawn(dtype=dtype), drawn(dtype=torch.float32)
    expected.data = found.detach().float()
    for weight, gradient in ((found, rows_of(ids, values)), (expected, rows_of(ids.unique(), wide))):
        weight.grad = gradient
        RULES[rule]([weight], lr=0.1).step()
    assert torch.equal(found, expected.to(dtype))


def test_uses_of_a_table_are_accumulated() -> None:
    tables = [pe.TokenEmbedding(ROWS, DIM, gradient=form) for form in ("rows", "dense")]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        (table(torch.tensor([5, 2])).sum() + 2 * table(torch.tensor([2, 9])).sum()).backward()
        table(torch.tensor([1, 2])).sum().backward()
        pe.optim.SGD(table.parameters(), lr=0.1).step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight)


def test_empty_gradients_and_none() -> None:
    weight, unused = drawn(), drawn()
    optimizer = pe.optim.Adam([weight, unused], lr=0.1)
    weight.grad = rows_of(torch.zeros(0, dtype=torch.int64), torch.zeros(0, DIM))
    optimizer.step()
    assert torch.equal(weight, drawn())
    assert optimizer.state[weight]["step"] == 1
    assert unused not in optimizer.state


def test_maximize_and_groups() -> None:
    up, down = drawn(), drawn()
    optimizer = pe.optim.SGD([{"params": [up], "maximize": True, "lr": 0.5}, {"params": [down]}], 1.0)
    up.grad = down.grad = torch.ones(ROWS, DIM)
    optimizer.step()
    torch.testing.assert_close(up.detach(), drawn().detach() + 0.5)
    torch.testing.assert_close(down.detach(), drawn().detach() - 1.0)


# --------------------------------------------------------------------------- what skipped steps owe


@every
def test_exact_decay_is_that_of_a_dense_optimizer(rule: str) -> None:
    """Rows that skip steps pay, at the rates of the schedule and of another momentum."""
    weight = drawn()
    optimizer = RULES[rule]([weight], lr=0.1, weight_decay=0.3, decay="exact")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    expected = weight.detach().double()
    momentum, moved = torch.zeros_like(expected), torch.zeros_like(expected)
    move = formula_of(rule, moved)  # a move does not depend on the weight
    for gradient in gradients(count=4, steps=60):
        lr = optimizer.param_groups[0]["lr"]
        weight.grad = gradient
        optimizer.step()
        schedule.step()
        expected = expected * (1 - 0.3 * lr)
        if rule == "sgd with momentum":
            momentum = 0.8 * momentum + gradient.to_dense().double()
            expected = expected - lr * momentum
        else:
            before, moved = moved, move(gradient, lr)
            expected = expected + moved - before
    optimizer.catch_up()
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-6, atol=1e-6)
    if rule == "sgd with momentum":
        buffer = optimizer.state[weight]["momentum_buffer"]
        torch.testing.assert_close(buffer.double(), momentum, rtol=1e-5, atol=1e-6)


def test_saving_pays_and_a_resumed_run_goes_on() -> None:
    """As the run that was saved, bit for bit."""
    weight = drawn()
    optimizer = pe.optim.SGD([weight], 0.1, 0.8, weight_decay=0.2, decay="exact")
    steps = [*gradients(count=4, steps=40)]
    for gradient in steps[:20]:
        weight.grad = gradient
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved["state"][0]) == {"step", "momentum_buffer"}
    resumed = nn.Parameter(weight.detach().clone())
    other = pe.optim.SGD([resumed], 1.0, 0.8, decay="exact")
    other.load_state_dict(saved)
    for gradient in steps[20:]:
        for parameter, each in ((weight, optimizer), (resumed, other)):
            parameter.grad = gradient
            each.step()
    for each in (optimizer, other):
        each.catch_up()
    assert torch.equal(weight, resumed)


def test_debts_of_many_steps_are_paid_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = drawn(), drawn()
    for weight, longest in zip(weights, (1 << 16, 7), strict=True):
        monkeypatch.setattr(pe.optim, "_LONGEST", longest)
        optimizer = pe.optim.SGD([weight], 0.1, 0.8, weight_decay=0.2, decay="exact")
        for gradient in gradients(count=2, steps=80):
            weight.grad = gradient
            optimizer.step()
        optimizer.catch_up()
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)


def test_touched_decay_leaves_other_rows_alone() -> None:
    weight = drawn()
    optimizer = pe.optim.SGD([weight], 0.1, 0.8, weight_decay=0.2)
    weight.grad = rows_of(torch.tensor([3]), torch.ones(1, DIM))
    optimizer.step()
    optimizer.catch_up()
    others = torch.arange(ROWS) != 3
    assert torch.equal(weight[others], drawn()[others])
    torch.testing.assert_close(weight[3], drawn()[3] * 0.98 - 0.1)


# -------------------------------------------------------------------------------- 16-bit tables


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "remainder"])
@every
def test_a_resumed_run_of_a_bfloat16_table_is_the_run(rule: str, rounding: str) -> None:
    """PyTorch casts state to the parameter's dtype."""
    options: dict[str, Any] = {"lr": 0.05, "rounding": rounding, "seed": 5}
    weight = drawn(dtype=torch.bfloat16)
    optimizer = RULES[rule]([weight], **options)
    steps = [*gradients(torch.bfloat16, steps=20)]
    for gradient in steps[:10]:
        weight.grad = gradient
        optimizer.step()
    buffer = io.BytesIO()
    torch.save({"weight": weight, "optimizer": optimizer.state_dict()}, buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()))
    resumed = nn.Parameter(saved["weight"].detach())
    other = RULES[rule]([resumed], lr=1.0, rounding=rounding)
    other.load_state_dict(saved["optimizer"])
    for name, value in other.state[resumed].items():
        expected = {"step": None, "remainder": torch.int16}.get(name, torch.float32)
        assert getattr(value, "dtype", None) == expected
    for gradient in steps[10:]:
        for parameter, each in ((weight, optimizer), (resumed, other)):
            parameter.grad = gradient
            each.step()
    assert torch.equal(weight, resumed)
    for name, value in optimizer.state[weight].items():
        found = other.state[resumed][name]
        assert torch.equal(value, found) if isinstance(value, Tensor) else value == found


@every
def test_a_remainder_gives_the_steps_of_float32(rule: str) -> None:
    start = drawn(dtype=torch.bfloat16)
    half, full = nn.Parameter(start.detach().clone()), nn.Parameter(start.detach().float())
    optimizers = RULES[rule]([half], lr=1e-3, rounding="remainder"), RULES[rule]([full], lr=1e-3)
    for gradient in gradients(torch.bfloat16):
        half.grad, full.grad = gradient, gradient.float()
        for optimizer in optimizers:
            optimizer.step()
    rest = optimizers[0].state[half]["remainder"].int()
    joined = (half.detach().view(torch.int16).int() << 16) + rest
    assert torch.equal(joined.view(torch.float32), full.detach())
    torch.testing.assert_close(half.detach().float(), full.detach(), rtol=2**-8, atol=0)


def test_stochastic_rounding_keeps_the_mean() -> None:
    """10,000 elements of 1 that lose a 16th of a place in each of 64 steps."""
    weight = nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
    optimizer = pe.optim.SGD([weight], lr=2.0**-12, rounding="stochastic", seed=3)
    for _ in range(64):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    mean, expected = float(weight.detach().double().mean()), 1 - 2.0**-6
    assert abs(mean - expected) < 5 * 2.0**-8 / 100  # five standard deviations or more
    assert len(weight.detach().unique()) > 3
    plain = nn.Parameter(torch.ones(1, 8, dtype=torch.bfloat16))
    plain.grad = torch.ones_like(plain)
    pe.optim.SGD([plain], lr=2.0**-12).step()
    assert (plain == 1).all()


def test_random_bits_depend_on_seed_step_row_and_column_alone() -> None:
    """Shards and other batches of rows round as the whole table."""
    values = torch.randn(ROWS, DIM).bfloat16()
    gradient = torch.randn(ROWS, DIM).bfloat16()

    def stepped(rows: Tensor, first_row: int = 0, **options: Any) -> Tensor:
        weight = values[first_row:].clone()
        options = {"seed": 7, "step": 2, **options}
        pe.functional.step_rows_(
            weight, gradient[first_row:][rows], rows, rule="sgd", lr=0.01, rounding="stochastic",
            first_row=first_row, **options,
        )  # fmt: skip
        return weight

    whole = stepped(torch.arange(ROWS))
    assert torch.equal(stepped(torch.tensor([4, 9]))[[4, 9]], whole[[4, 9]])
    assert torch.equal(stepped(torch.arange(ROWS - 8), first_row=8), whole[8:])
    for other in ({"seed": 8}, {"step": 3}):
        assert not torch.equal(stepped(torch.arange(ROWS), **other), whole)


def test_special_values_of_16_bits() -> None:
    for rounding in ("stochastic", "remainder"):
        weight = nn.Parameter(torch.tensor([[float("inf"), float("nan"), -0.0, 3e38]]).bfloat16())
        weight.grad = torch.zeros_like(weight)
        pe.optim.SGD([weight], lr=1.0, rounding=rounding).step()
        expected = torch.tensor([[float("inf"), float("nan"), 0.0, 3e38]]).bfloat16()
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------- what torch does with optimizers


@every
def test_schedulers_copies_and_pickles(rule: str) -> None:
    weight = drawn()
    optimizer = RULES[rule]([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    weight.grad = next(gradients())
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert repr(optimizer).startswith(type(optimizer).__name__)
    twin, twin_optimizer = copy.deepcopy((weight, optimizer))
    for parameter, each in ((weight, optimizer), (twin, twin_optimizer)):
        parameter.grad = next(gradients())
        each.step()
    assert torch.equal(weight, twin)
    assert not torch.equal(weight, drawn())


def test_a_closure_is_called() -> None:
    weight = drawn()
    optimizer = pe.optim.SGD([weight], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_gradient_scaler() -> None:
    """Scales, unscales sparse gradients, and skips a step with infinities."""
    table, plain = pe.TokenEmbedding(ROWS, DIM, gradient="rows"), drawn()
    plain.data = table.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = pe.optim.RowwiseAdagrad(table.parameters(), lr=0.1)
    scaler.scale(table(torch.tensor([1, 5, 1])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    plain.grad = rows_of(torch.tensor([1, 5]), torch.tensor([[2.0], [1.0]]).expand(-1, DIM))
    pe.optim.RowwiseAdagrad([plain], lr=0.1).step()
    torch.testing.assert_close(table.weight, plain)
    optimizer.zero_grad()
    before = table.weight.detach().clone()
    scaler.scale(table(torch.tensor([1])).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_sparse_and_dense_gradients(norm_type: float) -> None:
    def model(form: Any) -> tuple[nn.Module, list[nn.Parameter]]:
        torch.manual_seed(0)
        table = nn.Embedding(ROWS, DIM, sparse=form == "rows")  # torch's rows occur twice
        layers = nn.Sequential(table, nn.Linear(DIM, 3))
        layers(torch.tensor([3, 7, 3])).square().sum().backward()
        layers(torch.tensor([3, 1])).square().sum().backward()
        return layers, [*layers.parameters()]

    (_, sparse), (_, dense) = model("rows"), model("dense")
    found = pe.optim.clip_grad_norm_(sparse, 0.5, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(dense, 0.5, norm_type)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(sparse, dense, strict=True):
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)
    unchanged = pe.optim.clip_grad_norm_(iter(sparse), 100.0, norm_type)
    torch.testing.assert_close(unchanged, torch.tensor(0.5), rtol=1e-4, atol=0)
    assert pe.optim.clip_grad_norm_([drawn()], 1.0) == 0
    sparse[0].grad._values()[0, 0] = float("nan")
    refused((lambda: pe.optim.clip_grad_norm_(sparse, 1.0, error_if_nonfinite=True), RuntimeError, "non-finite"))  # fmt: skip


def test_a_resized_table_keeps_its_state() -> None:
    table = pe.TokenEmbedding(ROWS, DIM, gradient="rows")
    optimizer = pe.optim.RowwiseAdagrad(table.parameters(), lr=0.1)
    table(torch.tensor([1, 5])).sum().backward()
    optimizer.step()
    sums = optimizer.state[table.weight]["sum"].clone()
    table.resize(ROWS + 4, optimizer=optimizer)
    assert torch.equal(optimizer.state[table.weight]["sum"][:ROWS], sums)
    assert optimizer.state[table.weight]["sum"].shape == (ROWS + 4,)
    optimizer.zero_grad()
    table(torch.tensor([ROWS + 2])).sum().backward()
    optimizer.step()


def test_a_graph_that_still_holds_the_weight_raises() -> None:
    weight = drawn()
    loss = (weight * weight).sum()
    weight.grad = next(gradients())
    pe.optim.SGD([weight], lr=0.1).step()
    refused((loss.backward, RuntimeError, "modified by an inplace operation"))


# ------------------------------------------------------------------------------ in the backward pass


def table_and(rule: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    table = pe.TokenEmbedding(ROWS, DIM, gradient="rows")
    return table, RULES[rule](table.parameters(), **options)


@every
@pytest.mark.parametrize("options", [{}, {"decay": "exact", "weight_decay": 0.1}])
def test_steps_in_the_backward_pass_are_those_after_it(rule: str, options: Any) -> None:
    tables = []
    for inside in (False, True):
        table, optimizer = table_and(rule, lr=0.1, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if inside:
            pe.optim.in_backward(table, optimizer, grad_scale=4.0)
        for i in range(3):  # a table that is used twice steps once
            loss = table(torch.tensor([3, 5, i])).square().sum() + table(torch.tensor([3])).sum()
            (loss * (4.0 if inside else 1.0)).backward()
            assert (table.weight.grad is None) == inside
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        optimizer.catch_up()
        tables.append(table.weight.detach())
        assert optimizer.state[table.weight]["step"] == 3
    assert torch.equal(*tables)


def test_a_step_in_the_backward_pass_follows_loaded_options() -> None:
    """Loading replaces the groups."""
    table, optimizer = table_and("sgd", lr=0.1)
    pe.optim.in_backward(table, optimizer)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(saved)
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    assert torch.equal(table.weight, before)


def test_a_second_backward_pass_needs_a_step() -> None:
    table, optimizer = table_and("rowwise_adagrad")
    handle = pe.optim.in_backward(table, optimizer)
    loss = table(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    after = table.weight.detach().clone()
    refused((lambda: loss.backward(retain_graph=True), RuntimeError, "after the last backward pass"))  # fmt: skip
    assert torch.equal(table.weight, after)
    optimizer.step()
    loss.backward(retain_graph=True)
    assert not torch.equal(table.weight, after)
    handle.remove()
    loss.backward()
    assert table.weight.grad is not None


def test_a_step_in_the_backward_pass_is_seen_by_graphs_that_hold_the_weight() -> None:
    table, optimizer = table_and("sgd")
    pe.optim.in_backward(table, optimizer)
    other = (table.weight * table.weight).sum()
    table(torch.tensor([1])).sum().backward()
    refused((other.backward, RuntimeError, "modified by an inplace operation"))


def test_what_a_step_in_the_backward_pass_refuses() -> None:
    table, optimizer = table_and("sgd")
    other = pe.optim.SGD([drawn()])
    refused(
        (lambda: pe.optim.in_backward(table, torch.optim.SGD(table.parameters())), TypeError, "optimizer: expected posembed.optim, got torch.optim.sgd.SGD"),
        (lambda: pe.optim.in_backward(table, optimizer, grad_scale=0.0), ValueError, "grad_scale: expected 0, got 0"),
        (lambda: pe.optim.in_backward(table, other), ValueError, "module: expected got none"),
    )  # fmt: skip
    pe.optim.in_backward(table, optimizer)
    before = table.weight.detach().clone()
    loss = table.logits(table(torch.tensor([1]))).sum()
    refused((loss.backward, ValueError, "weight: expected got logits()"))
    assert torch.equal(table.weight, before)
    assert table.weight.grad is None


def test_tables_that_ddp_reduces_are_refused(tmp_path: Any) -> None:
    """Whether they are wrapped before or afterwards; those that it ignores are allowed."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel
        model = nn.Sequential(pe.TokenEmbedding(ROWS, DIM, gradient="rows"), nn.Linear(DIM, 1))
        optimizer = pe.optim.SGD(model[0].parameters())
        wrapped = ddp(model)
        text = "module: expected DistributedDataParallel ignores, got 0.weight"
        refused((lambda: pe.optim.in_backward(wrapped, optimizer), ValueError, text))
        handle = pe.optim.in_backward(model, optimizer)
        refused((lambda: wrapped(torch.tensor([1])), ValueError, text))
        handle.remove()
        ddp._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
        ignoring = ddp(model)
        pe.optim.in_backward(ignoring, optimizer)
        before = model[0].weight.detach().clone()
        ignoring(torch.tensor([1])).sum().backward()
        assert not torch.equal(model[0].weight, before)
    finally:
        torch.distributed.destroy_process_group()


def test_refused() -> None:
    weight = drawn()
    sgd, adam = pe.optim.SGD, pe.optim.Adam
    small = nn.Parameter(torch.zeros(3, 2, dtype=torch.float16))
    row = nn.Parameter(torch.zeros(3))
    refused(
        (lambda: sgd([small]), TypeError, "params: expected float32, float64 or bfloat16, got torch.float16"),
        (lambda: sgd([row]), ValueError, "params: expected tables, got [3]"),
        (lambda: sgd([weight], lr=-1.0), ValueError, "lr: expected 0, got -1"),
        (lambda: sgd([weight], momentum=1.0), ValueError, "momentum: expected 0, 1, got 1.0"),
        (lambda: adam([weight], betas=(0.9, 1.5)), ValueError, "betas: expected 0, 1, got 1.5"),
        (lambda: adam([weight], weight_decay=-1), ValueError, "weight_decay: expected 0, got -1"),
        (lambda: adam([weight], eps=float("nan")), ValueError, "eps: expected got nan"),
        (lambda: adam([weight], decay="lazy"), ValueError, "decay: expected 'touched', 'exact', got 'lazy'"),  # type: ignore[arg-type]
        (lambda: sgd([weight], rounding="up"), ValueError, "rounding: expected 'nearest', 'stochastic', 'remainder', got 'up'"),  # type: ignore[arg-type]
        (lambda: sgd([weight], rounding="stochastic"), TypeError, "rounding: expected 'nearest', torch.float32, got 'stochastic'"),
    )  # fmt: skip
    weight.grad = torch.ones_like(weight)
    optimizer = sgd([weight], 10.0, weight_decay=0.1, decay="exact")
    refused((optimizer.step, ValueError, "weight_decay: expected 1 'exact', got 1"))
    assert torch.equal(weight, drawn())
    refused((lambda: optimizer.add_param_group({"params": [small]}), TypeError, "params"))
    assert len(optimizer.param_groups) == 1


def test_a_step_is_refused_before_anything_is_written() -> None:
    weight, sums = drawn().detach(), torch.zeros(ROWS)
    given: dict[str, Any] = {
        "weight": weight,
        "gradient": torch.ones(2, DIM),
        "ids": torch.tensor([1, 4]),
        "rule": "rowwise_adagrad",
        "lr": 0.1,
        "second": sums,
    }
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"ids": torch.tensor([4, 1])}, ValueError, "ids: expected got 1 after 4 at index 1"),
        ({"ids": torch.tensor([4, 4])}, ValueError, "ids: expected got 4 after 4 at index 1"),
        ({"ids": torch.tensor([1, ROWS])}, IndexError, "ids: expected 0 39, got 40 at index 1"),
        ({"ids": torch.tensor([-1, 4])}, IndexError, "ids: expected 0 39, got -1 at index 0"),
        ({"ids": torch.tensor([1.0, 4.0])}, TypeError, "ids: expected int32 int64, got float32"),
        ({"ids": torch.tensor([1])}, ValueError, "ids: expected count 2, got 1"),
        ({"ids": None}, ValueError, "gradient: expected rows 40, got 2"),
        ({"gradient": torch.ones(2, 3)}, ValueError, "gradient: expected dim 24, got 3"),
        ({"gradient": torch.ones(2, DIM).half()}, TypeError, "gradient: expected float32, got float16"),
        ({"weight": weight.half()}, TypeError, "weight: expected float32, float64 bfloat16, got float16"),
        ({"weight": weight[0]}, ValueError, "weight: expected [rows, dim], got [24]"),
        ({"second": None}, ValueError, "second: expected state 'rowwise_adagrad', got none"),
        ({"second": torch.zeros(ROWS, DIM)}, ValueError, "second: expected [40], got [40, 24]"),
        ({"second": sums.double()}, TypeError, "second: expected float32, got float64"),
        ({"second": torch.zeros(2 * ROWS)[::2]}, ValueError, "second: expected got strides [2]"),
        ({"second": weight.flatten()[:ROWS]}, ValueError, "weight: expected second"),
        ({"first": torch.zeros(ROWS, DIM)}, ValueError, "first: expected none 'rowwise_adagrad', got state"),
        ({"rule": "adamw"}, ValueError, "rule: expected 'sgd', 'rowwise_adagrad', 'rowwise_adam' or 'adam', got 'adamw'"),
        ({"rule": "sgd", "second": None, "first_decay": 0.5}, ValueError, "first: expected 0.5, got none"),
        ({"rule": "adam", "second": torch.zeros(ROWS, DIM), "first": torch.zeros(ROWS, DIM), "first_decay": 1.0}, ValueError, "first_decay: expected 1, got 1"),
        ({"lr": float("inf")}, ValueError, "lr: expected 0, got inf"),
        ({"step": 0}, ValueError, "step: expected 1, got 0"),
        ({"first_row": -1}, ValueError, "first_row: expected 0, got -1"),
        ({"gradient_scale": float("nan")}, ValueError, "gradient_scale: expected got nan"),
        ({"rounding": "remainder"}, TypeError, "weight: expected bfloat16 'remainder', got float32"),
        ({"owed": torch.ones(2, 2)}, ValueError, "owed: expected columns 3, got 2"),
        ({"owed": torch.ones(2, 3).double()}, TypeError, "owed: expected float32, got float64"),
    ]  # fmt: skip
    for change, error, text in rows:
        refused((lambda c=change: pe.functional.step_rows_(**{**given, **c}), error, text))
    assert torch.equal(weight, drawn())
    assert torch.equal(sums, torch.zeros(ROWS))


def test_clipping_does_not_warn() -> None:
    """Torch warns once a process of sparse tensors made without a check of their indices."""
    program = """
import torch, posembed as pe
table = pe.TokenEmbedding(9, 4, gradient="rows")
table(torch.tensor([3, 5, 3])).sum().backward()
pe.optim.clip_grad_norm_(table.parameters(), 1.0)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120)
