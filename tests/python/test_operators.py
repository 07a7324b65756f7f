"""Shared tests of all operators. Add an operator's cases to OPERATORS, and all tests apply."""

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
import torch._subclasses
import torch.fx.experimental.symbolic_shapes
from support import calls
from support.case import TOLERANCE, OperatorCase, Sample, as_tuple, assert_close, same_for_any_thread_count, samples
from support.families import cases
from support.refusals import refused
from torch import Tensor

OPERATORS: list[OperatorCase] = cases()
SIZES = [(2, 3), (1, 1), (3, 7), (0, 5), (2, 0)]

# Operators that the shared tests cannot take, and the tests that cover them. Those without tensor
# arguments read specifications.
WITHOUT_CASE = {
    "embedding_backward_rows": "the size of its result depends on the ids; token/test_token.py",
    "token_bag_backward_rows": "the size of its result depends on the ids; bag/test_bag.py",
    "prefer_huge_pages": "advice to the system; test_huge_pages.py",
    "embedding_resize": "draws random rows; token/test_resize.py",
    "learned_positions": "from integers to integers; learned/test_learned.py",
    "alibi_attention": "matrix products, which autocast casts; alibi/test_alibi.py",
    "alibi_check_attention": "returns nothing; alibi/test_alibi.py",
    "alibi_scaled_slopes": "may return its argument; alibi/test_alibi.py",
    "relative_buckets": "from integers to integers; relative_bias/test_relative_bias.py",
    "score_scale": "a composition of torch's; rotary/test_score_scale.py",
    "relative_rows": "from integers to integers; relative_logits/test_rows.py",
    "relative_log_distances": "reads a dtype and a device; relative_bias/test_window.py",
    "sinusoidal_grid_positions": "reads a device; sinusoidal/test_grid.py",
    "alibi_positions": "from integers to integers; alibi/test_alibi.py",
    "norm_rotary_forward": "the forward pass of norm_rotary, which has cases",
    "norm_rotary_backward": "the backward pass of norm_rotary, which has cases",
    "norm_rotary_packed": "norm_rotary of views; rotary/test_packed.py",
    "norm_rotary_packed_": "norm_rotary_ of views; rotary/test_packed.py",
    "norm_rotary_packed_backward": "its backward pass; rotary/test_packed.py",
    "input_embedding_forward": "the forward pass of input_embedding, which has cases",
    "input_embedding_backward": "the backward pass of input_embedding, which has cases",
    "input_embedding_backward_rows": "the same with rows; input/test_row_gradients.py",
    "mrope_positions": "from integers to integers; positions/test_mrope.py",
    "packed_grid_positions": "from integers to integers; positions/test_positions.py",
    "packed_positions": "from integers to integers; positions/test_positions.py",
    "document_positions": "from integers to integers; positions/test_positions.py",
    "zigzag_positions": "from integers to integers; positions/test_positions.py",
    "rotary_packed": "rotary_packed_pair with a view; rotary/test_packed.py",
    "rotary_rerotate_": "rotary_ twice, on a copy; rotary/test_conversion.py",
    "embedding_quantized": "of codes; token/test_quantized.py",
    "quantize_rows": "gives codes; token/test_quantized.py",
    "file_rows": "reads a file; token/test_file_table.py",
    "mapped": "a view of memory; token/test_host_table.py",
    "ngram_ids": "from integers to integers; ngram/test_ngram_ids.py",
    "ngram_mask": "from integers to integers; ngram/test_ngram_ids.py",
}

every = pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
differentiable = pytest.mark.parametrize(
    "case", [case for case in OPERATORS if case.differentiable and not case.mutates], ids=lambda case: case.name
)


def first_of_each(cases: list[OperatorCase], kind: Callable[[OperatorCase], Any]) -> Any:
    """The first case of each kind, for compilers, which are slow; `make reliability` takes all."""
    if os.environ.get("POSEMBED_LONG") != "1":
        cases = [*{kind(case): case for case in reversed(cases)}.values()]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def signature(case: OperatorCase) -> Any:
    """An operator and the kinds of its arguments: what tracing depends on."""
    args = case.sample(2, 3, "cpu", torch.float32).args
    kinds = ((a.dim(), a.dtype) if isinstance(a, Tensor) else type(a) for a in args)
    return case.operator, *kinds


