"""Exact sums, moments and histograms against `math.fsum`, fractions and NumPy, in any order."""

import math
from fractions import Fraction

import numpy as np
import pytest

from hookscope.streaming import (
    BINS_PER_OCTAVE,
    EDGES,
    ExactSum,
    Histogram,
    Moments,
    Partial,
    binned,
    two_product,
)


def parts(rows, sizes):
    """Partial results of consecutive rows, made by NumPy in float64."""
    found, start = [], 0
    for size in sizes:
        some = rows[start : start + size]
        start += size
        mean = some.mean(axis=0)
        found.append(
            Partial(
                count=np.full(rows.shape[1], size),
                mean=mean,
                scatter=((some - mean) ** 2).sum(axis=0),
                minimum=some.min(axis=0),
                maximum=some.max(axis=0),
                alive=(some > 0).sum(axis=0),
                zeros=int((some == 0).sum()),
                non_finite=0,
            )
        )
    return found


def moments(found, channels):
    made = Moments(channels)
    for part in found:
        made.add(part)
    return made


def read(made):
    return [
        made.means(),
        made.deviations(),
        made.energies(),
        made.count,
        made.alive,
        made.minimum,
        made.maximum,
    ]


class TestExactSum:
    def test_is_fsum_of_terms_of_all_sizes(self):
        rng = np.random.default_rng(0)
        terms = rng.standard_normal((300, 40)) * 10.0 ** rng.integers(-60, 60, (300, 40))
        made = ExactSum(40)
        for term in terms:
            made.add(term)
        assert made.read().tolist() == [math.fsum(column) for column in terms.T]

    def test_what_cancels_leaves_what_is_small(self):
        made = ExactSum(1)
        for term in (1e30, 1.0, -1e30):
            made.add(np.array([term]))
        assert made.read().tolist() == [1.0]

    def test_products_are_exact(self):
        made = ExactSum(1)
        third = np.array([1 / 3])
        made.add_product(third, third)
        assert Fraction(made.integers()[0], 1 << 320) == Fraction(1 / 3) ** 2

    def test_a_product_and_its_error_are_the_product(self):
        rng = np.random.default_rng(1)
        one, other = rng.standard_normal(100), rng.standard_normal(100) * 1e9
        product, error = two_product(one, other)
        for a, b, p, e in zip(one, other, product, error, strict=True):
            assert Fraction(float(p)) + Fraction(float(e)) == Fraction(float(a)) * Fraction(float(b))

    def test_a_sum_out_of_range_is_not_a_number(self):
        made = ExactSum(3)
        made.add(np.array([1e300, 1.0, np.inf]))
        made.add(np.array([1.0, 1.0, 1.0]))
        assert np.isnan(made.read()).tolist() == [True, False, True]

    def test_goes_through_a_state(self):
        made = ExactSum(2)
        made.add(np.array([-0.1, 1e20]))
        again = ExactSum.from_state(made.state())
        again.add(np.array([0.1, 1.0]))
        assert again.read().tolist() == [0.0, 1e20 + 1]

    def test_collapses_to_the_sum_of_all(self):
        made = ExactSum(3)
        made.add(np.array([1e25, -3.5, -1e25]))
        assert made.collapsed().read().tolist() == [-3.5]


