"""One map as it was and as it is, side by side, and what changed between them.

It must not decide whether the change matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from hookscope.render import panels, sheet
from hookscope.render.heat import enlarge

DIVERGING = "RdBu_r"
"""The table of differences, white where there is none."""

Values = NDArray[np.float32]
_Column = tuple[str, Image.Image, Image.Image]  # name, map, colour bar


def draw(
    before: Values,
    now: Values,
    *,
    title: str,
    lines: Sequence[str] = (),
    size: tuple[int, int],
    cmap: str,
    picture: Image.Image | None = None,
    signed: bool = False,
    covers: tuple[float, float] = (1.0, 1.0),
    note: str = "",
) -> Image.Image:
    """The panels `before`, `now` and `now - before`, each `size` (width, height) pixels: RGB, under one head.

    `before`, `now`: (h, w), raw; each is divided by its own greatest magnitude, so that the difference is one of
    shape, from -1 to 1, whatever the units. Their sizes may differ. Without `signed`, negative values have the
    colour of 0. What is not finite is magenta. `picture`: what the model saw, as the first panel.

    Raises:
        UsageError: unknown `cmap`.
    """
    tops = (_top(before, signed), _top(now, signed))
    old, new = (
        _scaled(map_, top, size, signed, covers) for map_, top in zip((before, now), tops, strict=True)
    )
    change = new - old
    shown = ((old + 1) / 2, (new + 1) / 2) if signed else (old, new)
    columns = [
        ("before", panels.coloured(shown[0], cmap), panels.bar(*_ends(tops[0], signed), cmap)),
        ("now", panels.coloured(shown[1], cmap), panels.bar(*_ends(tops[1], signed), cmap)),
        (
            f"now - before, each scaled to 1{_most(change)}",
            panels.coloured((change + 1) / 2, DIVERGING),
            panels.bar("-1", "1", DIVERGING),
        ),
    ]
    if picture is not None:
        seen = picture.convert("RGB").resize(size, Image.Resampling.BILINEAR)
        columns.insert(0, ("picture", seen, panels.words("", panels.LINE_PX, size[0])))
    return panels.framed(_sheet(columns, title, lines, note))


def _top(values: Values, signed: bool) -> float:
    """The greatest finite magnitude that has a colour; 0 where there is none."""
    finite = values[np.isfinite(values)]
    return float(np.max(np.abs(finite) if signed else finite, initial=0))


def _scaled(
    values: Values, top: float, size: tuple[int, int], signed: bool, covers: tuple[float, float]
) -> Values:
    """The map at `size`, from -1 or 0 to 1, NaN about what is not finite: (height, width) float32."""
    kept = np.where(np.isfinite(values), values, np.nan).astype(np.float64) / (top or 1.0)
    clipped = np.clip(kept, -1 if signed else 0, 1).astype(np.float32)
    return enlarge(clipped, size, covers)


def _ends(top: float, signed: bool) -> tuple[str, str]:
    return (sheet.number(-top) if signed else "0"), sheet.number(top)


def _most(change: Values) -> str:
    finite = change[np.isfinite(change)]
    return f"; at most {np.abs(finite).max():.2g}" if finite.size else ""


def _sheet(columns: Sequence[_Column], title: str, lines: Sequence[str], note: str) -> Image.Image:
    widths = [max(drawn.width, bar.width) for _, drawn, bar in columns]
    names = [
        panels.words(name, panels.LINE_PX, width, most=3)
        for (name, _, _), width in zip(columns, widths, strict=True)
    ]
    # A name of two lines must not shift its map: they are compared by eye.
    tallest = max(name.height for name in names)
    raised = [ImageOps.expand(name, (0, tallest - name.height, 0, 0), panels.PAPER) for name in names]
    blocks = [
        panels.stacked([name, drawn, bar], gap_px=3)
        for name, (_, drawn, bar) in zip(raised, columns, strict=True)
    ]
    body = panels.beside(blocks, gap_px=10, high=0)
    head = [panels.words(title, panels.HEADING_PX, body.width)] if title else []
    head += [panels.words(line, panels.LINE_PX, body.width) for line in lines if line]
    head += [panels.words(note, panels.LINE_PX, body.width, ink=panels.ALARM)] if note else []
    return panels.stacked([panels.stacked(head), body], gap_px=8) if head else body
