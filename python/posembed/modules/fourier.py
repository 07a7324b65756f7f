"""FourierFeatures: sines and cosines of coordinates and time stamps.

Mildenhall et al., "NeRF", arXiv:2003.08934; Tancik et al., "Fourier Features Let Networks Learn
High Frequency Functions in Low Dimensional Domains", arXiv:2006.10739; Kazemi et al., "Time2Vec",
arXiv:1907.05321.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from posembed import functional
from posembed.functional import Device
from posembed.functional._fourier import features
from posembed.functional._options import FourierUnit, FourierWaves
from posembed.glue.gate import check_tensors
from posembed.glue.sharding import set_values
from posembed.glue.tracers import Leaf
from posembed.glue.validation import finite, flag, one_of, positive, shown, whole

# nerf-pytorch's run_nerf_helpers.py, transformers' PerceiverFourierPositionEncoding and
# SamPositionalEmbedding, score_sde_pytorch's GaussianFourierProjection, Time2Vec's paper.
_PRESETS: dict[str, dict[str, Any]] = {
    "nerf": {"octaves": 10, "unit": "radian", "include_input": "first", "order": "fwa"},
    "perceiver": {"bands": (64, 224.0), "include_input": "first"},
    "sam": {"random": (2, 128), "centred": True},
    "gaussian": {"random": (1, 256, 16.0)},
    "time2vec": {
        "random": (1, 63),
        "unit": "radian",
        "waves": "sin",
        "learned": True,
        "linear": True,
    },
}
_SOURCES = ("frequencies", "octaves", "bands", "random")
_MATRICES = ("positional_encoding_gaussian_matrix", "positional_embedding")  # SAM's names


class FourierFeatures(Leaf, nn.Module):
    """Encodes coordinates by sines and cosines of exact angles, or adds them to x.

    Frequencies are a float64 buffer, which casts and ``to_empty()`` leave as it is, or a parameter.
    Octaves and bands follow from the options; other frequencies are in the ``state_dict``.

    Args:
        frequencies: [n]: each axis is multiplied by all of them. [axes, n]: an angle is the sum
            over axes.
        preset: Options of a program, which other arguments replace.
            "nerf": nerf-pytorch: the input, then sines and cosines of ``2 ** k * x`` for 10
            octaves; the paper has multiples of pi, ``unit="half_turn"``.
            "perceiver": the input, then 64 bands up to 112 pi.
            "sam": 128 random frequencies of two coordinates in [0, 1]. SAM's
            ``positional_encoding_gaussian_matrix`` in a ``state_dict`` becomes ``frequencies``.
            "gaussian": score models: 256 random frequencies of one number, scale 16.
            "time2vec": ``x * weight + bias``, then 63 sines of learned frequencies and phases.
        octaves: Frequencies 1, 2, 4, and so on: their number.
        bands: The number of frequencies and the sampling rate: linear from 1 to half the rate.
        random: (axes, n), (axes, n, scale) or (axes, n, scale, seed): normally distributed
            frequencies [axes, n] of standard deviation ``scale``. C++ and Python draw the same.
        phases: [n], in radians, added to the angles.
        learned: Train frequencies and phases, which start at ``phases`` or 0.
        linear: Put ``x * linear_weight + linear_bias`` before everything, one learned column. For
            frequencies of several axes.
        include_input: True or "first": coordinates come before the waves. "last": after them.
        unit: What frequencies count: "radian", "half_turn" (multiples of pi) or "turn" (of 2 pi).
            Default: "half_turn" for octaves and bands, "turn" for random, otherwise "radian".
        waves: The columns of each frequency: "sin_cos", "cos_sin", "sin" or "cos".
        order: The columns from the slowest letter to the fastest: w(ave), f(requency) and, if axes
            are apart, a(xis). Default: "waf" or "wf": all sines, then all cosines.
        centred: Coordinates are in [0, 1]; ``2 * x - 1`` is encoded.
        device, dtype: Device of frequencies; dtype of what is learned.

    Raises:
        ValueError: Not one of frequencies, octaves, bands and random, or an unknown option.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.FourierFeatures(preset="nerf")(torch.rand(1024, 3)).shape
        torch.Size([1024, 63])
        >>> years = pe.FourierFeatures(torch.tensor([1.0, 12.0]) / 31_556_952, unit="turn")
        >>> years(torch.tensor([[1_700_000_000]])).shape
        torch.Size([1, 4])
    """

    frequencies: Tensor
    """float64 [1 or 2, n] if axes are apart, whose sum over rows counts; otherwise [axes, n]."""
    phases: Tensor | None
    """[n], in radians."""
    linear_weight: Tensor | None
    """[axes, 1]."""
    linear_bias: Tensor | None
    """[1]."""

    def __init__(
        self,
        frequencies: Tensor | None = None,
        *,
        preset: str | None = None,
        octaves: int | None = None,
        bands: tuple[int, float] | None = None,
        random: Sequence[Any] | None = None,
        phases: Tensor | None = None,
        learned: bool | None = None,
        linear: bool | None = None,
        include_input: bool | Literal["", "first", "last"] | None = None,
        unit: FourierUnit | None = None,
        waves: FourierWaves | None = None,
        order: str | None = None,
        centred: bool | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if value is not None}
        super().__init__()
        options = _resolved(given)
        values, self.source = _frequencies(options)
        series = "octaves" in options or "bands" in options
        self.apart = series or (
            "frequencies" in options and getattr(options["frequencies"], "ndim", 0) == 1
        )
        usual = "half_turn" if series else "turn" if "random" in options else "radian"
        self.unit: FourierUnit = options.get("unit", usual)
        self.waves: FourierWaves = options.get("waves", "sin_cos")
        self.order = options.get("order") or ("waf" if self.apart else "wf")
        if ("a" in self.order) != self.apart:
            letters = "a, f and w" if self.apart else "f and w"
            raise ValueError(f"order: expected the letters {letters}, got {shown(self.order)}")
        self.learned = flag("learned", options.get("learned", False))
        self.linear = flag("linear", options.get("linear", False))
        self.centred = flag("centred", options.get("centred", False))
        given_input = options.get("include_input") or ""
        self.include_input = "first" if given_input is True else given_input
        if self.include_input not in ("", "first", "last"):
            raise ValueError(f"include_input: expected 'first' or 'last', got {shown(given_input)}")
        if self.linear and self.apart:
            raise ValueError("linear: expected frequencies [axes, n] or random")
        self._initial = {"frequencies": values}
        if phases is not None:
            self._initial["phases"] = _copy(phases)
        elif self.learned:
            self._initial["phases"] = torch.zeros(values.shape[1], device="cpu")
        if self.learned and self.apart:
            self._initial["frequencies"] = values.sum(0, keepdim=True)
        if self.linear:
            self._initial["linear_weight"] = torch.zeros(values.shape[0], 1, device="cpu")
            self._initial["linear_bias"] = torch.zeros(1, device="cpu")
        self._register(series, device, dtype)
        axes = 1 if self.apart else values.shape[0]
        start = self._initial.get("phases")
        functional.fourier_features(  # checks the options
            torch.empty(0, axes, device="meta"),
            values.to("meta"),
            None if start is None else start.to("meta"),
            unit=self.unit,
            waves=self.waves,
            order=self.order,
        )

    def _register(self, series: bool, device: Device | None, dtype: torch.dtype | None) -> None:
        """Makes parameters of what is trained and buffers of the rest."""
        kind = torch.get_default_dtype() if dtype is None else dtype
        place = torch.get_default_device() if device is None else device
        for name in ("frequencies", "phases", "linear_weight", "linear_bias"):
            start = self._initial.get(name)
            if start is not None and (self.learned or name.startswith("linear")):
                empty = torch.empty(start.shape, device=place, dtype=kind)
                self.register_parameter(name, nn.Parameter(empty))
            else:
                buffer = None if start is None else start.to(place, copy=True)
                derived = series and name == "frequencies"
                self.register_buffer(name, buffer, persistent=not derived)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets parameters to their initial values: drawn frequencies to those drawn first."""
        for name, start in self._initial.items():
            tensor = getattr(self, name)
            if isinstance(tensor, nn.Parameter):
                set_values(tensor, start)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the module and casts its parameters; buffers keep their values in float64."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            now = self._buffers[name]
            if old is not None and now is not None:
                values = self._initial[name] if old.is_meta else old
                self._buffers[name] = values.to(now.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        """Takes SAM's matrix, and assigned tensors of any dtype, which move a module off meta."""
        for name in _MATRICES:
            if prefix + name in state_dict:
                state_dict[f"{prefix}frequencies"] = state_dict.pop(prefix + name)
        for name, buffer in self._buffers.items():
            given = state_dict.get(prefix + name)
            if buffer is not None and isinstance(given, Tensor):
                state_dict[prefix + name] = given.double()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        start, buffer = self._initial["frequencies"], self._buffers.get("frequencies")
        assigned = local_metadata.get("assign_to_params_buffers", False)
        if assigned and buffer is not None and buffer.is_meta:  # octaves, bands
            found = next((x for x in state_dict.values() if isinstance(x, Tensor)), None)
            device = torch.get_default_device() if found is None else found.device
            self._buffers["frequencies"] = start.to(device)

    def forward(
        self, coordinates: Tensor, x: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The features [..., columns] of coordinates [..., axes], added to x if it is given.

        Arguments and errors are those of :func:`posembed.functional.fourier_features`.
        """
        check_tensors(coordinates=coordinates)
        alone = not (self.linear or self.include_input)
        if x is not None:
            kind = x.dtype
        else:
            usual = coordinates.dtype if coordinates.is_floating_point() else torch.float32
            kind = usual if dtype is None else dtype
        places = coordinates  # of 16 bits: the operator refuses them
        if self.centred and places.element_size() > 2:
            places = places.double() * 2 - 1
        # AOTInductor of torch 2.11 misreads dtypes of operators: pytorch/pytorch#169157.
        own = places.dtype if places.is_floating_point() else torch.float32
        wanted = dtype if x is not None and alone else kind
        given = (places, self.frequencies, self.phases, x if alone else None)
        kinds = (self.unit, self.waves, self.order, None if x is None and wanted == own else wanted)
        waves = features(*given, *kinds)
        if alone:
            return waves
        columns = [waves]
        if self.include_input:
            columns.insert(0 if self.include_input == "first" else 1, places.to(kind))
        if self.linear_weight is not None and self.linear_bias is not None:
            line = places.double() @ self.linear_weight.double() + self.linear_bias
            columns.insert(0, line.to(kind))
        result = torch.cat(columns, -1)
        return result if x is None else x + result

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        text = f"{self.source}, unit={self.unit!r}, waves={self.waves!r}, order={self.order!r}"
        for name in ("learned", "linear", "centred"):
            text += f", {name}=True" * getattr(self, name)
        return text + f", include_input={self.include_input!r}" * bool(self.include_input)


def _copy(numbers: Tensor) -> Tensor:
    """The numbers in float64 on the CPU, even if the default device is meta."""
    return torch.as_tensor(numbers, device="cpu").detach().to("cpu", torch.float64, copy=True)


def _resolved(given: dict[str, Any]) -> dict[str, Any]:
    """The options that are given, over those of the preset."""
    preset = given.get("preset")
    if preset is not None:
        one_of("preset", preset, *_PRESETS)
    options = dict(_PRESETS[preset]) if preset is not None else {}
    if any(name in given for name in _SOURCES):
        options = {name: value for name, value in options.items() if name not in _SOURCES}
    options.update(given)
    found = [name for name in _SOURCES if name in options]
    if len(found) != 1:
        raise ValueError(
            f"frequencies: expected one of frequencies, octaves, bands and random, got {found}"
        )
    return options


def _frequencies(options: dict[str, Any]) -> tuple[Tensor, str]:
    """float64 [parts or axes, n], and what they are, for extra_repr."""
    if "octaves" in options:
        count = positive("octaves", options["octaves"])
        if count > 50:  # the operator accepts no higher frequencies
            raise ValueError(f"octaves: expected 1 to 50, got {count}")
        powers = [2.0**k for k in range(count)]
        return torch.tensor([powers], dtype=torch.float64, device="cpu"), f"octaves={count}"
    if "bands" in options:
        given = options["bands"]
        if not isinstance(given, Sequence) or len(given) != 2:
            raise ValueError(f"bands: expected (n, rate), got {shown(given)}")
        count, rate = positive("bands", options["bands"][0]), finite("bands", options["bands"][1])
        bands = functional.fourier_bands(1.0, rate / 2, count)
        return bands, f"bands=({count}, {rate:g})"
    if "random" in options:
        given = options["random"]
        if not isinstance(given, Sequence) or len(given) not in (2, 3, 4):
            raise ValueError(f"random: expected (axes, n, scale, seed), got {shown(given)}")
        axes, n, scale, seed = tuple(given) + (1.0, None)[len(given) - 2 :]
        axes, n, scale = positive("random", axes), positive("random", n), finite("random", scale)
        generator = None if seed is None else torch.Generator().manual_seed(whole("random", seed))
        drawn = torch.randn(axes, n, generator=generator, dtype=torch.float64, device="cpu")
        return drawn * scale, f"random=({axes}, {n}, {scale:g})"
    check_tensors(frequencies=options["frequencies"])
    matrix = _copy(options["frequencies"])
    shape = list(matrix.shape)
    if len(shape) not in (1, 2):
        raise ValueError(f"frequencies: expected [n] or [axes, n], got {shape}")
    return matrix.reshape(-1, shape[-1]), f"frequencies={shape}"
