"""Units of a layer that do nothing for the answer: dead, constant, saturated.

A unit is a channel; what it gave over all pictures and positions decides. Neither the share of zeros nor a mean over
positions does: a unit that fires once, at one place, is alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hookscope.checks.rules import Seen, Settings
from hookscope.checks.statrows import BOUNDED, RECTIFIED, judged, missing_units, place_of, received
from hookscope.layers import ROOT
from hookscope.statsreport import OUTPUT
from hookscope.wording import counted, ranges

if TYPE_CHECKING:
    from hookscope.layers import Site
    from hookscope.statsreport import ChannelStats, StatsReport, StatsRow

Units = NDArray[np.intp]

_MOST_NAMED = 12
_MOVING = {"Flatten", "Unflatten", "ChannelShuffle", "PixelShuffle", "PixelUnshuffle", "Fold", "Unfold"}
"""Classes that move values from one channel to others, and have no units of their own."""


def dead_units(row: StatsRow) -> Units | None:
    """The channels that were never above the threshold; `None` where there cannot be dead ones.

    There can only be at the output of a rectified layer. A channel without a finite value is not one.
    """
    found = _channels(row)
    if found is None or row.side != OUTPUT or row.kind not in RECTIFIED:
        return None
    return np.flatnonzero((found.alive == 0) & (found.count > 0))


def constant_units(row: StatsRow, inputs: Sequence[StatsRow] = (), limit: float = 0.0) -> Units | None:
    """The channels that gave the same value for everything; `None` where that is not a fault of the layer's own.

    Not looked for at inputs, nor where a layer is rectified or bounded, whose units are dead or saturated instead, or
    only moves values.

    Args:
        row: an output.
        inputs: what the same call received: a channel that was constant there already is left out.
        limit: the deviation that still counts as none, as a share of the root mean square.
    """
    found = _channels(row)
    if found is None or not _may_be_constant(row):
        return None
    still = _still(found, limit)
    for one in inputs:
        before = _channels(one)
        if before is not None and before.channels == found.channels:
            still &= ~_still(before, limit)
    return np.flatnonzero(still)


def constant_by_row(report: StatsReport, settings: Settings) -> Mapping[tuple[Site, str], Units]:
    """The constant units of every row that there can be any of, those left out that a layer has from others.

    A layer around others joins and moves channels in ways that cannot be seen: it is only blamed where it has more
    such units than the layers inside it, dead ones counted too, and what it received.
    """
    inputs = received(report)
    found: dict[tuple[Site, str], Units] = {}
    idle: dict[str, int] = {}
    for row in report.outputs:
        before = inputs.get((row.site.layer, row.site.call), ())
        units = constant_units(row, before, settings.number("constant", place_of(row)))
        if units is not None:
            prefix = "" if row.site.layer == ROOT else f"{row.site.layer}."
            inside = [
                count for name, count in idle.items() if name.startswith(prefix) and name != row.site.layer
            ]
            owed = sum(inside) + sum(_still_count(one) for one in before)
            found[(row.site, row.side)] = units[:0] if inside and len(units) <= owed else units
        dead_too = dead_units(row)
        idle[row.site.layer] = idle.get(row.site.layer, 0) + _size(units) + _size(dead_too)
    return found


def saturated_units(row: StatsRow, share: float) -> Units | None:
    """The channels with more than that share of their values at a bound; `None` where the layer has no bounds."""
    found = _channels(row)
    if found is None or row.side != OUTPUT or found.saturated is None:
        return None
    return np.flatnonzero((found.saturated > share * found.count) & (found.count > 0))


def dead(report: StatsReport, settings: Settings) -> Iterator[Seen]:
    """What the rule `dead` sees at every rectified output."""
    for row in _outputs(report, RECTIFIED):
        place, units = place_of(row), dead_units(row)
        limit = settings.number("dead", place)
        if units is None or (few := too_few(report, settings, "dead", row)):
            yield Seen(place, limit=limit, skipped=missing_units(row) or few)
            continue
        total = _total(row)
        share = len(units) / total
        said = (
            f"{_many(row, units)} never above {report.threshold:g} in {counted(report.pictures, 'picture')}"
        )
        yield Seen(place, share, limit, f"{said}{_named(units)}" if share > limit else "")


def constant(report: StatsReport, settings: Settings) -> Iterator[Seen]:
    """What the rule `constant` sees at every output that is neither rectified nor bounded."""
    found = constant_by_row(report, settings)
    for row in judged(report):
        if not _may_be_constant(row):
            continue
        place = place_of(row)
        limit = settings.number("constant", place)
        units = found.get((row.site, row.side))
        if units is None or (few := too_few(report, settings, "constant", row)):
            yield Seen(place, limit=limit, skipped=missing_units(row) or few)
            continue
        least = _least_relative_deviation(row)
        said = f"{_many(row, units)} the same value in all of {counted(report.pictures, 'picture')}{_named(units)}"
        yield Seen(place, least, limit, said if len(units) else "")


def saturated(report: StatsReport, settings: Settings) -> Iterator[Seen]:
    """What the rule `saturated` sees at every bounded output."""
    for row in _outputs(report, BOUNDED):
        place = place_of(row)
        limit = settings.number("saturated", place)
        units = saturated_units(row, limit)
        if units is None or (few := too_few(report, settings, "saturated", row)):
            yield Seen(place, limit=limit, skipped=missing_units(row) or few or "its bounds are not known")
            continue
        worst = _largest_share(row)
        said = f"{_many(row, units)} at a bound in more than {100 * limit:g} % of their values"
        yield Seen(place, worst, limit, f"{said}{_named(units)}" if len(units) else "")


def _outputs(report: StatsReport, kinds: Sequence[str]) -> Iterator[StatsRow]:
    return (row for row in judged(report) if row.side == OUTPUT and row.kind in kinds)


def too_few(report: StatsReport, settings: Settings, rule: str, row: StatsRow) -> str:
    """Why the units at a row cannot be called `rule` (`dead`, `constant`, `saturated`) yet, `""` where they can."""
    wanted = settings.number(f"{rule}-samples", place_of(row))
    short = report.pictures < wanted
    return f"not enough data: {report.pictures} of {wanted:g} pictures" if short else ""


def _channels(row: StatsRow) -> ChannelStats | None:
    return row.distribution.channels if row.distribution is not None else None


def _may_be_constant(row: StatsRow) -> bool:
    return row.side == OUTPUT and row.kind not in (*RECTIFIED, *BOUNDED) and row.type not in _MOVING


def _still_count(row: StatsRow) -> int:
    found = _channels(row)
    return int(_still(found, 0.0).sum()) if found is not None else 0


def _size(units: Units | None) -> int:
    return 0 if units is None else len(units)


def _total(row: StatsRow) -> int:
    found = _channels(row)
    return max(found.channels, 1) if found is not None else 1


def _still(found: ChannelStats, limit: float) -> NDArray[np.bool_]:
    """(C,): whether a channel has no deviation to speak of, over two values at least."""
    flat = (found.minimum == found.maximum) | (found.std <= limit * np.sqrt(found.energy))
    still: NDArray[np.bool_] = flat & (found.count > 1)
    return still


def _least_relative_deviation(row: StatsRow) -> float:
    found = _channels(row)
    if found is None:
        return float("nan")
    scale = np.sqrt(found.energy)
    relative = np.divide(found.std, scale, out=np.zeros(found.channels), where=scale > 0)
    return float(np.min(relative[found.count > 0], initial=np.inf))


def _largest_share(row: StatsRow) -> float:
    found = _channels(row)
    if found is None or found.saturated is None:
        return float("nan")
    return float(np.max(found.saturated / np.maximum(found.count, 1), initial=0.0))


def _many(row: StatsRow, units: Units) -> str:
    return f"{row.place}: {len(units)} of {counted(_total(row), 'unit')} {'is' if len(units) == 1 else 'are'}"


def _named(units: Units) -> str:
    more = f" and {len(units) - _MOST_NAMED} more" if len(units) > _MOST_NAMED else ""
    return f" ({ranges(units[:_MOST_NAMED].tolist())}{more})"
