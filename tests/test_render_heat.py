"""Heat maps and overlays: the right colour on the right pixel of the original, nothing anywhere else."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from hookscope.artifacts import Heat, MapStatus, Target
from hookscope.errors import UsageError
from hookscope.images import View
from hookscope.layers import Site
from hookscope.render import colour, heat, overlay, sheet

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
CROP = View((60, 40), (10, 0, 50, 40), (32, 32))


def make(values, status=MapStatus.OK, **changes):
    values = np.asarray(values, dtype=np.float32)
    ends = (float(np.nanmin(values)), float(np.nanmax(values)))
    return Heat("gradcam", 0, Site("features.18"), "gradcam", values, *ends, status, **changes)


def one_hot(row, column, size=4):
    values = np.zeros((size, size))
    values[row, column] = 1
    return make(values)


def tint(map_, picture=NOISE, view=CROP, *, alpha=1.0, cmap="gray", **options):
    return np.asarray(overlay.draw(map_, picture, view, alpha=alpha, cmap=cmap, **options)).astype(int)


BLACK = Image.new("RGB", (60, 40))


def lit(picture):
    """The heat t that a gray overlay at alpha 1 over black shows, from (FLOOR + (1 - FLOOR) t) t."""
    shown = picture[..., 0] / 255
    floor = overlay.FLOOR
    return (-floor + np.sqrt(floor**2 + 4 * (1 - floor) * shown)) / (2 * (1 - floor))


def hat(size, cells, at, left=0.0, right=None):
    """Closed form of a one-hot row upsampled: a triangle about the cell's centre, flat at the rims."""
    right = size if right is None else right
    centres = (np.arange(size) + 0.5 - left) / (right - left) * cells - 0.5
    return np.maximum(1 - np.abs(np.clip(centres, 0, cells - 1) - at), 0)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_blend_is_the_formula(alpha):
    drawn = tint(make(np.full((3, 3), 2.0)), alpha=alpha, cmap="viridis", vmax=4.0)
    index, share = 128, 0.5
    weight = alpha * (overlay.FLOOR + (1 - overlay.FLOOR) * share)
    picture = np.asarray(NOISE).astype(float)
    expected = (1 - weight) * picture + weight * colour.table("viridis")[index]
    np.testing.assert_allclose(drawn[:, 10:50], expected[:, 10:50], atol=2)


def test_outside_the_crop_is_exactly_the_original():
    drawn = tint(make(np.ones((7, 7))))
    original = np.asarray(NOISE)
    assert drawn.shape == original.shape
    np.testing.assert_array_equal(drawn[:, :10], original[:, :10])
    np.testing.assert_array_equal(drawn[:, 50:], original[:, 50:])
    assert (drawn[:, 10:50] == 255).all(), "inside, a uniform map is the highest colour, not blank"


@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 2), (3, 3), (2, 0)])
def test_one_hot_lights_its_place_in_the_original(row, column):
    found = lit(tint(one_hot(row, column), BLACK))
    expected = np.zeros((40, 60))
    expected[:, 10:50] = np.outer(hat(40, 4, row), hat(40, 4, column))
    np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.parametrize(
    "box",
    [(10.4, 3.3, 41.9, 34.7), (10.6, 3.5, 42.5, 35.5), (-8.0, -4.0, 68.0, 44.0), (-5.3, 10.2, 25.1, 40.0)],
    ids=["fractions", "halves", "padded", "padded-left"],
)
def test_boxes_with_fractions_and_padding(box):
    found = lit(tint(one_hot(1, 1), BLACK, View((60, 40), box, (32, 32))))
    across = hat(60, 4, 1, box[0], box[2])
    down = hat(40, 4, 1, box[1], box[3])
    x, y = np.arange(60) + 0.5, np.arange(40) + 0.5
    inside = np.outer((y >= box[1]) & (y < box[3]), (x >= box[0]) & (x < box[2]))
    np.testing.assert_allclose(found, np.outer(down, across) * inside, atol=0.02)


