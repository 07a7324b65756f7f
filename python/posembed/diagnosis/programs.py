"""Programs of other libraries and files, in the form that :func:`posembed.diagnose` calls."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posembed import functional
from posembed.diagnosis.observation import Program, Recorded
from posembed.specifications import RotarySpec


def of_transformers(
    rotary: Any, apply: Callable[..., Any], layer_type: str | None = None
) -> Program:
    """The rotation of a model of transformers.

    Args:
        rotary: Its module, such as ``LlamaRotaryEmbedding(config)``: takes x and position_ids,
            returns cosines and sines, or complex numbers.
        apply: Its function, ``apply_rotary_pos_emb``. If it takes no more components than the
            tables have, the others stay as they are.
        layer_type: Passed to modules that take it.

    Examples:
        >>> import posembed as pe
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama import modeling_llama as llama
        >>> config = LlamaConfig(head_dim=64, max_position_embeddings=2048)
        >>> rotary = llama.LlamaRotaryEmbedding(config)
        >>> program = pe.diagnosis.of_transformers(rotary, llama.apply_rotary_pos_emb)
        >>> pe.diagnose(program, config).right
        True
    """
    options = {}
    if layer_type is not None and "layer_type" in inspect.signature(rotary.forward).parameters:
        options["layer_type"] = layer_type
    names = inspect.signature(apply).parameters
    both = any(name in names for name in ("k", "xk", "key"))

    def applied(x: Tensor, *tables: Tensor) -> Any:
        found = apply(x, x, *tables) if both else apply(x, *tables)
        return found[0] if isinstance(found, tuple) else found

    def program(x: Tensor, positions: Tensor) -> Any:
        tables = rotary(x, positions.unsqueeze(-2), **options)
        if isinstance(tables, Tensor):  # complex numbers, for tokens before heads
            return applied(x.transpose(1, 2), tables).transpose(1, 2)
        width = tables[0].shape[-1]
        try:
            return applied(x, *tables)
        except RuntimeError:
            if width >= x.shape[-1]:
                raise
        return torch.cat((applied(x[..., :width], *tables), x[..., width:]), -1)

    return program


def of_cache(cache: Tensor, *, interleaved: bool = False, start: int = 0) -> Program:
    """The rotation by a server's ``cos_sin_cache``.

    Args:
        cache: [positions, rotary_dim]: cosines, then sines, half of the columns each (vLLM,
            SGLang).
        interleaved: Pairs (2i, 2i + 1), ``is_neox_style=False``. The cache does not say it, so it
            is not judged.
        start: The first rotated component.

    Raises:
        ValueError: The cache has another number of dimensions or odd columns.

    Examples:
        >>> import torch, posembed as pe
        >>> angles = torch.arange(2048.0)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
        >>> cache = torch.cat((angles.cos(), angles.sin()), -1)
        >>> config = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 4096}
        >>> pe.diagnose(pe.diagnosis.of_cache(cache), config).headline()[:48]
        'table too short: position 2048 raises IndexError'
    """
    if cache.dim() != 2 or cache.shape[1] % 2:
        raise ValueError(f"cache: expected [positions, rotary_dim], got {list(cache.shape)}")

    def program(x: Tensor, positions: Tensor) -> Tensor:
        rows = cache.to(x.device)[positions].to(x.dtype)
        cos, sin = rows.chunk(2, -1)
        return functional.rotary_tables(
            x, None, cos, sin, half_width=True, interleaved=interleaved, start=start
        )

    return program


def of_onnx(path: str | os.PathLike[str], **options: Any) -> Program:
    """The rotation of an ONNX graph with an input for x, one for positions, and one output.

    A graph with fixed sizes of batch and sequence is run in parts; the result for a part of a
    sequence has to be the same as for the whole. ``options`` are those of
    ``onnxruntime.InferenceSession``. A graph with other inputs is a ValueError.
    """
    onnxruntime: Any = importlib.import_module("onnxruntime")

    session = onnxruntime.InferenceSession(os.fspath(path), **options)
    inputs = session.get_inputs()
    floats = [given for given in inputs if re.search("float|double", given.type)]
    numbers = [given for given in inputs if "int" in given.type]
    if len(floats) != 1 or len(numbers) != 1 or len(inputs) != 2:
        known = ", ".join(f"{given.name}: {given.type}" for given in inputs)
        raise ValueError(f"{os.fspath(path)}: expected inputs x and positions, got {known}")
    types = {"tensor(float16)": torch.float16, "tensor(float)": torch.float32}
    dtype = types.get(floats[0].type, torch.float64)
    whole = torch.int32 if "int32" in numbers[0].type else torch.int64

    def run(x: Tensor, positions: Tensor) -> Tensor:
        given = {
            floats[0].name: x.to("cpu", dtype).contiguous().numpy(),
            numbers[0].name: positions.to("cpu", whole).contiguous().numpy(),
        }
        return torch.from_numpy(session.run(None, given)[0])

    batch, tokens = (floats[0].shape[place] for place in (0, 2))
    return _in_parts(run, *(size if isinstance(size, int) else None for size in (batch, tokens)))


def _in_parts(run: Program, batch: int | None, tokens: int | None) -> Program:
    """A program of fixed sizes, called as often as needed; the last part is filled up."""

    def parts(count: int, size: int | None) -> list[Tensor]:
        every = torch.arange(count)
        if size is None:
            return [every]
        filled = torch.arange(-(-count // size) * size).clamp(max=count - 1)
        return list(torch.split(filled, size))

    def program(x: Tensor, positions: Tensor) -> Tensor:
        rows = []
        for some in parts(x.shape[0], batch):
            columns = [
                run(x[some][:, :, at], positions[..., at]) for at in parts(x.shape[2], tokens)
            ]
            rows.append(torch.cat(columns, 2))
        return torch.cat(rows)[: x.shape[0], :, : x.shape[2]]

    return program


def recorded(path: str | os.PathLike[str], layer_type: str | None = None) -> tuple[Recorded, ...]:
    """Tensors "x", "positions" and "output" of a safetensors file.

    Several calls have a name each, before a dot: "long.x". If names begin with a kind of layers, as
    in files of :func:`posembed.diagnosis.golden`, ``layer_type`` chooses.
    """
    from safetensors.torch import load_file

    tensors = load_file(os.fspath(path))
    heads = {name.removesuffix("x") for name in tensors if re.search(r"(^|\.)x$", name)}
    kinds = {head.split("/")[0].rstrip(".") for head in heads}
    if layer_type is not None and layer_type in kinds:
        heads = {head for head in heads if head.split("/")[0].rstrip(".") == layer_type}
    missing = [h + n for h in heads for n in ("positions", "output") if h + n not in tensors]
    if missing or not heads:
        expected = missing or ["x", "positions", "output"]
        raise ValueError(f"{os.fspath(path)}: expected {expected}, got {sorted(tensors)}")
    return tuple(
        Recorded(*(tensors[head + name] for name in ("x", "positions", "output")))
        for head in sorted(heads)
    )


def _of_modeling(module: Any, config: Any, layer_type: str | None) -> Program:
    """The rotation of a modeling file of transformers, for a configuration."""
    classes: list[Any] = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value) and re.search(r"^(?!.*Vision).*Rotary\w*Embedding$", name)
    ]
    names = ("apply_rotary_pos_emb", "apply_rotary_emb")
    apply = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if not classes or apply is None:
        raise ValueError(
            f"{module.__name__}: expected a class *RotaryEmbedding and apply_rotary_pos_emb"
        )
    from transformers import AutoConfig

    from posembed.models.files import load as load_config

    made = config if hasattr(config, "to_dict") else AutoConfig.for_model(**load_config(config))
    made = made.get_text_config()
    if getattr(made, "rope_interleave", False):
        apply = getattr(module, "apply_rotary_pos_emb_interleave", apply)
    return of_transformers(classes[0](made), apply, layer_type)


def load(
    program: str | os.PathLike[str], spec: RotarySpec, config: Any, layer_type: str | None
) -> Program | tuple[Recorded, ...]:
    """The program that a text names.

    A text is ``file.py:name`` or ``module:name``, a callable; ``module``, a modeling file of
    transformers, whose classes are made from ``config``; ``graph.onnx``; or ``tensors.safetensors``
    with recorded tensors or a ``cos_sin_cache``, whose pairing and window are those of ``spec``.
    ``layer_type`` is for modeling files and recorded tensors. Any other text is a ValueError.
    """
    text = os.fspath(program)
    if text.endswith(".onnx"):
        return of_onnx(text)
    if text.endswith(".safetensors"):
        from safetensors.torch import load_file

        tensors = load_file(text)
        cache = next((t for name, t in tensors.items() if name.endswith("cos_sin_cache")), None)
        if cache is None:
            return recorded(text, layer_type)
        return of_cache(cache, interleaved=spec.interleaved, start=spec.rotary_start)
    where, _, name = text.partition(":")
    if where.endswith(".py"):
        found = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"program: expected module:name, file.py:name, .onnx or .safetensors, got {text!r}"
                f" ({error})"
            ) from error
    if not name:
        return _of_modeling(module, config, layer_type)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"program: {where} has no function {name!r}")
    return getattr(module, name)  # type: ignore[no-any-return]
