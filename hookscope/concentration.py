"""How many of several parts really carry what they carry together: four figures, each with one definition.

Pure functions of non-negative numbers, such as channels' energies or eigenvalues. Published code disagrees on all four
(an inverted ratio, an epsilon inside the logarithm, singular values for eigenvalues): here an undefined figure is
`None`, and nothing is added to make it a number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def participation_ratio(energies: ArrayLike) -> float | None:
    """(sum e)^2 / sum e^2, from 1 (one part has all) to C (all have the same).

    Args:
        energies: (C,), >= 0.

    Returns:
        `None` where it is undefined: none above 0, one below 0 or not finite, or C = 0.
    """
    shares = _shares(energies)
    return None if shares is None else float(1 / np.square(shares).sum())


def entropy_rank(energies: ArrayLike) -> float | None:
    """exp(-sum p ln p) of the shares p = e / sum e, from 1 to C; `None` as of `participation_ratio`.

    Of singular values it is the effective rank of Roy & Vetterli (2007), eq. 5.
    """
    shares = _shares(energies)
    if shares is None:
        return None
    some = shares[shares > 0]
    return float(np.exp(-(some * np.log(some)).sum()))


def gini(energies: ArrayLike) -> float | None:
    """Half the mean difference between two parts over their mean, 0 to 1 - 1/C; `None` as of `participation_ratio`.

    A part is also compared with itself, so one of C parts with all of it gives 1 - 1/C, not 1.
    """
    shares = _shares(energies)
    if shares is None:
        return None
    count = shares.size
    ranks = 2 * np.arange(1, count + 1) - count - 1
    return float((ranks * np.sort(shares)).sum() / count)


def top_share(energies: ArrayLike, k: int) -> float | None:
    """The share of the sum that the `k` greatest parts have, 1 where C <= k; `None` as of `participation_ratio`.

    Args:
        energies: (C,), >= 0.
        k: >= 1.
    """
    shares = _shares(energies)
    return None if shares is None else float(min(np.sort(shares)[::-1][:k].sum(), 1.0))


def _shares(energies: ArrayLike) -> NDArray[np.float64] | None:
    """(C,) float64 with sum 1, or `None` where there are none."""
    values = np.asarray(energies, dtype=np.float64).ravel()
    if not values.size or not np.isfinite(values).all() or values.min() < 0 or values.max() <= 0:
        return None
    scaled: NDArray[np.float64] = (
        values / values.max()
    )  # so that the sum cannot overflow, nor the squares vanish
    scaled /= scaled.sum()
    return scaled
