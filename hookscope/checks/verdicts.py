"""What the comparison of maps comes to: a row for each, findings by rule, the table, and words for people.

Pure: rows in, plain values out. It decides what fails, not how alike two maps are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hookscope.artifacts import Table
from hookscope.checks.findings import Finding
from hookscope.checks.mapkeys import MapKey, explained
from hookscope.likeness import Likeness
from hookscope.wording import counted

COLUMNS = (
    "image", "layer", "call", "output", "method", "target", "label", "status", "baseline_status", "spearman",
    "iou", "shift",
)  # fmt: skip


class Rule(StrEnum):
    """Why a map is a finding."""

    IOU = "min-iou"
    CORRELATION = "min-corr"
    STATUS = "status-changed"
    NOT_IN_BASELINE = "not-in-baseline"
    NOT_IN_RUN = "not-in-run"
    UNREADABLE = "baseline-unreadable"


@dataclass(frozen=True)
class Limits:
    """Below which figures a map is a finding; `None`: whatever it is."""

    iou: float | None = None
    correlation: float | None = None

    @property
    def any(self) -> bool:
        """Whether this is a gate at all."""
        return self.iou is not None or self.correlation is not None


@dataclass(frozen=True)
class Trouble:
    """Why a map has no figures, as a rule and in words."""

    rule: Rule
    words: str


@dataclass(frozen=True)
class Row:
    """One map of this run or the baseline; a status is empty where that side has no such map.

    `equal`: both sides say the same, value by value. `trouble`: why they could not be compared.
    """

    image: str
    key: MapKey
    label: str
    status: str = ""
    baseline_status: str = ""
    likeness: Likeness | None = None
    equal: bool = False
    trouble: Trouble | None = None

    def __str__(self) -> str:
        return f"{self.image}, {self.key.site} by {self.key.method} for {explained(self.key, self.label)}"

    def troubled(self, rule: Rule, words: str) -> Row:
        """The row with this trouble."""
        return replace(self, trouble=Trouble(rule, words))


def findings(rows: Sequence[Row], limits: Limits) -> list[Finding]:
    """All that a gate with these limits objects to, in the order of the rows."""
    return [finding for row in rows for finding in (*_trouble(row), *_too_low(row, limits))]


def warnings(found: Sequence[Finding]) -> tuple[str, ...]:
    """Findings where there is no gate to fail: one line for each rule, with the first of them."""
    counts: dict[str, list[Finding]] = {}
    for finding in found:
        counts.setdefault(finding.rule, []).append(finding)
    return tuple(_and_more(same[0].message, len(same) - 1) for same in counts.values())


def moved(partners: Mapping[str, str]) -> tuple[str, ...]:
    """A line on the pictures that were found in the baseline under another path."""
    pairs = [pair for pair in partners.items() if pair[0] != pair[1]]
    if not pairs:
        return ()
    first = f"{pairs[0][0]!r} is compared with the baseline's {pairs[0][1]!r}, going by the file name"
    return (_and_more(first, len(pairs) - 1),)


def table(rows: Sequence[Row], baseline: str) -> Table:
    """The table `compare`: a row for each map, worst and middle figures as its scores."""
    figures = [row.likeness for row in rows if row.likeness is not None]
    scores = _spread("spearman", "min", [found.spearman for found in figures])
    scores |= _spread("iou", "min", [found.iou for found in figures])
    scores |= _spread("shift", "max", [found.shift for found in figures])
    return Table(
        "compare", f"Maps compared with {baseline}", COLUMNS, tuple(map(_cells, rows)), scores=scores
    )


def lines(rows: Sequence[Row], baseline: str) -> tuple[str, ...]:
    """How it went, for people: how many, how alike, and the map that is least so."""
    compared = [row for row in rows if row.equal or row.likeness is not None]
    same = sum(row.equal for row in compared)
    scores = table(rows, baseline).scores
    said = [f"{counted(len(compared), 'map')} compared with {baseline}, {same} of them the same"]
    for name, words in (("iou", "overlap (IoU)"), ("spearman", "rank correlation")):
        if f"min_{name}" in scores and same < len(compared):
            low, middle = scores[f"min_{name}"], scores[f"median_{name}"]
            said.append(f"{words}: {low:.3f} at least, {middle:.3f} in the middle")
    least = min((row for row in compared if not row.equal and row.likeness), key=_unlike, default=None)
    return (*said, f"least alike: {least}") if least is not None else tuple(said)


def unlikeness(found: Likeness) -> tuple[float, float]:
    """What sorts pairs that differ by how little alike they are; a figure that is undefined comes first."""
    return _low_if_undefined(found.iou), _low_if_undefined(found.spearman)


def _trouble(row: Row) -> Iterator[Finding]:
    if row.trouble is not None:
        message = f"{row}: {row.trouble.words}"
        yield Finding(row.trouble.rule, "error", row.key.site.layer, math.nan, math.nan, message)


def _too_low(row: Row, limits: Limits) -> Iterator[Finding]:
    """A map that is the same passes whatever the figures: of a uniform one they are undefined."""
    if row.likeness is None or row.equal:
        return
    for rule, words, value, limit in (
        (Rule.IOU, "overlap (IoU)", row.likeness.iou, limits.iou),
        (Rule.CORRELATION, "rank correlation", row.likeness.spearman, limits.correlation),
    ):
        # Not `value < limit`, which an undefined value would pass.
        if limit is not None and not value >= limit:
            said = (
                f"is {value:.4g}, below {limit:g}" if math.isfinite(value) else f"is undefined, not {limit:g}"
            )
            message = f"{row}: the {words} with the baseline's map {said}"
            yield Finding(rule, "error", row.key.site.layer, value, limit, message)


def _cells(row: Row) -> tuple[object, ...]:
    found, key = row.likeness, row.key
    figures = (found.spearman, found.iou, found.shift) if found is not None else (None, None, None)
    place = (row.image, key.site.layer, key.site.call, key.site.output, key.method, key.target, row.label)
    return (*place, row.status, row.baseline_status, *figures)


def _spread(name: str, worst: str, values: Sequence[float]) -> dict[str, float]:
    """The worst and the middle one of those that are defined."""
    defined = [value for value in values if math.isfinite(value)]
    if not defined:
        return {}
    extreme = min(defined) if worst == "min" else max(defined)
    return {f"{worst}_{name}": extreme, f"median_{name}": statistics.median(defined)}


def _unlike(row: Row) -> tuple[float, float]:
    return unlikeness(row.likeness) if row.likeness is not None else (math.inf, math.inf)


def _low_if_undefined(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _and_more(first: str, more: int) -> str:
    return f"{first} (and {more} more like this)" if more else first
