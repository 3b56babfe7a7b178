"""Exact sums, moments, histograms, samples and the reductions that feed them, against exact and float64 arithmetic."""

from __future__ import annotations

import math
import pickle
import statistics
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch

from hookscope import exactsum
from hookscope.exactsum import ExactSum, two_product
from hookscope.reductions import Reducer, is_measurable
from hookscope.sampling import Sampler
from hookscope.streaming import BINS_PER_OCTAVE, EDGES, Histogram, Moments, Partial, binned


def wild(size, count, seed=0, most=37):
    """Numbers of all magnitudes, most of which cancel."""
    random = np.random.default_rng(seed)
    half = random.standard_normal((count, size)) * 10.0 ** random.integers(-40, most, (count, size))
    return random.permutation(np.concatenate([half, -half * random.integers(0, 2, (count, size))]))


def sum_of(vectors):
    made = ExactSum(vectors.shape[1])
    for vector in vectors:
        made.add(vector)
    return made


class TestExactSum:
    def test_is_the_rounded_true_sum(self):
        values = wild(20, 200)
        assert sum_of(values).read().tolist() == [math.fsum(column) for column in values.T]

    def test_no_order_changes_a_bit(self):
        values = wild(5, 100)
        one = sum_of(values)
        for seed in range(5):
            other = sum_of(np.random.default_rng(seed).permutation(values))
            assert pickle.dumps(other.state()) == pickle.dumps(one.state())

    @pytest.mark.parametrize("cuts", [(), (1,), (50, 51), (7, 70, 170)], ids=str)
    def test_parts_merge_to_the_same(self, cuts):
        values = wild(5, 100)
        total = ExactSum(5)
        for part in reversed(np.split(values, cuts)):
            total.merge(ExactSum.from_state(pickle.loads(pickle.dumps(sum_of(part).state()))))
        assert total.integers() == sum_of(values).integers()

    def test_carries_in_between_change_nothing(self, monkeypatch):
        values = wild(5, 100)
        expected = sum_of(values).integers()
        monkeypatch.setattr(exactsum, "_MOST_ADDED", 3)
        assert sum_of(values).integers() == expected

    def test_products_are_exact(self):
        random = np.random.default_rng(0)
        a, b = random.standard_normal((2, 50)) * 1e3
        made = ExactSum(50)
        made.add_product(a, b)
        exact = [int(Fraction(x) * Fraction(y) * 2**exactsum.UNIT) for x, y in zip(a, b, strict=True)]
        assert made.integers() == exact
        product, error = two_product(a, b)
        assert (error != 0).any()
        for x, y, high, low in zip(a, b, product, error, strict=True):
            assert Fraction(x) * Fraction(y) == Fraction(high) + Fraction(low)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200], ids=str)
    def test_what_it_cannot_hold_spoils_its_own_entry_only(self, value):
        made = ExactSum(2)
        made.add(np.array([value, 1.0]))
        made.add(np.array([5.0, 2.0]))
        assert math.isnan(made.read()[0])
        assert made.read()[1] == 3.0

    def test_what_is_below_its_range_is_dropped_and_the_rest_stays(self):
        made = ExactSum(1)
        for value in (1e-300, 1.0, 5e-324):
            made.add(np.array([value]))
        assert made.read().tolist() == [1.0]

    def test_the_largest_numbers_may_add_up(self):
        made = ExactSum(1)
        for _ in range(1000):
            made.add(np.array([-(2.0**300)]))
        assert made.read().tolist() == [-1000 * 2.0**300]

    def test_all_entries_as_one(self):
        values = wild(20, 50)
        assert sum_of(values).collapsed().read().tolist() == [math.fsum(values.ravel())]


def partial(values, threshold=0.0):
    """What a batch, (n, C) float64 without non-finite entries, comes to."""
    mean = values.mean(axis=0)
    return Partial(
        np.full(values.shape[1], len(values)),
        mean,
        np.square(values - mean).sum(axis=0),
        values.min(axis=0),
        values.max(axis=0),
        (values > threshold).sum(axis=0),
        int((values == 0).sum()),
        0,
    )


def moments_of(batches):
    made = Moments(batches[0].shape[1])
    for batch in batches:
        made.add(partial(batch))
    return made


