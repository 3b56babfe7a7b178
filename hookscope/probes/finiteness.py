"""Where in a pass something first was not finite: which layer, going forward or back, and what made it so.

Told of tensors by a probe, it keeps no more than it needs to name one layer in each direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.layers import ROOT, Site, modules_by_name
from hookscope.magnitudes import Magnitude, non_finite_entries, same_memory

FORWARD, BACKWARD = "forward", "backward"

CAUSES = {
    "parameter": "a parameter or buffer of its own is not finite",
    "received": "what it received was not finite already, and no layer before it had returned that: it is the "
    "model's input, or was made between layers",
    "layer": "it made them itself, or an operation inside it did that is no layer",
    "after": "an operation between this layer and the next made them",
    "loss": "they were so from the start: the loss, or an operation after the last layer, made them",
    "own": "the gradient of its own parameters is not finite, though those of its output and input are",
}
"""What made something not finite, by name, in words."""

Call = tuple[str, int]


@dataclass(frozen=True)
class FirstNonFinite:
    """The first layer at which something was not finite, in the first batch that had such a thing.

    Forward: `site` is the first output, in the order in which calls ended, with an entry that is not finite; `cause`
    is `parameter` (`parameters` names them), `received` or `layer`. Backward: gradients are followed in the order in
    which they came, from the loss on; `cause` is `loss` where none came before; `layer` where `site` got a finite
    gradient at its output and its input's is not finite; `after` where the gradient at the output of `site` is not
    finite and no layer with a finite one received that output; `own` where only gradients of parameters are not
    finite. `others`: more layers of which the same is true, such as those around it, or those that share its input:
    where it is the operations of one of these that are at fault, the gradients do not tell. `batch` counts from 0;
    `non_finite` of `count` entries.
    """

    direction: str
    site: Site
    cause: str
    batch: int
    non_finite: int
    count: int
    parameters: tuple[str, ...] = ()
    others: tuple[Site, ...] = ()

    @property
    def why(self) -> str:
        """The cause in words."""
        return CAUSES[self.cause]


@dataclass
class _Event:
    """A gradient that is not finite, and all sites that it is the gradient of."""

    tensor: Tensor
    size: Magnitude
    outputs: list[Site] = field(default_factory=list)
    inputs: list[Site] = field(default_factory=list)


class Finiteness:
    """Finds the first layer that is not finite each way, in batches told one after the other."""

    def __init__(self) -> None:
        self.forward: FirstNonFinite | None = None
        self.backward: FirstNonFinite | None = None
        self.begin(0)

    def begin(self, batch: int) -> None:
        """The batch of that number is about to pass."""
        self._batch = batch
        self._ended: dict[Call, int] = {}
        self._received: set[Call] = set()
        self._passed: set[Call] = set()
        self._came = False
        self._event: _Event | None = None
        self._latest: tuple[Tensor, int, int] | None = None

    def received(self, site: Site, tensor: Tensor) -> None:
        """What a layer is about to be called with."""
        if self.forward is None and self._entries(tensor):
            self._received.add(_call(site))

    def returned(self, site: Site, tensor: Tensor) -> None:
        """What a layer returned."""
        self._ended.setdefault(_call(site), len(self._ended))
        if self.forward is None and (entries := self._entries(tensor)):
            cause = "received" if _call(site) in self._received else "layer"
            self.forward = FirstNonFinite(FORWARD, site, cause, self._batch, entries, tensor.numel())

    def gradient(self, site: Site, tensor: Tensor, size: Magnitude, *, of_output: bool) -> None:
        """A gradient came, of what a layer returned or received; those of one tensor come one after the other."""
        if self.backward is not None:
            return
        if self._event is not None and not same_memory(self._event.tensor, tensor):
            self._conclude(self._event)
        elif self._event is not None or size.non_finite:
            self._event = self._event or _Event(tensor, size)
            (self._event.outputs if of_output else self._event.inputs).append(site)
        else:
            self._came = True
            if of_output:
                self._passed.add(_call(site))

    def finish(self, parameters: Mapping[str, Magnitude]) -> None:
        """The batch is done, with these gradients of parameters by name."""
        if self.backward is None and self._event is not None:
            self._conclude(self._event)
        elif self.backward is None:
            self._look_at_parameters({name: size for name, size in parameters.items() if size.non_finite})
        self._event = self._latest = None

    def _entries(self, tensor: Tensor) -> int:
        """Entries that are not finite; a layer mostly receives what the one before it returned, counted once."""
        held = self._latest
        if held is None or held[1] != tensor._version or not same_memory(held[0], tensor):
            held = self._latest = (tensor, tensor._version, non_finite_entries(tensor))
        return held[2]

    def _conclude(self, event: _Event) -> None:
        self._event = None
        made = [site for site in event.inputs if _call(site) in self._passed]
        made.sort(key=lambda site: self._ended.get(_call(site), 0))
        if not self._came:
            cause, sites = "loss", event.outputs or event.inputs
        elif made or not event.outputs:
            cause, sites = "layer", [Site(*_call(site)) for site in made or event.inputs]
        else:
            cause, sites = "after", event.outputs
        first, *others = dict.fromkeys(sites)
        size = event.size
        self.backward = FirstNonFinite(
            BACKWARD, first, cause, self._batch, size.non_finite, size.count, others=tuple(others)
        )

    def _look_at_parameters(self, broken: Mapping[str, Magnitude]) -> None:
        if not broken:
            return
        last = {layer: (ended, call) for (layer, call), ended in self._ended.items()}
        layer = max((layer_of(name) for name in broken), key=lambda layer: last.get(layer, (-1, 0)))
        own = {name: size for name, size in broken.items() if layer_of(name) == layer}
        entries = sum(size.non_finite for size in own.values())
        count = sum(size.count for size in own.values())
        site = Site(layer, last.get(layer, (-1, 0))[1])
        self.backward = FirstNonFinite(BACKWARD, site, "own", self._batch, entries, count, tuple(own))


def layer_of(parameter: str) -> str:
    """The layer that the parameter of that name belongs to."""
    return parameter.rpartition(".")[0] or ROOT


def blamed(found: FirstNonFinite | None, model: nn.Module) -> FirstNonFinite | None:
    """The same, with the parameters and buffers of the layer that are not finite themselves, where there are any."""
    module = modules_by_name(model).get(found.site.layer) if found else None
    if found is None or module is None or found.direction == BACKWARD:
        return found
    prefix = "" if found.site.layer == ROOT else found.site.layer
    tensors = chain(module.named_parameters(prefix), module.named_buffers(prefix))
    broken = tuple(name for name, tensor in tensors if not is_lazy(tensor) and non_finite_entries(tensor))
    return replace(found, cause="parameter", parameters=broken) if broken else found


def _call(site: Site) -> Call:
    return site.layer, site.call
