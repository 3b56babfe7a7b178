"""`--tensorboard`: what a run shows, read back by TensorBoard's own reader beside the files of the same run."""

from __future__ import annotations

import csv
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from command import Shell, assert_whole, picture
from safetensors.numpy import load_file

from hookscope.artifacts import Heat, MapStatus, Table, Target
from hookscope.layers import Site
from hookscope.output import tensorboard
from hookscope.output.board import Board, tag_of
from hookscope.output.directory import OutputDir
from hookscope.output.tensorboard import TensorBoard
from hookscope.output.writers import PictureOptions, Place, prepared

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="the extra `tensorboard`"
)


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def read(directory="tb"):
    kinds = ("scalars", "images", "histograms", "tensors")
    return accumulator.EventAccumulator(str(directory), size_guidance=dict.fromkeys(kinds, 0)).Reload()


def text(found, tag):
    return found.Tensors(tag)[0].tensor_proto.string_val[0].decode()


def pictures(found):
    """Each tag's pictures by step."""
    return {
        tag: {event.step: event.encoded_image_string for event in found.Images(tag)}
        for tag in found.Tags()["images"]
    }


def scalars(found):
    return {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_featuremaps_shows_its_grids_and_values(shell):
    assert shell("featuremaps net.py:build pics -l conv -l relu --raw -o out --tensorboard tb").code == 0
    assert_whole("out")
    found = read()
    assert pictures(found) == {
        f"featuremaps/{layer}/grid": {step: Path(f"out/{step}/{layer}.png").read_bytes() for step in range(3)}
        for layer in ("conv", "relu")
    }
    for step, event in enumerate(found.Histograms("featuremaps/conv/values")):
        (values,) = load_file(f"out/{step}/conv.safetensors").values()
        assert event.step == step
        assert event.histogram_value.num == values.size
        assert (event.histogram_value.min, event.histogram_value.max) == (values.min(), values.max())
    assert [line for line in text(found, "pictures").splitlines() if "png" in line] == [
        f"| {step} | pics/{step}.png |" for step in range(3)
    ]


@pytest.mark.parametrize("how", ["", " --vmax run"], ids=["range-of-each", "range-of-run"])
def test_gradcam_shows_its_maps_and_scores(shell, how):
    line = "gradcam net.py:build pics -l relu -m gradcam -m layercam --sheet -o out"
    assert shell(f"{line} --tensorboard tb{how}").code == 0
    found = read()
    seen = pictures(found)
    tags = {f"gradcam/relu/{method}/{target}" for method in ("gradcam", "layercam") for target in ("top1",)}
    assert set(seen) == {f"{tag}/{part}" for tag in tags for part in ("overlay", "heatmap")} | {
        "gradcam/sheet"
    }
    assert all(set(steps) == {0, 1, 2} for steps in seen.values())
    records = json.loads(Path("out/manifest.json").read_text())["artifacts"]
    paths = {
        (one["image"], one["method"], one["asked"], one["part"]): one["path"]
        for one in records
        if one["method"]
    }
    for step in range(3):
        path = paths[f"pics/{step}.png", "layercam", "top1", "overlay"]
        assert seen["gradcam/relu/layercam/top1/overlay"][step] == Path("out", path).read_bytes()
        raw = np.load(Path("out", paths[f"pics/{step}.png", "layercam", "top1", "raw"]))
        kept = found.Histograms("gradcam/relu/layercam/top1/values")[step].histogram_value
        assert (kept.num, kept.sum) == (raw.size, pytest.approx(raw.sum(dtype=np.float64), rel=1e-6))
    top = [image["top"][0] for image in json.loads(Path("out/manifest.json").read_text())["images"]]
    assert list(scalars(found)["gradcam/relu/gradcam/top1/probability"].values()) == pytest.approx(
        [one["probability"] for one in top], rel=1e-5
    )


@pytest.mark.filterwarnings("default")
def test_gradnorm_shows_the_figures_of_its_table(shell):
    assert shell("gradnorm net.py:build pics -o out --tensorboard tb").code in (0, 1)
    found = scalars(read())
    table = {row["name"]: row for row in rows("out/gradnorm.csv") if row["kind"] in ("parameter", "param")}
    assert table
    for name, row in table.items():
        assert found[f"gradnorm.grad_norm/{name}"] == {0: pytest.approx(float(row["grad_norm"]), rel=1e-6)}
    total = next(row for row in rows("out/gradnorm.csv") if row["kind"] == "total")
    assert found["gradnorm/total_norm"][0] == pytest.approx(float(total["grad_norm"]), rel=1e-6)
    assert "# Gradient norms" in text(read(), "gradnorm/summary")
    assert pictures(read()).keys() == {f"gradnorm/{path.stem}" for path in Path("out").glob("*.png")}


def test_stats_shows_the_figures_and_histograms_of_its_table(shell):
    assert shell("stats net.py:build pics -l conv -l relu -o out --tensorboard tb").code in (
        0,
        1,
    )
    found = read()
    for row in rows("out/stats.csv"):
        if row["same_as"]:
            continue
        place = str(Site(row["layer"], int(row["call"]), row["output"])) + "<" * (row["side"] == "input")
        assert scalars(found)[f"stats.mean/{place}"][0] == pytest.approx(float(row["mean"]), rel=1e-5)
        kept = found.Histograms(f"stats.values/{place}")[0].histogram_value
        assert kept.num == int(row["sampled"])
        assert (kept.min, kept.max) == pytest.approx(
            (float(row["min"]), float(row["max"])), rel=0.1, abs=1e-9
        )
        assert kept.sum / kept.num == pytest.approx(float(row["mean"]), rel=0.1, abs=0.02)


def test_run_shows_all_of_its_probes_in_one_place(shell):
    shell.toml(
        "all.toml",
        'model = "net.py:build"\nimages = ["pics"]\n[featuremaps]\nlayer = ["conv"]\n'
        '[gradcam]\nlayer = ["relu"]\n[gradnorm]\n',
    )
    assert shell("run all.toml -o out --tensorboard tb").code in (0, 1)
    found = read()
    assert {tag.split("/")[0] for tag in found.Tags()["images"]} == {"featuremaps", "gradcam", "gradnorm"}
    assert "gradnorm/total_norm" in found.Tags()["scalars"]
    assert len(list(Path("tb").iterdir())) == 1


def test_a_configuration_may_say_it(shell):
    shell.toml("own.toml", 'tensorboard = "tb"\n')
    assert shell("featuremaps net.py:build pics -l conv -o out --config own.toml").code == 0
    assert "featuremaps/conv/grid" in read().Tags()["images"]


def test_the_files_are_the_same_without_it(shell):
    for out, more in (("plain", ""), ("shown", " --tensorboard tb")):
        assert shell(f"gradcam net.py:build pics -l relu -o {out}{more}").code == 0
    same = [
        {path.relative_to(top): path.read_bytes() for path in Path(top).rglob("*.*")}
        for top in ("plain", "shown")
    ]
    assert same[0] == same[1]


def test_webp_is_shown_as_png(shell):
    assert (
        shell("featuremaps net.py:build pics/0.png -l conv --format webp -o out --tensorboard tb").code == 0
    )
    assert pictures(read())["featuremaps/conv/grid"][0].startswith(b"\x89PNG")


def test_values_that_are_not_finite_are_counted(shell):
    assert shell("featuremaps net.py:NotFinite pics/0.png -l . -l conv -o out --tensorboard tb").code in (
        0,
        2,
        5,
    )
    assert shell("gradcam net.py:NotFinite pics/0.png -l conv -o out2 --tensorboard tb").code == 0
    assert scalars(read())["gradcam/conv/gradcam/top1/values/non-finite"][0] > 0


def test_a_picture_that_cannot_be_read_is_no_step(shell):
    Path("pics/1.png").write_bytes(b"no picture")
    assert shell("featuremaps net.py:build pics -l conv -o out --tensorboard tb").code == 4
    assert set(pictures(read())["featuremaps/conv/grid"]) == {0, 2}


def test_an_interrupted_run_shows_what_it_wrote(shell):
    picture(Path("pics/1.png"), 1, low=200, high=255)
    line = "featuremaps net.py:stopped pics -l net.conv --batch-size 1 -o out --tensorboard tb"
    assert shell(line).code == 130
    assert set(pictures(read())["featuremaps/net.conv/grid"]) == {0}
    assert "pics/0.png" in text(read(), "pictures")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("-o out --tensorboard out", 2, "is where the results go"),
        ("-o out --tensorboard out/tb", 2, "is where the results go"),
        ("-o new --tensorboard earlier", 2, "holds the results of a run"),
        ("-o out --tensorboard net.py", 6, "is not a directory"),
        ("-o out --tensorboard ''", 2, "names no directory"),
    ],
    ids=["same", "inside", "earlier-run", "file", "empty"],
)
def test_a_place_that_cannot_serve_is_said_before_anything_runs(shell, words, code, message):
    assert shell("featuremaps net.py:build pics -l conv -o earlier").code == 0
    done = shell(f"featuremaps net.py:broken pics -l conv {words}")  # the model would fail to load
    assert (done.code, message in done.err) == (code, True)
    assert not {"out", "new"} & {path.name for path in Path().iterdir()}


