"""Grids: every value in its colour and place, and a head that is never cut."""

from __future__ import annotations

import numpy as np
import pytest

from hookscope.artifacts import Tiles
from hookscope.errors import UsageError
from hookscope.layers import Site
from hookscope.render import grid, sheet


def make(values, **changes):
    values = np.asarray(values, dtype=np.float32)
    finite = values[np.isfinite(values)]
    given = {
        "image": 0,
        "site": Site("layer1.0.conv1"),
        "type": "Conv2d",
        "shape": values.shape,
        "layout": "NCHW",
        "channels": tuple(range(len(values))),
        "total_channels": len(values),
        "selection": "all",
        "values": values,
        "minimum": float(finite.min()) if finite.size else 0.0,
        "maximum": float(finite.max()) if finite.size else 0.0,
    }
    return Tiles(**{**given, **changes})


def said(monkeypatch, tiles, **options):
    """The head that a drawing carries."""
    heads = []
    compose = sheet.compose
    monkeypatch.setattr(sheet, "compose", lambda head, *rest: heads.append(head) or compose(head, *rest))
    grid.draw(tiles, **options)
    return heads[0]


def body(picture, tiles, columns):
    """The palette indices of each tile, at the values' own resolution."""
    count, height, width = tiles.values.shape
    layout = grid._layout(tiles.values.shape, columns, tiles.channels)
    cell = (layout.tile[0] + layout.strip + 2, layout.tile[1] + 2)
    codes = np.asarray(picture)
    top = codes.shape[0] - 10 - layout.rows * cell[0]
    found = []
    for index in range(count):
        row, column = divmod(index, layout.columns)
        y, x = top + row * cell[0] + layout.strip, 10 + column * cell[1]
        tile = codes[y : y + layout.tile[0], x : x + layout.tile[1]]
        blocks = tile.reshape(height, layout.scale, width, layout.scale)
        assert (blocks == blocks[:, :1, :, :1]).all(), "each value is one square"
        found.append(blocks[:, 0, :, 0])
    return np.stack(found)


RAMP = np.arange(12, dtype=np.float32).reshape(3, 2, 2)


def test_channel_scale_spans_each_channel():
    codes = body(grid.draw(make(RAMP), columns=2), make(RAMP), 2)
    step = (255 - sheet.FIRST) / 3
    expected = np.floor(sheet.FIRST + np.arange(4) * step + 0.5).reshape(2, 2)
    np.testing.assert_array_equal(codes, np.stack([expected] * 3))


def test_layer_scale_spans_the_whole_layer_not_the_chosen_channels():
    tiles = make(RAMP, minimum=-11.0, maximum=22.0)
    codes = body(grid.draw(tiles, columns=3, scale="layer"), tiles, 3)
    expected = np.floor(sheet.FIRST + (RAMP + 11) / 33 * (255 - sheet.FIRST) + 0.5)
    np.testing.assert_allclose(codes, expected, atol=1)
    assert codes.min() > sheet.FIRST
    assert codes.max() < 255


@pytest.mark.parametrize("scale", grid.SCALES)
@pytest.mark.parametrize(
    "ends",
    [(-3e38, 3e38), (0, 1e-44), (1000, 1000.001), (-1e-38, 1e-38), (0, 3.4e38)],
    ids=["widest", "denormal", "narrow-far-from-0", "tiny", "largest"],
)
def test_extreme_ranges_keep_both_ends(ends, scale):
    tiles = make([[[ends[0], ends[1]]]])
    codes = body(grid.draw(tiles, scale=scale), tiles, None)
    assert codes.ravel().tolist() == [sheet.FIRST, 255]


def test_not_finite_is_magenta_and_does_not_touch_the_scale(monkeypatch):
    values = np.array([[[0, np.nan, 1, np.inf, -np.inf]], [[np.nan] * 5]], np.float32)
    tiles = make(values)
    picture = grid.draw(tiles, columns=1)
    codes = body(picture, tiles, 1)
    odd = sheet.NOT_FINITE
    assert codes[0, 0].tolist() == [sheet.FIRST, odd, 255, odd, odd]
    assert set(codes[1].ravel()) == {odd}
    assert picture.getpalette()[3 * odd : 3 * odd + 3] == [255, 0, 255]
    assert "8 of 10 values are not finite (magenta)" in said(monkeypatch, tiles).lines


