"""`gradnorm`: one backward pass over the pictures, and how large every gradient was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hookscope.artifacts import Heat, Tiles
from hookscope.cam.targets import check_pictures, class_index
from hookscope.checks.findings import Finding
from hookscope.errors import NothingMeasured, UsageError
from hookscope.gradreport import GradReport, grad_report
from hookscope.layers import Selection, Site, Status, select
from hookscope.losses import LossFunction, loss_function, loss_objective, own_targets
from hookscope.probes.gradnorm import GradNormProbe
from hookscope.runner import Objective
from hookscope.tasks import Conclusion, Subject
from hookscope.tasks.gradtables import Loss, lines, plot, summary, table

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.hooks import Probe
    from hookscope.loading import Batch
    from hookscope.runner import Pass, Runner


@dataclass(frozen=True)
class GradnormOptions:
    """The flags of `hookscope gradnorm` that decide what is measured. `loss` is a name or a callable."""

    layer: tuple[str, ...] = ("**",)
    exclude: tuple[str, ...] = ()
    loss: str | LossFunction = "cross_entropy"
    loss_name: str = "cross_entropy"
    target: str | None = None
    max_norm: float | None = None


class GradnormTask:
    """Measures gradients of a loss."""

    name = "gradnorm"

    def __init__(self, options: GradnormOptions) -> None:
        self._options = options
        self._loss = loss_function(options.loss)
        self._subject: Subject | None = None
        self._probe: GradNormProbe | None = None
        self._selection = Selection(())
        self._labels = ""
        self._unobservable: frozenset[Site] = frozenset()

    def select(self, subject: Subject) -> Selection:
        self._subject = subject
        if self._options.target is not None:
            self._target_index(self._options.target)
        return select(subject.model, self._options.layer or ("**",), self._options.exclude)

    def choose(self, subject: Subject, x: Tensor, batch: Batch) -> Selection:
        self._selection = self.select(subject)
        self._probe = GradNormProbe(layers=frozenset(self._selection.names))
        return self._selection

    def probe(self) -> Probe:
        return self._made()

    def objectives(self, output: Any, batch: Batch) -> Sequence[Objective]:
        targets = self._targets(batch)
        if targets is None:
            targets = own_targets(self._loss, output)
            if targets is None:
                self._labels = "none"
            elif len(targets) != len(batch.items):
                check_pictures(targets, len(batch.items))
        return [loss_objective(self._loss, targets)]

    def collect(self, done: Pass, batch: Batch, runner: Runner, x: Tensor) -> Iterable[Tiles | Heat]:
        self._made().finish_batch(done.sites, done.values["loss"])
        self._unobservable |= done.unobservable
        return ()

    def conclude(self) -> Conclusion:
        report = self._report()
        if not any(row.gradient is not None for row in report.parameters) and not any(
            row.output_grad is not None for row in report.layers
        ):
            raise NothingMeasured(
                "the loss has no gradient at any parameter or layer", "does it depend on the output?"
            )
        note = self._subject.note if self._subject else ""
        loss = Loss(self._options.loss_name, report.loss, self._labels, note)
        return Conclusion(
            tables=(table(report, loss),),
            summary=summary(report, loss),
            documents={"gradnorm.png": plot(report, loss)},
            statuses={row.site: row.status for row in report.layers},
            findings=tuple(self._findings(report)),
            warnings=tuple(
                f"{site}: the gradient cannot be seen, its output is a view of its input and is written to later"
                for site in sorted(self._unobservable)
            ),
            lines=lines(report, loss),
        )

    def _targets(self, batch: Batch) -> Tensor | None:
        labels = [item.ref.label for item in batch.items]
        if self._options.target is not None:
            index = self._target_index(self._options.target)
            self._labels = f"class {index} for every picture"
            return torch.full((len(labels),), index)
        if any(label is None for label in labels):
            self._labels = "the model's own predictions"
            return None
        self._labels = "the folders of the data set"
        return torch.tensor(labels)

    def _target_index(self, text: str) -> int:
        if text.isdecimal():
            return int(text)
        return class_index(text, self._subject.categories if self._subject else None)

    def _report(self) -> GradReport:
        assert self._subject is not None
        chosen = set(self._selection.names)
        known = {layer.name: layer.status or Status.OK for layer in self._subject.layers}
        called = frozenset(name for name, status in known.items() if status is not Status.NOT_CALLED)
        statuses = {name: status for name, status in known.items() if name in chosen}
        return grad_report(self._made(), self._subject.model, statuses, called, self._unobservable)

    def _findings(self, report: GradReport) -> Iterable[Finding]:
        limit = self._options.max_norm
        # Written so that a norm that is not a number fails too.
        if limit is not None and not report.total_norm <= limit:
            message = f"total gradient norm {report.total_norm:.6g} is above {limit:g}"
            yield Finding("max-norm", "error", "", report.total_norm, limit, message)

    def _made(self) -> GradNormProbe:
        assert self._probe is not None, "choose() comes first"
        return self._probe


def check_max_norm(limit: float | None) -> None:
    """Nothing, where the limit is a number that can be exceeded.

    Raises:
        UsageError: it is negative or not a number.
    """
    if limit is not None and not limit >= 0:
        raise UsageError(f"--max-norm {limit!r} is not a number of 0 or more")
