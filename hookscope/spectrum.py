"""The covariance of a layer's channels over a data set, and what its spectrum says: how many directions they use.

Rows come in any number, are centred and multiplied in float64 in blocks, and forgotten. Two covariances merge, by
Chan, Golub & LeVeque (1979). It must not know where the rows come from, nor which axis the channels were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.concentration import entropy_rank, participation_ratio

_BLOCK_BYTES = 8 << 20
_FEWEST_ROWS, _MOST_ROWS = 64, 4096
# Of columns: of a symmetric product only what lies on and right of its diagonal blocks is made.
_BLOCK_COLUMNS = 256
# A deviation of this share of the mean is the rounding of a mean, not a change: float32 itself has steps of 6e-8.
_CONSTANT = 1e-13
DIGITS = 9
"""Significant digits of a spectrum's figures: another order of the rows rounds otherwise in the twelfth."""
RANK_DIGITS = 6
"""Those of the effective rank, in which square roots of small eigenvalues count."""


@dataclass(frozen=True)
class Spectrum:
    """What the eigenvalues of a covariance of C channels say; figures are `None` where undefined.

    Nine significant digits, six of the effective rank: those do not depend on the order of the rows or on how many
    processes saw them, as further ones may.

    `samples`: rows, that is positions times pictures; neighbouring positions are alike, so they are worth fewer.
    `missing`: why there are no figures, `""` where there are. `constant`: channels that never change, of which no
    correlation is. `dropped`: rows with an entry that is not finite, left out. `eigenvalues`: (C,) float64, >= 0,
    descending, of the population covariance, all to the place of the largest one's ninth digit; what is rounding alone
    is 0. `participation_ratio`: of the eigenvalues, (sum l)^2 / sum l^2. `effective_rank`: exp of the entropy of the
    singular values of the centred rows (Roy & Vetterli 2007). `stable_rank`: sum l / max l. `mean_abs_correlation`:
    over pairs of channels that change.
    """

    channels: int
    samples: int
    missing: str = ""
    constant: int = 0
    dropped: int = 0
    eigenvalues: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    participation_ratio: float | None = None
    effective_rank: float | None = None
    stable_rank: float | None = None
    mean_abs_correlation: float | None = None


