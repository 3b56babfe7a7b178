"""Hooks: the only code that registers them.

`attached()` lets probes see values and gradients as they pass; its companion `preserved()` puts an inspected model
back as it was found. Nothing here decides what a value means, and nothing here reads, prints or writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy

from hookscope.cutting import Cut
from hookscope.layers import Selection, Site, Status, modules_by_name, select
from hookscope.nested import rebuilt, tensors_in
from hookscope.preserve import preserved as preserved
from hookscope.probe import Needs as Needs
from hookscope.probe import Probe as Probe


class _Bridge(torch.autograd.Function):
    """Passes a view on as a tensor of its own, under the same storage and version counter.

    In-place ops on the result write where the model would have written, so its values are untouched, while the
    view's own node stays in the graph.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


@dataclass(frozen=True)
class _Listener:
    """Who is told of a gradient, under which site, and whether it is of an output or of an input."""

    probe: Probe
    site: Site
    of_output: bool

    def tell(self, gradient: Tensor, objective: str) -> None:
        told = self.probe.on_gradient if self.of_output else self.probe.on_input_gradient
        told(self.site, gradient, objective)


@dataclass(frozen=True)
class _Heard:
    """The probes that want to be told of a layer's inputs, outputs and output gradients."""

    inputs: Sequence[Probe]
    outputs: Sequence[Probe]
    gradients: Sequence[Probe]


@dataclass(eq=False)
class _Watch:
    """One place in the graph and all who listen there; `fragile`: a view, which an in-place op may have cut off."""

    edge: GradientEdge
    listeners: list[_Listener] = field(default_factory=list)
    fragile: bool = False


