"""What a monitored training came to: statistics over its steps, its events, and the gate's judgement of the last step.

Built from plain figures; it measures nothing and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hookscope.checks.findings import Case, Finding
from hookscope.checks.gradfigures import GradBaseline, Made, figures_of, measured_by
from hookscope.checks.gradients import check_measured, run_rules
from hookscope.checks.rules import Settings, findings
from hookscope.errors import NothingMeasured
from hookscope.gradreport import GradReport, LayerGrad, ParamGrad
from hookscope.layers import Site, Status
from hookscope.magnitudes import Magnitude, Spread, joined, norm_of_norms
from hookscope.monitor.activations import Moments
from hookscope.monitor.records import ActivationFigures, Event, StepRecord
from hookscope.monitor.running import Summary
from hookscope.monitor.watched import Watched

NOT_MEASURED = "not-measured"
"""Status of a layer at whose output no gradient was looked for."""


@dataclass(frozen=True)
class ParamSummary:
    """One parameter over all measured steps; `None` where there never was such a figure."""

    norm: Summary | None
    ratio: Summary | None
    update_ratio: Summary | None


@dataclass(frozen=True)
class Last:
    """What is kept of the last measured step beyond its record.

    `sizes`: of every watched parameter's gradient. `activations`: by site. `sites`: all that layers returned, in the
    order of forward. `statuses`: what forward made of each layer, empty where nobody looked. `train_mode`: the
    model's.
    """

    record: StepRecord
    sizes: tuple[Magnitude | None, ...]
    activations: Mapping[Site, Moments]
    train_mode: bool
    sites: tuple[Site, ...] = ()
    statuses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MonitorReport:
    """A training so far: `steps` taken, `measured` of them, `skipped` by the scaler among those.

    `total`, `parameters`: statistics over the measured steps, norms in the monitor's `norm`. `activations`: of the
    gradients at layers' outputs, over all steps and the `ranks` processes together: moments are added up, and under
    data parallel each process's gradient is divided by their number, as that of the mean loss is. `last`: the last
    measured step's record, of this process. `grad`: the same step as `hookscope gradnorm` would report it.
    """

    steps: int
    measured: int
    skipped: int
    norm: float
    ranks: int
    total: Summary | None
    parameters: Mapping[str, ParamSummary]
    activations: Mapping[Site, ActivationFigures]
    events: tuple[Event, ...]
    last: StepRecord | None
    grad: GradReport | None
    settings: Settings
    baseline: GradBaseline | None = None
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Every rule of `hookscope gradnorm` looked at in the last measured step.

        Raises:
            NothingMeasured: there was no such step, or it had no gradient.
        """
        report = self._measured()
        check_measured(report, self.settings)
        return run_rules(report, self.settings, self.baseline)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the rules of `hookscope gradnorm` object to in the last measured step, errors first."""
        return findings(self.cases)

    def as_baseline(
        self,
        *,
        loss: float = 0.0,
        pictures: int = 1,
        loss_name: str = "cross_entropy",
        labels: str = "the data's own",
        layers: str = "**",
        precision: str = "fp32",
        made: Made | None = None,
    ) -> GradBaseline:
        """The last measured step as a baseline of `hookscope gradnorm`, which compares like with like only.

        Args:
            loss: its value, which a monitor does not see.
            pictures: in the step's batch, likewise.
            loss_name: as `gradnorm --loss` names it.
            labels: where the targets came from, in `gradnorm`'s words.
            layers: the globs that chose layers, in words.
            precision: of the model.
            made: model, weights and versions; another is worth a warning when compared.
        """
        report = replace(self._measured(), loss=loss, pictures=pictures)
        measured = measured_by(report, loss=loss_name, labels=labels, layers=layers, precision=precision)
        return GradBaseline(measured, made or Made("", "", {}), figures_of(report))

    def _measured(self) -> GradReport:
        if self.grad is None:
            raise NothingMeasured(
                "no training step was measured", "is the monitor started before backward()?"
            )
        return self.grad


def grad_report(
    last: Last,
    watched: Sequence[Watched],
    types: Mapping[str, str],
    spreads: Mapping[str, Spread],
    total: Spread | None,
) -> GradReport:
    """The last step as `hookscope gradnorm` reports it; the loss is 0, as a monitor does not see it.

    Args:
        last: the step.
        watched: the parameters.
        types: layers to be reported with their classes, in model order.
        spreads: of each parameter's norms over all steps.
        total: of the total norms.
    """
    record = last.record
    rows = tuple(
        _param(one, size, record, spreads.get(one.name))
        for one, size in zip(watched, last.sizes, strict=True)
    )
    return GradReport(
        loss=0.0,
        total_norm=record.total_norm or 0.0,
        pictures=1,
        batches=1,
        parameters=rows,
        layers=_layers(last, rows, types),
        norm=record.norm,
        total=_together(rows),
        total_spread=total,
        train_mode=last.train_mode,
    )


def spread_of(summary: Summary | None) -> Spread | None:
    """A summary as `gradnorm` gives spreads: `nan` where a step's figure was not finite."""
    if summary is None:
        return None
    steps = summary.steps + summary.non_finite
    if summary.non_finite:
        return Spread(math.nan, math.nan, math.nan, summary.last, steps)
    return Spread(summary.mean, summary.maximum, summary.minimum, summary.last, steps)


