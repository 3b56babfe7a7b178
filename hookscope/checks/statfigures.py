"""The figures of a report of distributions that a baseline keeps, rounded, and the document that they make.

Bytes out: it writes and reads no file.

Figures keep four significant digits, shares of a sample six decimals: batch size, threads and processes change less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hookscope.checks.measured import Made, check_same, rounded
from hookscope.checks.rules import Place
from hookscope.output.manifest import encoded, to_json
from hookscope.statsreport import INPUT

if TYPE_CHECKING:
    from hookscope.layers import Site
    from hookscope.statsreport import StatsReport, StatsRow

KIND = "stats-baseline"
SCHEMA = 1
DIGITS = 4
"""Significant digits of a figure."""
PARTS = 10
"""Into so many bins a baseline's sample is parted, of equal shares as far as the fine bins allow."""
FLOOR = 1e-4
"""Least share of a bin in a stability index, which would be infinite for an empty one."""

_SHARE_DECIMALS = 6


@dataclass(frozen=True)
class Measured:
    """How figures came about. Pictures and batches may differ between two runs, all else may not.

    `layers`: the globs that chose layers, in words. `bins`: of a histogram, 0 without histograms.
    """

    layers: str
    precision: str
    bins: int
    pictures: int
    batches: int


@dataclass(frozen=True)
class Figure:
    """One place: moments over `count` finite values, `None` where there is none, and a sample of them in few bins.

    `shape`: of one picture, `64x56x56`, `""` if unknown. `cuts`: the places among the fine bins, ascending, before
    which a coarse bin ends; `shares`: of `sampled` values in each of the len(cuts) + 1 coarse bins; both empty without
    a histogram.
    """

    status: str
    shape: str
    layout: str
    mean: float | None = None
    deviation: float | None = None
    zeros: float | None = None
    count: int = 0
    sampled: int = 0
    cuts: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Figures:
    """All figures of a run by place; `same`: places that are another's very tensor, by that other's name."""

    places: Mapping[str, Figure]
    same: Mapping[str, str]

    def get(self, name: str) -> Figure | None:
        """The figure of a place, whichever name it is under."""
        return self.places.get(self.same.get(name, name))

    def known(self) -> tuple[Place, ...]:
        """All that a glob may mean among them."""
        return tuple(place_named(name) for name in (*self.places, *self.same))


@dataclass(frozen=True)
class StatsBaseline:
    """The figures of one run, and how they came about. `path`: where they were read, for messages."""

    measured: Measured
    made: Made
    figures: Figures
    path: str = ""

    def encoded(self) -> bytes:
        """The document: JSON with sorted keys."""
        parts = {"measured": self.measured, "made": self.made, **vars(self.figures)}
        return encoded(to_json({"kind": KIND, "schema": SCHEMA, **parts}))

    def check_comparable(self, measured: Measured) -> None:
        """Nothing, where a run that is measured like this can be compared; on other pictures it can.

        Where one of the two has no histograms, means alone are compared.

        Raises:
            UsageError: it was measured otherwise.
        """
        whole = bool(self.measured.bins and measured.bins)
        check_same(self.measured, measured, self.path, ("pictures", "batches", *(() if whole else ("bins",))))

    def differences(self, made: Made) -> tuple[str, ...]:
        """In words, what is not the same in this run, and does not forbid to compare."""
        return self.made.differences(made)


def figures_of(report: StatsReport) -> Figures:
    """The figures of a report."""
    names = {(row.site, row.side): row.place for row in report.rows}
    own = {row.place: _figure(row) for row in report.rows if row.same_as is None}
    same = {row.place: _origin(row.same_as, names) for row in report.rows if row.same_as is not None}
    return Figures(own, same)


def measured_by(report: StatsReport, *, layers: str = "**", precision: str = "fp32") -> Measured:
    """How the figures of a report came about; what it does not know itself is given."""
    return Measured(layers, precision, bins_of(report), report.pictures, report.batches)


def bins_of(report: StatsReport) -> int:
    """How many bins its histograms have, 0 where there is none."""
    return next((len(counts) for row in report.rows if (counts := counts_of(row)) is not None), 0)


def counts_of(row: StatsRow) -> NDArray[np.int64] | None:
    """(bins,) int64: the sample in fine bins, ascending; `None` where there is none."""
    found = row.distribution
    if found is None or found.histogram is None:
        return None
    return np.asarray(found.histogram.counts, dtype=np.int64)


def parted(counts: NDArray[np.int64], parts: int = PARTS) -> tuple[int, ...]:
    """Where to cut fine bins so that each coarse bin has a like share of the counts.

    A fine bin is never split: one with more than its share, such as that of zeros, is a coarse bin for itself.
    """
    total = int(counts.sum())
    if not total:
        return ()
    upto = np.cumsum(counts)
    wanted = total * np.arange(1, parts) / parts
    first = np.searchsorted(upto, wanted)  # the fine bin in which each quantile lies
    heavy = counts[first] > total / parts
    cuts = {int(at) + 1 for at in first} | {int(at) for at in first[heavy]}
    # A cut before the first or after the last count would make a bin that is empty by itself.
    low, high = int(np.argmax(upto > 0)), int(np.argmax(upto == total))
    return tuple(sorted(cut for cut in cuts if low < cut <= high))


def shares_of(counts: NDArray[np.int64], cuts: Sequence[int]) -> tuple[float, ...]:
    """The share of the counts before, between and after the cuts; empty without a count."""
    total = int(counts.sum())
    if not total:
        return ()
    sums = [int(part.sum()) for part in np.split(counts, list(cuts))]
    return tuple(round(one / total, _SHARE_DECIMALS) for one in sums)


def stability_index(new: Sequence[float], old: Sequence[float], sampled: int = 0) -> float:
    """The population stability index, sum (p - q) ln(p / q) over bins; 0 where the shares are the same.

    Args:
        new: shares p; one below `FLOOR` counts as that.
        old: shares q of the same bins, likewise.
        sampled: values of the smaller sample: half of one is the least share, 0 for `FLOOR` whatever it is.
    """
    least = max(FLOOR, 0.5 / sampled) if sampled else FLOOR
    p, q = np.maximum(np.asarray(new), least), np.maximum(np.asarray(old), least)
    return float(((p - q) * np.log(p / q)).sum())


def place_named(name: str) -> Place:
    """A place of which only the name is known."""
    return Place(name, name.removesuffix("<").partition(":")[0].partition("@")[0])


def _origin(same_as: tuple[Site, str] | None, names: Mapping[tuple[Site, str], str]) -> str:
    assert same_as is not None
    site, side = same_as
    return names.get(same_as) or (f"{site}<" if side == INPUT else str(site))


def _figure(row: StatsRow) -> Figure:
    shape, found = "x".join(map(str, row.shape[1:])), row.distribution
    if found is None or found.count == 0:
        return Figure(row.status, shape, row.layout)
    counts = counts_of(row)
    cuts = parted(counts) if counts is not None else ()
    return Figure(
        row.status,
        shape,
        row.layout,
        _kept(found.mean),
        _kept(found.std),
        round(found.zeros / found.count, _SHARE_DECIMALS),
        found.count - found.non_finite,
        int(counts.sum()) if counts is not None else 0,
        cuts,
        shares_of(counts, cuts) if counts is not None else (),
    )


def _kept(value: float) -> float | None:
    return None if math.isnan(value) else rounded(value, DIGITS)
