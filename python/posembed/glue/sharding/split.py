"""How a device mesh splits the arguments of one call.

Each dimension of an argument is named by a letter; dimensions named "." may not be split. The
letters that a mesh splits determine how other arguments are sharded, and which gradients are
partial sums over processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def _letter(name: str, tensor: DTensor, letters: str, mesh_dim: int) -> set[str]:
    """The letter of the dimension that a mesh dimension splits, if there is one."""
    place = tensor.placements[mesh_dim]
    if place.is_replicate():
        return set()
    if isinstance(place, Shard) and letters[place.dim] != ".":
        return {letters[place.dim]}
    possible = [f"Shard({dim})" for dim, letter in enumerate(letters) if letter != "."]
    raise ValueError(
        f"{name}: expected {' or '.join([*possible, 'Replicate()'])}, got {place!r}; "
        "redistribute it before the call"
    )


def _sharded(drivers: Mapping[str, tuple[Tensor, str]]) -> dict[str, tuple[DTensor, str]]:
    """The DTensors among the drivers; raises for plain floating-point tensors and wrong ranks."""
    sharded = {
        name: (tensor, letters)
        for name, (tensor, letters) in drivers.items()
        if isinstance(tensor, DTensor)
    }
    for name, (tensor, letters) in drivers.items():
        if name not in sharded and (tensor.is_floating_point() or not sharded):
            raise TypeError(f"{name}: expected a DTensor beside other DTensors, got a Tensor")
        if tensor.dim() != len(letters):
            raise ValueError(f"{name}: expected {len(letters)} dimensions, got {tensor.dim()}")
    return sharded


class Split:
    """The letters that each dimension of the mesh splits in one call.

    Args:
        drivers: The tensors that determine the split, by name, with their letters. Floating-point
            ones must be DTensors; other plain tensors are replicated.
        independent: Letters that one mesh dimension may split at once, in different drivers.

    Raises:
        ValueError: A placement is not supported; the message names it.
        TypeError: A floating-point driver is a plain tensor.
    """

    def __init__(self, drivers: Mapping[str, tuple[Tensor, str]], independent: str = "") -> None:
        self.sizes: dict[str, int] = {}
        sharded = _sharded(drivers)
        first = next(iter(sharded.values()))[0]
        self.mesh: DeviceMesh = first.device_mesh
        self.device = first.device
        for name, (tensor, letters) in drivers.items():
            self._check_mesh(name, tensor)
            for letter, size in zip(letters, tensor.shape, strict=True):
                if self.sizes.get(letter, 1) == 1:
                    self.sizes[letter] = size
        drivers = {name: (each[0], self._whole(*each)) for name, each in drivers.items()}
        sharded = {name: (tensor, drivers[name][1]) for name, (tensor, _) in sharded.items()}
        self.drivers = {name: letters for name, (_, letters) in drivers.items()}
        self.letters: list[set[str]] = []
        for dim in range(self.mesh.ndim):
            found = set().union(*(_letter(name, *each, dim) for name, each in sharded.items()))
            if len(found) > 1 and not found <= set(independent):
                given = ", ".join(f"{n} {x.placements[dim]!r}" for n, (x, _) in sharded.items())
                raise ValueError(
                    f"{', '.join(drivers)}: expected mesh dimension {dim} to split one dimension "
                    f"of the call, got {given}"
                )
            self.letters.append(found)
        for name, (tensor, letters) in sharded.items():
            wanted = self.placements(letters)
            if tensor.placements != wanted:
                self._refuse(name, tensor, wanted)

    def _whole(self, tensor: Tensor, letters: str) -> str:
        """The letters, with "." for a size of 1 that is broadcast."""
        each = zip(letters, tensor.shape, strict=True)
        return "".join("." if size == 1 != self.sizes.get(name) else name for name, size in each)

    def _check_mesh(self, name: str, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor) and tensor.device_mesh != self.mesh:
            raise ValueError(f"{name}: expected the mesh {self.mesh}, got {tensor.device_mesh}")

    @staticmethod
    def _refuse(name: str, tensor: Any, wanted: Sequence[Placement]) -> None:
        raise ValueError(
            f"{name}: expected placements {tuple(wanted)}, as other arguments are split, got "
            f"{tensor.placements}; redistribute it before the call"
        )

    def has(self, letter: str) -> bool:
        """Whether the mesh splits that dimension."""
        return any(letter in letters for letters in self.letters)

    def placements(self, letters: str, summed: Collection[str] = ()) -> tuple[Placement, ...]:
        """A tensor's placements: Partial where a mesh dimension splits a letter of ``summed``."""
        result: list[Placement] = []
        for split in self.letters:
            own = [dim for dim, letter in enumerate(letters) if letter in split]
            if own:
                result.append(Shard(own[0]))
            else:
                result.append(Partial() if split & set(summed) else Replicate())
        return tuple(result)

    def first(self, letter: str) -> int:
        """Index of the first row of this process's shard along a dimension."""
        start, rows = 0, self.sizes[letter]
        for dim, split in enumerate(self.letters):
            if letter in split:
                chunk = -(-rows // self.mesh.size(dim))
                skipped = min(chunk * self.mesh.get_local_rank(dim), rows)
                start, rows = start + skipped, min(chunk, rows - skipped)
        return start

    def local(self, name: str, tensor: Tensor, letters: str, summed: Collection[str]) -> Tensor:
        """This process's shard of an argument: a view, or a slice of a replicated tensor.

        Its gradient is a partial sum over the processes that split a letter of ``summed``. Plain
        tensors are replicated, and their gradients are reduced immediately.
        """
        letters = self._whole(tensor, letters)
        wanted = self.placements(letters)
        if not isinstance(tensor, DTensor):
            everywhere = [Replicate()] * self.mesh.ndim
            tensor = DTensor.from_local(tensor, self.mesh, everywhere, run_check=False)
        self._check_mesh(name, tensor)
        if any(
            have != want and not have.is_replicate()
            for have, want in zip(tensor.placements, wanted, strict=True)
        ):
            self._refuse(name, tensor, wanted)
        if tensor.placements != wanted:
            tensor = tensor.redistribute(placements=wanted)
        return tensor.to_local(grad_placements=self.placements(letters, summed))

    def result(self, local: Tensor, letters: str, summed: Collection[str]) -> Tensor:
        """Builds a DTensor from the shards of a result; see :meth:`placements` for ``summed``."""
        shape = [
            self.sizes[letter] if self.has(letter) else size
            for letter, size in zip(letters, local.shape, strict=True)
        ]
        order = sorted(range(local.dim()), key=local.stride, reverse=True)
        stride = torch.empty_permuted(shape, order, device="meta").stride()
        placements = self.placements(letters, summed)
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
