"""The gate of `gradnorm`: rules and a baseline over a report, and what came of them for people, scripts and CI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookscope.checks import gradbaseline
from hookscope.checks.findings import Case, Finding, Source, failing, parse_fail_on
from hookscope.checks.formats import junit, sarif
from hookscope.checks.graddrift import updated
from hookscope.checks.gradfigures import GradBaseline, Made, figures_of, measured_by
from hookscope.checks.gradients import check_measured, default_settings, places_in, run_rules
from hookscope.checks.gradrows import places
from hookscope.checks.gradrules import RULES
from hookscope.checks.rules import Settings
from hookscope.checks.rules import findings as found
from hookscope.checks.sources import sources_of
from hookscope.errors import UsageError
from hookscope.magnitudes import norm_name
from hookscope.records import versions
from hookscope.tasks import Gate, Subject
from hookscope.wording import counted

if TYPE_CHECKING:
    from torch import nn

    from hookscope.gradreport import GradReport
    from hookscope.tasks.gradtables import Loss

JUNIT, SARIF = "gradnorm.junit.xml", "gradnorm.sarif"


@dataclass(frozen=True)
class GateOptions:
    """The flags that decide what fails.

    `severity`, `limits`: tables as a configuration has them. `root`: what files of layers' classes are relative to.
    """

    fail_on: str = "error"
    severity: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None
    update_baseline: bool = False
    precision: str = "fp32"
    layers: str = "**"
    root: Path = field(default_factory=Path.cwd)


@dataclass(frozen=True)
class Verdict:
    """What came of a gate: all findings, whether they fail the run, files to write, and words."""

    gate: Gate
    documents: Mapping[str, bytes]
    updates: Mapping[Path, bytes]
    warnings: tuple[str, ...]
    lines: tuple[str, ...]


class GradGate:
    """Judges gradient reports by the options.

    Raises:
        UsageError: a rule, severity, limit or baseline that cannot be.
    """

    def __init__(self, options: GateOptions) -> None:
        self._options = options
        self._settings: Settings = default_settings().over(options.severity, options.limits, "gradnorm")
        self._fail_on = parse_fail_on(options.fail_on, [rule.name for rule in RULES])
        self._old: GradBaseline | None = None
        if options.update_baseline and options.baseline is None:
            raise UsageError("--update-baseline without --baseline", "--baseline FILE says which")
        if options.baseline is not None:
            read = gradbaseline.to_update if options.update_baseline else gradbaseline.read
            self._old = read(options.baseline)

    def check(self, model: nn.Module, *, loss: str, norm: float, train_mode: bool) -> None:
        """Nothing, where every glob means something of the model or the baseline, and this measures as that did.

        Before a run, so that nothing is measured, nor an earlier output replaced, in vain.

        Raises:
            UsageError: a glob means nothing, or the baseline is of another loss, norm, mode, precision or layers.
        """
        known = self._old.figures.places() if self._old is not None else ()
        self._settings.check((*places_in(model), *known))
        if self._old is None or self._options.update_baseline:
            return
        same = replace(
            self._old.measured,
            loss=loss,
            layers=self._options.layers,
            norm=norm_name(norm),
            precision=self._options.precision,
            train_mode=train_mode,
        )
        self._old.check_comparable(same)

    def judge(self, report: GradReport, loss: Loss, subject: Subject) -> Verdict:
        """The verdict on a report.

        Raises:
            NothingMeasured: there is nothing to judge.
            UsageError: the baseline was measured otherwise.
        """
        check_measured(report, self._settings)
        options = self._options
        measured = measured_by(
            report, loss=loss.name, labels=loss.labels, layers=options.layers, precision=options.precision
        )
        made = Made(str(subject.record.get("name", "")), str(subject.record.get("weights", "")), versions())
        new = GradBaseline(measured, made, figures_of(report))
        old = None if options.update_baseline else self._old
        if old is not None:
            old.check_comparable(measured)
        cases = run_rules(report, self._settings, old)
        findings = found(cases)
        sources = sources_of(subject.model, self._options.root)
        updates = {}
        if options.update_baseline and options.baseline is not None:
            kept = updated(self._old, new, self._settings, places(report))
            updates[Path(options.baseline)] = kept.encoded()
        return Verdict(
            gate=Gate("Gradient norms", findings, cases, self._fail_on, sources),
            documents=self._documents(cases, findings, sources, new, loss),
            updates=updates,
            warnings=old.differences(made) if old is not None else (),
            lines=(*self._lines(cases, findings), *(f"baseline {path} updated" for path in updates)),
        )

    def _documents(
        self,
        cases: tuple[Case, ...],
        findings: tuple[Finding, ...],
        sources: Mapping[str, Source],
        new: GradBaseline,
        loss: Loss,
    ) -> dict[str, bytes]:
        properties = {
            "loss": loss.name,
            "labels": loss.labels,
            "model": new.made.model,
            "weights": new.made.weights,
        }
        rules = {rule.name: rule for rule in RULES}
        said = sarif.to_json(findings, rules, sources=sources, version=new.made.versions["hookscope"])
        return {
            JUNIT: junit.to_xml(
                cases, suite="hookscope gradnorm", fail_on=self._fail_on, properties=properties
            ),
            SARIF: said.encode("utf-8", "backslashreplace"),
            gradbaseline.FILE: new.encoded(),
        }

    def _lines(self, cases: tuple[Case, ...], findings: tuple[Finding, ...]) -> tuple[str, ...]:
        failed = len(failing(findings, self._fail_on))
        looked = sum(not case.skipped for case in cases)
        return (f"{counted(looked, 'check')}, {counted(len(findings), 'finding')}, {failed} of them failing",)
