"""posembed in torch.distributed: tensor, sequence and context parallelism.

torch provides the engines. This module adds the parallel styles and positions that they lack.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call

from posembed.modules.input import InputEmbedding, either

__all__ = ["ContextPart", "VocabularyParallel", "VocabularyParallelInputEmbedding", "context_part"]


@dataclasses.dataclass(frozen=True)
class ContextPart:
    """One process's tokens of a sequence that several share; see :func:`context_part`.

    Attributes:
        indices: int64 [tokens]: each token's index in the whole sequence.
        positions: int64 [tokens]: each token's index in its document, for ``positions=`` of
            RotaryEmbedding, InputEmbedding, and learned and sinusoidal positions.
        chunks: Start and end of each contiguous chunk of the whole sequence: one, or two if zigzag.
            For ALiBi, pass the queries of a chunk with ``query_offset=start``, all keys, and the
            boundaries of whole documents.
        cu_seqlens: int32 [pieces + 1]: boundaries of the document pieces among these tokens.
    """

    indices: Tensor
    positions: Tensor
    chunks: tuple[tuple[int, int], ...]
    cu_seqlens: Tensor


def context_part(
    seq_len: int,
    mesh: DeviceMesh,
    *,
    zigzag: bool = False,
    cu_seqlens: Tensor | None = None,
    rank: int | None = None,
) -> ContextPart:
    """The tokens of one process under context parallelism.

    Args:
        seq_len: Number of tokens in the whole sequence.
        mesh: The processes that share the sequence; one-dimensional.
        zigzag: Split the sequence into 2n chunks for n processes and give process ``r`` chunks
            ``r`` and ``2n - 1 - r``, which balances causal attention; otherwise each process gets
            one chunk, as from ``torch.chunk``.
        cu_seqlens: int32 or int64 [documents + 1], from 0 to seq_len: the boundaries of packed
            documents, where positions restart; default: one document.
        rank: The process's rank in the mesh; default: this process.

    Returns:
        The part; its tensors are on the device of ``cu_seqlens``, or of the mesh without it.

    Raises:
        ValueError: The mesh has several dimensions, ``seq_len`` cannot be split into equal chunks
            (zigzag), or ``cu_seqlens`` does not go from 0 to seq_len.

    Examples:
        >>> import torch, posembed as pe
        >>> from posembed.integrations.distributed import context_part
        >>> from torch.distributed.device_mesh import DeviceMesh
        >>> def rotate(rope: pe.RotaryEmbedding, q, k, seq_len: int, mesh: DeviceMesh):
        ...     return rope(q, k, positions=context_part(seq_len, mesh, zigzag=True).positions)
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}")
    processes, rank = mesh.size(), mesh.get_local_rank() if rank is None else rank
    if zigzag and seq_len % (2 * processes) != 0:
        raise ValueError(f"seq_len: expected a multiple of {2 * processes}, got {seq_len}")
    numbers = (rank, 2 * processes - 1 - rank) if zigzag else (rank,)
    length = -(-seq_len // (processes * len(numbers)))
    chunks = tuple(
        (min(number * length, seq_len), min((number + 1) * length, seq_len)) for number in numbers
    )
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, seq_len], device=mesh.device_type)
    elif cu_seqlens.dim() != 1 or cu_seqlens[[0, -1]].tolist() != [0, seq_len]:
        raise ValueError(f"cu_seqlens: expected a list from 0 to {seq_len}, got {cu_seqlens}")
    runs = [torch.arange(*chunk, device=cu_seqlens.device) for chunk in chunks]
    indices = torch.cat(runs)
    documents = torch.searchsorted(cu_seqlens, indices, right=True) - 1
    positions = indices - cu_seqlens[documents]
    # A piece starts where a token does not directly follow the previous one in the same document.
    follows = (positions.diff(prepend=positions[:1]) == 1) & (
        documents.diff(prepend=documents[:1]) == 0
    )
    starts = (~follows).nonzero().flatten()
    pieces = torch.cat([starts, starts.new_tensor([len(indices)])]).int()
    return ContextPart(indices, positions, chunks, pieces)


