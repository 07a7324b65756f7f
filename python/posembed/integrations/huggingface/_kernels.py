"""posembed as a kernel for the kernels package, which replaces functions that transformers marks.

Functions that rotate in different ways are marked with the same name, so the layer finds out what
each one computes.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.metadata
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from posembed import functional
from posembed.integrations.huggingface._door import own_of
from posembed.integrations.huggingface._reading import recognise, wrapped
from posembed.integrations.huggingface._rotation import KERNEL_DEVICES, Rotation

NAME = "rotary_pos_emb"


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates query and key like transformers' function of the same name, bit for bit.

    Tables narrower than the head rotate its first components, as in GPT-NeoX.

    Args:
        q: float32, float64, bfloat16 or float16 [batch, heads, tokens, head_dim], or [batch,
            tokens, heads, head_dim].
        k: Keys, in the layout of the queries; the number of heads may differ.
        cos: Cosines [batch or 1, tokens, rotary_dim].
        sin: Sines, of the same shape.
        unsqueeze_dim: Where to insert the head dimension into the tables: 1 or 2.

    Returns:
        The rotated queries and keys, in the dtype that they and the tables promote to. Gradients
        flow to all arguments.

    Raises:
        ValueError: Shapes are incompatible.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch
        >>> from posembed.integrations.huggingface import apply_rotary_pos_emb
        >>> q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
        >>> angles = torch.rand(1, 3, 4).repeat(1, 1, 2)
        >>> rotated, _ = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
        >>> rotated.shape
        torch.Size([1, 4, 3, 8])
    """
    heads = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim - cos.dim() - 1
    query, key = functional.rotary_tables(q, k, cos, sin, unsqueeze_dim=heads)
    return query, key


class RotaryPosEmb(nn.Module):
    """The layer that kernels substitutes for transformers' ``rotary_pos_emb`` functions.

    kernels assigns its ``forward`` to the function's module. It rotates like that function, bit for
    bit, and calls the function for arguments that posembed does not support. Used on its own, the
    layer is :func:`apply_rotary_pos_emb`.
    """

    can_torch_compile = True
    has_backward = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Rotates query and key, by the arguments of the function that is replaced."""
        kind = type(self)
        if kind.forward is RotaryPosEmb.forward:
            return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
        if _recognised(kind):
            return kind._posembed(q, k, cos, sin, unsqueeze_dim)  # type: ignore[attr-defined, no-any-return]
        return kind.forward(self, q, k, cos, sin, unsqueeze_dim)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _recognised(kind: type[nn.Module]) -> bool:
    """Whether a class has posembed's function, as ``_posembed``; the first call looks for it.

    The function is an attribute, because torch.compile can read an attribute but cannot call an
    object that a constant-result function returns.
    """
    if "_posembed" not in vars(kind):
        function, found = wrapped(kind), None
        if function is not None:
            # A new thread has none of this thread's modes: no autocast, tracing or transforms.
            with ThreadPoolExecutor(1) as thread:
                found = thread.submit(recognise, own_of(function)).result()  # patched or not
        known = found.function() if isinstance(found, Rotation) else None
        kind._posembed = known  # type: ignore[attr-defined]
    return vars(kind)["_posembed"] is not None


@dataclasses.dataclass(frozen=True)
class Repository:
    """Tells kernels to find the layer in this module. All are equal, so it is loaded once."""

    def load(self) -> type[nn.Module]:
        """The layer."""
        return RotaryPosEmb


_before: dict[str, Any] = {}  # earlier registrations under the name, to restore on unregister


def register_kernels() -> None:
    """Makes posembed rotate in every transformers model that is created with ``use_kernels=True``.

    The kernels package then replaces each function that transformers marks as ``rotary_pos_emb``
    with posembed's rotation, on the CPU and, if posembed was built with CUDA, on GPUs, also in
    training and in ``torch.compile``. Results are bitwise identical to those of the function, which
    runs unchanged if it is not recognised. transformers' own entry for GPUs stays, with lower
    priority. All models of a family change at once, because they share the function.

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
    devices: dict[Any, Any] = {"cpu": Repository()}
    if "cuda" in KERNEL_DEVICES:
        # kernels prefers the narrowest interval, and transformers' entry covers every GPU.
        every = kernels.CUDAProperties(min_capability=0, max_capability=sys.maxsize - 1)
        devices[kernels.Device(type="cuda", properties=every)] = Repository()
    kernels.register_kernel_mapping({NAME: devices})


def unregister_kernels() -> None:
    """Undoes :func:`register_kernels`.

    Models that already have posembed's function keep it until they are kernelized again, for
    example by ``model.set_use_kernels(True)``.

    Raises:
        ImportError: See :func:`register_kernels`.
    """
    _kernels()
    if NAME in _before:
        mapping, earlier = _mapping(), _before.pop(NAME)
        mapping.pop(NAME, None)
        if earlier is not None:
            mapping[NAME] = earlier


def _kernels() -> Any:
    """The kernels package, if its version fits transformers."""
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
            f"register_kernels needs kernels {versions} for transformers {transformers}, and"
            f" {installed} is installed: pip install 'kernels{versions}'. patch(model) needs no"
            " kernels package."
        )
    return importlib.import_module("kernels")


def _mapping() -> Any:
    """Registered entries by name; kernels has no function to remove one."""
    return importlib.import_module("kernels.layer.globals")._KERNEL_MAPPING.get()
