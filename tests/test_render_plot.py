"""Plots by depth: no value is dropped in silence, no warning, the same bytes each time."""

from __future__ import annotations

import io

import matplotlib
import numpy as np
import pytest
from PIL import Image

from hookscope.render import plot

NAMES = tuple(f"features.{index}.conv.0" for index in range(8))


def drawn(values, names=NAMES, **options):
    line = plot.Series("weights", names[: len(values)], tuple(values))
    return plot.depth([line], **{"title": "t", "ylabel": "L2 norm", **options})


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def lines(monkeypatch, *values, **options):
    """What is on the axes: label -> (x, y), and whether y is logarithmic."""
    monkeypatch.setattr(plot, "encoded_figure", lambda figure: figure)
    (axes,) = drawn(values, **options).axes
    found = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    return found, axes.get_yscale() == "log"


@pytest.mark.parametrize(
    "values",
    [(1, 2, 3), (0, 0, 0), (0.0, 1e-30, 1e30), (float("nan"),) * 3, (float("inf"), 1, 2), (-1, 2, 3), ()],
    ids=["plain", "zeros", "wide", "nan", "inf", "negative", "empty"],
)
@pytest.mark.parametrize("log", [True, False], ids=["log", "linear"])
def test_any_values_give_a_picture_without_warnings(values, log):
    assert pixels(drawn(values, log=log)).shape[0] == 480


@pytest.mark.parametrize("log", [True, False], ids=["log", "linear"])
def test_not_finite_is_marked_at_the_top(monkeypatch, log):
    found, _ = lines(monkeypatch, 1, float("nan"), 2, float("inf"), log=log)
    assert found["weights: not finite"] == ([1, 3], [0.985, 0.985])
    assert found["weights"][1][::2] == [1, 2]


def test_zero_is_marked_at_the_foot_of_a_log_axis(monkeypatch):
    found, log = lines(monkeypatch, 1, 0, 2)
    assert log
    assert found["weights: zero"] == ([1], [0.015])
    assert np.isnan(found["weights"][1][1])


@pytest.mark.parametrize("values", [(1, 0, -2), (0, 0)], ids=["negative", "only-zeros"])
def test_linear_where_a_log_axis_would_hide_values(monkeypatch, values):
    found, log = lines(monkeypatch, *values)
    assert not log
    assert found == {"weights": (list(range(len(values))), list(values))}


def test_series_share_one_order_of_layers(monkeypatch):
    monkeypatch.setattr(plot, "encoded_figure", lambda figure: figure)
    series = [plot.Series("a", ("x", "y", "z"), (1, 2, 3)), plot.Series("b", ("z",), (4,))]
    (axes,) = plot.depth(series, title="", ylabel="").axes
    assert list(axes.get_lines()[1].get_xdata()) == [2]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["x", "y", "z"]
    assert axes.get_legend() is not None


def test_bytes_repeat_whatever_the_users_settings():
    first = drawn((1, 2, 3))
    with matplotlib.rc_context({"axes.facecolor": "black", "savefig.dpi": 30}):
        assert drawn((1, 2, 3)) == first


def test_odd_names_are_plain_text():
    assert drawn((1, 2), ("a$b$_{", "漢" * 40), title="$x^{", ylabel="$y_{")


def test_many_layers_stay_a_reasonable_width():
    names = tuple(f"layer.{index}" for index in range(500))
    assert pixels(drawn(range(1, 501), names)).shape[1] == 1600


def shown(monkeypatch, panels, **options):
    """The axes of stacked panels."""
    monkeypatch.setattr(plot, "encoded_figure", lambda figure: figure)
    return plot.stacked(panels, title="t", **options).axes


def test_panels_share_the_order_of_the_layers(monkeypatch):
    panels = [
        plot.Panel("above", [plot.Series("a", ("x", "z"), (1, 2)), plot.Series("b", ("y",), (3,))]),
        plot.Panel("below", [plot.Series("c", ("y", "w"), (1, 2))]),
    ]
    above, below = shown(monkeypatch, panels, order=["x", "unused", "y", "z"])
    assert [tick.get_text() for tick in below.get_xticklabels()] == ["x", "y", "z", "w"]
    assert [list(line.get_xdata()) for line in above.get_lines()] == [[0, 2], [1]]
    assert [list(line.get_xdata()) for line in below.get_lines()] == [[1, 3]]
    assert (above.get_ylabel(), below.get_ylabel(), above.get_title(loc="left")) == ("above", "below", "t")


def test_ranges_are_bars_without_a_line(monkeypatch):
    spans = ((1.0, 4.0), (0.0, 2.0), (float("nan"), 3.0))
    line = plot.Series("mean", ("x", "y", "z"), (2.0, 1.0, float("nan")), spans)
    (axes,) = shown(monkeypatch, [plot.Panel("norm", [line])])
    assert axes.get_lines()[0].get_linestyle() == "None"
    (bars,) = axes.collections
    drawn = [[tuple(point) for point in segment] for segment in bars.get_segments()]
    # On a log axis the bar from zero starts at the least value that is drawn; the one without a minimum is not.
    assert drawn == [[(0, 1), (0, 4)], [(1, 1), (1, 2)]]
    assert [line.get_label() for line in axes.get_lines()][1:] == ["mean: not finite"]


def test_points_that_are_not_joined(monkeypatch):
    (axes,) = shown(monkeypatch, [plot.Panel("n", [plot.Series("a", ("x", "y"), (1, 2), joined=False)])])
    assert axes.get_lines()[0].get_linestyle() == "None"


def test_a_panel_without_series_is_a_picture():
    assert pixels(plot.stacked([plot.Panel("n", [])], title="t")).shape[0] == 480
