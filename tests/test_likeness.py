"""How alike two maps are: against scipy, torch's resizing, and cases worked by hand."""

from __future__ import annotations

import math
import warnings
from dataclasses import astuple

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from hookscope.likeness import Likeness, centre_shift, hottest_iou, likeness, spearman


def random_maps(seed, shape=(7, 9), levels=None):
    draw = np.random.default_rng(seed)
    maps = draw.normal(size=(2, *shape)).astype(np.float32)
    return np.round(maps * levels) / levels if levels else maps


RAMP = np.arange(10, dtype=np.float32).reshape(2, 5)


@pytest.mark.parametrize("levels", [None, 1, 3], ids=["distinct", "many ties", "some ties"])
@pytest.mark.parametrize("seed", range(4))
def test_spearman_is_that_of_scipy(seed, levels):
    stats = pytest.importorskip("scipy.stats")
    a, b = random_maps(seed, levels=levels)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a.ravel(), b.ravel()).statistic, abs=1e-12)


@pytest.mark.parametrize(
    ("b", "expected"),
    [(RAMP, 1.0), (-RAMP, -1.0), (np.exp(RAMP), 1.0), (RAMP * 1e-30, 1.0)],
    ids=["same", "opposite", "any rising function", "tiny"],
)
def test_spearman_by_hand(b, expected):
    assert spearman(RAMP, b) == pytest.approx(expected, abs=1e-12)


def test_spearman_of_rectified_maps_shares_the_ranks_of_their_zeros():
    # Ranks 2, 2, 2, 4 and 1, 2.5, 2.5, 4: (0.75 + 2.25) / sqrt(3 * 4.5).
    a, b = np.array([[0.0, 0, 0, 5]]), np.array([[0.0, 1, 1, 2]])
    assert spearman(a, b) == pytest.approx(3 / math.sqrt(3 * 4.5))


def test_iou_by_hand():
    # 2 of 10 each: the last two, and one of them with another.
    b = RAMP.copy()
    b[0, 0] = 99
    assert hottest_iou(RAMP, RAMP) == 1
    assert hottest_iou(RAMP, b) == pytest.approx(1 / 3)
    assert hottest_iou(RAMP, -RAMP) == 0
    assert hottest_iou(RAMP, -RAMP, share=1.0) == 1


@pytest.mark.parametrize(
    ("size", "share", "room"),
    [(10, 0.2, 2), (11, 0.2, 3), (100, 0.07, 7), (3, 0.01, 1), (10, 1.0, 10)],
    ids=["exact", "rounded up", "not rounded up by rounding", "one at least", "all"],
)
def test_the_hottest_are_exactly_so_many(size, share, room):
    # Two maps whose hottest positions lie at opposite ends overlap by what exceeds the whole.
    a = np.arange(size, dtype=np.float64)[None]
    overlap = max(0, 2 * room - size)
    assert hottest_iou(a, -a, share) == pytest.approx(overlap / (2 * room - overlap))


def test_a_flat_map_is_not_what_comes_first_in_memory():
    # It is 1/5 everywhere: the overlap with any 2 of 10 is 2/5, the union 2 + 8/5.
    flat, expected = np.ones((2, 5)), 0.4 / 3.6
    for other in (RAMP, -RAMP, RAMP.reshape(5, 2).T.copy().reshape(2, 5)):
        assert hottest_iou(flat, other) == pytest.approx(expected)
        assert hottest_iou(other, flat) == pytest.approx(expected)


def test_ties_at_the_edge_share_what_room_is_left():
    # 2 of 10: one hot position, and the nine zeros a ninth each.
    one, other = np.zeros((2, 5)), np.zeros((2, 5))
    one[0, 0] = other[1, 4] = 1
    assert hottest_iou(one, one) == 1
    assert hottest_iou(one, other) == pytest.approx((10 / 9) / (2 + 8 / 9))


@pytest.mark.parametrize("turn", [np.fliplr, np.flipud, np.rot90], ids=lambda turn: turn.__name__)
@pytest.mark.parametrize("levels", [None, 1])
def test_iou_does_not_depend_on_the_order_of_positions(turn, levels):
    a, b = random_maps(1, (6, 6), levels)
    assert hottest_iou(turn(a), turn(b)) == pytest.approx(hottest_iou(a, b))


def point(row, column, shape=(4, 3), value=1.0):
    found = np.zeros(shape)
    found[row, column] = value
    return found


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (point(0, 0), point(0, 0, value=9.0), 0),
        (point(0, 0), point(3, 0), 3 / 5),
        (point(0, 0), point(3, 2), math.sqrt(13) / 5),
        (point(0, 0) + point(2, 0), point(1, 0), 0),
        (point(0, 0) - 5 * point(3, 2), point(0, 0), 0),
        (point(0, 0, value=1e-300) + point(2, 0, value=1e-300), point(0, 0), 1 / 5),
    ],
    ids=["same place", "down", "across", "mean of two", "negative part left out", "tiny"],
)
def test_the_shift_of_the_centre_by_hand(a, b, expected):
    assert centre_shift(a, b) == pytest.approx(expected)


@pytest.mark.parametrize("empty", [np.zeros((4, 3)), np.full((4, 3), -1.0)])
def test_a_map_without_a_positive_value_has_no_centre(empty):
    assert math.isnan(centre_shift(empty, point(0, 0)))
    assert math.isnan(centre_shift(point(0, 0), empty))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_like_nothing(value):
    broken = RAMP.copy()
    broken[0, 3] = value
    found = likeness(broken, RAMP)
    assert [math.isnan(each) for each in (found.spearman, found.iou, found.shift)] == [True] * 3


@pytest.mark.parametrize("value", [0.0, -1.0, 2.5, math.nan])
def test_equal_maps_are_alike_even_when_constant(value):
    flat = np.full((3, 4), value, np.float32)
    assert likeness(flat, flat.copy()) == Likeness(1.0, 1.0, 0.0)


def test_a_constant_map_beside_another():
    found = likeness(np.ones((2, 5), np.float32), RAMP)
    assert math.isnan(found.spearman)
    assert found.iou == pytest.approx(0.4 / 3.6)
    assert found.shift > 0


def test_all_three_are_those_of_the_functions():
    a, b = random_maps(3)
    assert likeness(a, b) == Likeness(spearman(a, b), hottest_iou(a, b), centre_shift(a, b))
    assert astuple(likeness(b, a)) == pytest.approx(astuple(likeness(a, b)))


@pytest.mark.parametrize(
    ("one", "other"), [((4, 5), (8, 10)), ((7, 7), (14, 14)), ((3, 8), (6, 2)), ((1, 1), (4, 4))]
)
def test_the_smaller_is_enlarged_by_pixel_centres(one, other):
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=shape).astype(np.float32) for shape in (one, other))
    size = (max(one[0], other[0]), max(one[1], other[1]))
    large = [
        interpolate(torch.from_numpy(each)[None, None], size=size, mode="bilinear")[0, 0].numpy()
        for each in (a, b)
    ]
    found = likeness(a, b)
    assert found.shift == pytest.approx(centre_shift(*large), abs=1e-5, nan_ok=True)
    assert found.iou == pytest.approx(hottest_iou(*large), abs=1e-6)
    if one != (1, 1):
        assert found.spearman == pytest.approx(spearman(*large), abs=1e-6)


def test_maps_of_any_layout_and_kind_do_without_warnings():
    a, b = random_maps(5, (6, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = likeness(a, b)
        assert likeness(np.asfortranarray(a), b.astype(np.float64)) == plain
        likeness(a.T[::-1], b)
