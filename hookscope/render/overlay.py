"""A heat map laid over its picture, exactly where the model saw it.

Owns the way from the map to the original's pixels. It must not stretch a map over what the model did not see.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.artifacts import Heat, MapStatus
from hookscope.errors import UsageError
from hookscope.images import View
from hookscope.render import colour, text
from hookscope.render.heat import peak, positive, trouble

VIEWS = ("original", "input")
"""Where a map is drawn: in its place in the whole picture, or on the crop that the model saw."""

FLOOR = 0.3
"""The share of `alpha` that a value of 0 keeps, so that the crop stays visible."""

Box = tuple[float, float, float, float]


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

    With t the map divided by `vmax` (its own maximum where `None`; no minimum is taken off), clipped to 0..1,
    upsampled bilinearly, and a = alpha * (FLOOR + (1 - FLOOR) * t):

        out = (1 - a) * picture + a * colour(t)        inside the crop, pixel centres counted
        out = picture                                  outside it, exactly

    A map whose status is not `ok` leaves the picture as it is, with a label that says why.

    Raises:
        UsageError: unknown `cmap` or `where`, or `alpha` outside 0..1.
    """
    if where not in VIEWS:
        raise UsageError(f"no view is called {where!r}", f"choose from {', '.join(VIEWS)}")
    if not 0 <= alpha <= 1:
        raise UsageError(f"alpha {alpha!r} is not between 0 and 1", "give --alpha a share such as 0.5")
    colour.check(cmap)
    if where == "input":
        picture, box = seen(picture, view), (0.0, 0.0, float(view.size[0]), float(view.size[1]))
    else:
        picture, box = picture.convert("RGB"), view.box
    if heat.status is not MapStatus.OK:
        return _labelled(picture, trouble(heat))
    return _tinted(picture.copy(), _share(heat, vmax), box, alpha, cmap)


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


def _share(heat: Heat, vmax: float | None) -> NDArray[np.float32]:
    top = peak(heat, vmax)
    values = positive(heat).astype(np.float64)
    return np.minimum(values / top, 1).astype(np.float32) if top else np.zeros(values.shape, np.float32)


def _tinted(
    picture: Image.Image, share: NDArray[np.float32], box: Box, alpha: float, cmap: str
) -> Image.Image:
    inside = _pixels(box, picture.size)
    if inside is None:
        return picture
    smooth = _placed(share, box, inside)
    tint = smooth.copy()
    tint.putpalette(colour.table(cmap).tobytes())
    weight = 255 * alpha * (FLOOR + (1 - FLOOR) * np.arange(256) / 255)
    mask = smooth.point(list(weight.round().astype(int)))
    picture.paste(tint.convert("RGB"), inside[:2], mask)
    return picture


def _pixels(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int] | None:
    """The pixels of the picture whose centres lie in the box; `None` where there are none."""
    left, top = (max(math.ceil(edge - 0.5), 0) for edge in box[:2])
    right, bottom = (min(math.ceil(edge - 0.5), most) for edge, most in zip(box[2:], size, strict=True))
    return (left, top, right, bottom) if left < right and top < bottom else None


def _placed(share: NDArray[np.float32], box: Box, inside: tuple[int, int, int, int]) -> Image.Image:
    """The map on those pixels, 0..255, straight from the layer's resolution: mode L."""
    height, width = share.shape
    # The outermost pixels may stick out of the box by a fraction: a border of equal values covers that, and
    # changes nothing inside, where bilinear interpolation is constant beyond the outermost centres.
    bordered = Image.fromarray(np.pad(share * 255 + 0.5, 1, mode="edge"))
    across, down = width / (box[2] - box[0]), height / (box[3] - box[1])
    source = (
        max(1 + (inside[0] - box[0]) * across, 0),
        max(1 + (inside[1] - box[1]) * down, 0),
        min(1 + (inside[2] - box[0]) * across, width + 2),
        min(1 + (inside[3] - box[1]) * down, height + 2),
    )
    size = (inside[2] - inside[0], inside[3] - inside[1])
    return bordered.resize(size, Image.Resampling.BILINEAR, box=source).convert("L")


def _labelled(picture: Image.Image, words: str) -> Image.Image:
    """A copy with the words on a dark plate in the top left corner, as large as the picture can bear."""
    picture = picture.copy()
    size = min(max(min(picture.size) // 24, 10), 48)
    pad = size // 3
    lines = text.wrap(words, size, max(picture.width - 2 * pad, size))
    rows = [Image.fromarray(text.mask(line, size)) for line in lines]
    plate = Image.new(
        "L", (max(row.width for row in rows) + 2 * pad, sum(row.height for row in rows) + 2 * pad), 24
    )
    top = pad
    for row in rows:
        plate.paste(255, (pad, top), row)
        top += row.height
    picture.paste(plate.convert("RGB"), (0, 0))
    return picture
