"""Coloured blocks that a labelled sheet is put together from: lines of text, colour bars, maps, and how they join.

What contact sheets and pairs share. It must not know about maps' meanings, nor choose what is said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from hookscope.render import colour, text

PAPER, INK, QUIET, ALARM = (255, 255, 255), (32, 32, 32), (96, 96, 96), (192, 0, 32)
"""Colours of the sheet, of words, of words that matter less, and of a warning."""

HEADING_PX, LINE_PX, SMALL_PX = 16, 12, 10
MARGIN_PX = 10

_MAGENTA = (255, 0, 255)
_BAR_PX = (120, 10)


def words(
    said: str, size_px: int, width_px: int, *, most: int = 0, ink: tuple[int, int, int] = INK
) -> Image.Image:
    """The text wrapped into at most `width_px`, and into `most` lines (0: any number), an ellipsis at the cut."""
    rows = [text.mask(line, size_px) for line in _lines(said, size_px, width_px, most)]
    return stacked([_inked(row, ink) for row in rows])


def bar(low: str, high: str, cmap: str, width_px: int = 10_000) -> Image.Image:
    """A colour bar between the words at its ends, on one line where `width_px` has room for it."""
    ramp = coloured(np.linspace(0, 1, _BAR_PX[0], dtype=np.float32)[None], cmap).resize(_BAR_PX)
    blocks = [words(low, LINE_PX, width_px), ramp, words(high, LINE_PX, width_px)]
    row = beside(blocks, gap_px=6)
    return row if row.width <= width_px else stacked(blocks, gap_px=2)


def coloured(share: NDArray[np.floating], cmap: str) -> Image.Image:
    """Shares (h, w), 0 the table's first colour and 1 its last, as a picture; what is not finite is magenta."""
    finite = np.isfinite(share)
    levels = (np.clip(np.where(finite, share, 0), 0, 1) * 255 + 0.5).astype(np.uint8)
    pixels = colour.table(cmap)[levels]
    pixels[~finite] = _MAGENTA
    return Image.fromarray(pixels)


def stacked(blocks: Sequence[Image.Image], gap_px: int = 0) -> Image.Image:
    """The blocks one below the other, flush left."""
    height = sum(block.height + gap_px for block in blocks) - gap_px
    sheet = Image.new("RGB", (max(block.width for block in blocks), max(height, 1)), PAPER)
    top = 0
    for block in blocks:
        sheet.paste(block, (0, top))
        top += block.height + gap_px
    return sheet


def beside(blocks: Sequence[Image.Image], gap_px: int, *, high: float = 0.5) -> Image.Image:
    """The blocks in a row, with the share `high` of the room that one leaves above it: 0 aligns the tops."""
    width = sum(block.width + gap_px for block in blocks) - gap_px
    sheet = Image.new("RGB", (width, max(block.height for block in blocks)), PAPER)
    left = 0
    for block in blocks:
        sheet.paste(block, (left, int((sheet.height - block.height) * high)))
        left += block.width + gap_px
    return sheet


def framed(block: Image.Image) -> Image.Image:
    """The block with the sheet's margin around it."""
    return ImageOps.expand(block, MARGIN_PX, PAPER)


def _lines(said: str, size_px: int, width_px: int, most: int) -> list[str]:
    lines = text.wrap(said, size_px, width_px)
    if not most or len(lines) <= most:
        return lines
    last = lines[most - 1]
    while last and text.width(f"{last}…", size_px) > width_px:
        last = last[:-1]
    return [*lines[: most - 1], f"{last.rstrip()}…"]


def _inked(mask: NDArray[np.uint8], ink: tuple[int, int, int]) -> Image.Image:
    return ImageOps.colorize(Image.fromarray(mask), PAPER, ink)
