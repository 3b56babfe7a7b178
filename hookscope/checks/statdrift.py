"""Distributions against those of a baseline: what drifted, and what is no longer the same layer.

Two figures say whether a place drifted. The population stability index, sum (p - q) ln(p / q) over bins that hold a
tenth of the baseline's sample each, sees any change of form; 0.2 is where credit scoring, which it comes from, calls
a population another. The standardised mean shift, |mean - mean'| / deviation', sees the centre alone, is made of all
values rather than of a sample, and needs no histogram.

Two samples of n and m values of one population have an index of (bins - 1)(1/n + 1/m) on average, and means that are
sqrt(1/n + 1/m) deviations apart. Three times that is added to the limits, since that much is chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookscope.checks.rules import Seen, Settings
from hookscope.checks.statfigures import (
    Figure,
    Figures,
    counts_of,
    figures_of,
    place_named,
    shares_of,
    stability_index,
)
from hookscope.checks.statrows import judged, missing, place_of, places

if TYPE_CHECKING:
    from hookscope.statsreport import StatsReport, StatsRow


@dataclass(frozen=True)
class Drift:
    """How far a place is from a baseline: the stability index and the mean shift, `None` where there is none.

    `index_noise`, `shift_noise`: what these are on average for two samples of that size of one population. `missing`:
    why there is neither, `""` where there is one.
    """

    index: float | None = None
    shift: float | None = None
    index_noise: float = 0.0
    shift_noise: float = 0.0
    missing: str = ""


def drift_of(row: StatsRow, old: Figure | None) -> Drift:
    """How far a row is from its figure in a baseline."""
    found = row.distribution
    if old is None:
        return Drift(missing="it is not in the baseline")
    if (why := missing(row)) or found is None:
        return Drift(missing=why)
    if old.mean is None or old.deviation is None:
        return Drift(missing="the baseline has no figure of it")
    counts = counts_of(row)
    sampled = int(counts.sum()) if counts is not None else 0
    shares = shares_of(counts, old.cuts) if counts is not None and old.shares else ()
    return Drift(
        stability_index(shares, old.shares, min(sampled, old.sampled)) if shares else None,
        _shift(found.mean, old.mean, old.deviation),
        len(old.cuts) * _pair(old.sampled, sampled),
        math.sqrt(_pair(old.count, found.count - found.non_finite)),
    )


def drifts(report: StatsReport, baseline: Figures) -> Mapping[str, Drift]:
    """How far every place is from a baseline, by its name."""
    return {row.place: drift_of(row, baseline.get(row.place)) for row in judged(report)}


def drifted(report: StatsReport, baseline: Figures, settings: Settings) -> Iterator[Seen]:
    """What the rule `drift` sees at every place that is in both; the index is named where both are above."""
    for row in judged(report):
        old = baseline.get(row.place)
        if old is None:
            continue  # layers-changed says so
        place, drift = place_of(row), drift_of(row, old)
        times = settings.number("drift-noise", place)
        by_index = settings.number("drift-psi", place) + _times(times, drift.index_noise)
        by_shift = settings.number("drift-shift", place) + _times(times, drift.shift_noise)
        if drift.missing:
            yield Seen(place, limit=by_index, skipped=drift.missing)
            continue
        said = [
            *_above("its stability index against the baseline is", drift.index, by_index),
            *_above(_moved(row, old), drift.shift, by_shift),
        ]
        of_index = drift.index is not None and (
            drift.index > by_index or not _is_above(drift.shift, by_shift)
        )
        value, limit = (drift.index, by_index) if of_index else (drift.shift, by_shift)
        message = f"{row.place}: {'; '.join(said)}" if said else ""
        yield Seen(place, math.nan if value is None else value, limit, message)


def changed(report: StatsReport, baseline: Figures, settings: Settings) -> Iterator[Seen]:
    """What the rule `layers-changed` sees at each place that is in either; those removed come last."""
    new = figures_of(report)
    known = {place.name: place for place in places(report)}
    for name, figure in new.places.items():
        old, place = baseline.get(name), known[name]
        message = (
            f"{name}: this place is not in the baseline" if old is None else _difference(name, figure, old)
        )
        yield Seen(place, message=message)
    for name in sorted(baseline.places):
        if new.get(name) is None:
            gone = f"{name}: this place of the baseline is not there any more"
            yield Seen(known.get(name) or place_named(name), message=gone)


def _shift(new: float, old: float, deviation: float) -> float | None:
    if not (math.isfinite(new) and math.isfinite(old) and math.isfinite(deviation)):
        return None if str(new) == str(old) else math.inf
    if deviation > 0:
        return abs(new - old) / deviation
    # Nothing varied; the figures are rounded, so the last digit is no change.
    return 0.0 if math.isclose(new, old, rel_tol=1e-3) else math.inf


def _pair(one: int, other: int) -> float:
    return 1 / max(one, 1) + 1 / max(other, 1)


def _times(times: float, noise: float) -> float:
    return times * noise if noise > 0 else 0.0


def _is_above(value: float | None, limit: float) -> bool:
    return value is not None and value > limit


def _above(words: str, value: float | None, limit: float) -> list[str]:
    return [f"{words} {value:.3g}, above {limit:.3g}"] if value is not None and value > limit else []


def _moved(row: StatsRow, old: Figure) -> str:
    mean = row.distribution.mean if row.distribution is not None else math.nan
    return f"its mean went from {old.mean:g} to {mean:.4g}, in deviations of the baseline"


def _difference(name: str, new: Figure, old: Figure) -> str:
    """In words, what is not the same; empty where all is."""
    said = [
        f"its {words} is {now or 'unknown'}, the baseline's {then or 'unknown'}"
        for words, now, then in (
            ("status", new.status, old.status),
            ("shape", new.shape, old.shape),
            ("layout", new.layout, old.layout),
        )
        if now != then
    ]
    return f"{name}: {'; '.join(said)}" if said else ""
