"""Class-activation maps: the activation is kept when it passes, and becomes a map when its gradient does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hookscope.cam.methods import Kind, Method
from hookscope.hooks import Needs, Probe
from hookscope.layers import ROOT, Site
from hookscope.layouts import is_spatial, to_nchw
from hookscope.probes.featuremaps import Infos


@dataclass(frozen=True)
class Key:
    """Which map: of which site, by which method, of which objective (`None`: of none, it is the same for all)."""

    site: Site
    method: str
    objective: str | None


@dataclass(frozen=True)
class Raw:
    """The maps of a batch: `values` (N, h, w) float32, signed, on the CPU.

    `flat`: for every picture, whether the gradient that its map is made of is zero everywhere. `defined`: whether
    the gradient could be seen; where it could not, the values are not numbers.
    """

    values: Tensor
    flat: tuple[bool, ...]
    defined: bool = True


Check = Callable[[Site, Tensor, Tensor, str], None]
"""Told site, activation, gradient (N, C, h, w) and objective before `cam` is made; raises where it has no meaning."""


class CamProbe(Probe):
    """Keeps the activations of spatial sites and makes a map of every site, method and objective.

    `activations`: (N, C, h, w) float32 by site, in the order in which the calls ended, of the latest batch.
    `maps`: those of the latest batch that one pass can give.

    Args:
        layers: names of the layers to explain by.
        infos: what is known of a site; one that is not spatial is left out.
        methods: how to make a map; those that need further passes are left to others.
        check: whether a head is such that `cam` has a meaning.
    """

    def __init__(
        self,
        layers: frozenset[str],
        infos: Infos,
        methods: Sequence[Method],
        check: Check | None = None,
    ) -> None:
        self.layers = layers
        self.activations: dict[Site, Tensor] = {}
        self.maps: dict[Key, Raw] = {}
        self._infos = infos
        self._check = check
        self._by_gradient = tuple(method for method in methods if method.kind is Kind.GRADIENT)
        self._by_activation = tuple(method for method in methods if method.kind is Kind.ACTIVATION)
        self.needs = Needs(outputs=bool(methods), gradients=bool(self._by_gradient))
        self._pictures = 0

    def begin(self, pictures: int) -> None:
        self._pictures = pictures
        self.forget()

    def forget(self) -> None:
        """Let go of the latest batch."""
        self.activations = {}
        self.maps = {}

    def on_output(self, site: Site, tensor: Tensor) -> None:
        info = self._infos(site)
        if info is None or not is_spatial(info) or tensor.shape[0] != self._pictures:
            return
        # A true copy: to() alone would hand back the model's own tensor when it is float32 already.
        activation = to_nchw(tensor, info.layout, info.grid).to(torch.float32, copy=True)
        self.activations[site] = activation
        for method in self._by_activation:
            made = method.compute(activation)
            self.maps[Key(site, method.name, None)] = Raw(made.float().cpu(), (False,) * len(made))

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        info, activation = self._infos(site), self.activations.get(site)
        if info is None or activation is None:
            return
        gradient = to_nchw(tensor, info.layout, info.grid).float()
        flat = flat_pictures(gradient)
        for method in self._by_gradient:
            if method.name == "cam" and self._check is not None:
                self._check(site, activation, gradient, objective)
            made = method.compute(activation, gradient)
            self.maps[Key(site, method.name, objective)] = Raw(made.float().cpu(), flat)

    def fill(
        self,
        methods: Sequence[Method],
        unreached: Mapping[str, frozenset[Site]],
        unobservable: frozenset[Site],
    ) -> None:
        """Give a map to sites whose gradient never came: zero where there is none, undefined where it is not seen."""
        for objective, sites in unreached.items():
            if not self.follows(objective):
                continue
            for site in sites & self.activations.keys():
                self._fill(site, methods, objective, 0.0)
            for site in unobservable & self.activations.keys():
                self._fill(site, methods, objective, float("nan"))

    def _fill(self, site: Site, methods: Sequence[Method], objective: str, value: float) -> None:
        pictures, _, height, width = self.activations[site].shape
        raw = Raw(torch.full((pictures, height, width), value), (value == 0,) * pictures, value == 0)
        for method in methods:
            self.maps[Key(site, method.name, objective)] = raw


class MomentsProbe(Probe):
    """Sums over passes of the gradient, its square and its cube: (N, C, h, w) float64 by site and objective."""

    needs = Needs(gradients=True)

    def __init__(self, layers: frozenset[str], infos: Infos) -> None:
        self.layers = layers
        self.sums: dict[tuple[Site, str], tuple[Tensor, Tensor, Tensor]] = {}
        self._infos = infos

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        info = self._infos(site)
        if info is None or not is_spatial(info):
            return
        gradient = to_nchw(tensor, info.layout, info.grid).double()
        powers = (gradient, gradient**2, gradient**3)
        sums = self.sums.get((site, objective))
        if sums is None:
            self.sums[site, objective] = powers[0].clone(), powers[1], powers[2]
        else:
            for total, power in zip(sums, powers, strict=True):
                total += power


class InputGradientProbe(Probe):
    """The sum over passes of the gradient at the model's input: (N, C, H, W) float32 by objective."""

    needs = Needs(input_gradients=True)
    layers = frozenset({ROOT})

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def on_input_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        if site != Site(ROOT, 0, "0"):
            return
        if objective in self.sums:
            self.sums[objective] += tensor.float()
        else:
            self.sums[objective] = tensor.to(torch.float32, copy=True)


class BiasProbe(Probe):
    """The gradient at every layer that has a bias, times the bias: (N, C, h, w) float32, a list by objective.

    Args:
        biases: (C,) by the layer's name.
        infos: what is known of a site; one that is not spatial is left out.
    """

    needs = Needs(gradients=True)

    def __init__(self, biases: Mapping[str, Tensor], infos: Infos) -> None:
        self.layers = frozenset(biases)
        self.terms: dict[str, list[Tensor]] = {}
        self._biases = biases
        self._infos = infos

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        info, bias = self._infos(site), self._biases[site.layer]
        if info is None or not is_spatial(info):
            return
        gradient = to_nchw(tensor, info.layout, info.grid).float()
        if gradient.shape[1] == len(bias):
            self.terms.setdefault(objective, []).append(gradient * bias.to(gradient)[:, None, None])


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


def flat_pictures(gradient: Tensor) -> tuple[bool, ...]:
    """For every picture, whether its gradient (N, ...) is zero everywhere."""
    axes = tuple(range(1, gradient.dim()))
    return tuple((gradient.abs().amax(dim=axes) == 0).tolist())
