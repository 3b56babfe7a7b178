"""Pairs: both maps on their own scale, and the difference of their shapes in its sign and place."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from hookscope.render import colour, pair, panels

SIZE = (240, 120)
NAMES = ("before", "now", "change")


def draw(before, now, **options):
    given = {"title": "layer4 · gradcam · cat", "size": SIZE, "cmap": "gray", **options}
    return np.asarray(pair.draw(np.float32(before), np.float32(now), **given)).astype(int)


def shown(drawn, columns=3):
    """The pixels of each panel."""
    foot = panels.MARGIN_PX + panels.bar("0", "1", "gray").height + 3
    lefts = [panels.MARGIN_PX + column * (SIZE[0] + 10) for column in range(columns)]
    return [drawn[-foot - SIZE[1] : -foot, left : left + SIZE[0]] for left in lefts]


def ramp(size, cells, values):
    """Closed form of a row of cells upsampled: straight between centres, flat at the rims."""
    return np.interp((np.arange(size) + 0.5) / size * cells - 0.5, np.arange(cells), values)


def test_each_is_scaled_by_its_own_maximum():
    before, now, change = shown(draw([[0, 2]], [[0, 500]]))
    expected = np.broadcast_to(ramp(240, 2, [0, 255])[None, :, None], before.shape)
    np.testing.assert_allclose(before, expected, atol=2)  # the gray table is not quite even
    np.testing.assert_array_equal(now, before)
    assert (change == colour.table(pair.DIVERGING)[128]).all(), "the same shape: no difference"


def test_difference_keeps_its_sign_and_place():
    change = shown(draw([[1, 0, 1]], [[1, 1, 0]]))[2]
    table = colour.table(pair.DIVERGING)
    expected = table[((ramp(240, 3, [0, 1, -1]) + 1) / 2 * 255 + 0.5).astype(int)]
    np.testing.assert_allclose(change, np.broadcast_to(expected, change.shape), atol=3)
    np.testing.assert_allclose(change[:, 120], [table[254]] * 120, atol=6, err_msg="more is the last colour")
    assert (change[:, -20:] == table[0]).all(), "less is the first"


def test_maps_of_other_sizes_are_compared_where_they_lie():
    before, now, change = shown(draw(np.ones((2, 2)), np.ones((7, 14))))
    assert (before == 255).all()
    assert (now == 255).all()
    assert (change == colour.table(pair.DIVERGING)[128]).all()


def test_signed_maps_have_zero_in_the_middle():
    before, now, _ = shown(draw([[-2, 0, 2]], [[4, 0, 0]], signed=True))
    np.testing.assert_allclose(before[60, [0, 120, 239], 0], [0, 127.5, 255], atol=1)
    np.testing.assert_allclose(now[60, [0, 120, 239], 0], [255, 127.5, 127.5], atol=1)
    unsigned = shown(draw([[-2, 0, 2]], [[4, 0, 0]]))[0]
    np.testing.assert_allclose(unsigned[60, [0, 120, 239], 0], [0, 0, 255], atol=3)


def test_not_finite_is_magenta_and_not_in_the_scale():
    before, now, change = shown(draw([[np.nan, 1, 1, 1]], [[np.inf, 3, 3, 3]]))
    for panel in (before, now, change):
        assert (panel[:, :30] == (255, 0, 255)).all()
    assert (before[:, 120:] == 255).all()
    assert (now[:, 120:] == 255).all()


@pytest.mark.parametrize("values", [[[0.0]], [[np.nan]], [[-1.0]]], ids=["zero", "nan", "negative"])
def test_maps_without_a_positive_value_are_drawn(values):
    assert shown(draw(values, values))[0].shape == (120, 240, 3)


def test_only_the_covered_part_is_drawn():
    before = shown(draw([[1, 1, 0, 0]], [[1, 1, 0, 0]], covers=(1.0, 0.25)))[0]
    assert (before == 255).all()


def test_picture_is_the_first_panel():
    drawn = draw([[1]], [[1]], picture=Image.new("RGB", (60, 30), (90, 120, 150)))
    panels_ = shown(drawn, 4)
    assert (panels_[0] == (90, 120, 150)).all()
    assert (panels_[1] == 255).all()
    assert (panels_[3] == colour.table(pair.DIVERGING)[128]).all()


def test_what_is_written(monkeypatch):
    said = []
    words = panels.words
    monkeypatch.setattr(
        panels, "words", lambda text, *rest, **more: said.append(text) or words(text, *rest, **more)
    )
    draw([[0, 2]], [[1.5, 3]], lines=("cat.png", "", "iou 0.5"), note="RANDOM WEIGHTS")
    assert {
        "layer4 · gradcam · cat",
        "cat.png",
        "iou 0.5",
        "RANDOM WEIGHTS",
        "before",
        "now",
        "2",
        "3",
    } <= set(said)
    assert "now - before, each scaled to 1; at most 0.5" in said
