"""Gradient norms of parameters and layers over any number of batches, as if they had been one, and of each batch.

The loss is the mean over all pictures: a batch of n out of N pictures enters with the weight n / N, so the
figures do not depend on the batch size. Those of each batch alone are kept as a mean, maximum, minimum and last: what
is held does not grow with the number of batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from hookscope.hooks import Needs, Probe
from hookscope.layers import Site
from hookscope.magnitudes import (
    Magnitude,
    Spread,
    Spreading,
    joined,
    magnitude,
    norm_of_norms,
    same_memory,
    scaled,
)
from hookscope.probes.finiteness import Finiteness, layer_of


class GradNormProbe(Probe):
    """Sums up the gradients of one objective; read it by the methods below the callbacks.

    Args:
        objective: its name.
        layers: layers whose outputs and inputs are measured (`None`: all attached).
        norm: 1, 2 or infinity: what the spreads are of, and measured of activations beside the L2 norm.
    """

    needs = Needs(inputs=True, outputs=True, gradients=True, input_gradients=True, param_gradients=True)

    def __init__(
        self, objective: str = "loss", layers: frozenset[str] | None = None, norm: float = 2.0
    ) -> None:
        self.layers = layers
        self.objectives = frozenset({objective})
        self.norm = norm
        self.pictures = 0
        self.batches = 0
        self.loss = 0.0
        self.sites: dict[Site, None] = {}
        self.finiteness = Finiteness()
        self._losses, self._totals = Spreading(), Spreading()
        self._params: dict[str, _Mean] = {}
        self._param_spreads: dict[str, Spreading] = defaultdict(Spreading)
        self._layer_spreads: dict[str, Spreading] = defaultdict(Spreading)
        self._outputs, self._inputs = _Activations(norm), _Activations(norm)
        self.begin(0)

    def begin(self, pictures: int) -> None:
        self._batch = pictures
        self._latest: tuple[Tensor, Magnitude] | None = None
        self._own: dict[str, Magnitude] = {}
        self._outputs.begin()
        self._inputs.begin()
        self.finiteness.begin(self.batches)

    def on_input(self, site: Site, tensor: Tensor) -> None:
        self.finiteness.received(site, tensor)

    def on_output(self, site: Site, tensor: Tensor) -> None:
        self.finiteness.returned(site, tensor)

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        size = self._measured(tensor)
        self._outputs.add(site, size)
        self.finiteness.gradient(site, tensor, size, of_output=True)

    def on_input_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        size = self._measured(tensor)
        self._inputs.add(Site(site.layer, site.call), size)
        self.finiteness.gradient(site, tensor, size, of_output=False)

    def on_param_gradient(self, name: str, tensor: Tensor | None, objective: str) -> None:
        if tensor is None:
            return
        size = self._own[name] = magnitude(tensor, l1=True)
        held = self._params.get(name)
        self._params[name] = (
            held.with_batch(tensor, self._batch) if held else _Mean(tensor, self._batch, size)
        )

    def finish_batch(self, sites: Iterable[Site], loss: float) -> None:
        """The batch is done: `sites` in the order in which their calls ended, `loss` its mean over the batch."""
        self.pictures += self._batch
        self.batches += 1
        self.loss += loss * self._batch
        self._losses.add(loss)
        self.sites.update(dict.fromkeys(site for site in sites if self.hears(site.layer)))
        self._outputs.finish(self._batch)
        self._inputs.finish(self._batch)
        self._spread_parameters()
        self.finiteness.finish(self._own)
        self._latest = None

    def mean_loss(self) -> float:
        """The loss over all pictures."""
        return self.loss / self.pictures if self.pictures else math.nan

    def param_gradient(self, name: str) -> Magnitude | None:
        """The size of the parameter's mean gradient in every norm; `None` where there never was one."""
        held = self._params.get(name)
        return None if held is None else scaled(held.measured(), held.pictures / self.pictures)

    def output_gradient(self, site: Site) -> Magnitude | None:
        """The size of the gradient of what the layer returned, over all pictures; `None` where none came."""
        return self._outputs.over(self.pictures, site)

    def input_gradient(self, site: Site) -> Magnitude | None:
        """The size of the total gradient of all that the call received; `None` where none came."""
        return self._inputs.over(self.pictures, Site(site.layer, site.call))

    def loss_spread(self) -> Spread | None:
        """Of each batch's mean loss."""
        return self._losses.read()

    def total_spread(self) -> Spread | None:
        """Of the total norm of each batch's own gradient; `None` where no parameter ever had one."""
        return self._totals.read()

    def param_spread(self, name: str) -> Spread | None:
        """Of the norm of each batch's own gradient of the parameter."""
        return self._param_spreads[name].read() if name in self._param_spreads else None

    def layer_spread(self, layer: str) -> Spread | None:
        """Of the norm of each batch's own gradient of the layer's own parameters."""
        return self._layer_spreads[layer].read() if layer in self._layer_spreads else None

    def output_spread(self, site: Site) -> Spread | None:
        """Of the norm of each batch's own gradient of what the layer returned."""
        return self._outputs.spread(site)

    def input_spread(self, site: Site) -> Spread | None:
        """Of the norm of each batch's own total gradient of what the call received."""
        return self._inputs.spread(Site(site.layer, site.call))

    def _spread_parameters(self) -> None:
        norms = {name: size.of(self.norm) for name, size in self._own.items()}
        by_layer: dict[str, list[float]] = defaultdict(list)
        for name, norm in norms.items():
            self._param_spreads[name].add(norm)
            by_layer[layer_of(name)].append(norm)
        for layer, own in by_layer.items():
            self._layer_spreads[layer].add(norm_of_norms(own, self.norm))
        if norms:
            self._totals.add(norm_of_norms(norms.values(), self.norm))

    def _measured(self, tensor: Tensor) -> Magnitude:
        """The magnitude; a tensor that several sites share is measured once."""
        if self._latest is None or not same_memory(self._latest[0], tensor):
            size = magnitude(tensor, largest=self.norm == math.inf, l1=self.norm == 1)
            self._latest = (tensor, size)
        return self._latest[1]


