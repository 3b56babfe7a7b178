"""One forward pass for many probes, one backward pass for each objective.

Owns the mode the model runs in (eval, cut or whole graph, precision of the input) and nothing else: it knows no
command, no method and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.cutting import Cut
from hookscope.errors import UsageError
from hookscope.hooks import Attachment, Edit, Probe, attached, listening, preserved
from hookscope.layers import LayerInfo, OutputInfo, Selection, Site, all_names, modules_by_name
from hookscope.layouts import Layouts
from hookscope.nested import tensors_in
from hookscope.passes import NoGradient, called, differentiated, entering, pictures_in, requiring
from hookscope.passes import Objective as Objective
from hookscope.passes import Pass as Pass
from hookscope.preserve import sow
from hookscope.probes.shapes import ShapeProbe
from hookscope.recording import copied
from hookscope.replay import Continuation, Replays
from hookscope.wrappers import unwrapped

_NO_LAYERS = Selection(())


class Runner:
    """A model with probes on it, ready for any number of batches; made by `running()`."""

    def __init__(
        self, model: nn.Module, attachment: Attachment, cut: Cut | None, trainable: Sequence[nn.Parameter]
    ) -> None:
        self.model = model
        self.probes = attachment.probes
        self.attachment = attachment
        self._cut = cut
        self._trainable = tuple(trainable)
        self._unused: frozenset[Site] = frozenset()
        self._replays = Replays(model, self.outputs, attachment.muted)

    def forward(
        self,
        x: Any,
        objectives: Callable[[Any], Iterable[Objective]] | None = None,
        *,
        until: frozenset[Site] | None = None,
    ) -> Pass:
        """Run the model on a batch for all probes, then one backward pass for each objective.

        Args:
            x: (N, C, H, W), or what else `passes.called` takes, on the model's device; never written to.
            objectives: given the model's output (without a graph), the scalars to differentiate.
            until: sites of chosen layers, not with objectives: once all were returned, and the probes told, the model
                is left as by an interrupt. A pass that never returns them all runs to its end.

        Raises:
            ModelError: the model raised; its own message is passed on.
            UsageError: another thread made this runner, or an objective would have no output to go by.
        """
        self.attachment.thread.refuse_others()
        if objectives is None:
            return self._attempt(x, None, None, until or ())
        if until is not None:
            raise UsageError("objectives need the model's output: no stopped pass has one", "until=None")
        cut = self._cut
        if cut is None:
            return self._attempt(x, objectives, None)
        try:
            done = self._attempt(x, objectives, cut)
        except NoGradient:
            # Checkpointed layers, for one, run again in the backward pass and must find the graph as it was.
            self._cut = None
            return self._attempt(x, objectives, None)
        if cut.failed and not cut.whole:
            cut.at_inputs |= cut.failed
            done = self._attempt(x, objectives, cut)
        unused = frozenset[Site]().union(*done.unreached.values())
        if cut.failed or cut.whole or unused - self._unused:
            # Before a layer is said to have no path to the score, the whole graph is asked.
            failed = bool(cut.failed or cut.whole)
            done = self._attempt(x, objectives, None)
            self._cut = None if failed else cut
            self._unused |= unused
        return done

    @contextmanager
    def aside(
        self,
        probes: Sequence[Probe],
        layers: str | Iterable[str] | Selection = _NO_LAYERS,
        edits: Sequence[Edit] = (),
    ) -> Iterator[Runner]:
        """A second runner over the same model with probes of its own; this one's hear nothing meanwhile.

        Its graph is cut as in `running()`, and parameters take part in it only where one of its probes needs their
        gradients. May be used inside a pass of this runner, as by an objective.

        Args:
            probes: who is told of the passes made aside.
            layers: globs of the layers they may hear of; none may be given.
            edits: changes that hold in every `forward` made aside.

        Raises:
            UsageError: a pattern matches no layer, or an edit names none.
        """
        with self.attachment.muted(), _ready(self.model, probes, layers, edits, self._trainable) as runner:
            yield runner

    def outputs(self, x: Tensor, edits: Sequence[Edit] = ()) -> Any:
        """The model's output for a batch, without a graph and a copy; no probe hears of the pass.

        Args:
            x: (N, C, H, W) on the model's device; never written to.
            edits: all the changes that hold in this pass.

        Raises:
            ModelError: the model raised; its own message is passed on.
            UsageError: an edit names no layer.
        """
        with (
            self.attachment.muted(),
            torch.inference_mode(False),
            torch.no_grad(),
            attached(self.model, (), _NO_LAYERS, edits) if edits else nullcontext(),
        ):
            return copied(called(self.model, x.detach().clone()))

    def continuation(self, x: Tensor, site: Site) -> Continuation:
        """The rest of the model after a site, for one picture: called with new values there, any number at once.

        Args:
            x: (1, C, H, W) on the model's device.
            site: a tensor that some layer returns.

        Raises:
            ModelError: the model raised; its own message is passed on.
            UsageError: the model has no such site, or `x` is not one picture.
        """
        return self._replays.continuation(x, site)

    def _attempt(
        self,
        x: Any,
        objectives: Callable[[Any], Iterable[Objective]] | None,
        cut: Cut | None,
        until: Iterable[Site] = (),
    ) -> Pass:
        with_graph, attachment, output = objectives is not None, self.attachment, None
        attachment.cut = cut
        for probe in self.probes:
            probe.begin(pictures_in(x))
        given = entering(x, reaching=with_graph and cut is None and self._must_reach_input())
        reads = cut.reads if cut is not None else nullcontext()
        company = attachment.thread.refusing_company() if self.model.training else nullcontext()
        try:
            with torch.set_grad_enabled(with_graph), reads, company, attachment.until(until) as awaited:
                output = called(self.model, given)
            plain = None if awaited.over else copied(output)
            chosen = list(objectives(plain)) if objectives is not None else []
            unreached, values = self._backward(output, chosen)
            unobservable = frozenset(attachment.unobservable)
            return Pass(plain, tuple(attachment.sites), unreached, unobservable, values, awaited.over)
        finally:
            attachment.forget()

    def _must_reach_input(self) -> bool:
        """Whether some layer may have nothing trainable before it: only the input's gradient then passes by it.

        Never needed otherwise, and dear: a seventh of resnet50's backward pass.
        """
        parameters = list(self.model.parameters())
        return not parameters or not all(parameter.requires_grad for parameter in parameters)

    def _backward(
        self, output: Any, objectives: Sequence[Objective]
    ) -> tuple[dict[str, frozenset[Site]], dict[str, float]]:
        unreached: dict[str, frozenset[Site]] = {}
        values: dict[str, float] = {}
        for position, objective in enumerate(objectives):
            with torch.enable_grad():
                scalar = objective.scalar(output)
            values[objective.name] = float(scalar.detach())
            last = position == len(objectives) - 1
            reached = differentiated(self.attachment, objective.name, scalar, keep_graph=not last)
            unobservable = self.attachment.unobservable
            unreached[objective.name] = self._followed(objective.name) - reached - unobservable
        return unreached, values

    def _followed(self, objective: str) -> frozenset[Site]:
        followers = [p for p in self.probes if p.needs.gradients and p.follows(objective)]
        sites = self.attachment.sites
        return frozenset(site for site in sites if any(probe.hears(site.layer) for probe in followers))


@contextmanager
def running(
    model: nn.Module,
    probes: Sequence[Probe],
    layers: str | Iterable[str] | Selection = "**",
    *,
    train_seed: int | None = None,
) -> Iterator[Runner]:
    """A `Runner` over the model in eval mode, or in train mode from a seed; the model is left exactly as found.

    The graph is cut at the first chosen layer unless a probe needs the gradients of parameters or of inputs;
    parameters take part in it only where a probe needs theirs. In train mode dropout is active and batch norm uses
    the batch, from the random state that `train_seed` gives. Works inside `no_grad` and `inference_mode`, and
    with frozen parameters. The runner is for this thread; others wait before their own over this model, or over one
    that shares parts with it (`preserved`).
    """
    model, _ = unwrapped(model)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(preserved(model, alone=train_seed is not None))
        model.train(train_seed is not None)
        if train_seed is not None:
            sow(train_seed)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        yield stack.enter_context(_ready(model, probes, layers, (), trainable))


@contextmanager
def _ready(
    model: nn.Module,
    probes: Sequence[Probe],
    layers: str | Iterable[str] | Selection,
    edits: Sequence[Edit],
    trainable: Sequence[nn.Parameter],
) -> Iterator[Runner]:
    """A `Runner` over a model that somebody else preserves; `trainable`: its parameters that were not frozen."""
    with_parameters = any(probe.needs.param_gradients for probe in probes)
    whole = with_parameters or any(probe.needs.input_gradients for probe in probes)
    with (
        requiring(model, trainable if with_parameters else ()),
        listening(model, probes, layers, edits) as hooks,
    ):
        yield Runner(model, hooks, None if whole else Cut(), trainable)


def list_layers(model: nn.Module, x: Any = None) -> list[LayerInfo]:
    """Every module once, in model order; with `x`, also what each call of it returned.

    Args:
        model: any module.
        x: (N, C, H, W) input for one forward pass, or what else `passes.called` takes, on the model's device. Without
            it nothing is run, and `calls`, `outputs` and `status` stay unknown.

    Raises:
        ModelError: the model raised on `x`.
    """
    model, _ = unwrapped(model)
    if x is None:
        return _static_infos(model)
    first = next((tensor for _, tensor in tensors_in(x)), None)
    layouts = Layouts(modules_by_name(model), () if first is None else tuple(first.shape))
    everything = Selection(tuple(all_names(model)))
    with running(model, [ShapeProbe(layouts)], everything) as runner:
        runner.forward(x)
        statuses = {name: runner.attachment.status(name) for name in everything.names}
        calls = dict(runner.attachment.calls)
    outputs: dict[str, list[OutputInfo]] = {}
    for info in layouts.outputs.values():
        outputs.setdefault(info.site.layer, []).append(info)
    return [
        replace(
            info,
            calls=calls.get(info.name, 0),
            outputs=tuple(outputs.get(info.name, ())),
            status=statuses[info.name],
        )
        for info in _static_infos(model)
        if info.name in statuses  # a layer that the model added to itself while it ran was not seen
    ]


def _static_infos(model: nn.Module) -> list[LayerInfo]:
    modules = modules_by_name(model)
    return [
        LayerInfo(
            name=name,
            type=type(modules[name]).__name__,
            parameters=_parameter_count(modules[name]),
            aliases=aliases,
        )
        for name, aliases in all_names(model).items()
    ]


def _parameter_count(module: nn.Module) -> int:
    uninitialized = nn.parameter.UninitializedParameter
    return sum(p.numel() for p in module.parameters() if not isinstance(p, uninitialized))
