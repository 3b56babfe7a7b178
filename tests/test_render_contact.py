"""Contact sheets: every map in its row and column, on its place of the picture, with its range underneath."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from hookscope.artifacts import Heat, MapStatus, Target
from hookscope.images import View
from hookscope.layers import Site
from hookscope.render import colour, contact, overlay, panels, text
from hookscope.render.contact import Cell

BLUE = (20, 60, 200)
PICTURE = Image.new("RGB", (448, 224), BLUE)
VIEW = overlay.whole((448, 224))
CAT, DOG = Target("top1", 285, "cat", 1.0, 0.75), Target("top2", 207, "dog", 0.5, 0.2)
MARGIN, GAP = panels.MARGIN_PX, 6
WIDTH, HEIGHT = 224, 112


def make(values, layer="layer4", method="gradcam", target=CAT, status=MapStatus.OK, **changes):
    values = np.asarray(values, np.float32)
    finite = values[np.isfinite(values)]
    ends = (float(finite.min()), float(finite.max())) if finite.size else (np.nan, np.nan)
    return Heat("gradcam", 0, Site(layer), method, values, *ends, status, target, **changes)


def draw(heats, picture=PICTURE, view=VIEW, *, cmap="gray", alpha=1.0, title="", **options):
    cells = [Cell(heat, cmap) for heat in heats]
    return np.asarray(
        contact.draw(cells, picture, view, title=title, alpha=alpha, **options), dtype=np.uint8
    ).astype(int)


def at(drawn, row, column, caption=1):
    """The pixels of a cell; row -1, column -1 is the picture."""
    pitch = HEIGHT + caption * text.line_height(panels.SMALL_PX) + GAP
    left = MARGIN + (column + 1) * (WIDTH + GAP)
    top = MARGIN + (HEIGHT + GAP + row * pitch if row >= 0 else 0)
    return drawn[top : top + HEIGHT, left : left + WIDTH]


@pytest.fixture
def said(monkeypatch):
    """All that is written on a sheet."""
    found = []
    words = panels.words

    def note(text, *rest, **options):
        found.append(text)
        return words(text, *rest, **options)

    monkeypatch.setattr(panels, "words", note)
    return found


def test_rows_are_layers_and_methods_and_columns_targets():
    levels = {("a", "m1", CAT): 4, ("a", "m1", DOG): 3, ("a", "m2", CAT): 2, ("b", "m1", DOG): 1}
    heats = [
        make([[level]], layer, method, target, vmax=4.0) for (layer, method, target), level in levels.items()
    ]
    drawn = draw(heats)
    for row, column, level in [(0, 0, 4), (0, 1, 3), (1, 0, 2), (2, 1, 1)]:
        grey = round(level / 4 * 255)
        weight = overlay.FLOOR + (1 - overlay.FLOOR) * level / 4
        expected = (1 - weight) * np.array(BLUE) + weight * grey
        np.testing.assert_allclose(
            at(drawn, row, column), np.broadcast_to(expected, (HEIGHT, WIDTH, 3)), atol=2
        )
    for row, column in [(1, 1), (2, 0)]:
        assert (at(drawn, row, column) == 255).all(), "what no map has is empty"
    assert (at(drawn, -1, -1) == BLUE).all(), "the picture itself"


def test_a_map_lies_in_its_crop():
    view = View((448, 224), (112.0, 0.0, 336.0, 224.0), (32, 32))
    cell = at(draw([make(np.ones((7, 7)))], view=view), 0, 0)
    assert (cell[:, 56:168] == 255).all()
    assert (cell[:, :56] == BLUE).all()
    assert (cell[:, 168:] == BLUE).all()


def test_input_view_shows_the_crop_alone():
    halves = PICTURE.copy()
    halves.paste((0, 0, 0), (0, 0, 112, 224))
    halves.paste((0, 0, 0), (336, 0, 448, 224))
    view = View((448, 224), (112.0, 0.0, 336.0, 224.0), (224, 224))
    drawn = draw([make([[1.0]])], halves, view, alpha=0.0, where="input")
    assert (drawn[MARGIN : MARGIN + 224, MARGIN : MARGIN + 224] == BLUE).all()


def test_a_map_with_a_fault_is_not_tinted_and_says_so(said):
    heats = [make([[0.0]], status=MapStatus.BLANK), make([[2.0]], target=DOG)]
    drawn = draw(heats)
    assert (at(drawn, 0, 0)[60:] == BLUE).all()
    assert (at(drawn, 0, 0)[:40] == 24).all(axis=-1).any()
    assert (at(drawn, 0, 1) == 255).all()
    assert "blank" in said


def test_what_is_written(said):
    odd = make([[np.nan]], status=MapStatus.NON_FINITE, method="layercam", target=Target("norm"))
    draw([make([[0.25, 0.5]]), odd], title="photos/cat.png", note="RANDOM WEIGHTS")
    assert {
        "photos/cat.png", "RANDOM WEIGHTS", "1 layer · 2 methods · 2 targets", "cat (285) 75.0%", "norm", "layer4",
        "gradcam", "layercam", "0.25 .. 0.5", "non-finite", "0", "each map's own maximum",
    } <= set(said)  # fmt: skip


@pytest.mark.parametrize(
    ("heats", "expected"),
    [
        ([make([[1.0]], vmax=4.0), make([[4.0]], target=DOG, vmax=4.0)], {"1 .. 1 of 4", "4 .. 4", "4"}),
        ([make([[1.0]], vmax=4.0), make([[1.0]], target=DOG, vmax=2.0)], {"1 .. 1 of 4", "1 .. 1 of 2"}),
        ([make([[-1.0, 0.5]], signed=True)], {"against", "for: each map's own greatest magnitude"}),
        ([make([[-1.0, 0.5]], signed=True, vmax=3.0)], {"-3", "3", "-1 .. 0.5 of 3"}),
    ],
    ids=["one-scale", "two-scales", "signed", "signed-scale"],
)
def test_scales_are_said(said, heats, expected):
    draw(heats)
    assert expected <= set(said)


def test_signed_cells_have_their_colours():
    drawn = draw([make([[-1.0]], signed=True)], cmap="RdBu_r")
    assert (at(drawn, 0, 0) == colour.table("RdBu_r")[0]).all()


def test_long_labels_are_cut_and_keep_the_rows_apart(said):
    label = "a very long label " * 20
    heats = [make([[1.0]], "block." * 60 + str(n), target=Target("t", 1, label), vmax=1.0) for n in range(2)]
    drawn = draw(heats)
    plain = draw([make([[1.0]], f"l{n}", vmax=1.0) for n in range(2)], title="")
    assert drawn.shape[1] == plain.shape[1]
    assert any(said_.startswith("block.") for said_ in said)
    # The last row ends the sheet: caption, gap, margin.
    foot = text.line_height(panels.SMALL_PX) + GAP + MARGIN
    assert (drawn[-foot - HEIGHT : -foot, -MARGIN - WIDTH : -MARGIN] == 255).all()


def test_a_missing_target_and_none_are_columns_too(said):
    lacking = Target("box1", missing="no box above 0.5")
    heats = [make([[np.nan]], target=lacking, status=MapStatus.UNDEFINED), make([[1.0]], target=None)]
    drawn = draw(heats)
    assert "undefined" in said
    assert "box1" in said
    assert (at(drawn, 0, 1) == 255).all()


def test_many_maps_are_smaller_and_still_one_picture():
    heats = [
        make([[1.0]], f"l{layer}", f"m{method}", Target("t", n))
        for layer in range(6) for method in range(13) for n in range(5)
    ]  # fmt: skip
    page = contact.draw([Cell(heat, "gray") for heat in heats], PICTURE, VIEW, title="", alpha=0.5)
    assert max(page.size) < 16_000
    assert page.width * page.height < 8_000_000
    assert contact._side(78, 5) >= contact.LEAST_SIDE_PX
    assert contact._side(1, 1) == contact.MOST_SIDE_PX


def test_a_sheet_beyond_what_a_format_holds_is_reduced(monkeypatch):
    monkeypatch.setattr(contact, "_MOST_PX", 300)
    assert max(draw([make([[1.0]])]).shape) == 300


@pytest.mark.parametrize("size", [(3, 900), (900, 3), (20, 16), (1, 1)], ids=str)
def test_pictures_of_any_shape(size):
    picture = Image.new("RGB", size, BLUE)
    assert draw([make([[1.0]])], picture, overlay.whole(size), title="x" * 300).shape[2] == 3


def test_no_map_at_all():
    assert (draw([])[MARGIN + 40, MARGIN + 40] == BLUE).all()
