"""Optimizers of tables: a step costs what the rows cost that have a gradient.

Row-wise Adagrad: Gupta et al., arXiv:2010.08899, as FBGEMM; Adam as torch's SparseAdam.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from posembed import functional
from posembed.functional._optim import StepRounding, StepRule, merged_rows
from posembed.glue.memory import prefer_huge_pages
from posembed.glue.sharding import is_sharded
from posembed.glue.validation import finites, flag, not_negative, one_of, whole

Decay = Literal["touched", "exact"]

_FORGOTTEN = 46.0  # exp(-46) = 1e-20: what is left of a momentum that no longer counts
_LONGEST = 1 << 16  # steps whose rates are kept; then all rows pay what they owe


class _Debts:
    """What rows owe that steps have skipped: decay of the weight, and momentum.

    ``history`` has three numbers for each step s. Sums of logarithms, of what is kept of a weight
    and of a momentum, give the product over any steps after s. The third is how far the momentum of
    step s has moved the weight since, relative to what has been kept of the weight.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.last = torch.zeros(rows, dtype=torch.int32, device=device)  # step of each row
        self.history = torch.zeros(3, 64, dtype=torch.float64, device=device)
        self.steps = 0

    def owed(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[rows, 3]: factors of weight, of its move by momentum, and of momentum."""
        last = (self.last if ids is None else self.last[ids]).long()
        kept, momentum, moved = self.history[:, last]
        kept = (self.history[0, self.steps] - kept).exp()
        momentum = (self.history[1, self.steps] - momentum).exp()
        return torch.stack([kept, moved * kept, momentum], 1).to(dtype)

    def record(self, ids: Tensor | None, lr: float, weight_decay: float, momentum: float) -> None:
        """Notes a step that ``ids`` have taken, and that the others owe."""
        before, now = self.steps, self.steps + 1
        if now == self.history.shape[1]:
            self.history = torch.cat([self.history, torch.zeros_like(self.history)], 1)
        kept, left, moved = self.history
        kept[now] = kept[before] + math.log1p(-lr * weight_decay)
        left[now] = left[before] + math.log(max(momentum, 1e-300))
        if momentum > 0:
            start = int(torch.searchsorted(-left[:now], -_FORGOTTEN - left[now]))
            share = left[now] - left[start:now] - kept[now] + kept[start:now]
            moved[start:now] += lr * share.exp()
        moved[now] = 0
        if ids is None:
            self.last.fill_(now)
        else:
            self.last[ids] = now
        self.steps = now


class _TableOptimizer(torch.optim.Optimizer):
    """Steps on the rows of tables, with state for a rule of ``functional.step_rows_``."""

    rule: ClassVar[StepRule]
    first: ClassVar[str | None] = None  # names of state
    second: ClassVar[str | None] = None
    _debts: dict[Tensor, _Debts]
    _stepped: set[Tensor]  # parameters that have stepped in the backward pass

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        weight_decay: float,
        decay: Decay,
        maximize: bool,
        rounding: StepRounding,
        seed: int,
        **others: Any,
    ) -> None:
        common = {"lr": lr, "weight_decay": weight_decay, "decay": decay, "maximize": maximize}
        super().__init__(params, {**common, "rounding": rounding, "seed": seed, **others})
        self._debts = {}
        self._stepped = set()

    # ------------------------------------------------------------------------------- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, tables [rows, dim], with options of their own."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay", "eps", "momentum"):
            if name in group:
                not_negative(name, group[name])
        decays = [("momentum", group.get("momentum", 0.0))]
        if "betas" in group:
            group["betas"] = betas = finites("betas", group["betas"])
            if len(betas) != 2:
                raise ValueError(f"betas: expected two numbers, got {betas}")
            decays += [("betas", beta) for beta in betas]
        for name, value in decays:
            if not 0 <= value < 1:
                raise ValueError(f"{name}: expected at least 0 and below 1, got {value}")
        one_of("decay", group["decay"], "touched", "exact")
        group["maximize"] = flag("maximize", group["maximize"])
        group["seed"] = whole("seed", group["seed"])
        one_of("rounding", group["rounding"], "nearest", "stochastic", "remainder")
        for parameter in group["params"]:
            _check_table(parameter)
            if group["rounding"] != "nearest" and parameter.dtype != torch.bfloat16:
                raise TypeError(
                    f"rounding: expected 'nearest' for a table in {parameter.dtype}, got "
                    f"{group['rounding']!r}"
                )

    # ------------------------------------------------------------------------------------- steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the rows that have a gradient.

        Args:
            closure: Computes the loss and its gradients again.

        Returns:
            What ``closure`` returns.

        Raises:
            ValueError: ``lr * weight_decay`` is 1 or more with ``decay="exact"``, or a DTensor is
                not split by rows.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, parameter.grad)
        self._stepped.clear()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _update(
        self, parameter: Tensor, group: dict[str, Any], gradient: Tensor, scale: float = 1.0
    ) -> None:
        """Steps on the rows of a gradient, which is ``scale`` times the loss's."""
        weight = _local(parameter)
        ids, rows = _rows_of(gradient, parameter)
        options, state = self._options(group), self._state_of(parameter, group)
        debts = self._debts_of(parameter, group)
        owed = None if debts is None else debts.owed(ids, _state_type(weight))
        if owed is not None and "momentum" not in group:  # the moments stand
            owed[:, 1], owed[:, 2] = 0, 1
        options["gradient_scale"] /= scale
        state["step"] += 1
        functional.step_rows_(
            weight, rows, ids, rule=self.rule, step=state["step"], owed=owed, **options,
            **self._tensors(state), **_rounding(parameter, group),
        )  # fmt: skip
        if debts is not None:
            decay = group["weight_decay"]
            debts.record(ids, options["lr"], decay, group.get("momentum", 0.0))
            if debts.steps == _LONGEST:
                self._pay(parameter, group)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        """The numbers of a step, from the options of a group."""
        first, second = group.get("betas", (group.get("momentum", 0.0), 0.0))
        return {
            "lr": float(group["lr"]),
            "weight_decay": float(group["weight_decay"]),
            "first_decay": float(first),
            "second_decay": float(second),
            "eps": float(group.get("eps", 0.0)),
            "gradient_scale": -1.0 if group["maximize"] else 1.0,
        }

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, made at its first step."""
        state: dict[str, Any] = self.state[parameter]
        dtype = _state_type(parameter)
        state.setdefault("step", 0)
        if self.first is not None and group.get("momentum", 1.0) > 0 and self.first not in state:
            state[self.first] = _zeros(parameter, dtype)
        if self.second is not None and self.second not in state:
            state[self.second] = _zeros(parameter, dtype, by_row=self.rule != "adam")
        if group["rounding"] == "remainder" and "remainder" not in state:
            state["remainder"] = _zeros(parameter, torch.int16)
        return state

    def _tensors(self, state: dict[str, Any]) -> dict[str, Any]:
        """State as a step takes it."""
        named = {"first": self.first, "second": self.second, "remainder": "remainder"}
        return {
            ours: _local(state[name])
            for ours, name in named.items()
            if name is not None and name in state
        }

    # ----------------------------------------------------------------- what skipped steps owe

    def _debts_of(self, parameter: Tensor, group: dict[str, Any]) -> _Debts | None:
        """None if rows without a gradient owe nothing."""
        if group["decay"] != "exact":
            return None
        if group["lr"] * group["weight_decay"] >= 1:
            raise ValueError(
                "weight_decay: expected lr * weight_decay below 1 for decay='exact', got "
                f"{group['lr'] * group['weight_decay']:g}"
            )
        if parameter not in self._debts:
            local = _local(parameter)
            self._debts[parameter] = _Debts(local.shape[0], local.device)
        return self._debts[parameter]

    @torch.no_grad()
    def catch_up(self) -> None:
        """Applies to all rows what skipped steps owe, with ``decay="exact"``.

        Call it before the tables are saved or read as a whole; :meth:`state_dict` does.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._debts:
                    self._pay(parameter, group)

    def _pay(self, parameter: Tensor, group: dict[str, Any]) -> None:
        debts, weight = self._debts.pop(parameter), _local(parameter)
        ids = (debts.last < debts.steps).nonzero().flatten()
        state, owed = self.state[parameter], debts.owed(ids, _state_type(weight))
        tensors = self._tensors(state)
        tensors.pop("second", None)
        if "momentum" not in group:
            tensors.pop("first", None)
            owed[:, 1] = 0
        nothing = weight.new_zeros(1, weight.shape[1]).expand(ids.shape[0], -1)
        functional.step_rows_(
            weight, nothing, ids, rule="sgd", lr=0.0, step=max(1, state["step"]), owed=owed,
            first_decay=float("first" in tensors), **tensors, **_rounding(parameter, group),
        )  # fmt: skip

    # ------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """As torch's; first applies what skipped steps owe, which changes the tables."""
        self.catch_up()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state stays in float32 for tables of 16 bits."""
        super().load_state_dict(state_dict)
        saved = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        ours = itertools.chain.from_iterable(g["params"] for g in self.param_groups)
        for key, parameter in zip(saved, ours, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if not isinstance(value, Tensor) or name == "step":
                    continue
                dtype = _state_type(parameter) if value.is_floating_point() else value.dtype
                self.state[parameter][name] = value.to(parameter.device, dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Copies owe nothing."""
        self.catch_up()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._debts = {}
        self._stepped = set()


class SGD(_TableOptimizer):
    """Stochastic gradient descent with momentum.

    ``momentum_buffer = momentum * momentum_buffer + g; weight -= lr * momentum_buffer``, after
    ``weight *= 1 - lr * weight_decay``. A dense gradient is a step on all rows.

    Args:
        params: Tables [rows, dim] in float32, float64 or bfloat16, or groups of them.
        lr: Learning rate; schedulers change it.
        momentum: At least 0 and below 1; 0 needs no state.
        weight_decay: Decoupled from the gradient.
        decay: When weights decay and momentum moves them. "touched": in the steps in which a row
            has a gradient. "exact": in all steps; a row pays what skipped steps owe, at their own
            rates, when it next has a gradient, in :meth:`catch_up` and in :meth:`state_dict`. Until
            then its weight is read without them.
        maximize: Step against the sign.
        rounding: Of tables in bfloat16. "nearest" loses steps below half of a number's last place.
            "stochastic" rounds up or down so that the mean is right. "remainder" keeps the rest of
            a float32 number as state, 2 bytes for each element. Other state is in float32.
        seed: Of stochastic rounding, whose bits depend on seed, step, row and column alone.

    Raises:
        ValueError: An option is out of range, or a parameter is no table.
        TypeError: A parameter has another dtype.

    Examples:
        >>> import torch, posembed as pe
        >>> table = pe.TokenEmbedding(1000, 8, gradient="rows")
        >>> optimizer = pe.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
        >>> table(torch.tensor([3, 5, 3])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["momentum_buffer"][2:6, 0]
        tensor([0., 2., 0., 1.])
    """

    rule: ClassVar[StepRule] = "sgd"
    first = "momentum_buffer"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        *,
        weight_decay: float = 0.0,
        decay: Decay = "touched",
        maximize: bool = False,
        rounding: StepRounding = "nearest",
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, weight_decay, decay, maximize, rounding, seed, momentum=momentum
        )


