"""Deletion, insertion, average drop and increase in confidence: closed forms of nets that are a mean."""

from __future__ import annotations

import math

import pytest
import torch

from hookscope.faithfulness import Faithfulness, faithfulness

RAMP = torch.arange(1.0, 65.0).view(8, 8)
SQUARE = torch.zeros(8, 8)
SQUARE[2:6, 2:6] = 1


def mean(pictures):
    return pictures.mean((1, 2, 3))


def region(pictures):
    """The mean of a quarter of the picture, in its middle."""
    return pictures[:, :, 2:6, 2:6].mean((1, 2, 3))


def ones(channels=3, size=8):
    return torch.ones(1, channels, size, size)


@pytest.mark.parametrize("steps", [1, 2, 5, 16, 64, 200])
@pytest.mark.parametrize(
    "heat", [RAMP, -RAMP + 65, SQUARE, torch.ones(3, 3)], ids=["ramp", "falling", "square", "flat"]
)
def test_a_mean_falls_evenly_whatever_goes_first(heat, steps):
    # An even picture stays even when blurred, so that what comes back changes nothing.
    found = faithfulness(ones(), heat, mean, steps=steps)
    assert found.deletion_auc == pytest.approx(0.5)
    assert found.insertion_auc == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("heat", "deletion"),
    [
        # The quarter that counts goes in the first quarter of the steps: a triangle.
        (SQUARE, 0.125),
        # It goes in the last.
        (2 - SQUARE, 0.875),
    ],
    ids=["where it looks", "where it does not"],
)
def test_deletion_of_what_counts(heat, deletion):
    assert faithfulness(ones(), heat, region, steps=16).deletion_auc == pytest.approx(deletion)


def bright_square(size=64):
    x = torch.zeros(1, 2, size, size)
    x[:, :, 24:40, 24:40] = 1
    return x


def test_insertion_starts_at_the_blurred_picture_and_ends_at_the_picture():
    # All that counts is there after the first step, and was a blur at 0: (blur + 1) / 2 of the first share.
    x, seen = bright_square(), []
    heat = x[0, 0]

    def confidence(pictures):
        seen.extend(pictures.clone())
        return (pictures * heat).sum((1, 2, 3)) / (2 * heat.sum())

    found = faithfulness(x, heat, confidence, steps=16)
    blurred = seen[17]
    start = float((blurred * heat).sum() / (2 * heat.sum()))
    assert 0.5 < start < 0.999
    assert found.insertion_auc == pytest.approx((start + 1) / 2 / 16 + 15 / 16)
    # The blur moves brightness about and makes none.
    assert blurred.sum() == pytest.approx(float(x.sum()), rel=1e-5)
    assert torch.equal(blurred[0], blurred[0].flip(0))
    torch.testing.assert_close(blurred[0], blurred[0].T)


def test_the_blur_is_11_pixels_of_deviation_5_at_224():
    x, seen = torch.zeros(1, 1, 224, 224), []
    x[0, 0, 100, 100] = 1
    faithfulness(
        x, torch.ones(1, 1), lambda pictures: seen.extend(pictures.clone()) or mean(pictures), steps=1
    )
    blurred = seen[2][0]
    offsets = torch.arange(-5.0, 6.0)
    line = torch.exp(-(offsets**2) / (2 * 5**2))
    line = line / line.sum()
    torch.testing.assert_close(blurred[95:106, 95:106], line[:, None] * line, rtol=1e-4, atol=1e-8)
    assert blurred.sum() == pytest.approx(float(blurred[95:106, 95:106].sum()))


def test_pictures_go_hottest_first_in_equal_shares_to_the_mean_colour():
    x, seen = torch.rand(1, 2, 4, 4, generator=torch.Generator().manual_seed(0)) + 1, []
    heat = torch.arange(16.0).view(4, 4)
    faithfulness(x, heat, lambda pictures: seen.extend(pictures.clone()) or mean(pictures), steps=4)
    assert len(seen) == 10
    for step, picture in enumerate(seen[:5]):
        gone = heat >= 16 - 4 * step
        torch.testing.assert_close(picture, x[0] * ~gone)
    for step, picture in enumerate(seen[5:9]):
        back = heat >= 16 - 4 * step
        assert torch.equal(picture[:, back], x[0][:, back])
        assert (picture[:, ~back] != x[0][:, ~back]).all()
    torch.testing.assert_close(seen[9], x[0] * heat / 15)


# Ties.


def top_half(pictures):
    return pictures[:, :, : pictures.shape[2] // 2].mean((1, 2, 3))


def test_equal_values_are_no_scan_from_the_top():
    # In the order of their index the top half goes first, which gives 1/4; without an order it is 1/2.
    found = [
        faithfulness(ones(1, 32), torch.ones(4, 4), top_half, seed=seed).deletion_auc for seed in range(8)
    ]
    assert sum(found) / 8 == pytest.approx(0.5, abs=0.02)
    assert len(set(found)) > 1


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7e-5, 3e4])
def test_what_upsampling_rounds_is_no_order(value):
    # An even map of awkward size is even only to the last digit once it is enlarged.
    found = [faithfulness(ones(1, 60), torch.full((7, 7), value), top_half, seed=seed) for seed in range(2)]
    exact = [faithfulness(ones(1, 60), torch.ones(1, 1), top_half, seed=seed) for seed in range(2)]
    assert [each.deletion_auc for each in found] == [each.deletion_auc for each in exact]


