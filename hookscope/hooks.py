"""Hooks: the only code that registers them.

`attached()` lets probes see values and gradients as they pass; its companion `preserved()` puts an inspected model
back as it was found. Nothing here decides what a value means, and nothing here reads, prints or writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy

from hookscope.cutting import Cut
from hookscope.eager import eager
from hookscope.edits import Edit as Edit
from hookscope.edits import Editing, storage, storages
from hookscope.layers import Selection, Site, Status, modules_by_name, select
from hookscope.nested import rebuilt, tensors_in
from hookscope.preserve import preserved as preserved
from hookscope.probe import Audience
from hookscope.probe import Needs as Needs
from hookscope.probe import Probe as Probe
from hookscope.watching import Deliver, Listener, Watches, bridged, is_private


class Attachment:
    """The hooks of one `attached()` block and what passed by during the latest forward pass.

    `sites`: the tensors that layers returned, in the order in which the calls ended. `calls`: how often each layer
    was called. `unobservable`: sites whose gradient was not seen and may yet be there: the output is a view, and an
    in-place op takes a view's own node out of the graph. `cut`: where the graph starts, `None` for all of it.
    """

    def __init__(self, model: nn.Module, probes: Sequence[Probe], edits: Sequence[Edit] = ()) -> None:
        self.model = model
        self.probes = tuple(probes)
        self.cut: Cut | None = None
        self.sites: list[Site] = []
        self.calls: dict[str, int] = {}
        self.unobservable: set[Site] = set()
        self._bridges_all = any(probe.needs.input_gradients for probe in probes)
        self.editing = Editing(model, edits, self._looking)
        self._open: dict[str, list[int]] = {}
        self._audience = Audience(probes)
        self._depth = 0
        self._muted = 0
        self._watches = Watches(_hooked, self._telling)
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
        """Probes hear nothing, edits change nothing, and what is known of the latest pass stays as it is."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    def _gradients(
        self, scalar: Tensor, targets: Sequence[GradientEdge], *, keep_graph: bool
    ) -> tuple[Tensor | None, ...]:
        if not scalar.requires_grad or not targets:
            return (None,) * len(targets)
        return torch.autograd.grad(scalar, targets, retain_graph=keep_graph, allow_unused=True)

    def _deaf(self) -> bool:
        # Activation checkpointing runs forward again inside backward: those calls were already seen.
        return self._muted > 0 or _recomputing()

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._deaf():
            return
        self._depth += 1
        if self._depth > 1:
            return  # the model calls itself
        self.forget()
        self.sites.clear()
        self.calls.clear()
        self.unobservable.clear()
        self._open.clear()
        self.editing.begin()
        if self.cut is not None:
            self.cut.begin()
        self._roots = [get_gradient_edge(t) for _, t in tensors_in((args, kwargs)) if t.requires_grad]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._deaf():
            self._depth = max(0, self._depth - 1)

    def _before(self, name: str, args: Any, kwargs: Any) -> None:
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

    def _after(self, name: str, args: Any, kwargs: Any, output: Any) -> Any:
        if self._deaf():
            return None
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
        if not heard.gradients and not self._bridges_all:
            return None
        replaced = self._followed(found, heard.gradients, (args, kwargs))
        return rebuilt(output, replaced) if replaced else None

    def _edit_before(self, name: str, module: nn.Module, args: Any) -> Any:
        return None if self._muted else self.editing.enter(name, module, args, again=_recomputing())

    def _edit_after(self, name: str, inputs: Any, output: Any) -> Any:
        return None if self._muted else self.editing.leave(name, inputs, output)

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


@contextmanager
def attached(
    model: nn.Module,
    probes: Sequence[Probe],
    layers: str | Iterable[str] | Selection = "**",
    edits: Sequence[Edit] = (),
) -> Iterator[Attachment]:
    """A model whose chosen layers tell `probes` what passes by, until the block ends.

    Call the model inside the block as often as needed: every call of the model starts afresh at call 0. A loss's
    own `backward()` reports its gradients under the objective `loss`; `Attachment.differentiate` names another.
    Values are never changed but by `edits`: hooks only look, and where a gradient must be followed the model goes on
    with a tensor of the same storage. What happens between modules (`F.relu`, a residual sum) is not seen.

    Args:
        model: any module; hooks that others registered are left alone.
        probes: who is told. Each is told of the layers it `hears`.
        layers: globs, as for `hookscope.layers.select`.
        edits: changes of what layers return, made before the probes are told; of any layers, not only of `layers`.

    Raises:
        UsageError: a pattern matches no layer, or an edit names none.
    """
    chosen = (layers if isinstance(layers, Selection) else select(model, layers)).names
    attachment = Attachment(model, probes, edits)
    modules = modules_by_name(model)
    with ExitStack() as stack:
        stack.enter_context(eager(model))
        stack.callback(attachment.forget)
        stack.callback(
            model.register_forward_pre_hook(attachment._start, prepend=True, with_kwargs=True).remove
        )
        stack.callback(model.register_forward_hook(attachment._end, always_call=True).remove)
        for name in attachment.editing.layers:
            before, after = _edit_hooks(attachment, name)
            stack.callback(modules[name].register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(modules[name].register_forward_hook(after, with_kwargs=True).remove)
        for name in chosen:
            before, after = _module_hooks(attachment, name)
            stack.callback(modules[name].register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(modules[name].register_forward_hook(after, with_kwargs=True).remove)
        yield attachment


def came_from_probe(error: BaseException) -> bool:
    """Whether the exception was raised by a probe that was told something, not by the model."""
    return getattr(error, "_from_probe", False)


def _recomputing() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _hooked(tensor: Tensor, deliver: Deliver) -> Any:
    return tensor.register_hook(deliver)  # type: ignore[no-untyped-call]


def _module_hooks(attachment: Attachment, name: str) -> tuple[Callable[..., None], Callable[..., Any]]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        attachment._before(name, args, kwargs)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return attachment._after(name, args, kwargs, output)

    return before, after


def _edit_hooks(attachment: Attachment, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        replaced = attachment._edit_before(name, module, args)
        return None if replaced is None else (replaced, kwargs)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return attachment._edit_after(name, (args, kwargs), output)

    return before, after
