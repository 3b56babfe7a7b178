"""Sizes of tensors against torch, float64 and the hand cases of the definitions."""

from __future__ import annotations

import math

import pytest
import torch

from hookscope.errors import UsageError
from hookscope.magnitudes import (
    Magnitude,
    Spread,
    Spreading,
    greatest,
    joined,
    magnitude,
    non_finite_entries,
    norm_name,
    norm_of_norms,
    parse_norm,
    scaled,
)

HAND = (torch.tensor([3.0, 4.0]), torch.tensor([12.0]))


@pytest.mark.parametrize(
    ("norm", "each", "total"),
    [(1.0, [7.0, 12.0], 19.0), (2.0, [5.0, 12.0], 13.0), (math.inf, [4.0, 12.0], 12.0)],
    ids=["L1", "L2", "Linf"],
)
def test_the_hand_case_in_every_norm(norm, each, total):
    sizes = [magnitude(tensor, l1=True) for tensor in HAND]
    assert [size.of(norm) for size in sizes] == each
    assert norm_of_norms(each, norm) == total
    assert joined(*sizes).of(norm) == total
    assert joined(*sizes).count == 3


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf], ids=["L1", "L2", "Linf"])
def test_the_norm_of_norms_is_that_of_torch(norm):
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (7, 1000, 70_001)]
    wanted = float(torch.nn.utils.get_total_norm([tensor.double() for tensor in tensors], norm_type=norm))
    sizes = [magnitude(tensor, l1=True) for tensor in tensors]
    assert norm_of_norms([size.of(norm) for size in sizes], norm) == pytest.approx(wanted, rel=1e-6)
    whole = joined(joined(sizes[0], sizes[1]), sizes[2])
    assert whole.of(norm) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf], ids=["L1", "L2", "Linf"])
def test_the_norm_of_no_norms_is_zero(norm):
    assert norm_of_norms([], norm) == 0
    assert magnitude(torch.empty(0), l1=True).of(norm) == 0


@pytest.mark.parametrize("size", [1, 65_536, 262_144, 262_145, 3_000_001])
def test_the_l1_norm_equals_float64(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3 + 1
    assert magnitude(values, l1=True).l1 == pytest.approx(float(values.double().abs().sum()), rel=1e-6)


def test_the_l1_norm_of_many_values_keeps_its_digits():
    """A plain float32 sum of these is off by a part in a thousand and more."""
    values = torch.randn(25_000_000, generator=torch.Generator().manual_seed(0)) * 3 + 1
    exact = float(values.double().abs().sum())
    assert abs(magnitude(values, largest=False, l1=True).l1 - exact) / exact < 1e-6


@pytest.mark.parametrize("layout", ["channels-last", "strided", "expanded", "scalar", "float64", "complex"])
def test_the_l1_norm_in_any_layout_and_type(layout):
    values = torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    made = {
        "channels-last": values.to(memory_format=torch.channels_last),
        "strided": values[:, :, ::2, 1:4],
        "expanded": torch.tensor([-2.0]).expand(7, 3),
        "scalar": torch.tensor(-2.5),
        "float64": values.double(),
        "complex": torch.complex(values, values),
    }[layout]
    found = magnitude(made, largest=False, l1=True)
    assert found.l1 == pytest.approx(float(made.abs().double().sum()), rel=1e-6)
    assert found.norm == pytest.approx(float(made.abs().double().norm()), rel=1e-6)


@pytest.mark.parametrize(
    ("values", "dtype", "total", "norm", "largest"),
    [
        ([300.0] * 10_000, torch.float16, 3e6, 3e4, 300.0),
        ([1e-4] * 10_000, torch.float16, 1.0, 1e-2, 1e-4),
        ([3e38] * 10, torch.float32, 3e39, math.sqrt(10) * 3e38, 3e38),
        ([1e-42] * 4, torch.float32, 4e-42, 2e-42, 1e-42),
        ([6e4] * 100_000, torch.bfloat16, 6e9, math.sqrt(1e5) * 6e4, 6e4),
    ],
    ids=["halves", "tiny-halves", "huge", "denormal", "bf16"],
)
def test_no_norm_overflows_or_vanishes(values, dtype, total, norm, largest):
    tensor = torch.tensor(values, dtype=dtype)
    found = magnitude(tensor, l1=True)
    assert (found.l1, found.norm, found.largest) == pytest.approx((total, norm, largest), rel=5e-3)
    assert found.non_finite == 0
    assert non_finite_entries(tensor) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_what_is_not_finite_is_counted_in_every_type(bad, dtype):
    values = torch.ones(1000).to(dtype)
    values[::10] = bad
    assert non_finite_entries(values) == 100
    found = magnitude(values, largest=not dtype.is_complex, l1=True)
    assert (found.non_finite, found.non_finite_share) == (100, 0.1)
    assert not math.isfinite(found.norm)
    assert not math.isfinite(found.l1)


def test_infinities_of_both_signs_do_not_cancel():
    assert non_finite_entries(torch.tensor([math.inf, -math.inf, 1.0])) == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_types_that_are_not_summed_are_finite(dtype):
    assert non_finite_entries(torch.ones(3).to(dtype)) == 0


def test_what_one_part_did_not_measure_the_whole_has_not():
    with_all, alone = magnitude(HAND[0], l1=True), magnitude(HAND[1], largest=False)
    assert joined(with_all, alone) == Magnitude(13.0, None, 0, 3, None)
    assert scaled(with_all, 2.0) == Magnitude(10.0, 8.0, 0, 2, 14.0)
    with pytest.raises(AssertionError, match="the L1 norm was not measured"):
        alone.of(1.0)


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.nan)])
def test_not_a_number_is_never_lost(order):
    assert math.isnan(greatest(*order))
    assert math.isnan(norm_of_norms(order, math.inf))
    sizes = [Magnitude(1.0, value, 0, 1, value) for value in order]
    assert math.isnan(joined(*sizes).of(math.inf))
    assert math.isnan(joined(*sizes).of(1.0))


def spread(values):
    spreading = Spreading()
    for value in values:
        spreading.add(value)
    return spreading.read()


def test_spreads_by_hand():
    assert spread([]) is None
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0, 3.0, 1)
    assert spread([1.0, 5.0, 3.0]) == Spread(3.0, 5.0, 1.0, 3.0, 3)
    assert spread([0.0, 0.0]) == Spread(0.0, 0.0, 0.0, 0.0, 2)


def test_a_batch_that_is_not_finite_stays_in_the_spread():
    found = spread([1.0, math.nan, 3.0])
    assert all(map(math.isnan, (found.mean, found.maximum, found.minimum)))
    assert (found.last, found.batches) == (3.0, 3)
    assert spread([1.0, math.inf]) == Spread(math.inf, math.inf, 1.0, math.inf, 2)


@pytest.mark.parametrize(
    ("given", "norm", "name"),
    [
        (1, 1.0, "L1"),
        ("2", 2.0, "L2"),
        (2.0, 2.0, "L2"),
        ("inf", math.inf, "L-infinity"),
        (" INF", math.inf, "L-infinity"),
        (math.inf, math.inf, "L-infinity"),
    ],
)
def test_norms_by_name_and_number(given, norm, name):
    assert parse_norm(given) == norm
    assert norm_name(parse_norm(given)) == name


@pytest.mark.parametrize("given", [3, "l2", 0, True, math.nan, ""])
def test_other_norms_are_usage_errors(given):
    with pytest.raises(UsageError, match="the norm .* is unknown .one of 1, 2, inf"):
        parse_norm(given)