def test_the_zeros_of_a_rectified_map_have_no_order_either():
    heat = torch.zeros(32, 32)
    heat[16, 16] = 1
    found = [faithfulness(ones(1, 32), heat, top_half, seed=seed).deletion_auc for seed in range(8)]
    assert sum(found) / 8 == pytest.approx(0.5, abs=0.02)


def test_a_seed_decides_and_touches_no_random_state():
    x, heat = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.ones(2, 2)
    before = torch.get_rng_state()
    first, same, other = (faithfulness(x, heat, top_half, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert first == same
    assert first.deletion_auc != other.deletion_auc
    # Without ties the seed is of no account.
    assert faithfulness(x, RAMP.repeat(2, 2) + SQUARE.repeat(2, 2), top_half, seed=3) != first


@pytest.mark.parametrize("seed", [1, 2])
def test_without_ties_a_seed_decides_nothing(seed):
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    assert faithfulness(x, RAMP, region, seed=seed) == faithfulness(x, RAMP, region, seed=0)


# The map as a mask.


@pytest.mark.parametrize(
    ("heat", "drop", "rose"),
    [
        (SQUARE, 0.75, 0.0),
        (5 * SQUARE, 0.75, 0.0),
        (torch.ones(2, 2), 0.0, 0.0),
        (SQUARE - 4 * (1 - SQUARE), 0.75, 0.0),
    ],
    ids=["a quarter", "its scale does not count", "everything", "below zero shows nothing"],
)
def test_what_the_map_shows_keeps_its_share(heat, drop, rose):
    found = faithfulness(ones(), heat, mean)
    assert (found.average_drop, found.increase_in_confidence) == (pytest.approx(drop, abs=1e-6), rose)


def test_confidence_may_rise():
    # What surrounds the square speaks against it.
    found = faithfulness(ones(), SQUARE, lambda pictures: 2 * region(pictures) - mean(pictures))
    assert (found.average_drop, found.increase_in_confidence) == (0.0, 1.0)


@pytest.mark.parametrize("level", [0.0, -1.0])
def test_the_drop_of_no_confidence_is_undefined(level):
    found = faithfulness(ones(), SQUARE, lambda pictures: mean(pictures) * 0 + level)
    assert math.isnan(found.average_drop)
    assert (found.deletion_auc, found.insertion_auc, found.increase_in_confidence) == (level, level, 0.0)


def test_a_confidence_that_is_not_a_number_is_not_hidden():
    found = faithfulness(ones(), SQUARE, lambda pictures: mean(pictures) * math.nan)
    assert all(math.isnan(each) for each in vars(found).values())
    # Only what the map shows has none: max() would call that no drop.
    found = faithfulness(ones(), SQUARE, _nan_where_masked())
    assert math.isnan(found.average_drop)
    assert math.isnan(found.increase_in_confidence)
    assert found.deletion_auc == pytest.approx(0.5)


def _nan_where_masked():
    asked = []

    def confidence(pictures):
        asked.extend(pictures)
        return mean(pictures).masked_fill(
            torch.arange(len(asked) - len(pictures), len(asked)) == 33, math.nan
        )

    return confidence


@pytest.mark.parametrize(
    "heat",
    [torch.zeros(4, 4), -torch.ones(4, 4), torch.full((4, 4), math.nan), torch.tensor([[1.0, math.inf]])],
    ids=["zero", "negative", "nan", "inf"],
)
def test_a_map_that_shows_nothing_asks_nothing(heat):
    def refuse(pictures):
        raise AssertionError

    assert all(math.isnan(each) for each in vars(faithfulness(ones(), heat, refuse)).values())


# Batches.


@pytest.mark.parametrize("batch", [1, 3, 16, 1000])
@pytest.mark.parametrize("steps", [1, 7])
def test_never_more_pictures_at_once_than_the_batch_and_never_one_twice(batch, steps):
    sizes = []

    def confidence(pictures):
        assert not torch.is_grad_enabled()
        sizes.append(len(pictures))
        return region(pictures)

    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    found = faithfulness(x, RAMP, confidence, steps=steps, batch=batch)
    assert sum(sizes) == 2 * steps + 2
    assert max(sizes) <= batch
    assert len(sizes) == math.ceil((2 * steps + 2) / batch)
    assert found == faithfulness(x, RAMP, region, steps=steps)


def test_pictures_keep_the_inputs_kind_and_the_input_is_left_as_it_was():
    x = torch.rand(1, 3, 20, 24, generator=torch.Generator().manual_seed(3)).bfloat16()
    before = x.clone()

    def confidence(pictures):
        assert (pictures.dtype, pictures.shape[1:]) == (torch.bfloat16, (3, 20, 24))
        pictures.zero_()  # theirs to write to
        return torch.ones(len(pictures), dtype=torch.bfloat16)

    assert faithfulness(x, RAMP, confidence) == Faithfulness(1.0, 1.0, 0.0, 0.0)
    assert torch.equal(x, before)
