"""The gate of `gradnorm`: rules and a baseline over a report, and what came of them for people, scripts and CI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hookscope.checks import gradbaseline
from hookscope.checks.graddrift import updated
from hookscope.checks.gradfigures import GradBaseline, figures_of, measured_by
from hookscope.checks.gradients import check_measured, default_settings, places_in, run_rules
from hookscope.checks.gradrows import places
from hookscope.magnitudes import norm_name
from hookscope.tasks import Subject
from hookscope.tasks.gate import GateOptions as GateOptions
from hookscope.tasks.gate import GateRules, Verdict, earlier, made_by

if TYPE_CHECKING:
    from torch import nn

    from hookscope.gradreport import GradReport
    from hookscope.tasks.gradtables import Loss


class GradGate:
    """Judges gradient reports by the options.

    Raises:
        UsageError: a rule, severity, limit or baseline that cannot be.
    """

    def __init__(self, options: GateOptions) -> None:
        self._options = options
        self._rules = GateRules.of(options, "gradnorm", "Gradient norms", default_settings())
        self._old: GradBaseline | None = earlier(options, gradbaseline.read, gradbaseline.to_update)

    def check(self, model: nn.Module, *, loss: str, norm: float, train_mode: bool) -> None:
        """Nothing, where every glob means something of the model or the baseline, and this measures as that did.

        Before a run, so that nothing is measured, nor an earlier output replaced, in vain.

        Raises:
            UsageError: a glob means nothing, or the baseline is of another loss, norm, mode, precision or layers.
        """
        known = self._old.figures.places() if self._old is not None else ()
        self._rules.settings.check((*places_in(model), *known))
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
        options, settings = self._options, self._rules.settings
        check_measured(report, settings)
        measured = measured_by(
            report, loss=loss.name, labels=loss.labels, layers=options.layers, precision=options.precision
        )
        new = GradBaseline(measured, made_by(subject), figures_of(report))
        old = None if options.update_baseline else self._old
        if old is not None:
            old.check_comparable(measured)
        updates = {}
        if options.update_baseline and options.baseline is not None:
            kept = updated(self._old, new, settings, places(report))
            updates[Path(options.baseline)] = kept.encoded()
        return self._rules.verdict(
            run_rules(report, settings, old),
            subject,
            options.root,
            properties={"loss": loss.name, "labels": loss.labels},
            baseline={gradbaseline.FILE: new.encoded()},
            updates=updates,
            warnings=old.differences(new.made) if old is not None else (),
        )
