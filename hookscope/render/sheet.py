"""An indexed picture with a head that a person can read: palette, values as its indices, text, colour bar.

What grids and heat maps share. It must not know about layers, nor choose what is said.

The palette: a ramp of greys from paper to ink, one colour for what is not finite, then the colour table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.render import colour, text

GREYS = 15
"""Indices 0 (paper) to 14 (ink)."""
NOT_FINITE = 15
FIRST = 16
"""The index of the table's lowest colour; the highest is 255."""
LEVELS = 256 - FIRST

Codes = NDArray[np.uint8]
Ends = NDArray[np.float64]

_PAPER, _INK = 255, 32
_MAGENTA = (255, 0, 255)
_MARGIN_PX = 10
_LEAST_WIDTH_PX = 360
_HEADING_PX, _LINE_PX = 16, 12
_BAR_PX = (160, 11)


@dataclass(frozen=True)
class Head:
    """What stands above a picture: a heading, lines, and the words at the two ends of the colour bar."""

    heading: str
    lines: tuple[str, ...]
    low: str
    high: str


def number(value: float) -> str:
    """A value for people: four significant digits."""
    return f"{value + 0.0:.4g}"  # -0.0 + 0.0 is 0.0


def finite_range(values: NDArray[np.floating]) -> tuple[Ends, Ends]:
    """Least and greatest finite value of each of (K, h, w): two (K,) float64, both 0 where none is finite."""
    flat = values.reshape(len(values), -1)
    low, high = flat.min(axis=1), flat.max(axis=1)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        finite = np.isfinite(flat)
        low = np.where(finite, flat, np.inf).min(axis=1)
        high = np.where(finite, flat, -np.inf).max(axis=1)
        low, high = (np.where(finite.any(axis=1), end, 0) for end in (low, high))
    return low.astype(np.float64), high.astype(np.float64)


def levels(values: NDArray[np.floating], low: Ends, high: Ends) -> Codes:
    """Palette indices of (K, h, w): `low` is the first colour, `high` the last, beyond them clipped.

    `low`, `high`: (K,). A channel whose ends are equal gets the first colour throughout.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        span = high - low
        factor = np.divide(LEVELS - 1, span, out=np.zeros_like(span), where=span > 0)
        wide = (span > 1e38) | ((span > 0) & (span < 1e-30))  # would leave the range of float32 on the way
        kind = np.float64 if wide.any() else np.float32
        scaled = np.subtract(values, low.astype(kind)[:, None, None], dtype=kind)
        scaled *= factor.astype(kind)[:, None, None]
        np.clip(scaled, 0, LEVELS - 1, out=scaled)
    scaled += FIRST + 0.5
    finite = np.isfinite(values)
    if not finite.all():
        scaled[~finite] = NOT_FINITE
    codes: Codes = scaled.astype(np.uint8)
    return codes


def inked(mask: NDArray[np.uint8]) -> Codes:
    """A grey mask (0 paper, 255 ink) as palette indices."""
    return ((mask.astype(np.uint16) * (GREYS - 1) + 127) // 255).astype(np.uint8)


def compose(head: Head, body: Codes, cmap: str) -> Image.Image:
    """The head above the body: mode P. The sheet is widened and lines are wrapped so that nothing is cut."""
    inner = max(body.shape[1], _LEAST_WIDTH_PX)
    blocks = [*_lines(head.heading, _HEADING_PX, inner)]
    blocks += [row for line in head.lines for row in _lines(line, _LINE_PX, inner)]
    blocks += [*_bar(head.low, head.high, inner), np.zeros((4, 1), np.uint8), body]
    height = sum(len(block) for block in blocks) + 2 * _MARGIN_PX
    canvas = np.zeros((height, inner + 2 * _MARGIN_PX), np.uint8)
    top = _MARGIN_PX
    for block in blocks:
        _paste(canvas, block, top)
        top += len(block)
    return indexed(canvas, cmap)


def indexed(codes: Codes, cmap: str) -> Image.Image:
    """The indices as a picture of mode P."""
    height, width = codes.shape
    picture = Image.frombytes("P", (width, height), np.ascontiguousarray(codes).tobytes())
    picture.putpalette(palette(cmap))
    return picture


def palette(cmap: str) -> bytes:
    """256 RGB colours: greys, the colour for what is not finite, and the table."""
    greys = np.linspace(_PAPER, _INK, GREYS).round().astype(np.uint8)
    steps = np.linspace(0, 255, LEVELS).round().astype(np.intp)
    table = colour.table(cmap)[steps]
    return np.repeat(greys, 3).tobytes() + bytes(_MAGENTA) + table.tobytes()


def _lines(words: str, size_px: int, width_px: int) -> list[Codes]:
    return [inked(text.mask(line, size_px)) for line in text.wrap(words, size_px, width_px)]


def _bar(low: str, high: str, width_px: int) -> list[Codes]:
    ramp = np.linspace(FIRST, 255, _BAR_PX[0]).round().astype(np.uint8)
    bar = np.repeat(ramp[None], _BAR_PX[1], axis=0)
    parts = [inked(text.mask(low, _LINE_PX)), bar, inked(text.mask(high, _LINE_PX))]
    if sum(part.shape[1] for part in parts) + 12 <= width_px:
        return [_beside(parts)]
    return [parts[0], bar, parts[2]]


def _beside(parts: Sequence[Codes]) -> Codes:
    """The parts in a row, six pixels apart, each at half height."""
    height = max(len(part) for part in parts) + 4
    row = np.zeros((height, sum(part.shape[1] + 6 for part in parts) - 6), np.uint8)
    left = 0
    for part in parts:
        top = (height - len(part)) // 2
        row[top : top + len(part), left : left + part.shape[1]] = part
        left += part.shape[1] + 6
    return row


def _paste(canvas: Codes, block: Codes, top: int) -> None:
    canvas[top : top + len(block), _MARGIN_PX : _MARGIN_PX + block.shape[1]] = block
