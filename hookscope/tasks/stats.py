"""`stats`: what passes through the layers over all pictures, and whether that is as it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hookscope.activations import stats_of, stats_probe, stats_report
from hookscope.errors import UsageError
from hookscope.layers import Selection, Status, select
from hookscope.probes.stats import StatsProbe, Wanted
from hookscope.runner import Objective
from hookscope.tasks import Conclusion, DataTask, Subject
from hookscope.tasks.gate import GateOptions
from hookscope.tasks.statsgate import StatsGate
from hookscope.tasks.statsplots import documents
from hookscope.tasks.statstables import lines, summary, table

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hookscope.artifacts import Heat
    from hookscope.hooks import Probe
    from hookscope.loading import Batch
    from hookscope.runner import Pass, Runner
    from hookscope.statsreport import StatsReport
    from hookscope.userdata import DataBatch


@dataclass(frozen=True)
class StatsOptions:
    """The flags of `hookscope stats` that decide what is measured."""

    layer: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    wanted: Wanted = field(default_factory=Wanted)
    gate: GateOptions = field(default_factory=GateOptions)


class StatsTask(DataTask):
    """Measures distributions, and judges them."""

    name = "stats"
    sharing = "end"

    def __init__(self, options: StatsOptions) -> None:
        self._options = options
        self._gate = StatsGate(options.gate)
        self._subject: Subject | None = None
        self._selection = Selection(())
        self._probe: StatsProbe | None = None
        self._report: StatsReport | None = None

    def select(self, subject: Subject) -> Selection:
        self._subject = subject
        self._gate.check(subject.model)
        return select(subject.model, self._options.layer or ("**",), self._options.exclude)

    def choose(self, subject: Subject, x: Tensor, batch: Batch) -> Selection:
        self._selection = self.select(subject)
        self._probe = stats_probe(
            subject.model, subject.layers, self._selection, tuple(x.shape), self._options.wanted
        )
        return self._selection

    def probes(self) -> Sequence[Probe]:
        return [self._made()]

    def expect(self, numbers: Sequence[int]) -> None:
        self._made().expect(numbers)

    def objectives(self, output: Any, batch: Batch) -> Sequence[Objective]:
        return ()

    def collect(self, done: Pass, batch: Batch, runner: Runner, x: Tensor) -> Iterable[Heat]:
        self._made().finish_batch()
        return ()

    def share(self) -> Mapping[str, Any]:
        return self._made().share()

    def absorb(self, shared: Any) -> None:
        self._made().absorb(shared)

    def measure(
        self,
        subject: Subject,
        batches: Iterable[DataBatch],
        dtype: torch.dtype,
        told: Callable[[int], None],
    ) -> Selection:
        """Measure batches of the user's own; returns the layers that were.

        Raises:
            UsageError: a batch that is none.
            NothingMeasured: there was not one batch.
        """
        self._selection = self.select(subject)
        self._report = stats_of(
            subject.model,
            batches,
            self._selection,
            wanted=self._options.wanted,
            dtype=dtype,
            told=lambda batch, done: told(batch.number + 1),
        )
        return self._selection

    def conclude(self) -> Conclusion:
        assert self._subject is not None, "choose() comes first"
        report, note = self._report or self._of_pictures(), self._subject.note
        settings = self._gate.settings
        measured = Conclusion(
            tables=(table(report, settings, note),),
            summary=summary(report, settings, note),
            documents=documents(report, note),
            statuses={row.site: row.status for row in report.outputs},
            lines=lines(report, settings),
        )
        try:
            verdict = self._gate.judge(report, self._subject)
        except UsageError as error:  # what was measured is worth having all the same
            return replace(measured, errors=(error,))
        return replace(
            measured,
            documents={**measured.documents, **verdict.documents},
            warnings=verdict.warnings,
            lines=(*measured.lines, *verdict.lines),
            gate=verdict.gate,
            updates=verdict.updates,
        )

    def _of_pictures(self) -> StatsReport:
        assert self._subject is not None
        known = {layer.name: layer.status or Status.OK for layer in self._subject.layers}
        statuses = {name: status for name, status in known.items() if name in set(self._selection.names)}
        return stats_report(self._made(), self._subject.model, statuses)

    def _made(self) -> StatsProbe:
        assert self._probe is not None, "choose() comes first"
        return self._probe
