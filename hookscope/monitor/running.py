"""Running statistics of many series at once: Welford's mean and deviation, and a rolling median and MAD.

A series is told a number a step, or `nan` where it has none. Memory does not grow with the number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NORMAL = 1.4826
"""The deviation of a normal distribution in units of its MAD."""


@dataclass(frozen=True)
class Summary:
    """A figure over `steps` measured steps; only finite ones count, and `non_finite` says how many were not.

    `deviation`: of the population, as `statistics.pstdev`. `median`, `mad`: over the latest steps of the window.
    """

    mean: float
    deviation: float
    minimum: float
    maximum: float
    last: float
    median: float
    mad: float
    steps: int
    non_finite: int = 0


class Running:
    """`width` series, each over the same steps.

    Args:
        width: how many.
        window: how many of the latest numbers the median and MAD are of.
    """

    def __init__(self, width: int, window: int) -> None:
        self.counts = np.zeros(width, np.int64)
        self.broken = np.zeros(width, np.int64)
        self._mean, self._squares = np.zeros(width), np.zeros(width)
        self._least, self._most = np.full(width, np.inf), np.full(width, -np.inf)
        self._last = np.full(width, np.nan)
        self._window = np.full((window, width), np.nan)
        self._next = np.zeros(width, np.int64)

    def add(self, values: NDArray[np.float64], missing: NDArray[np.bool_]) -> None:
        """One more step; what is `missing` is no number of its series, and not broken either."""
        told = np.isfinite(values) & ~missing
        self.broken += ~told & ~missing
        self._last = np.where(missing, self._last, values)
        at = np.flatnonzero(told)
        new = values[at]
        self.counts[at] += 1
        off = new - self._mean[at]
        self._mean[at] += off / self.counts[at]
        self._squares[at] += off * (new - self._mean[at])
        self._least[at] = np.minimum(self._least[at], new)
        self._most[at] = np.maximum(self._most[at], new)
        self._window[self._next[at], at] = new
        self._next[at] = (self._next[at] + 1) % len(self._window)

    def centre(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Median and MAD of every series over the window; `nan` where it is empty."""
        full = self._window[: max(1, min(int(self.counts.max(initial=0)), len(self._window)))]
        median = _median(full)
        return median, _median(np.abs(full - median))

    def summary(self, at: int) -> Summary | None:
        """What is known of one series; `None` where it never had a number."""
        count, broken = int(self.counts[at]), int(self.broken[at])
        if not count:
            nan, last = math.nan, float(self._last[at])
            return Summary(nan, nan, nan, nan, last, nan, nan, 0, broken) if broken else None
        column = self._window[:, [at]]
        median = _median(column)
        return Summary(
            mean=float(self._mean[at]),
            deviation=math.sqrt(max(0.0, float(self._squares[at])) / count),
            minimum=float(self._least[at]),
            maximum=float(self._most[at]),
            last=float(self._last[at]),
            median=float(median[0]),
            mad=float(_median(np.abs(column - median))[0]),
            steps=count,
            non_finite=broken,
        )


def _median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of every column, of the numbers in it."""
    found: NDArray[np.float64] = np.median(values, axis=0)
    gaps = np.isnan(values).any(axis=0)
    for at in np.flatnonzero(gaps & ~np.isnan(values).all(axis=0)):
        found[at] = np.median(values[~np.isnan(values[:, at]), at])
    return found
