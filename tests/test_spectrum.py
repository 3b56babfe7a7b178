"""Covariance of channels and its spectrum, against numpy's in float64 and cases worked out by hand."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from hookscope.spectrum import Covariance, Spectrum, mean_abs_correlation

CHANNELS = 300  # more than one block of columns


def mixed(rows=5000, channels=CHANNELS, mean=0.0, seed=0):
    """(rows, channels) float32, correlated, about a mean."""
    draw = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, channels, generator=draw) @ torch.randn(channels, channels, generator=draw)
    return base / math.sqrt(channels) + mean


def taken(rows, parts=None):
    found = Covariance(rows.shape[1])
    for part in rows.split(parts or len(rows)):
        found.add(part)
    return found


def truth(rows):
    return np.cov(rows.double().numpy().T, bias=True)


@pytest.mark.parametrize("mean", [0.0, 1e4, -1e6], ids="{:g}".format)
@pytest.mark.parametrize("parts", [1, 37, 4096, None])
def test_the_covariance_is_numpys_in_float64(mean, parts):
    rows = mixed(600 if parts == 1 else 5000, mean=mean)
    expected = truth(rows)
    found = taken(rows, parts).matrix()
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=(1e-13 + 1e-17 * abs(mean)) * 10 * expected.max()
    )
    assert np.array_equal(found, found.T)


def test_float32_in_one_pass_would_have_lost_it():
    """What `E[xy] - E[x] E[y]` in float32 makes of a mean of 1e4: it would pass no test above."""
    rows = mixed(mean=1e4)
    wrong = rows.T @ rows / len(rows) - torch.outer(rows.mean(0), rows.mean(0))
    assert np.abs(wrong.numpy() - truth(rows)).max() > 0.1


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
def test_any_real_dtype_counts_at_its_own_values(dtype):
    rows = (mixed(900, 5) * 3 + 20).to(dtype)
    np.testing.assert_allclose(taken(rows, 100).matrix(), truth(rows), rtol=1e-10, atol=1e-12)


def test_strides_do_not_count():
    maps = torch.randn(4, 6, 5, 7, generator=torch.Generator().manual_seed(1))
    rows = maps.permute(0, 2, 3, 1).reshape(-1, 6)
    each = Covariance(6)
    for picture in maps:
        each.add(picture.flatten(1).T)
    assert np.array_equal(each.matrix(), taken(rows).matrix())


def test_how_rows_are_parted_changes_no_bit():
    rows = mixed(9000)
    assert np.array_equal(taken(rows, 37).matrix(), taken(rows, 1000).matrix())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)], ids=str)
def test_processes_merge_to_the_same_figures(order):
    rows = mixed(mean=50.0)
    parts = rows.split([10, 3000, 1900, 90])
    whole = Covariance(CHANNELS)
    for at in order:
        whole.merge(Covariance.from_state(pickle.loads(pickle.dumps(taken(parts[at]).state()))))
    one, several = taken(rows).spectrum(), whole.spectrum()
    assert vars(several) | {"eigenvalues": 0} == vars(one) | {"eigenvalues": 0}
    np.testing.assert_allclose(several.eigenvalues, one.eigenvalues, rtol=0, atol=1.1e-9 * one.eigenvalues[0])


def test_a_state_goes_on_where_it_was():
    rows = mixed(2000, 20)
    first = taken(rows[:700])
    again = Covariance.from_state(first.state())
    again.add(rows[700:])
    np.testing.assert_allclose(again.matrix(), truth(rows), rtol=1e-11)
    assert first.samples == 700


def test_figures_are_those_of_the_singular_values():
    rows = mixed(2000, 40, mean=3.0)
    centred = rows.double().numpy() - rows.double().numpy().mean(0)
    sigma = np.linalg.svd(centred, compute_uv=False)
    values, shares = sigma**2 / len(rows), sigma / sigma.sum()
    correlation = np.abs(np.corrcoef(centred.T))
    found = taken(rows).spectrum()
    np.testing.assert_allclose(found.eigenvalues, values, atol=1e-8 * values[0])
    assert found.participation_ratio == pytest.approx(values.sum() ** 2 / (values**2).sum(), rel=1e-8)
    assert found.effective_rank == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), rel=1e-5)
    assert found.stable_rank == pytest.approx((sigma**2).sum() / sigma[0] ** 2, rel=1e-8)
    assert found.mean_abs_correlation == pytest.approx(correlation[~np.eye(40, dtype=bool)].mean(), rel=1e-8)


def signs(*columns):
    """Rows of +-1: independent columns, each row once."""
    return torch.cartesian_prod(*(torch.tensor([-1.0, 1.0]) * one for one in columns)).reshape(
        -1, len(columns)
    )


# rows: eigenvalues, participation ratio, effective rank, stable rank, mean |r|, constant channels
HAND = {
    "independent": (signs(1, 1, 1), [1, 1, 1], 3, 3, 3, 0, 0),
    "scales": (signs(2, 1), [4, 1], 25 / 17, math.exp(math.log(3) - 2 / 3 * math.log(2)), 1.25, 0, 0),
    "copies": (signs(1).repeat(1, 3), [3, 0, 0], 1, 1, 1, 1, 0),
    "opposite": (torch.cat([signs(1), -signs(1)], 1), [2, 0], 1, 1, 1, 1, 0),
    "one-constant": (torch.cat([signs(1, 1), torch.full((4, 1), 0.1)], 1), [1, 1, 0], 2, 2, 2, 0, 1),
}


@pytest.mark.parametrize("case", HAND.values(), ids=HAND)
def test_hand_cases(case):
    rows, values, *expected = case
    found = taken(rows.repeat(3, 1) + 5.0).spectrum()
    assert found.eigenvalues == pytest.approx(values)
    assert [
        found.participation_ratio, found.effective_rank, found.stable_rank, found.mean_abs_correlation, found.constant,
    ] == pytest.approx(expected, rel=1e-5, abs=1e-9)  # fmt: skip


def test_singular_values_not_eigenvalues_make_the_effective_rank():
    """With eigenvalues in place of singular values, as some code has it, it would be exp(H(0.8, 0.2)) = 1.649."""
    found = taken(signs(2, 1)).spectrum()
    assert found.effective_rank == pytest.approx(1.889882, rel=1e-5)


@pytest.mark.parametrize(("rows", "figures"), [(7, False), (8, True)])
def test_it_is_refused_with_fewer_rows_than_channels(rows, figures):
    found = taken(torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))).spectrum()
    assert (found.participation_ratio is not None) is figures
    assert found.missing == ("" if figures else "7 rows of 8 channels: fewer rows than channels")
    assert found.samples == rows


def test_channels_that_never_change_have_no_figures():
    found = taken(torch.full((50, 4), 3.3)).spectrum()
    assert found == Spectrum(4, 50, constant=4, eigenvalues=found.eigenvalues)
    assert not found.eigenvalues.any()


def test_a_small_change_beside_a_large_mean_is_no_constant():
    rows = torch.full((5000, 2), 1000.0)
    rows[17, 1] = torch.nextafter(rows[17, 1], torch.tensor(2000.0))
    assert taken(rows, 100).spectrum().constant == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_left_out_and_counted(value):
    rows = mixed(500, 6)
    broken = rows.clone()
    broken[::50, 2] = value
    keep = torch.ones(500, dtype=torch.bool)
    keep[::50] = False
    found = taken(broken, 33)
    np.testing.assert_allclose(found.matrix(), truth(rows[keep]), rtol=1e-11)
    assert (found.spectrum().dropped, found.samples) == (10, 490)


def test_large_values_are_no_infinity():
    rows = torch.full((10, 1), 3e38) * torch.tensor([1.0, -1.0] * 5)[:, None]
    found = taken(rows).spectrum()
    assert found.dropped == 0
    assert found.eigenvalues == pytest.approx([float(rows[0, 0]) ** 2])


def test_nothing_is_no_row():
    found = Covariance(3)
    found.add(torch.zeros(0, 3))
    found.merge(Covariance(3))
    assert found.samples == 0
    assert found.spectrum().missing
    assert not found.matrix().any()


def test_one_channel_has_no_pairs():
    assert mean_abs_correlation(np.eye(1)) is None
