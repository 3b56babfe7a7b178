"""`gradnorm`: one backward pass over the pictures, how large every gradient was, and whether that passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hookscope.artifacts import Heat, MapStatus
from hookscope.cam.choice import spatial_layers
from hookscope.cam.targets import check_pictures, class_index
from hookscope.errors import UsageError
from hookscope.gradpasses import gradients_of
from hookscope.gradreport import GradReport, grad_report
from hookscope.layers import Selection, Site, Status, select
from hookscope.losses import LossFunction, loss_function, loss_objective, own_targets
from hookscope.probes.gradmaps import GradMapsProbe
from hookscope.probes.gradnorm import GradNormProbe
from hookscope.runner import Objective
from hookscope.tasks import Conclusion, DataTask, Subject
from hookscope.tasks.gradgate import GateOptions, GradGate
from hookscope.tasks.gradplots import documents
from hookscope.tasks.gradtables import Loss, lines, summary, table

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from hookscope.hooks import Probe
    from hookscope.loading import Batch
    from hookscope.runner import Pass, Runner
    from hookscope.userdata import DataBatch


@dataclass(frozen=True)
class GradnormOptions:
    """The flags of `hookscope gradnorm` that decide what is measured. `loss` is a name or a callable.

    `maps`: also the gradients' sizes on the pictures, at the chosen layers, or where each resolution begins.
    """

    layer: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    loss: str | LossFunction = "cross_entropy"
    loss_name: str = "cross_entropy"
    target: str | None = None
    norm: float = 2.0
    train_mode: bool = False
    maps: bool = False
    seed: int = 0
    gate: GateOptions = field(default_factory=GateOptions)


class GradnormTask(DataTask):
    """Measures gradients of a loss, and judges them."""

    name = "gradnorm"

    def __init__(self, options: GradnormOptions) -> None:
        self.train_seed = options.seed if options.train_mode else None
        self._options = options
        self._loss = loss_function(options.loss)
        self._gate = GradGate(options.gate)
        self._subject: Subject | None = None
        self._probe: GradNormProbe | None = None
        self._maps: GradMapsProbe | None = None
        self._report: GradReport | None = None
        self._selection = Selection(())
        self._labels = ""
        self._unobservable: frozenset[Site] = frozenset()
        self._flat: set[Site] = set()

    def select(self, subject: Subject) -> Selection:
        self._subject = subject
        if self._options.target is not None:
            self._target_index(self._options.target)
        options = self._options
        self._gate.check(
            subject.model, loss=options.loss_name, norm=options.norm, train_mode=options.train_mode
        )
        return select(subject.model, self._options.layer or ("**",), self._options.exclude)

    def choose(self, subject: Subject, x: Tensor, batch: Batch) -> Selection:
        self._selection = self.select(subject)
        self._probe = GradNormProbe(layers=frozenset(self._selection.names), norm=self._options.norm)
        if self._options.maps:
            spatial = [name for name in spatial_layers(subject.outputs) if name in set(self._selection.names)]
            wanted = spatial if self._options.layer else _first_of_each_size(spatial, subject)
            self._maps = GradMapsProbe(frozenset(wanted), subject.info)
        return self._selection

    def probes(self) -> Sequence[Probe]:
        return [self._made()] if self._maps is None else [self._made(), self._maps]

    def objectives(self, output: Any, batch: Batch) -> Sequence[Objective]:
        targets = self._targets(batch)
        if targets is None:
            targets = own_targets(self._loss, output)
            if targets is None:
                self._labels = "none"
            elif len(targets) != len(batch.items):
                check_pictures(targets, len(batch.items))
        return [loss_objective(self._loss, targets)]

    def collect(self, done: Pass, batch: Batch, runner: Runner, x: Tensor) -> Iterable[Heat]:
        self._made().finish_batch(done.sites, done.values["loss"])
        self._unobservable |= done.unobservable
        heats = [] if self._maps is None else [_heat(*made) for made in self._maps.maps()]
        self._flat |= {
            heat.site for heat in heats if heat.status is MapStatus.OK and np.ptp(heat.values) == 0
        }
        return heats

    def measure(
        self,
        subject: Subject,
        batches: Iterable[DataBatch],
        dtype: torch.dtype,
        told: Callable[[int], None],
    ) -> Selection:
        """Measure batches of the user's own; returns the layers that were.

        Raises:
            UsageError: a batch that is none, or of which the loss cannot be taken.
            NothingMeasured: there was not one batch.
        """
        self._selection = self.select(subject)
        self._report = gradients_of(
            subject.model,
            self._labelled(batches),
            self._selection,
            loss=self._loss,
            norm=self._options.norm,
            train_seed=self.train_seed,
            dtype=dtype,
            told=lambda batch, done: told(batch.number + 1),
        )
        return self._selection

    def conclude(self) -> Conclusion:
        report = self._report or self._of_pictures()
        assert self._subject is not None, "choose() comes first"
        loss = Loss(self._options.loss_name, report.loss, self._labels, self._subject.note)
        measured = self._measured(report, loss)
        try:
            verdict = self._gate.judge(report, loss, self._subject)
        except UsageError as error:  # what was measured is worth having all the same
            return replace(measured, errors=(error,))
        return replace(
            measured,
            documents={**measured.documents, **verdict.documents},
            warnings=(*measured.warnings, *verdict.warnings),
            lines=(*measured.lines, *verdict.lines),
            gate=verdict.gate,
            updates=verdict.updates,
        )

    def _measured(self, report: GradReport, loss: Loss) -> Conclusion:
        return Conclusion(
            tables=(table(report, loss),),
            summary=summary(report, loss),
            documents=documents(report, loss),
            statuses={row.site: row.status for row in report.layers},
            warnings=(
                *(
                    f"{site}: the gradient cannot be seen, its output is a view of its input and is written to later"
                    for site in sorted(self._unobservable)
                ),
                *(
                    f"{site}: a gradient map is the same everywhere, as where a layer is averaged over the picture"
                    for site in sorted(self._flat)
                ),
            ),
            lines=lines(report, loss),
        )

    def _labelled(self, batches: Iterable[DataBatch]) -> Iterator[DataBatch]:
        kinds: dict[str, None] = {}
        for batch in batches:
            kinds["the data's own" if batch.targets is not None else "the model's own predictions"] = None
            self._labels = " and ".join(kinds)
            yield batch

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

    def _of_pictures(self) -> GradReport:
        assert self._subject is not None
        chosen = set(self._selection.names)
        known = {layer.name: layer.status or Status.OK for layer in self._subject.layers}
        called = frozenset(name for name, status in known.items() if status is not Status.NOT_CALLED)
        statuses = {name: status for name, status in known.items() if name in chosen}
        return grad_report(
            self._made(),
            self._subject.model,
            statuses,
            called,
            self._unobservable,
            train_mode=self._options.train_mode,
        )

    def _made(self) -> GradNormProbe:
        assert self._probe is not None, "choose() comes first"
        return self._probe


def _first_of_each_size(layers: Sequence[str], subject: Subject) -> list[str]:
    """Where each resolution begins. Where the last one ends, before it is averaged, a gradient is flat."""
    first: dict[tuple[int, int], str] = {}
    for name in layers:
        grids = (info.grid for site, info in subject.outputs.items() if site.layer == name)
        for height, width, _ in filter(None, grids):
            first.setdefault((height, width), name)
    return list(first.values())


def _heat(picture: int, site: Site, values: NDArray[np.float32]) -> Heat:
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (np.nan, np.nan)
    status = MapStatus.OK if high > 0 else MapStatus.ZERO_GRADIENT
    if finite.size < values.size:
        status = MapStatus.NON_FINITE
    return Heat("gradnorm", picture, site, "mean-abs-gradient", values, low, high, status)
