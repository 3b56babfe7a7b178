"""Writers: which files an artefact becomes, what they hold when read again, and their records."""

from __future__ import annotations

import hashlib
import io
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from hookscope.artifacts import Heat, MapStatus, Pair, Sheet, Table, Target, Tiles
from hookscope.errors import UsageError
from hookscope.images import View
from hookscope.layers import Site
from hookscope.output import encode, writers
from hookscope.output.directory import OutputDir
from hookscope.output.writers import PictureOptions, Place
from hookscope.render import colour, text

CAT = Target("top1", 285, "Egyptian cat")
PICTURE = Image.new("RGB", (60, 40), (90, 120, 150))
VIEW = View((60, 40), (10, 0, 50, 40), (32, 32))
ENDS = (".overlay.jpg", ".heat.png", ".npy")
PLACE = Place("cat", "photos/cat.png", PICTURE, VIEW)


@pytest.fixture
def out(tmp_path):
    made = OutputDir(tmp_path / "out", command="gradcam")
    made.begin()
    return made


def tiles(**changes):
    values = np.random.default_rng(0).normal(size=(2, 3, 3)).astype(np.float32)
    given = {"site": Site("layer1.0", 1), "channels": (3, 4), "values": values, "selection": "2 of 8"}
    return Tiles(
        **{
            "image": 0, "type": "Conv2d", "shape": (8, 3, 3), "layout": "NCHW", "total_channels": 8,
            "minimum": float(values.min()), "maximum": float(values.max()), **given, **changes,
        }
    )  # fmt: skip


def heat(**changes):
    values = np.array([[0, 1], [2, 4]], np.float32)
    given = Heat("gradcam", 0, Site("features.18"), "gradcam++", values, 0.0, 4.0, target=CAT)
    return replace(given, **changes)


def write(out, artefact, place, options):
    return writers.prepared(out, artefact, place, options)()


def read(path):
    """The picture's pixels and mode, the file closed again."""
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(int), picture.mode


def test_tiles_are_a_grid(out):
    (record,) = write(out, tiles(), PLACE, PictureOptions())
    assert record["path"] == "cat/layer1.0@1.png"
    assert read(out.path / record["path"])[1] == "P"
    expected = {
        "kind": "featuremaps", "image": "photos/cat.png", "layer": "layer1.0", "call": 1, "output": "",
        "method": None, "target": None, "status": "ok", "part": "grid", "format": "png",
        "channels": "3-4", "selection": "2 of 8",
    }  # fmt: skip
    assert expected.items() <= record.items()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)], ids=["plain", "strided"])
