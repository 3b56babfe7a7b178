"""Plots by depth: one value per layer, in the order the model runs them.

The only code that uses matplotlib: its object interface, imported inside the functions. No window, no state.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MOST_TICKS = 60
_MOST_LETTERS = 30


@dataclass(frozen=True)
class Series:
    """One line of the plot: a value for each layer, in execution order."""

    name: str
    layers: tuple[str, ...]
    values: tuple[float, ...]


def depth(series: Sequence[Series], *, title: str, ylabel: str, log: bool = True) -> bytes:
    """A PNG with layers along x and values along y; the same input gives the same bytes.

    On a log axis zeros are marked at its foot; with a negative or no positive value it is linear. What is
    not finite is a cross at its top. A layer's place is that of its first mention in the series.
    """
    # The user's own matplotlibrc must not change the picture, nor a letter that the font lacks end the run.
    import matplotlib
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = list(dict.fromkeys(layer for line in series for layer in line.layers))
    values = [value for line in series for value in line.values]
    log = log and not any(value < 0 for value in values) and any(0 < value < math.inf for value in values)
    with warnings.catch_warnings(), matplotlib.rc_context(), style.context("default"):
        warnings.simplefilter("ignore")
        figure = Figure(
            figsize=(min(max(6.4, 2 + 0.2 * len(layers)), 16), 4.8), dpi=100, layout="constrained"
        )
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for index, line in enumerate(series):
            _draw_line(axes, line, layers, f"C{index % 10}", log)
        _dress(axes, layers, title, ylabel, log)
        return _encoded(figure)


def _draw_line(axes: Any, line: Series, layers: list[str], colour: str, log: bool) -> None:
    place = {layer: index for index, layer in enumerate(layers)}
    points = [(place[layer], float(value)) for layer, value in zip(line.layers, line.values, strict=True)]
    drawable = [math.isfinite(y) and (y > 0 or not log) for _, y in points]
    ys = [y if good else math.nan for (_, y), good in zip(points, drawable, strict=True)]
    axes.plot(
        [x for x, _ in points],
        ys,
        color=colour,
        marker="o",
        markersize=3,
        linewidth=1.2,
        label=_plain(line.name),
    )
    zeros = [x for x, y in points if log and y == 0]
    broken = [x for x, y in points if not math.isfinite(y)]
    _mark(axes, zeros, 0.015, "v", colour, f"{line.name}: zero")
    _mark(axes, broken, 0.985, "X", "crimson", f"{line.name}: not finite")


def _mark(axes: Any, xs: list[int], height: float, marker: str, colour: str, label: str) -> None:
    """Marks at a height given as a share of the axis, whatever its scale."""
    if xs:
        ys = [height] * len(xs)
        where = axes.get_xaxis_transform()
        axes.plot(
            xs, ys, marker, color=colour, markersize=7, transform=where, label=_plain(label), clip_on=False
        )


def _dress(axes: Any, layers: list[str], title: str, ylabel: str, log: bool) -> None:
    if log:
        axes.set_yscale("log")
    step = max(1, math.ceil(len(layers) / _MOST_TICKS))
    names = [_plain(_shortened(name)) for name in layers[::step]]
    axes.set_xticks(range(0, len(layers), step), names, rotation=90, fontsize=7, parse_math=False)
    axes.set_title(_plain(title), fontsize=11, loc="left", parse_math=False)
    axes.set_ylabel(_plain(ylabel))
    axes.margins(x=0.02)
    axes.grid(visible=True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_lines()) > 1:
        axes.legend(fontsize=8, frameon=False)


def _plain(words: str) -> str:
    return words.replace("$", r"\$")  # two dollar signs would start a formula


def _shortened(name: str) -> str:
    half = _MOST_LETTERS // 2
    return name if len(name) <= _MOST_LETTERS else f"{name[:half]}…{name[-half:]}"


def _encoded(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
