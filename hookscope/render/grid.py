"""A grid of channels: the chosen channels of one layer side by side, numbered, under a head that says which.

Made as one array, with no figure per channel. It must not choose channels nor change values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.artifacts import Tiles
from hookscope.errors import UsageError
from hookscope.render import sheet, text
from hookscope.render.sheet import Codes, Ends

SCALES = ("channel", "layer")
"""What the colours span: each channel's own range, or the whole layer's."""

_ASPECT = 1.6
_LEAST_TILE_PX, _MOST_TILE_PX = 32, 112
_ROOMY_AREA_PX = 640 * 400
_GAP_PX = 2
_LABEL_PX = 9


@dataclass(frozen=True)
class _Layout:
    """A tile (height, width) and the strip above it for its number, 0 where there is no room, in pixels."""

    scale: int
    tile: tuple[int, int]
    strip: int
    columns: int
    rows: int


def draw(
    tiles: Tiles,
    *,
    title: str = "",
    columns: int | None = None,
    cmap: str = "viridis",
    scale: str = "channel",
) -> Image.Image:
    """One labelled picture of mode P; small maps are enlarged by a whole factor, none is reduced.

    Pixels that are not finite are magenta; a constant channel is flat.

    Raises:
        UsageError: unknown `cmap` or `scale`, or `columns` below 1.
    """
    if scale not in SCALES:
        raise UsageError(f"no scale is called {scale!r}", f"choose from {', '.join(SCALES)}")
    values = np.asarray(tiles.values, dtype=np.float32)
    if not values.size:
        head = sheet.Head(str(tiles.site), (*_about(tiles, title), "no channels to draw"), "", "")
        return sheet.compose(head, np.zeros((1, 1), np.uint8), cmap)
    low, high = sheet.finite_range(values)
    notes = _notes(values, low, high)
    words = _ends(tiles, scale)
    if scale == "layer":
        low, high = _whole_layer(tiles, len(values))
    codes = sheet.levels(values, low, high)
    body = _arranged(codes, tiles.channels, _layout(codes.shape, columns, tiles.channels))
    head = sheet.Head(str(tiles.site), (*_about(tiles, title), *notes), *words)
    return sheet.compose(head, body, cmap)


def _about(tiles: Tiles, title: str) -> tuple[str, ...]:
    shape = " × ".join(str(size) for size in tiles.shape)
    layout = f" ({tiles.layout.removeprefix('N')})" if tiles.layout else ""
    what = f"{tiles.type} · {shape}{layout} · channels: {tiles.selection}"
    span = f"layer's values {sheet.number(tiles.minimum)} .. {sheet.number(tiles.maximum)}"
    return (title, what, span) if title else (what, span)


def _ends(tiles: Tiles, scale: str) -> tuple[str, str]:
    if scale == "channel":
        return "each channel's own min", "max"
    return f"whole layer: {sheet.number(tiles.minimum)}", sheet.number(tiles.maximum)


def _notes(values: NDArray[np.float32], low: Ends, high: Ends) -> tuple[str, ...]:
    bad = values.size - int(np.count_nonzero(np.isfinite(values)))
    notes = [f"{bad} of {values.size} values are not finite (magenta)"] if bad else []
    flat = int(np.count_nonzero(low == high))
    if bad < values.size and low.min() == high.max():
        notes.append(f"every {'finite ' if bad else ''}value is {sheet.number(low[0])}")
    elif flat:
        notes.append(f"{flat} of {len(values)} channels are constant (flat)")
    return tuple(notes)


def _whole_layer(tiles: Tiles, count: int) -> tuple[Ends, Ends]:
    ends = np.nan_to_num([tiles.minimum, tiles.maximum])
    return np.full(count, ends[0], np.float64), np.full(count, ends[1], np.float64)


def _layout(shape: tuple[int, ...], columns: int | None, channels: tuple[int, ...]) -> _Layout:
    count, height, width = shape
    roomy = math.sqrt(_ROOMY_AREA_PX / count)
    side = min(max(roomy, _LEAST_TILE_PX), _MOST_TILE_PX)
    scale = max(1, math.ceil(side / math.sqrt(height * width)))
    tile = (height * scale, width * scale)
    _, glyph_height, glyph_width = _glyphs().shape
    fits = len(str(max(channels))) * glyph_width <= tile[1]
    strip = glyph_height if fits else 0
    if columns is None:
        columns = _near_aspect(count, tile[1] + _GAP_PX, tile[0] + strip + _GAP_PX)
    elif columns < 1:
        raise UsageError(f"{columns!r} columns", "give --columns 1 or more")
    columns = min(columns, count)
    return _Layout(scale, tile, strip, columns, math.ceil(count / columns))


def _near_aspect(count: int, cell_width: int, cell_height: int) -> int:
    ideal = math.sqrt(_ASPECT * count * cell_height / cell_width)

    def fault(columns: int) -> float:
        rows = math.ceil(count / columns)
        aspect = columns * cell_width / (rows * cell_height)
        return abs(math.log(aspect / _ASPECT)) + (rows * columns - count) / count

    near = range(math.floor(ideal * 0.75), math.ceil(ideal * 1.34) + 1)
    return min((min(max(columns, 1), count) for columns in near), key=fault)


def _arranged(codes: Codes, channels: tuple[int, ...], layout: _Layout) -> Codes:
    count = len(codes)
    height, width = layout.tile
    cell = (layout.strip + height + _GAP_PX, width + _GAP_PX)
    cells = np.zeros((layout.rows * layout.columns, *cell), np.uint8)
    cells[:count, layout.strip : layout.strip + height, :width] = _enlarged(codes, layout.scale)
    if layout.strip:
        numbers = _numbers(channels)
        cells[:count, : layout.strip, : numbers.shape[2]] = numbers[:, :, :width]
    rows = cells.reshape(layout.rows, layout.columns, *cell).transpose(0, 2, 1, 3)
    return rows.reshape(layout.rows * cell[0], layout.columns * cell[1])


def _enlarged(codes: Codes, scale: int) -> Codes:
    if scale == 1:
        return codes
    count, height, width = codes.shape
    wide = np.repeat(codes, scale, axis=2)
    spread = np.broadcast_to(wide[:, :, None], (count, height, scale, width * scale))
    return spread.reshape(count, height * scale, width * scale)


def _numbers(channels: tuple[int, ...]) -> Codes:
    """The channel numbers as pictures, flush left: (K, glyph height, most digits × glyph width)."""
    glyphs = _glyphs()
    most = len(str(max(channels)))
    blank = len(glyphs) - 1
    rows = [[int(digit) for digit in str(channel)] for channel in channels]
    digits = np.array([row + [blank] * (most - len(row)) for row in rows])
    count, height, width = len(channels), *glyphs.shape[1:]
    numbers: Codes = glyphs[digits].transpose(0, 2, 1, 3).reshape(count, height, most * width)
    return numbers


@lru_cache(maxsize=1)
def _glyphs() -> Codes:
    """The ten digits and a blank, all of one size: (11, height, width)."""
    digits = [sheet.inked(text.mask(str(digit), _LABEL_PX)) for digit in range(10)]
    width = max(digit.shape[1] for digit in digits)
    glyphs = np.zeros((11, len(digits[0]), width), np.uint8)
    for place, digit in zip(glyphs, digits, strict=False):
        place[:, : digit.shape[1]] = digit
    return glyphs