def double(case: OperatorCase, device: torch.device | str, batch: int = 2, seq: int = 3) -> Sample:
    torch.manual_seed(0)
    return case.sample(batch, seq, device, torch.float64)


def richest_first(cases: list[OperatorCase]) -> list[OperatorCase]:
    """Those with the most tensors come first; derivatives of what has none are not compiled."""
    return sorted(cases, key=lambda case: (not case.differentiable, -len(double(case, "cpu").tensors())))


derivable = pytest.mark.parametrize(
    "case",
    [case for case in OPERATORS if case.differentiable and not case.mutates and not case.conventional],
    ids=lambda case: case.name,
)

# Tracing and derivation are the same for both halves of an operator, and slow. GPUs run these too.
of_one_half = pytest.mark.no_stand_in


def scalar(results: tuple[Tensor, ...]) -> Tensor:
    """A number that depends on every element with a different weight."""
    return sum(
        (result * torch.linspace(1, 2, result.numel(), dtype=result.dtype, device=result.device).view_as(result)).sum()
        for result in results
        if result.is_floating_point()
    )


def function_of(case: OperatorCase, sample: Sample):
    """The operator as a function of only its floating-point tensors."""
    return lambda *tensors: case(sample.replace(tensors))


def first_of(case: OperatorCase, sample: Sample):
    """The operator as a function of its first floating-point tensor, giving one tensor."""
    rest = sample.tensors()[1:]
    return lambda tensor: torch.cat([r.flatten() for r in case(sample.replace([tensor, *rest]))])