def batches_like(scale, shift, sizes=(3, 40, 1, 17)):
    random = np.random.default_rng(1)
    return [random.standard_normal((size, 4)) * scale + shift for size in sizes]


class TestMoments:
    @pytest.mark.parametrize(("scale", "shift"), [(1, 0), (1, 1e8), (1e-3, 1e4), (1e15, -1e15)], ids=str)
    def test_agree_with_all_values_at_once(self, scale, shift):
        batches = batches_like(scale, shift)
        whole, made = np.concatenate(batches), moments_of(batches)
        assert made.means() == pytest.approx(whole.mean(axis=0), rel=1e-14, abs=1e-14 * scale)
        exact = [math.sqrt(statistics.pvariance(map(Fraction, column))) for column in whole.T]
        # A batch's own mean is a float64, off by 1e-16 of itself.
        assert made.deviations() == pytest.approx(exact, rel=1e-12 + 1e-16 * abs(shift) / scale)
        assert made.energies() == pytest.approx(np.square(whole).mean(axis=0), rel=1e-12)
        assert made.whole()[0] == pytest.approx(whole.mean(), rel=1e-13, abs=1e-14 * scale)
        assert made.whole()[1] == pytest.approx(whole.std(), rel=1e-7)
        assert made.minimum.tolist() == whole.min(axis=0).tolist()
        assert made.alive.tolist() == (whole > 0).sum(axis=0).tolist()

    def test_no_order_and_no_grouping_changes_a_bit(self):
        batches = batches_like(1, 1e6)
        seen = set()
        for order in permutations(range(4)):
            for cut in range(5):
                left, right = Moments(4), Moments(4)
                for at, number in enumerate(order):
                    (left if at < cut else right).add(partial(batches[number]))
                left.merge(Moments.from_state(pickle.loads(pickle.dumps(right.state()))))
                read = (left.means(), left.deviations(), left.energies(), left.whole(), left.count)
                seen.add(pickle.dumps([np.asarray(one).tobytes() for one in read]))
        assert len(seen) == 1

    def test_equal_values_have_no_deviation(self):
        made = moments_of([np.full((n, 2), 0.1) for n in (3, 7)])
        assert made.deviations().tolist() == [0, 0]
        assert made.whole()[1] == 0

    def test_nothing_has_no_mean(self):
        made = Moments(2)
        assert np.isnan([*made.means(), *made.deviations(), *made.energies(), *made.whole()]).all()

    def test_all_channels_as_one(self):
        batches = batches_like(1, 3)
        one = moments_of(batches).collapsed()
        flat = moments_of([batch.reshape(-1, 1) for batch in batches])
        assert one.means() == pytest.approx(flat.means(), rel=1e-14)
        assert one.deviations() == pytest.approx(flat.deviations(), rel=1e-12)
        assert (one.count, one.minimum, one.maximum, one.alive) == (
            flat.count, flat.minimum, flat.maximum, flat.alive,
        )  # fmt: skip