class Covariance:
    """The scatter of rows of `channels` entries about their mean.

    Takes about channels^2 * 4 bytes, and 8 MiB beside them at most.
    """

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.dropped = 0
        self._count = 0
        self._mean = torch.zeros(channels, dtype=torch.float64)
        self._scatter: list[Tensor] = []  # of block i the columns from it on, (b, C - start)
        self._waiting: Tensor | None = (
            None  # (rows + 1, C): the last row is room for the step between two means
        )
        self._filled = 0

    @property
    def samples(self) -> int:
        """Rows so far, those left out not counted."""
        return self._count + self._filled

    def add(self, rows: Tensor) -> None:
        """Take in rows, (n, C), of any real dtype, strides and device; a row that is not finite is left out."""
        done = 0
        while done < len(rows):
            waiting = self._buffer()
            step = min(len(rows) - done, len(waiting) - 1 - self._filled)
            part = waiting[self._filled : self._filled + step]
            part.copy_(rows[done : done + step])
            self._filled += self._finite(part)
            done += step
            if self._filled == len(waiting) - 1:
                self._flush()

    def settle(self) -> None:
        """Multiply the rows that wait, and let go of the room that they took."""
        self._flush()
        self._waiting = None

    def merge(self, other: Covariance) -> None:
        """Take in all that another has seen; it stays as it is but for rows that it had not multiplied yet."""
        assert other.channels == self.channels, (self.channels, other.channels)
        self._flush()
        other._flush()
        self.dropped += other.dropped
        if not other._count:
            return
        step = self._step(other._mean, other._count)
        for at, (own, more) in enumerate(zip(self._blocks(), other._blocks(), strict=True)):
            start = at * _BLOCK_COLUMNS
            own += more
            own.addr_(step[start : start + len(own)], step[start:])

    def state(self) -> dict[str, Any]:
        """All of it, plain and picklable, for `from_state`."""
        self._flush()
        return {
            "channels": self.channels,
            "dropped": self.dropped,
            "count": self._count,
            "mean": self._mean.numpy(),
            "scatter": [block.numpy() for block in self._scatter],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Covariance:
        """The covariance that a `state` is of."""
        made = cls(int(state["channels"]))
        made.dropped, made._count = int(state["dropped"]), int(state["count"])
        made._mean = torch.from_numpy(np.array(state["mean"]))
        made._scatter = [torch.from_numpy(np.array(block)) for block in state["scatter"]]
        return made

    def matrix(self) -> NDArray[np.float64]:
        """The population covariance, (C, C) float64, symmetric; zeros where there was no row.

        The rows and columns of channels that never changed are exactly 0.
        """
        self._flush()
        whole = torch.zeros(self.channels, self.channels, dtype=torch.float64)
        for at, block in enumerate(self._scatter):
            start = at * _BLOCK_COLUMNS
            whole[start : start + len(block), start:] = block
        # A product of a block with itself is not quite symmetric: the upper triangle says what holds.
        whole = (whole.triu() + whole.triu(1).T) / max(self._count, 1)
        still = whole.diagonal().sqrt() <= _CONSTANT * self._mean.abs()
        whole[still] = 0
        whole[:, still] = 0
        return whole.numpy()

    def spectrum(self) -> Spectrum:
        """What there is to say of the rows so far; nothing where there are fewer rows than channels."""
        count = self.samples
        if count < self.channels or not self.channels:
            missing = f"{count} rows of {self.channels} channels: fewer rows than channels"
            return Spectrum(
                self.channels, count, missing if self.channels else "no channels", dropped=self.dropped
            )
        matrix = self.matrix()
        variances = matrix.diagonal()
        moving = np.flatnonzero(variances > 0)
        kept = matrix[np.ix_(moving, moving)]
        values = np.zeros(self.channels)
        values[: len(moving)] = _eigenvalues(kept)
        largest = float(values[0])
        return Spectrum(
            self.channels,
            count,
            constant=self.channels - len(moving),
            dropped=self.dropped,
            eigenvalues=_to_place(values),
            participation_ratio=_rounded(participation_ratio(values)),
            effective_rank=_rounded(entropy_rank(np.sqrt(values)), RANK_DIGITS),
            stable_rank=_rounded(float(values.sum()) / largest if largest > 0 else None),
            mean_abs_correlation=_rounded(mean_abs_correlation(kept)),
        )

    def _buffer(self) -> Tensor:
        if self._waiting is None:
            rows = min(max(_BLOCK_BYTES // (8 * max(self.channels, 1)), _FEWEST_ROWS), _MOST_ROWS)
            self._waiting = torch.empty(rows + 1, self.channels, dtype=torch.float64)
        return self._waiting

    def _finite(self, part: Tensor) -> int:
        """How many rows are finite; those are moved to the front."""
        if bool(part.sum().isfinite()):
            return len(part)
        good = part[part.isfinite().all(dim=1)]
        self.dropped += len(part) - len(good)
        part[: len(good)] = good
        return len(good)

    def _blocks(self) -> Sequence[Tensor]:
        if not self._scatter:
            self._scatter = [
                torch.zeros(
                    min(_BLOCK_COLUMNS, self.channels - start), self.channels - start, dtype=torch.float64
                )
                for start in range(0, self.channels, _BLOCK_COLUMNS)
            ]
        return self._scatter

    def _flush(self) -> None:
        """Multiply the rows that wait."""
        if not self._filled or self._waiting is None:
            return
        rows = self._waiting[: self._filled]
        mean = rows.mean(dim=0)
        rows -= mean
        # The step between the means is one more row: its product is the one term that Chan's merge adds.
        self._waiting[self._filled] = self._step(mean, self._filled)
        rows = self._waiting[: self._filled + 1]
        self._filled = 0
        for at, block in enumerate(self._blocks()):
            start = at * _BLOCK_COLUMNS
            block.addmm_(rows[:, start : start + len(block)].T, rows[:, start:])

    def _step(self, mean: Tensor, count: int) -> Tensor:
        """Move the mean towards that of `count` more rows; (C,), whose outer product the scatter grows by."""
        total = self._count + count
        delta = mean - self._mean
        self._mean += delta * (count / total)
        step = delta * math.sqrt(self._count * count / total)
        self._count = total
        return step


def mean_abs_correlation(covariance: NDArray[np.float64]) -> float | None:
    """The mean of |r| over all pairs of channels, from 0 to 1; `None` where there are fewer than two.

    Args:
        covariance: (C, C), symmetric, its diagonal above 0.
    """
    count = len(covariance)
    if count < 2:
        return None
    scale = np.sqrt(covariance.diagonal())
    total = np.abs(covariance / scale[:, None] / scale).sum() - count
    return float(min(max(total / (count * (count - 1)), 0.0), 1.0))


def _eigenvalues(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Descending, >= 0; what a sum of that many float64 products cannot tell from 0 is 0."""
    if not len(matrix):
        return np.zeros(0)
    values = torch.linalg.eigvalsh(torch.from_numpy(matrix)).flip(0).numpy()
    least = len(values) * float(np.finfo(np.float64).eps) * max(float(values[0]), 0.0)
    return np.where(values > least, values, 0.0)


def _to_place(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """All to the decimal place of the largest one's last stable digit."""
    largest = float(values.max(initial=0.0))
    place = DIGITS - 1 - math.floor(math.log10(largest)) if largest > 0 else 0
    return np.array([round(value, place) for value in values.tolist()])


def _rounded(value: float | None, digits: int = DIGITS) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")
