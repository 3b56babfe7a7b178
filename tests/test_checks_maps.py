"""Maps against those of an earlier run: which are taken for the same, what is said of them, and what fails."""

from __future__ import annotations

import csv
import io
import json
import math
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from command import MODELS, Shell, manifest

from hookscope.artifacts import Heat, MapStatus, Target
from hookscope.checks.baseline import Baseline
from hookscope.checks.mapkeys import key_in, key_of
from hookscope.checks.maps import MapComparison, check_limits
from hookscope.checks.pictures import Pairing
from hookscope.checks.verdicts import COLUMNS
from hookscope.errors import NothingMeasured, UsageError
from hookscope.images import View
from hookscope.layers import Site
from hookscope.output import tables
from hookscope.output.directory import OutputDir
from hookscope.output.manifest import Manifest, to_json
from hookscope.output.writers import PictureOptions, Place, prepared

CAT, DOG, FISH = Target("top1", 1, "cat"), Target("top1", 2, "dog"), Target("top2", 3)
SITE = Site("conv")


def values(seed, shape=(8, 8)):
    return np.random.default_rng(seed).random(shape, np.float32)


def heat(array=None, *, target=CAT, status=MapStatus.OK, site=SITE, method="gradcam"):
    array = values(0) if array is None else array
    return Heat("gradcam", 0, site, method, array, 0.0, 1.0, MapStatus(status), target)


def baseline(folder, *maps):
    """An output directory with these maps, (picture, heat), written as every run's are."""
    out = OutputDir(folder, command="gradcam")
    out.begin()
    view = View((24, 20), (0, 0, 24, 20), (24, 20))
    for number, (image, one) in enumerate(maps):
        prepared(out, one, Place(str(number), image, view=view), PictureOptions())()
    out.finish(Manifest("gradcam", {}))
    return Baseline.read(folder)


def concluded(earlier, *maps, **limits):
    comparison = MapComparison(earlier, **limits)
    for image, one in maps:
        comparison.add(image, one)
    return comparison.conclude()


def rules(comparison):
    return [finding.rule for finding in comparison.findings]


def rows(comparison):
    return [dict(zip(COLUMNS, row, strict=True)) for row in comparison.table.rows]


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def ran(shell, out, words="", pictures="pics"):
    done = shell(f"gradcam net.py:build {pictures} -l conv -l relu -m gradcam -m layercam -o {out} {words}")
    assert done.code == 0, done.err


def made(directory):
    """The maps of a run, as its task hands them over."""
    for record in manifest(directory)["artifacts"]:
        if record["part"] == "raw":
            target = Target(record.get("asked", "top1"), record["target"], record["label"])
            site = Site(record["layer"], record["call"], record["output"])
            array = np.load(Path(directory, record["path"]))
            status = MapStatus(record["status"])
            yield record["image"], Heat("gradcam", 0, site, record["method"], array, 0, 1, status, target)


def checkpoint(path, noise):
    """The weights of the small net, changed a little."""
    space: dict = {}
    exec(MODELS, space)
    net = space["Net"]()
    generator = torch.Generator().manual_seed(3)
    state = {
        name: p + noise * torch.randn(p.shape, generator=generator) for name, p in net.state_dict().items()
    }
    torch.save(state, path)


# Real runs.


def test_the_same_run_twice_is_the_same(shell):
    ran(shell, "a", "-t 0")
    ran(shell, "b", "-t 0")
    found = concluded(Baseline.read("a"), *made("b"), min_iou=1.0, min_corr=1.0)
    assert (found.findings, found.warnings, found.worst) == ((), (), ())
    assert len(found.table.rows) == 12
    assert found.lines == ("12 maps compared with a, 12 of them the same",)
    assert {(row["status"], row["baseline_status"]) for row in rows(found)} <= {
        (status, status) for status in ("ok", "negative-only")
    }


