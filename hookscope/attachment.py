"""What is known of a block in which hooks are attached: what passed by in the latest pass, and who is told of it.

Registers nothing itself: `hooks` calls it before and after the layers, and hands in how a tensor is hooked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy

from hookscope.cutting import Cut
from hookscope.edits import Edit, Editing, storage, storages
from hookscope.errors import UsageError
from hookscope.layers import Site, Status
from hookscope.nested import rebuilt, tensors_in
from hookscope.probe import Audience, Probe
from hookscope.stopping import Awaited, Stop
from hookscope.threads import OwnThread, open_calls, recomputing
from hookscope.turns import TURNS
from hookscope.watching import Deliver, Listener, Watches, bridged, is_private


class Attachment:
    """What the hooks of one `attached()` block saw during the latest forward pass.

    `sites`: the tensors that layers returned, in the order in which the calls ended. `calls`: how often each layer
    was called. `unobservable`: sites whose gradient was not seen and may yet be there: the output is a view, and an
    in-place op takes a view's own node out of the graph. `cut`: where the graph starts, `None` for all of it.
    `thread`: whose passes are seen.

    Only passes of the thread that made it count: those of others are neither seen nor edited.

    Args:
        model: the model itself, without wrappers.
        probes: who is told.
        edits: what is changed before they are.
        hooked: registers a function on a tensor and returns the handle.
    """

    def __init__(
        self,
        model: nn.Module,
        probes: Sequence[Probe],
        edits: Sequence[Edit],
        hooked: Callable[[Tensor, Deliver], Any],
    ) -> None:
        self.model = model
        self.probes = tuple(probes)
        self.cut: Cut | None = None
        self.sites: list[Site] = []
        self.calls: dict[str, int] = {}
        self.unobservable: set[Site] = set()
        self._bridges_all = any(probe.needs.input_gradients for probe in probes)
        self._follows_gradients = self._bridges_all or any(
            probe.needs.gradients or probe.needs.param_gradients for probe in probes
        )
        self.editing = Editing(model, edits, self._looking)
        self._open: dict[str, list[int]] = {}
        self._audience = Audience(probes)
        self._depth = 0
        self._turns = 0
        self._muted = 0
        self._awaited = Awaited()
        self.thread = OwnThread()
        self._watches = Watches(hooked, self._telling)
        self._roots: list[GradientEdge] = []

    def differentiate(self, objective: str, scalar: Tensor, *, keep_graph: bool = False) -> frozenset[Site]:
        """Run one backward pass and tell the probes that follow `objective`; returns the sites it reached.

        Only as much of the graph is walked as those probes need. `.grad` is never touched.
        """
        followers = [probe for probe in self.probes if probe.follows(objective)]
        param_followers = [probe for probe in followers if probe.needs.param_gradients]
        parameters = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad and not is_lazy(p)]
        parameters = parameters if param_followers else []
        # Every place that leads to a parameter or to the input is passed anyway; asking for it by name as well
        # would keep its gradient in memory.
        ends = self._roots if param_followers else self._watches.edges(followers)
        self._watches.objective, self._watches.reached = objective, set()
        try:
            leaves = [get_gradient_edge(parameter) for _, parameter in parameters]
            gradients = self._gradients(scalar, [*ends, *leaves], keep_graph=keep_graph)
        finally:
            self._watches.objective = "loss"
        self.unobservable |= self._watches.lost()
        for (name, _), gradient in zip(parameters, gradients[len(ends) :], strict=True):
            for probe in param_followers:
                probe.on_param_gradient(name, gradient, objective)
        return frozenset(self._watches.reached)

    def status(self, layer: str) -> Status:
        """What the forward pass made of a layer: `ok`, `not-called` or `no-tensor`."""
        if layer not in self.calls:
            return Status.NOT_CALLED
        return Status.OK if any(site.layer == layer for site in self.sites) else Status.NO_TENSOR

    def forget(self) -> None:
        """Let go of the graph and of everything kept since the last forward pass."""
        self._watches.clear()
        self._roots.clear()
        if self.cut is not None:
            self.cut.undo()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Probes hear nothing, edits change nothing, and what is known of the latest pass stays as it is.

        Raises:
            UsageError: another thread attached.
        """
        self.thread.refuse_others()
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    @contextmanager
    def until(self, sites: Iterable[Site]) -> Iterator[Awaited]:
        """A block in which a pass is left as soon as all these sites were returned; what it gives says if it was."""
        self._awaited = awaited = Awaited(sites)
        try:
            yield awaited
        except (Exception, Stop):
            # The model may have made an exception of its own of the signal.
            if not awaited.over:
                raise
        finally:
            self._awaited = Awaited()

    def begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A call of the model begins: of its own thread's passes, each starts afresh."""
        if self._deaf():
            return
        turns = TURNS.count
        self._refuse_disturbed(turns)
        self._depth += 1
        if self._depth > 1:
            # Either the model calls itself, or an interrupt left a pass whose end nobody was told.
            self._depth = open_calls(module)
        if self._depth > 1:
            return
        self._turns = turns
        self.forget()
        self.sites.clear()
        self.calls.clear()
        self.unobservable.clear()
        self._open.clear()
        self.editing.begin()
        if self.cut is not None:
            self.cut.begin()
        self._roots = [get_gradient_edge(t) for _, t in tensors_in((args, kwargs)) if t.requires_grad]

    def ends(self, output: Any) -> None:
        """A call of the model ended, or failed, with nothing as its output."""
        if self._deaf():
            return
        self._depth = max(0, self._depth - 1)
        if output is not None:
            self._refuse_disturbed(self._turns)

    def before(self, name: str, args: Any, kwargs: Any) -> None:
        """A call of a chosen layer begins."""
        if self._deaf():
            return
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        self._open.setdefault(name, []).append(call)
        if self.cut is not None and name in self.cut.at_inputs:
            self.cut.start_at_inputs(tensor for _, tensor in tensors_in((args, kwargs)))
        listeners = self._audience.of(name).inputs
        if not listeners:
            return
        followed: set[int] = set()
        for path, tensor in tensors_in((*args, kwargs) if kwargs else args):
            site = Site(name, call, path)
            for probe in listeners:
                if probe.needs.inputs:
                    with self._telling():
                        probe.on_input(site, tensor.detach())
                # One tensor given twice, as attention's query and key, has one gradient.
                if probe.needs.input_gradients and tensor.requires_grad and id(tensor) not in followed:
                    self._watches.listen(tensor, Listener(probe, site, of_output=False))
            followed.add(id(tensor))

    def after(self, name: str, args: Any, *rest: Any) -> Any:
        """A call of a chosen layer ended; `rest`: what it was given by name, and what it returned.

        Returns what the model goes on with, or `None` for the very same.

        Raises:
            Stop: nobody needs what comes after (`until`).
        """
        if self._deaf():
            return None
        *kwargs, output = rest
        opened = self._open.get(name)
        call = opened.pop() if opened else 0
        found = [(Site(name, call, path), tensor) for path, tensor in tensors_in(output)]
        self.sites.extend(site for site, _ in found)
        heard = self._audience.of(name)
        if heard.outputs:
            with self._telling():
                for site, tensor in found:
                    for probe in heard.outputs:
                        probe.on_output(site, tensor.detach())
        self._awaited.returned(site for site, _ in found)
        if not heard.gradients and not self._bridges_all:
            return None
        replaced = self._followed(found, heard.gradients, (args, *kwargs))
        return rebuilt(output, replaced) if replaced else None

    def edit_before(self, name: str, module: nn.Module, args: Any) -> Any:
        """A call of an edited layer begins; returns what it is given instead, or `None`."""
        if self._untouched():
            return None
        return self.editing.enter(name, module, args, again=recomputing())

    def edit_after(self, name: str, inputs: Any, output: Any) -> Any:
        """A call of an edited layer ended; returns what the model goes on with instead, or `None`."""
        return None if self._untouched() else self.editing.leave(name, inputs, output)

    def _refuse_disturbed(self, since: int) -> None:
        if TURNS.disturbs(self.model, since, gradients=self._follows_gradients):
            raise UsageError(
                "another thread is inspecting the model, in another mode and without gradients",
                "run it when the other is done, or let one of them have a copy",
            )

    def _gradients(
        self, scalar: Tensor, targets: Sequence[GradientEdge], *, keep_graph: bool
    ) -> tuple[Tensor | None, ...]:
        if not scalar.requires_grad or not targets:
            return (None,) * len(targets)
        return torch.autograd.grad(scalar, targets, retain_graph=keep_graph, allow_unused=True)

    def _deaf(self) -> bool:
        # Activation checkpointing runs forward again inside backward: those calls were already seen.
        return not self.thread.hears() or self._muted > 0 or self._awaited.over or recomputing()

    def _untouched(self) -> bool:
        return not self.thread.hears() or self._muted > 0 or self._awaited.over

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """As `_looking`, without a graph."""
        with self._looking(), torch.no_grad():
            yield

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """What is read does not count as read by the model; what is raised is not the model's failure."""
        reads = self.cut.reads if self.cut is not None else None
        paused = reads is not None and reads.paused
        if reads is not None:
            reads.paused = True
        try:
            yield
        except Exception as error:
            error._from_probe = True  # type: ignore[attr-defined]
            raise
        finally:
            if reads is not None:
                reads.paused = paused

    def _followed(
        self, found: Sequence[tuple[Site, Tensor]], probes: Sequence[Probe], inputs: Any
    ) -> dict[str, Tensor]:
        """Listen for the gradients at a layer's output; returns, by path, what the model must go on with."""
        floating = [(site, tensor) for site, tensor in found if tensor.is_floating_point()]
        replaced = {}
        for site, tensor in floating:
            aliased = storage(tensor) in storages(inputs)
            if probes and self.cut is not None and not tensor.requires_grad:
                self.cut.start_at_output(site.layer, tensor, alone=len(floating) == 1, aliased=aliased)
            if not tensor.requires_grad:
                continue
            # An in-place op on a view takes its node, and every hook on it, out of the graph.
            bridges = tensor._is_view() and not aliased and len(found) == 1 and is_private(tensor)
            for probe in probes:
                self._watches.listen(tensor, Listener(probe, site, of_output=True), safe=bridges)
            if bridges:
                replaced[site.output] = bridged(tensor)
        return replaced
