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

from hookscope.artifacts import Heat, MapStatus, Table, Target, Tiles
from hookscope.errors import UsageError
from hookscope.images import View
from hookscope.layers import Site
from hookscope.output import encode, writers
from hookscope.output.directory import OutputDir
from hookscope.output.writers import PictureOptions, Place

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