def test_another_checkpoint_gives_the_figures_of_scipy(shell):
    stats = pytest.importorskip("scipy.stats")
    checkpoint("other.pt", 0.2)
    ran(shell, "a", "-t 0 -t 1 -t 2")
    ran(shell, "b", "-t 0 -t 1 -t 2 --weights other.pt")
    earlier = {(image, key_of(one)): one for image, one in made("a")}
    found = concluded(Baseline.read("a"), *made("b"), worst=3)
    seen = []
    for row, (image, one) in zip(rows(found), made("b"), strict=True):
        before = earlier[image, key_of(one)]
        assert (row["image"], row["layer"], row["method"], row["target"]) == (
            image, one.site.layer, one.method, one.target.index,
        )  # fmt: skip
        assert (row["status"], row["baseline_status"]) == (one.status, before.status)
        if one.status == before.status == "ok":
            wanted = stats.spearmanr(one.values.ravel(), before.values.ravel()).statistic
            assert row["spearman"] == pytest.approx(wanted, abs=1e-6)
            seen.append(row)
        else:
            assert row["spearman"] is None
    assert len(seen) > 5
    assert found.table.scores["min_iou"] == min(row["iou"] for row in seen)
    assert found.table.scores["median_spearman"] == np.median([row["spearman"] for row in seen])
    assert found.table.scores["max_shift"] == max(row["shift"] for row in seen)
    least = sorted(seen, key=lambda row: (row["iou"], row["spearman"]))[:3]
    assert [(pair.likeness.iou, pair.likeness.spearman) for pair in found.worst] == [
        (row["iou"], row["spearman"]) for row in least
    ]


def test_fewer_pictures_than_the_baseline_has_are_no_fault(shell):
    ran(shell, "a", "-t 0")
    ran(shell, "b", "-t 0", pictures="pics/1.png")
    found = concluded(Baseline.read("a"), *made("b"), min_corr=0.9)
    assert (found.findings, len(found.table.rows)) == ((), 4)


def test_fewer_layers_than_the_baseline_has_are_one(shell):
    ran(shell, "a", "-t 0", pictures="pics/1.png")
    found = concluded(Baseline.read("a"), *(pair for pair in made("a") if pair[1].site == SITE), min_corr=0.9)
    assert rules(found) == ["not-in-run"] * 2
    assert found.findings[0].layer == "relu"
    assert found.findings[0].message == "pics/1.png, relu by gradcam for class 0: this run made no such map"


def test_the_same_pictures_under_another_directory_are_found(shell):
    (shell.folder / "elsewhere").mkdir()
    (shell.folder / "pics").rename(shell.folder / "elsewhere/pics")
    ran(shell, "a", "-t 0", pictures="elsewhere/pics")
    (shell.folder / "elsewhere/pics").rename(shell.folder / "photos")
    ran(shell, "b", "-t 0", pictures=str(shell.folder / "photos"))
    found = concluded(Baseline.read("a"), *made("b"), min_iou=1)
    assert found.findings == ()
    assert found.warnings == (
        "'0.png' is compared with the baseline's 'elsewhere/pics/0.png', going by the file name "
        "(and 2 more like this)",
    )


# Which maps are the same.

KINDS = {
    "class": CAT,
    "no-label": FISH,
    "no-class": Target("norm"),
    "against": replace(CAT, against=(2, 3)),
    "box": replace(CAT, name="box1", box=(1.0, 2.0, 9.0, 8.0)),
    "other-box": replace(CAT, name="box2", box=(1.0, 2.0, 9.0, 8.0)),
    "none": None,
}


