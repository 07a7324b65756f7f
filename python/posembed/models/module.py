"""Reads rotations off a model of transformers for which there is no rule, by what attention gets.

The model is built without memory for weights. All its products with weights are known numbers, the
same for every token, so keys differ from token to token by nothing but the rotation.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from posembed.diagnosis import reading_off
from posembed.diagnosis.mistakes import snapped
from posembed.models import layers, parts
from posembed.models.data import words
from posembed.models.fields import Fields, shown, text_of
from posembed.models.reading import LayerPositions
from posembed.specifications import RotarySpec, Sections
from posembed.specifications.score_scale import ScoreScale

SOURCE = "read from the module"
BATCH, HEADS = 16, 2  # sequences of a run, and how many heads of it are read
MOST_BITS, FEW_BITS = 17, 5  # positions 0, 1, 2, 4, ... below 2^17
ROUNDOFF = 1e-6
SCALE_ERROR = 1e-4  # of a scale read off scores in float32
MASKED = 1e3  # by how much masked scores differ from others, at least
MAKERS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.baddbmm, torch.einsum}
SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax}
CAPS = {torch.tanh, Tensor.tanh}
WITH_WEIGHTS = {*PRODUCTS, functional.linear, torch.addmm, functional.embedding, functional.conv1d}


class UnreadableError(ValueError):
    """A module that cannot be read."""

    def __init__(self, why: str, error: Exception | None = None) -> None:
        if error is not None:
            why += ": " + " ".join(f"{type(error).__name__}: {error}".split())[:160]
        super().__init__(f"read_module: {why}: describe the rotation in full with RotarySpec")


class _Seen(Exception):  # noqa: N818  (ends a run)
    """What attention got; nothing, if the layer has none."""

    def __init__(self, *found: Any) -> None:
        super().__init__()
        self.found = found


# ----------------------------------------------------------------------------------- model and runs


class _WithoutWeights(TorchFunctionMode):
    """Tensors of several dimensions that a model makes have no memory."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), given: Any = None) -> Any:
        kwargs = given or {}
        if function in MAKERS:
            made = function(*args, **{**kwargs, "device": "meta"})
            if made.dim() > 1:
                return made
        return function(*args, **kwargs)


class _Run(TorchFunctionMode):
    """Products with weights are signs, or rise with the component; attention ends the run."""

    def __init__(self, tokens: int, seed: int | None) -> None:
        super().__init__()
        self.tokens, self.seed = tokens, seed
        self.seen: tuple[Tensor, ...] = ()  # query, key and their product

    def _numbers(self, shape: torch.Size) -> Tensor:
        rows, width = math.prod(shape[:-1]), shape[-1]
        if self.seed is None:
            return (1 + torch.arange(width) / width).expand(shape)
        generator = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(2, (BATCH, width), generator=generator) * 2.0 - 1
        same = rows // BATCH if rows % BATCH == 0 else rows
        return signs.repeat_interleave(same, 0)[:rows].view(shape)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), given: Any = None) -> Any:
        kwargs = given or {}
        if function is functional.scaled_dot_product_attention:
            raise _Seen(*args[:2], kwargs.get("scale"))
        tensors = [x for x in args if isinstance(x, Tensor)]
        if function in SOFTMAX and self.seen:
            raise _Seen(*self.seen[:2], self._scale(args[0]))
        if function in CAPS and self.seen:  # of scores, which small ones pass unchanged
            return args[0]
        if function in WITH_WEIGHTS and any(x.is_meta for x in tensors):
            metas = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
            return self._numbers(function(*metas[0], **metas[1]).shape)
        found = function(*args, **kwargs)
        scores = function in PRODUCTS and found.shape[-2:] == (self.tokens, self.tokens)
        if scores and not self.seen and len(tensors) == 2 and tensors[0].shape[-1] > 1:
            self.seen = (tensors[0], tensors[1].transpose(-1, -2), found)
        return found

    def _scale(self, scores: Tensor) -> float:
        """What multiplies products of query and key: scores may also lose a row's maximum."""
        plain = self.seen[2]
        given = scores[..., : self.tokens, : self.tokens].reshape(plain.shape)
        near, own = (x - x.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) for x in (given, plain))
        known = (own.abs() > 1 / 2) & (near.abs() < MASKED) & torch.ones_like(own).tril().bool()
        ratios = near[known] / own[known]
        scale = float(ratios.median()) if len(ratios) else math.nan
        if not torch.allclose(ratios, ratios.new_tensor(scale), rtol=1e-3):
            raise UnreadableError("its scores are more than a multiple of query times key")
        return scale


