"""Plots by depth: one value per layer, in the order the model runs them.

With `histograms` the only code that uses matplotlib: its object interface, imported inside the functions. No window,
no state.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

_MOST_TICKS = 60
_MOST_LETTERS = 30


@dataclass(frozen=True)
class Series:
    """One line of the plot: a value for each layer, in execution order.

    `ranges`: the least and the most of what each value stands for, drawn as bars instead of a line. Not `joined`:
    points alone, of what is too unlike for a line.
    """

    name: str
    layers: tuple[str, ...]
    values: tuple[float, ...]
    ranges: tuple[tuple[float, float], ...] = ()
    joined: bool = True


@dataclass(frozen=True)
class Panel:
    """One pair of axes: what its values are, and the series in it; `log`: on a log axis, where that can be."""

    ylabel: str
    series: Sequence[Series]
    log: bool = True


def depth(series: Sequence[Series], *, title: str, ylabel: str, log: bool = True) -> bytes:
    """A PNG with layers along x and values along y; the same input gives the same bytes.

    On a log axis zeros are marked at its foot; with a negative or no positive value it is linear. What is
    not finite is a cross at its top. A layer's place is that of its first mention in the series.
    """
    return stacked([Panel(ylabel, series)], title=title, log=log)


def stacked(panels: Sequence[Panel], *, title: str, order: Sequence[str] = (), log: bool = True) -> bytes:
    """A PNG of panels one below the other, as of `depth`, which share the layers along x.

    `order`: layers in execution order, where the series, each of another kind of layer, do not tell.
    """
    layers = _in_order(panels, order)
    size = (min(max(6.4, 2 + 0.2 * len(layers)), 16), 4.8 + 3.0 * (len(panels) - 1))
    with drawing_board(size) as figure:
        rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(rows, panels, strict=True):
            _draw_panel(axes, panel, layers, log and panel.log)
        _name_layers(rows[-1], layers)
        rows[0].set_title(title, fontsize=11, loc="left", parse_math=False)
        return encoded_figure(figure)


@contextmanager
def drawing_board(size: tuple[float, float], *, layout: Any = "constrained") -> Iterator[Any]:
    """An empty figure of that size in inches, at 100 pixels an inch, in matplotlib's own style."""
    # The user's own matplotlibrc must not change the picture, nor a letter that the font lacks end the run.
    import matplotlib
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with warnings.catch_warnings(), matplotlib.rc_context(), style.context("default"):
        warnings.simplefilter("ignore")
        figure = Figure(figsize=size, dpi=100, layout=layout)
        FigureCanvasAgg(figure)
        yield figure


def encoded_figure(figure: Any) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def shortened_name(name: str) -> str:
    """A layer's name without its middle, where it is long."""
    half = _MOST_LETTERS // 2
    return name if len(name) <= _MOST_LETTERS else f"{name[:half]}…{name[-half:]}"


def _in_order(panels: Sequence[Panel], order: Sequence[str]) -> list[str]:
    """Every layer that a series has, once: those of `order` first."""
    mentioned = dict.fromkeys(layer for panel in panels for line in panel.series for layer in line.layers)
    return list(dict.fromkeys([*(layer for layer in order if layer in mentioned), *mentioned]))


def _draw_panel(axes: Any, panel: Panel, layers: list[str], log: bool) -> None:
    values = [value for line in panel.series for value in (*line.values, *chain(*line.ranges))]
    log = log and not any(value < 0 for value in values) and any(0 < value < math.inf for value in values)
    for index, line in enumerate(panel.series):
        _draw_line(axes, line, layers, f"C{index % 10}", log)
    _dress(axes, panel.ylabel, log)


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
        linestyle="solid" if line.joined and not line.ranges else "none",
        linewidth=1.2,
        label=_plain(line.name),
    )
    _draw_ranges(axes, [x for x, _ in points], line, colour, log)
    zeros = [x for x, y in points if log and y == 0]
    broken = [x for x, y in points if not math.isfinite(y)]
    _mark(axes, zeros, 0.015, "v", colour, f"{line.name}: zero")
    _mark(axes, broken, 0.985, "X", "crimson", f"{line.name}: not finite")


def _draw_ranges(axes: Any, xs: list[int], line: Series, colour: str, log: bool) -> None:
    """A bar from the least to the most; on a log axis from its foot where the least is zero."""
    spans = [(x, low, high) for x, (low, high) in zip(xs, line.ranges, strict=False)]
    drawn = [(x, low, high) for x, low, high in spans if math.isfinite(low) and math.isfinite(high)]
    least = min((value for _, *span in drawn for value in span if value > 0), default=0.0)
    drawn = [(x, max(low, least) if log else low, high) for x, low, high in drawn if high > 0 or not log]
    if drawn:
        places, lows, highs = zip(*drawn, strict=True)
        label = "minimum to maximum"
        axes.vlines(places, lows, highs, color=colour, alpha=0.35, linewidth=4, label=label)


def _mark(axes: Any, xs: list[int], height: float, marker: str, colour: str, label: str) -> None:
    """Marks at a height given as a share of the axis, whatever its scale."""
    if xs:
        ys = [height] * len(xs)
        where = axes.get_xaxis_transform()
        axes.plot(
            xs,
            ys,
            marker,
            color=colour,
            markersize=7,
            transform=where,
            label=_plain(label),
            clip_on=False,
        )


def _dress(axes: Any, ylabel: str, log: bool) -> None:
    if log:
        axes.set_yscale("log")
    axes.set_ylabel(ylabel, parse_math=False)
    axes.margins(x=0.02)
    axes.grid(visible=True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(fontsize=8, frameon=False)


def _name_layers(axes: Any, layers: list[str]) -> None:
    step = max(1, math.ceil(len(layers) / _MOST_TICKS))
    names = [shortened_name(name) for name in layers[::step]]
    axes.set_xticks(range(0, len(layers), step), names, rotation=90, fontsize=7, parse_math=False)


def _plain(words: str) -> str:
    # In a legend, which takes no parse_math, two dollar signs would start a formula.
    return words.replace("$", r"\$")
