"""Concentration figures against cases worked out by hand, and scipy where it has the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hookscope.concentration import entropy_rank, gini, participation_ratio, top_share

# energies: participation ratio, entropy rank, Gini, share of the greatest
HAND = {
    "uniform": ([1] * 8, 8, 8, 0, 1 / 8),
    "one-hot": ([0, 0, 0, 5, 0, 0, 0, 0], 1, 1, 0.875, 1),
    "half": ([1, 0] * 4, 4, 4, 0.5, 1 / 4),
    "ramp": (range(1, 9), 36**2 / 204, 6.936504, 7 / 24, 8 / 36),
    "one-channel": ([3], 1, 1, 0, 1),
    "two": ([3, 1], 1.6, math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4)), 0.25, 0.75),
}
ALL = {
    "participation_ratio": participation_ratio,
    "entropy_rank": entropy_rank,
    "gini": gini,
    "top_share": lambda energies: top_share(energies, 1),
}
UNDEFINED = {
    "zeros": [0.0, 0.0],
    "empty": [],
    "nan": [1.0, math.nan],
    "inf": [1.0, math.inf],
    "negative": [1.0, -1.0],
}


@pytest.mark.parametrize("case", HAND.values(), ids=HAND)
def test_figures_are_those_worked_out_by_hand(case):
    energies, *expected = case
    found = [figure(list(energies)) for figure in ALL.values()]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("figure", ALL.values(), ids=ALL)
@pytest.mark.parametrize("energies", UNDEFINED.values(), ids=UNDEFINED)
def test_where_nothing_is_shared_out_there_is_no_figure(figure, energies):
    assert figure(energies) is None


@pytest.mark.parametrize("figure", ALL.values(), ids=ALL)
@pytest.mark.parametrize("scale", [1e-300, 1e-12, 1e300], ids="{:g}".format)
def test_no_scale_counts(figure, scale):
    energies = np.random.default_rng(0).uniform(size=33)
    assert figure(energies * scale) == pytest.approx(figure(energies), rel=1e-12)


@pytest.mark.parametrize("figure", ALL.values(), ids=ALL)
def test_no_order_counts(figure):
    energies = np.random.default_rng(1).exponential(size=64)
    assert figure(energies[::-1]) == pytest.approx(figure(energies), rel=1e-12)


def test_gini_is_half_the_mean_difference_over_the_mean():
    energies = np.random.default_rng(2).exponential(size=50)
    differences = np.abs(energies[:, None] - energies).mean()
    assert gini(energies) == pytest.approx(differences / (2 * energies.mean()), rel=1e-12)


def test_entropy_rank_is_exp_of_scipys_entropy():
    stats = pytest.importorskip("scipy.stats")
    energies = np.random.default_rng(3).exponential(size=50)
    energies[:7] = 0
    assert entropy_rank(energies) == pytest.approx(math.exp(stats.entropy(energies)), rel=1e-12)


@pytest.mark.parametrize(("k", "share"), [(1, 0.5), (2, 0.8), (3, 1.0), (9, 1.0)])
def test_top_share_is_of_the_greatest(k, share):
    assert top_share([2, 5, 3], k) == pytest.approx(share)
