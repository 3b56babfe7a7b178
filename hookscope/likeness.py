"""How alike two maps are, in three numbers. Arrays only: no torch, no model, no picture."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Map = NDArray[np.floating]


@dataclass(frozen=True)
class Likeness:
    """Three views of how alike two maps are; nan where one is undefined.

    `spearman`: the correlation of the ranks, -1 to 1. `iou`: the overlap of the hottest positions, 0 to 1. `shift`:
    how far apart the centres lie, as a share of the diagonal, from 0.
    """

    spearman: float
    iou: float
    shift: float


def likeness(a: Map, b: Map) -> Likeness:
    """How alike two raw maps are; (1, 1, 0) for maps of the same values, be they constant.

    Args:
        a: (h, w), signed or not.
        b: likewise; of another size, the smaller is resized bilinearly, with half-pixel centres, to the larger.
    """
    if np.array_equal(a, b, equal_nan=True):
        return Likeness(1.0, 1.0, 0.0)
    height, width = np.maximum(a.shape, b.shape)
    a, b = (_resized(each, int(height), int(width)) for each in (a, b))
    return Likeness(spearman(a, b), hottest_iou(a, b), centre_shift(a, b))


def spearman(a: Map, b: Map) -> float:
    """Spearman's correlation, -1 to 1, equal values sharing their mean rank.

    nan where a map is constant or not finite.

    Args:
        a: (h, w).
        b: (h, w).
    """
    if not _finite(a, b):
        return math.nan
    one, other = _ranks(a), _ranks(b)
    one, other = one - one.mean(), other - other.mean()
    size = math.sqrt((one @ one) * (other @ other))
    return float(one @ other) / size if size > 0 else math.nan


def hottest_iou(a: Map, b: Map, share: float = 0.2) -> float:
    """Intersection over union, 0 to 1, of the hottest positions; nan where a map is not finite.

    ceil(share n) of n positions each. Where more are equally hot at the edge than there is room for, each of these
    belongs by the same fraction, and the sums of the lesser and the greater fractions are intersection and union:
    the same map gives 1 exactly, and a flat one is a thin layer over the picture, not what comes first in memory.

    Args:
        a: (h, w).
        b: (h, w).
        share: of the positions, above 0, at most 1.
    """
    if not _finite(a, b):
        return math.nan
    one, other = _membership(a, share), _membership(b, share)
    return float(np.minimum(one, other).sum() / np.maximum(one, other).sum())


def centre_shift(a: Map, b: Map) -> float:
    """How far apart the centres of mass of the positive parts lie, as a share of the diagonal, 0 to 1.

    nan where a map has no positive value or is not finite.

    Args:
        a: (h, w).
        b: (h, w).
    """
    if not _finite(a, b) or min(a.max(), b.max()) <= 0:
        return math.nan
    return math.dist(_centre(a), _centre(b)) / math.hypot(*a.shape)


def _finite(a: Map, b: Map) -> bool:
    return bool(np.isfinite(a).all() and np.isfinite(b).all())


def _ranks(values: Map) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[place.ravel()]
    return ranks


def _membership(values: Map, share: float) -> NDArray[np.float64]:
    """(h, w): 1 for what is hotter than the edge, 0 below it, and at it the fraction that fills the share."""
    # A product such as 0.07 * 100 is a hair above its whole number.
    room = max(1, math.ceil(share * values.size - 1e-9))
    edge = np.partition(values.ravel(), values.size - room)[values.size - room]
    hotter, level = values > edge, values == edge
    belonging: NDArray[np.float64] = hotter.astype(np.float64)
    belonging[level] = (room - hotter.sum()) / level.sum()
    return belonging


def _centre(values: Map) -> tuple[float, float]:
    positive = np.clip(values.astype(np.float64), 0, None)
    positive /= positive.max()
    rows, columns = np.indices(positive.shape)
    total = positive.sum()
    return float((positive * rows).sum() / total), float((positive * columns).sum() / total)


def _resized(values: Map, height: int, width: int) -> Map:
    if values.shape == (height, width):
        return values
    picture = Image.fromarray(np.ascontiguousarray(values, dtype=np.float32))
    return np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