def test_every_operator_has_a_case() -> None:
    on_tensors = {
        schema.name.removeprefix("posembed::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("posembed::") and any("Tensor" in str(argument.type) for argument in schema.arguments)
    }
    tried = {case.operator._opname for case in OPERATORS}
    assert on_tensors - tried == set(WITHOUT_CASE)


def test_every_operator_has_a_call() -> None:
    known = {name.partition("::") for name in torch._C._dispatch_get_all_op_names()}
    assert {case.operator._opname for case in calls.every()} == {
        name for space, _, name in known if space == "posembed"
    }


@every
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_float64(case: OperatorCase, size: tuple[int, int], device: torch.device) -> None:
    for _, _, _, sample in samples([case], [size], device):
        expected = case.expected(sample)
        for actual, wanted in zip(case(sample), expected, strict=True):
            if actual.is_floating_point():
                assert_close(actual, wanted, TOLERANCE[actual.dtype])
            else:
                assert torch.equal(actual, wanted)


# Results that are drawn, or the argument itself, and advice to the system.
UNREPEATABLE = {"embedding_resize", "mapped", "prefer_huge_pages"}


@first_of_each(
    [case for case in calls.every() if case in OPERATORS or case.name in WITHOUT_CASE.keys() - UNREPEATABLE], signature
)
def test_opcheck(case: OperatorCase, device: torch.device) -> None:
    if case not in OPERATORS and device.type != "cpu":
        pytest.skip("its call has tensors on the CPU")
    sample = double(case, device)
    if case.differentiable and not case.mutates:
        sample = sample.requires_grad()
    torch.library.opcheck(case.operator, sample.args, sample.kwargs)


@of_one_half
@derivable
def test_gradcheck(case: OperatorCase, device: torch.device) -> None:
    sample = double(case, device).requires_grad()
    function = function_of(case, sample)
    assert torch.autograd.gradcheck(function, sample.tensors(), check_forward_ad=True, check_batched_grad=case.vmap)
    # Of all second derivatives, a random sum each way.
    assert torch.autograd.gradgradcheck(function, sample.tensors(), fast_mode=True)


@differentiable
def test_gradients_against_float64(case: OperatorCase, device: torch.device) -> None:
    """Compares gradients in every dtype with the reference's from torch's autograd.

    ALiBi's slopes set the tolerance: rounded terms times distances nearly cancel.
    """
    for dtype in case.dtypes:
        torch.manual_seed(2)
        sample = case.sample(2, 3, device, dtype).requires_grad()
        exact = sample.to(torch.float64).requires_grad()
        actual = torch.autograd.grad(scalar(case(sample)), sample.tensors())
        expected = torch.autograd.grad(scalar(as_tuple(case.reference(*exact.args, **exact.kwargs))), exact.tensors())
        for tensor, found, wanted in zip(sample.tensors(), actual, expected, strict=True):
            assert found.dtype == tensor.dtype
            assert_close(found, wanted, 16 * TOLERANCE[dtype])


@of_one_half
@first_of_each(richest_first(OPERATORS), lambda case: case.operator)
def test_compile_serves_every_length(case: OperatorCase, device: torch.device) -> None:
    """Expects one graph without breaks for every batch and sequence length, with gradients.

    Lengths of results, and of every other kind of arguments: test_export_with_dynamic_batch_and_sequence.
    """
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=graphs, fullgraph=True, dynamic=True)
    def compiled(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(result * 2 for result in case(sample.replace([t * 1 for t in tensors])))

    compiled_at_first = 0
    # Sizes that no other dimension has, because the compiler gives equal sizes one symbol.
    for batch, seq in ((11, 13), (17, 19), (23, 29), (13, 37)):
        sample = double(case, device, batch, seq)
        tensors = sample.requires_grad().tensors() if case.differentiable and not case.mutates else sample.tensors()
        exact = case.expected(sample)
        results = compiled(*tensors)
        for actual, wanted in zip(results, exact, strict=True):
            assert_close(actual, wanted * 2, 1e-12)
        if tensors and tensors[0].requires_grad:
            scalar(results).backward()
        # The first call may compile twice: dynamic=True tries a float option as a variable first.
        compiled_at_first = compiled_at_first or graphs.frame_count
    assert graphs.frame_count == compiled_at_first


@pytest.mark.slow
@first_of_each(OPERATORS, lambda case: case.operator)
def test_inductor(case: OperatorCase, device: torch.device) -> None:
    """The default backend gives the results of eager mode."""
    torch._dynamo.reset()
    sample = double(case, device)
    expected = case.expected(sample)
    function = torch.compile(function_of(case, sample), fullgraph=True)
    # Inductor's cache on disk does not notice a changed schema of an operator.
    with torch._inductor.config.patch(force_disable_caches=True):
        results = function(*[t.clone() for t in sample.tensors()])
    for actual, wanted in zip(results, expected, strict=True):
        assert_close(actual, wanted, 1e-12)


@of_one_half
@first_of_each([c for c in OPERATORS if c.differentiable and not c.mutates], lambda case: case.operator)
def test_compiled_autograd(case: OperatorCase, device: torch.device) -> None:
    if case.operator.__name__ in ("learned_resample.default", "relative_window_resample.default"):
        pytest.skip("torch 2.11 fails for torch.nn.functional.interpolate, too")
    sample = double(case, device).requires_grad()
    expected = torch.autograd.grad(scalar(case(sample)), sample.tensors())
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        scalar(case(sample)).backward()
    for tensor, wanted in zip(sample.tensors(), expected, strict=True):
        assert_close(tensor.grad, wanted, 1e-12)


@of_one_half
@first_of_each(OPERATORS, signature)
def test_export_with_dynamic_batch_and_sequence(case: OperatorCase, device: torch.device) -> None:
    class Program(torch.nn.Module):
        def forward(self, given):
            remaining = iter(given)
            args = [a if isinstance(a, str) else next(remaining) for a in small.args]
            clones = [a.clone() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
            return case(Sample(tuple(clones), kwargs))

    def inputs(sample: Sample) -> tuple[Any, ...]:
        """All arguments but texts, for which export writes guards with the wrong quotes."""
        return tuple(a for a in sample.args if not isinstance(a, str))

    torch.manual_seed(3)
    # Sizes that no other dimension has, so that sizes identify dimensions.
    small, large = (case.sample(19, 23, device, torch.float64), case.sample(29, 31, device, torch.float64))
    kwargs = small.kwargs
    names = {19: torch.export.Dim("batch", min=2), 23: torch.export.Dim("seq", min=2)}
    shapes = [
        {i: names[n] for i, n in enumerate(a.shape) if n in names}
        if isinstance(a, Tensor)
        else [None] * len(a)
        if isinstance(a, list)
        else None
        for a in inputs(small)
    ]
    program = torch.export.export(Program(), (inputs(small),), dynamic_shapes=(tuple(shapes),)).module()
    for actual, wanted in zip(as_tuple(program(inputs(small))), case.expected(small), strict=True):
        assert_close(actual, wanted, 1e-12)
    if small.kwargs == large.kwargs:
        for actual, wanted in zip(as_tuple(program(inputs(large))), case.expected(large), strict=True):
            assert_close(actual, wanted, 1e-12)


@derivable
def test_func_transforms(case: OperatorCase, device: torch.device) -> None:
    sample = double(case, device, 1, 2)
    function = first_of(case, sample)

    def reference(tensor: Tensor) -> Tensor:
        exact = sample.replace([tensor, *sample.tensors()[1:]])
        results = as_tuple(case.reference(*exact.args, **exact.kwargs))
        return torch.cat([result.flatten() for result in results])

    point = sample.tensors()[0]
    expected = torch.func.jacrev(reference)(point)
    assert_close(torch.func.jacrev(function)(point), expected, 1e-12)
    assert_close(torch.func.jacfwd(function)(point), expected, 1e-12)
    grad = torch.func.grad(lambda tensor: scalar((function(tensor),)))
    assert_close(grad(point), torch.func.grad(lambda tensor: scalar((reference(tensor),)))(point), 1e-12)
    direction = torch.ones_like(point)
    for actual, wanted in zip(
        torch.func.jvp(function, (point,), (direction,)), torch.func.jvp(reference, (point,), (direction,)), strict=True
    ):
        assert_close(actual, wanted, 1e-12)


@derivable
def test_tangents_have_memory_of_their_own(case: OperatorCase, device: torch.device) -> None:
    """Changing a result in place does not change an argument's tangent."""
    sample = double(case, device)
    with torch.autograd.forward_ad.dual_level():
        directions = [torch.ones_like(t) for t in sample.tensors()]
        for k, direction in enumerate(directions):
            given = sample.tensors()
            given[k] = torch.autograd.forward_ad.make_dual(given[k], direction)
            for result in case(sample.replace(given)):
                if torch.autograd.forward_ad.unpack_dual(result).tangent is not None:
                    result.mul_(2)
            assert torch.equal(direction, torch.ones_like(direction))


@derivable
def test_nested_func_transforms(case: OperatorCase, device: torch.device) -> None:
    """Second derivatives of the squared result, by both modes over reverse mode."""
    sample = double(case, device, 1, 2)

    def squared(results: tuple[Tensor, ...]) -> Tensor:
        return scalar(tuple(result * result for result in results if result.is_floating_point()))

    def function(tensors: list[Tensor]) -> Tensor:
        return squared(case(sample.replace(tensors)))

    def reference(tensors: list[Tensor]) -> Tensor:
        exact = sample.replace(tensors)
        return squared(as_tuple(case.reference(*exact.args, **exact.kwargs)))

    point = sample.tensors()
    direction = [torch.linspace(1, 2, t.numel()).to(t).view_as(t) for t in point]

    def along(function):
        def slope(tensors: list[Tensor]) -> Tensor:
            gradients = torch.func.grad(function)(tensors)
            return sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))

        return slope

    expected = torch.func.grad(along(reference))(point)
    twice = torch.func.grad(along(function))(point)
    mixed = torch.func.jvp(torch.func.grad(function), (point,), (direction,))[1]
    for found in (twice, mixed):
        for actual, wanted in zip(found, expected, strict=True):
            assert_close(actual, wanted, 1e-11)


