"""The rules of the gate of `stats`: which places each is looked at for, in a report of distributions.

Pure: a report and settings in, cases out. It measures nothing, and knows neither flags nor formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from hookscope.checks.findings import Case
from hookscope.checks.rules import Look, Place, Seen, Settings, run
from hookscope.checks.statdrift import changed, drifted
from hookscope.checks.statrows import judged, missing, place_of, places
from hookscope.checks.statrules import LIMITS, RULES
from hookscope.checks.statspread import alike, concentrated, shifted
from hookscope.checks.statunits import constant, dead, saturated
from hookscope.errors import NothingMeasured
from hookscope.layers import all_names, modules_by_name
from hookscope.wording import counted, listed

if TYPE_CHECKING:
    from torch import nn

    from hookscope.checks.statfigures import StatsBaseline
    from hookscope.probes.finiteness import FirstNonFinite
    from hookscope.statsreport import StatsReport, StatsRow


def default_settings() -> Settings:
    """The gate's rules and limits with nothing set."""
    return Settings(RULES, LIMITS)


def run_rules(
    report: StatsReport, settings: Settings, baseline: StatsBaseline | None = None
) -> tuple[Case, ...]:
    """A case for every rule and each place that it concerns, in the order of `RULES` and of execution.

    The rules on drift are looked at only with a baseline, `alike` only where there is a spectrum.

    Raises:
        UsageError: a glob of the settings means no place of the report or the baseline.
    """
    settings.check((*places(report), *(baseline.figures.known() if baseline is not None else ())))
    looks: dict[str, Look] = {
        "nonfinite": partial(_nonfinite, report),
        "dead": partial(dead, report),
        "constant": partial(constant, report),
        "saturated": partial(saturated, report),
        "norm-shift": partial(shifted, report),
        "concentrated": partial(concentrated, report),
        "alike": partial(alike, report),
    }
    if baseline is not None:
        looks["drift"] = partial(drifted, report, baseline.figures)
        looks["layers-changed"] = partial(changed, report, baseline.figures)
    return run(looks, settings)


def check_measured(report: StatsReport) -> None:
    """Nothing, where anything passed at any place.

    Raises:
        NothingMeasured: nothing did.
    """
    if not any(row.distribution is not None and row.distribution.count for row in report.rows):
        raise NothingMeasured(
            "no chosen layer received or returned a tensor",
            "are the layers called at all? `hookscope layers`",
        )


def places_in(model: nn.Module) -> tuple[Place, ...]:
    """All that a glob may mean, in a model that has not been run yet."""
    types = {name: type(module).__name__ for name, module in modules_by_name(model).items()}
    return tuple(Place(first, first, types[first], others) for first, others in all_names(model).items())


def _nonfinite(report: StatsReport, settings: Settings) -> Iterator[Seen]:
    first = report.first_non_finite
    began = f"; it began at {first.site}" if first is not None else ""
    if first is not None:
        # Before all that follows from it, for those who are told of a few findings only.
        yield _began(_place(report, first), first)
    for row in judged(report):
        if first is None or row.place != str(first.site):
            yield _finite(row, began)


def _place(report: StatsReport, first: FirstNonFinite) -> Place:
    known = {place.name: place for place in places(report)}
    return known.get(str(first.site)) or Place(str(first.site), first.site.layer)


def _began(place: Place, first: FirstNonFinite) -> Seen:
    blamed = f" ({listed(first.parameters)})" if first.parameters else ""
    message = (
        f"{place.name}: the first layer where something is not finite: {first.non_finite} of "
        f"{counted(first.count, 'value')} of batch {first.batch}, and 0 may be; {first.why}{blamed}"
    )
    return Seen(place, first.non_finite, 0.0, message)


def _finite(row: StatsRow, began: str) -> Seen:
    place, found = place_of(row), row.distribution
    if found is None or found.count == 0:
        return Seen(place, skipped=missing(row))
    if not found.non_finite:
        return Seen(place, 0.0, 0.0)
    message = f"{row.place}: {found.non_finite} of {counted(found.count, 'value')} are not finite, and 0 may be{began}"
    return Seen(place, found.non_finite, 0.0, message)
