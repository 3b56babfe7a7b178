"""`GradientMonitor`: watches the gradients of a training loop and leaves the training as it was.

Here is when things are measured; how is for `stepping`, what they mean for `events`, and where hooks are for `hooks`.
It changes no value, no gradient and no mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from hookscope.checks import gradbaseline
from hookscope.checks.gradfigures import GradBaseline
from hookscope.checks.gradients import default_settings, places_in
from hookscope.eager import eager
from hookscope.errors import UsageError
from hookscope.hooks import Attachment, attached
from hookscope.layers import modules_by_name
from hookscope.magnitudes import parse_norm
from hookscope.monitor.activations import ActivationProbe
from hookscope.monitor.arrivals import Arrivals
from hookscope.monitor.events import Judge
from hookscope.monitor.hooks import on_steps
from hookscope.monitor.options import check_numbers, in_words, read_baseline
from hookscope.monitor.parallel import data_parallel_group
from hookscope.monitor.records import Event, Point, StepRecord
from hookscope.monitor.report import Last, MonitorReport
from hookscope.monitor.scaling import Scaling
from hookscope.monitor.sinks import Sink, opened
from hookscope.monitor.stepping import Done, Stepping
from hookscope.monitor.tally import Tally, norms_of
from hookscope.monitor.telling import OnEvent, Teller
from hookscope.monitor.watched import chosen_layers, watched_in
from hookscope.output.directory import replace_file
from hookscope.wrappers import unwrapped


class GradientMonitor:
    """Gradient norms, running statistics and events of a training loop, until its block ends.

        with GradientMonitor(model, optimizer) as monitor:
            for x, y in loader:
                optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step()
        monitor.report()

    Gradients are read at the end of a backward pass: after the all-reduce of data parallel, before clipping, divided
    by the scale of `scaler`; of several backward passes before a step the last counts, which holds the sum. What is
    read stays on its device until the step, where it is fetched at once. Training ends with the same bits as without a
    monitor. A loop that fills `.grad` itself (`torch.autograd.grad`) is measured at the step; records say so.

    `steps`: how many optimiser steps were taken, those that a scaler left out included where they were measured.

    Args:
        model: as it is trained: `DistributedDataParallel`, `torch.compile` and FSDP2 included. Names are those of the
            model inside.
        optimizer: whose steps count; without one, every backward pass is a step.
        layers, exclude: globs of the layers whose parameters (and activations) are watched; `**` is all.
        norm: 1, 2 or `"inf"`.
        max_norm: largest total norm, beyond which there is an event; it clips nothing.
        every: measure each so many-th step, the first included; others cost a counter.
        history: how many of the latest records to keep.
        log: a path, or sinks: where records and events go.
        on_event: a callable that is told of every event; `"warn"`; or `"raise"`, which stops before the step that the
            event is of, or after it with `update_ratio` or a closure. Where several processes train together, events
            of one process alone (`Event.local`) warn instead of raising: the others would wait for it for ever.
        activations: also gradients at what the layers return. A compiled model is run eagerly in the steps that are
            measured; parameters alone never touch compiled code. The inside of reentrant checkpoints is not seen, and
            of several forward passes before a backward only the latest. While layers are hooked, the model can be
            neither pickled nor copied deeply; its `state_dict` can.
        update_ratio: also how much each step really changed the weights, by copies from before: one copy of the
            watched parameters in memory, on their devices.
        scaler: the `torch.amp.GradScaler` that scales the loss.
        severity, limits: of the rules of `hookscope gradnorm`, as its configuration gives them: events and findings go
            by the same.
        baseline: a baseline of `gradnorm` or of `save`: parameters that leave it are events, and findings.
        window, warmup: of the rolling median: over how many measured steps, and after how many spikes are looked for.
        spike: how many deviations (1.4826 MAD, or a hundredth of the median where that is more) above the rolling
            median a spike is; `inf` looks for none.

    Raises:
        UsageError: a pattern matches nothing, or a value is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        layers: str | Iterable[str] = "**",
        exclude: str | Iterable[str] = (),
        norm: float | str = 2.0,
        max_norm: float | None = None,
        every: int = 1,
        history: int = 0,
        log: str | os.PathLike[str] | Sink | Sequence[Sink] | None = None,
        on_event: OnEvent = None,
        activations: bool = False,
        update_ratio: bool = False,
        scaler: Any = None,
        severity: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        baseline: str | Path | GradBaseline | None = None,
        window: int = 100,
        warmup: int = 20,
        spike: float = 10.0,
    ) -> None:
        check_numbers(every=every, history=history, window=window, warmup=warmup, spike=spike)
        self._given, (self.model, self.notes) = model, unwrapped(model)
        self.optimizer, self.norm, self.every = optimizer, parse_norm(norm), every
        if activations and self.norm == 1:
            raise UsageError(
                "gradients of activations are not measured in the L1 norm", "norm=2 or norm='inf'"
            )
        self._words = in_words(layers, exclude)
        self._selection = chosen_layers(self.model, layers, exclude)
        self.watched = watched_in(self.model, self._selection)
        self.settings = default_settings().over(severity, limits, "monitor")
        if max_norm is not None:
            self.settings = self.settings.over(limits={"max-norm": max_norm}, source="max_norm")
        self.settings.check(places_in(self.model))
        self.baseline = read_baseline(baseline)
        self._types = {name: type(module).__name__ for name, module in modules_by_name(self.model).items()}
        self._probe = ActivationProbe(frozenset(self._selection.names)) if activations else None
        self._stepping = Stepping(self.watched, self.norm, Scaling(scaler), self._probe, updates=update_ratio)
        self._judge = Judge(self.watched, self.settings, spike, self.baseline, self._types)
        self._tally = Tally(self.watched, history, window, warmup)
        self._late, self._always_late = False, update_ratio
        self._teller, self._log = Teller(on_event), log
        self._hooks: ExitStack | None = None
        self._attached: ExitStack | None = None
        self._attachment: Attachment | None = None
        self._due = False
        self._arrivals = Arrivals(self.watched, self._after_backward)
        self._group: Any = None
        self.steps = 0

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far."""
        return tuple(self._tally.events)

    @property
    def history(self) -> tuple[StepRecord, ...]:
        """The latest records, oldest first; as many as `history` says."""
        return tuple(self._tally.records)

    @property
    def last(self) -> StepRecord | None:
        """The record of the last measured step."""
        return self._tally.last.record if self._tally.last is not None else None

    def start(self) -> Self:
        """Hooks are in place; what was measured before goes on.

        Raises:
            UsageError: it is running already.
        """
        if self._hooks is not None:
            raise UsageError("the monitor is running already", "close() comes before another start()")
        with ExitStack() as stack:
            stack.enter_context(self._arrivals.hooked())
            if self.optimizer is not None:
                stack.enter_context(on_steps(self.optimizer, self._before_step, self._after_step))
            self._teller.sinks = opened(self._log)
            for sink in self._teller.sinks:
                stack.callback(sink.close)
            self._group = data_parallel_group(self._given, [one.parameter for one in self.watched])
            self._prepare()
            self._hooks = stack.pop_all()
        return self

    def close(self) -> None:
        """All hooks are gone and sinks closed; nothing happens where it was not running."""
        if self._hooks is None:
            return
        with self._hooks:
            try:
                self._skipped_last()
            finally:
                self._hooks = None
                self._detach()
                self._stepping.forget()

    def report(self, *, local: bool = False) -> MonitorReport:
        """Statistics, events and findings so far.

        Where several processes train together and activations are watched, their moments are added up: every process
        must then call this. `local`: leave it at this process's own.
        """
        self._skipped_last()
        group = None if local or self._probe is None else self._group
        types = {name: self._types[name] for name in self._selection.names}
        return self._tally.report(self.steps, types, self.settings, self.baseline, group)

    def save(self, path: str | os.PathLike[str], **how: Any) -> Path:
        """Write the last measured step as a baseline of `hookscope gradnorm`; returns the file.

        Args:
            path: the file; or a directory that is there, in which it is `gradnorm-baseline.json`.
            how: as for `MonitorReport.as_baseline`: what a monitor does not see itself. Without `activations` it
                has no layers, which the gate's rule `layers-changed` says.

        Raises:
            NothingMeasured: no step was measured.
            OutputError: it cannot be written.
        """
        place = Path(path)
        place = place / gradbaseline.FILE if place.is_dir() else place
        replace_file(place, self.report().as_baseline(**{"layers": self._words, **how}).encoded())
        return place

    def _after_backward(self) -> None:
        self._judge.order = self._arrivals.order
        self._stepping.take(Point.BACKWARD)
        if self.optimizer is None:
            self._finish()
            self._stepped()

    def _before_step(self, has_closure: bool) -> None:
        if not self._due:
            return
        self._late = self._always_late or has_closure
        self._stepping.weigh()
        if not has_closure and not self._stepping.waiting:
            self._stepping.take(Point.STEP)
        if not self._late:
            self._finish()

    def _after_step(self) -> None:
        if self._due and self._late:
            self._finish()
        self._stepped()

    def _stepped(self) -> None:
        self.steps += 1
        self._prepare()

    def _prepare(self) -> None:
        """Ready for the next step: layers are hooked in the steps that are measured only."""
        self._due = self._arrivals.listening = self.steps % self.every == 0
        if self._probe is None:
            return
        self._probe.listening = self._due
        if self._due and self._attached is None:
            with ExitStack() as stack:
                # Of the model as given: a compiled wrapper around it would pass the hooks inside by.
                stack.enter_context(eager())
                self._attachment = stack.enter_context(attached(self.model, [self._probe], self._selection))
                self._attached = stack.pop_all()
        elif not self._due:
            self._detach()

    def _detach(self) -> None:
        if self._attached is not None:
            stack, self._attached, self._attachment = self._attached, None, None
            stack.close()

    def _skipped_last(self) -> None:
        """A record of the step that a scaler left out, where nothing has come after it yet."""
        if self._hooks is not None and self.optimizer is not None and self._stepping.left_out():
            self._finish(stepped=False)

    def _finish(self, *, stepped: bool = True) -> None:
        for done in self._stepping.finish(self.steps, stepped=stepped):
            if done.record.skipped:
                self.steps += 1
            self._tell(done)

    def _tell(self, done: Done) -> None:
        norms = norms_of(done.record, self.watched)
        # A step that was left out is no news: the scaler is looking for its scale.
        events = () if done.record.skipped else self._judge.events(done.record, norms, self._tally.centre())
        self._tally.add(done, norms, self._last(done))
        self._tally.events.extend(events)
        self._teller.tell(done.record, events, together=self._group is not None)

    def _last(self, done: Done) -> Last:
        last = Last(done.record, done.sizes, done.activations, self.model.training)
        if (found := self._attachment) is None:
            return last
        statuses = {name: str(found.status(name)) for name in self._selection.names}
        return replace(last, sites=tuple(found.sites), statuses=statuses)