@pytest.mark.parametrize("target", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("site", [SITE, Site("a.b", 1), Site("a", 0, "out")], ids=str)
def test_a_map_and_its_record_have_the_same_key(tmp_path, target, site):
    one = heat(target=target, site=site)
    (record,) = baseline(tmp_path / "out", ("a/0.png", one)).records("gradcam", "raw")
    assert key_in(record) == ("a/0.png", key_of(one))


def test_no_two_kinds_of_map_have_the_same_key():
    keys = [key_of(heat(target=target)) for target in KINDS.values()]
    keys += [key_of(heat(site=Site("conv", 1))), key_of(heat(site=Site("conv", 0, "out")))]
    keys += [key_of(heat(method="layercam"))]
    assert len(set(keys)) == len(keys)


def test_what_was_typed_does_not_matter_where_the_class_is_the_same(tmp_path):
    earlier = baseline(tmp_path / "out", ("0.png", heat()))
    found = concluded(earlier, ("0.png", heat(target=replace(CAT, name="cat"))), min_iou=1)
    assert found.findings == ()


def test_records_of_an_older_hookscope_are_read(tmp_path):
    baseline(tmp_path / "out", ("0.png", heat()))
    path = tmp_path / "out/manifest.json"
    found = json.loads(path.read_text())
    for record in found["artifacts"]:
        for key in ("asked", "against", "box", "scores"):
            record.pop(key, None)
    path.write_text(json.dumps(found))
    assert concluded(Baseline.read(path), ("0.png", heat()), min_iou=1).findings == ()


PAIRS = {
    "same": (["a/0.png"], ["a/0.png"], {"a/0.png": "a/0.png"}),
    "name": (["b/0.png"], ["a/0.png", "a/1.png"], {"b/0.png": "a/0.png"}),
    "other-name": (["b/0.png"], ["a/1.png"], {}),
    "case": (["0.PNG"], ["0.png"], {}),
    "two-there": (["c/0.png"], ["a/0.png", "b/0.png"], {}),
    "more-folders": (["x/cat/0.png"], ["cat/0.png", "dog/0.png"], {"x/cat/0.png": "cat/0.png"}),
    "fewer-folders": (["cat/0.png", "dog/0.png"], ["v/cat/0.png", "v/dog/0.png"],
                      {"cat/0.png": "v/cat/0.png", "dog/0.png": "v/dog/0.png"}),
    "two-here": (["b/0.png", "c/0.png"], ["a/0.png"], {}),
    "same-wins-late": (["b/0.png", "a/0.png"], ["a/0.png"], {"a/0.png": "a/0.png"}),
    "nearer-wins": (["b/0.png", "x/a/0.png"], ["a/0.png"], {"x/a/0.png": "a/0.png"}),
    "absolute": (["/0.png"], ["0.png"], {"/0.png": "0.png"}),
}  # fmt: skip


@pytest.mark.parametrize(("here", "there", "wanted"), PAIRS.values(), ids=PAIRS)
def test_pictures_are_paired_by_their_paths(here, there, wanted):
    pairing = Pairing(there)
    for path in here:
        pairing.partner(path)
    assert pairing.settled() == wanted
    for path in set(here) - set(wanted):
        assert pairing.why(path)


def test_a_picture_whose_place_is_taken_by_a_better_one_counts_as_absent(tmp_path):
    earlier = baseline(tmp_path / "out", ("a/0.png", heat()))
    found = concluded(earlier, ("b/0.png", heat(values(1))), ("a/0.png", heat()), min_iou=0.9)
    assert rules(found) == ["not-in-baseline"]
    assert "b/0.png" in found.findings[0].message
    assert [row["iou"] for row in rows(found)] == [None, 1.0]
    assert found.worst == ()


def test_a_picture_that_is_named_twice_is_compared_in_turn(tmp_path):
    maps = [("0.png", heat()), ("0.png", heat(values(1)))]
    earlier = baseline(tmp_path / "out", *maps)
    assert concluded(earlier, *maps, min_iou=1).findings == ()
    assert rules(concluded(earlier, maps[0], min_iou=1)) == ["not-in-run"]
    assert rules(concluded(earlier, *maps, maps[0], min_iou=1)) == ["not-in-baseline"]


# What is said.

BAD = ["blank", "negative-only", "zero-gradient", "non-finite", "undefined"]


@pytest.mark.parametrize("status", BAD)
def test_a_map_whose_status_changed_is_not_compared_by_numbers(tmp_path, status):
    empty = heat(np.full((8, 8), np.nan, np.float32), status=status)
    for old, new, words in ((heat(), empty, f"was ok, is {status}"), (empty, heat(), f"was {status}, is ok")):
        found = concluded(baseline(tmp_path / words, ("0.png", old)), ("0.png", new), min_iou=0.1)
        (finding,) = found.findings
        assert finding.message == f"0.png, conv by gradcam for 'cat' (1): {words}"
        assert (finding.rule, finding.severity, finding.layer) == ("status-changed", "error", "conv")
        assert math.isnan(finding.value)
        (row,) = rows(found)
        assert (row["status"], row["baseline_status"], row["spearman"]) == (new.status, old.status, None)


@pytest.mark.parametrize("status", BAD)
def test_maps_that_mean_nothing_in_the_same_way_are_the_same(tmp_path, status):
    old, new = (heat(np.full((8, 8), value, np.float32), status=status) for value in (np.nan, np.inf))
    found = concluded(baseline(tmp_path / "out", ("0.png", old)), ("0.png", new), min_iou=1, min_corr=1)
    assert (found.findings, found.warnings, found.table.scores) == ((), (), {})
    assert found.lines[0].endswith("1 of them the same")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_told_whatever_the_record_says(tmp_path, value):
    array = values(0)
    array[0, 0] = value
    found = concluded(baseline(tmp_path / "a", ("0.png", heat(array))), ("0.png", heat()), min_iou=0)
    assert found.findings[0].message.endswith("was non-finite, is ok")
    assert rows(found)[0]["baseline_status"] == "non-finite"
    found = concluded(baseline(tmp_path / "b", ("0.png", heat())), ("0.png", heat(array)), min_iou=0)
    assert found.findings[0].message.endswith("was ok, is non-finite")


@pytest.mark.parametrize("scale", [3e38, 1e-44, -3e38], ids=["huge", "tiny", "negative"])
def test_values_at_the_ends_of_float32_are_compared(tmp_path, scale):
    earlier = baseline(tmp_path / "out", ("0.png", heat()))
    (row,) = rows(concluded(earlier, ("0.png", heat((values(1) * scale).astype(np.float32)))))
    assert math.isfinite(row["spearman"])
    assert 0 <= row["iou"] <= 1


def test_maps_of_two_resolutions_are_compared_all_the_same(tmp_path):
    slope = np.add.outer(np.arange(4), 10 * np.arange(4)).astype(np.float32)
    earlier = baseline(tmp_path / "out", ("0.png", heat(slope)))
    larger = np.kron(slope, np.ones((2, 2), np.float32))
    found = concluded(earlier, ("0.png", heat(larger)), min_corr=0.9)
    assert (rows(found)[0]["spearman"] > 0.9, found.findings) == (True, ())
    assert rules(concluded(earlier, ("0.png", heat(-larger)), min_corr=0.9)) == ["min-corr"]
    assert {pair.earlier.shape for pair in found.worst} == {(4, 4)}


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({"min_iou": 0.9}, ["min-iou"]),
        ({"min_corr": 0.9}, ["min-corr"]),
        ({"min_iou": 0.9, "min_corr": 0.9}, ["min-iou", "min-corr"]),
        ({"min_iou": 0, "min_corr": -1}, []),
        ({}, []),
    ],
    ids=["iou", "corr", "both", "lowest", "none"],
)
def test_a_map_below_a_limit_is_a_finding(tmp_path, limits, wanted):
    earlier = baseline(tmp_path / "out", ("0.png", heat()))
    found = concluded(earlier, ("0.png", heat(values(1))), **limits)
    assert rules(found) == wanted
    (row,) = rows(found)
    for finding in found.findings:
        value = row["iou" if finding.rule == "min-iou" else "spearman"]
        assert (finding.value, finding.limit) == (value, 0.9)
        name = "overlap (IoU)" if finding.rule == "min-iou" else "rank correlation"
        assert finding.message == (
            f"0.png, conv by gradcam for 'cat' (1): the {name} with the baseline's map is {value:.4g}, below 0.9"
        )


