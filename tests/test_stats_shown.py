"""How a report of distributions is shown: document, tables, lines and plots, on reports made by hand."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from hookscope.checks.stats import default_settings
from hookscope.layers import Site, Status
from hookscope.render import histograms, plot
from hookscope.spectrum import Spectrum
from hookscope.statsreport import ChannelStats, Distribution, StatsReport, StatsRow
from hookscope.streaming import EDGES, Histogram, binned
from hookscope.tasks import statsplots
from hookscope.tasks.statsdocument import QUANTITIES, document
from hookscope.tasks.statstables import lines, summary, table

SETTINGS = default_settings()


def distribution(values, *, bounded=None):
    """Of values (N, C), by the definitions."""
    values = np.asarray(values, dtype=np.float64)
    channels = ChannelStats(
        axis=1,
        count=np.full(values.shape[1], len(values)),
        mean=values.mean(0),
        std=values.std(0),
        maximum=values.max(0),
        minimum=values.min(0),
        energy=np.square(values).mean(0),
        alive=(values > 0).sum(0),
        saturated=None if bounded is None else (values >= bounded).sum(0),
    )
    return Distribution(
        count=values.size,
        non_finite=0,
        zeros=int((values == 0).sum()),
        mean=float(values.mean()),
        std=float(values.std()),
        minimum=float(values.min()),
        maximum=float(values.max()),
        histogram=Histogram(binned(values.astype(np.float32).ravel()), complete=False),
        channels=channels,
    )


def output(name, values, depth, *, kind="", type="Linear", **more):
    return StatsRow(
        Site(name), "output", type, Status.OK, depth, (1, 2), "NC", kind, None, distribution(values, **more)
    )


def report(*rows, pictures=100):
    return StatsReport(pictures, 1, rows)


NORMAL = np.random.default_rng(0).standard_normal((1000, 4))
RECTIFIED = np.maximum(NORMAL, 0) * [1, 1, 0, 1]


@pytest.fixture
def small():
    """A norm, the ReLU that receives its output, and a layer that is never called."""
    norm = output("norm", NORMAL, 0, kind="norm", type="BatchNorm1d")
    received = StatsRow(
        Site("relu", 0, "0"), "input", "ReLU", Status.OK, 1, (1, 4), "NC", "relu",
        (norm.site, "output"), norm.distribution,
    )  # fmt: skip
    relu = output("relu", RECTIFIED, 1, kind="relu", type="ReLU")
    return report(norm, received, relu, StatsRow(Site("spare"), "output", "Linear", Status.NOT_CALLED))


def fewer(found):
    return StatsReport(99, 1, found.rows)


class TestDocument:
    def test_is_plain_json_and_has_each_figure_once(self, small):
        found = document(small, SETTINGS, "random weights")
        assert json.loads(json.dumps(found)) == found
        norm, received, relu, spare = found["places"]
        assert [place["place"] for place in found["places"]] == ["norm", "relu:0<", "relu", "spare"]
        assert received["same_as"] == "norm"
        assert {"mean", "channels", "dead"} & set(received) == set()
        assert (spare["status"], "count" in spare) == ("not-called", False)
        assert (norm["same_as"], relu["dead"], found["note"]) == (None, [2], "random weights")

    def test_an_input_that_is_an_input_is_marked_as_one(self, small):
        first = StatsRow(
            Site("a", 0, "0"), "input", "Linear", Status.OK, 0, (1, 4), "NC", "", None, distribution(NORMAL)
        )
        again = dataclasses.replace(first, site=Site("b", 0, "0"), depth=1, same_as=(first.site, "input"))
        assert document(report(first, again), SETTINGS)["places"][1]["same_as"] == "a:0<"

    def test_the_histogram_and_its_edges_give_back_the_counts(self, small):
        found = document(small, SETTINGS)
        kept = found["places"][0]["histogram"]
        counts = np.zeros(len(found["edges"]) + 1, dtype=int)
        counts[kept["first_bin"] :][: len(kept["counts"])] = kept["counts"]
        values = NORMAL.astype(np.float32).ravel()
        edges = np.array([-np.inf, *found["edges"], np.inf])
        assert counts.tolist() == np.histogram(values, edges)[0].tolist()

    def test_every_figure_that_needs_it_is_explained(self, small):
        place = document(small, SETTINGS)["places"][2]
        said = {*place, *place["concentration"]}
        assert {name for name in QUANTITIES if name not in said} == {
            "constant", "saturated", "not_enough_data", "effective_rank"
        }  # fmt: skip

    def test_units_are_named_by_the_limits_that_hold(self):
        one = output("act", np.minimum(NORMAL + np.array([0, 9, 0, 0]), 1), 0, kind="tanh", bounded=0.97)
        assert document(report(one), SETTINGS)["places"][0]["saturated"] == [1]
        strict = SETTINGS.over(limits={"saturated": 0.1})
        assert document(report(one), strict)["places"][0]["saturated"] == [0, 1, 2, 3]
        assert "dead" not in document(report(one), SETTINGS)["places"][0]

    def test_before_there_is_data_enough_it_says_so(self, small):
        relu = document(fewer(small), SETTINGS)["places"][2]
        assert "dead" not in relu
        assert relu["not_enough_data"] == "not enough data: 99 of 100 pictures"
        assert relu["channels"]["alive"][2] == 0

    def test_without_channels_and_histogram(self):
        row = StatsRow(
            Site("a"),
            "output",
            "Odd",
            Status.OK,
            0,
            (1, 2),
            "",
            "",
            None,
            Distribution(4, 0, 0, 1.0, 0.0, 1, 1),
        )
        found = document(report(row), SETTINGS)
        (place,) = found["places"]
        assert (found["edges"], place["channels"], place["concentration"]) == ([], None, None)
        assert not {"quantiles", "histogram", "constant"} & set(place)

    def test_of_nothing_finite(self):
        row = StatsRow(
            Site("a"), "output", "Linear", Status.OK, 0, (1, 2), "NC", "", None,
            Distribution(4, 4, 0, histogram=Histogram(complete=False)),
        )  # fmt: skip
        (place,) = document(report(row), SETTINGS)["places"]
        assert place["histogram"]["counts"] == []
        assert math.isnan(place["mean"])
        assert statsplots.documents(report(row)).keys() == {"stats.png"}


class TestTables:
    def test_a_row_for_every_place_and_an_empty_cell_for_what_is_not_known(self, small):
        found = table(small, SETTINGS)
        rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
        assert [row["layer"] for row in rows] == ["norm", "relu", "relu", "spare"]
        assert [row["same_as"] for row in rows] == [None, "norm", None, None]
        assert [row["dead"] for row in rows] == [None, None, 1, None]
        assert rows[0]["mean"] == pytest.approx(NORMAL.mean())
        assert rows[2]["zero_share"] == (RECTIFIED == 0).mean()
        assert rows[2]["q25"] == 0
        energy = np.square(RECTIFIED).mean(0)
        assert rows[2]["participation_ratio"] == pytest.approx(energy.sum() ** 2 / np.square(energy).sum())

    def test_people_see_each_tensor_once_and_the_units_that_do_nothing(self, small):
        totals, idle, tensors = summary(small, SETTINGS, "random weights")
        assert dict(totals.rows)["dead units"] == 1
        assert totals.notes[0] == "the model has random weights"
        assert idle.rows == (("relu", "dead", 1, 4, "2"),)
        assert [row[1] for row in tensors.rows] == ["norm", "relu", "spare"]

    def test_people_hear_why_no_unit_is_named(self, small):
        totals, tensors = summary(fewer(small), SETTINGS)
        said = dict(totals.rows)
        assert said["dead, constant or saturated units"] == "not enough data: 99 of 100 pictures"
        assert "dead units" not in said
        assert tensors.title == "Tensors by depth"

    def test_the_shell_is_told_in_three_lines(self, small):
        assert lines(small, SETTINGS) == (
            "2 tensors at 3 places, over 100 pictures",
            "units: 1 dead, 0 constant, 0 saturated",
            "1 layer without a tensor",
        )
        assert lines(fewer(small), SETTINGS)[1] == (
            "units: not enough data: 99 of 100 pictures, so none is called dead, constant or saturated"
        )

    def test_the_spectrum_has_its_columns(self):
        row = output("a", NORMAL, 0)
        own = Spectrum(4, 1000, effective_rank=3.9, stable_rank=3.5, mean_abs_correlation=0.02)
        row = dataclasses.replace(row, spectrum=own)
        found = table(report(row), SETTINGS)
        cells = dict(zip(found.columns, found.rows[0], strict=True))
        assert (cells["effective_rank"], cells["stable_rank"], cells["mean_abs_correlation"]) == (
            3.9,
            3.5,
            0.02,
        )


@pytest.fixture
def figures(monkeypatch):
    """Figures instead of their PNG."""
    for module in (plot, histograms):
        monkeypatch.setattr(module, "encoded_figure", lambda figure: figure)


@pytest.mark.usefixtures("figures")
class TestPlots:
    def test_normalised_and_rectified_outputs_are_lines_of_their_own(self, small):
        found = statsplots.documents(small)["stats.png"]
        mean, deviation, zeros, used = found.axes
        assert [axes.get_ylabel() for axes in found.axes] == [
            "mean", "deviation", "share of zeros", "participation ratio / channels",
        ]  # fmt: skip
        assert [line.get_label() for line in mean.get_lines()] == ["after normalisation", "after ReLU"]
        assert mean.get_lines()[1].get_ydata() == [pytest.approx(RECTIFIED.mean())]
        assert zeros.get_lines()[1].get_ydata() == [(RECTIFIED == 0).mean()]
        assert 0.6 < used.get_lines()[1].get_ydata()[0] <= 0.75
        assert (mean.get_yscale(), deviation.get_yscale()) == ("linear", "log")

    def test_the_histogram_is_that_of_the_values(self, small):
        found = statsplots.documents(small)["stats-histograms.png"]
        texts = [text.get_text() for text in found.axes[0].texts]
        assert texts[1::3] == ["norm", "relu"]
        assert -3.5 < float(texts[0]) < -2.5
        assert 2.5 < float(texts[2]) < 3.5

    def test_every_tensor_has_a_place_on_one_page_or_the_next(self):
        rows = [output(f"layer.{number}", NORMAL[:9], number) for number in range(histograms.PER_PAGE + 1)]
        made = statsplots.documents(report(*rows))
        assert list(made) == ["stats.png", "stats-histograms-1.png", "stats-histograms-2.png"]
        second = made["stats-histograms-2.png"].axes[0]
        assert [text.get_text() for text in second.texts][1::3] == [f"layer.{histograms.PER_PAGE}"]
        assert second.get_title(loc="left").endswith("page 2 of 2")

    def test_no_text_is_a_formula_or_shows_a_backslash(self, small):
        odd = output("a$b$_{", NORMAL, 0)
        for found in statsplots.documents(report(odd, *small.rows), "weights $x^{").values():
            texts = [text for text in found.findobj(Text) if "$" in text.get_text()]
            assert len(texts) >= 2
            assert not any(text.get_parse_math() or "\\" in text.get_text() for text in texts)

    def test_nothing_measured_draws_nothing(self):
        assert statsplots.documents(report()) == {}


def test_shares_are_numpys_of_the_same_values_within_the_bins(monkeypatch):
    seen = []
    monkeypatch.setattr(statsplots, "sheet", lambda cells, title: seen.extend(cells) or b"")
    values = np.random.default_rng(1).standard_normal((20_000, 1)) + 3
    statsplots.documents(report(output("a", values, 0)))
    (cell,) = seen
    counts, _ = np.histogram(values, len(cell.shares), (cell.low, cell.high))
    assert cell.low == 0  # always on the axis
    # A bin of the fixed edges is wider than a cell here, so they agree when four cells are taken together.
    ours, true = (np.add.reduceat(one, range(0, 80, 4)) for one in (np.array(cell.shares), counts / 20_000))
    assert ours == pytest.approx(true, abs=0.012)
    assert sum(cell.shares) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    "values",
    [[0.0], [5.0], [-5.0], [1e30], [0.0, 0.0, 7.0], [float(EDGES[0]), float(EDGES[-1])]],
    ids=["zero", "one", "negative", "beyond", "mostly-zero", "ends"],
)
def test_any_values_give_a_page(values):
    png = statsplots.documents(report(output("a", np.array(values)[:, None], 0)))["stats-histograms.png"]
    assert Image.open(io.BytesIO(png)).size == (1280, 125)


def test_the_same_report_gives_the_same_bytes(small):
    assert statsplots.documents(small) == statsplots.documents(small)