def test_without_the_package_the_hint_installs_it(shell, monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    done = shell("featuremaps net.py:broken pics -l conv -o out --tensorboard tb")
    assert done.code == 2
    assert "hint: pip install 'hookscope[tensorboard]'" in done.err


def test_a_dry_run_writes_nothing(shell):
    assert shell("featuremaps net.py:build pics -l conv -o out --tensorboard tb --dry-run").code == 0
    assert not Path("tb").exists()


def heat(method="gradcam", values=(0.0, 1.0), target=None):
    filled = np.float32([values])
    return Heat("gradcam", 0, Site("a", 1), method, filled, min(values), max(values), MapStatus.OK, target)


@pytest.mark.parametrize(
    ("target", "tag"),
    [
        (None, "gradcam/a@1/gradcam"),
        (Target("top1", 7, "cat"), "gradcam/a@1/gradcam/top1"),
        (Target("3", 3, against=(1, 2)), "gradcam/a@1/gradcam/3 vs 1-2"),
    ],
    ids=["none", "asked", "against"],
)
def test_a_tag_says_what_was_asked(target, tag):
    assert tag_of("gradcam", heat(target=target)) == tag


def test_steps_keep_their_order_whichever_is_ready_first(tmp_path):
    out, board = OutputDir(tmp_path / "out", command="gradcam"), Board(TensorBoard(tmp_path / "tb"))
    out.begin()
    options = PictureOptions(parts=("raw",))
    calls = [
        board.shown(
            prepared(out, heat(values=(step, step + 1)), Place(str(step)), options), "gradcam", step, ""
        )
        for step in range(6)
    ]
    for at in (3, 5, 0, 1):
        calls[at]()
    threads = [threading.Thread(target=calls[at]) for at in (4, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    board.close()
    kept = read(tmp_path / "tb").Histograms("gradcam/a@1/gradcam/values")
    assert [(event.step, event.histogram_value.min) for event in kept] == [(step, step) for step in range(6)]


def test_what_waits_for_what_never_comes_is_shown_at_the_end(tmp_path):
    out, board = OutputDir(tmp_path / "out", command="gradcam"), Board(TensorBoard(tmp_path / "tb"))
    out.begin()
    options = PictureOptions(parts=("raw",))
    calls = [
        board.shown(prepared(out, heat(), Place(str(step)), options), "gradcam", step, f"{step}")
        for step in range(3)
    ]
    calls[2](), calls[1]()
    board.close()
    assert [event.step for event in read(tmp_path / "tb").Histograms("gradcam/a@1/gradcam/values")] == [1, 2]


def test_a_table_of_odd_cells_is_shown_all_the_same(tmp_path):
    columns = ("kind", "name", "grad_norm", "grad_rms", "weight_norm", "non_finite")
    cells = (("parameter", "a", float("nan"), None, 10**400, True), ("total", "", 1e300, "", 3, 2))
    board = Board(TensorBoard(tmp_path / "tb"))
    board.conclusion(
        "gradnorm", [Table("gradnorm", "t", columns, cells, scores={"loss": float("inf")})], (), {}
    )
    board.close()
    found = scalars(read(tmp_path / "tb"))
    assert found.keys() == {
        "gradnorm/loss", "gradnorm.grad_norm/a", "gradnorm.weight_norm/a", "gradnorm.grad_norm/total",
        "gradnorm.weight_norm/total", "gradnorm.non_finite/total",
    }  # fmt: skip
