"""A report of distributions as the places that rules look at: each tensor once, or why there is none.

It measures and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hookscope.checks.rules import Place
from hookscope.layers import Status
from hookscope.statsreport import INPUT, OUTPUT

if TYPE_CHECKING:
    from hookscope.layers import Site
    from hookscope.statsreport import StatsReport, StatsRow

_MISSING: dict[str, str] = {
    Status.NOT_CALLED: "it was never called",
    Status.BYPASSED: "its parameters are used without calling it",
    Status.NO_TENSOR: "it has no tensor",
}
RECTIFIED = ("relu", "relu6")
"""Kinds whose units can be dead."""
BOUNDED = ("relu6", "sigmoid", "tanh", "hardsigmoid", "hardtanh")
"""Kinds whose units can be saturated."""


def place_of(row: StatsRow) -> Place:
    """Where a row is."""
    return Place(row.place, row.site.layer, row.type)


def places(report: StatsReport) -> tuple[Place, ...]:
    """All that a glob may mean, in the report."""
    return tuple(place_of(row) for row in report.rows)


def judged(report: StatsReport) -> tuple[StatsRow, ...]:
    """The rows that are looked at: a tensor that is two places' counts once, at the first."""
    return tuple(row for row in report.rows if row.same_as is None)


def missing(row: StatsRow) -> str:
    """Why a row has nothing to judge, `""` where it has."""
    found = row.distribution
    if found is None:
        return _MISSING.get(row.status, row.status) or "nothing was measured"
    if found.count == 0:
        return "it has no values"
    return "no value is finite" if found.non_finite >= found.count else ""


def missing_units(row: StatsRow) -> str:
    """Why a row has no units to judge, `""` where it has."""
    if why := missing(row):
        return why
    found = row.distribution
    return "its channel axis is not known" if found is None or found.channels is None else ""


def by_place(report: StatsReport) -> Mapping[tuple[Site, str], StatsRow]:
    """Every row by its site and side."""
    return {(row.site, row.side): row for row in report.rows}


def received(report: StatsReport) -> Mapping[tuple[str, int], Sequence[StatsRow]]:
    """What each call of each layer received."""
    found: dict[tuple[str, int], list[StatsRow]] = {}
    for row in report.inputs:
        found.setdefault((row.site.layer, row.site.call), []).append(row)
    return found


def after_norms(report: StatsReport) -> Iterator[tuple[StatsRow, StatsRow]]:
    """(what a layer receives, the normalisation's output that it is), each output once, at its first receiver."""
    rows, seen = by_place(report), set()
    for row in report.rows:
        if row.side != INPUT or row.same_as is None or row.same_as in seen:
            continue
        origin = rows.get(row.same_as)
        if origin is not None and origin.side == OUTPUT and origin.kind == "norm":
            seen.add(row.same_as)
            yield row, origin