class TestHistogram:
    def test_edges_are_symmetric_and_exact_in_float32(self):
        assert (np.diff(EDGES) > 0).all()
        assert EDGES.tolist() == (-EDGES[::-1]).tolist()
        assert EDGES.tolist() == EDGES.astype(np.float32).tolist()
        assert {2.0**power for power in range(-32, 21)} <= set(EDGES)

    def test_bins_are_those_of_a_search(self):
        random = np.random.default_rng(0)
        sizes = np.exp(random.uniform(-30, 20, 50_000))
        below = np.nextafter(EDGES.astype(np.float32), np.float32(-np.inf))
        special = [0.0, -0.0, 1e-45, 3e38, -3e38, float(np.finfo(np.float32).max)]
        values = np.concatenate([EDGES, below, special, sizes, -sizes]).astype(np.float32)
        slow = np.searchsorted(EDGES, values.astype(np.float64), side="right")
        assert binned(values).tolist() == np.bincount(slow, minlength=len(EDGES) + 1).tolist()

    @pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99])
    def test_a_quantile_is_within_its_error(self, share):
        values = np.random.default_rng(0).standard_normal(20_001).astype(np.float32) * 3 + 1
        found = Histogram(binned(values)).quantile(share)
        true = float(np.quantile(values, share, method="inverted_cdf"))
        assert found == pytest.approx(true, rel=Histogram.value_error)
        assert Histogram.value_error == pytest.approx(2 ** (0.5 / BINS_PER_OCTAVE) - 1)

    def test_mostly_zeros(self):
        values = np.array([0.0] * 90 + [4.1] * 10, dtype=np.float32)
        found = Histogram(binned(values))
        assert [found.quantile(share) for share in (0, 0.5, 0.9)] == [0, 0, 0]
        assert found.quantile(0.91) == found.quantile(1) == pytest.approx(4.1, rel=Histogram.value_error)

    def test_beyond_the_edges_it_is_the_edge(self):
        found = Histogram(binned(np.array([-1e9, 1e9], dtype=np.float32)))
        assert (found.quantile(0.5), found.quantile(1)) == (EDGES[0], EDGES[-1])

    def test_nothing_has_no_quantile(self):
        found = Histogram()
        assert math.isnan(found.quantile(0.5))
        assert found.shares().sum() == 0

    def test_merging_adds_counts(self):
        values = np.random.default_rng(0).standard_normal(100).astype(np.float32)
        merged = Histogram(binned(values[:30])).merged(Histogram(binned(values[30:]), complete=False))
        assert merged.counts.tolist() == binned(values).tolist()
        assert not merged.complete
        assert merged.shares().sum() == pytest.approx(1)

    def test_the_error_of_a_rank(self):
        counts = np.zeros(len(EDGES) + 1, dtype=np.int64)
        counts[3] = 1000
        assert Histogram(counts).rank_error == 0
        assert Histogram(counts, complete=False).rank_error == pytest.approx(0.042947, abs=1e-6)
        assert Histogram(complete=False).rank_error == 1


def sampled(tensor, numbers=(), seed=0, most=100, name="a"):
    return Sampler(seed, most).sample(tensor, name, numbers or range(len(tensor)))


@pytest.fixture
def maps():
    return torch.randn(6, 5, 9, 7, generator=torch.Generator().manual_seed(0))


class TestSampler:
    def test_batches_and_their_order_change_nothing(self, maps):
        whole = sampled(maps)
        assert whole.sampled == 600
        for groups in ([[0], [1], [2], [3], [4], [5]], [[3, 4, 5], [0, 1, 2]], [[5, 0], [1, 4, 3, 2]]):
            merged = Histogram(complete=False)
            for group in groups:
                merged = merged.merged(sampled(maps[group], group))
            assert merged.counts.tolist() == whole.counts.tolist()

    def test_the_order_in_memory_changes_nothing(self, maps):
        counts = sampled(maps).counts.tolist()
        assert sampled(maps.to(memory_format=torch.channels_last)).counts.tolist() == counts
        turned = maps.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        assert not turned.is_contiguous()
        assert sampled(turned).counts.tolist() == counts

    def test_each_value_is_one_of_its_own_piece(self):
        ramp = torch.arange(2.0**9, 2.0**9 + 1000).repeat(3, 1)
        drawn = sampled(ramp, most=10)
        assert drawn.sampled == 30
        for piece in range(10):
            low, high = (
                Histogram(binned(np.float32([512 + 100 * at]))).quantile(1) for at in (piece, piece + 1)
            )
            assert drawn.quantile((piece + 0.5) / 10) >= low * (1 - Histogram.value_error)
            assert drawn.quantile((piece + 0.5) / 10) <= high * (1 + Histogram.value_error)

    @pytest.mark.parametrize("other", [{"seed": 1}, {"name": "b"}, {"numbers": range(1, 7)}], ids=str)
    def test_depends_on_the_seed_the_place_and_the_pictures(self, maps, other):
        assert sampled(maps, **other).counts.tolist() != sampled(maps).counts.tolist()

    def test_few_values_are_all_taken(self, maps):
        found = sampled(maps, most=315)
        assert found.complete
        assert found.counts.tolist() == binned(maps.numpy().ravel()).tolist()

    def test_is_as_near_the_truth_as_it_says(self):
        values = torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0))
        true = np.cumsum(binned(values.numpy().ravel())) / values.numel()
        far = []
        for seed in range(60):
            drawn = sampled(values, seed=seed, most=256)
            far.append(np.abs(np.cumsum(drawn.shares()) - true).max() / drawn.rank_error)
        assert np.mean(np.array(far) > 1) <= 0.05
        assert max(far) > 0.3  # the bound is one, not a mountain

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
    def test_other_types(self, maps, dtype):
        cast = maps.to(dtype)
        assert sampled(cast).counts.tolist() == sampled(cast.float()).counts.tolist()

    def test_integers_bools_and_what_no_float32_holds(self):
        assert sampled(torch.tensor([[3, -7, 0]])).counts.tolist() == binned(np.float32([3, -7, 0])).tolist()
        assert sampled(torch.tensor([[True, False]])).counts.tolist() == binned(np.float32([1, 0])).tolist()
        huge = torch.tensor([[1e300, -1e300, math.nan, math.inf]], dtype=torch.float64)
        counts = sampled(huge).counts
        assert (counts[0], counts[-1], counts.sum()) == (1, 1, 2)

    @pytest.mark.parametrize("shape", [(0, 3), (2, 0), (), (3,)], ids=str)
    def test_shapes_that_are_no_pictures(self, shape):
        assert sampled(torch.ones(shape), numbers=[0, 1]).sampled == math.prod(shape)