def test_raw_tiles_read_back_exactly(out, order):
    given = tiles(values=tiles().values.transpose(order))
    record = write(out, given, PLACE, PictureOptions(raw=True))[1]
    assert (record["path"], record["part"]) == ("cat/layer1.0@1.safetensors", "raw")
    with safe_open(out.path / record["path"], "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("layer1.0@1"), given.values)
        assert file.metadata() == {"channels": "3-4"}


def test_heat_is_an_overlay_a_map_and_raw_values(out):
    records = write(out, heat(), PLACE, PictureOptions())
    assert [(record["path"], record["part"]) for record in records] == [
        ("cat/features.18.gradcam++.285-Egyptian-cat.overlay.jpg", "overlay"),
        ("cat/features.18.gradcam++.285-Egyptian-cat.heat.png", "heatmap"),
        ("cat/features.18.gradcam++.285-Egyptian-cat.npy", "raw"),
    ]
    raw = np.load(out.path / records[2]["path"])
    assert raw.dtype == np.float32
    np.testing.assert_array_equal(raw, heat().values)
    overlaid = read(out.path / records[0]["path"])[0]
    assert overlaid.shape == (40, 60, 3)
    np.testing.assert_allclose(overlaid[:, :8], [[[90, 120, 150]] * 8] * 40, atol=4)
    for record in records:
        data = (out.path / record["path"]).read_bytes()
        assert record["sha256"] == hashlib.sha256(data).hexdigest()
        assert (record["min"], record["max"], record["target"], record["label"]) == (
            0,
            4,
            285,
            "Egyptian cat",
        )


def test_heat_without_picture_or_target(out):
    records = write(out, heat(target=None), Place(), PictureOptions())
    assert [record["path"] for record in records] == [
        "features.18.gradcam++.heat.png",
        "features.18.gradcam++.npy",
    ]
    assert {record["target"] for record in records} == {None}


def test_input_view_and_formats(out):
    options = PictureOptions(view="input", overlay_format="png", heat_format="webp")
    records = write(out, heat(), PLACE, options)
    assert [record["format"] for record in records] == ["png", "webp", "npy"]
    assert read(out.path / records[0]["path"])[0].shape == (32, 32, 3)


def test_status_goes_into_every_record(out):
    records = write(out, heat(status=MapStatus.BLANK), PLACE, PictureOptions())
    assert {record["status"] for record in records} == {"blank"}


def test_hostile_names_stay_inside(out):
    drawn = heat(site=Site("../../etc"), target=Target("t", 1, "a/b: \u202e../"))
    for record in write(out, drawn, PLACE, PictureOptions()):
        assert record["path"].startswith("cat/")
        assert record["path"].count("/") == 1
        assert record["layer"] == "../../etc"


def test_table_in_each_format(out):
    made = Table("gradnorm", "Norms", ("layer", "norm"), (("a", 0.5),))
    records = writers.write_table(out, made, formats=("csv", "md", "json"))
    assert [record["path"] for record in records] == ["gradnorm.csv", "gradnorm.md", "gradnorm.json"]
    assert (out.path / "gradnorm.csv").read_bytes() == b"layer,norm\na,0.5\n"
    assert json.loads((out.path / "gradnorm.json").read_text())["rows"] == [{"layer": "a", "norm": 0.5}]


@pytest.mark.parametrize(
    ("artefact", "count"),
    [(tiles(), 1), (heat(), 3)],
    ids=["tiles", "heat"],
)
def test_every_kind_has_a_plan(out, artefact, count):
    assert len(write(out, artefact, PLACE, PictureOptions())) == count


def test_names_follow_the_calls_and_not_the_threads(tmp_path):
    layers = [name for n in range(6) for name in (f"conv{n}", f"Conv{n}", f"CONV{n}")]
    tails = ("", "-2", "-3")
    expected = {
        layer: {f"cat/{layer}.gradcam++.285-Egyptian-cat{tails[place % 3]}{end}" for end in ENDS}
        for place, layer in enumerate(layers)
    }
    for attempt in range(6):
        made = OutputDir(tmp_path / f"{attempt}", command="gradcam")
        made.begin()
        jobs = [writers.prepared(made, heat(site=Site(layer)), PLACE, PictureOptions()) for layer in layers]
        random.Random(attempt).shuffle(jobs)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda job: job(), jobs))
        found = {layer: set() for layer in layers}
        for record in made.records:
            found[record["layer"]].add(record["path"])
        assert found == expected


@pytest.mark.parametrize("kind", encode.FORMATS)
def test_pictures_read_back(kind):
    picture = Image.effect_noise((40, 30), 5).convert("P")
    data = encode.picture(picture, kind)
    assert data == encode.picture(picture, kind), "the same bytes each time"
    found = read(io.BytesIO(data))[0]
    np.testing.assert_allclose(
        found, np.asarray(picture.convert("RGB")).astype(int), atol=16 if kind == "jpg" else 0
    )


def test_unknown_picture_format():
    with pytest.raises(UsageError, match="'jpgg'") as caught:
        encode.picture(PICTURE, "jpgg")
    assert caught.value.hint == "did you mean 'jpg'?"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target("top1", 285, "Egyptian cat"), "285-Egyptian-cat"),
        (Target("7", 7), "7"),
        (Target("norm"), "norm"),
        (Target("similar-to a/cat.png", label="similar to cat.png"), "similar-to-a_cat.png"),
        (Target("box1", 17, "cat", box=(0, 0, 1, 1)), "box1-17-cat"),
        (Target("box2", 17, "cat", box=(0, 0, 1, 1)), "box2-17-cat"),
        (Target("box3", missing="no third box"), "box3"),
        (Target("285", 285, "Egyptian cat", against=(281, 282)), "285-Egyptian-cat.vs-281-282"),
    ],
    ids=["class", "no-label", "norm", "similar", "box1", "box2", "missing", "against"],
)
def test_targets_in_file_names(out, target, expected):
    records = write(out, heat(target=target), PLACE, PictureOptions())
    assert records[-1]["path"] == f"cat/features.18.gradcam++.{expected}.npy"


