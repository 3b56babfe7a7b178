"""Gradients along the depth of a model: whether they fade steadily, and which layer is unlike those around it.

Works on the RMS of the gradients at layers' outputs, in decades, as sizes of layers differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hookscope.checks.gradrows import Row, layer_rows
from hookscope.checks.rules import Place, Seen, Settings
from hookscope.wording import counted

if TYPE_CHECKING:
    from hookscope.gradreport import GradReport

_NEIGHBOURS = 4
_FEWEST_NEIGHBOURS = 3
_FEWEST_LAYERS = 5
# A slope is of every pair of points; beyond this many, which make 180,000 pairs, an even choice of them will do.
_MOST_POINTS = 600
# Of the neighbours' mean deviation: of layers of two kinds that take turns, a median would see one kind only.
_SPREADS = 3.0


def depth_trend(points: Sequence[tuple[float, float]]) -> float:
    """How far the second number rises over the whole range of the first, by the median of all slopes.

    `points`: at least two (x, y), x ascending. Three in ten of them may be anything: Theil (1950), Sen (1968).
    """
    step = -(-len(points) // _MOST_POINTS)
    chosen = points[::step]
    slopes = [
        (high - low) / (right - left)
        for at, (left, low) in enumerate(chosen)
        for right, high in chosen[at + 1 :]
    ]
    return statistics.median(slopes) * (points[-1][0] - points[0][0])


def trend(report: GradReport, settings: Settings) -> Iterator[Seen]:
    """What the rule `depth-trend` sees of the model."""
    points = [
        (float(layer.depth), math.log10(row.rms))
        for row, layer in zip(layer_rows(report), report.layers, strict=True)
        if row.rms is not None and layer.depth is not None
    ]
    if len(points) < _FEWEST_LAYERS:
        told = f"{counted(len(points), 'layer')} with a finite gradient above zero, and {_FEWEST_LAYERS} are needed"
        yield Seen(Place(), skipped=told)
        return
    decades, limit = depth_trend(points), settings.number("depth-trend", Place())
    way = "falls" if decades > 0 else "grows"
    message = (
        f"the RMS of the gradient {way} by {abs(decades):.6g} decades from the last layer back to the first, "
        f"over {counted(len(points), 'layer')}, more than {limit:g}"
    )
    yield Seen(Place(), decades, limit, message if abs(decades) > limit else "")


def outliers(layers: Sequence[Row], settings: Settings) -> Iterator[Seen]:
    """What the rule `outlier` sees at every layer."""
    known = [(row.place, math.log10(row.rms)) for row in layers if row.rms is not None]
    at = {place: position for position, (place, _) in enumerate(known)}
    values = [value for _, value in known]
    for row in layers:
        if row.place not in at:
            yield Seen(row.place, skipped=row.unfit)
        else:
            yield _apart(row.place, values, at[row.place], settings.number("outlier", row.place))


def _apart(place: Place, values: Sequence[float], at: int, limit: float) -> Seen:
    """One layer against those around it; where they differ among themselves, it may by more."""
    around = [*values[max(0, at - _NEIGHBOURS) : at], *values[at + 1 : at + 1 + _NEIGHBOURS]]
    if len(around) < _FEWEST_NEIGHBOURS:
        return Seen(
            place, skipped=f"{counted(len(around), 'neighbour')}, and {_FEWEST_NEIGHBOURS} are needed"
        )
    middle = statistics.median(around)
    apart = values[at] - middle
    allowed = max(limit, _SPREADS * statistics.fmean(abs(value - middle) for value in around))
    message = (
        f"{place.name}: the RMS of the gradient at its output is {abs(apart):.6g} decades "
        f"{'above' if apart > 0 else 'below'} the median of its neighbours, more than {allowed:.6g}"
    )
    return Seen(place, apart, allowed, message if abs(apart) > allowed else "")