def truth(tensor, axis, threshold=0.0, bounds=None):
    """The same in float64, the slow and plain way."""
    values = tensor.double()
    values = values.reshape(1, -1) if axis is None else values.movedim(axis, 0).flatten(1)
    found = []
    for row in values.numpy():
        some = row[np.isfinite(row)]
        mean = float(some.mean()) if some.size else 0.0
        found.append((
            some.size, mean, float(np.square(some - mean).sum()), some.min(initial=np.inf),
            some.max(initial=-np.inf), (some > threshold).sum(),
            ((some <= bounds[0]) | (some >= bounds[1])).sum() if bounds else 0,
        ))  # fmt: skip
    return [np.array(column) for column in zip(*found, strict=True)]


def check_reduced(tensor, axis, threshold=0.0, bounds=None, rel=1e-6):
    found = Reducer(threshold).reduce(tensor, axis, bounds)
    count, mean, scatter, least, most, alive, saturated = truth(tensor, axis, threshold, bounds)
    assert found.count.tolist() == count.tolist()
    assert found.alive.tolist() == alive.tolist()
    assert found.minimum.tolist() == least.tolist()
    assert found.maximum.tolist() == most.tolist()
    assert found.zeros == int((tensor == 0).sum())
    assert found.non_finite == int((~tensor.isfinite()).sum())
    if bounds is not None:
        assert found.saturated.tolist() == saturated.tolist()
    deviation = np.sqrt(scatter / np.maximum(count, 1))
    assert (np.abs(found.mean - mean) <= rel * np.maximum(deviation, np.abs(mean))).all()
    assert found.scatter == pytest.approx(scatter, rel=rel, abs=1e-300)
    return found


def maps_like(*shape, seed=0, scale=1.0, shift=0.0, dtype=torch.float32):
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (noise * scale + shift).to(dtype)


LAST = torch.channels_last


