"""Calls every operator with arguments that are partly sane: an error is fine, a crash is not.

Each call starts from a valid one (support/calls.py), of which some arguments are replaced. Tensors
lie between guard elements. python tests/fuzz/operators.py --calls 20000 --seed 1
"""

import argparse
import collections
import dataclasses
import faulthandler
import random
import resource
import sys
from pathlib import Path
from typing import Any

import posembed
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from support import calls
from support.case import OperatorCase

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
SIZES = (0, 1, 2, 3, 5, 8, 16, 33)
EXTREMES = (-(2**63), -(2**31) - 1, -2, -1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), -float("inf"), float("nan"))
TEXTS = (
    *("", "bshd", "bhsd", "thd", "rows", "dense", "mean", "max", "{}", "[]", "é" * 10_000),
    *('{"head_dim":8}', '{"head_dim":4611686018427387904}', '{"head_dim":8,"%s":1}' % ("a" * 10_000)),
    *('{"embedding_dim":4611686018427387904}', '{"embedding_dim":1099511627776}'),
)  # fmt: skip
EXPECTED = (MemoryError, ValueError, TypeError, IndexError, NotImplementedError, RuntimeError)
GUARD = 64
MEMORY = 8 << 30


@dataclasses.dataclass
class Guarded:
    """A buffer whose ends no operator may write."""

    buffer: Tensor
    before: Tensor

    def is_whole(self) -> bool:
        """Whether the ends are as they were."""
        ends = (slice(0, GUARD), slice(len(self.buffer) - GUARD, None))
        return all(torch.equal(self.buffer[end], self.before[end]) for end in ends)


class Fuzzer:
    """Draws calls, and remembers how they ended."""

    def __init__(self, seed: int, verbose: bool, device: str = "cpu") -> None:
        self.verbose, self.device = verbose, device
        self.random = random.Random(seed)
        self.cases = calls.every()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.guards: list[Guarded] = []

    def call(self) -> None:
        """One call; raises AssertionError for what must not happen."""
        case = self.random.choice(self.cases)
        arguments = self.draw(case)
        if self.random.random() < 0.3 and not case.mutates:
            self.require_gradients(arguments)
        if self.verbose:
            print(case.name, *map(described, arguments), file=sys.stderr, flush=True)
        inputs = [x for x in arguments if isinstance(x, Tensor)]
        copies = [bits(x) for x in inputs]
        try:
            results = case.operator(*arguments)
            self.outcomes["returned"] += 1
        except EXPECTED as error:
            check_is_an_answer(error)
            self.outcomes[type(error).__name__] += 1
            pairs = zip(inputs, copies, strict=True)
            changed = [i for i, (x, c) in enumerate(pairs) if not same(x, c)]
            assert not changed, f"inputs {changed} changed before an error"
        else:
            self.check_results(case, results, inputs, copies)
            self.check_recorded_errors()
        assert all(guard.is_whole() for guard in self.guards), "wrote outside a tensor"

    def check_results(self, case: OperatorCase, results: Any, inputs: list[Tensor], copies: list[Tensor]) -> None:
        """Reads every result, goes back through it, and compares what must not change."""
        found = results if isinstance(results, (tuple, list)) else (results,)
        tensors = [x for x in found if isinstance(x, Tensor)]
        for x in tensors:
            if x.layout == torch.strided and not x.is_meta:
                x.detach().clone()
        if not case.mutates:
            assert all(same(x, c) for x, c in zip(inputs, copies, strict=True)), "an input changed"
        for x in tensors:
            if x.requires_grad and x.is_floating_point() and x.layout == torch.strided:
                try:
                    x.sum().backward(retain_graph=True)
                except EXPECTED as error:
                    check_is_an_answer(error)

    def check_recorded_errors(self) -> None:
        """What CUDA kernels found wrong, before the next call would say it."""
        try:
            posembed.check_errors()
        except IndexError:
            self.outcomes["IndexError"] += 1

    def draw(self, case: OperatorCase) -> list[Any]:
        """A case's arguments in the order of the schema, some of them replaced."""
        self.guards.clear()
        sizes = self.random.choice(SIZES), self.random.choice(SIZES)
        sample = case.sample(*sizes, "cpu", self.random.choice(case.dtypes))
        schema = case.operator._schema.arguments
        arguments = list(sample.args)
        for argument in schema[len(arguments) :]:
            default = argument.default_value if argument.has_default_value() else None
            arguments.append(sample.kwargs.get(argument.name, default))
        changes = self.random.choice((0, 1, 1, 1, 2, 3))
        for index in self.random.sample(range(len(schema)), min(changes, len(schema))):
            name, kind = schema[index].name, str(schema[index].type)
            sized = "length" in name or name.startswith(("num_", "max_positions"))
            if sized and kind != "Optional[int]":  # no result of all the memory
                arguments[index] = self.random.choice((*SIZES, -1, 2**62, 2**63 - 1))
            else:
                arguments[index] = self.replaced(arguments[index], kind)
        return [self.guarded(x) if isinstance(x, Tensor) else x for x in arguments]

    def replaced(self, value: Any, kind: str) -> Any:
        """Another value of the type that a schema names."""
        if kind.startswith("Optional") and self.random.random() < 0.2:
            return None
        if "Tensor" in kind:
            near = isinstance(value, Tensor) and self.random.random() < 0.6
            return self.changed(value) if near else self.tensor()
        if "str" in kind:
            return self.random.choice(TEXTS)
        if "bool" in kind:
            return self.random.random() < 0.5
        if "float" in kind:
            return self.random.choice(FLOATS)
        if "List" in kind or "[]" in kind:
            return [self.random.choice(EXTREMES) for _ in range(self.random.choice(SIZES))]
        return self.random.choice(EXTREMES) if "int" in kind else value

    def changed(self, x: Tensor) -> Tensor:
        """A tensor that differs in one property."""
        kind = self.random.randrange(10)
        if kind == 0:
            return x.to(self.random.choice(DTYPES))
        if kind == 1 and x.dim() > 0:
            return x.narrow(self.random.randrange(x.dim()), 0, 0)
        if kind == 2 and x.dim() > 1:
            return x.transpose(*self.random.sample(range(x.dim()), 2))
        if kind == 3:
            return x.unsqueeze(self.random.randrange(x.dim() + 1))
        if kind == 4 and x.dim() > 0:
            return x.select(0, 0).expand_as(x) if x.shape[0] > 0 else x
        if kind == 5 and x.dim() > 0:
            return x.repeat_interleave(2, -1)[..., ::2]
        if kind == 6 and x.dim() > 0 and x.is_floating_point():
            return x.to_sparse() if x.dtype in (torch.float32, torch.float64) else x
        if kind == 7:
            return x.to("meta")
        if kind == 8 and x.numel() > 0:
            return self.filled(x)
        return x.flatten()

    def filled(self, x: Tensor) -> Tensor:
        """A copy with an extreme element."""
        values = FLOATS if x.is_floating_point() else EXTREMES
        x, value = x.clone(memory_format=torch.contiguous_format), self.random.choice(values)
        if x.is_floating_point():
            x.view(-1)[self.random.randrange(x.numel())] = torch.tensor(value).to(x.dtype)
        elif x.dtype in (torch.int64, torch.int32):
            limit = torch.iinfo(x.dtype)
            x.view(-1)[self.random.randrange(x.numel())] = max(limit.min, min(value, limit.max))
        return x

    def tensor(self) -> Tensor:
        """Any tensor."""
        shape = [self.random.choice(SIZES) for _ in range(self.random.randrange(6))]
        while torch.Size(shape).numel() > 100_000:
            shape.pop()
        return (torch.rand(shape) * 10).to(self.random.choice(DTYPES))

    def guarded(self, x: Tensor) -> Tensor:
        """The same tensor, with its strides, between guard elements."""
        if x.layout != torch.strided or x.is_meta or x.numel() == 0:
            return x
        extent = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
        misaligned = self.random.randrange(4)
        buffer = torch.full((extent + 2 * GUARD + misaligned,), 1, dtype=torch.int8).to(x.dtype)
        first = GUARD + misaligned
        buffer[first : first + extent] = x.as_strided((extent,), (1,))
        if self.random.random() < 0.98:  # else a tensor on another device than the others
            buffer = buffer.to(self.device)
        self.guards.append(Guarded(buffer, buffer.clone()))
        return buffer.as_strided(x.shape, x.stride(), first)

    def require_gradients(self, arguments: list[Any]) -> None:
        for x in arguments:
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float8_e4m3fn:
                x.requires_grad_()