def test_a_figure_on_the_limit_passes(tmp_path):
    earlier = baseline(tmp_path / "out", ("0.png", heat()))
    shifted = heat(values(1))
    alike = MapComparison(earlier).add("0.png", shifted)
    limits = {"min_iou": alike.iou, "min_corr": alike.spearman}
    assert concluded(earlier, ("0.png", shifted), **limits).findings == ()
    above = {name: math.nextafter(limit, 1) for name, limit in limits.items()}
    assert rules(concluded(earlier, ("0.png", shifted), **above)) == ["min-iou", "min-corr"]


def test_a_correlation_that_is_undefined_fails_unless_the_maps_are_the_same(tmp_path):
    flat = heat(np.ones((8, 8), np.float32))
    earlier = baseline(tmp_path / "out", ("0.png", flat))
    assert concluded(earlier, ("0.png", flat), min_corr=1).findings == ()
    found = concluded(earlier, ("0.png", heat()), min_corr=-1)
    assert rules(found) == ["min-corr"]
    assert math.isnan(found.findings[0].value)
    assert found.findings[0].message.endswith("is undefined, not -1")
    assert [pair.image for pair in found.worst] == ["0.png"]


def test_another_prediction_is_one_finding_that_names_the_earlier(tmp_path):
    earlier = baseline(tmp_path / "out", ("0.png", heat()), ("1.png", heat()))
    found = concluded(earlier, ("0.png", heat(target=DOG)), ("1.png", heat()), min_iou=0.5)
    (finding,) = found.findings
    assert finding.rule == "not-in-baseline"
    assert finding.message == "0.png, conv by gradcam for 'dog' (2): the baseline explains 'cat' (1) there"
    assert [(row["target"], row["status"], row["baseline_status"]) for row in rows(found)] == [
        (2, "ok", ""), (1, "ok", "ok"), (1, "", "ok"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (("1.png", heat()), "1.png, conv by gradcam for 'cat' (1): the baseline has no such picture"),
        (("0.png", heat(site=Site("fc"))), "the baseline has no map of this layer"),
        (("0.png", heat(method="layercam")), "the baseline has no map of this layer by this method"),
        (("0.png", heat(target=FISH)), "conv by gradcam for class 3: the baseline explains 'cat' (1) there"),
    ],
    ids=["picture", "layer", "method", "class"],
)
def test_a_map_that_the_baseline_has_not_is_a_finding_under_a_gate_and_else_a_warning(tmp_path, one, words):
    earlier = baseline(tmp_path / "out", ("0.png", heat()))
    gated = concluded(earlier, ("0.png", heat()), one, min_iou=0.5)
    assert rules(gated) == ["not-in-baseline"]
    assert gated.findings[0].message.endswith(words)
    assert gated.warnings == ()
    free = concluded(earlier, ("0.png", heat()), one, one)
    assert free.findings == ()
    assert free.warnings == (f"{gated.findings[0].message} (and 1 more like this)",)


