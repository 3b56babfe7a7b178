"""Many small histograms on one page, each on its own even axis: drawn as one set of polygons, so a page is quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hookscope.render.plot import drawing_board, encoded_figure, shortened_name

_COLUMNS, _ROWS = 4, 14
PER_PAGE = _COLUMNS * _ROWS
"""How many histograms a page has at most."""

_WIDTH, _HEIGHT = 0.88, 0.62

Point = tuple[float, float]


@dataclass(frozen=True)
class Cell:
    """One histogram: `shares` of the values in equal cells between `low` and `high`."""

    name: str
    low: float
    high: float
    shares: tuple[float, ...]


def sheet(cells: Sequence[Cell], *, title: str) -> bytes:
    """A PNG of up to `PER_PAGE` histograms, in reading order, each as high as its highest cell.

    Under each its name and range; a line marks 0.
    """
    from matplotlib.collections import LineCollection, PolyCollection

    rows = max(1, -(-len(cells) // _COLUMNS))
    height = 0.4 + 0.85 * rows
    with drawing_board((12.8, height), layout=None) as figure:
        axes = figure.add_axes((0, 0, 1, 1 - 0.4 / height))
        axes.set_axis_off()
        axes.set_xlim(0, _COLUMNS)
        axes.set_ylim(rows, 0)
        placed = [(cell, place % _COLUMNS, place // _COLUMNS) for place, cell in enumerate(cells)]
        axes.add_collection(PolyCollection([_steps(*one) for one in placed], color="C0", linewidths=0))
        lines = [line for one in placed for line in _lines(*one)]
        axes.add_collection(LineCollection(lines, colors="0.4", linewidths=0.7))
        for one in placed:
            _label(axes, *one)
        axes.set_title(title, fontsize=11, loc="left", x=0.005, parse_math=False)
        return encoded_figure(figure)


def _corner(column: int, row: int) -> Point:
    """The lower left one."""
    return column + (1 - _WIDTH) / 2, row + 0.05 + _HEIGHT


def _steps(cell: Cell, column: int, row: int) -> list[Point]:
    """The outline of the histogram."""
    left, foot = _corner(column, row)
    step, most = _WIDTH / len(cell.shares), max(cell.shares) or 1.0
    tops = [
        (left + step * (at + side), foot - _HEIGHT * share / most)
        for at, share in enumerate(cell.shares)
        for side in (0, 1)
    ]
    return [(left, foot), *tops, (left + _WIDTH, foot)]


def _lines(cell: Cell, column: int, row: int) -> list[list[Point]]:
    """The axis, and the mark of 0 on it."""
    left, foot = _corner(column, row)
    zero = left + _WIDTH * -cell.low / (cell.high - cell.low)
    return [[(left, foot), (left + _WIDTH, foot)], [(zero, foot), (zero, foot + 0.04)]]


def _label(axes: Any, cell: Cell, column: int, row: int) -> None:
    left, foot = _corner(column, row)
    for x, words, side in (
        (left, f"{cell.low:.3g}", "left"),
        (left + _WIDTH / 2, shortened_name(cell.name), "center"),
        (left + _WIDTH, f"{cell.high:.3g}", "right"),
    ):
        axes.text(x, foot + 0.05, words, ha=side, va="top", fontsize=6.5, parse_math=False)
