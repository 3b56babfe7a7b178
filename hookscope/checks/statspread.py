"""How a layer's values lie as a whole: far from what a normalisation should give, in few channels, or all alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hookscope.checks.rules import Seen, Settings
from hookscope.checks.statrows import after_norms, judged, missing, missing_units, place_of
from hookscope.concentration import participation_ratio, top_share
from hookscope.statsreport import OUTPUT
from hookscope.wording import counted

if TYPE_CHECKING:
    from hookscope.statsreport import ChannelStats, StatsReport, StatsRow

_FEWEST_CHANNELS = 8
"""With fewer, one that leads is no wonder, nor that they are alike: red, green and blue of photographs are."""


def shifted(report: StatsReport, settings: Settings) -> Iterator[Seen]:
    """What the rule `norm-shift` sees at every place that receives a normalisation's output as it is."""
    for row, origin in after_norms(report):
        place, found = place_of(row), row.distribution
        mean_limit = settings.number("norm-mean", place)
        factor_limit = settings.number("norm-deviation", place)
        if found is None or missing(row):
            yield Seen(place, limit=mean_limit, skipped=missing(row))
            continue
        said = f"{row.place}: what it receives from {origin.place} has"
        factor = max(found.std, 1 / found.std) if found.std > 0 else math.inf
        if abs(found.mean) > mean_limit:
            said += f" mean {found.mean:.4g}, further than {mean_limit:g} from 0"
            yield Seen(place, abs(found.mean), mean_limit, said)
        elif factor > factor_limit:
            said += f" deviation {found.std:.4g}, more than {factor_limit:g} times off 1"
            yield Seen(place, factor, factor_limit, said)
        else:
            yield Seen(place, abs(found.mean), mean_limit)


def concentrated(report: StatsReport, settings: Settings) -> Iterator[Seen]:
    """What the rule `concentrated` sees at every place with channels enough."""
    for row in judged(report):
        place, found = place_of(row), row.distribution
        limit = settings.number("concentrated", place)
        channels = found.channels if found is not None else None
        if channels is None or missing_units(row):
            yield Seen(place, limit=limit, skipped=missing_units(row))
        elif channels.channels < _FEWEST_CHANNELS:
            yield Seen(place, limit=limit, skipped=f"it has {counted(channels.channels, 'channel')} only")
        else:
            yield _concentration(row, channels, settings)


def alike(report: StatsReport, settings: Settings) -> Iterator[Seen]:
    """What the rule `alike` sees at every place whose spectrum was asked for."""
    for row in judged(report):
        if row.spectrum is None:
            continue
        place, value = place_of(row), row.spectrum.mean_abs_correlation
        limit = settings.number("alike", place)
        if row.spectrum.channels < _FEWEST_CHANNELS:
            yield Seen(place, limit=limit, skipped=f"it has {counted(row.spectrum.channels, 'channel')} only")
            continue
        if value is None:
            yield Seen(place, limit=limit, skipped=row.spectrum.missing or "fewer than two channels change")
            continue
        said = f"{row.place}: the mean absolute correlation of its channels is {value:.3g}, above {limit:g}"
        yield Seen(place, value, limit, said + _compared(report) if value > limit else "")


def alike_by_depth(report: StatsReport) -> tuple[float, float] | None:
    """The median of outputs' mean absolute correlation in the first and in the last half of the depth.

    `None` where there are fewer than four outputs with one.
    """
    values = [
        row.spectrum.mean_abs_correlation
        for row in judged(report)
        if row.side == OUTPUT and row.spectrum and row.spectrum.mean_abs_correlation is not None
    ]
    if len(values) < 4:
        return None
    half = len(values) // 2
    return statistics.median(values[:half]), statistics.median(values[-half:])


def alike_in_words(report: StatsReport) -> str:
    """The same in words, `""` where there is none."""
    found = alike_by_depth(report)
    if found is None:
        return ""
    return (
        f"channels' mean |correlation|: {found[0]:.3g} in the shallow half, {found[1]:.3g} in the deep half"
    )


def _compared(report: StatsReport) -> str:
    found = alike_by_depth(report)
    return (
        ""
        if found is None
        else f" (median {found[0]:.3g} in the shallow half, {found[1]:.3g} in the deep half)"
    )


def _concentration(row: StatsRow, channels: ChannelStats, settings: Settings) -> Seen:
    place, ratio = place_of(row), participation_ratio(channels.energy)
    limit = settings.number("concentrated", place)
    if ratio is None:
        return Seen(place, limit=limit, skipped="its channels have no energy, or one is not finite")
    share, least = ratio / channels.channels, settings.number("concentrated-ratio", place)
    if share >= limit and ratio >= least:
        return Seen(place, share, limit)
    top = top_share(channels.energy, 1) or 0.0
    said = (
        f"{row.place}: the energy of its {channels.channels} channels is that of {ratio:.3g}, "
        + (
            f"{100 * share:.3g} % of them, below {100 * limit:g} %; "
            if share < limit
            else f"below {least:g}; "
        )
        + f"channel {int(np.argmax(channels.energy))} has {100 * top:.3g} %"
    )
    return Seen(place, *((share, limit) if share < limit else (ratio, least)), said)