# Beginnings of messages that the C++ library, pybind11 or the allocator wrote for programmers.
INTERNAL = ("std::", "vector::", "basic_string", "map::", "stoi", "stod", "bad ", "Unable to cast")
LONGEST = 1000  # of the first line


def check_is_an_answer(error: Exception) -> None:
    """Raises AssertionError for an error that does not speak to the caller."""
    text = str(error)
    assert "INTERNAL ASSERT" not in text, text
    assert not text.startswith(INTERNAL), text
    assert "CUDA error" not in text, text
    if not isinstance(error, NotImplementedError):  # torch lists all backends
        assert len(text.partition("\n")[0]) <= LONGEST, text[:LONGEST]


def described(value: Any) -> str:
    """An argument in one line."""
    if not isinstance(value, Tensor):
        return repr(value)
    stride = value.stride() if value.layout == torch.strided else value.layout
    return f"{value.dtype}{list(value.shape)}/{stride}@{value.device}"


def bits(x: Tensor) -> Tensor:
    """A copy of what a tensor holds."""
    return x.detach().clone()


def same(x: Tensor, copy: Tensor) -> bool:
    """Whether a tensor still holds the same, NaN included."""
    if x.is_meta:
        return True
    if x.numel() == 0:
        return True
    if x.layout != torch.strided:
        return torch.equal(x.detach().to_dense().nan_to_num(), copy.to_dense().nan_to_num())
    x, copy = (t.detach().clone(memory_format=torch.contiguous_format) for t in (x, copy))
    return torch.equal(x.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print each call before it is made")
    parser.add_argument("--device", default="cpu", help="of most tensors: cpu or cuda")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "cpu":  # a table of gigabytes raises, and does not take all memory
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    fuzzer = Fuzzer(options.seed, options.verbose, options.device)
    for number in range(options.calls):
        # Each call has a seed of its own, so that a crash is found again by --calls 1.
        seed = options.seed + number
        torch.manual_seed(seed)
        fuzzer.random.seed(seed)
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            fuzzer.call()
        except BaseException:
            print(f"failed: --seed {seed} --calls 1 --verbose", file=sys.stderr)
            raise
        faulthandler.cancel_dump_traceback_later()
    print(f"{options.calls} calls: {dict(fuzzer.outcomes.most_common())}")


if __name__ == "__main__":
    faulthandler.enable()
    main()