class RowwiseAdagrad(_TableOptimizer):
    """Adagrad with one number of state for each row, as FBGEMM's exact row-wise Adagrad.

    ``sum += mean(g²); weight -= lr * g / (sqrt(sum) + eps)``, after
    ``weight *= 1 - lr * weight_decay``. A dense gradient is a step on all rows.

    Args:
        params: Tables [rows, dim] in float32, float64 or bfloat16, or groups of them.
        lr: Learning rate; schedulers change it.
        eps: Outside of the root.
        weight_decay, decay, maximize, rounding, seed: As for :class:`SGD`.

    Raises:
        ValueError: An option is out of range, or a parameter is no table.
        TypeError: A parameter has another dtype.

    Examples:
        >>> import torch, posembed as pe
        >>> memory = pe.NgramEmbedding(
        ...     pe.NgramSpec.qwen4_exp(5000, 2, rows=1000), 64, gradient="rows"
        ... )
        >>> optimizer = pe.optim.RowwiseAdagrad(memory.parameters(), lr=0.1)
        >>> memory(torch.randint(5000, (2, 9))).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[memory.weight]["sum"].shape
        torch.Size([16896])
    """

    rule: ClassVar[StepRule] = "rowwise_adagrad"
    second = "sum"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        *,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decay: Decay = "touched",
        maximize: bool = False,
        rounding: StepRounding = "nearest",
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, weight_decay, decay, maximize, rounding, seed, eps=eps)


