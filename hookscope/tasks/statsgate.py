"""The gate of `stats`: rules and a baseline over a report, and what came of them for people, scripts and CI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hookscope.checks import statbaseline
from hookscope.checks.statfigures import StatsBaseline, figures_of, measured_by
from hookscope.checks.stats import check_measured, default_settings, places_in, run_rules
from hookscope.checks.statspread import alike_in_words
from hookscope.tasks import Subject
from hookscope.tasks.gate import GateOptions, GateRules, Verdict, earlier, made_by

if TYPE_CHECKING:
    from torch import nn

    from hookscope.checks.rules import Settings
    from hookscope.statsreport import StatsReport


class StatsGate:
    """Judges reports of distributions by the options.

    Raises:
        UsageError: a rule, severity, limit or baseline that cannot be.
    """

    def __init__(self, options: GateOptions) -> None:
        self._options = options
        self._rules = GateRules.of(options, "stats", "Activations over data", default_settings())
        self._old: StatsBaseline | None = earlier(options, statbaseline.read, statbaseline.to_update)

    @property
    def settings(self) -> Settings:
        """The rules and limits that hold."""
        return self._rules.settings

    def check(self, model: nn.Module) -> None:
        """Nothing, where every glob means something of the model or the baseline, and this measures as that did.

        Before a run, so that nothing is measured, nor an earlier output replaced, in vain.

        Raises:
            UsageError: a glob means nothing, or the baseline is of another precision or other layers.
        """
        known = self._old.figures.known() if self._old is not None else ()
        self._rules.settings.check((*places_in(model), *known))
        if self._old is None or self._options.update_baseline:
            return
        options = self._options
        self._old.check_comparable(
            replace(self._old.measured, layers=options.layers, precision=options.precision)
        )

    def judge(self, report: StatsReport, subject: Subject) -> Verdict:
        """The verdict on a report.

        Raises:
            NothingMeasured: there is nothing to judge.
            UsageError: the baseline was measured otherwise.
        """
        check_measured(report)
        options = self._options
        measured = measured_by(report, layers=options.layers, precision=options.precision)
        new = StatsBaseline(measured, made_by(subject), figures_of(report))
        old = None if options.update_baseline else self._old
        if old is not None:
            old.check_comparable(measured)
        updates = {}
        if options.update_baseline and options.baseline is not None:
            updates[Path(options.baseline)] = new.encoded()
        verdict = self._rules.verdict(
            run_rules(report, self._rules.settings, old),
            subject,
            options.root,
            properties={"pictures": str(report.pictures)},
            baseline={statbaseline.FILE: new.encoded()},
            updates=updates,
            warnings=old.differences(new.made) if old is not None else (),
        )
        alike = alike_in_words(report)
        return replace(verdict, lines=(*verdict.lines, alike)) if alike else verdict