@pytest.mark.parametrize("case", [case for case in OPERATORS if case.vmap], ids=lambda case: case.name)
@pytest.mark.filterwarnings("error:There is a performance drop")  # without a batching rule
def test_vmap(case: OperatorCase, device: torch.device) -> None:
    """Maps each tensor, and all together, along the first and the penultimate dimension."""
    copies = [double(case, device) for _ in range(3)]
    for i, copy in enumerate(copies):
        copies[i] = copy.replace([torch.randn_like(t) for t in copy.tensors()])
    places = [i for i, a in enumerate(copies[0].args) if isinstance(a, Tensor) and a.is_floating_point()]
    for mapped in [[p] for p in places] * (len(places) > 1 and not case.mutates) + [places]:
        for dim in (0, 1):
            args = list(copies[0].args)
            in_dims: list[int | None] = [None] * len(args)
            for place in mapped:
                args[place] = torch.stack([copy.args[place] for copy in copies], dim)
                in_dims[place] = dim
            singles = []
            for copy in copies:
                single = [copy.args[i] if i in mapped else a for i, a in enumerate(copies[0].args)]
                singles.append(
                    case(Sample(tuple(a.clone() if isinstance(a, Tensor) else a for a in single), copy.kwargs))
                )

            def call(*args):
                return case(Sample(args, copies[0].kwargs))

            results = torch.func.vmap(call, in_dims=tuple(in_dims))(*args)
            for k, result in enumerate(results):
                wanted = torch.stack([single[k] for single in singles])
                if case.mutates:
                    result = args[places[k]].movedim(dim, 0)
                assert_close(result, wanted, 1e-13)


