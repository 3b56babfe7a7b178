"""What the gates of all commands share: their flags, how they are read, and what a verdict is made of.

A gate looks at a report by rules, and at a baseline. What the rules are, what a report holds and how a baseline keeps
it is each command's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hookscope.checks.findings import Case, failing, parse_fail_on
from hookscope.checks.formats import junit, sarif
from hookscope.checks.measured import Made
from hookscope.checks.rules import Settings
from hookscope.checks.rules import findings as found
from hookscope.checks.sources import sources_of
from hookscope.errors import UsageError
from hookscope.records import versions
from hookscope.tasks import Gate, Subject
from hookscope.wording import counted

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class GateOptions:
    """The flags that decide what fails.

    `severity`, `limits`: tables as a configuration has them. `layers`: which are chosen, in words, for a baseline.
    `root`: what files of layers' classes are relative to.
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


@dataclass(frozen=True)
class GateRules:
    """A gate's rules by the flags: `command` and `title` name it to people, `settings` say what holds where.

    `fail_on`: the severities and rules whose findings fail the run.
    """

    command: str
    title: str
    settings: Settings
    fail_on: tuple[str, ...]

    @classmethod
    def of(cls, options: GateOptions, command: str, title: str, defaults: Settings) -> GateRules:
        """The defaults with what the flags say over them.

        Raises:
            UsageError: a rule, severity or limit that cannot be, or --update-baseline without --baseline.
        """
        settings = defaults.over(options.severity, options.limits, command)
        fail_on = parse_fail_on(options.fail_on, [rule.name for rule in defaults.rules])
        if options.update_baseline and options.baseline is None:
            raise UsageError("--update-baseline without --baseline", "--baseline FILE says which")
        return cls(command, title, settings, fail_on)

    @property
    def junit(self) -> str:
        """The file of all cases as JUnit XML."""
        return f"{self.command}.junit.xml"

    @property
    def sarif(self) -> str:
        """The file of all findings as SARIF."""
        return f"{self.command}.sarif"

    def verdict(
        self,
        cases: tuple[Case, ...],
        subject: Subject,
        root: Path,
        *,
        properties: Mapping[str, str],
        baseline: Mapping[str, bytes],
        updates: Mapping[Path, bytes],
        warnings: tuple[str, ...] = (),
    ) -> Verdict:
        """The verdict that the cases come to.

        Args:
            cases: what every rule said of every place.
            subject: the model that was measured.
            root: what files of layers' classes are relative to.
            properties: what people should know of the run, for JUnit; its model and weights are added.
            baseline: this run's own, by file name.
            updates: baselines elsewhere that are replaced.
            warnings: of the comparison.
        """
        findings, made = found(cases), made_by(subject)
        sources = sources_of(subject.model, root)
        failed = len(failing(findings, self.fail_on))
        looked = sum(not case.skipped for case in cases)
        said = sarif.to_json(
            findings,
            {rule.name: rule for rule in self.settings.rules},
            sources=sources,
            version=made.versions["hookscope"],
        )
        about = {**properties, "model": made.model, "weights": made.weights}
        return Verdict(
            gate=Gate(self.title, findings, cases, self.fail_on, sources),
            documents={
                self.junit: junit.to_xml(
                    cases, suite=f"hookscope {self.command}", fail_on=self.fail_on, properties=about
                ),
                self.sarif: said.encode("utf-8", "backslashreplace"),
                **baseline,
            },
            updates=updates,
            warnings=warnings,
            lines=(
                f"{counted(looked, 'check')}, {counted(len(findings), 'finding')}, {failed} of them failing",
                *(f"baseline {path} updated" for path in updates),
            ),
        )


def earlier(
    options: GateOptions, read: Callable[[str], Kept], to_update: Callable[[str], Kept | None]
) -> Kept | None:
    """The baseline that the flags name: to compare with, or to replace, where there need not be one yet.

    Raises:
        UsageError: it cannot be read, or replaced.
    """
    if options.baseline is None:
        return None
    return to_update(options.baseline) if options.update_baseline else read(options.baseline)


def made_by(subject: Subject) -> Made:
    """By what the figures of this run are made."""
    return Made(str(subject.record.get("name", "")), str(subject.record.get("weights", "")), versions())
