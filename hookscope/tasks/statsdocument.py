"""A report of distributions as the JSON document that scripts read, with what every number in it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.checks.rules import Settings
from hookscope.checks.statrows import place_of
from hookscope.checks.statunits import Units, constant_by_row, dead_units, saturated_units, too_few
from hookscope.concentration import entropy_rank, gini, participation_ratio, top_share
from hookscope.spectrum import Spectrum
from hookscope.statsreport import ChannelStats, Distribution, StatsReport, StatsRow
from hookscope.streaming import EDGES, Histogram

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The shares whose quantiles are written."""

IDLE = ("dead", "constant", "saturated")
"""What a unit may be that does nothing."""

MEASURED = "forward pass in eval mode, inputs before any in-place operation"

QUANTITIES = {
    "side": "input: what the layer received; output: what it returned",
    "same_as": "the place that this very tensor was met at first; its figures are given there alone",
    "count": "all values over pictures and positions, of which non_finite are not finite; those enter no other figure",
    "zero_share": "values that are exactly 0, over all",
    "std": "the deviation of the population: over the finite values, not one fewer",
    "quantiles": "the middle of the histogram's bin that holds the value of that rank",
    "rank_error": "how far a quantile's rank may be off at 95 % (Dvoretzky-Kiefer-Wolfowitz); 0: of all values",
    "value_error": "the largest relative error of a quantile by its bin",
    "histogram": "counts of the sample from bin first_bin on; bin i is [edges[i-1], edges[i]), bin 0 what is below",
    "channels": "by channel: mean, std, max and min of the finite values, and how many were above the threshold",
    "participation_ratio": "(sum e)^2 / sum e^2 of the channels' mean squares e: from 1 to the number of channels",
    "entropy_rank": "exp(-sum p ln p) of their shares p = e / sum e",
    "gini": "0: all channels have the same energy; 1 - 1/C: one has all",
    "dead": "channels of a rectified layer that were never above the threshold, in any picture, at any position",
    "constant": "channels of another layer with the same value everywhere, though what it received changed",
    "saturated": "channels with more than the limit's share of their values at a bound of the function",
    "not_enough_data": "why no unit can be called dead, constant or saturated yet; how many were alive is there",
    "effective_rank": "exp of the entropy of the singular values of the centred rows (Roy & Vetterli 2007)",
    "depth": "the place in the order in which the layers' calls ended",
}
"""What the numbers are, for readers of the JSON."""

_DIGITS = 9


def document(report: StatsReport, settings: Settings, note: str = "") -> dict[str, Any]:
    """The whole report, for scripts.

    Args:
        report: all of it.
        settings: the limits by which units are dead, constant or saturated.
        note: what every reader must know of the model.
    """
    first = report.first_non_finite
    sampled = any(row.distribution and row.distribution.histogram for row in report.rows)
    return {
        "schema": 1,
        "note": note,
        "measured": MEASURED,
        "quantities": QUANTITIES,
        "pictures": report.pictures,
        "batches": report.batches,
        "threshold": report.threshold,
        "seed": report.seed,
        "edges": _digits(EDGES) if sampled else [],
        "first_non_finite": None if first is None else asdict(first) | {"why": first.why},
        "places": [
            _record(row, found) for row, found in zip(report.rows, idle_units(report, settings), strict=True)
        ],
    }


@dataclass(frozen=True)
class Idle:
    """The units of a place that do nothing: `units`, by what they are; `missing`: why that is not known yet."""

    units: Mapping[str, Sequence[int]]
    missing: str = ""


def idle_units(report: StatsReport, settings: Settings) -> tuple[Idle, ...]:
    """For every row its units that do nothing; a key for each kind of these that there can be."""
    constant = constant_by_row(report, settings)
    return tuple(_idle(report, row, constant.get((row.site, row.side)), settings) for row in report.rows)


def _idle(report: StatsReport, row: StatsRow, constant: Units | None, settings: Settings) -> Idle:
    if row.same_as is not None:
        return Idle({})
    place = place_of(row)
    found = {
        "dead": dead_units(row),
        "constant": constant,
        "saturated": saturated_units(row, settings.number("saturated", place)),
    }
    there = {name: units.tolist() for name, units in found.items() if units is not None}
    missing = {name: too_few(report, settings, name, row) for name in there}
    known = {name: units for name, units in there.items() if not missing[name]}
    return Idle(known, next(filter(None, missing.values()), ""))


def concentration(found: ChannelStats | None) -> dict[str, float | None]:
    """How the energy lies in the channels; nothing where they are not known."""
    if found is None:
        return {}
    energy = found.energy
    return {
        "participation_ratio": participation_ratio(energy),
        "entropy_rank": entropy_rank(energy),
        "gini": gini(energy),
        "top_1": top_share(energy, 1),
        "top_10": top_share(energy, 10),
    }


def _record(row: StatsRow, found: Idle) -> dict[str, Any]:
    plain = asdict(row.site) | {
        "place": row.place,
        "side": row.side,
        "type": row.type,
        "kind": row.kind,
        "status": row.status,
        "depth": row.depth,
        "shape": list(row.shape),
        "layout": row.layout,
        "same_as": None,
    }
    if row.same_as is not None:
        site, side = row.same_as
        return plain | {"same_as": f"{site}<" if side == "input" else str(site)}
    if row.distribution is None:
        return plain
    return plain | _figures(row.distribution) | _units(found) | _spectrum(row.spectrum)


def _units(found: Idle) -> dict[str, Any]:
    return dict(found.units) | ({"not_enough_data": found.missing} if found.missing else {})


def _figures(found: Distribution) -> dict[str, Any]:
    return {
        "count": found.count,
        "non_finite": found.non_finite,
        "zeros": found.zeros,
        "zero_share": found.zeros / found.count if found.count else None,
        "mean": found.mean,
        "std": found.std,
        "min": found.minimum,
        "max": found.maximum,
        "channels": _channels(found.channels),
        "concentration": concentration(found.channels) or None,
    } | _sample(found.histogram)


def _sample(found: Histogram | None) -> dict[str, Any]:
    if found is None:
        return {}
    filled = np.flatnonzero(found.counts)
    first, last = (int(filled[0]), int(filled[-1])) if filled.size else (0, -1)
    return {
        "sampled": found.sampled,
        "rank_error": found.rank_error,
        "value_error": found.value_error,
        "quantiles": {f"{share:g}": found.quantile(share) for share in QUANTILES},
        "histogram": {"first_bin": first, "counts": found.counts[first : last + 1].tolist()},
    }


def _channels(found: ChannelStats | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "axis": found.axis,
        "number": found.channels,
        "count": found.count.tolist(),
        "alive": found.alive.tolist(),
        "mean": _digits(found.mean),
        "std": _digits(found.std),
        "max": _digits(found.maximum),
        "min": _digits(found.minimum),
    } | ({} if found.saturated is None else {"saturated": found.saturated.tolist()})


def _spectrum(found: Spectrum | None) -> dict[str, Any]:
    return {} if found is None else {"spectrum": asdict(found) | {"eigenvalues": found.eigenvalues.tolist()}}


def _digits(values: NDArray[np.float64]) -> list[float]:
    """Nine significant digits, which tell any two float32 apart."""
    return [float(f"{value:.{_DIGITS}g}") for value in values.tolist()]
