"""Hooks: the only code that registers them.

`attached()` lets probes see values and gradients as they pass; its companion `preserved()` puts an inspected model
back as it was found. Nothing here decides what a value means, and nothing here reads, prints or writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hookscope.layers import Selection, Site, Status, modules_by_name, select
from hookscope.nested import rebuilt, tensors_in
from hookscope.preserve import preserved as preserved
from hookscope.probe import Needs as Needs
from hookscope.probe import Probe as Probe


class _Bridge(torch.autograd.Function):
    """Passes `value` on under the same storage and version counter, with `source` as its only ancestor.

    In-place ops on the result write where the model would have written, so its values are untouched, while
    autograd sees a plain tensor whose gradient arrives at `source`.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


Receiver = Callable[[Tensor, str], None]


@dataclass(eq=False)
class _Watch:
    """One place in the graph and all who listen there."""

    edge: GradientEdge
    receivers: list[tuple[Probe, Site, Receiver]] = field(default_factory=list)
    fragile: tuple[Tensor, int] | None = None

    def lost(self) -> bool:
        """Whether an in-place op on a view has since taken the listened-to node out of the graph."""
        return self.fragile is not None and self.fragile[0]._version != self.fragile[1]


class Attachment:
    """The hooks of one `attached()` block and what passed by during the latest forward pass."""

    def __init__(
        self, model: nn.Module, probes: Sequence[Probe], layers: Iterable[str], *, cut: bool
    ) -> None:
        self.model = model
        self.probes = tuple(probes)
        self.layers = tuple(layers)
        self.cut = cut
        self.sites: list[Site] = []
        self.called: set[str] = set()
        self.uncuttable: set[Site] = set()
        self.unobservable: set[Site] = set()
        self._objective = "loss"
        self._reached: set[Site] = set()
        self._open: dict[str, list[int]] = {}
        self._count: dict[str, int] = {}
        self._watches: dict[tuple[object, int], _Watch] = {}
        self._handles: list[Any] = []
        self._roots: list[GradientEdge] = []

    def differentiate(self, objective: str, scalar: Tensor, *, keep_graph: bool = False) -> frozenset[Site]:
        """Run one backward pass and tell the probes that follow `objective`; returns the sites it reached.

        Only as much of the graph is walked as those probes need. `.grad` is never touched.
        """
        followers = [probe for probe in self.probes if probe.follows(objective)]
        param_followers = [probe for probe in followers if probe.needs.param_gradients]
        parameters = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad and param_followers]
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
        if layer not in self.called:
            return Status.NOT_CALLED
        return Status.OK if any(site.layer == layer for site in self.sites) else Status.NO_TENSOR

    def forget(self) -> None:
        """Let go of the graph and of everything kept since the last forward pass."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watches.clear()
        self._roots.clear()

    def _edges(self, followers: Sequence[Probe]) -> list[GradientEdge]:
        watches = self._watches.values()
        return [watch.edge for watch in watches if any(probe in followers for probe, _, _ in watch.receivers)]

    def _gradients(
        self, scalar: Tensor, targets: Sequence[GradientEdge], *, keep_graph: bool
    ) -> tuple[Tensor | None, ...]:
        if not scalar.requires_grad or not targets:
            return (None,) * len(targets)
        return torch.autograd.grad(scalar, targets, retain_graph=keep_graph, allow_unused=True)

    def _lost(self) -> set[Site]:
        lost = (watch for watch in self._watches.values() if watch.lost())
        return {site for watch in lost for _, site, _ in watch.receivers} - self._reached

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _recomputing():
            return
        self.forget()
        self.sites.clear()
        self.called.clear()
        self.uncuttable.clear()
        self.unobservable.clear()
        self._open.clear()
        self._count.clear()
        self._roots = [get_gradient_edge(t) for _, t in tensors_in((args, kwargs)) if t.requires_grad]

    def _before(self, name: str, args: Any, kwargs: Any) -> None:
        if _recomputing():
            return
        call = self._count.get(name, 0)
        self._count[name] = call + 1
        self._open.setdefault(name, []).append(call)
        listeners = [p for p in self.probes if p.hears(name) and (p.needs.inputs or p.needs.input_gradients)]
        if not listeners:
            return
        for path, tensor in tensors_in((*args, kwargs) if kwargs else args):
            site = Site(name, call, path)
            for probe in listeners:
                if probe.needs.inputs:
                    with torch.no_grad():
                        probe.on_input(site, tensor.detach())
                if probe.needs.input_gradients and tensor.requires_grad:
                    self._watch(tensor, probe, site, _input_receiver(probe, site))

    def _after(self, name: str, args: Any, kwargs: Any, output: Any) -> Any:
        if _recomputing():
            return None
        opened = self._open.get(name)
        call = opened.pop() if opened else 0
        self.called.add(name)
        listeners = [probe for probe in self.probes if probe.hears(name)]
        following = [probe for probe in listeners if probe.needs.gradients]
        inputs = _storages((args, kwargs)) if following else frozenset()
        replaced: dict[str, Tensor] = {}
        for path, tensor in tensors_in(output):
            site = Site(name, call, path)
            self.sites.append(site)
            with torch.no_grad():
                for probe in listeners:
                    if probe.needs.outputs:
                        probe.on_output(site, tensor.detach())
            if following and tensor.is_floating_point():
                passed_on = self._follow(site, tensor, following, aliased=_storage(tensor) in inputs)
                if passed_on is not tensor:
                    replaced[path] = passed_on
        return rebuilt(output, replaced) if replaced else None

    def _follow(self, site: Site, tensor: Tensor, probes: Sequence[Probe], *, aliased: bool) -> Tensor:
        """Listen for the gradient at a tensor; returns what the model must go on with."""
        passed_on = tensor
        if tensor.requires_grad:
            if tensor._is_view() and not aliased:
                # An in-place op on a view takes its node, and every hook on it, out of the graph.
                passed_on = tensor = _bridge(tensor, tensor)
        elif not self.cut:
            return tensor
        elif aliased:
            # What shares storage with an input may go on under the input's name: it cannot be cut here.
            self.uncuttable.add(site)
            return tensor
        else:
            source = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
            passed_on, tensor = _bridge(source.requires_grad_(), tensor), source
        for probe in probes:
            self._watch(tensor, probe, site, _output_receiver(probe, site))
        return passed_on

    def _watch(self, tensor: Tensor, probe: Probe, site: Site, receiver: Receiver) -> None:
        edge = get_gradient_edge(tensor)
        key = (edge.node, edge.output_nr)
        watch = self._watches.get(key)
        if watch is None:
            fragile = (tensor, tensor._version) if tensor._is_view() and not tensor.is_leaf else None
            watch = self._watches[key] = _Watch(edge, fragile=fragile)
            handle = tensor.register_hook(self._deliverer(watch))  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        watch.receivers.append((probe, site, receiver))

    def _deliverer(self, watch: _Watch) -> Callable[[Tensor], None]:
        def deliver(gradient: Tensor) -> None:
            objective = self._objective
            with torch.no_grad():
                for probe, site, receiver in watch.receivers:
                    self._reached.add(site)
                    if probe.follows(objective):
                        receiver(gradient.detach(), objective)

        return deliver


@contextmanager
def attached(
    model: nn.Module,
    probes: Sequence[Probe],
    layers: str | Iterable[str] | Selection = "**",
    *,
    cut: bool = False,
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
        cut: start the graph at the first chosen layer instead of at the parameters.

    Raises:
        UsageError: a pattern matches no layer.
    """
    chosen = (layers if isinstance(layers, Selection) else select(model, layers)).names
    attachment = Attachment(model, probes, chosen, cut=cut)
    modules = modules_by_name(model)
    with ExitStack() as stack:
        stack.enter_context(_eager(model))
        stack.callback(attachment.forget)
        stack.callback(
            model.register_forward_pre_hook(attachment._start, prepend=True, with_kwargs=True).remove
        )
        for name in chosen:
            before, after = _module_hooks(attachment, name)
            stack.callback(modules[name].register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(modules[name].register_forward_hook(after, with_kwargs=True).remove)
        yield attachment


def _bridge(source: Tensor, value: Tensor) -> Tensor:
    return _Bridge.apply(source, value)  # type: ignore[no-any-return]


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


def _output_receiver(probe: Probe, site: Site) -> Receiver:
    return lambda gradient, objective: probe.on_gradient(site, gradient, objective)


def _input_receiver(probe: Probe, site: Site) -> Receiver:
    return lambda gradient, objective: probe.on_input_gradient(site, gradient, objective)


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