@pytest.mark.parametrize("case", [case for case in OPERATORS if case.vmap], ids=lambda case: case.name)
def test_vmap_over_nothing(case: OperatorCase, device: torch.device) -> None:
    """Expects zero copies of results in the right shape and dtype, through which gradients flow."""
    single = case.sample(2, 3, device, torch.float32)
    given = tuple(a.clone() if isinstance(a, Tensor) else a for a in single.args)
    expected = case(Sample(given, single.kwargs))
    tensors = [i for i, a in enumerate(single.args) if isinstance(a, Tensor)]
    floating = [i for i in tensors if single.args[i].is_floating_point()]
    for mapped in (floating, tensors, floating[:1]):
        if case.mutates and mapped == floating[:1]:
            continue  # written tensors must all be mapped
        for dim in (0, 1):
            args, in_dims = list(single.args), [None] * len(single.args)
            for i in mapped:
                at = min(dim, args[i].dim())
                in_dims[i] = at
                shape = [*args[i].shape[:at], 0, *args[i].shape[at:]]
                args[i] = args[i].new_empty(shape)
                if i in floating and case.differentiable and not case.mutates:
                    args[i].requires_grad_()

            def call(*args):
                return case(Sample(args, single.kwargs))

            results = torch.func.vmap(call, in_dims=tuple(in_dims))(*args)
            if case.mutates:
                continue
            for result, wanted in zip(results, expected, strict=True):
                assert result.shape == (0, *wanted.shape)
                assert (result.dtype, result.device) == (wanted.dtype, wanted.device)
            if case.differentiable:
                learned = [args[i] for i in mapped if i in floating]
                found = torch.autograd.grad(scalar(results), learned, allow_unused=True)
                assert all(grad is None or grad.shape == x.shape for grad, x in zip(found, learned, strict=True))


@every
def test_autocast_changes_nothing(case: OperatorCase, device: torch.device) -> None:
    """Kernels compute in float32 for all data, so autocast changes nothing."""
    if case.operator._opname == "relative_logits":
        pytest.skip("matrix products, which autocast casts; relative_logits/test_relative_logits.py")
    torch.manual_seed(4)
    sample = case.sample(2, 3, device, torch.float32)
    plain = case(sample.replace([t.clone() for t in sample.tensors()]))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        cast = case(sample.replace([t.clone() for t in sample.tensors()]))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, cast, strict=True))


@differentiable
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(case: OperatorCase, device: torch.device, use_reentrant: bool) -> None:
    sample = double(case, device).requires_grad()
    expected = torch.autograd.grad(scalar(case(sample)), sample.tensors())
    results = torch.utils.checkpoint.checkpoint(
        function_of(case, sample), *sample.tensors(), use_reentrant=use_reentrant
    )
    for actual, wanted in zip(
        torch.autograd.grad(scalar(results), sample.tensors())
        if not use_reentrant
        else backward_of(scalar(results), sample),
        expected,
        strict=True,
    ):
        assert torch.equal(actual, wanted)


