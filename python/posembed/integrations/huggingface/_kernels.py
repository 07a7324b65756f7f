"""posembed as a kernel of the kernels package, by which transformers replaces marked functions.

Functions that rotate in different ways are marked with one name, so the layer asks for each what it
computes.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from posembed.integrations.huggingface._apply import apply_rotary_pos_emb
from posembed.integrations.huggingface._recognition import recognise, wrapped
from posembed.integrations.huggingface._rotation import KERNEL_DEVICES

NAME = "rotary_pos_emb"
MISSING = (
    "register_kernels needs kernels {versions} for transformers {transformers}, and {installed} is"
    " installed: pip install 'kernels{versions}'. patch(model) needs no kernels package."
)


class RotaryPosEmb(nn.Module):
    """The layer that kernels puts in place of transformers' functions ``rotary_pos_emb``.

    kernels gives its ``forward`` to the function's module. It rotates as that function does, bit
    for bit, and calls the function for what posembed does not take. A layer of its own is
    :func:`apply_rotary_pos_emb`.
    """

    can_torch_compile = True
    has_backward = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Rotates query and key.

        Args:
            q: Queries, as for the function that is replaced.
            k: Keys.
            cos: Cosines.
            sin: Sines.
            unsqueeze_dim: The dimension of the heads that the tables lack.

        Returns:
            The rotated queries and keys.
        """
        kind = type(self)
        if kind.forward is RotaryPosEmb.forward:
            return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
        if _recognised(kind):
            return kind._posembed(q, k, cos, sin, unsqueeze_dim)  # type: ignore[attr-defined, no-any-return]
        return kind.forward(self, q, k, cos, sin, unsqueeze_dim)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _recognised(kind: type[nn.Module]) -> bool:
    """Whether a class has posembed's function, as ``_posembed``; looks for it at the first call.

    torch.compile reads an attribute, and cannot call an object that is itself a constant result.
    """
    if "_posembed" not in vars(kind):
        kind._posembed = _function(kind)  # type: ignore[attr-defined]
    return vars(kind)["_posembed"] is not None


def _function(kind: type[nn.Module]) -> Callable[..., Any] | None:
    function = wrapped(kind)
    if function is None:
        return None
    # Another thread has none of this one's modes: no autocast, tracing or transformation.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(recognise, function, __name__).result()


@dataclasses.dataclass(frozen=True)
class Repository:
    """Where kernels finds the layer: in this module. All are equal, so that it is loaded once."""

    def load(self) -> type[nn.Module]:
        """The layer."""
        return RotaryPosEmb


_before: dict[str, Any] = {}  # what was registered under the name, until ours is taken back


def register_kernels() -> None:
    """Lets posembed rotate in every model of transformers that is made with ``use_kernels=True``.

    The kernels package then gives posembed's rotation to each function that transformers marks as
    ``rotary_pos_emb``, on the CPU and, if posembed was built with CUDA, on GPUs; for inference and
    training, and in ``torch.compile``. Results have the bits of the function that is replaced, as
    after ``patch(model)``, and a function that is not recognised runs itself. transformers' own
    entry for GPUs stays, behind this one. Unlike ``patch(model)``, this changes all models of a
    family at once, because they share the function.

    Raises:
        ImportError: kernels is missing or does not fit the installed transformers. The message
            names the versions.

    Examples:
        >>> import contextlib
        >>> from posembed.integrations.huggingface import register_kernels, unregister_kernels
        >>> with contextlib.suppress(ImportError):  # patch(model) needs no kernels
        ...     register_kernels()
        ...     unregister_kernels()
    """
    kernels = _kernels()
    mapping = _mapping()
    _before.setdefault(NAME, copy.deepcopy(mapping.get(NAME)))
    devices: dict[Any, Repository] = {"cpu": Repository()}
    if "cuda" in KERNEL_DEVICES:
        # kernels takes the narrowest interval, and the entry of transformers is for every GPU.
        every = kernels.CUDAProperties(min_capability=0, max_capability=sys.maxsize - 1)
        devices[kernels.Device(type="cuda", properties=every)] = Repository()
    kernels.register_kernel_mapping({NAME: devices})


def unregister_kernels() -> None:
    """Takes back what :func:`register_kernels` has registered.

    Models that have posembed's function keep it until they are kernelized again, for example by
    ``model.set_use_kernels(True)``.

    Raises:
        ImportError: As :func:`register_kernels`.
    """
    _kernels()
    if NAME in _before:
        mapping, earlier = _mapping(), _before.pop(NAME)
        mapping.pop(NAME, None)
        if earlier is not None:
            mapping[NAME] = earlier


def _kernels() -> Any:
    """The kernels package, if it fits transformers."""
    utils = importlib.import_module("transformers.utils.import_utils")
    specifiers = importlib.import_module("packaging.specifiers")  # transformers needs it
    versions = f">={utils.KERNELS_MIN_VERSION},<{utils.KERNELS_MAX_VERSION}"
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or not specifiers.SpecifierSet(versions).contains(version):
        transformers = importlib.metadata.version("transformers")
        installed = f"kernels {version}" if version else "no kernels package"
        raise ImportError(
            MISSING.format(versions=versions, transformers=transformers, installed=installed)
        )
    return importlib.import_module("kernels")


def _mapping() -> dict[str, Any]:
    """What is registered, by name. kernels has no function that takes something back."""
    found: dict[str, Any] = importlib.import_module("kernels.layer.globals")._KERNEL_MAPPING.get()
    return found