NOTHING = {
    "pictures": (("1.png", heat()), "its pictures are 0.png, here they are 1.png"),
    "layers": (("0.png", heat(site=Site("fc", 1))), "its layers are conv, here they are fc@1"),
    "methods": (("0.png", heat(method="layercam")), "its methods are gradcam, here they are layercam"),
    "targets": (("0.png", heat(target=FISH)), "its targets are class 1, here they are class 3"),
}


@pytest.mark.parametrize("limits", [{}, {"min_iou": 0.5}], ids=["free", "gated"])
@pytest.mark.parametrize(("one", "words"), NOTHING.values(), ids=NOTHING)
def test_nothing_to_compare_is_a_usage_error_with_the_reason(tmp_path, one, words, limits):
    earlier = baseline(tmp_path / "out", ("0.png", heat()))
    with pytest.raises(UsageError) as caught:
        concluded(earlier, one, **limits)
    assert caught.value.message.startswith("nothing to compare with the baseline '")
    assert caught.value.message.endswith(words)


def test_a_run_without_a_map_measured_nothing(tmp_path):
    with pytest.raises(NothingMeasured):
        concluded(baseline(tmp_path / "out", ("0.png", heat())))


def test_a_map_of_the_baseline_that_was_changed_is_told_with_its_path(tmp_path):
    maps = [("0.png", heat()), ("1.png", heat())]
    earlier = baseline(tmp_path / "out", *maps)
    spoilt = earlier.records("gradcam", "raw")[0]
    (tmp_path / "out" / spoilt.path).write_bytes(b"")
    found = concluded(earlier, *maps, min_iou=0.5)
    assert rules(found) == ["baseline-unreadable"]
    assert spoilt.path in found.findings[0].message
    assert spoilt.path in concluded(earlier, *maps).warnings[0]
    with pytest.raises(UsageError, match=r"nothing to compare .*its hash differs"):
        concluded(earlier, maps[0])


