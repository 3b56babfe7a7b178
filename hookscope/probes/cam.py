"""Class-activation maps: the activation is kept when it passes, and becomes a map when its gradient does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.artifacts import MapStatus
from hookscope.cam.methods import Method
from hookscope.hooks import Needs, Probe
from hookscope.layers import Site
from hookscope.layouts import is_spatial, to_nchw
from hookscope.probes.featuremaps import Infos


@dataclass(frozen=True)
class SiteMap:
    """One raw map: `values` (h, w) float32, >= 0, at the layer's resolution.

    `minimum`, `maximum`: of the finite values; of a `negative-only` map, before its ReLU.
    """

    image: int
    site: Site
    method: str
    objective: str
    values: NDArray[np.float32]
    minimum: float
    maximum: float
    status: MapStatus


@dataclass(frozen=True)
class _Made:
    values: Tensor
    minimum: float
    maximum: float
    status: MapStatus


class CamProbe(Probe):
    """Makes a map of every picture, spatial site, method and objective.

    Args:
        layers: names of the layers to explain by.
        infos: what is known of a site; one that is not spatial is left out.
        methods: how to make a map.
        objectives: names of the objectives to explain.
    """

    needs = Needs(outputs=True, gradients=True)

    def __init__(
        self, layers: frozenset[str], infos: Infos, methods: Sequence[Method], objectives: frozenset[str]
    ) -> None:
        self.layers = layers
        self.objectives = self._wanted = objectives
        self._infos = infos
        self._methods = tuple(methods)
        self._pictures = 0
        self._activations: dict[Site, Tensor] = {}
        self._maps: dict[tuple[Site, str, str], list[_Made]] = {}

    def begin(self, pictures: int) -> None:
        self._pictures = pictures
        self._activations.clear()
        self._maps.clear()

    def on_output(self, site: Site, tensor: Tensor) -> None:
        info = self._infos(site)
        if info is not None and is_spatial(info) and tensor.shape[0] == self._pictures:
            # A true copy: to() alone would hand back the model's own tensor when it is float32 already.
            self._activations[site] = to_nchw(tensor, info.layout, info.grid).to(torch.float32, copy=True)

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        info, activation = self._infos(site), self._activations.get(site)
        if info is None or activation is None:
            return
        gradient = to_nchw(tensor, info.layout, info.grid).float()
        flat = (gradient.abs().amax(dim=(1, 2, 3)) == 0).tolist()
        for method in self._methods:
            raw = method.compute(activation, gradient)
            made = [_judged(raw[i].cpu(), zero_gradient=flat[i]) for i in range(len(flat))]
            self._maps[site, method.name, objective] = made

    def fill(self, unreached: Mapping[str, frozenset[Site]], unobservable: frozenset[Site]) -> None:
        """Give a map to sites whose gradient never came: zero where there is none, undefined where it is not seen."""
        for objective in self._wanted:
            for site in unreached.get(objective, frozenset()) & self._activations.keys():
                self._fill(site, objective, 0.0, MapStatus.ZERO_GRADIENT)
            for site in unobservable & self._activations.keys():
                self._fill(site, objective, float("nan"), MapStatus.UNDEFINED)

    def _fill(self, site: Site, objective: str, value: float, status: MapStatus) -> None:
        pictures, _, height, width = self._activations[site].shape
        made = [_Made(torch.full((height, width), value), value, value, status)] * pictures
        for method in self._methods:
            self._maps[site, method.name, objective] = made

    def artifacts(self) -> Iterator[SiteMap]:
        """The maps of the latest batch: by picture, then objective, layer and method."""
        ordered = sorted(self._maps.items(), key=lambda item: self._place(*item[0]))
        for image in range(self._pictures if ordered else 0):
            for (site, method, objective), made in ordered:
                one = made[image]
                yield SiteMap(
                    image, site, method, objective, one.values.numpy(), one.minimum, one.maximum, one.status
                )
        self._activations.clear()
        self._maps = {}

    def _place(self, site: Site, method: str, objective: str) -> tuple[int, int, int]:
        """Gradients come last layer first; people read the other way."""
        names = [known.name for known in self._methods]
        objectives = list(dict.fromkeys(known for _, _, known in self._maps))
        return objectives.index(objective), list(self._activations).index(site), names.index(method)


class GradientReachProbe(Probe):
    """Which spatial sites a score really depends on: at which positions on the picture the gradient is not zero."""

    needs = Needs(gradients=True)

    def __init__(self, layers: frozenset[str], infos: Infos) -> None:
        self.layers = layers
        self.depended_on: set[Site] = set()
        self._infos = infos

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        info = self._infos(site)
        if info is not None and is_spatial(info) and to_nchw(tensor, info.layout, info.grid).any():
            self.depended_on.add(site)


def _judged(raw: Tensor, *, zero_gradient: bool) -> _Made:
    """A signed (h, w) map after its ReLU, and what it means.

    The range is that of the values kept; of a map with nothing above zero it is the signed one, which says more.
    """
    finite = raw[raw.isfinite()]
    low, high = (float(value) for value in finite.aminmax()) if finite.numel() else (np.nan, np.nan)
    kept = raw.clamp(min=0)
    if finite.numel() < raw.numel():
        return _Made(kept, max(low, 0.0), max(high, 0.0), MapStatus.NON_FINITE)
    if zero_gradient:
        return _Made(kept, 0.0, 0.0, MapStatus.ZERO_GRADIENT)
    if high <= 0:
        return _Made(kept, low, high, MapStatus.NEGATIVE_ONLY if low < 0 else MapStatus.BLANK)
    return _Made(kept, max(low, 0.0), high, MapStatus.OK)