class _Mean:
    """A parameter's mean gradient over the batches that had one, and its size where that is known."""

    def __init__(self, gradient: Tensor, pictures: int, size: Magnitude | None = None) -> None:
        self.gradient = gradient
        self.pictures = pictures
        self.size = size

    def with_batch(self, gradient: Tensor, pictures: int) -> _Mean:
        """The mean with one more batch."""
        # A running mean in float32 at least: a sum of many halves would stall or overflow. Never in place: autograd
        # may hand out one tensor as the gradient of two parameters.
        seen = self.pictures + pictures
        return _Mean(torch.lerp(_wide(self.gradient), _wide(gradient), pictures / seen), seen)

    def measured(self) -> Magnitude:
        """Its size in every norm."""
        if self.size is None:
            self.size = magnitude(self.gradient, l1=True)
        return self.size


class _Activations:
    """Sizes of gradients by site: of all batches as one, and of each batch alone."""

    def __init__(self, norm: float) -> None:
        self._norm = norm
        self._batch: dict[Site, Magnitude] = {}
        self._all: dict[Site, Magnitude] = {}
        self._spreads: dict[Site, Spreading] = defaultdict(Spreading)

    def begin(self) -> None:
        """Forget a batch that was not finished."""
        self._batch = {}

    def add(self, site: Site, size: Magnitude) -> None:
        """One more tensor of the site, in this batch."""
        self._batch[site] = joined(self._batch.get(site), size)

    def finish(self, pictures: int) -> None:
        """The batch enters with its number of pictures as the weight."""
        for site, size in self._batch.items():
            self._all[site] = joined(self._all.get(site), scaled(size, pictures))
            self._spreads[site].add(size.of(self._norm))
        self._batch = {}

    def over(self, pictures: int, site: Site) -> Magnitude | None:
        """The size over all pictures."""
        size = self._all.get(site)
        return None if size is None else scaled(size, 1 / pictures)

    def spread(self, site: Site) -> Spread | None:
        """Over the batches."""
        return self._spreads[site].read() if site in self._spreads else None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
