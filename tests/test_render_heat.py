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


def signed(values, status=MapStatus.OK, **changes):
    return make(values, status, signed=True, **changes)


def headed(monkeypatch, map_, **options):
    """The head that a heat map carries."""
    heads = []
    compose = sheet.compose
    monkeypatch.setattr(sheet, "compose", lambda head, *rest: heads.append(head) or compose(head, *rest))
    heat.draw(map_, title="", cmap="viridis", size=(40, 20), **options)
    return heads[0]


SPAN = 255 - sheet.FIRST


@pytest.mark.parametrize(
    ("values", "vmax", "expected"),
    [
        ([[-2, 0, 1]], None, (0, 0.5, 0.75)),
        ([[-1, 0, 4]], None, (0.375, 0.5, 1)),
        ([[-8, 2, 8]], 4.0, (0, 0.75, 1)),
        ([[0, 0, 0]], None, (0.5, 0.5, 0.5)),
    ],
    ids=["negative-is-greater", "positive-is-greater", "vmax", "zeros"],
)
def test_signed_heat_has_zero_in_the_middle(values, vmax, expected):
    codes = shown(signed(values), (3, 1), vmax=vmax)
    np.testing.assert_allclose(
        (codes[0].astype(float) - sheet.FIRST) / SPAN, expected, atol=0.5 / SPAN + 1e-6
    )


def test_signed_bar_has_numbers_at_both_ends(monkeypatch):
    head = headed(monkeypatch, signed([[-2.5, 1.0]]))
    assert (head.low, head.high) == ("-2.5", "2.5")
    assert "values -2.5 .. 1" in head.lines


@pytest.mark.parametrize(("value", "index"), [(-2.0, 64), (2.0, 191), (4.0, 255), (-4.0, 0)])
def test_signed_blend_follows_the_magnitude(value, index):
    drawn = tint(signed(np.full((3, 3), value)), alpha=0.5, cmap="RdBu_r", vmax=4.0)
    weight = 0.5 * (overlay.FLOOR + (1 - overlay.FLOOR) * abs(value) / 4)
    expected = (1 - weight) * np.asarray(NOISE).astype(float) + weight * colour.table("RdBu_r")[index]
    np.testing.assert_allclose(drawn[:, 10:50], expected[:, 10:50], atol=2.5)


def test_signed_map_of_negative_values_is_tinted_and_said_so():
    picture, view = Image.new("RGB", (400, 300)), overlay.whole((400, 300))
    drawn = tint(signed([[-1.0]], MapStatus.NEGATIVE_ONLY), picture, view, cmap="RdBu_r")
    assert (drawn[100:] == colour.table("RdBu_r")[0]).all()
    assert (drawn[:20] == 24).all(axis=-1).any(), "the label's plate"


def test_a_map_that_carries_its_scale_is_drawn_on_it():
    found = lit(tint(make([[1.0]], vmax=2.0), BLACK))
    np.testing.assert_allclose(found[:, 10:50], 0.5, atol=0.01)
    codes = shown(make([[1.0]], vmax=2.0), (4, 4))
    assert codes.max() == pytest.approx((255 + sheet.FIRST) / 2, abs=1)
    assert shown(make([[1.0]], vmax=2.0), (4, 4), vmax=1.0).min() == 255, "what is asked for comes first"


@pytest.mark.parametrize("covers", [(1.0, 0.6), (0.5, 1.0), (0.55, 0.8)], ids=str)
def test_only_the_covered_part_lies_on_the_picture(covers):
    # A share of the map over the whole picture is the whole map over a picture larger by as much.
    down, across = hat(40, 4, 1, 0, 40 / covers[0]), hat(60, 4, 2, 0, 60 / covers[1])
    map_ = make(one_hot(1, 2).values, covers=covers)
    found = lit(tint(map_, BLACK, overlay.whole((60, 40))))
    np.testing.assert_allclose(found, np.outer(down, across), atol=0.02)
    codes = shown(map_, (60, 40))
    np.testing.assert_allclose((codes.astype(float) - sheet.FIRST) / SPAN, np.outer(down, across), atol=0.02)


def test_padding_is_said_and_its_broken_values_are_not_drawn(monkeypatch):
    map_ = make([[1.0, np.nan]], MapStatus.NON_FINITE, covers=(1.0, 0.5))
    assert not (shown(map_, (20, 10)) == sheet.NOT_FINITE).any()
    lines = headed(monkeypatch, map_).lines
    assert "drawn: 100% of its height, 50% of its width; the rest is padding" in lines


GREY = Image.new("RGB", (900, 600), (90, 120, 150))
DOG = Target("box1", 18, "dog", 0.9, 0.934, box=(8.0, 16.0, 24.0, 28.0))
# 18.75 pixels of the picture to one of the input.
WIDE = View((900, 600), (150.0, 0.0, 750.0, 600.0), (32, 32))


def test_box_is_placed_in_the_original():
    assert overlay.placed(DOG.box, WIDE) == (300.0, 300.0, 600.0, 525.0)


