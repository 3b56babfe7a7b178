"""Gradient norms of parameters and layers over any number of batches, as if they had been one.

The loss is the mean over all pictures: a batch of n out of N pictures enters with the weight n / N, so the
figures do not depend on the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hookscope.hooks import Needs, Probe
from hookscope.layers import Site
from hookscope.magnitudes import Magnitude, joined, magnitude, scaled


class GradNormProbe(Probe):
    """Sums up the gradients of one objective; read it by the methods below the callbacks.

    Args:
        objective: its name.
        layers: layers whose outputs and inputs are measured (`None`: all attached).
    """

    needs = Needs(gradients=True, input_gradients=True, param_gradients=True)

    def __init__(self, objective: str = "loss", layers: frozenset[str] | None = None) -> None:
        self.layers = layers
        self.objectives = frozenset({objective})
        self.pictures = 0
        self.batches = 0
        self.loss = 0.0
        self.sites: dict[Site, None] = {}
        self._batch = 0
        self._params: dict[str, tuple[Tensor, int]] = {}
        self._outputs: dict[Site, Magnitude] = {}
        self._inputs: dict[Site, Magnitude] = {}
        self._latest: tuple[Tensor, Magnitude] | None = None

    def begin(self, pictures: int) -> None:
        self._batch = pictures
        self._latest = None

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        self._outputs[site] = joined(self._outputs.get(site), self._measured(tensor))

    def on_input_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        call = Site(site.layer, site.call)
        self._inputs[call] = joined(self._inputs.get(call), self._measured(tensor))

    def on_param_gradient(self, name: str, tensor: Tensor | None, objective: str) -> None:
        if tensor is None:
            return
        held = self._params.get(name)
        if held is None:
            self._params[name] = (tensor, self._batch)
            return
        # A running mean in float32 at least: a sum of many halves would stall or overflow. Never in place: autograd
        # may hand out one tensor as the gradient of two parameters.
        mean, seen = held
        share = self._batch / (seen + self._batch)
        self._params[name] = (torch.lerp(_wide(mean), _wide(tensor), share), seen + self._batch)

    def finish_batch(self, sites: Iterable[Site], loss: float) -> None:
        """The batch is done: `sites` in the order in which their calls ended, `loss` its mean over the batch."""
        self.pictures += self._batch
        self.batches += 1
        self.loss += loss * self._batch
        self.sites.update(dict.fromkeys(site for site in sites if self.hears(site.layer)))
        self._latest = None

    def mean_loss(self) -> float:
        """The loss over all pictures."""
        return self.loss / self.pictures if self.pictures else math.nan

    def param_gradient(self, name: str) -> Magnitude | None:
        """The size of the parameter's gradient; `None` where there never was one."""
        held = self._params.get(name)
        return None if held is None else scaled(magnitude(held[0]), held[1] / self.pictures)

    def output_gradient(self, site: Site) -> Magnitude | None:
        """The size of the gradient of what the layer returned, over all pictures; `None` where none came."""
        return self._scaled(self._outputs.get(site))

    def input_gradient(self, site: Site) -> Magnitude | None:
        """The size of the total gradient of all that the call received; `None` where none came."""
        return self._scaled(self._inputs.get(Site(site.layer, site.call)))

    def _scaled(self, size: Magnitude | None) -> Magnitude | None:
        return None if size is None else scaled(size, 1 / self.pictures)

    def _measured(self, tensor: Tensor) -> Magnitude:
        """The magnitude times the batch's weight; a tensor that several sites share is measured once."""
        if self._latest is None or not _same(self._latest[0], tensor):
            self._latest = (tensor, scaled(magnitude(tensor, largest=False), self._batch))
        return self._latest[1]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors alive at once are the same values in the same memory."""
    same_memory = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same_memory and one.shape == other.shape and one.dtype == other.dtype