def test_the_longest_names_fit_any_file_system(out):
    target = Target("box1" * 30, 17, "c" * 300, box=(0, 0, 1, 1), against=tuple(range(200)))
    sites = [Site("+".join(f"blocks.{n}.norm1" for n in range(100)) + end) for end in ("", "x")]
    names = {
        record["path"].rpartition("/")[2]
        for site in sites
        for record in write(out, heat(site=site, method="m" * 80, target=target), PLACE, PictureOptions())
    }
    assert len(names) == 6
    assert max(len(name.encode()) for name in names) < 255
    assert not [name for name in names if "-2." in name], "told apart by more than the order"


def test_heat_records_what_was_asked(out):
    target = Target("285", 285, "Egyptian cat", against=(281, 282))
    record = write(out, heat(target=target, scores={"deletion_auc": 0.25}), PLACE, PictureOptions())[0]
    assert {
        "target": 285,
        "asked": "285",
        "label": "Egyptian cat",
        "against": [281, 282],
    }.items() <= record.items()
    assert record["scores"] == {"deletion_auc": 0.25}
    assert "box" not in record


def test_a_target_without_class_is_recorded_by_its_name(out):
    record = write(out, heat(target=Target("similar-to cat.png")), PLACE, PictureOptions())[0]
    assert (record["target"], record["asked"], record["label"]) == (
        "similar-to cat.png",
        "similar-to cat.png",
        "",
    )
    assert "against" not in record
    assert record["scores"] == {}


def test_boxes_are_recorded_in_the_original_picture(out):
    target = Target("box1", 17, "cat", box=(1.0, 2.0, 16.0, 32.0))
    records = write(out, heat(target=target), PLACE, PictureOptions())
    # The view is 40 pixels for 32 of the input, from (10, 0).
    assert {tuple(record["box"]) for record in records} == {(11.25, 2.5, 30.0, 40.0)}


def test_vmax_reaches_both_pictures(out):
    for vmax, expected in [(8.0, 0.5), (4.0, 1.0)]:
        options = PictureOptions(cmap="gray", alpha=1.0, overlay_format="png")
        drawn = heat(vmax=vmax, values=np.full((2, 2), 4, np.float32), target=Target("t", int(vmax)))
        records = write(out, drawn, PLACE, options)
        over, map_ = (read(out.path / record["path"])[0] for record in records[:2])
        weight = 0.3 + 0.7 * expected
        np.testing.assert_allclose(over[20, 30, 0], (1 - weight) * 90 + weight * 255 * expected, atol=2)
        assert map_[-20, 40, 0] == pytest.approx(255 * expected, abs=2)


@pytest.mark.parametrize(
    ("cmap", "used"), [("turbo", "RdBu_r"), ("coolwarm", "coolwarm"), ("viridis", "viridis")], ids=str
)
def test_signed_maps_have_a_diverging_table_unless_another_is_chosen(out, cmap, used):
    options = PictureOptions(cmap=cmap, alpha=1.0, overlay_format="png")
    drawn = heat(values=np.full((2, 2), -4, np.float32), signed=True, minimum=-4.0, maximum=-4.0)
    over, map_ = (read(out.path / record["path"])[0] for record in write(out, drawn, PLACE, options)[:2])
    lowest = colour.table(used)[0].tolist()
    assert over[20, 30].tolist() == lowest
    assert map_[-20, 40].tolist() == lowest


