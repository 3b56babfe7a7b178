"""A report of distributions as plots: figures by depth, and every histogram."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hookscope.concentration import participation_ratio
from hookscope.render.histograms import PER_PAGE, Cell, sheet
from hookscope.render.plot import Panel, Series, stacked
from hookscope.statsreport import OUTPUT
from hookscope.streaming import EDGES

if TYPE_CHECKING:
    from hookscope.statsreport import Distribution, StatsReport, StatsRow

_CELLS = 80
_TAIL = 0.002


def documents(report: StatsReport, note: str = "") -> dict[str, bytes]:
    """Every plot that there is something to see in, as PNG by file name."""
    made = {} if not _drawn(report) else {"stats.png": plot(report, note)}
    cells = [cell for row in _drawn(report) if (cell := _cell(row)) is not None]
    pages = [cells[start : start + PER_PAGE] for start in range(0, len(cells), PER_PAGE)]
    for number, page in enumerate(pages, start=1):
        name = f"stats-histograms-{number}.png" if len(pages) > 1 else "stats-histograms.png"
        title = _title("Histograms of what layers received and returned", report, note)
        made[name] = sheet(
            page, title=f"{title} · page {number} of {len(pages)}" if len(pages) > 1 else title
        )
    return made


def plot(report: StatsReport, note: str = "") -> bytes:
    """PNG: mean, deviation, share of zeros and of used channels at every output, by depth."""
    rows = [row for row in _drawn(report) if row.side == OUTPUT]
    panels = [
        Panel("mean", _series(rows, lambda found: found.mean), log=False),
        Panel("deviation", _series(rows, lambda found: found.std)),
        Panel("share of zeros", _series(rows, lambda found: found.zeros / found.count), log=False),
        Panel("participation ratio / channels", _series(rows, _used), log=False),
    ]
    return stacked(
        [panel for panel in panels if panel.series] or panels[:1],
        title=_title("Activations by depth", report, note),
        order=[row.place for row in rows],
    )


def _title(what: str, report: StatsReport, note: str) -> str:
    return " · ".join(filter(None, (what, f"{report.pictures} pictures", note)))


def _drawn(report: StatsReport) -> list[StatsRow]:
    """Every tensor once."""
    return [row for row in report.rows if row.same_as is None and row.distribution and row.distribution.count]


def _series(rows: Sequence[StatsRow], value: Callable[[Distribution], float | None]) -> list[Series]:
    """The normalised and rectified outputs apart: between them a line would only go up and down."""
    made = []
    for name, kinds in (("after normalisation", ("norm",)), ("after ReLU", ("relu", "relu6"))):
        made.append(_one(name, [row for row in rows if row.kind in kinds], value))
    rest = [row for row in rows if row.kind not in ("norm", "relu", "relu6")]
    made.insert(0, _one("other layers", rest, value, joined=False))
    return [series for series in made if series.layers]


def _one(
    name: str,
    rows: Sequence[StatsRow],
    value: Callable[[Distribution], float | None],
    *,
    joined: bool = True,
) -> Series:
    found = [
        (row.place, number)
        for row in rows
        if row.distribution is not None and (number := value(row.distribution)) is not None
    ]
    return Series(
        name, tuple(place for place, _ in found), tuple(number for _, number in found), joined=joined
    )


def _used(found: Distribution) -> float | None:
    channels = found.channels
    ratio = participation_ratio(channels.energy) if channels is not None else None
    return None if ratio is None or channels is None else ratio / channels.channels


def _cell(row: StatsRow) -> Cell | None:
    """The histogram on an even axis from the 0.2 % to the 99.8 % quantile, 0 in it."""
    found = row.distribution.histogram if row.distribution is not None else None
    if found is None or not found.sampled:
        return None
    low, high = min(found.quantile(_TAIL), 0.0), max(found.quantile(1 - _TAIL), 0.0)
    if low == high:
        high = low + 1.0
    filled = np.flatnonzero(found.counts)
    filled = filled[(filled > 0) & (filled < len(EDGES))]
    starts, ends, counts = EDGES[filled - 1], EDGES[filled], found.counts[filled]
    even = np.linspace(low, high, _CELLS + 1)
    # What lies in a bin is taken to lie evenly in it.
    below = np.clip((even[:, None] - starts) / (ends - starts), 0, 1) @ counts
    return Cell(row.place, low, high, tuple((np.diff(below) / found.sampled).tolist()))