RowWiseAdagrad = RowwiseAdagrad  # TorchRec's name


class Adam(_TableOptimizer):
    """Adam whose moments change in the steps in which a row has a gradient: torch's SparseAdam.

    The bias is corrected with the step of the whole table. ``weight *= 1 - lr * weight_decay``
    comes first. A dense gradient is a step on all rows.

    Args:
        params: Tables [rows, dim] in float32, float64 or bfloat16, or groups of them.
        lr: Learning rate; schedulers change it.
        betas: Decay of the first and of the second moment, each at least 0 and below 1.
        eps: Outside of the root.
        decay: As for :class:`SGD`; it concerns weight decay alone.
        weight_decay, maximize, rounding, seed: As for :class:`SGD`.

    Raises:
        ValueError: An option is out of range, or a parameter is no table.
        TypeError: A parameter has another dtype.

    Examples:
        >>> import torch, posembed as pe
        >>> table = pe.TokenEmbedding(1000, 8, gradient="rows")
        >>> optimizer = pe.optim.Adam(table.parameters(), lr=0.01, weight_decay=0.1)
        >>> table(torch.tensor([3, 5, 3])).sum().backward()
        >>> optimizer.step()
    """

    rule: ClassVar[StepRule] = "adam"
    first = "exp_avg"
    second = "exp_avg_sq"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decay: Decay = "touched",
        maximize: bool = False,
        rounding: StepRounding = "nearest",
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, weight_decay, decay, maximize, rounding, seed, betas=betas, eps=eps
        )