@pytest.mark.parametrize("box", [(70, 0, 90, 20), (20.1, 20.1, 20.3, 20.3)], ids=["beside", "within-a-pixel"])
def test_a_box_that_holds_no_pixel_changes_nothing(box):
    np.testing.assert_array_equal(tint(one_hot(0, 0), view=View((60, 40), box, (8, 8))), np.asarray(NOISE))


def test_a_map_finer_than_the_picture_is_drawn():
    drawn = tint(make(np.ones((224, 224))), view=View((60, 40), (10.4, 0.3, 50.2, 39.6), (224, 224)))
    assert (drawn[1:39, 11:49] == 255).all()


def test_maximum_alone_normalises():
    scaled, other = tint(make([[1.0, 2.0]])), tint(make([[100.0, 200.0]]))
    np.testing.assert_array_equal(scaled, other)
    shared = lit(tint(make([[1.0, 1.0]]), BLACK, vmax=2.0))
    assert np.allclose(shared[:, 10:50], 0.5, atol=0.01)


def test_negative_and_not_finite_values_are_as_zero():
    np.testing.assert_array_equal(tint(make([[-5.0, np.nan, 1.0]])), tint(make([[0.0, 0.0, 1.0]])))


@pytest.mark.parametrize("top", [1e38, 1e-42], ids=["huge", "denormal"])
def test_any_float32_is_drawn(top):
    assert (tint(make(np.full((2, 2), top)))[:, 10:50] == 255).all()


def test_input_view_is_what_the_model_saw():
    picture = Image.new("RGB", (60, 40), (200, 100, 50))
    view = View((60, 40), (-20.0, 0.0, 20.0, 40.0), (32, 32))
    seen = np.asarray(overlay.seen(picture, view))
    assert seen.shape == (32, 32, 3)
    assert (seen[:, :15] == 0).all(), "the padding is black"
    assert (seen[:, 17:] == (200, 100, 50)).all()


def test_input_view_is_exact_without_resampling():
    view = View((60, 40), (10, 4, 42, 36), (32, 32))
    np.testing.assert_array_equal(np.asarray(overlay.seen(NOISE, view)), np.asarray(NOISE)[4:36, 10:42])
    found = lit(tint(one_hot(2, 1), BLACK, view, where="input"))
    np.testing.assert_allclose(found, np.outer(hat(32, 4, 2), hat(32, 4, 1)), atol=0.02)


TROUBLE = {
    MapStatus.BLANK: "blank: all values are zero",
    MapStatus.NEGATIVE_ONLY: "negative only: no value above zero (-2 .. 0)",
    MapStatus.ZERO_GRADIENT: "zero gradient: the score does not depend on this layer",
    MapStatus.NON_FINITE: "non-finite: 0 of 2 values",
    MapStatus.UNDEFINED: "undefined: gradcam gives no map here",
}


@pytest.mark.parametrize("status", TROUBLE, ids=str)
def test_trouble_is_written_on_both_pictures_and_nothing_is_tinted(status, monkeypatch):
    map_ = make([[-2.0, 0.0]], status)
    assert heat.trouble(map_) == TROUBLE[status]
    picture = Image.new("RGB", (400, 300), (90, 120, 150))
    view = View((400, 300), (50, 0, 350, 300), (224, 224))
    drawn = tint(map_, picture, view)
    assert (drawn[60:] == (90, 120, 150)).all()
    label = drawn[:60]
    assert (label == 24).all(axis=-1).any(), "a dark plate"
    assert (label == 255).all(axis=-1).any(), "with white letters"
    heads = []
    compose = sheet.compose
    monkeypatch.setattr(sheet, "compose", lambda head, *rest: heads.append(head) or compose(head, *rest))
    heat.draw(map_, title="", cmap="viridis", size=(40, 20))
    assert TROUBLE[status] in heads[0].lines