class VocabularyParallel(ParallelStyle):
    """Shards the token table of an :class:`posembed.InputEmbedding` by rows over a mesh.

    The other parameters are replicated. The rows are summed over the processes first. Then
    positions, types, norm and dropout are applied, in the same kernel as in one process. The
    dropout mask is that of a single process; without a ``seed``, the first process draws the seed
    for all. The table becomes a new parameter: tie other modules to it afterwards.

    Args:
        sequence_parallel: Give each process its shard of the sequence, by reduce-scatter; otherwise
            the whole sequence, by all-reduce.
        use_local_output: Return plain tensors; otherwise DTensors.

    Examples:
        >>> import posembed as pe
        >>> from posembed.integrations.distributed import VocabularyParallel
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> def parallelize(embed: pe.InputEmbedding, processes: int) -> None:
        ...     mesh = init_device_mesh("cuda", (processes,))
        ...     parallelize_module(embed, mesh, VocabularyParallel(sequence_parallel=True))
    """

    def __init__(self, *, sequence_parallel: bool = False, use_local_output: bool = True) -> None:
        super().__init__()
        self.place: Placement = Shard(1) if sequence_parallel else Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not InputEmbedding:
            raise TypeError(f"module: expected an InputEmbedding, got {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh: expected one dimension, got {device_mesh.ndim}")
        weight = module.token.weight
        rows = distribute_tensor(weight.detach(), device_mesh, [Shard(0)])
        module.token.weight = nn.Parameter(rows, requires_grad=weight.requires_grad)
        distribute_module(module, device_mesh)  # replicates the others
        # Change the class, not this instance's forward, so that copies use their own parameters.
        module.__class__ = VocabularyParallelInputEmbedding
        embed = cast(VocabularyParallelInputEmbedding, module)
        embed.style, embed.mesh = self, device_mesh
        return module


class _Fused(nn.Module):
    """Calls InputEmbedding's forward with parameters that functional_call has replaced."""

    def __init__(self, embed: InputEmbedding) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, vectors: Tensor, **options: Any) -> Tensor:
        return InputEmbedding.forward(self.embed, inputs_embeds=vectors, **options)


class VocabularyParallelInputEmbedding(InputEmbedding):
    """An InputEmbedding after :class:`VocabularyParallel`; takes the same arguments."""

    style: VocabularyParallel
    mesh: DeviceMesh

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        offset: int | Tensor = 0,
        attention_mask: Tensor | None = None,
        seed: Tensor | None = None,
        first_token: int = 0,
        cu_seqlens: Tensor | None = None,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Like :meth:`posembed.InputEmbedding.forward`, for the whole batch in each process.

        Without a ``seed`` the first process draws one for all.

        Returns:
            [batch, seq, embedding_dim], or this process's shard of the sequence.
        """
        mesh = self.mesh
        ids = either("ids", ids, "input_ids", input_ids)
        positions = either("positions", positions, "position_ids", position_ids)
        types = either("types", types, "token_type_ids", token_type_ids)
        whole = self._check_inputs(ids, inputs_embeds)
        positions = self._positions(whole, ids, positions, attention_mask, offset, cu_seqlens)
        if positions is None and self.position is not None:
            first = cast(int, offset)  # a tensor has become positions
            positions = torch.arange(first, first + whole.shape[1], device=whole.device)
        rows = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        if inputs_embeds is None:
            rows = self.token(rows)
        rows = rows.redistribute(placements=[self.style.place])
        if not self.training or self.dropout == 0:
            seed = None
        elif seed is None:
            seed = torch.randint(2**62, (1,), dtype=torch.int64, device=whole.device)
            seed = DTensor.from_local(seed, mesh, [Replicate()], run_check=True).to_local()
        length = whole.shape[1]
        local = self._finish(rows.to_local(), length, positions, types, seed, first_token)
        if self.style.use_local_output:
            return local
        shape = torch.Size((*whole.shape[:2], local.shape[-1]))
        stride = torch.empty(shape, device="meta").stride()
        places = [self.style.place]
        return DTensor.from_local(local, mesh, places, run_check=False, shape=shape, stride=stride)

    def _finish(
        self,
        rows: Tensor,
        length: int,
        positions: Tensor | None,
        types: Tensor | None,
        seed: Tensor | None,
        first_token: int,
    ) -> Tensor:
        """Adds positions and types to this process's rows, and applies norm and dropout."""
        batch, start = len(rows), 0
        if self.style.place.is_shard():
            chunk = -(-length // self.mesh.size())
            start = min(chunk * self.mesh.get_local_rank(), length)
        part = slice(start, start + rows.shape[1])
        positions = positions if positions is None else positions[..., part]
        types = types if types is None else types[:, part]
        first = first_token + start
        if rows.shape[1] == length or seed is None or batch == 1:
            return self._fused(rows, positions=positions, types=types, seed=seed, first_token=first)
        # The samples are not adjacent in the whole batch's dropout mask.
        shared = positions is None or positions.dim() == 1
        results = [
            self._fused(
                row,
                positions=positions if shared else positions[i : i + 1],  # type: ignore[index]
                types=types if types is None else types[i : i + 1],
                seed=seed,
                first_token=first + i * length,
            )
            for i, row in enumerate(rows.unsqueeze(1))
        ]
        return torch.cat(results)

    def _fused(self, rows: Tensor, **options: Any) -> Tensor:
        """The module's own kernel, which takes plain tensors."""
        gradient = Partial() if self.style.place.is_shard() else Replicate()
        parameters = {
            f"embed.{name}": cast(DTensor, parameter).to_local(grad_placements=[gradient])
            for name, parameter in self.named_parameters()
        }
        return cast(Tensor, functional_call(_Fused(self), parameters, (rows,), options))
