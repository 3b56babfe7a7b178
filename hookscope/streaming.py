"""Distributions of values that stream past: exact sums, moments by channel, and a histogram on fixed edges.

All of it merges exactly: in whatever order batches come, and over however many processes they are spread, the same
batches give the same bits. What depends on the batches is only their own partial sums. Knows no model and no layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.exactsum import UNIT, Counts, ExactSum, Floats, quotient, two_product

BINS_PER_OCTAVE = 8
_LEAST_EXPONENT, _MOST_EXPONENT = -32, 20


def _edges() -> Floats:
    steps = np.arange(_LEAST_EXPONENT * BINS_PER_OCTAVE, _MOST_EXPONENT * BINS_PER_OCTAVE + 1)
    # Of float32, so that an edge is the same number for values of every precision.
    positive = np.exp2(steps / BINS_PER_OCTAVE).astype(np.float32).astype(np.float64)
    return np.concatenate([-positive[::-1], positive])


EDGES = _edges()
"""Ascending, symmetric about 0, eight to a doubling from 2^-32 to 2^20, each a float32.

Bin 0 holds what is below the first edge, bin i what is in [EDGES[i-1], EDGES[i]), the last bin what is not below the
last edge; the bin in the middle holds what is nearer to 0 than 2^-32, zeros above all.
"""

_MIDDLE = len(EDGES) // 2


def binned(values: NDArray[np.float32]) -> Counts:
    """How many of finite values are in each of the bins of `EDGES`: (len(EDGES) + 1,).

    The upper half of a float32's bits leaves one edge at most between the values that have it.
    """
    values = np.ascontiguousarray(values, dtype="<f4")
    upper = values.view("<u2")[1::2]
    first, edge = _lookup()
    found: Counts = np.bincount(first[upper] + (values >= edge[upper]), minlength=len(EDGES) + 1)
    return found


@cache
def _lookup() -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """For each upper half of a float32: the bin of the least such value, and the edge among them, else infinity."""
    upper = np.arange(1 << 16, dtype="<u4") << 16
    ends = np.stack([upper.view("<f4"), (upper | 0xFFFF).view("<f4")])
    finite = np.isfinite(ends).all(axis=0)
    ends = np.where(finite, ends, 0).astype(np.float64)
    least, most = ends.min(axis=0), ends.max(axis=0)
    first = np.searchsorted(EDGES, least, side="right")
    above = np.append(EDGES, np.inf)[first]
    return first.astype(np.int16), np.where(above <= most, above, np.inf).astype(np.float32)


@dataclass(frozen=True)
class Partial:
    """What one batch has of C channels; arrays (C,).

    `count`: finite entries. `mean`, `scatter` (the sum of squared deviations from it): float64. `minimum`, `maximum`:
    infinite where there is no finite entry. `alive`, `saturated`: entries above the threshold, and at a bound (`None`:
    there is none). `zeros`, `non_finite`: over all channels.
    """

    count: Counts
    mean: Floats
    scatter: Floats
    minimum: Floats
    maximum: Floats
    alive: Counts
    zeros: int
    non_finite: int
    saturated: Counts | None = None


class Moments:
    """Count, sum, sum of squares, extremes and counts of C channels over any number of batches.

    After Chan, Golub & LeVeque (1979), their terms n * mean and n * mean^2 kept exactly instead of merged in pairs.
    """

    def __init__(self, channels: int, *, bounded: bool = False) -> None:
        self.channels = channels
        self.count = np.zeros(channels, dtype=np.int64)
        self.alive = np.zeros(channels, dtype=np.int64)
        self.saturated = np.zeros(channels, dtype=np.int64) if bounded else None
        self.minimum = np.full(channels, np.inf)
        self.maximum = np.full(channels, -np.inf)
        self.zeros = self.non_finite = 0
        self._sum, self._squares = ExactSum(channels), ExactSum(channels)

    def add(self, part: Partial) -> None:
        """One more batch."""
        count = part.count.astype(np.float64)
        self._sum.add_product(count, part.mean)
        product, error = two_product(count, part.mean)
        self._squares.add(part.scatter)
        self._squares.add_product(product, part.mean)
        self._squares.add_product(error, part.mean)
        self._count(part.count, part.alive, part.saturated, part.minimum, part.maximum)
        self.zeros += part.zeros
        self.non_finite += part.non_finite

    def merge(self, other: Moments) -> None:
        """Take in all that another has seen."""
        self._sum.merge(other._sum)
        self._squares.merge(other._squares)
        self._count(other.count, other.alive, other.saturated, other.minimum, other.maximum)
        self.zeros += other.zeros
        self.non_finite += other.non_finite

    def collapsed(self) -> Moments:
        """Those of all channels as one."""
        made = Moments(1, bounded=self.saturated is not None)
        made._sum, made._squares = self._sum.collapsed(), self._squares.collapsed()
        made.zeros, made.non_finite = self.zeros, self.non_finite
        made._count(
            self.count.sum(keepdims=True),
            self.alive.sum(keepdims=True),
            None if self.saturated is None else self.saturated.sum(keepdims=True),
            self.minimum.min(keepdims=True, initial=np.inf),
            self.maximum.max(keepdims=True, initial=-np.inf),
        )
        return made

    def means(self) -> Floats:
        """(C,): of the finite entries; `nan` where there are none."""
        sums = self._sum.integers()
        return np.array(
            [quotient(one, n << UNIT) if n else math.nan for one, n in zip(sums, self._counts(), strict=True)]
        )

    def energies(self) -> Floats:
        """(C,): the mean square of the finite entries; `nan` where there are none."""
        squares = self._squares.integers()
        return np.array(
            [
                quotient(one, n << UNIT) if n else math.nan
                for one, n in zip(squares, self._counts(), strict=True)
            ]
        )

    def deviations(self) -> Floats:
        """(C,): of the finite entries, of the population; `nan` where there are none."""
        found = zip(self._sum.integers(), self._squares.integers(), self._counts(), strict=True)
        spread = np.array([_deviation(*one) for one in found], dtype=np.float64)
        # Partial sums are rounded, equal values are not.
        return np.where(self.minimum == self.maximum, 0.0, spread)

    def whole(self) -> tuple[float, float, float]:
        """Mean, deviation of the population, and mean square over the channels' finite entries together."""
        sums, squares, count = self._sum.integers(), self._squares.integers(), int(self.count.sum())
        if not count:
            return math.nan, math.nan, math.nan
        total, square = _together(sums), _together(squares)
        same = float(self.minimum.min(initial=np.inf)) == float(self.maximum.max(initial=-np.inf))
        deviation = 0.0 if same else _deviation(total, square, count)
        return quotient(total, count << UNIT), deviation, quotient(square, count << UNIT)

    def state(self) -> dict[str, Any]:
        """All of it, plain and picklable, for `from_state`."""
        plain = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return plain | {"sum": self._sum.state(), "squares": self._squares.state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Moments:
        """The moments that a `state` is of."""
        made = cls(state["channels"])
        made._sum, made._squares = ExactSum.from_state(state["sum"]), ExactSum.from_state(state["squares"])
        for name in ("count", "alive", "saturated", "minimum", "maximum", "zeros", "non_finite"):
            value = state[name]
            setattr(made, name, np.array(value) if isinstance(value, np.ndarray) else value)
        return made

    def _counts(self) -> list[int]:
        found: list[int] = self.count.tolist()
        return found

    def _count(
        self, count: Counts, alive: Counts, saturated: Counts | None, minimum: Floats, maximum: Floats
    ) -> None:
        self.count += count
        self.alive += alive
        if self.saturated is not None and saturated is not None:
            self.saturated += saturated
        self.minimum = np.minimum(self.minimum, minimum)
        self.maximum = np.maximum(self.maximum, maximum)


def _together(sums: list[int | None]) -> int | None:
    return None if any(one is None for one in sums) else sum(one for one in sums if one is not None)


def _deviation(total: int | None, squares: int | None, count: int) -> float:
    if total is None or squares is None or not count:
        return math.nan
    # count * sum of squares - square of the sum, in units of 2^-640.
    scatter = max((count * squares << UNIT) - total * total, 0)
    return math.sqrt(scatter / (count * count << 2 * UNIT))


@dataclass(frozen=True)
class Histogram:
    """A sample of values in the bins of `EDGES`.

    `counts`: (len(EDGES) + 1,) int64, ascending. `complete`: every finite value is in it; it is no sample then.
    """

    counts: Counts = field(default_factory=lambda: np.zeros(len(EDGES) + 1, dtype=np.int64))
    complete: bool = True

    value_error = 2 ** (1 / (2 * BINS_PER_OCTAVE)) - 1
    """Largest relative error of a quantile by its bin, of values between 2^-32 and 2^20 in size."""

    @property
    def sampled(self) -> int:
        """How many values are in it."""
        return int(self.counts.sum())

    @property
    def rank_error(self) -> float:
        """How far, in share of the values, a quantile's rank may be off with 95 % confidence.

        sqrt(ln(2 / 0.05) / 2n) (Dvoretzky, Kiefer & Wolfowitz 1956, with Massart's constant), for n values drawn
        independently. Values of one picture are not; drawing each from a part of the tensor of its own, as is done
        here, errs less than drawing anywhere. 0 where all values are in it, 1 where none is.
        """
        if self.complete:
            return 0.0
        return min(1.0, math.sqrt(math.log(2 / 0.05) / (2 * self.sampled))) if self.sampled else 1.0

    def quantile(self, share: float) -> float:
        """The value that this share of the values is not above; `nan` of none.

        The geometric middle of a bin: `value_error` is what that may be off. What is nearer to 0 than any edge is 0;
        beyond the outermost edges it is that edge.
        """
        if not self.sampled:
            return math.nan
        rank = min(max(math.ceil(share * self.sampled), 1), self.sampled)
        return _middle(int(np.searchsorted(np.cumsum(self.counts), rank)))

    def shares(self) -> Floats:
        """(len(EDGES) + 1,): the counts over their sum; zeros of none."""
        return self.counts / max(self.sampled, 1)

    def merged(self, other: Histogram) -> Histogram:
        """Both together."""
        return Histogram(self.counts + other.counts, self.complete and other.complete)


def _middle(bin_: int) -> float:
    if bin_ == _MIDDLE:
        return 0.0
    if bin_ in (0, len(EDGES)):
        return float(EDGES[0] if bin_ == 0 else EDGES[-1])
    low, high = float(EDGES[bin_ - 1]), float(EDGES[bin_])
    return math.copysign(math.sqrt(low * high), low)