NAN = float("nan")
PROBED = {
    # As a probe hands them over: the values after their ReLU, the range of a negative map before it.
    MapStatus.BLANK: ([[0, 0]], (0.0, 0.0), ("values 0 .. 0", "blank: all values are zero")),
    MapStatus.NEGATIVE_ONLY: ([[0, 0]], (-2.5, -0.0), ("negative only: no value above zero (-2.5 .. 0)",)),
    MapStatus.ZERO_GRADIENT: (
        [[0, 0]],
        (0.0, 0.0),
        ("values 0 .. 0", "zero gradient: the score does not depend on this layer"),
    ),
    MapStatus.NON_FINITE: ([[NAN, NAN]], (NAN, NAN), ("non-finite: 2 of 2 values",)),
    MapStatus.UNDEFINED: ([[NAN, NAN]], (NAN, NAN), ("undefined: gradcam gives no map here",)),
    MapStatus.OK: ([[0, 2]], (0.0, 2.0), ("values 0 .. 2",)),
}


@pytest.mark.parametrize("status", PROBED, ids=str)
def test_words_for_what_a_probe_hands_over(status, monkeypatch):
    values, (low, high), lines = PROBED[status]
    map_ = Heat("gradcam", 0, Site("conv"), "gradcam", np.array(values, np.float32), low, high, status)
    heads, labels = [], []
    compose = sheet.compose
    monkeypatch.setattr(sheet, "compose", lambda head, *rest: heads.append(head) or compose(head, *rest))
    heat.draw(map_, title="cat.png", cmap="viridis", size=(40, 20))
    assert heads[0].lines == ("cat.png", "gradcam · 1 × 2", *lines)
    assert heads[0].high == ("2" if status is MapStatus.OK else "no positive value")
    monkeypatch.setattr(overlay, "_labelled", lambda picture, words: labels.append(words) or picture)
    tint(map_)
    assert labels == list(lines[-1:] if status is not MapStatus.OK else [])


def test_label_on_a_tiny_picture_keeps_its_size():
    view = View((20, 16), (0, 0, 20, 16), (32, 32))
    assert tint(make([[0.0]], MapStatus.BLANK), Image.new("RGB", (20, 16)), view).shape == (16, 20, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"where": "crop"}, "'crop'"), ({"alpha": 1.5}, "alpha 1.5"), ({"cmap": "jett"}, "'jett'")],
    ids=["where", "alpha", "cmap"],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        tint(make([[1.0]]), **options)


def test_the_picture_is_not_changed():
    before = NOISE.tobytes()
    tint(make([[1.0]]))
    assert NOISE.tobytes() == before


def shown(map_, size, **options):
    """The palette indices of the map itself."""
    codes = np.asarray(heat.draw(map_, title="cat.png", cmap="viridis", size=size, **options))
    return codes[-10 - size[1] : -10, 10 : 10 + size[0]]


def test_heat_is_bilinear_from_zero_to_the_maximum():
    codes = shown(one_hot(1, 2), (40, 24))
    share = np.outer(hat(24, 4, 1), hat(40, 4, 2))
    np.testing.assert_allclose(codes, sheet.FIRST + share * (255 - sheet.FIRST), atol=1)


def test_heat_keeps_a_uniform_map_and_a_shared_scale():
    assert set(shown(make(np.full((2, 2), 3.0)), (8, 8)).ravel()) == {255}
    assert shown(make(np.full((2, 2), 3.0)), (8, 8), vmax=6.0).max() == pytest.approx((255 + 16) / 2, abs=1)


def test_heat_marks_what_is_not_finite():
    codes = shown(make([[1.0, np.nan]], MapStatus.NON_FINITE), (20, 10))
    assert (codes[:, 10:] == sheet.NOT_FINITE).all()
    assert not (codes[:, :10] == sheet.NOT_FINITE).any()


def test_heat_head_names_method_target_and_range(monkeypatch):
    heads = []
    compose = sheet.compose
    monkeypatch.setattr(sheet, "compose", lambda head, *rest: heads.append(head) or compose(head, *rest))
    target = Target("top1", 285, "Egyptian cat", 9.0, 0.717)
    heat.draw(make([[0.5, 2.0]], target=target), title="cat.png", cmap="magma", size=(8, 8))
    assert heads[0].lines == ("cat.png", "gradcam · 1 × 2 · Egyptian cat (285) 71.7%", "values 0.5 .. 2")
    assert (heads[0].low, heads[0].high) == ("0", "2")