def backward_of(loss: Tensor, sample: Sample) -> list[Tensor]:
    """Reentrant checkpoints refuse torch.autograd.grad."""
    loss.backward()
    return [tensor.grad for tensor in sample.tensors()]


def without_data(tensor: Tensor) -> Tensor:
    """A copy on the meta device with the same strides, which ``to`` would make dense."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def views(tensor: Tensor) -> list[Tensor]:
    """Views with the same elements: transposed, and with steps in the last dimension."""
    swapped = tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 2 else tensor
    stepped = [t.repeat_interleave(2, -1)[..., ::2] for t in (tensor, swapped) if t.dim() > 0]
    return [tensor, swapped, *stepped]


@every
def test_meta_device(case: OperatorCase) -> None:
    """Shapes, dtypes and strides equal those with data, for any strides of arguments."""
    torch.manual_seed(5)
    sample = case.sample(2, 3, "cpu", torch.float32)
    for place in range(1 if case.mutates else 4):
        given = sample.replace([(views(t) * 2)[place] for t in sample.tensors()])
        real = case(given)
        to_meta = tuple(without_data(a) if isinstance(a, Tensor) else a for a in given.args)
        for actual, wanted in zip(case(Sample(to_meta, sample.kwargs)), real, strict=True):
            assert (actual.shape, actual.dtype, actual.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


def unusual(tensor: Tensor) -> list[Tensor]:
    """The tensor in forms that operators may refuse: other dtypes, shapes and strides."""
    other = torch.float64 if tensor.dtype == torch.float32 else torch.float32
    forms = [tensor.to(other), tensor.to(torch.int32), tensor.unsqueeze(0)]
    for dim in range(tensor.dim()):
        forms.append(torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim))
        forms.append(tensor.narrow(dim, 0, 1).expand_as(tensor))  # elements share memory
    if tensor.dim() > 0:
        forms += [tensor[0], tensor.repeat_interleave(2, -1)[..., ::2]]
    return forms


def error_of(case: OperatorCase, args: list[Any], options: dict[str, Any]) -> str:
    """The error's type and text; "values" if it is about elements, which a meta tensor lacks."""
    try:
        case.operator(*args, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        text = str(error).splitlines()[0]
        of_values = any(
            part in text for part in (" at index ", ", last, got ", ", num_tokens, got ", " of the mask, got ")
        )
        return "values" if of_values else f"{type(error).__name__}: {text}"
    except IndexError:
        return "values"
    return ""


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, also of elements that share memory."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = tensor.as_strided((max(size, 0),), (1,)).clone() if tensor.numel() else tensor.clone()
    return whole.as_strided(tensor.shape, tensor.stride()) if tensor.numel() else whole


@every
def test_meta_raises_what_the_cpu_raises(case: OperatorCase) -> None:
    torch.manual_seed(5)
    sample = case.sample(2, 3, "cpu", torch.float32)
    for place, argument in enumerate(sample.args):
        for tensor in unusual(argument) if isinstance(argument, Tensor) else []:
            args = [*sample.args[:place], tensor, *sample.args[place + 1 :]]
            real = [copied(a) if isinstance(a, Tensor) else a for a in args]
            meta = [without_data(a) if isinstance(a, Tensor) else a for a in args]
            found = error_of(case, real, sample.kwargs)
            if found != "values":
                assert error_of(case, meta, sample.kwargs) == found, (place, tensor.shape)


CALLS_WITHOUT_VALUES: dict[str, Callable[[Any], Any]] = {
    "rotary, no boundaries": lambda to: pe.RotaryEmbedding(8)(to(torch.ones(1, 3, 1, 8)), cu_seqlens=to(torch.ones(0).int())),
    "ngram_ids, no boundaries": lambda to: pe.functional.ngram_ids(to(torch.ones(1, 3).int()), multipliers=(3, 5), moduli=((7,),), cu_seqlens=to(torch.ones(0).int())),
    "ALiBi, no boundaries": lambda to: pe.functional.alibi_add(to(torch.ones(1, 2, 3, 3)), to(torch.ones(2)), cu_seqlens=to(torch.ones(0).int())),
    "ALiBi, a distant query": lambda to: pe.functional.alibi_bias(to(torch.ones(2)), 3, 3, query_offset=2**31),
    "ALiBi, distant keys": lambda to: pe.functional.alibi_softmax(to(torch.ones(1, 2, 3, 3)), to(torch.ones(2)), query_offset=2**31 - 1),
    "learned positions past the table": lambda to: pe.functional.learned_add(to(torch.ones(1, 3, 4)), to(torch.ones(5, 4)), offset=3),
    "positions of the input past the table": lambda to: pe.functional.input_embedding(to(torch.zeros(1, 3).int()), to(torch.ones(5, 4)), position=to(torch.ones(5, 4)), offset=3),
    "the gradient of positions past the table": lambda to: torch.ops.posembed.learned_backward(to(torch.ones(1, 3, 4)), num_rows=5, offset=3),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS_WITHOUT_VALUES)
def test_meta_raises_what_needs_no_values(name: str) -> None:
    errors = []
    for place in ("cpu", "meta"):
        with pytest.raises((ValueError, IndexError)) as caught:
            CALLS_WITHOUT_VALUES[name](lambda tensor, place=place: tensor.to(place))
        errors.append((caught.type, str(caught.value).splitlines()[0]))
    assert errors[0] == errors[1]


def of_unknown_sizes(tensor: Tensor) -> Tensor:
    """A fake tensor whose sizes a compiler does not know, as those of nonzero()."""
    context = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    with torch._subclasses.FakeTensorMode(shape_env=context):
        sizes = [context.create_unbacked_symint() for _ in tensor.shape]
        for size in sizes:
            torch._check(size >= 2)
        return torch.empty(sizes, dtype=tensor.dtype)


@pytest.mark.parametrize("name", ["alibi_add", "alibi_add_", "alibi_softmax_", "alibi_bias_out"])
def test_rows_of_unknown_sizes(name: str) -> None:
    scores = of_unknown_sizes(torch.empty(2, 3, 4))
    with scores.fake_mode:
        slopes = torch.ones(scores.shape[0])
        lengths = scores.shape[1:] if name == "alibi_bias_out" else ()
        getattr(torch.ops.posembed, name)(scores, slopes, *lengths)


@pytest.mark.parametrize("name", ["embedding_backward", "token_bag_backward"])
def test_ids_of_unknown_number(name: str) -> None:
    rows = of_unknown_sizes(torch.empty(3, 8))
    with rows.fake_mode:
        ids = torch.ones(rows.shape[0], dtype=torch.int64)
        offsets = (ids,) if name == "token_bag_backward" else ()
        result = getattr(torch.ops.posembed, name)(rows, 10, ids, *offsets)
    assert result.shape[0] == 10


class OfLength(torch.nn.Module):
    """Lengths that a program takes from its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length, operators = x.shape[0], torch.ops.posembed
        weight = torch.ones(8, 2)
        return (operators.relative_bias(weight, length, length), operators.alibi_bias(weight[0], length, length))


def test_export_binds_no_length() -> None:
    """A check of a length once became a bound of the exported program."""
    shapes = ({0: torch.export.Dim("seq", min=2)},)
    program = torch.export.export(OfLength(), (torch.ones(3),), dynamic_shapes=shapes)
    for found, expected in zip(program.module()(torch.ones(7)), OfLength()(torch.ones(7)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("case", [case for case in OPERATORS if case.mutates], ids=lambda case: case.name)
def test_tensors_of_inference_mode_are_refused_before_a_write(case: OperatorCase) -> None:
    sample = case.sample(2, 3, "cpu", torch.float32)
    written = {a.name for a in case.operator._schema.arguments if a.is_write}
    for place, argument in enumerate(case.operator._schema.arguments[: len(sample.args)]):
        if argument.name not in written or not isinstance(sample.args[place], Tensor):
            continue
        args = [copied(a) if isinstance(a, Tensor) else a for a in sample.args]
        with torch.inference_mode():
            args[place] = args[place].clone()
        before = [a.clone() if isinstance(a, Tensor) else a for a in args]
        message = error_of(case, args, sample.kwargs)
        if message == "":  # no tensor has history to keep; rotary_cache_ writes not all of them
            outside = [a for a in args if isinstance(a, Tensor) and not a.is_inference()]
            assert outside == [] or case.operator._opname == "rotary_cache_"
            continue
        assert message.startswith(f"ValueError: {argument.name}: is a tensor of inference mode")
        for given, copy in zip(args, before, strict=True):
            assert not isinstance(given, Tensor) or torch.equal(bits(given), bits(copy))


@every
def test_tensors_on_two_devices(case: OperatorCase) -> None:
    sample = case.sample(2, 3, "cpu", torch.float32)
    places = [i for i, argument in enumerate(sample.args) if isinstance(argument, Tensor)]
    for place in places if len(places) > 1 else []:
        args = list(sample.args)
        args[place] = without_data(args[place])
        refused((lambda: case.operator(*args, **sample.kwargs), ValueError, "expected the device of .*, got "))  # fmt: skip


@every
def test_non_contiguous_arguments(case: OperatorCase, device: torch.device) -> None:
    """Bits do not depend on strides."""
    sample = double(case, device)
    plain = case(sample.replace([t.clone() for t in sample.tensors()]))
    for dims in ((0, 1), (0, 2), (1, 2)):
        strided = [
            t.transpose(*dims).contiguous().transpose(*dims) if max(dims) < t.dim() - 1 else t.clone()
            for t in sample.tensors()
        ]
        for actual, wanted in zip(case(sample.replace(strided)), plain, strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize(
    "case", [case for case in calls.every() if case.name not in calls.OF_THE_PROCESS], ids=lambda case: case.name
)
def test_same_bits_for_any_thread_count(case: OperatorCase) -> None:
    """Of texts that are longer than the pieces in which kernels work."""
    torch.manual_seed(6)
    sample = case.sample(3, 1030, "cpu", torch.float32)
    results = same_for_any_thread_count(lambda: case(sample.replace([t.clone() for t in sample.tensors()])))
    for found, wanted in zip(results, case.expected(sample), strict=True) if case in OPERATORS else ():
        assert_close(found, wanted, TOLERANCE.get(found.dtype, 0))


@pytest.mark.parametrize("case", [case for case in OPERATORS if case.mutates], ids=lambda case: case.name)
def test_mutation_refuses_gradients(case: OperatorCase, device: torch.device) -> None:
    sample = double(case, device).requires_grad()
    refused((lambda: case(sample), ValueError, "requires grad"))
    with torch.no_grad():
        case(sample)
    before = sample.tensors()[0]._version
    with torch.no_grad():
        case(sample)
    assert sample.tensors()[0]._version == before + 1


def calls_of_operators() -> Iterator[tuple[str, ast.Call]]:
    """The calls of operators in posembed's Python code, by name or by a constant of the file."""
    for file in Path(pe.__file__).parent.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        names = {
            ast.unparse(node.targets[0]): ast.unparse(node.value)
            for node in nodes
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).isupper()
        }
        for node in nodes:
            if isinstance(node, ast.Call):
                text = ast.unparse(node.func)
                operator = re.match(r"(?:gated\()?torch\.ops\.posembed\.(\w+)", names.get(text, text))
                if operator is not None:
                    yield operator[1], node


def test_positional_arguments_stand_where_the_schema_has_them() -> None:
    found = [*calls_of_operators()]
    assert len(found) > 60
    for name, call in found:
        schema = getattr(torch.ops.posembed, name).default._schema
        names = [argument.name for argument in schema.arguments]
        for argument, value in zip(names, call.args, strict=False):
            if isinstance(value, ast.Starred):
                break  # of unknown length
            word = ast.unparse(value).rpartition(".")[2]
            assert word == argument or word not in names, f"{schema}: {word} passed for {argument}"
