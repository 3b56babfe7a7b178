"""A contact sheet: all maps of one picture as small overlays, a row for each layer and method, a column for each
target.

It must not choose maps nor colours; how a map lies on its picture is `overlay`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from PIL import Image

from hookscope.artifacts import Heat, MapStatus, Target
from hookscope.images import View
from hookscope.render import overlay, panels, sheet
from hookscope.render.heat import layers_said, span, target_said
from hookscope.wording import counted

MOST_SIDE_PX, LEAST_SIDE_PX = 224, 96
"""The longer side of a cell, the smaller the more there are."""

_AREA_PX = 6_000_000
_LEAST_WIDTH_PX = 112
_LEAST_HEAD_PX = 360
_MOST_PX = 16_000  # WebP ends at 16,383
_GAP_PX = 6
_HEAD_LINES = 4

_RANGED = (MapStatus.OK, MapStatus.NEGATIVE_ONLY)

Row = tuple[str, str]


@dataclass(frozen=True)
class Cell:
    """One map and the colours it gets."""

    heat: Heat
    cmap: str

    @property
    def row(self) -> Row:
        return str(self.heat.site), self.heat.method


@dataclass(frozen=True)
class _Grid:
    """Sizes in pixels: the (width, height) of a drawn cell, a column's width, and the height of the captions."""

    cell: tuple[int, int]
    column: int
    caption: int

    @property
    def row(self) -> int:
        return self.cell[1] + self.caption + _GAP_PX

    def left(self, column: int) -> int:
        """Where a column begins; column 0 is that of the labels."""
        return column * (self.column + _GAP_PX)


def draw(
    cells: Sequence[Cell],
    picture: Image.Image,
    view: View,
    *,
    title: str,
    alpha: float,
    note: str = "",
    where: str = "original",
) -> Image.Image:
    """The sheet: RGB, the picture at the top left, each map on it with its range, or what is wrong, underneath.

    Rows and columns are in the order of the cells. What no cell has is left empty. `note` stands out in the head.

    Raises:
        UsageError: unknown colour table or `where`, or `alpha` outside 0..1.
    """
    rows = list(dict.fromkeys(cell.row for cell in cells))
    columns = list(dict.fromkeys(cell.heat.target for cell in cells))
    base, small = _reduced(picture, view, where, _side(len(rows), len(columns)))
    width = max(base.width, _LEAST_WIDTH_PX)
    captions = [_caption(cell, width) for cell in cells]
    grid = _Grid(base.size, width, max((caption.height for caption in captions), default=0))
    labels = [_column_head(target, grid) for target in columns]
    table = _empty(rows, labels, base, grid)
    top = table.height - len(rows) * grid.row
    for cell, caption in zip(cells, captions, strict=True):
        left = grid.left(1 + columns.index(cell.heat.target))
        above = top + rows.index(cell.row) * grid.row
        drawn = overlay.draw(cell.heat, base, small, alpha=alpha, cmap=cell.cmap)
        table.paste(drawn, (left, above))
        table.paste(caption, (left, above + grid.cell[1]))
    free = (grid.left(1), top - 2 * _GAP_PX - max((label.height for label in labels), default=0))
    return _framed(table, partial(_head, cells, rows, columns, title, note), free)


def _framed(table: Image.Image, head: Callable[[int], Image.Image], free: tuple[int, int]) -> Image.Image:
    """The table with its head, beside the picture where that fits, else above, and a margin around.

    `head`: makes it for a width. `free`: where the room beside the picture begins, and its height.
    """
    beside = head(table.width - free[0]) if table.width > free[0] else None
    if beside is not None and beside.width <= table.width - free[0] and beside.height <= free[1]:
        table.paste(beside, (free[0], 0))
    else:
        table = panels.stacked([head(max(table.width, _LEAST_HEAD_PX)), table], gap_px=8)
    sheet = panels.framed(table)
    if max(sheet.size) > _MOST_PX:
        sheet.thumbnail((_MOST_PX, _MOST_PX), Image.Resampling.BILINEAR)
    return sheet


def _side(rows: int, columns: int) -> int:
    area = _AREA_PX / ((rows + 1) * (columns + 1))
    return int(min(max(math.sqrt(area), LEAST_SIDE_PX), MOST_SIDE_PX))


