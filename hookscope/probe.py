"""What a probe is: what it may ask for, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hookscope.layers import Site


@dataclass(frozen=True)
class Needs:
    """What a probe must be told: nothing is computed or kept for what no probe needs."""

    inputs: bool = False
    outputs: bool = False
    gradients: bool = False
    input_gradients: bool = False
    param_gradients: bool = False


class Probe:
    """A streaming reducer: told of values as they pass, it reduces or copies them at once.

    A tensor handed over is the model's own live value, without a graph: it may be overwritten as soon as the
    call returns, and must not be written to. `layers` and `objectives` narrow what a probe hears of
    (`None`: everything).
    """

    needs: Needs = Needs()
    layers: frozenset[str] | None = None
    objectives: frozenset[str] | None = None

    def begin(self, pictures: int) -> None:
        """A forward pass over `pictures` pictures is about to start."""

    def on_input(self, site: Site, tensor: Tensor) -> None:
        """A tensor that the layer receives, before any in-place op; `site.output` is its argument's path."""

    def on_output(self, site: Site, tensor: Tensor) -> None:
        """A tensor that the layer returned."""

    def on_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        """The gradient of `objective` with respect to what the layer returned."""

    def on_input_gradient(self, site: Site, tensor: Tensor, objective: str) -> None:
        """The total gradient with respect to what the layer received, through every use of it."""

    def on_param_gradient(self, name: str, tensor: Tensor | None, objective: str) -> None:
        """The gradient with respect to a trainable parameter; `None` where no path leads to it."""

    def hears(self, layer: str) -> bool:
        """Whether the probe wants to be told of a layer."""
        return self.layers is None or layer in self.layers

    def follows(self, objective: str) -> bool:
        """Whether the probe wants to be told of an objective's gradients."""
        return self.objectives is None or objective in self.objectives


@dataclass(frozen=True)
class Heard:
    """The probes that want to be told of a layer's inputs, outputs and output gradients."""

    inputs: Sequence[Probe]
    outputs: Sequence[Probe]
    gradients: Sequence[Probe]


class Audience:
    """Who among the probes listens to which layer."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._probes = tuple(probes)
        self._heard: dict[str, Heard] = {}

    def of(self, layer: str) -> Heard:
        """The probes that listen to the layer, found out once."""
        heard = self._heard.get(layer)
        if heard is None:
            probes = [probe for probe in self._probes if probe.hears(layer)]
            heard = self._heard[layer] = Heard(
                inputs=[probe for probe in probes if probe.needs.inputs or probe.needs.input_gradients],
                outputs=[probe for probe in probes if probe.needs.outputs],
                gradients=[probe for probe in probes if probe.needs.gradients],
            )
        return heard