def _config_of(config: Any, fields: Fields, trust: bool) -> tuple[Any, Callable[[Any], Any]]:
    """The configuration object, and what makes the model of one of its parts."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module as loaded

    name, own = text_of(fields.get("model_type")), fields.get("auto_map") or {}
    if hasattr(config, "to_dict") and type(config).__module__.startswith("transformers."):
        return config, _made
    if name in transformers.CONFIG_MAPPING:
        rest = {key: value for key, value in fields.items() if key != "quantization_config"}
        return transformers.CONFIG_MAPPING[name].from_dict(rest), _made
    version = f"transformers {transformers.__version__} has no model_type {shown(name)}"
    if not isinstance(own, dict) or "AutoConfig" not in own:
        raise UnreadableError(version)
    if not trust or not isinstance(config, (str, os.PathLike)):
        raise UnreadableError(
            f"{version}, and the model's own code runs only from its folder, with "
            "trust_remote_code=True"
        )
    folder = Path(config) if Path(config).is_dir() else Path(config).parent
    model = next((own[key] for key in ("AutoModel", "AutoModelForCausalLM") if key in own), None)
    if model is None:
        raise UnreadableError("auto_map names no AutoModel")

    get: Any = functools.partial(
        loaded, pretrained_model_name_or_path=str(folder), local_files_only=True
    )
    return get(own["AutoConfig"]).from_dict(fields), lambda part: get(model)(part)


def _made(config: Any) -> Any:
    """The model of a configuration of transformers."""
    import transformers

    for mapping in (transformers.MODEL_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            found: Any = mapping[type(config)]
            return (found[0] if isinstance(found, tuple) else found)._from_config(config)
    raise UnreadableError(f"transformers has no model of {type(config).__name__} alone")


class _Model:
    """A model without weights, and what its layers do."""

    def __init__(self, config: Any, fields: Fields, part: str | None, trust: bool) -> None:
        try:
            whole, make = _config_of(config, fields, trust)
            for name in parts.path_of(fields, part):
                whole = getattr(whole, name)
            own = copy.deepcopy(whole.get_text_config() if part is None else whole)
            own.dtype = torch.float32
            with _WithoutWeights():
                self.model: nn.Module = make(own).eval()
        except UnreadableError:
            raise
        except Exception as error:  # the model's code may raise anything
            raise UnreadableError("it cannot be built", error) from error
        self.inputs = {*inspect.signature(self.model.forward).parameters}
        if self.inputs.isdisjoint(("input_ids", "inputs_embeds")):
            raise UnreadableError("it takes no tokens: towers of pictures and sound are not read")
        self.fields = dict(own.to_dict())
        count = layers.count_of_layers(self.fields)
        lists = [x for x in self.model.modules() if isinstance(x, nn.ModuleList)]
        self.layers = next((x for x in lists if len(x) == count), None)
        if self.layers is None:
            raise UnreadableError(f"{type(self.model).__name__} has no list of {count} layers")
        most = getattr(own, "max_position_embeddings", None) or 4096
        self.bits = max(FEW_BITS, min(MOST_BITS, int(most).bit_length() - 1))
        self.kinds = self.fields.get("layer_types") or [None] * len(self.layers)
        self.axes = 3
        others = words("without_attention")
        places = (place for place, kind in enumerate(self.kinds) if kind not in others)
        with contextlib.suppress(Exception):  # a model with one axis may raise anything
            if self.seen(next(places), 0)[1].shape[0] == BATCH:
                return
        self.axes = 1

    def positions(self, bits: int) -> Tensor:
        """0, then the powers of two on each axis alone: [axes, tokens]."""
        powers = torch.tensor([2**bit for bit in range(bits)])
        found = torch.zeros(self.axes, 1 + self.axes * bits, dtype=torch.long)
        for axis in range(self.axes):
            found[axis, 1 + axis * bits : 1 + (axis + 1) * bits] = powers
        return found

    def _given(self, positions: Tensor) -> Fields:
        """The arguments of a run: tokens that are all alike, and positions."""
        tokens, at = positions.shape[-1], positions[:, None].expand(-1, BATCH, -1)
        given: Fields = {"position_ids": at if self.axes > 1 else at[0], "use_cache": False}
        if "inputs_embeds" not in self.inputs:
            return {**given, "input_ids": torch.zeros(BATCH, tokens, dtype=torch.long)}
        table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        return {**given, "inputs_embeds": torch.zeros(BATCH, tokens, table.weight.shape[-1])}

    def seen(self, layer: int, seed: int | None, bits: int | None = None) -> tuple[Any, ...]:
        """Query, key and scale of a layer's attention; () if it has none."""
        positions = self.positions(self.bits if bits is None else bits)
        error: Exception | None = None
        for size in range(4):  # layers return a tensor, or a tuple that begins with it
            try:
                with self._alone(layer, size), _Run(positions.shape[-1], seed), torch.no_grad():
                    self.model(**self._given(positions))
            except _Seen as seen:
                return seen.found
            except UnreadableError:
                raise
            except Exception as raised:  # the model's code may raise anything
                error = raised
        raise UnreadableError(f"layer {layer} of {type(self.model).__name__} does not run", error)

    @contextlib.contextmanager
    def _alone(self, layer: int, size: int) -> Iterator[None]:
        """Layers before this one pass their input on, and later ones end the run."""

        def passed(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            return (hidden, None, None)[:size] or hidden

        def ended(*args: Any, **kwargs: Any) -> Any:
            raise _Seen

        assert self.layers is not None
        others = {place: each for place, each in enumerate(self.layers) if place != layer}
        try:
            for place, each in others.items():
                each.forward = passed if place < layer else ended
            yield
        finally:
            for each in others.values():
                del each.forward

    # ------------------------------------------------------------------------------------- reading

    def read(self) -> list[LayerPositions]:
        """All layers; those that compute the same are read once."""
        known: list[tuple[Tensor, Any, LayerPositions]] = []
        found = []
        for place, kind in enumerate(self.kinds):
            seen = () if kind in words("without_attention") else self.seen(place, 0)
            if not seen:
                found.append(LayerPositions(kind, None, None))
                continue
            key, scale = seen[1], seen[2]
            same = [x for k, s, x in known if s == scale and k.shape == key.shape and k.equal(key)]
            if not same:
                same = [self._layer(place, seen)]
                known.append((key, scale, same[0]))
            found.append(same[0]._replace(kind=kind))
        return found

    def _layer(self, place: int, seen: tuple[Any, ...]) -> LayerPositions:
        query, key, scale = seen
        size = float(query[..., 0, :].norm(dim=-1).mean() / key[..., 0, :].norm(dim=-1).mean())
        factor = (1.0 if scale is None else scale * math.sqrt(key.shape[-1])) * size
        growth = query.norm(dim=-1) / query[..., :1, :].norm(dim=-1)
        if float((growth - 1).abs().max()) > 1e-3:
            raise UnreadableError("queries grow with their position")
        near = slice(1 + FEW_BITS)
        others = [self.seen(place, 0, FEW_BITS)[1]]
        with contextlib.suppress(UnreadableError):  # some models do not run beyond their maximum
            others.append(self.seen(place, 0, self.bits + 2)[1])
        here = key[..., near, :]
        if not all(torch.allclose(other[..., near, :], here, atol=1e-5) for other in others):
            raise UnreadableError("frequencies depend on the length of the sequence")
        own = ScoreScale(factor, source=SOURCE) if abs(factor - 1) > SCALE_ERROR else None
        spec = self._rotation(place, key)
        if spec is not None:
            for name, value in {"score_scale": own, "source": SOURCE}.items():
                object.__setattr__(spec, name, value)
        return LayerPositions(None, spec, own)

    def _images(self, place: int, key: Tensor) -> Tensor:
        """What the rotation makes of each component: float64 [tokens, out, in]."""
        size = key.shape[-1]
        seen = [key, *(self.seen(place, run)[1] for run in range(1, 2 * size // BATCH + 1))]
        rows = torch.cat([x[:, :HEADS].flatten(0, 1).double() for x in seen])
        before, after = rows[:, 0], rows.transpose(0, 1)
        if int(torch.linalg.matrix_rank(before, rtol=1e-3)) < size:
            raise UnreadableError("keys do not have all components of their own")
        solved: Tensor = torch.linalg.lstsq(before.expand(len(after), -1, -1), after).solution
        return solved.transpose(-1, -2)

    def _rotation(self, place: int, key: Tensor) -> RotarySpec | None:
        if torch.equal(key, key[..., :1, :].expand_as(key)):
            return None
        images = self._images(place, key)
        pairs = torch.tensor(reading_off.pairs_in(images, ROUNDOFF))
        if not len(pairs):
            raise UnreadableError("its keys change with positions, and do not turn in pairs")
        start, end = int(pairs.min()), int(pairs.max()) + 1
        rising = self.seen(place, None)[1][0, 0, 0, start:end]
        ranks = rising.argsort().argsort()  # where the weights have each component
        inputs = ranks[pairs - start]
        pairs = torch.where((inputs[:, :1] < inputs[:, 1:]), pairs, pairs.flip(1))
        inputs = inputs.sort(1).values
        order = inputs[:, 0].argsort()
        (first, second), inputs = pairs[order].T, inputs[order]
        gaps = {*(inputs[:, 1] - inputs[:, 0]).tolist()}
        count = len(first)
        interleaved = gaps == {1} and inputs[:, 0].tolist() == [*range(0, 2 * count, 2)]
        gap = count if interleaved else max(gaps)
        if not interleaved and (len(gaps) > 1 or inputs[:, 0].tolist() != [*range(count)]):
            raise UnreadableError(f"its pairs are in no usual order: {inputs.tolist()}")
        angles = torch.atan2(images[:, second, first], images[:, first, first])
        turns = torch.stack([self._turns(angles, axis) for axis in range(self.axes)])
        axis_of = turns.abs().argmax(0)
        frequencies = turns.gather(0, axis_of[None])[0]
        reverse = bool((frequencies < 0).all())
        if not reverse and not bool((frequencies > 0).all()):
            raise UnreadableError("pairs turn in different directions")
        axes = axis_of.tolist()
        sections = Sections(axis_of_pair=axes, axes=self.axes) if any(axes) else None
        return self._specification(
            key.shape[-1],
            torch.cat((frequencies.abs(), torch.zeros(gap - count, dtype=torch.float64))),
            self._factor(key[..., 0, first]),
            rotary_start=start,
            interleaved=interleaved,
            reverse=reverse,
            sections=sections,
        )

    def _turns(self, angles: Tensor, axis: int) -> Tensor:
        """Radians per position on an axis, with the others at 0."""
        tokens = [0, *range(1 + axis * self.bits, 1 + (axis + 1) * self.bits)]
        places = self.positions(self.bits)[axis : axis + 1, tokens]
        return reading_off.frequencies(places[0].tolist(), angles[tokens])

    def _factor(self, turned: Tensor) -> float:
        """The attention factor: as the rotary module says, or the size of what were signs."""
        said = {
            value
            for module in self.model.modules()
            for name, value in vars(module).items()
            if name.endswith("attention_scaling") and isinstance(value, (int, float))
        }
        measured = float(turned.abs().mean())
        near = [value for value in (1.0, *said) if abs(value - measured) < 1e-3]
        if not near and said != {1.0}:  # otherwise keys have another size, by their norm
            raise UnreadableError("its amplitude cannot be told")
        return float((near or said).pop())

    def _specification(
        self, width: int, frequencies: Tensor, factor: float, **given: Any
    ) -> RotarySpec:
        count = len(frequencies)
        given |= {"head_dim": width, "rotary_dim": 2 * count}
        latent = self.fields.get("qk_rope_head_dim")
        if latent == 2 * count and given["rotary_start"] + latent == width:
            given |= {"head_dim": latent, "rotary_start": 0}
        last = float(frequencies[-1])
        base = snapped(last ** (-count / (count - 1))) if count > 1 and last > 0 else None
        if base is not None and abs(factor - 1) < 1e-6:
            usual = base ** -(torch.arange(count, dtype=torch.float64) / count)
            if bool(((frequencies / usual - 1).abs() < 1e-5).all()):
                return RotarySpec(base=base, **given)
        for buffer in self.model.buffers():  # float32 numbers without the reading's rounding
            own = buffer.double()
            same = own.shape == frequencies.shape and not own.is_meta
            if same and torch.allclose(own, frequencies, rtol=1e-5, atol=0):
                frequencies = own
        return RotarySpec(
            custom_frequencies=frequencies.tolist(), custom_attention_factor=factor, **given
        )


def read(config: Any, fields: Fields, part: str | None, trust: bool) -> list[LayerPositions]:
    """What each layer of a model, or of its part, does; raises ValueError with the reason.

    ``config`` is an object, a dict or a path; ``fields``: what it says; ``trust``: whether the code
    in its folder may run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Model(config, fields, part, trust).read()