def test_box_is_outlined_light_between_dark():
    drawn = tint(make(np.zeros((2, 2)), target=DOG), GREY, WIDE, alpha=0.0)
    for line in (drawn[400, 300:304], drawn[400, 599:595:-1], drawn[300:304, 580], drawn[524:520:-1, 450]):
        assert line[:, 0].tolist() == [24, 255, 255, 24]
    for rest in (drawn[304:521, 304:596], drawn[525:], drawn[:, :300], drawn[:, 600:], drawn[:250]):
        assert (rest == (90, 120, 150)).all(), "nothing inside, nothing around"
    assert (drawn[299, 300:310] == 24).all(), "the label stands on the box"


def test_box_is_named_with_its_probability(monkeypatch):
    said = []
    plate = overlay._plate
    monkeypatch.setattr(overlay, "_plate", lambda words, room: said.append(words) or plate(words, room))
    tint(make([[1.0]], target=DOG), GREY, WIDE)
    assert said == ["dog 93.4%"]


@pytest.mark.parametrize(
    "box",
    [(-99, -99, 999, 999), (30, 30, 33, 33), (8, 8, 8.01, 20), (20, 20, 20.1, 20.1), (0, 0, 1, 1)],
    ids=["all-round", "corner", "no-width", "dot", "top-left"],
)
def test_any_box_is_clipped_to_the_picture(box):
    drawn = tint(make([[1.0]], target=Target("box1", 1, "x", box=box)), GREY, WIDE)
    assert drawn.shape == (600, 900, 3)
    assert shown(make([[1.0]], target=Target("b", 1, box=box)), (64, 64), input_size=(32, 32)).shape == (
        64,
        64,
    )


def test_box_beside_the_picture_is_not_drawn():
    away = Target("box1", 1, "x", box=(100, 100, 120, 120))
    plain = tint(make([[1.0]]), GREY, WIDE)
    np.testing.assert_array_equal(tint(make([[1.0]], target=away), GREY, WIDE), plain)


def test_heat_has_a_thin_box():
    codes = shown(make(np.ones((2, 2)), target=DOG), (64, 96), input_size=(32, 32))
    ink, paper = sheet.GREYS - 1, 0
    assert codes[60, 14:20].tolist() == [255, 255, ink, paper, 255, 255]
    assert codes[60, 44:50].tolist() == [255, 255, paper, ink, 255, 255]
    assert codes[46:52, 32].tolist() == [255, 255, ink, paper, 255, 255]
    assert codes[81:86, 32].tolist() == [255, paper, ink, 255, 255]
    assert set(shown(make(np.ones((2, 2)), target=DOG), (64, 96)).ravel()) == {255}, "input size not known"


def test_a_target_that_a_picture_lacks_is_said_with_its_reason(monkeypatch):
    lacking = Target("box1", missing="no box above 0.5")
    map_ = make(np.zeros((2, 2)), MapStatus.UNDEFINED, target=lacking)
    assert heat.trouble(map_) == "undefined: no box above 0.5"
    drawn = tint(map_, GREY, WIDE)
    assert (drawn[60:] == (90, 120, 150)).all()
    assert (drawn[:60] == 24).all(axis=-1).any()
    assert len(set(shown(map_, (8, 8)).ravel())) == 1, "one grey, and no colour of the table"
    assert shown(map_, (8, 8)).max() < sheet.GREYS
    assert headed(monkeypatch, map_).lines[0] == "gradcam · 2 × 2 · box1"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target("top1", 285, "Egyptian cat"), "Egyptian cat (285)"),
        (Target("7", 7, probability=0.5), "class 7 50.0%"),
        (Target("norm"), "norm"),
        (Target("similar-to cat.png", label="similar to cat.png"), "similar to cat.png"),
        (Target("285", 285, "Egyptian cat", against=(281, 282)), "Egyptian cat (285) against 281, 282"),
        (Target("1", 1, "a", probability=0.25, against=(2,)), "a (1) against 2 · 25.0%"),
        (DOG, "box1: dog (18) 93.4%"),
        (Target("box2", missing="no second box"), "box2"),
    ],
    ids=["class", "no-label", "norm", "similar", "against", "against-probability", "box", "missing"],
)
def test_targets_in_words(target, words):
    assert heat.target_said(target) == words


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ("layer4.1:out", "layer4.1:out"),
        ("layer2+layer3", "layer2 + layer3"),
        ("+".join(f"b{n}" for n in range(40)), "b0 + b1 + … + b39 (40 layers)"),
    ],
    ids=["one", "two", "many"],
)
def test_layers_in_words(site, words):
    assert heat.layers_said(site) == words


def test_scores_are_one_short_line_of_the_head(monkeypatch):
    scores = {"deletion_auc": 0.12345, "insertion_auc": 0.9, "average_drop": 0.0, "own_score": 12.0}
    lines = headed(monkeypatch, make([[1.0]], scores=scores)).lines
    assert lines[-1] == "deletion 0.123 · insertion 0.9 · drop 0 · own score 12"
