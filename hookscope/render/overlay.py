"""A heat map laid over its picture, exactly where the model saw it.

Owns the way from the map to the original's pixels. It must not stretch a map over what the model did not see.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.artifacts import Heat, MapStatus, Target
from hookscope.errors import UsageError
from hookscope.images import View
from hookscope.render import colour, text
from hookscope.render.heat import certainty, kept, peak, trouble

VIEWS = ("original", "input")
"""Where a map is drawn: in its place in the whole picture, or on the crop that the model saw."""

FLOOR = 0.3
"""The share of `alpha` that a value of 0 keeps, so that the crop stays visible."""

Box = tuple[float, float, float, float]

_DARK = (24, 24, 24)


def draw(
    heat: Heat,
    picture: Image.Image,
    view: View,
    *,
    alpha: float,
    cmap: str,
    where: str = "original",
    vmax: float | None = None,
) -> Image.Image:
    """The picture with the map on it: RGB, the original's size or (`where="input"`) the model input's.

    With t the map divided by `vmax` (where `None` its own `vmax`, else its peak; no minimum is taken off), clipped
    to 0..1, of a signed map to -1..1, upsampled bilinearly, and a = alpha * (FLOOR + (1 - FLOOR) * abs(t)):

        out = (1 - a) * picture + a * colour(t)        inside the crop, pixel centres counted
        out = picture                                  outside it, exactly

    The colours of a signed map go from t = -1 to 1. A target's box is outlined and named. A map whose status is
    not `ok` has a label that says why, and no colour; but a signed map of negative values has both.

    Raises:
        UsageError: unknown `cmap` or `where`, or `alpha` outside 0..1.
    """
    if where not in VIEWS:
        raise UsageError(f"no view is called {where!r}", f"choose from {', '.join(VIEWS)}")
    if not 0 <= alpha <= 1:
        raise UsageError(f"alpha {alpha!r} is not between 0 and 1", "give --alpha a share such as 0.5")
    colour.check(cmap)
    if where == "input":
        picture, view = seen(picture, view), whole(view.size)
    drawn = picture.convert("RGB").copy()
    if heat.status is MapStatus.OK or (heat.signed and heat.status is MapStatus.NEGATIVE_ONLY):
        _tint(drawn, heat, view.box, cmap, alpha, vmax)
    if heat.target is not None and heat.target.box is not None:
        _mark(drawn, heat.target, placed(heat.target.box, view))
    words = trouble(heat)
    return _labelled(drawn, words) if words else drawn


def seen(picture: Image.Image, view: View) -> Image.Image:
    """What the model saw, but for mean and deviation: RGB of `view.size`, black where the crop was padded."""
    left, top, right, bottom = view.box
    x, y = min(0, math.floor(left)), min(0, math.floor(top))
    width, height = max(picture.width, math.ceil(right)) - x, max(picture.height, math.ceil(bottom)) - y
    padded = picture.convert("RGB")
    if (width, height) != picture.size:
        padded = Image.new("RGB", (width, height))
        padded.paste(picture, (-x, -y))
    return padded.resize(view.size, Image.Resampling.BILINEAR, box=(left - x, top - y, right - x, bottom - y))


def whole(size: tuple[int, int]) -> View:
    """The view of a model that sees all of a picture of this (width, height), at its size."""
    return View(size, (0.0, 0.0, float(size[0]), float(size[1])), size)


def placed(box: Box, view: View) -> Box:
    """A box in pixels of the model's input as one in pixels of the original, fractions kept, nothing cut off."""
    left, top, right, bottom = view.box
    across, down = (right - left) / view.size[0], (bottom - top) / view.size[1]
    return (left + box[0] * across, top + box[1] * down, left + box[2] * across, top + box[3] * down)


def _share(heat: Heat, vmax: float | None) -> NDArray[np.float32]:
    """Where each value lies on the colour table: (h, w) float32, 0..1."""
    top, values = peak(heat, vmax), kept(heat).astype(np.float64)
    scaled = np.clip(values / top, -1, 1) if top else np.zeros(values.shape)
    return ((scaled + 1) / 2 if heat.signed else scaled).astype(np.float32)