class TestReducer:
    @pytest.mark.parametrize(
        ("tensor", "axis"),
        [
            (maps_like(3, 5, 9, 7), 1),
            (maps_like(3, 5, 9, 7).to(memory_format=LAST), 1),
            (maps_like(3, 9, 7, 5), -1),
            (maps_like(3, 5, 9).transpose(1, 2), -1),
            (maps_like(3, 5, 9, 7), None),
            (maps_like(3, 5, 9, 7).to(memory_format=LAST), None),
            (maps_like(3, 5, 9, 7)[:, 1:4, ::2], 1),
            (maps_like(1, 5, 1, 1).expand(3, 5, 4, 4), 1),
            (maps_like(3, 5), 1),
            (maps_like(3, 4, 2, 3, 3), 1),
            (maps_like(70, 8, 60, 60), 1),
            (maps_like(70, 8, 60, 60).to(memory_format=LAST), 1),
            (maps_like(2, 3, 700, 900), 1),
            (maps_like(5000, 90), 1),
            (maps_like(2, 1, 1500, 1000), 1),
            (maps_like(7), None),
            (maps_like(), None),
        ],
        ids=lambda value: "x".join(map(str, value.shape)) if isinstance(value, torch.Tensor) else str(value),
    )
    def test_any_shape_and_order_in_memory(self, tensor, axis):
        check_reduced(tensor, axis)
        check_reduced(tensor.relu(), axis, threshold=0.5)

    @pytest.mark.parametrize("form", [torch.contiguous_format, LAST], ids=["contiguous", "channels-last"])
    @pytest.mark.parametrize(
        ("scale", "shift"), [(1, 1e4), (1, -1e6), (1e-3, 1e3), (1e30, 0), (1e-25, 0), (1e18, 1e19)], ids=str
    )
    def test_neither_cancellation_nor_overflow(self, scale, shift, form):
        tensor = maps_like(16, 4, 64, 64, scale=scale, shift=shift).to(memory_format=form)
        # Beyond 1e4 deviations a float32's own steps are what varies.
        check_reduced(tensor, 1, threshold=shift, rel=1e-5 if abs(shift) > 1e5 * scale else 2e-6)

    def test_channels_of_all_sizes_at_once(self):
        scales = torch.tensor([1e-30, 1e-20, 1e-8, 1, 1e8, 1e20, 1e30, 0]).view(1, 8, 1, 1)
        check_reduced(maps_like(16, 8, 64, 64) * scales, 1)

    @pytest.mark.parametrize(
        "dtype",
        [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool],
        ids=str,
    )
    def test_other_types(self, dtype):
        tensor = maps_like(16, 4, 64, 64, scale=2, shift=1)
        check_reduced((tensor.abs() if dtype == torch.uint8 else tensor).to(dtype), 1)

    def test_halves_whose_sum_no_half_holds(self):
        check_reduced(torch.full((16, 2, 64, 64), 6e4, dtype=torch.float16), 1)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
    @pytest.mark.parametrize("size", [4, 64])
    def test_what_is_not_finite_is_left_out(self, bad, size):
        tensor = maps_like(16, 4, size, size)
        tensor[3, 1, 2, 3] = bad
        tensor[0, 2] = bad
        tensor[:, 3] = bad
        found = check_reduced(tensor, 1, bounds=(-1.0, 1.0))
        assert found.count[3] == 0
        assert found.count[0] == 16 * size * size

    @pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-math.inf, 6.0), (0.0, 1.0)], ids=str)
    def test_entries_at_a_bound(self, bounds):
        tensor = (maps_like(16, 4, 64, 64) * 3).clamp(-7, 6)
        check_reduced(tensor, 1, bounds=bounds)

    @pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4)], ids=str)
    def test_an_empty_tensor(self, shape):
        found = Reducer().reduce(torch.empty(shape), 1, (0.0, 1.0))
        assert found.count.tolist() == found.alive.tolist() == found.saturated.tolist() == [0, 0, 0]
        made = Moments(3, bounded=True)
        made.add(found)
        assert made.minimum.tolist() == [math.inf] * 3

    def test_one_reducer_serves_many_tensors(self):
        reducer = Reducer()
        for size in (3, 90, 40):
            tensor = maps_like(9, 4, size, size, seed=size)
            alone = Reducer().reduce(tensor, 1)
            assert pickle.dumps(vars(reducer.reduce(tensor, 1))) == pickle.dumps(vars(alone))

    def test_the_tensor_is_only_read(self):
        tensor = maps_like(9, 4, 90, 90)
        before = tensor.clone()
        Reducer().reduce(tensor, 1, (0.0, 1.0))
        assert torch.equal(tensor, before)
        assert tensor._version == 0

    def test_what_has_no_real_entries_in_memory_is_not_measured(self):
        assert is_measurable(torch.ones(2, dtype=torch.bool))
        assert not is_measurable(torch.ones(2, dtype=torch.complex64))
        assert not is_measurable(torch.ones(2, device="meta"))
        assert not is_measurable(torch.ones(2, 2).to_sparse())
