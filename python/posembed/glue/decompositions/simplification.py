"""Programs without the steps that need no input, and without those that occur twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

LARGEST = 2**21  # numbers in a constant; what is larger remains steps


def simplify(program: ExportedProgram) -> None:
    """Computes what depends on constants and parameters alone, and shares equal steps."""
    share_equal_steps(program)
    values = known_values(program)
    needed = [
        node
        for node in values
        if node.op == "call_function" and any(user not in values for user in node.users)
    ]
    constants: dict[Any, Node] = {}
    for node in needed:
        value = values[node].detach().contiguous()
        key = (value.dtype, value.shape, contents(value))
        if key not in constants:
            constants[key] = add_constant(program, value, node)
        node.replace_all_uses_with(constants[key])
    program.graph.eliminate_dead_code()
    share_equal_steps(program)
    program.graph_module.recompile()


def share_equal_steps(program: ExportedProgram) -> None:
    """Replaces a step by an earlier one of the same operator and arguments."""
    results = set(program.graph.output_node().all_input_nodes)
    first: dict[Any, Node] = {}
    for node in list(program.graph.nodes):
        if node.op != "call_function" or node in results or not is_function(node.target):
            continue
        key = repr((node.target, node.args, sorted(node.kwargs.items())))
        earlier = first.setdefault(key, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            program.graph.erase_node(node)


def is_function(target: Any) -> bool:
    """Whether an operator's result is the same each time, and it writes nothing."""
    random = torch.Tag.nondeterministic_seeded
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and random not in target.tags
    )


def known_values(program: ExportedProgram) -> dict[Node, Tensor]:
    """The tensors that inputs do not change, by their node."""
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    values: dict[Node, Tensor] = {}
    held = {**program.constants, **program.state_dict}
    sources = {spec.arg.name: spec.target for spec in signature.input_specs if spec.target}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            target = sources.get(node.name)
            if isinstance(held.get(target), Tensor) and target not in written:
                values[node] = held[target]
        elif is_small_result(node) and all(given in values for given in node.all_input_nodes):
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


def is_small_result(node: Node) -> bool:
    """Whether a node computes one tensor, of fixed size, that can be a constant.

    A table's other view, of any size, is the same bytes.
    """
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and is_function(node.target)
        and isinstance(value, Tensor)
        and all(isinstance(size, int) for size in value.shape)
        and (value.numel() <= LARGEST or node.target is torch.ops.aten.view.dtype)
    )


def contents(value: Tensor) -> bytes:
    raw: bytes = value.cpu().view(-1).view(torch.uint8).numpy().tobytes()
    return raw


def add_constant(program: ExportedProgram, value: Tensor, like: Node) -> Node:
    """A new input of the graph that holds ``value``, before the inputs of its caller."""
    signature, graph = program.graph_signature, program.graph
    place = next(
        (i for i, spec in enumerate(signature.input_specs) if spec.kind == InputKind.USER_INPUT),
        len(signature.input_specs),
    )
    name = unused_name(program)
    before = [node for node in graph.nodes if node.op == "placeholder"][place:]
    with graph.inserting_before(before[0] if before else next(iter(graph.nodes))):
        node: Node = graph.placeholder(name)
    node.meta["val"] = like.meta["val"].detach()
    spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
    signature.input_specs.insert(place, spec)
    program.constants[name] = value
    return node


def unused_name(program: ExportedProgram) -> str:
    taken = {node.name for node in program.graph.nodes} | set(program.constants)
    return next(
        n for n in (f"folded_constant_{i}" for i in range(len(taken) + 1)) if n not in taken
    )