class Attachment:
    """The hooks of one `attached()` block and what passed by during the latest forward pass.

    `sites`: the tensors that layers returned, in the order in which the calls ended. `calls`: how often each layer
    was called. `unobservable`: sites whose gradient was not seen and may yet be there: the output is a view, and an
    in-place op takes a view's own node out of the graph. `cut`: where the graph starts, `None` for all of it.
    """

    def __init__(self, model: nn.Module, probes: Sequence[Probe]) -> None:
        self.model = model
        self.probes = tuple(probes)
        self.cut: Cut | None = None
        self.sites: list[Site] = []
        self.calls: dict[str, int] = {}
        self.unobservable: set[Site] = set()
        self._bridges_all = any(probe.needs.input_gradients for probe in probes)
        self._objective = "loss"
        self._reached: set[Site] = set()
        self._open: dict[str, list[int]] = {}
        self._hearing: dict[str, _Heard] = {}
        self._depth = 0
        self._watches: dict[tuple[object, int], _Watch] = {}
        self._handles: list[Any] = []
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
        ends = self._roots if param_followers else self._edges(followers)
        self._objective, self._reached = objective, set()
        try:
            leaves = [get_gradient_edge(parameter) for _, parameter in parameters]
            gradients = self._gradients(scalar, [*ends, *leaves], keep_graph=keep_graph)
        finally:
            self._objective = "loss"
        self.unobservable |= self._lost()
        for (name, _), gradient in zip(parameters, gradients[len(ends) :], strict=True):
            for probe in param_followers:
                probe.on_param_gradient(name, gradient, objective)
        return frozenset(self._reached)

    def status(self, layer: str) -> Status:
        """What the forward pass made of a layer: `ok`, `not-called` or `no-tensor`."""
        if layer not in self.calls:
            return Status.NOT_CALLED
        return Status.OK if any(site.layer == layer for site in self.sites) else Status.NO_TENSOR

    def forget(self) -> None:
        """Let go of the graph and of everything kept since the last forward pass."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watches.clear()
        self._roots.clear()
        if self.cut is not None:
            self.cut.undo()

    def _edges(self, followers: Sequence[Probe]) -> list[GradientEdge]:
        watches = self._watches.values()
        return [watch.edge for watch in watches if any(heard.probe in followers for heard in watch.listeners)]

    def _gradients(
        self, scalar: Tensor, targets: Sequence[GradientEdge], *, keep_graph: bool
    ) -> tuple[Tensor | None, ...]:
        if not scalar.requires_grad or not targets:
            return (None,) * len(targets)
        return torch.autograd.grad(scalar, targets, retain_graph=keep_graph, allow_unused=True)

    def _lost(self) -> set[Site]:
        lost = (watch for watch in self._watches.values() if watch.fragile)
        return {heard.site for watch in lost for heard in watch.listeners if heard.of_output} - self._reached

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _recomputing():
            return
        self._depth += 1
        if self._depth > 1:
            return  # the model calls itself
        self.forget()
        self.sites.clear()
        self.calls.clear()
        self.unobservable.clear()
        self._open.clear()
        if self.cut is not None:
            self.cut.begin()
        self._roots = [get_gradient_edge(t) for _, t in tensors_in((args, kwargs)) if t.requires_grad]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not _recomputing():
            self._depth = max(0, self._depth - 1)

    def _before(self, name: str, args: Any, kwargs: Any) -> None:
        if _recomputing():
            return
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        self._open.setdefault(name, []).append(call)
        if self.cut is not None and name in self.cut.at_inputs:
            self.cut.start_at_inputs(tensor for _, tensor in tensors_in((args, kwargs)))
        listeners = self._heard(name).inputs
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
                    self._watch(tensor, _Listener(probe, site, of_output=False))
            followed.add(id(tensor))

    def _after(self, name: str, args: Any, kwargs: Any, output: Any) -> Any:
        if _recomputing():
            return None
        opened = self._open.get(name)
        call = opened.pop() if opened else 0
        found = [(Site(name, call, path), tensor) for path, tensor in tensors_in(output)]
        self.sites.extend(site for site, _ in found)
        heard = self._heard(name)
        if heard.outputs:
            with self._telling():
                for site, tensor in found:
                    for probe in heard.outputs:
                        probe.on_output(site, tensor.detach())
        if not heard.gradients and not self._bridges_all:
            return None
        replaced = self._followed(found, heard.gradients, (args, kwargs))
        return rebuilt(output, replaced) if replaced else None

    def _heard(self, name: str) -> _Heard:
        """Who listens to a layer, found out once."""
        heard = self._hearing.get(name)
        if heard is None:
            probes = [probe for probe in self.probes if probe.hears(name)]
            heard = self._hearing[name] = _Heard(
                inputs=[probe for probe in probes if probe.needs.inputs or probe.needs.input_gradients],
                outputs=[probe for probe in probes if probe.needs.outputs],
                gradients=[probe for probe in probes if probe.needs.gradients],
            )
        return heard

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Without a graph; what a probe raises is known again when it comes out of the model."""
        reads = self.cut.reads if self.cut is not None else None
        if reads is not None:
            reads.paused = True
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            error._from_probe = True  # type: ignore[attr-defined]
            raise
        finally:
            if reads is not None:
                reads.paused = False

    def _followed(
        self, found: Sequence[tuple[Site, Tensor]], probes: Sequence[Probe], inputs: Any
    ) -> dict[str, Tensor]:
        """Listen for the gradients at a layer's output; returns, by path, what the model must go on with."""
        floating = [(site, tensor) for site, tensor in found if tensor.is_floating_point()]
        replaced = {}
        for site, tensor in floating:
            aliased = _storage(tensor) in _storages(inputs)
            if probes and self.cut is not None and not tensor.requires_grad:
                self.cut.start_at_output(site.layer, tensor, alone=len(floating) == 1, aliased=aliased)
            if not tensor.requires_grad:
                continue
            # An in-place op on a view takes its node, and every hook on it, out of the graph.
            bridged = tensor._is_view() and not aliased and len(found) == 1 and _is_private(tensor)
            for probe in probes:
                self._watch(tensor, _Listener(probe, site, of_output=True), safe=bridged)
            if bridged:
                replaced[site.output] = _bridge(tensor)
        return replaced

    def _watch(self, tensor: Tensor, listener: _Listener, *, safe: bool = False) -> None:
        edge = get_gradient_edge(tensor)
        key = (edge.node, edge.output_nr)
        watch = self._watches.get(key)
        if watch is None:
            fragile = tensor._is_view() and not tensor.is_leaf and not safe
            watch = self._watches[key] = _Watch(edge, fragile=fragile)
            handle = tensor.register_hook(self._deliverer(watch))  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        watch.listeners.append(listener)

    def _deliverer(self, watch: _Watch) -> Callable[[Tensor], None]:
        def deliver(gradient: Tensor) -> None:
            with self._telling():
                for listener in watch.listeners:
                    if listener.of_output:
                        self._reached.add(listener.site)
                    if listener.probe.follows(self._objective):
                        listener.tell(gradient.detach(), self._objective)

        return deliver


