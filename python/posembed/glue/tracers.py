"""What all modules share: their calls in tracers, and answers to other libraries' names."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import Tracer
from torch.nn.modules import module as any_hooks

from posembed.glue.other_names import refused


class Leaf:
    """A module whose call is one node of a torch.fx graph, like those of torch.nn."""

    _parameters: dict[str, Any]

    def _parameter(self, name: str) -> Any:
        """An attribute that is a parameter, without the slow look-up of ``nn.Module``."""
        try:
            return self._parameters[name]
        except KeyError:  # FSDP or a parametrization has replaced the parameter by a tensor
            return getattr(self, name)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """``nn.Module``'s; its error for an argument of a wrong name tells the right one.

        A call without hooks is made here, as torch does it, for no step more.
        """
        this: Any = self
        try:
            if (
                this._forward_hooks
                or this._forward_pre_hooks
                or this._backward_hooks
                or this._backward_pre_hooks
                or any_hooks._global_forward_hooks
                or any_hooks._global_forward_pre_hooks
                or any_hooks._global_backward_hooks
                or any_hooks._global_backward_pre_hooks
                or torch._C._get_tracing_state()
            ):
                return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
            return this.forward(*args, **kwargs)
        except TypeError:
            if "forward" in this.__dict__:  # a wrapper has replaced it
                raise
            owner, method = f"{type(this).__name__}.forward", type(this).forward
            explained = refused(owner, "argument", method, args, kwargs)
            if explained is None:
                raise
            raise explained from None

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
