"""One heat map as a labelled picture of its own, and what all pictures of maps say and colour alike.

It must not know about the picture under the map (`overlay` does), nor decide a map's status.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.artifacts import Heat, MapStatus, Target
from hookscope.render import sheet

_LAYERS_NAMED = 4
_SHORT = {
    "deletion_auc": "deletion",
    "insertion_auc": "insertion",
    "average_drop": "drop",
    "increase_in_confidence": "increase",
    "iou": "overlap of the hottest 20 % (IoU)",
    "shift": "shift of the centre",
}
"""How scores are named where there is little room."""

_NO_MAP = 2  # a light grey of the palette


def draw(
    heat: Heat,
    *,
    title: str,
    cmap: str,
    size: tuple[int, int],
    vmax: float | None = None,
    input_size: tuple[int, int] | None = None,
) -> Image.Image:
    """The map drawn `size` (width, height) pixels large under its head: mode P.

    The colours go from 0 to `vmax`, of a signed map from -`vmax` to `vmax`; `None` is the map's `vmax`, else its
    own peak. Without a sign, negative values have the colour of 0; what is not finite is magenta. Only what
    `heat.covers` says of the map is drawn. A target's box is outlined where `input_size`, (width, height) of the
    model's input, says how its pixels are to be read.

    Raises:
        UsageError: unknown `cmap`.
    """
    top = peak(heat, vmax)
    codes = _codes(heat, top, size)
    if heat.target is not None and heat.target.missing:
        codes[:] = _NO_MAP
    if heat.target is not None and heat.target.box is not None and input_size is not None:
        _outline(codes, heat.target.box, input_size)
    head = sheet.Head(layers_said(str(heat.site)), _about(heat, title), *_ends(heat, top))
    return sheet.compose(head, codes, cmap)


def trouble(heat: Heat) -> str:
    """What is wrong with the map, in words; `""` where its status is `ok`."""
    bad = int(np.count_nonzero(~np.isfinite(heat.values)))
    reason = heat.target.missing if heat.target is not None else ""
    words = {
        MapStatus.OK: "",
        MapStatus.BLANK: "blank: all values are zero",
        MapStatus.NEGATIVE_ONLY: f"negative only: no value above zero ({span(heat)})",
        MapStatus.ZERO_GRADIENT: "zero gradient: the score does not depend on this layer",
        MapStatus.NON_FINITE: f"non-finite: {bad} of {heat.values.size} values",
        MapStatus.UNDEFINED: f"undefined: {reason or f'{heat.method} gives no map here'}",
    }
    return words[heat.status]


def layers_said(site: str) -> str:
    """A site for a heading: a fused map's layers apart, so that they can wrap, and not more than a few of them."""
    layers = site.split("+")
    if len(layers) > _LAYERS_NAMED:
        return f"{layers[0]} + {layers[1]} + … + {layers[-1]} ({len(layers)} layers)"
    return " + ".join(layers)


def target_said(target: Target) -> str:
    """`Egyptian cat (285) 71.7%`, `box1: cat (17) 98.0%`, `norm`."""
    words = str(target)
    if target.index is not None and target.label:
        words += f" ({target.index})"
    if target.box is not None and target.name != words:
        words = f"{target.name}: {words}"
    if not target.against:
        return words + certainty(target.probability, " ")
    return f"{words} against {', '.join(map(str, target.against))}" + certainty(target.probability, " · ")


def certainty(probability: float | None, before: str) -> str:
    """`before` and the probability in per cent, `""` where it is not known."""
    return "" if probability is None else f"{before}{probability:.1%}"


def scores_said(scores: Mapping[str, float]) -> str:
    """`deletion 0.12 · insertion 0.731`: any named numbers in one line."""
    named = ((_SHORT.get(name, name.replace("_", " ")), value) for name, value in scores.items())
    return " · ".join(f"{name} {value + 0.0:.3g}" for name, value in named)