def test_constant_channel_is_flat_and_said_so(monkeypatch):
    values = np.stack([np.full((2, 2), 7.0), RAMP[0]])
    tiles = make(values)
    assert set(body(grid.draw(tiles), tiles, None)[0].ravel()) == {sheet.FIRST}
    assert "1 of 2 channels are constant (flat)" in said(monkeypatch, tiles).lines


def test_one_value_everywhere_is_said(monkeypatch):
    assert "every value is 0.25" in said(monkeypatch, make(np.full((2, 3, 3), 0.25))).lines


def test_head_says_layer_type_shape_channels_range_and_scale(monkeypatch):
    tiles = make(RAMP, selection="3 of 64 by variance", site=Site("a.b", call=1))
    head = said(monkeypatch, tiles, title="cat.png", scale="layer")
    assert head.heading == "a.b@1"
    assert head.lines[:3] == (
        "cat.png",
        "Conv2d · 3 × 2 × 2 (CHW) · channels: 3 of 64 by variance",
        "layer's values 0 .. 11",
    )
    assert (head.low, head.high) == ("whole layer: 0", "11")


@pytest.mark.parametrize("count", [1, 3], ids=["one", "three"])
def test_a_long_head_is_wrapped_not_cut(count):
    name = "features." + ".".join(["denseblock"] * 20)
    short, long = (grid.draw(make(np.ones((count, 1, 1)), site=Site(site))) for site in ("features", name))
    assert long.width == short.width
    assert long.height > short.height
    margin = np.asarray(long)[:, -10:]
    assert not margin.any(), "nothing reaches the right margin"


def test_tiles_are_numbered_by_channel():
    plain, numbered = (
        np.asarray(grid.draw(make(np.zeros((2, 4, 4)), channels=channels), columns=2))
        for channels in ((0, 1), (0, 4))
    )
    rows, columns = np.nonzero(plain != numbered)
    assert len(rows), "the second number differs"
    assert rows.max() - rows.min() < 12, "only inside one strip"
    assert columns.max() - columns.min() < 12, "only in one number"


def test_no_room_no_numbers():
    assert grid._layout((1, 90000, 1), None, (1234,)).strip == 0
    assert grid._layout((1, 9, 9), None, (1234,)).strip > 0


def test_small_maps_are_enlarged():
    assert grid._layout((2048, 7, 7), None, tuple(range(2048))).tile == (35, 35)
    assert grid._layout((64, 112, 112), None, tuple(range(64))).scale == 1


@pytest.mark.parametrize("count", [1, 2, 17, 64, 2048])
def test_default_layout_is_near_16_to_10(count):
    layout = grid._layout((count, 14, 14), None, tuple(range(count)))
    assert layout.rows * layout.columns >= count
    assert (layout.rows - 1) * layout.columns < count
    if count >= 17:
        width = layout.columns * (layout.tile[1] + 2)
        assert 1.2 < width / (layout.rows * (layout.tile[0] + layout.strip + 2)) < 2.1


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3)], ids=["no-channels", "no-pixels"])
def test_nothing_to_draw_is_said(monkeypatch, shape):
    assert "no channels to draw" in said(monkeypatch, make(np.zeros(shape))).lines


@pytest.mark.parametrize(
    ("options", "message"),
    [({"scale": "both"}, "no scale is called 'both'"), ({"columns": 0}, "0 columns"), ({"cmap": "x"}, "'x'")],
    ids=["scale", "columns", "cmap"],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        grid.draw(make(RAMP), **options)


def test_values_are_not_changed():
    tiles = make(RAMP.copy())
    grid.draw(tiles)
    np.testing.assert_array_equal(tiles.values, RAMP)