def test_sheet_is_one_page_of_all_maps(out):
    heats = (heat(vmax=4.0), heat(method="layercam", vmax=4.0, values=np.full((2, 2), 2, np.float32)))
    options = PictureOptions(cmap="gray", alpha=1.0)
    (record,) = write(out, Sheet(0, heats), PLACE, options)
    expected = {
        "path": "cat/sheet.png", "kind": "gradcam", "part": "sheet", "format": "png", "image": "photos/cat.png",
        "layer": None, "method": None, "target": None, "status": "ok",
    }  # fmt: skip
    assert expected.items() <= record.items()
    page = read(out.path / record["path"])[0]
    weight = 0.3 + 0.7 * 0.5
    foot = 10 + 6 + text.line_height(10)
    np.testing.assert_allclose(page[-foot - 75, -10 - 112, 0], (1 - weight) * 90 + weight * 128, atol=2)


def test_sheet_without_a_picture_is_nothing(out):
    assert write(out, Sheet(0, (heat(),)), Place(), PictureOptions()) == ()


def test_pair_is_one_picture(out):
    old, new = np.float32([[1, 0]]), np.float32([[0, 2]])
    both = Pair(0, Site("layer4"), "gradcam", CAT, old, new, {"iou": 0.25, "spearman": float("nan")})
    (record,) = write(out, both, PLACE, PictureOptions(cmap="gray"))
    expected = {
        "path": "cat/compare.layer4.gradcam.285-Egyptian-cat.png", "kind": "compare", "part": "pair",
        "format": "png", "image": "photos/cat.png", "layer": "layer4", "call": 0, "method": "gradcam",
        "target": 285, "label": "Egyptian cat", "scores": {"iou": 0.25, "spearman": "nan"},
    }  # fmt: skip
    assert expected.items() <= record.items()
    page = read(out.path / record["path"])[0]
    panel = 256 + 10
    middle = page.shape[0] - 100
    assert page[middle, 20].tolist() == [90, 120, 150], "what the model saw"
    assert page[middle, [20 + panel, panel + 250, 20 + 2 * panel, 2 * panel + 250], 0].tolist() == [
        255,
        0,
        0,
        255,
    ]


def test_pair_of_signed_and_padded_maps(out):
    old, new = np.float32([[-1, 0, 1, 1]]), np.float32([[-2, 0, 2, 2]])
    both = Pair(0, Site("layer4"), "gradcam", None, old, new, signed=True, covers=(1.0, 0.25))
    (record,) = write(out, both, PLACE, PictureOptions(cmap="turbo"))
    page = read(out.path / record["path"])[0]
    lowest = colour.table("RdBu_r")[0].tolist()
    middle = page.shape[0] - 100
    assert [page[middle, 20 + column * 266].tolist() for column in (1, 2)] == [lowest, lowest]
    np.testing.assert_allclose(page[middle, 266 + 240], colour.table("RdBu_r")[51], atol=8)  # 0.6 of it


def test_box_is_on_both_pictures(out):
    target = Target("box1", 17, "cat", box=(8.0, 8.0, 24.0, 24.0))
    options = PictureOptions(cmap="gray", alpha=0.0, overlay_format="png")
    given = heat(values=np.full((2, 2), 4, np.float32), target=target)
    large = replace(
        PLACE, picture=PICTURE.resize((600, 400)), view=View((600, 400), (100, 0, 500, 400), (32, 32))
    )
    over, map_ = (read(out.path / record["path"])[0] for record in write(out, given, large, options)[:2])
    assert over[250, 200:204, 0].tolist() == [24, 255, 255, 24]
    left = 10 + 384 // 4
    assert map_[-10 - 384 // 2, left - 1 : left + 3, 0].tolist() == [255, 32, 255, 255]


def test_the_note_is_on_the_sheet(out):
    plain, noted = (
        read(out.path / write(out, Sheet(0, (heat(),)), place, PictureOptions())[0]["path"])[0]
        for place in (PLACE, replace(PLACE, note="RANDOM WEIGHTS"))
    )
    red = [int(np.count_nonzero((page == (192, 0, 32)).all(axis=-1))) for page in (plain, noted)]
    assert red[0] == 0
    assert red[1] > 20
