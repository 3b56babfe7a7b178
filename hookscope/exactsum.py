"""Sums of float64 that no order of additions changes: fixed-point numbers wide enough for all of them.

Vectors in, vectors out, every entry by itself; knows nothing of what is summed.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_BITS = 32
_LOW = -320
_HIGH = 352
_LIMBS = (_HIGH - _LOW) // _BITS
_MASK = np.uint64(0xFFFFFFFF)
# A limb takes less than 2^33 from an addition.
_MOST_ADDED = 1 << 28

UNIT = -_LOW
"""Sums are whole numbers of 2^-UNIT."""


class ExactSum:
    """The sum of vectors of float64, without a rounding until it is read: the order of additions changes nothing.

    A superaccumulator (Kulisch, "Computer Arithmetic and Validity", 2008): fixed-point numbers in limbs of 32 bits,
    from 2^-320 to 2^352. Takes 168 bytes an entry. What lies below the range is dropped; above it, and for what is not
    finite, the entry's sum is `nan`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._limbs = np.zeros((_LIMBS, size), dtype=np.int64)
        self._lost = np.zeros(size, dtype=bool)
        self._added = 0

    def add(self, values: Floats) -> None:
        """Add one vector, (size,)."""
        fraction, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
        mantissa = np.ldexp(fraction, 53).astype(np.int64)
        place = exponent.astype(np.int64) - 53 - _LOW
        self._lost |= ~np.isfinite(values) | (exponent > _HIGH - _BITS)
        # What reaches below the lowest limb loses those bits, as a number of its own and not of the order.
        mantissa = np.where(
            place < 0, np.sign(mantissa) * (np.abs(mantissa) >> np.minimum(-place, 63)), mantissa
        )
        place = np.where(self._lost, 0, np.maximum(place, 0))
        self._put(np.where(self._lost, 0, mantissa), place)

    def _put(self, mantissa: Counts, place: Counts) -> None:
        limb, shift = place // _BITS, (place % _BITS).astype(np.uint64)
        size = np.abs(mantissa).astype(np.uint64)
        sign = np.sign(mantissa)
        low, high = (size & _MASK) << shift, (size >> np.uint64(_BITS)) << shift
        parts = (low & _MASK, (low >> np.uint64(_BITS)) + (high & _MASK), high >> np.uint64(_BITS))
        columns = np.arange(self.size)
        for step, part in enumerate(parts):
            self._limbs[np.minimum(limb + step, _LIMBS - 1), columns] += sign * part.astype(np.int64)
        self._count(1)

    def add_product(self, one: Floats, other: Floats) -> None:
        """Add `one * other`, (size,), exactly: the product and its rounding error (Dekker 1971)."""
        product, error = two_product(one, other)
        self.add(product)
        self.add(np.where(np.isfinite(product), error, 0.0))

    def merge(self, other: ExactSum) -> None:
        """Add another's sum."""
        assert other.size == self.size, (self.size, other.size)
        other._carry()
        self._limbs += other._limbs
        self._lost |= other._lost
        self._count(1)

    def integers(self) -> list[int | None]:
        """The sums in units of 2^-320; `None` for those that are lost."""
        self._carry()
        total = np.zeros(self.size, dtype=object)
        for limb in self._limbs[::-1]:
            total = total * (1 << _BITS) + limb.astype(object)
        return [None if lost else value for value, lost in zip(total.tolist(), self._lost, strict=True)]

    def collapsed(self) -> ExactSum:
        """The sum of all entries, as one."""
        self._carry()
        made = ExactSum(1)
        made._limbs[:] = self._limbs.sum(axis=1, keepdims=True)
        made._lost[:] = self._lost.any()
        return made

    def read(self) -> Floats:
        """(size,): the sums, each rounded once."""
        return np.array([quotient(value, 1 << UNIT) for value in self.integers()], dtype=np.float64)

    def state(self) -> tuple[Counts, NDArray[np.bool_]]:
        """All of it, plain and picklable, for `from_state`."""
        self._carry()
        return self._limbs.copy(), self._lost.copy()

    @classmethod
    def from_state(cls, state: tuple[Counts, NDArray[np.bool_]]) -> ExactSum:
        """The sum that a `state` is of."""
        limbs, lost = state
        made = cls(limbs.shape[1])
        made._limbs, made._lost = np.array(limbs), np.array(lost)
        return made

    def _count(self, additions: int) -> None:
        self._added += additions
        if self._added >= _MOST_ADDED:
            self._carry()

    def _carry(self) -> None:
        """Bring all limbs but the highest, which bears the sign, into 0 to 2^32 - 1."""
        for at in range(_LIMBS - 1):
            self._limbs[at + 1] += self._limbs[at] >> _BITS
            self._limbs[at] &= 0xFFFFFFFF
        self._added = 0


def two_product(one: Floats, other: Floats) -> tuple[Floats, Floats]:
    """The product, rounded, and what the rounding left out: exact in float64 (Dekker 1971, Veltkamp's splitting)."""
    product = one * other
    (high, low), (other_high, other_low) = _split(one), _split(other)
    error = ((high * other_high - product) + high * other_low + low * other_high) + low * other_low
    return product, error


def _split(value: Floats) -> tuple[Floats, Floats]:
    scaled = value * 134217729.0
    high = scaled - (scaled - value)
    return high, value - high


def quotient(value: int | None, divisor: int) -> float:
    """The quotient, rounded once; `nan` for a sum that is lost."""
    return math.nan if value is None else value / divisor
