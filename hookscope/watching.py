"""Watching a graph: at which places of it somebody listens for a gradient, and who is told when it comes.

Registers nothing itself: `hooks` hands in how a tensor is hooked and how a probe is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hookscope.layers import Site
from hookscope.probe import Probe

Deliver = Callable[[Tensor], None]


@dataclass(frozen=True)
class Listener:
    """Who is told of a gradient, under which site, and whether it is of an output or of an input."""

    probe: Probe
    site: Site
    of_output: bool

    def tell(self, gradient: Tensor, objective: str) -> None:
        """Hand the gradient to the probe."""
        told = self.probe.on_gradient if self.of_output else self.probe.on_input_gradient
        told(self.site, gradient, objective)


@dataclass(eq=False)
class _Watch:
    """One place in the graph and all who listen there; `fragile`: a view, which an in-place op may have cut off."""

    edge: GradientEdge
    listeners: list[Listener] = field(default_factory=list)
    fragile: bool = False


class Watches:
    """The watched places of one forward pass's graph.

    `objective`: what is being differentiated. `reached`: the sites whose output's gradient came since
    `reached` was last emptied.

    Args:
        hooked: registers a function on a tensor and returns the handle.
        telling: the context in which probes are told.
    """

    def __init__(
        self,
        hooked: Callable[[Tensor, Deliver], Any],
        telling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.objective = "loss"
        self.reached: set[Site] = set()
        self._hooked = hooked
        self._telling = telling
        self._watches: dict[tuple[object, int], _Watch] = {}
        self._handles: list[Any] = []

    def listen(self, tensor: Tensor, listener: Listener, *, safe: bool = False) -> None:
        """Have a probe told of the tensor's gradient; `safe`: its node stays in the graph though it is a view."""
        edge = get_gradient_edge(tensor)
        key = (edge.node, edge.output_nr)
        watch = self._watches.get(key)
        if watch is None:
            fragile = tensor._is_view() and not tensor.is_leaf and not safe
            watch = self._watches[key] = _Watch(edge, fragile=fragile)
            self._handles.append(self._hooked(tensor, self._deliverer(watch)))
        watch.listeners.append(listener)

    def edges(self, followers: Sequence[Probe]) -> list[GradientEdge]:
        """The places at which any of these probes listens."""
        watches = self._watches.values()
        return [watch.edge for watch in watches if any(heard.probe in followers for heard in watch.listeners)]

    def lost(self) -> set[Site]:
        """Sites whose gradient did not come and may yet be there."""
        lost = (watch for watch in self._watches.values() if watch.fragile)
        return {heard.site for watch in lost for heard in watch.listeners if heard.of_output} - self.reached

    def clear(self) -> None:
        """Let go of the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watches.clear()

    def _deliverer(self, watch: _Watch) -> Deliver:
        def deliver(gradient: Tensor | None) -> None:
            if gradient is None:
                return  # what comes after has no derivative, as quantised layers
            with self._telling():
                for listener in watch.listeners:
                    if listener.of_output:
                        self.reached.add(listener.site)
                    if listener.probe.follows(self.objective):
                        listener.tell(gradient.detach(), self.objective)

        return deliver


def bridged(value: Tensor) -> Tensor:
    """The view as a tensor of its own, under the same storage and version counter.

    In-place ops on the result write where the model would have written, so its values are untouched, while the
    view's own node stays in the graph.
    """
    return _Bridge.apply(value)  # type: ignore[no-any-return]


def is_private(view: Tensor) -> bool:
    """Whether nobody can write to the view's memory but through the view: its base is known to autograd alone."""
    return view._base is not None and _base_references(view) <= _PRIVATE_REFERENCES


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _base_references(view: Tensor) -> int:
    base = view._base
    return sys.getrefcount(base)


# Of a view whose base nobody else can name.
_PRIVATE_REFERENCES = _base_references(torch.empty(1).view(1))