JUNK = {
    "image": [1],
    "layer": {"a": 1},
    "call": 1e308,
    "output": 7,
    "method": ["gradcam"],
    "target": [[1]],
    "against": [["x"]],
}


@pytest.mark.parametrize("key", JUNK)
def test_a_record_of_nonsense_is_refused(tmp_path, key):
    folder = baseline(tmp_path / "out", ("0.png", heat())).root
    found = json.loads((folder / "manifest.json").read_text())
    for record in found["artifacts"]:
        record[key] = JUNK[key]
    (folder / "manifest.json").write_text(json.dumps(found))
    with pytest.raises(UsageError, match=f"is broken: its {key} is no such thing"):
        MapComparison(Baseline.read(folder))


@pytest.mark.parametrize("limit", [math.nan, math.inf, -math.inf, 1.01, -1.01])
@pytest.mark.parametrize("flag", ["min_iou", "min_corr"])
def test_a_limit_out_of_range_is_refused(flag, limit):
    limits = {"min_iou": None, "min_corr": None, flag: limit}
    with pytest.raises(UsageError, match=f"--{flag.replace('_', '-')} .* is out of range"):
        check_limits(**limits)


@pytest.mark.parametrize("limits", [(0, -1), (1, 1), (None, None), (0.5, 0)])
def test_a_limit_in_range_is_taken(limits):
    check_limits(*limits)


def test_an_overlap_below_zero_is_no_limit():
    with pytest.raises(UsageError, match=r"--min-iou -0\.5 is out of range"):
        check_limits(-0.5, None)


def test_the_worst_are_those_least_alike_whatever_their_order(tmp_path):
    maps = [(f"{number}.png", heat(values(number))) for number in range(12)]
    earlier = baseline(tmp_path / "out", *((image, heat()) for image, _ in maps))
    orders = [maps, maps[::-1], maps[5:] + maps[:5]]
    found = [concluded(earlier, *order, worst=5).worst for order in orders]
    assert len({tuple(pair.image for pair in pairs) for pairs in found}) == 1
    figures = [(pair.likeness.iou, pair.likeness.spearman) for pair in found[0]]
    assert all(one <= other for one, other in pairwise(figures))
    assert "0.png" not in {pair.image for pair in found[0]}
    for pair in found[0]:
        np.testing.assert_array_equal(pair.earlier, values(0))
        np.testing.assert_array_equal(pair.heat.values, values(int(pair.image.removesuffix(".png"))))
    assert concluded(earlier, *maps, worst=0).worst == ()


def test_the_table_and_the_findings_can_be_written(tmp_path):
    earlier = baseline(tmp_path / "out", ("=0.png", heat()), ("1.png", heat(np.ones((8, 8), np.float32))))
    found = concluded(earlier, ("=0.png", heat(values(1))), ("1.png", heat()), min_iou=1, min_corr=1)
    read = list(csv.DictReader(io.StringIO(tables.to_csv(found.table))))
    assert tuple(read[0]) == COLUMNS
    assert float(read[0]["spearman"]) == rows(found)[0]["spearman"]
    assert read[1]["spearman"] == "nan"
    assert found.table.kind == "compare"
    assert json.loads(to_json(found.findings))[-1]["value"] == "nan"


def test_memory_does_not_grow_with_the_maps(tmp_path):
    shape, count = (128, 128), 60
    one = heat(values(0, shape))
    earlier = baseline(tmp_path / "out", *((f"{number}.png", one) for number in range(count)))
    comparison = MapComparison(earlier, worst=2)
    comparison.add("0.png", heat(values(1, shape)))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(1, count):
        comparison.add(f"{number}.png", heat(values(number + 1, shape)))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # Of 59 pairs of 128 KiB, two at most are kept.
    assert grown < 4 * 2 * one.values.nbytes
