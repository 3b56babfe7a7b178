"""Findings as a table for the page that a run writes for people. A table out; it writes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hookscope.artifacts import Table
from hookscope.checks.findings import Finding
from hookscope.checks.formats import WHOLE_MODEL, worst_first

_COLUMNS = ("layer", "rule", "severity", "value", "limit", "message")


def findings_table(findings: Sequence[Finding], kind: str) -> Table:
    """All findings, the worst first, and for each rule why it matters and what to try.

    `kind`: of the command's tables.
    """
    rows = tuple(_row(finding) for finding in worst_first(findings))
    said = {one.rule: " ".join(filter(None, (one.why, one.advice))) for one in worst_first(findings)}
    notes = tuple(f"{rule}: {words}" for rule, words in said.items() if words)
    return Table(kind, "Findings", _COLUMNS, rows, notes)


def _row(finding: Finding) -> tuple[str | float | None, ...]:
    compared = not (math.isnan(finding.value) and math.isnan(finding.limit))
    return (
        finding.layer or WHOLE_MODEL,
        finding.rule,
        finding.severity,
        finding.value if compared else None,
        None if math.isnan(finding.limit) else finding.limit,
        finding.message,
    )