def span(heat: Heat) -> str:
    """The map's range: `0 .. 0.53`."""
    return f"{sheet.number(heat.minimum)} .. {sheet.number(heat.maximum)}"


def peak(heat: Heat, vmax: float | None = None) -> float:
    """The value of the highest colour: `vmax`, else the map's `vmax`, else its own peak; 0 where none is positive."""
    if vmax is None:
        vmax = heat.peak if heat.vmax is None else heat.vmax
    return vmax if np.isfinite(vmax) and vmax > 0 else 0.0


def kept(heat: Heat) -> NDArray[np.float32]:
    """The map with 0 for what has no colour, not finite or negative without `signed`: (h, w) float32."""
    values = np.where(np.isfinite(heat.values), heat.values, 0).astype(np.float32)
    return values if heat.signed else np.maximum(values, 0)


def enlarge(
    values: NDArray[np.float32], size: tuple[int, int], covers: tuple[float, float] = (1.0, 1.0)
) -> NDArray[np.float32]:
    """The covered part at (width, height) `size`, bilinear with half-pixel centres: (height, width) float32.

    `covers`: shares of the map's height and width, from the top left.
    """
    picture = Image.fromarray(np.ascontiguousarray(values))
    return np.array(picture.resize(size, Image.Resampling.BILINEAR, box=_covered(values, covers)))


def _covered(values: NDArray[np.float32], covers: tuple[float, float]) -> tuple[float, float, float, float]:
    height, width = values.shape
    return (0, 0, min(width * covers[1], width), min(height * covers[0], height))


def _codes(heat: Heat, top: float, size: tuple[int, int]) -> sheet.Codes:
    smooth = enlarge(kept(heat), size, heat.covers)
    low = -(top or 1.0) if heat.signed else 0.0  # a signed map of zeros has the colour in the middle
    codes: sheet.Codes = sheet.levels(smooth[None], np.array([low]), np.array([top or -low]))[0]
    bad = ~np.isfinite(heat.values)
    if bad.any():
        mask, box = Image.fromarray(bad.astype(np.uint8) * 255), _covered(heat.values, heat.covers)
        codes[np.asarray(mask.resize(size, Image.Resampling.NEAREST, box=box)) > 0] = sheet.NOT_FINITE
    return codes


def _outline(codes: sheet.Codes, box: tuple[float, float, float, float], input_size: tuple[int, int]) -> None:
    """Draws the box, a line of ink around a line of paper, seen on any colour."""
    height, width = codes.shape
    across, down = width / input_size[0], height / input_size[1]
    left, right = (min(max(round(edge * across), 0), width) for edge in box[::2])
    top, bottom = (min(max(round(edge * down), 0), height) for edge in box[1::2])
    for inset, code in enumerate((sheet.GREYS - 1, 0)):
        inside = codes[top + inset : max(bottom - inset, 0), left + inset : max(right - inset, 0)]
        inside[:1], inside[-1:], inside[:, :1], inside[:, -1:] = (code,) * 4


def _ends(heat: Heat, top: float) -> tuple[str, str]:
    """The words at the two ends of the colour bar."""
    if heat.signed:
        return sheet.number(-top), sheet.number(top)
    return "0", "no positive value" if top == 0 else sheet.number(top)


def _about(heat: Heat, title: str) -> tuple[str, ...]:
    height, width = heat.values.shape
    made = f"{heat.method} · {height} × {width}"
    if heat.target is not None:
        made += f" · {target_said(heat.target)}"
    # A map of negative values says their range in its trouble; one without finite values has none.
    known = heat.status is not MapStatus.NEGATIVE_ONLY and np.isfinite(heat.minimum)
    values = f"values {span(heat)}" if known else ""
    lines = (title, made, values, _padding(heat.covers), trouble(heat), scores_said(heat.scores))
    return tuple(line for line in lines if line)


def _padding(covers: tuple[float, float]) -> str:
    if min(covers) >= 1:
        return ""
    return f"drawn: {covers[0]:.0%} of its height, {covers[1]:.0%} of its width; the rest is padding"
