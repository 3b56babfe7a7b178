"""What every gate shares: rules, what a rule said of a layer, and the findings among that. Knows no format.

A rule is looked at for each layer (or parameter, or the whole model); what came of it is a `Case`. A case that did not
pass holds a `Finding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hookscope.errors import UsageError, near_misses

SEVERITIES = ("error", "warn", "off")
"""How bad a finding is: `off` is not looked for."""


@dataclass(frozen=True)
class Finding:
    """A check that did not pass: which rule, where, the value, its limit, and what that means.

    `layer`: a layer's or parameter's name, `""` for the whole model. `value`, `limit`: `nan` where the rule compares
    no numbers. `why`: why it matters; `advice`: what to try; both are sentences, `""` where nothing can be said.
    """

    rule: str
    severity: str
    layer: str
    value: float
    limit: float
    message: str
    why: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Rule:
    """What is looked for: its name, severity unless set otherwise, and for people what it is, why and what to try."""

    name: str
    severity: str
    summary: str
    why: str
    advice: str


@dataclass(frozen=True)
class Case:
    """One rule looked at for one layer: passed where there is neither a finding nor a reason to skip it."""

    rule: str
    layer: str
    finding: Finding | None = None
    skipped: str = ""


@dataclass(frozen=True)
class Source:
    """Where a layer's class is written: a file, relative to the working directory where it lies in it, and a line."""

    file: str
    line: int


def parse_fail_on(text: str, rules: Iterable[str]) -> tuple[str, ...]:
    """`error`, `warn` (which includes errors), or rules between commas, as `--fail-on` takes them.

    Raises:
        UsageError: a word is neither a severity nor a rule.
    """
    known = ["error", "warn", *rules]
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        if word not in known:
            hint = near_misses(word, known) or f"error, warn, or of {', '.join(known[2:])}"
            raise UsageError(f"--fail-on {word!r} is neither a severity nor a rule", hint)
    return words


def failing(findings: Sequence[Finding], fail_on: Sequence[str]) -> tuple[Finding, ...]:
    """The findings that make a run fail."""
    severities = {"error": {"error"}, "warn": {"error", "warn"}}
    bad = set[str]().union(*(severities.get(word, set()) for word in fail_on))
    return tuple(finding for finding in findings if finding.severity in bad or finding.rule in fail_on)