class RowwiseAdam(Adam):
    """Adam with one second moment for each row, as FBGEMM's partial row-wise Adam.

    ``exp_avg_sq`` is that of ``mean(g²)``, [rows]; eps is added after the correction of the bias.
    Arguments, errors and the rest are those of :class:`Adam`.

    Examples:
        >>> import torch, posembed as pe
        >>> table = pe.TokenEmbedding(1000, 8, gradient="rows")
        >>> optimizer = pe.optim.RowwiseAdam(table.parameters(), lr=0.01)
        >>> table(torch.tensor([3, 5, 3])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["exp_avg_sq"].shape
        torch.Size([1000])
    """

    rule: ClassVar[StepRule] = "rowwise_adam"


# ------------------------------------------------------------------------- in the backward pass


class _Handles:
    """Removes hooks."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Gradients are kept again, for ``optimizer.step()``."""
        for handle in self._handles:
            handle.remove()


def in_backward(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, grad_scale: float = 1.0
) -> _Handles:
    """Steps on the tables of a module in the backward pass, so that no gradient is kept.

    A table steps once in each backward pass, after the last of its uses, with the numbers of
    ``optimizer.step()`` after it. ``optimizer.step()`` remains: it ends the step, and steps on the
    optimizer's other parameters; schedulers follow it. Wrong with this are
    :class:`torch.amp.GradScaler`, which looks at gradients after the pass, clipping by a norm of
    all gradients, and gradients that several passes accumulate.

    Args:
        module: Has the tables, with ``gradient="rows"``; its other parameters are left alone.
        optimizer: One of this module's, which has the tables.
        grad_scale: The number by which the loss is multiplied before ``backward()``.

    Returns:
        A handle whose ``remove()`` undoes it.

    Raises:
        TypeError: Another optimizer.
        ValueError: No table is among the optimizer's, or DDP or FSDP manage one: exclude it there
            (``parameters_to_ignore``, ``ignored_params``). In the backward pass, if a table has a
            dense gradient, as from ``logits()``.
        RuntimeError: In the backward pass, if the last one has had no ``optimizer.step()``.

    Examples:
        >>> import torch, posembed as pe
        >>> table = pe.TokenEmbedding(1000, 8, gradient="rows")
        >>> optimizer = pe.optim.RowwiseAdagrad(table.parameters(), lr=0.1)
        >>> handle = pe.optim.in_backward(table, optimizer)
        >>> table(torch.tensor([3, 5, 3])).sum().backward()  # steps
        >>> table.weight.grad is None
        True
        >>> optimizer.step()
    """
    if not isinstance(optimizer, _TableOptimizer):
        kind = type(optimizer)
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise TypeError(f"optimizer: expected one of posembed.optim, got {name}")
    if not_negative("grad_scale", grad_scale) == 0:
        raise ValueError("grad_scale: expected a number above 0, got 0")
    known = {p for group in optimizer.param_groups for p in group["params"]}
    tables: dict[Tensor, str] = {p: n for n, p in module.named_parameters() if p in known}
    if not tables:
        raise ValueError("module: expected a table of the optimizer among its parameters, got none")
    _refuse_wrapped(module, tables)

    def hook(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        name = tables[parameter]
        if not gradient.is_sparse:
            raise ValueError(
                f"{name}: expected rows as the gradient for a step in the backward pass, got a "
                "dense one, as from logits() or gradient='dense'"
            )
        if parameter in optimizer._stepped:
            raise RuntimeError(f"{name}: expected optimizer.step() after the last backward pass")
        groups = (g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        with torch.no_grad():
            optimizer._update(parameter, next(groups), gradient, grad_scale)
        optimizer._stepped.add(parameter)

    def check(*_: Any) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            active = nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
            if active is not None:
                _refuse_wrapped(active, tables)

    handles: list[Any] = [
        p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for p in tables
    ]
    return _Handles([*handles, module.register_forward_pre_hook(check)])


def _refuse_wrapped(module: nn.Module, tables: dict[Tensor, str]) -> None:
    """Raises ValueError for a table whose gradient DDP or FSDP would reduce."""
    for table in tables:
        if is_sharded(table):
            raise ValueError("module: expected tables of this process alone, got a DTensor")
    for each in module.modules():
        kind = type(each).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
            ignored = getattr(each, "parameters_to_ignore", ())
            for name, p in each.module.named_parameters():  # type: ignore[union-attr]
                if p in tables and name not in ignored:
                    raise ValueError(f"module: expected tables that {kind} ignores, got {name}")


# -------------------------------------------------------------------------------------- gradients


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients so that their common norm is at most ``max_norm``, sparse ones included.

    As :func:`torch.nn.utils.clip_grad_norm_`, which raises for sparse gradients. Rows of a sparse
    gradient that occur twice are added up first.

    Args:
        parameters: Those whose gradients are scaled, in place.
        max_norm: The largest norm.
        norm_type: The order of the norm; "inf" is allowed.
        error_if_nonfinite: Whether a norm that is not finite raises RuntimeError.

    Returns:
        The norm before.

    Examples:
        >>> import torch, posembed as pe
        >>> table, head = pe.TokenEmbedding(1000, 4, gradient="rows"), torch.nn.Linear(4, 1)
        >>> head(table(torch.tensor([1, 2, 1]))).sum().backward()
        >>> norm = pe.optim.clip_grad_norm_([*table.parameters(), *head.parameters()], 1.0)
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = []
    for parameter in given:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            ids, rows = _rows_of(parameter.grad, parameter)
            assert ids is not None
            rows = rows.to(parameter.dtype)
            # As an argument, False would warn.
            with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
                parameter.grad = torch.sparse_coo_tensor(
                    ids[None], rows, parameter.shape, device=rows.device, is_coalesced=True
                )
            gradients.append(parameter.grad._values())
        else:
            gradients.append(parameter.grad)
    with torch.no_grad():
        norm = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
    return norm


def _rows_of(gradient: Any, parameter: Any) -> tuple[Tensor | None, Tensor]:
    """Ascending rows of a gradient, and their numbers; None for a dense gradient: all rows.

    autograd drops the mark of sorted rows, and sums of gradients join them. Rows that occur twice
    are added up in float32, in the order in which they stand.
    """
    if is_sharded(gradient):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return None, _local(gradient)
    if not gradient.is_sparse:
        return None, gradient
    if gradient.sparse_dim() != 1:
        raise ValueError(f"grad: expected sparse rows, got {gradient.sparse_dim()} sparse dims")
    ids, rows = gradient._indices()[0], gradient._values()
    if bool((ids[1:] > ids[:-1]).all()):
        return ids, rows
    return merged_rows(rows.to(_state_type(rows)), ids, parameter.shape[0])


# ----------------------------------------------------------------------------------------- tables


def _check_table(parameter: Tensor) -> None:
    if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        hint = ", whose smallest number is too large for small steps"
        raise TypeError(
            "params: expected tables in float32, float64 or bfloat16, got "
            f"{parameter.dtype}{hint if parameter.dtype == torch.float16 else ''}"
        )
    if parameter.dim() != 2:
        raise ValueError(f"params: expected tables [rows, dim], got {list(parameter.shape)}")
    for place in getattr(parameter, "placements", ()):
        if not (place.is_replicate() or place.is_shard(0)):
            raise ValueError(f"params: expected tables that are split by rows, got {place!r}")


def _state_type(weight: Tensor) -> torch.dtype:
    """State is as exact as the arithmetic."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _local(tensor: Any) -> Any:
    """This process's rows."""
    return tensor.to_local() if is_sharded(tensor) else tensor.detach()


def _zeros(parameter: Any, dtype: torch.dtype, by_row: bool = False) -> Tensor:
    """State for a table: of its shape, or one number for each row."""
    local = _local(parameter)
    zeros = torch.zeros(
        local.shape[:1] if by_row else local.shape, dtype=dtype, device=local.device
    )
    prefer_huge_pages(zeros)
    if not is_sharded(parameter):
        return zeros
    from torch.distributed.tensor import DTensor

    shape = parameter.shape[:1] if by_row else parameter.shape
    stride = (1,) if by_row else (shape[1], 1)
    mesh, places = parameter.device_mesh, parameter.placements
    return DTensor.from_local(zeros, mesh, places, run_check=False, shape=shape, stride=stride)


def _rounding(parameter: Any, group: dict[str, Any]) -> dict[str, Any]:
    """How a step rounds, the same for a shard as for the whole table."""
    first_row = 0
    if is_sharded(parameter) and group["rounding"] == "stochastic":
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        first_row = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )[1][0]
    return {"rounding": group["rounding"], "seed": group["seed"], "first_row": first_row}
