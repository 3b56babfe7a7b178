"""One heat map as a labelled picture of its own, and the words for what is wrong with a map.

It must not know about the picture under the map (`overlay` does), nor decide a map's status.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.artifacts import Heat, MapStatus
from hookscope.render import sheet


def draw(
    heat: Heat, *, title: str, cmap: str, size: tuple[int, int], vmax: float | None = None
) -> Image.Image:
    """The map drawn `size` (width, height) pixels large under its head: mode P, colours from 0 to `vmax`.

    `vmax`: the value of the highest colour, the map's own maximum where `None`. Negative values have the
    colour of 0; what is not finite is magenta.

    Raises:
        UsageError: unknown `cmap`.
    """
    top = peak(heat, vmax)
    smooth = enlarge(positive(heat), size)
    codes = sheet.levels(smooth[None], np.zeros(1), np.array([top]))[0]
    bad = ~np.isfinite(heat.values)
    if bad.any():
        where = Image.fromarray(bad.astype(np.uint8) * 255).resize(size, Image.Resampling.NEAREST)
        codes[np.asarray(where) > 0] = sheet.NOT_FINITE
    high = "no positive value" if top == 0 else sheet.number(top)
    return sheet.compose(sheet.Head(str(heat.site), _about(heat, title), "0", high), codes, cmap)


def trouble(heat: Heat) -> str:
    """What is wrong with the map, in words; `""` where its status is `ok`."""
    bad = int(np.count_nonzero(~np.isfinite(heat.values)))
    words = {
        MapStatus.OK: "",
        MapStatus.BLANK: "blank: all values are zero",
        MapStatus.NEGATIVE_ONLY: f"negative only: no value above zero ({_span(heat)})",
        MapStatus.ZERO_GRADIENT: "zero gradient: the score does not depend on this layer",
        MapStatus.NON_FINITE: f"non-finite: {bad} of {heat.values.size} values",
        MapStatus.UNDEFINED: f"undefined: {heat.method} gives no map here",
    }
    return words[heat.status]


def peak(heat: Heat, vmax: float | None = None) -> float:
    """The value of the highest colour: `vmax`, else the greatest finite one; 0 where none is positive."""
    if vmax is None:
        vmax = float(np.max(heat.values, initial=0, where=np.isfinite(heat.values)))
    return vmax if np.isfinite(vmax) and vmax > 0 else 0.0


def positive(heat: Heat) -> NDArray[np.float32]:
    """The map with 0 for what is negative or not finite: (h, w) float32."""
    values = np.where(np.isfinite(heat.values), heat.values, 0).astype(np.float32)
    return np.maximum(values, 0)


def enlarge(values: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """The map at (width, height) `size`, bilinear with half-pixel centres: (height, width) float32."""
    picture = Image.fromarray(np.ascontiguousarray(values))
    return np.array(picture.resize(size, Image.Resampling.BILINEAR))


def _about(heat: Heat, title: str) -> tuple[str, ...]:
    height, width = heat.values.shape
    made = f"{heat.method} · {height} × {width}"
    if heat.target is not None:
        made += f" · {heat.target} ({heat.target.index})" + _certainty(heat.target.probability)
    # A map of negative values says their range in its trouble; one without finite values has none.
    known = heat.status is not MapStatus.NEGATIVE_ONLY and np.isfinite(heat.minimum)
    span = f"values {_span(heat)}" if known else ""
    return tuple(line for line in (title, made, span, trouble(heat)) if line)


def _span(heat: Heat) -> str:
    return f"{sheet.number(heat.minimum)} .. {sheet.number(heat.maximum)}"


def _certainty(probability: float | None) -> str:
    return "" if probability is None else f" {probability:.1%}"
