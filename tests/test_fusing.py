"""One map of several: worked by hand, and what must hold of any maps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import interpolate

import hookscope
from hookscope.cam.fusing import HOW, fused
from hookscope.errors import UsageError

ONE = torch.tensor([[2.0, 1.0], [-3.0, 0.0]])
OTHER = torch.tensor([[1.0, 4.0], [4.0, 2.0]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # Scaled: [[1, 1/2], [0, 0]] and [[1/4, 1], [1, 1/2]].
        ("mean", [[0.625, 0.75], [0.5, 0.25]]),
        ("max", [[1.0, 1.0], [1.0, 0.5]]),
        # The other from its least to its greatest: [[0, 1], [1, 1/3]].
        ("refine", [[0.0, 0.5], [0.0, 0.0]]),
    ],
)
def test_by_hand(how, expected):
    torch.testing.assert_close(fused([ONE, OTHER], how), torch.tensor(expected))


@pytest.mark.parametrize("how", HOW)
def test_a_uniform_positive_map_is_one_everywhere(how):
    # Taking its minimum off would make it blank.
    found = fused([torch.full((2, 2), 0.3), torch.full((3, 5), 7.0)], how)
    torch.testing.assert_close(found, torch.ones(3, 5))


def test_a_uniform_positive_map_changes_no_product():
    alone = fused([OTHER], "refine")
    torch.testing.assert_close(fused([OTHER, torch.full((2, 2), 9.0)], "refine"), alone)
    assert (alone.min(), alone.max()) == (0, 1)


@pytest.mark.parametrize("nothing", [0.0, -2.0])
@pytest.mark.parametrize(("how", "share"), [("mean", 0.5), ("max", 1.0), ("refine", 0.0)])
def test_a_map_with_nothing_above_zero_is_zero(how, share, nothing):
    found = fused([torch.full((2, 2), nothing), ONE], how)
    torch.testing.assert_close(found, share * ONE.clamp(min=0) / 2)


@pytest.mark.parametrize("how", ["mean", "max"])
def test_one_map_is_itself_over_its_maximum(how):
    torch.testing.assert_close(fused([OTHER], how), OTHER / 4)


def test_coarse_maps_are_enlarged_by_pixel_centres():
    coarse, fine = torch.tensor([[0.0, 1.0]]), torch.zeros(1, 4)
    assert fused([coarse, fine], "max").tolist() == [[0.0, 0.25, 0.75, 1.0]]


def test_the_grid_is_the_finest_along_each_side():
    generator = torch.Generator().manual_seed(0)
    tall, wide = torch.rand(6, 2, generator=generator), torch.rand(3, 5, generator=generator)
    found = fused([tall, wide], "mean")
    large = [
        interpolate((each / each.max())[None, None], size=(6, 5), mode="bilinear")[0, 0]
        for each in (tall, wide)
    ]
    torch.testing.assert_close(found, (large[0] + large[1]) / 2)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_stays_visible(how, value):
    broken = ONE.clone()
    broken[1, 1] = value
    assert fused([broken, OTHER], how).isnan().all()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [1e-30, 1e30], ids="{:g}".format)
def test_the_scale_of_a_map_does_not_count(how, size):
    torch.testing.assert_close(fused([ONE * size, OTHER], how), fused([ONE, OTHER], how))


@pytest.mark.parametrize("how", HOW)
def test_order_does_not_count_and_maps_are_left_as_they_were(how):
    one, other = ONE.clone(), OTHER.clone()
    torch.testing.assert_close(fused([one, other], how), fused([other, one], how))
    assert torch.equal(one, ONE)
    assert torch.equal(other, OTHER)


def test_unknown_ways_name_the_nearest():
    with pytest.raises(UsageError, match="fusion 'refined' is unknown") as caught:
        fused([ONE], "refined")
    assert caught.value.hint == "did you mean 'refine'?"


def test_the_ways_load_no_torch():
    assert {name: fusion.name for name, fusion in HOW.items()} == {
        name: name for name in ("mean", "max", "refine")
    }
    assert all(fusion.summary for fusion in HOW.values())
    program = "import sys, hookscope.cam.fusing; assert not {'torch', 'numpy'} & set(sys.modules)"
    root = Path(hookscope.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