def _reduced(picture: Image.Image, view: View, where: str, side: int) -> tuple[Image.Image, View]:
    """The picture a cell shows, its longer side `side` pixels, and where the model's input lies in it."""
    if where == "input":
        picture, view = overlay.seen(picture, view), overlay.whole(view.size)
    scale = side / max(picture.size)
    size = (max(round(picture.width * scale), 1), max(round(picture.height * scale), 1))
    base = picture.convert("RGB").resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    across, down = size[0] / picture.width, size[1] / picture.height
    left, top, right, bottom = view.box
    return base, View(size, (left * across, top * down, right * across, bottom * down), view.size)


def _caption(cell: Cell, width: int) -> Image.Image:
    """The map's range, the status where it has none, and the scale's end where that is another."""
    heat = cell.heat
    said = span(heat) if heat.status in _RANGED else str(heat.status)
    if heat.vmax is not None and heat.vmax != heat.peak and heat.status is MapStatus.OK:
        said += f" of {sheet.number(heat.vmax)}"
    ink = panels.QUIET if heat.status is MapStatus.OK else panels.ALARM
    return panels.words(said, panels.SMALL_PX, width, most=2, ink=ink)


def _empty(rows: Sequence[Row], labels: Sequence[Image.Image], base: Image.Image, grid: _Grid) -> Image.Image:
    """The table with its labels and the picture, before any map is in it."""
    top = max(grid.cell[1], *(label.height for label in labels), 0) + _GAP_PX
    size = (grid.left(len(labels) + 1) - _GAP_PX, top + len(rows) * grid.row)
    table = Image.new("RGB", size, panels.PAPER)
    table.paste(base, (0, top - _GAP_PX - base.height))
    for number, label in enumerate(labels, 1):
        table.paste(label, (grid.left(number), top - _GAP_PX - label.height))
    for number, row in enumerate(rows):
        table.paste(_row_head(*row, grid), (0, top + number * grid.row))
    return table


def _column_head(target: Target | None, grid: _Grid) -> Image.Image:
    words = "" if target is None else target_said(target)
    return panels.words(words, panels.LINE_PX, grid.column, most=_HEAD_LINES)


def _row_head(site: str, method: str, grid: _Grid) -> Image.Image:
    said = panels.words(method, panels.LINE_PX, grid.column, most=2, ink=panels.QUIET)
    line = panels.words(" ", panels.LINE_PX, grid.column).height
    room = max((grid.row - _GAP_PX - said.height) // line, 1)
    named = panels.words(layers_said(site), panels.LINE_PX, grid.column, most=room)
    return panels.stacked([named, said])


def _head(
    cells: Sequence[Cell],
    rows: Sequence[Row],
    columns: Sequence[Target | None],
    title: str,
    note: str,
    width: int,
) -> Image.Image:
    layers, methods = (dict.fromkeys(names) for names in zip(*rows, strict=True)) if rows else ((), ())
    counts = (counted(len(layers), "layer"), counted(len(methods), "method"), counted(len(columns), "target"))
    blocks = [panels.words(title, panels.HEADING_PX, width)] if title else []
    blocks += [panels.words(note, panels.LINE_PX, width, ink=panels.ALARM)] if note else []
    blocks += [panels.words(" · ".join(counts), panels.LINE_PX, width)]
    tinted = [cell for cell in cells if cell.heat.status in _RANGED]
    scales = dict.fromkeys((cell.cmap, *_ends(cell, tinted)) for cell in tinted)
    return panels.stacked(
        [*blocks, *(panels.bar(low, high, cmap, width) for cmap, low, high in scales)], gap_px=2
    )


def _ends(cell: Cell, cells: Sequence[Cell]) -> tuple[str, str]:
    """The words at the ends of the colour bar that the cell's colours lie on."""
    shared = {other.heat.vmax for other in cells}
    if len(shared) == 1 and cell.heat.vmax is not None:
        number = sheet.number(cell.heat.vmax)
        return (f"-{number}" if cell.heat.signed else "0"), number
    size = "greatest magnitude" if cell.heat.signed else "maximum"
    end = f"each map's own {size}" if shared == {None} else "the scale's end, under each map"
    return "against" if cell.heat.signed else "0", f"for: {end}" if cell.heat.signed else end