class TestMoments:
    @pytest.mark.parametrize("mean", [0.0, 1e4, 1e8])
    def test_are_those_of_all_rows(self, mean):
        rows = np.random.default_rng(2).standard_normal((1000, 5)) + mean
        made = moments(parts(rows, [1, 99, 400, 500]), 5)
        assert np.allclose(made.means(), rows.mean(axis=0), rtol=1e-14, atol=1e-14)
        # NumPy's own figure loses digits where the mean is large.
        exact = [math.sqrt(spread(column)) for column in rows.T]
        assert np.allclose(made.deviations(), exact, rtol=1e-9 if mean > 1e5 else 1e-13)
        assert made.count.tolist() == [1000] * 5
        assert made.alive.tolist() == (rows > 0).sum(axis=0).tolist()

    def test_do_not_depend_on_the_order_in_a_single_bit(self):
        rows = np.random.default_rng(3).standard_normal((1000, 4)) * [1, 1e-9, 1e9, 3]
        found = parts(rows, [10] * 100)
        expected = read(moments(found, 4))
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(100)
            shuffled = [found[at] for at in order]
            one, other = moments(shuffled[:37], 4), Moments.from_state(moments(shuffled[37:], 4).state())
            other.merge(one)
            assert all(np.array_equal(a, b) for a, b in zip(expected, read(other), strict=True))

    def test_the_whole_is_all_channels_together(self):
        rows = np.random.default_rng(4).standard_normal((100, 7)) * np.arange(7)
        mean, deviation, energy = moments(parts(rows, [50, 50]), 7).whole()
        assert mean == pytest.approx(rows.mean(), rel=1e-13)
        assert deviation == pytest.approx(rows.std(), rel=1e-13)
        assert energy == pytest.approx((rows**2).mean(), rel=1e-13)

    def test_equal_values_have_no_deviation(self):
        assert moments(parts(np.full((10, 1), 0.1), [3, 7]), 1).deviations().tolist() == [0.0]

    def test_of_nothing_are_not_numbers(self):
        made = Moments(2)
        assert np.isnan(made.means()).all()
        assert np.isnan(made.deviations()).all()
        assert math.isnan(made.whole()[0])


def spread(column):
    exact = [Fraction(float(value)) for value in column]
    mean = sum(exact) / len(exact)
    return float(sum((value - mean) ** 2 for value in exact) / len(exact))


class TestHistogram:
    def test_edges_are_symmetric_eight_to_an_octave(self):
        assert np.array_equal(EDGES, -EDGES[::-1])
        positive = EDGES[EDGES > 0]
        assert positive[::BINS_PER_OCTAVE].tolist() == [2.0**power for power in range(-32, 21)]
        assert np.allclose(np.diff(np.log2(positive)), 1 / 8, rtol=1e-5)

    def test_bins_are_those_of_numpy(self):
        rng = np.random.default_rng(5)
        values = rng.standard_normal(20000) * np.exp(rng.uniform(-40, 30, 20000))
        values = np.concatenate([values, EDGES, np.nextafter(EDGES, np.inf), [0.0, -0.0, 3e38, -3e38, 1e-45]])
        values = values.astype(np.float32)
        outer = np.concatenate([[-np.inf], EDGES, [np.inf]])
        assert binned(values).tolist() == np.histogram(values.astype(np.float64), outer)[0].tolist()

    @pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.75, 0.99])
    def test_a_quantile_is_within_its_error(self, share):
        values = np.random.default_rng(6).standard_normal(9999).astype(np.float32)
        found = Histogram(binned(values)).quantile(share)
        exact = np.quantile(values, share, method="inverted_cdf")
        assert abs(found / exact - 1) <= Histogram.value_error + 1e-6

    def test_zeros_are_zero(self):
        assert Histogram(binned(np.zeros(5, dtype=np.float32))).quantile(0.5) == 0

    def test_of_nothing_has_no_quantile(self):
        assert math.isnan(Histogram().quantile(0.5))
        assert Histogram(complete=False).rank_error == 1

    def test_the_rank_error_holds_as_often_as_it_says(self):
        # 5 % of samples may be off by more; of 400, more than 40 would be a wonder (p < 1e-5).
        rng, off = np.random.default_rng(7), 0
        for _ in range(400):
            sample = np.sort(rng.random(200))
            steps = np.arange(201) / 200
            worst = max(np.abs(steps[1:] - sample).max(), np.abs(steps[:-1] - sample).max())
            off += worst > Histogram(binned(sample.astype(np.float32)), complete=False).rank_error
        assert off <= 40