def _weights(heat: Heat, alpha: float) -> list[int]:
    """How much of each of the 256 colours goes onto the picture, 0..255."""
    share = np.arange(256) / 255
    share = np.abs(2 * share - 1) if heat.signed else share
    weight = 255 * alpha * (FLOOR + (1 - FLOOR) * share)
    return [int(value) for value in weight.round()]


def _tint(picture: Image.Image, heat: Heat, box: Box, cmap: str, alpha: float, vmax: float | None) -> None:
    inside = _pixels(box, picture.size)
    if inside is None:
        return
    tint = _spread(_share(heat, vmax), heat.covers, box, inside)
    mask = tint.point(_weights(heat, alpha))
    tint.putpalette(colour.table(cmap).tobytes())
    picture.paste(tint.convert("RGB"), inside[:2], mask)


def _pixels(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int] | None:
    """The pixels of the picture whose centres lie in the box; `None` where there are none."""
    left, top = (max(math.ceil(edge - 0.5), 0) for edge in box[:2])
    right, bottom = (min(math.ceil(edge - 0.5), most) for edge, most in zip(box[2:], size, strict=True))
    return (left, top, right, bottom) if left < right and top < bottom else None


def _spread(
    share: NDArray[np.float32], covers: tuple[float, float], box: Box, inside: tuple[int, int, int, int]
) -> Image.Image:
    """The covered part of the map on those pixels, 0..255, straight from the layer's resolution: mode L."""
    height, width = share.shape
    # The outermost pixels may stick out of the box by a fraction: a border of equal values covers that, and
    # changes nothing inside, where bilinear interpolation is constant beyond the outermost centres.
    bordered = Image.fromarray(np.pad(share * 255 + 0.5, 1, mode="edge"))
    across, down = width * covers[1] / (box[2] - box[0]), height * covers[0] / (box[3] - box[1])
    source = (
        max(1 + (inside[0] - box[0]) * across, 0),
        max(1 + (inside[1] - box[1]) * down, 0),
        min(1 + (inside[2] - box[0]) * across, width + 2),
        min(1 + (inside[3] - box[1]) * down, height + 2),
    )
    size = (inside[2] - inside[0], inside[3] - inside[1])
    return bordered.resize(size, Image.Resampling.BILINEAR, box=source).convert("L")


def _mark(picture: Image.Image, target: Target, box: Box) -> None:
    """Outlines the box on the picture, white between dark lines, with the target's name at its top left."""
    left, right = (min(max(round(edge), 0), picture.width) for edge in box[::2])
    top, bottom = (min(max(round(edge), 0), picture.height) for edge in box[1::2])
    if left >= right or top >= bottom:
        return
    thick = max(2, round(min(picture.size) / 300))
    for inset, ink, width in ((0, _DARK, thick + 2), (1, "white", thick)):
        edges = (left + inset, top + inset, right - 1 - inset, bottom - 1 - inset)
        if edges[0] <= edges[2] and edges[1] <= edges[3]:
            ImageDraw.Draw(picture).rectangle(edges, outline=ink, width=width)
    plate = _plate(f"{target}{certainty(target.probability, ' ')}", picture.size)
    x = max(min(left, picture.width - plate.width), 0)
    picture.paste(plate, (x, top - plate.height if plate.height <= top else top))


def _labelled(picture: Image.Image, words: str) -> Image.Image:
    """The picture with the words in its top left corner."""
    picture.paste(_plate(words, picture.size), (0, 0))
    return picture


def _plate(words: str, room: tuple[int, int]) -> Image.Image:
    """White words on a dark ground, as large as a picture of that (width, height) can bear."""
    size = min(max(min(room) // 24, 10), 48)
    pad = size // 3
    lines = text.wrap(words, size, max(room[0] - 2 * pad, size))
    rows = [Image.fromarray(text.mask(line, size)) for line in lines]
    ground = (max(row.width for row in rows) + 2 * pad, sum(row.height for row in rows) + 2 * pad)
    plate = Image.new("L", ground, _DARK[0])
    top = pad
    for row in rows:
        plate.paste(255, (pad, top), row)
        top += row.height
    return plate.convert("RGB")