@contextmanager
def attached(
    model: nn.Module,
    probes: Sequence[Probe],
    layers: str | Iterable[str] | Selection = "**",
) -> Iterator[Attachment]:
    """A model whose chosen layers tell `probes` what passes by, until the block ends.

    Call the model inside the block as often as needed: every call of the model starts afresh at call 0. A loss's
    own `backward()` reports its gradients under the objective `loss`; `Attachment.differentiate` names another.
    Values are never changed: hooks only look, and where a gradient must be followed the model goes on with a
    tensor of the same storage. What happens between modules (`F.relu`, a residual sum) is not seen.

    Args:
        model: any module; hooks that others registered are left alone.
        probes: who is told. Each is told of the layers it `hears`.
        layers: globs, as for `hookscope.layers.select`.

    Raises:
        UsageError: a pattern matches no layer.
    """
    chosen = (layers if isinstance(layers, Selection) else select(model, layers)).names
    attachment = Attachment(model, probes)
    modules = modules_by_name(model)
    with ExitStack() as stack:
        stack.enter_context(_eager(model))
        stack.callback(attachment.forget)
        stack.callback(
            model.register_forward_pre_hook(attachment._start, prepend=True, with_kwargs=True).remove
        )
        stack.callback(model.register_forward_hook(attachment._end, always_call=True).remove)
        for name in chosen:
            before, after = _module_hooks(attachment, name)
            stack.callback(modules[name].register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(modules[name].register_forward_hook(after, with_kwargs=True).remove)
        yield attachment


def came_from_probe(error: BaseException) -> bool:
    """Whether the exception was raised by a probe that was told something, not by the model."""
    return getattr(error, "_from_probe", False)


def _base_references(view: Tensor) -> int:
    base = view._base
    return sys.getrefcount(base)


# Of a view whose base nobody else can name.
_PRIVATE_REFERENCES = _base_references(torch.empty(1).view(1))


def _is_private(view: Tensor) -> bool:
    """Whether nobody can write to the view's memory but through the view: its base is known to autograd alone."""
    return view._base is not None and _base_references(view) <= _PRIVATE_REFERENCES


def _bridge(value: Tensor) -> Tensor:
    return _Bridge.apply(value)  # type: ignore[no-any-return]


def _recomputing() -> bool:
    # Activation checkpointing runs forward again inside backward: those calls were already seen.
    return bool(torch._C._current_graph_task_id() != -1)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(value: Any) -> frozenset[int]:
    return frozenset(_storage(tensor) for _, tensor in tensors_in(value))


def _module_hooks(attachment: Attachment, name: str) -> tuple[Callable[..., None], Callable[..., Any]]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        attachment._before(name, args, kwargs)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return attachment._after(name, args, kwargs, output)

    return before, after


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Attention's fused fast path off, and compiled sub-modules run eagerly: both would pass hooks by."""
    fast = torch.backends.mha.get_fastpath_enabled()
    compiled = any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    with ExitStack() as stack:
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        yield