def _param(one: Watched, size: Magnitude | None, record: StepRecord, spread: Spread | None) -> ParamGrad:
    figures = record.parameters[one.name]
    return ParamGrad(
        name=one.name,
        layer=one.layer,
        shape=tuple(one.parameter.shape),
        aliases=one.aliases,
        weight_norm=figures.weight_norm,
        gradient=size,
        ratio=figures.ratio,
        status=figures.status,
        grad_norm=figures.norm,
        spread=spread,
    )


def _layers(last: Last, rows: Sequence[ParamGrad], types: Mapping[str, str]) -> tuple[LayerGrad, ...]:
    """Layers that returned something, in the order of forward; then the others."""
    own: dict[str, list[ParamGrad]] = {}
    for row in rows:
        if row.gradient is not None:
            own.setdefault(row.layer, []).append(row)
    sites = [site for site in last.sites if site.layer in types]
    seen = {site.layer for site in sites}
    return (
        *(_called(site, last, own, types, depth) for depth, site in enumerate(sites)),
        *(_silent(name, last, own, types) for name in types if name not in seen),
    )


_Own = Mapping[str, Sequence[ParamGrad]]


def _called(site: Site, last: Last, own: _Own, types: Mapping[str, str], depth: int) -> LayerGrad:
    found = last.activations.get(site)
    row = _layer(
        site, last, own, types, str(Status.NO_GRAD_PATH if found is None else found.figures().status)
    )
    if found is None:
        return replace(row, depth=depth)
    size = Magnitude(found.norm, found.maximum, found.non_finite, found.count)
    return replace(row, depth=depth, output_grad=size, output_grad_norm=size.of(last.record.norm))


def _silent(name: str, last: Last, own: _Own, types: Mapping[str, str]) -> LayerGrad:
    status = last.statuses.get(name, NOT_MEASURED)
    bypassed = status == Status.NOT_CALLED and name in own
    return _layer(Site(name), last, own, types, str(Status.BYPASSED) if bypassed else status)


def _layer(site: Site, last: Last, own: _Own, types: Mapping[str, str], status: str) -> LayerGrad:
    """What is known of the layer's parameters."""
    norm, rows = last.record.norm, own.get(site.layer, ())
    parameter = _together(rows)
    weight = norm_of_norms([row.weight_norm for row in rows], norm) if rows else None
    figure = None if parameter is None else parameter.of(norm)
    return LayerGrad(
        site=site,
        type=types.get(site.layer, ""),
        depth=None,
        output_grad=None,
        input_grad_total=None,
        parameter_grad_norm=figure,
        status=status,
        parameter_grad=parameter,
        weight_norm=weight,
        ratio=figure / weight if figure is not None and weight else None,
    )


def _together(rows: Sequence[ParamGrad]) -> Magnitude | None:
    whole: Magnitude | None = None
    for row in rows:
        whole = whole if row.gradient is None else joined(whole, row.gradient)
    return whole
