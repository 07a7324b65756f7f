"""Tracer support of all modules: symbolic_trace keeps their calls, torch.jit.script is refused."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.fx import Tracer


class Leaf:
    """A module whose call is one node of a torch.fx graph, like those of torch.nn."""

    _parameters: dict[str, Any]

    def _parameter(self, name: str) -> Any:
        """An attribute that is a parameter, without the slow look-up of ``nn.Module``."""
        try:
            return self._parameters[name]
        except KeyError:  # FSDP or a parametrization has replaced the parameter by a tensor
            return getattr(self, name)

    def __prepare_scriptable__(self) -> NoReturn:
        """Rejects torch.jit.script, which calls this for a module and its submodules."""
        raise RuntimeError(
            f"torch.jit.script: expected no module of posembed, got a {type(self).__name__}; "
            "torch.export.export, torch.compile and torch.jit.trace take it"
        )


def register() -> None:
    """Makes torch.fx keep calls of the modules, also in tracers that ask torch's Tracer.

    Tracer has no list of leaf modules: it recognises those of torch.nn by name.
    """
    known = Tracer.is_leaf_module

    def is_leaf_module(self: Tracer, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Leaf) or known(self, m, module_qualified_name)

    tracer: Any = Tracer
    tracer.is_leaf_module = is_leaf_module
